"""Layers that are packed beside layers of dense pages, by kernels in Triton's interpreter."""

from __future__ import annotations

from tests.support.batching_cases import Session, greedy, model_of, prompts
from tests.support.kernel_cases import INTERPRETED, child
from tq_hf.ops.triton import pages as triton_pages

test_in_the_interpreter = child(__file__)


def test_kernels_find_pages_between_which_dense_blocks_lie(monkeypatch) -> None:
    kernel_steps, step = [], triton_pages.paged_step
    monkeypatch.setattr(
        triton_pages, "paged_step", lambda *args, **more: kernel_steps.append(args[1]) or step(*args, **more)
    )
    model, inputs = model_of(num_hidden_layers=3), prompts([3, 132])
    with Session(model, "4bit_nc", overrides=dict(balance=False, skip_layers=(1,))) as session:
        assert session.run(inputs, greedy(3)) == [session.oracle.generate(prompt, 3) for prompt in inputs]
        packed = {id(session.cache.allocator.pages[layer]) for layer in (0, 2)}
        assert {id(pages) for pages in kernel_steps} == (packed if INTERPRETED else set())
