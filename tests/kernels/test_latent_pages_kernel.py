"""Steps over pages of latents by kernels against those in torch, request by request, in the interpreter and on a GPU if
there is one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from test_paged_kernel import assert_same_pool
from tq_kernels.types import AttentionOptions, ChannelScales, KeyValue, Sequences

from tests.support.kernel_cases import DEVICE, INTERPRETED, child, relative_rms, runs_kernels
from tests.support.paged_cases import Step, encoded_pages, in_torch, needed_pages, sequences_of, shuffled_table
from tq_hf.config import PRESETS, TurboQuantConfig
from tq_hf.ops import dispatch, latent_pages
from tq_hf.tensors.pages import LayerPages

BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class LatentStep(Step):
    """One step of one layer of latents of D channels. `rotary` are the channels of rotary keys, `rotary_bits` their
    bits."""

    past: tuple[int, ...] = (0, 2, 127, 300)
    sinks: int = 4
    rotary: int = 16
    rotary_bits: int = 8
    dtype: torch.dtype = FP32

    @property
    def config(self) -> TurboQuantConfig:
        return replace(super().config, value_bits=self.rotary_bits, loud=False)


CASES = [
    *(LatentStep(past=(140, 3), new=(1, 1), preset=preset) for preset in ("k8v4", "4bit_nc", "3bit_nc", "2bit_nc")),
    LatentStep(),
    LatentStep(rotary_bits=4, residual=128, past=(1, 131, 260, 387, 700), new=(1,) * 5),
    LatentStep(sinks=0, past=(0, 127, 255, 128), dtype=torch.float16),
    # Sequences that pad, in the middle and at the end, tokens of none, and blocks of others.
    LatentStep(past=(140, 0, 12, 0, 0), new=(1, 0, 1, 0, 0), nobody=3),
    LatentStep(past=(0, 0), new=(0, 0), nobody=2),
    LatentStep(past=(1, 131, 260, 387), new=(1,) * 4, residual=128, prefix=2, rotary=32),
    LatentStep(past=(259, 131), new=(2, 1), rotary=64),  # as wide as latents
    # Several new tokens of each, which complete blocks and sinks; not as many of each.
    LatentStep(new=(3, 3, 3, 3), residual=37),
    LatentStep(new=(3, 3, 3, 3), rotary_bits=4, sinks=0, residual=128, past=(125, 126, 254, 400)),
    LatentStep(past=(1, 130, 0, 0, 500), new=(16, 1, 3, 0, 2), nobody=1, preset="3bit_nc"),
    # Single tokens beside prompts.
    LatentStep(past=(0, 100, 127, 0, 258, 3), new=(30, 1, 130, 0, 1, 1), nobody=2),
    LatentStep(past=(259, 131), new=(1, 1), D=512, rotary=64, Hq=20, dtype=BF16),
    LatentStep(past=(259, 40), new=(2, 1), D=128, rotary=64, Hq=17, dtype=BF16, residual=128),
]
TOLERANCE = {torch.float16: 2e-3, FP32: 1.5e-3, BF16: 8e-3}


@dataclass
class LatentInputs:
    """Tensors of a step. Pages without an owner, and other layers, hold noise."""

    step: LatentStep
    pool: torch.Tensor
    scales: ChannelScales
    query: torch.Tensor
    new: KeyValue
    weight: torch.Tensor
    sequences: Sequences

    @property
    def pages(self) -> LayerPages:
        layout = self.step.config.layout(self.step.D, self.step.rotary)
        pages = LayerPages.of(self.pool[:, 1], self.step.config, layout, self.step.dtype)
        return pages.with_channel_scales(self.scales)

    def to(self, device: torch.device) -> LatentInputs:
        """A copy on `device`."""
        tensors, max_q = self.sequences[:4], self.sequences.max_q
        return LatentInputs(
            self.step,
            self.pool.to(device, copy=True),
            self.scales.map(lambda x: x.to(device)),
            self.query.to(device),
            (self.new[0].to(device), self.new[1].to(device)),
            self.weight.to(device),
            Sequences(*(x.to(device, copy=True) for x in tensors), max_q),
        )

    def run(self) -> torch.Tensor:
        """Output `[T, Hq, Dv]`."""
        expanded = latent_pages.expand(self.weight, self.query.shape, self.new)
        options = AttentionOptions(self.query.shape[3] ** -0.5)
        return latent_pages.latent_step(
            self.query, expanded, self.new, self.weight, self.pages, self.sequences, options
        )[0]

    def encoded(self) -> torch.Tensor:
        """Pages that the step encodes blocks into."""
        return encoded_pages(self.step, self.sequences, self.pages.tensors.first_block_column)


def make(step: LatentStep) -> LatentInputs:
    """Random inputs on the CPU; what sequences have cached is stored in torch."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(step.dtype)

    content, value = 24, 32
    layout = step.config.layout(step.D, step.rotary)
    weight = randn(step.Hq * (content + value), step.D) * step.D**-0.5
    made = [torch.exp(0.3 * randn(1, 1, n).float()).bfloat16().half() for n in (step.D, step.rotary)]
    empty = torch.empty(0, dtype=torch.int32)
    none = Sequences(empty, empty, empty, empty, 1)
    pool = torch.zeros(1, 2, 1, layout.block_bytes, dtype=torch.uint8)
    inputs = LatentInputs(step, pool, ChannelScales(*made), weight, (weight, weight), weight, none)
    needed = needed_pages(step, inputs.pages.tensors.first_block_column)
    inputs.pool = torch.zeros(sum(needed) + step.spare, 2, 1, layout.block_bytes, dtype=torch.uint8)
    inputs.pool.random_(0, 60, generator=generator)
    block_table = shuffled_table(step, needed, generator)

    def tokens(n: int) -> tuple[torch.Tensor, KeyValue]:
        query, latents = randn(1, n, step.Hq, content + step.rotary).transpose(1, 2), randn(1, 1, n, step.D)
        return query, (latents + 2, randn(1, 1, n, step.rotary))

    for i, (past, new) in enumerate(zip(step.past, step.new, strict=True)):
        if past and new:
            inputs.sequences = sequences_of(step, (0,), (past,), block_table[i : i + 1])
            inputs.query, inputs.new = tokens(past)
            with in_torch():
                inputs.run()
    inputs.query, inputs.new = tokens(sum(step.new) + step.nobody)
    inputs.sequences = sequences_of(step, step.past, step.new, block_table)
    return inputs


def check(step: LatentStep) -> None:
    expected = make(step)
    inputs = expected.to(DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        if max(step.new) <= 16:
            patch.setattr(latent_pages.reference, "requests", None)  # nothing is read on the host
        out = inputs.run().cpu()
    with in_torch():
        reference = expected.run()
    own = sum(step.new)
    assert (out[own:] == 0).all()
    if own:
        assert relative_rms(out[:own], reference[:own].double()) <= TOLERANCE[step.dtype]
    assert_same_pool(inputs, expected)


test_all_steps_in_the_interpreter = child(__file__)


@runs_kernels
@pytest.mark.parametrize("step", CASES, ids=str)
def test_agrees_with_the_reference(step: LatentStep) -> None:
    check(step)


@runs_kernels
def test_steps_of_other_kinds_are_left_to_torch() -> None:
    inputs = make(LatentStep(past=(140, 3), new=(17, 1)))
    options = AttentionOptions(1.0)

    def supported(max_q: int, options: AttentionOptions = options, new: Any = inputs.new) -> bool:
        query, states = inputs.query.to(DEVICE), tuple(x.to(DEVICE) for x in new)
        return dispatch.supports_latent_step(query, states, inputs.pages, max_q, options)

    assert supported(1) and supported(16)
    assert not supported(17) and not supported(1, replace_softcap(options))
    assert not supported(1, new=[x.half() for x in inputs.new])


def replace_softcap(options: AttentionOptions) -> AttentionOptions:
    return options._replace(softcap=3.0)


@runs_kernels
def test_scratch_of_every_step_fits_into_what_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    from tq_hf.ops.triton import pages as triton_pages

    sizes: list[int] = []
    allocate = triton_pages.allocator
    monkeypatch.setattr(
        triton_pages, "allocator", lambda *args: lambda size: (sizes.append(4 * size), allocate(*args)(size))[1]
    )
    step = LatentStep(past=(140,) * 6, new=(1,) * 6, Hq=20, spare=40)
    made = make(step).to(DEVICE)
    most = dispatch.latent_scratch(6, 20, 1, step.config, made.pages.layout, made.new[0])
    for count in (1, 2, 6):
        part = replace(step, past=step.past[:count], new=step.new[:count])
        table = made.sequences.block_table[:count].contiguous()
        sequences = sequences_of(part, part.past, part.new, table)
        new = tuple(x[:, :, :count] for x in made.new)
        replace(made, query=made.query[:, :, :count], new=new, sequences=sequences).run()
    assert len(sizes) == 3 and max(sizes) <= most


@runs_kernels
def test_a_captured_step_is_right_for_sequences_that_grew() -> None:
    """One graph of a step of four sequences, replayed with other lengths, tables, tokens and pages; in the interpreter
    the same call again."""
    small = dict(D=64, rotary=16, Hq=4) if INTERPRETED else dict(D=512, rotary=64, Hq=20)
    first, second = (
        LatentStep(past=past, new=new, residual=128, spare=24, dtype=BF16, **small)
        for past, new in (((5, 0, 127, 300), (1,) * 4), ((900, 131, 0, 260), (1, 1, 0, 1)))
    )
    static = make(first).to(DEVICE)
    static.pool = torch.zeros(200, *static.pool.shape[1:], dtype=torch.uint8, device=DEVICE)
    table = torch.full((4, 48), -1, dtype=torch.int32, device=DEVICE)
    static.sequences = static.sequences._replace(block_table=table)
    held = (static.sequences[0], static.sequences[1], static.sequences.packed)
    for lengths in held:
        lengths.zero_()
    out, replay = static.run(), lambda: out.copy_(static.run())
    if not INTERPRETED:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = static.run()
        replay = graph.replay
    for step in (first, second, first):
        expected = make(step)
        other, own = expected.to(DEVICE), sum(step.new)
        static.pool[: len(other.pool)].copy_(other.pool)
        static.query[:, :, :own].copy_(other.query)
        for states, others in zip(static.new, other.new, strict=True):
            states[:, :, :own].copy_(others)
        table.fill_(-1)
        table[:, : other.sequences.block_table.shape[1]].copy_(other.sequences.block_table)
        for lengths, others in zip(held, (other.sequences[0], other.sequences[1], other.sequences.packed), strict=True):
            lengths.copy_(others)
        replay()
        with in_torch():
            reference = expected.run()
        assert relative_rms(out[:own].cpu(), reference[:own].double()) <= TOLERANCE[BF16]
        assert (out[own:] == 0).all()


if INTERPRETED:

    def test_presets_have_rotary_keys_of_8_bits() -> None:
        assert {config.of_latents().value_bits for config in PRESETS.values()} == {8}
