"""Models whose full and sliding layers have heads of other widths and numbers, at the sizes they are published in, and
whose last layers read the keys and values of others (Gemma 4, Gemma 3n); packed layers beside dense ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.support.batching_cases import Session, gemma4, gemma4_sharing, greedy, model_of, prompts
from tests.support.kernel_cases import INTERPRETED, child
from tq_hf.batching.allocators import page_owners
from tq_hf.ops.triton import pages as triton_pages

test_in_the_interpreter = child(__file__)

MODELS = [gemma4, gemma4_sharing]


@pytest.fixture
def kernel_steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any, bool]]:
    """Channels and pages of each step of a layer by kernels, and whether torch attends from its prompts."""
    found, step = [], triton_pages.paged_step

    def noted(*args: Any, **options: Any) -> torch.Tensor:
        found.append((args[0].query.shape[-1], args[1], options["attend_prompts"] is not None))
        return step(*args, **options)

    monkeypatch.setattr(triton_pages, "paged_step", noted)
    return found


def test_kernels_read_and_write_pages_of_512_channels(kernel_steps: list[tuple[Any, Any, bool]]) -> None:
    """And torch attends from prompts only, where no kernel does."""
    few = dict(num_attention_heads=2, num_key_value_heads=1, num_global_key_value_heads=1)  # the interpreter is slow
    model = gemma4(layer_types=["sliding_attention", "full_attention"], **few)
    (prompt,) = prompts([136])
    with Session(model, overrides=dict(balance=False), max_batch_tokens=130) as session:
        assert session.run([prompt], greedy(2)) == [session.oracle.chunked(prompt, 2, [130])]
    assert {(wide, by_torch) for wide, _, by_torch in kernel_steps} == (
        {(512, True), (512, False)} if INTERPRETED else set()
    )


@pytest.mark.parametrize("make", MODELS)
def test_pages_are_as_large_as_what_they_hold(make: Callable[[], PreTrainedModel]) -> None:
    model = make()
    with Session(model, overrides=dict(balance=False)) as session:
        session.run(prompts([9]), greedy(1))
        cache, config = session.cache, model.config
        owners, kinds = page_owners(config), config.layer_types
        own = [layer for layer in owners if owners[layer] == layer]
        full, sliding = ([i for i in own if kinds[i] == kind] for kind in ("full_attention", "sliding_attention"))
        layout = session.batching.config.layout(512)
        of_full, of_sliding = (config.per_layer_config[kind[0]].num_key_value_heads for kind in (full, sliding))
        assert cache.allocator.bytes_per_block == len(full) * of_full * layout.block_bytes
        assert set(cache.allocator.pages) == set(full) and set(cache.second.pages) == set(sliding)
        row = len(sliding) * 2 * of_sliding * 256 * 4
        rows = cache.second.bytes_per_block // row
        assert cache.second.tokens_per_page == rows and cache.second.bytes_per_block - rows * row < row
        assert cache.bytes_per_sector % cache.allocator.bytes_per_block == 0


def test_kernels_find_pages_between_which_dense_blocks_lie(kernel_steps: list[tuple[Any, Any, bool]]) -> None:
    model, inputs = model_of(num_hidden_layers=3), prompts([3, 132])
    with Session(model, "4bit_nc", overrides=dict(balance=False, skip_layers=(1,))) as session:
        assert session.run(inputs, greedy(3)) == [session.oracle.generate(prompt, 3) for prompt in inputs]
        packed = {id(session.cache.allocator.pages[layer]) for layer in (0, 2)}
        assert {id(pages) for _, pages, _ in kernel_steps} == (packed if INTERPRETED else set())
