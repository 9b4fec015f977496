"""`tq_hf.ops.dispatch.paged_step` on the GPU: kernels that read lengths and tables on the device.

The host knows shapes only, so a step can be captured as a CUDA graph and replayed. Scratch of a graph comes from the
graph's own memory, where one layer's is free again for the next. Other steps take at most `step_scratch_bytes` from the
caller's workspace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from tq_kernels.format import BLOCK_TOKENS
from tq_kernels.layout import BlockLayout
from tq_kernels.types import AttentionOptions, KeyValue, Sequences, Tokens

from ...compat import cudnn_attention, flash_varlen, is_capturing
from ...config import TurboQuantConfig
from ...tensors.pages import LayerPages, LayerWindows, WindowStep, ring_pages, rows_per_page
from ..backend import HAS_TRITON, explains_failures
from ..workspace import Workspace, allocator
from . import blocks

if HAS_TRITON:
    from tq_kernels.codec.launch import encode_new_blocks
    from tq_kernels.common.device import AMPERE, target
    from tq_kernels.common.launcher import only_compiles
    from tq_kernels.decode.append import append_new_rows
    from tq_kernels.decode.launch import DecodeLaunch, paged_scratch_bytes
    from tq_kernels.latents.launch import attend_latents, latent_scratch_bytes
    from tq_kernels.prefix.launch import attend_prefix, join, many_scratch_bytes, prefix_takes
    from tq_kernels.prefix.windows import attend_windows as attend_window_rows
    from tq_kernels.prefix.windows import takes_windows as takes_window_rows


SCRATCH = "attention over pages"
"""The name of a step's scratch in a workspace."""
LEAST_PAIRS = 1 << 21
"""Least number of pairs of queries and keys that cuDNN attends to at once. From Hopper on it is twice as fast as
FlashAttention 2 and as `prefix_attention` (H200, 8k tokens: 550 to 670 TFLOP/s)."""
DIVISOR = 1024
"""Divisor of cuDNN's numbers of queries, so that it sees few shapes."""
PIECES = (64, 62, 32)
"""Most blocks of history that are dequantized at once for cuDNN: whole rings. Where chunks have 8,192 tokens, 62 are
left after pieces of 64."""


def widest_paged_head(device: torch.device) -> int | None:
    """Channels of the widest heads whose pages kernels read on a GPU, where there are kernels."""
    return target(device).widest_head if HAS_TRITON and device.type == "cuda" else None


def supports_paged_step(query: torch.Tensor, key: torch.Tensor, pages: LayerPages) -> bool:
    """Whether kernels compute steps of a layer: rows of whole 16 bytes, and supported heads, dtypes and device.
    Attention of prompts also needs `supports_paged_prompts`."""
    return (
        pages.blocks is None
        and supports_paged_decode(query, pages.layout)
        and blocks.supports_states(key)
        and key.dtype == pages.tensors.rows.dtype
    )


def supports_paged_decode(states: torch.Tensor, layout: BlockLayout) -> bool:
    """Whether kernels compute decode steps for these states, without waiting for the device: they can be captured."""
    return layout.key_dim % 8 == 0 and blocks.supports_blocks(states, layout)


def supports_paged_prompts(states: torch.Tensor, layout: BlockLayout) -> bool:
    """Whether kernels attend from prompts with these states; otherwise torch does, from a copy of the pages."""
    able = supports_paged_decode(states, layout)
    return able and prefix_takes(layout.key_dim, layout.key_dim, states.device)


def plans_prompts(states: torch.Tensor, layout: BlockLayout) -> bool:
    """Whether cuDNN, which plans for each shape, attends from long prompts with these states."""
    return states.is_cuda and layout.key_dim <= 256 and cudnn_takes(layout.key_dim, states.dtype, states.device)


def decode_scratch_bytes(
    requests: int, heads: tuple[int, int], config: TurboQuantConfig, layout: BlockLayout, like: torch.Tensor
) -> int:
    """Scratch bytes of a decode step of `requests` sequences, held by its captured graph. 0 without kernels.

    `heads` are the numbers of query and KV heads; `like` has the dtype and device of the model's states.
    """
    if not supports_paged_decode(like, layout):
        return 0
    rows = ring_pages(config, layout, like.dtype) * rows_per_page(layout, like.dtype) + config.sink_tokens
    return paged_scratch_bytes(requests, *heads, layout, rows, like.device)


def step_scratch_bytes(
    total: int, requests: int, heads: tuple[int, int], config: TurboQuantConfig, layout: BlockLayout, like: torch.Tensor
) -> int:
    """Most scratch bytes of a step: `total` new tokens of `requests` sequences; see `decode_scratch_bytes`."""
    most = decode_scratch_bytes(requests, heads, config, layout, like)
    if supports_paged_prompts(like, layout):
        most = max(most, many_scratch_bytes(total, requests, heads, layout.key_dim, target(like.device)))
    return most


def prompt_buffer_bytes(
    length: int, heads: tuple[int, int], config: TurboQuantConfig, layout: BlockLayout, like: torch.Tensor
) -> int:
    """Bytes of the copy, packed and dense, from which torch attends to a request of `length` tokens, if kernels compute
    all but prompts, or cuDNN to a part of its history; see `decode_scratch_bytes`."""
    if not supports_paged_decode(like, layout):
        return 0
    if supports_paged_prompts(like, layout):
        length = min(length, PIECES[0] * BLOCK_TOKENS) if plans_prompts(like, layout) else 0
    states = (layout.key_dim + layout.value_dim) * like.element_size()
    return heads[1] * length * (states + layout.slot_bytes)


def _rows(states: torch.Tensor) -> torch.Tensor:
    """`states` with rows at multiples of 8 elements and 16 bytes, as models make them."""
    tokens, heads, channels = states.stride()
    if channels == 1 and tokens % 8 == heads % 8 == 0 == states.data_ptr() % 16:
        return states
    return states.clone(memory_format=torch.contiguous_format)


@blocks.once_per_layer
def decode_launch(pages: LayerPages) -> DecodeLaunch:
    """The decode kernels on these pages, made once."""
    rotation, encoder = (
        blocks.rotations(pages.config, pages.layout, pages.tensors.rows.device, dtype)
        for dtype in (torch.float16, torch.float32)
    )
    return DecodeLaunch(pages.tensors, rotation, encoder)


def flash_takes(query: torch.Tensor, options: AttentionOptions) -> bool:
    """Whether torch's FlashAttention computes causal attention with these queries `[T, Hq, D]` and options."""
    if not query.is_cuda or not options.only_scales() or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    return query.shape[2] <= 256 and query.shape[2] % 8 == 0 and target(query.device).asm >= AMPERE


@lru_cache
def cudnn_takes(dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether cuDNN attends from long prompts with heads of `dim` channels, where `flash_takes` them."""
    like = torch.empty(1, 1, DIVISOR, dim, dtype=dtype, device=device)
    able = can_use_cudnn_attention(SDPAParams(like, like, like, None, 0.0, True, False))
    return able and target(device).dependent_launch


def _padded(states: torch.Tensor, added: int) -> torch.Tensor:
    """States `[S, H, D]` with `added` tokens of zeros. Strides stay: for others cuDNN would make another plan."""
    count, heads, _ = states.shape
    if states.stride(1) * heads > states.stride(0):
        states = states.contiguous()
    if not added:
        return states
    out = states.new_empty_strided((count + added, *states.shape[1:]), states.stride())
    out[:count], out[count:] = states, 0
    return out


class CudnnAttention:
    """Attention from long prompts by cuDNN.

    A plan for a shape takes .07 to .2 s, which eight steps of 32 layers save: it is made after `CALLS` calls, or in a
    warm-up. Each thread has its own plans, so one thread of this process makes all calls, and the others wait.
    """

    CALLS = 256
    """Number of calls of a shape before its plan."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, "tq_hf calls cuDNN")
        self.calls = Counter[tuple[Any, ...]]()
        self.plans_all = False

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Context of a warm-up, in which each shape is planned for at once."""
        self.plans_all = True
        try:
            yield
        finally:
            self.plans_all = False

    @staticmethod
    def _shape(query: torch.Tensor, count: int, keys: int | None) -> tuple[Any, ...]:
        """Shape of a plan: padded number of queries, keys, heads, dtype and device."""
        return -(-count // DIVISOR) * DIVISOR, keys, query.shape[1:], query.dtype, query.device

    def takes(self, query: torch.Tensor, count: int, keys: int | None = None) -> bool:
        """Whether to attend from `count` tokens of `query` `[T, Hq, D]` to `keys` others, by default to one another."""
        shape = self._shape(query, count, keys)
        if count * (count // 2 if keys is None else keys) < LEAST_PAIRS or 2 * shape[0] > 3 * count:
            return False
        if not cudnn_takes(query.shape[2], query.dtype, query.device):
            return False
        self.calls[shape] += self.CALLS if self.plans_all and not only_compiles() else 1
        return self.plans_all or self.calls[shape] > self.CALLS

    def plans(self, query: torch.Tensor, keys: int | None = None) -> Iterator[int]:
        """Numbers of tokens of up to as many queries, in a warm-up, that are not planned for. The caller attends."""
        for count in range(len(query) // DIVISOR * DIVISOR, 0, -DIVISOR) if self.plans_all else ():
            if self.calls[self._shape(query, count, keys)] < self.CALLS and self.takes(query, count, keys):
                yield count

    def __call__(self, new: Tokens, causal: bool, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention `[S, Hq, D]` of S queries, and logarithms `[Hq, S]`; `causal` to keys and values of the same
        tokens. Tokens of zeros come last, up to a multiple of `DIVISOR`: no other query sees their keys."""
        count, added = len(new.query), -len(new.query) % DIVISOR
        if only_compiles():
            return torch.empty_like(new.query), new.query.new_empty(new.query.shape[1::-1], dtype=torch.float32)
        states = [_padded(x, added) if causal or x is new.query else x for x in new]
        stream = torch.cuda.current_stream(new.query.device) if new.query.is_cuda else None

        def call() -> tuple[torch.Tensor, torch.Tensor]:
            with torch.no_grad(), torch.cuda.stream(stream):
                return cudnn_attention([x.transpose(0, 1)[None] for x in states], causal, scaling)

        out, lse = self.thread.submit(call).result()
        return out[0].transpose(0, 1)[:count], lse[0, :, :count, 0]


long_attention = CudnnAttention()
"""The one of this process."""
planning = long_attention.planning


def flash_attention(new: Tokens, sequences: Sequences, options: AttentionOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of new tokens to the new tokens of their sequence: `[T, Hq, D]`, 0 for padding tokens, and the
    logarithms of its sums of exponentials, `[Hq, T]` float32. The host knows `lengths` of the sequences."""
    query, lengths, cu_seqlens = new.query, sequences.lengths, sequences.cu_seqlens_q
    assert lengths is not None
    for count in long_attention.plans(query):
        long_attention(Tokens(*(x[:count] for x in new)), True, options.scaling)
    ends = [0, *accumulate(lengths)]
    long = {i for i, count in enumerate(lengths) if long_attention.takes(query, count)}
    if not long:
        # For a maximum of 1 the operator expects another shape.
        out, lse = flash_varlen(new, cu_seqlens[: len(lengths) + 1], max(2, *lengths), options.scaling)
        out[ends[-1] :].zero_()
        return out, lse
    if ends == [0, len(query)]:
        out, lse = long_attention(new, True, options.scaling)
        return out.contiguous(), lse
    out, lse = query.new_empty(query.shape), query.new_empty(query.shape[1::-1], dtype=torch.float32)
    out[ends[-1] :].zero_()
    for i in long:
        own = slice(ends[i], ends[i + 1])
        out[own], lse[:, own] = long_attention(Tokens(*(x[own] for x in new)), True, options.scaling)
    for is_short, run in groupby(range(len(lengths)), lambda i: lengths[i] > 1 and i not in long):
        indices = [*run]
        if is_short:
            own, within = slice(ends[indices[0]], ends[indices[-1] + 1]), slice(indices[0], indices[-1] + 2)
            part, most = Tokens(*(x[own] for x in new)), max(lengths[i] for i in indices)
            out[own], lse[:, own] = flash_varlen(part, cu_seqlens[within] - own.start, most, options.scaling)
    return out, lse


def _attend_piece(
    query: torch.Tensor, pages: LayerPages, places: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention `[S, Hq, D]` of queries in fp16 to the blocks in pages `places` `[N]`, and logarithms `[Hq, S]`."""
    dims, tokens = (pages.layout.key_dim, pages.layout.value_dim), len(places) * BLOCK_TOKENS
    keys, values = (query.new_empty(1, pages.kv_heads, tokens, dim) for dim in dims)
    blocks.dequantize(pages.config, pages.packed(places.long()), keys, values)
    return long_attention(Tokens(query, keys[0].transpose(0, 1), values[0].transpose(0, 1)), False, scaling)


def _sizes(pages: LayerPages) -> list[int]:
    """`PIECES` of whole rings."""
    ring = pages.tensors.ring_rows // BLOCK_TOKENS
    return [size // ring * ring for size in PIECES if size >= ring]


def _plan_pieces(new: Tokens, pages: LayerPages, table: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Plan for long prompts of up to as many tokens, and compile kernels, in a warm-up, which has no history."""
    for size in _sizes(pages):
        for count in long_attention.plans(new.query, size * BLOCK_TOKENS):
            found = _attend_piece(new.query[:count].half(), pages, table[0, :1].expand(size), 1.0)
            for states in (found, (out[:count].clone(), lse[:, :count].clone())):
                join(*states, *found)


def attend_history(
    new: Tokens,
    pages: LayerPages,
    sequences: Sequences,
    options: AttentionOptions,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> Sequences:
    """Add the attention of long prompts to their first blocks, dequantized, to `out` and `lse` of `flash_attention`.

    Returns:
        The sequences without these blocks. They fill whole rings, so the rows after them stay where they are.
    """
    held, table, counts = pages.tensors, sequences.block_table, sequences.lengths or ()
    if sequences.past is None:
        return sequences
    _plan_pieces(new, pages, table, out, lse)
    column, left_out = held.first_block_column, [0] * len(table)
    rest, ends = table, [0, *accumulate(counts)]
    for i, (count, past) in enumerate(zip(counts, sequences.past, strict=True)):
        whole, own = (past - held.sinks - pages.config.residual_length) // BLOCK_TOKENS, slice(ends[i], ends[i + 1])
        query, pieces = new.query[own], list[int]()
        for size in _sizes(pages):
            number, whole = divmod(max(0, whole), size)
            if number and long_attention.takes(query, count, size * BLOCK_TOKENS):
                pieces += [size] * number
        if not pieces:
            continue
        query = query.half()  # as in the kernel: bfloat16 would round keys to the size of their means
        ranges = pairwise(accumulate(pieces, initial=column))
        parts = (_attend_piece(query, pages, table[i, slice(*each)], options.scaling) for each in ranges)
        found = next(parts)
        for part in parts:
            join(*found, *part)
        join(out[own], lse[:, own], *found)
        left_out[i] = sum(pieces)
        rest = table.clone() if rest is table else rest
        rest[i, column : table.shape[1] - left_out[i]] = table[i, column + left_out[i] :]
    if rest is table:
        return sequences
    # Without `non_blocking` the host would wait for the device.
    fewer = torch.tensor([0, *left_out], dtype=torch.int32).to(table.device, non_blocking=True)
    lengths = sequences.cu_seqlens_k - BLOCK_TOKENS * fewer.cumsum(0, dtype=torch.int32)
    assert sequences.packed is not None
    return sequences._replace(cu_seqlens_k=lengths, block_table=rest, packed=sequences.packed - fewer[1:])


def _any_history(sequences: Sequences) -> bool:
    """Whether a sequence with several new tokens may have others before them."""
    lengths, past = sequences.lengths, sequences.past
    return lengths is None or past is None or any(new > 1 and old for new, old in zip(lengths, past, strict=True))


@explains_failures
def paged_step(
    new: Tokens,
    pages: LayerPages,
    sequences: Sequences,
    options: AttentionOptions,
    workspace: Workspace | None = None,
    *,
    store: bool = True,
    attend_prompts: Callable[[torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """See `tq_hf.ops.dispatch.paged_step`, for steps that `supports_paged_step`.

    Args:
        attend_prompts: Writes the attention of prompts to `[T, Hq, D]`, where not `supports_paged_prompts`.
    """
    query, config, layout, device = new.query, pages.config, pages.layout, new.query.device
    total, count = query.shape[0], sequences.cu_seqlens_q.shape[0] - 1
    single = sequences.max_q == 1
    # The kernels of decode write every row if they can tell padding tokens.
    fill = single and total >= count
    if total == 0:
        return query.new_empty(query.shape)
    tokens, new_lse, rest = Tokens(*map(_rows, new)), None, sequences
    if attend_prompts is None and not single and sequences.lengths and flash_takes(query, options):
        out, new_lse = flash_attention(tokens, sequences, options)
        rest = attend_history(tokens, pages, sequences, options, out, new_lse)
    else:
        out = query.new_empty(query.shape) if fill and total == count else query.new_zeros(query.shape)
    scratch = allocator(None if is_capturing() else workspace, SCRATCH, device)
    with blocks.launching_on(query):
        if attend_prompts is not None:
            attend_prompts(out)
        elif not single and (new_lse is None or _any_history(sequences)):
            rotation_fp16 = blocks.rotations(config, layout, device, torch.float16)
            attend_prefix(
                tokens.query, pages.tensors, rest, (tokens.key, tokens.value), rotation_fp16, None, options,
                allocate=scratch, out=out, new_lse=new_lse,
            )  # fmt: skip
        if sequences.lengths is None or single or 1 in sequences.lengths:
            step = decode_launch(pages)
            step(tokens.query, sequences, None, options, scratch, out, (tokens.key, tokens.value), fill=fill)
        if store and not single:
            encode_new_blocks(tokens, pages.tensors, sequences, blocks.rotations(config, layout, device, torch.float32))
            append_new_rows(tokens, pages.tensors, sequences)
    return out


def supports_paged_latents(states: torch.Tensor, layout: BlockLayout) -> bool:
    """Whether kernels compute decode steps over pages of latents in blocks of this layout, without waiting for the
    device."""
    return blocks.supports_latents(states, layout)


def supports_latent_step(
    query: torch.Tensor, new: KeyValue, pages: LayerPages, max_q: int, options: AttentionOptions
) -> bool:
    """Whether kernels compute a step over pages of latents: few new tokens of each request, logits that are only
    scaled, and supported widths, dtypes and device."""
    alike = pages.blocks is None and all(states.dtype == pages.tensors.rows.dtype for states in new)
    few = max_q <= blocks.MAX_QUERIES and options.only_scales()
    return alike and few and supports_paged_latents(query, pages.layout)


def latent_scratch(
    requests: int, heads: int, queries: int, config: TurboQuantConfig, layout: BlockLayout, like: torch.Tensor
) -> int:
    """Most scratch bytes of a step over pages of latents: `requests` sequences of `queries` new tokens, or fewer."""
    if not supports_paged_latents(like, layout):
        return 0
    rows = ring_pages(config, layout, like.dtype) * rows_per_page(layout, like.dtype) + config.sink_tokens
    return latent_scratch_bytes(requests, heads, queries, layout, rows + queries - 1, like.device)


@explains_failures
def attend_latent_pages(
    latent: torch.Tensor,
    rotary: torch.Tensor,
    new: KeyValue,
    pages: LayerPages,
    sequences: Sequences,
    options: AttentionOptions,
    workspace: Workspace | None = None,
) -> torch.Tensor:
    """Attend from new tokens to pages of latents and to themselves, then store them, for steps of
    `supports_latent_step`.

    Args:
        latent: `[Hq, T, R]`: queries times the up-projection of keys.
        rotary: `[1, Hq, T, Dr]`: rotary parts of the queries.
        new: Latents `[1, 1, T, R]` and rotary keys `[1, 1, T, Dr]`.
        pages, sequences, options, workspace: As in `paged_step`.

    Returns:
        Means of latents `[Hq, T, R]`, 0 for padding tokens.
    """
    if latent.shape[1] == 0:
        return torch.empty_like(latent)
    config, layout, device = pages.config, pages.layout, latent.device
    key, value = (_rows(states[0].transpose(0, 1)) for states in new)
    tokens = Tokens(key, key, value)  # nothing reads queries of pages that only store
    with blocks.launching_on(latent):
        means = attend_latents(
            latent,
            rotary,
            (pages.tensors, (key, value)),
            sequences,
            blocks.rotations(config, layout, device, torch.float16),
            None,
            options,
            allocate=allocator(None if is_capturing() else workspace, SCRATCH, device),
        )
        encode_new_blocks(tokens, pages.tensors, sequences, blocks.rotations(config, layout, device, torch.float32))
        append_new_rows(tokens, pages.tensors, sequences, least=1)
    return means


def supports_attend_windows(query: torch.Tensor, key: torch.Tensor, windows: LayerWindows) -> bool:
    """Whether a kernel computes the attention of one new token over a window. (In float32 and on Turing torch does.)"""
    return blocks.supports_states(query) and key.dtype == windows.rows.dtype and takes_window_rows(query, key)


@explains_failures
def attend_windows(new: Tokens, windows: LayerWindows, plan: WindowStep, options: AttentionOptions) -> torch.Tensor:
    """Attention of the N new tokens of as many requests over their windows, stored there: `[N, Hq, D]`."""
    with blocks.launching_on(new.query):
        return attend_window_rows(
            Tokens(*map(_rows, new)),
            windows.rows,
            windows.window,
            plan.block_table,
            plan.past,
            options,
            allocate=allocator(None, "attention over windows", new.query.device),
        )
