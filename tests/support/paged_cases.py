"""Steps over the pages of many sequences, for kernels and the torch reference alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch
from tq_kernels.format import due_blocks
from tq_kernels.types import AttentionOptions, ChannelScales, Sequences, Tokens

from tests.support.helpers import cumulative, marked
from tq_hf.config import TurboQuantConfig
from tq_hf.ops import backend, dispatch
from tq_hf.tensors.pages import LayerPages, ring_pages

LAYERS = 2


@dataclass(frozen=True)
class Step:
    """One step of one layer.

    Args:
        past: Tokens cached before, of every sequence.
        new: Its new tokens; sequences without any only pad.
        nobody: Tokens after the last sequence's.
        sinks: First tokens in a page of their own.
        residual: Tokens that are read as rows, at least.
        prefix: Blocks that each sequence reads packed in any case, of those it has: it began with others' blocks.
        spare: Columns of the table, and pages, beyond what is needed.
    """

    past: tuple[int, ...] = (0, 5, 127, 300)
    new: tuple[int, ...] = (1, 1, 1, 1)
    Hq: int = 4
    Hkv: int = 1
    D: int = 64
    preset: str = "4bit_nc"
    dtype: torch.dtype = torch.float16
    softcap: float | None = None
    s_aux: bool = False
    nobody: int = 0
    sinks: int = 0
    residual: int = 0
    prefix: int = 0
    spare: int = 2

    def __str__(self) -> str:
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]
        text = "-".join(f"{f.name}{getattr(self, f.name)}" for f in changed).replace("torch.", "")
        return text.replace("(", "").replace(")", "").replace(", ", "+") or "default"

    @property
    def config(self) -> TurboQuantConfig:
        return TurboQuantConfig.from_preset(self.preset, residual_length=self.residual, sink_tokens=self.sinks)


def sequences_of(step: Step, past: tuple[int, ...], new: tuple[int, ...], block_table: torch.Tensor) -> Sequences:
    lengths = tuple(p + n if n else 0 for p, n in zip(past, new, strict=True))
    cu_seqlens_q, cu_seqlens_k = (cumulative(x).to(block_table.device) for x in (new, lengths))
    own = (min(step.prefix, due_blocks(p, step.sinks, 0)) for p in past)
    packed = [max(q, due_blocks(p, step.sinks, step.residual)) for p, q in zip(past, own, strict=True)]
    packed = torch.tensor(packed, dtype=torch.int32, device=block_table.device)
    return Sequences(cu_seqlens_q, cu_seqlens_k, block_table, packed, max(1, *new), new)


@contextmanager
def in_torch() -> Iterator[None]:
    """The reference computes without kernels, even where Triton's interpreter could run them."""
    before, backend.chosen = backend.chosen, "torch"
    try:
        yield
    finally:
        backend.chosen = before


@dataclass
class Inputs:
    """A step's tensors, all on one device. Pages that nobody owns, and other layers, hold noise."""

    step: Step
    pool: torch.Tensor
    channel_scales: ChannelScales
    tokens: Tokens
    sequences: Sequences
    s_aux: torch.Tensor | None

    @property
    def pages(self) -> LayerPages:
        config = self.step.config
        pages = LayerPages.of_pool(self.pool, 1, config, config.layout(self.step.D), self.step.dtype)
        return pages.with_channel_scales(self.channel_scales)

    def to(self, device: torch.device) -> Inputs:
        """A copy on `device`."""
        tokens = Tokens(*(x.to(device, copy=True) for x in self.tokens))
        *tensors, max_q, lengths = self.sequences
        sequences = Sequences(*(x.to(device, copy=True) for x in tensors), max_q, lengths)
        s_aux = None if self.s_aux is None else self.s_aux.to(device)
        channel_scales = self.channel_scales.map(lambda x: x.to(device))
        return Inputs(self.step, self.pool.to(device, copy=True), channel_scales, tokens, sequences, s_aux)

    @property
    def options(self) -> AttentionOptions:
        return AttentionOptions(self.step.D**-0.5, softcap=self.step.softcap, s_aux=self.s_aux)

    def expected(self) -> torch.Tensor:
        """The reference's output; the pool is then as it leaves it."""
        with in_torch():
            return dispatch.paged_step(self.tokens, self.pages, self.sequences, self.options)

    def encoded(self) -> torch.Tensor:
        """Pages that the step encodes blocks into."""
        return encoded_pages(self.step, self.sequences, self.pages.tensors.first_block_column)


def encoded_pages(step: Step, sequences: Sequences, first: int) -> torch.Tensor:
    """Pages that a step encodes blocks into; `first` is the column of block 0."""
    found = []
    for row, past, new in zip(sequences.block_table, step.past, step.new, strict=True):
        start, stop = (first + due_blocks(n, step.sinks, 0) for n in (past, past + new))
        found.append(row[start:stop])
    return torch.cat(found).long()


def needed_pages(step: Step, first: int) -> list[int]:
    """Number of pages of each sequence after the step; `first` is the column of block 0."""
    ends = [due_blocks(p + n, step.sinks, 0) for p, n in zip(step.past, step.new, strict=True)]
    return [first + blocks if n else 0 for blocks, n in zip(ends, step.new, strict=True)]


def shuffled_table(step: Step, needed: list[int], generator: torch.Generator) -> torch.Tensor:
    """Block table of sequences that own `needed` pages each, shuffled ones; the rest of a row is -1."""
    block_table = torch.full((len(step.past), max(needed) + step.spare), -1, dtype=torch.int32)
    owned = torch.randperm(sum(needed) + step.spare, generator=generator).int()[: sum(needed)].split(needed)
    for row, own in zip(block_table, owned, strict=True):
        row[: len(own)] = own
    return block_table


def make(step: Step, seed: int = 0) -> Inputs:
    """Random inputs on the CPU. Sequences own shuffled pages and what they need of the table, and the rest is -1."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    layout = step.config.layout(step.D)
    needed = needed_pages(step, ring_pages(step.config, layout, step.dtype) + min(1, step.sinks) + 1)
    pool = torch.zeros(sum(needed) + step.spare, LAYERS, step.Hkv, layout.block_bytes, dtype=torch.uint8)
    pool.random_(0, 256, generator=generator)
    block_table = shuffled_table(step, needed, generator)
    made = [torch.exp(0.3 * randn(1, step.Hkv, step.D)).bfloat16().half() for _ in range(2)]
    total = sum(step.new) + step.nobody
    # Heads behind tokens, and of keys and values also heads before them: as models give them.
    query = 1.5 * randn(total, step.Hq, step.D)
    key, value = randn(step.Hkv, total, step.D).transpose(0, 1), randn(total, step.Hkv, step.D)
    tokens = Tokens(*(x.to(step.dtype) for x in (query, key, value)))
    s_aux = randn(step.Hq) if step.s_aux else None
    sequences = sequences_of(step, step.past, step.new, block_table)
    scales = ChannelScales(marked(made[0], generator), made[1])
    inputs = Inputs(step, pool, scales, tokens, sequences, s_aux)
    for i, (past, new) in enumerate(zip(step.past, step.new, strict=True)):
        if past and new:
            query, key, value = (randn(past, heads, step.D).to(step.dtype) for heads in (step.Hq, step.Hkv, step.Hkv))
            with in_torch():
                dispatch.paged_step(
                    Tokens(query, key + 2 * randn(1, step.Hkv, step.D).to(step.dtype), value),
                    inputs.pages, sequences_of(step, (0,), (past,), block_table[i : i + 1]), inputs.options,
                )  # fmt: skip
    return inputs
