"""`tq_hf.ops.dispatch.paged_step` on the GPU: kernels that read lengths and tables on the device.

The host knows shapes only, so a step can be captured as a CUDA graph and replayed. Scratch of a graph comes from the
graph's own memory, where one layer's is free again for the next. Other steps take at most `step_scratch_bytes` from the
caller's workspace.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from tq_kernels.layout import BlockLayout
from tq_kernels.types import AttentionOptions, KeyValue, Sequences, Tokens

from ...compat import flash_varlen, is_capturing
from ...config import TurboQuantConfig
from ...tensors.pages import LayerPages, LayerWindows, WindowStep, ring_pages, rows_per_page
from ..backend import HAS_TRITON, explains_failures
from ..workspace import Workspace, allocator
from . import blocks

if HAS_TRITON:
    from tq_kernels.codec.launch import encode_new_blocks
    from tq_kernels.common.device import AMPERE, target
    from tq_kernels.decode.append import append_new_rows
    from tq_kernels.decode.launch import DecodeLaunch, paged_scratch_bytes
    from tq_kernels.latents.launch import attend_latents, latent_scratch_bytes
    from tq_kernels.prefix.launch import attend_prefix, many_scratch_bytes, prefix_takes
    from tq_kernels.prefix.windows import attend_windows as attend_window_rows
    from tq_kernels.prefix.windows import takes_windows as takes_window_rows


SCRATCH = "attention over pages"
"""The name of a step's scratch in a workspace."""


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
    all but prompts; see `decode_scratch_bytes`."""
    if not supports_paged_decode(like, layout) or supports_paged_prompts(like, layout):
        return 0
    states = (layout.key_dim + layout.value_dim) * like.element_size()
    return heads[1] * length * (states + layout.slot_bytes)


def _rows(states: torch.Tensor) -> torch.Tensor:
    """`states` with rows at multiples of 8 elements, as models make them."""
    tokens, heads, channels = states.stride()
    return states if channels == 1 and tokens % 8 == heads % 8 == 0 else states.contiguous()


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


def flash_attention(new: Tokens, sequences: Sequences, options: AttentionOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of new tokens to the new tokens of their sequence: `[T, Hq, D]`, 0 for padding tokens, and the
    logarithms of its sums of exponentials, `[Hq, T]` float32. The host knows `lengths` of the sequences."""
    assert sequences.lengths is not None
    # For a maximum of 1 the operator expects another shape.
    ends, most = sequences.cu_seqlens_q[: len(sequences.lengths) + 1], max(2, *sequences.lengths)
    out, lse = flash_varlen(new, ends, most, options.scaling)
    out[sum(sequences.lengths) :].zero_()
    return out, lse


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
    tokens, new_lse = Tokens(*map(_rows, new)), None
    if attend_prompts is None and not single and sequences.lengths and flash_takes(query, options):
        out, new_lse = flash_attention(tokens, sequences, options)
    else:
        out = query.new_empty(query.shape) if fill and total == count else query.new_zeros(query.shape)
    scratch = allocator(None if is_capturing() else workspace, SCRATCH, device)
    with blocks.launching_on(query):
        if attend_prompts is not None:
            attend_prompts(out)
        elif not single:
            rotation_fp16 = blocks.rotations(config, layout, device, torch.float16)
            attend_prefix(
                tokens.query, pages.tensors, sequences, (tokens.key, tokens.value), rotation_fp16, None, options,
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
