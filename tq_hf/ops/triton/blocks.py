"""Calls of the Triton kernels in `tq_kernels` with the tensors of this package. Only `ops` imports this module."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial, wraps
from typing import TypeVar

import torch
from tq_kernels.format import BLOCK_TOKENS
from tq_kernels.layout import BlockLayout
from tq_kernels.types import AttentionOptions, ChannelScales, DenseRows, KeyValue, Mask, PackedBlocks

from ...codec.rotation import rotation_matrix
from ...compat import is_capturing, outside_modes
from ...config import TurboQuantConfig
from ...tensors.layer import DeviceCounts, LayerTensors, View
from ...tensors.pages import LayerPages
from .. import backend
from ..backend import HAS_TRITON, explains_failures
from ..workspace import allocator, current_workspace

if HAS_TRITON:
    from tq_kernels.codec.balance import ScaleInputs
    from tq_kernels.codec.balance import store as store_prompt_rows
    from tq_kernels.codec.launch import dequantize as dequantize_blocks
    from tq_kernels.codec.launch import encode as encode_blocks
    from tq_kernels.common.device import AMPERE, current_device, interpreted, target
    from tq_kernels.common.launcher import compile_in_threads
    from tq_kernels.decode.launch import DecodeLaunch, Preallocated, held_counts
    from tq_kernels.decode.reorder import ReorderLaunch
    from tq_kernels.latents.launch import attend_latents as attend_packed_latents
    from tq_kernels.latents.launch import takes_latents
    from tq_kernels.prefix.dense import attend_dense as attend_dense_states
    from tq_kernels.prefix.dense import takes_dense
    from tq_kernels.prefix.launch import attend_prefix, prefix_takes
    from tq_kernels.sampling import truncate as truncate_by_search

R = TypeVar("R")
T = TypeVar("T", LayerTensors, LayerPages)

MAX_QUERIES = 16
"""Most queries per sequence that the decode kernel takes whatever the history; kernels of prefill take more."""
MAX_SHORT_QUERIES, MAX_SHORT_SCORES = 64, 1 << 18
"""Most queries per sequence, and most queries times tokens, of the decode kernel over a short history (measured on an
H200: 64 queries on 4k tokens take 54 us here and 85 us in the prefix kernel; 32 on 32k 115 and 86 us)."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def supports_blocks(tensor: torch.Tensor, layout: BlockLayout) -> bool:
    """Whether kernels write and read blocks of this layout for states of this tensor's device and dtype."""
    return supports_states(tensor) and max(layout.key_dim, layout.value_dim) <= target(tensor.device).widest_head


def supports_states(tensor: torch.Tensor) -> bool:
    """Whether kernels run on this tensor's device and in its dtype."""
    able = HAS_TRITON and (tensor.is_cuda or interpreted()) and tensor.dtype in DTYPES
    return able and backend.chosen != "torch"


def compile_kernels(states: torch.Tensor, code: Callable[[], object]) -> Callable[[], None]:
    """Call `code` and begin to compile its kernels (see `compile_in_threads`); do nothing if torch computes states of
    this device and dtype."""
    return compile_in_threads(code) if states.is_cuda and supports_states(states) else lambda: None


def once_per_layer(make: Callable[[T], R]) -> Callable[[T], R]:
    """Decorate a function that makes a launch for a layer's tensors, so that it is made once."""
    name = make.__name__

    @wraps(make)
    def launch_of(tensors: T) -> R:
        launch: R | None = tensors.launches.get(name)
        if launch is None:
            launch = tensors.launches[name] = make(tensors)
        return launch

    return launch_of


@once_per_layer
def _supports_layer(tensors: LayerTensors) -> bool:
    """`supports_blocks`, for the states and blocks of a layer."""
    return supports_blocks(tensors.rows, tensors.layout)


def supports_step(query: torch.Tensor, tensors: LayerTensors) -> bool:
    """Whether the kernels of decode steps read and write these tensors, for queries of this device and dtype."""
    row = tensors.row
    alike = query.dtype == row.dtype and query.device == row.device
    return backend.chosen != "torch" and (alike or supports_states(query)) and _supports_layer(tensors)


def supports_inline_ptx(device: torch.device) -> bool:
    """Whether kernels unpack with inline PTX there: on NVIDIA, from Turing on."""
    on = target(device)
    return on.asm >= AMPERE.value or on.fragments


def _rows(states: torch.Tensor) -> torch.Tensor:
    """`states` with contiguous rows, as models make them."""
    # All strides at once: torch answers in a third of the time.
    return states if states.stride()[-1] == 1 else states.contiguous()


def launching_on(states: torch.Tensor) -> AbstractContextManager:
    """Make the device of `states` current: Triton launches there, and layers spread over several GPUs are elsewhere."""
    away = states.is_cuda and states.device.index != current_device()
    return torch.cuda.device(states.device) if away else nullcontext()


def supports_mask(mask: Mask, options: AttentionOptions) -> bool:
    """Whether kernels compute with this mask: boolean, shared by all heads, and without a bias beside it."""
    return options.position_bias is None and (mask is None or (mask.dtype == torch.bool and mask.shape[1] == 1))


def supports_attend(query: torch.Tensor, view: View, mask: Mask, options: AttentionOptions) -> bool:
    """Whether the decode kernel computes this call: few queries, all tokens stored, a mask shared by all heads."""
    queries = query.shape[2]
    few = queries <= MAX_QUERIES or (queries <= MAX_SHORT_QUERIES and queries * view.length <= MAX_SHORT_SCORES)
    return few and view.new is None and supports_mask(mask, options) and supports_step(query, view.tensors)


def supports_prefix(tensor: torch.Tensor, layout: BlockLayout) -> bool:
    """Whether the fused kernel of continuation prefill reads blocks of this layout: not on Turing, and wide heads from
    Hopper on."""
    return supports_blocks(tensor, layout) and prefix_takes(layout.key_dim, layout.value_dim, tensor.device)


def supports_attend_many(query: torch.Tensor, view: View, mask: Mask, options: AttentionOptions) -> bool:
    """Whether the fused kernel of continuation prefill computes this call: any number of queries, a mask shared by
    all heads."""
    return supports_prefix(query, view.tensors.blocks.layout) and supports_mask(mask, options)


@lru_cache
@outside_modes
def rotations(config: TurboQuantConfig, layout: BlockLayout, device: torch.device, dtype: torch.dtype) -> KeyValue:
    """Key and value rotations `[D, D]`: R in float32, sqrt(D) R (+-1 for powers of two) in float16."""
    matrices = []
    for dim in (layout.key_dim_padded, layout.value_dim_padded):
        matrix = rotation_matrix(dim, config.seed, torch.device("cpu"), torch.float32)
        matrices.append((matrix * dim**0.5 if dtype == torch.float16 else matrix).to(device, dtype))
    return matrices[0], matrices[1]


@lru_cache
def prepare(config: TurboQuantConfig, layout: BlockLayout, dtype: torch.dtype, device: torch.device) -> None:
    """Make the tables that kernels read: made inside a captured graph, they would live in its memory."""
    if supports_blocks(torch.empty(0, dtype=dtype, device=device), layout):
        for dtype in (torch.float32, torch.float16):
            rotations(config, layout, device, dtype)


def supports_prompt(keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether a kernel stores the dense rows of a prompt and computes its channel scales."""
    some = 0 < keys.shape[0] * keys.shape[1] < 1 << 16  # programs of a grid's second axis
    return some and supports_states(keys) and max(keys.shape[-1], values.shape[-1]) <= target(keys.device).widest_head


@explains_failures
def store_prompt(
    keys: torch.Tensor,
    values: torch.Tensor,
    dense: DenseRows,
    scales: ChannelScales | None,
    balanced: bool,
    queries: torch.Tensor | None,
    attended: torch.Tensor | None,
) -> None:
    """`tq_hf.ops.dispatch.store_prompt` on the GPU."""
    statistics = None
    if balanced and scales is not None:
        if is_capturing():  # of the graph alone, which fills it at each replay
            makes = [partial(torch.zeros, dtype=torch.float32, device=keys.device)] * 2
        else:
            workspace = current_workspace(keys.device)
            makes = [partial(workspace.floats, name) for name in ("balance", "balance counters")]
        statistics = ScaleInputs(
            None if queries is None else _rows(queries if queries.dtype == keys.dtype else queries.to(keys.dtype)),
            None if attended is None else attended.expand(len(keys), -1),
            dense.to_sinks,
            *makes,
        )
    with launching_on(keys):
        store_prompt_rows((_rows(keys), _rows(values)), dense, scales, statistics)


@explains_failures
def encode(
    config: TurboQuantConfig, states: KeyValue, out: PackedBlocks, start: int, tokens: tuple[int, int] | None = None
) -> None:
    """`tq_hf.ops.dispatch.encode` on the GPU."""
    with launching_on(states[0]):
        rotation = rotations(config, out.layout, states[0].device, torch.float32)
        encode_blocks(_rows(states[0]), _rows(states[1]), out, start, rotation, tokens)


@explains_failures
def dequantize(config: TurboQuantConfig, blocks: PackedBlocks, keys: torch.Tensor, values: torch.Tensor) -> None:
    """`tq_hf.codec.reference.dequantize` on the GPU."""
    with launching_on(keys):
        rotation = rotations(config, blocks.layout, keys.device, torch.float32)
        dequantize_blocks(blocks, 0, blocks.capacity, keys, values, rotation)


def decode_launch(tensors: LayerTensors, counts: DeviceCounts | None = None, max_cache_len: int = 0) -> DecodeLaunch:
    """The decode kernels on these tensors, made once: those that append by `counts`, if given."""
    launch: DecodeLaunch | None = tensors.launches.get("decode")
    if launch is None or (counts is not None and launch.counts is not counts):
        of, config = (tensors.config, tensors.layout, tensors.row.device), tensors.config
        encoder, preallocated = None, None
        if counts is not None:
            encoder = rotations(*of, torch.float32)
            preallocated = Preallocated(counts, config.residual_length, max_cache_len)
        held, rotation = (tensors.blocks, tensors.rows, config.sink_tokens), rotations(*of, torch.float16)
        launch = tensors.launches["decode"] = DecodeLaunch(held, rotation, encoder, preallocated)
    return launch


def attend(query: torch.Tensor, view: View, mask: Mask, options: AttentionOptions) -> torch.Tensor:
    """`tq_hf.ops.cpu.attention.attend` on the GPU, for calls that `supports_attend`, and decode steps with counts on
    the device. Also writes the view's pending token, or appends it where the device counts.

    A captured or compiled step allocates its scratch per call: in a captured graph it comes from the graph's own
    memory, where one layer's is free again for the next (`tq_hf.ops.workspace` says why not from a workspace).
    """
    tensors, counts, pending, device = view.tensors, view.counts, view.pending, query.device
    states = None if pending is None else pending.states
    try:
        if isinstance(counts, DeviceCounts):
            launch, slot = decode_launch(tensors, counts, view.length), 0
            held, alone = launch.held, view.past_length is None or is_capturing()
        else:
            assert counts is not None
            (sinks, blocks, rows, _), launch, alone = counts, decode_launch(tensors), False
            held = held_counts(blocks, rows, sinks, device)
            slot = (blocks * BLOCK_TOKENS + rows - 1) % tensors.ring_rows
        out = launch(
            query,
            held,
            None if mask is None else mask.expand(query.shape[0], -1, -1, -1),
            options,
            allocator(None if alone else current_workspace(device), "decode attention", device),
            None,
            states,
            slot,
        )
    except Exception as error:
        better = backend.explained(error, device)
        if better is error:
            raise
        raise better from error
    if pending is not None:
        pending.states = None
    return out


@explains_failures
def attend_many(query: torch.Tensor, view: View, mask: Mask, options: AttentionOptions) -> torch.Tensor:
    """`tq_hf.ops.cpu.attention.attend` on the GPU, for calls that `supports_attend_many`."""
    layout = view.tensors.layout
    return attend_prefix(
        _rows(query),
        (view.tensors.blocks, view.written_rows(), view.tensors.config.sink_tokens),
        view.host_counts[:3],
        None if view.new is None else (_rows(view.new[0]), _rows(view.new[1])),
        rotations(view.tensors.config, layout, query.device, torch.float16),
        None if mask is None else mask.expand(query.shape[0], -1, -1, -1),
        options,
        allocate=allocator(current_workspace(query.device), "prefix attention", query.device),
        out=query.new_empty(query.shape[0], query.shape[2], query.shape[1], layout.value_dim),
    )


def supports_latents(states: torch.Tensor, layout: BlockLayout) -> bool:
    """Whether kernels compute attention over latents in blocks of this layout."""
    return supports_blocks(states, layout) and takes_latents(layout, states.device)


def supports_attend_latents(query: torch.Tensor, view: View, mask: Mask, options: AttentionOptions) -> bool:
    """Whether kernels compute attention over latents for this call: few queries, all tokens stored, a mask shared by
    all heads, logits that are only scaled."""
    fits = query.shape[2] <= MAX_QUERIES and view.new is None and supports_mask(mask, options) and options.only_scales()
    return fits and supports_step(query, view.tensors) and takes_latents(view.tensors.layout, query.device)


@explains_failures
def attend_latents(
    latent: torch.Tensor, rotary: torch.Tensor, view: View, mask: Mask, options: AttentionOptions
) -> torch.Tensor:
    """`tq_hf.ops.cpu.attention.attend` over latents on the GPU, for calls that `supports_attend_latents`. `latent` and
    the result are `[Hq, B * S, R]`. With counts on the host, also writes the view's pending token."""
    tensors, counts = view.tensors, view.counts
    device, batch = latent.device, rotary.shape[0]
    if isinstance(counts, DeviceCounts):
        held = decode_launch(tensors, counts, view.length).held
        workspace = None if view.past_length is None or is_capturing() else current_workspace(device)
    else:
        assert counts is not None
        view.written_rows()
        held = held_counts(counts.blocks, counts.residual, counts.sinks, device)
        workspace = current_workspace(device)
    return attend_packed_latents(
        _rows(latent),
        _rows(rotary),
        (tensors.blocks, tensors.rows, tensors.config.sink_tokens),
        held,
        rotations(tensors.config, tensors.layout, device, torch.float16),
        None if mask is None else mask.expand(batch, -1, -1, -1),
        options,
        allocate=allocator(workspace, "latent attention", device),
    )


@once_per_layer
def _reorder_launch(tensors: LayerTensors) -> ReorderLaunch:
    """The kernel that reorders sequences, on these tensors, made once."""
    return ReorderLaunch(tensors.arguments())


def supports_reorder(tensors: LayerTensors) -> bool:
    """Whether the kernel puts the sequences of these tensors in another order."""
    return supports_states(tensors.rows) and _reorder_launch(tensors).takes


@explains_failures
def reorder(tensors: LayerTensors, sources: torch.Tensor) -> None:
    """`tq_hf.ops.dispatch.reorder` on the GPU, for tensors of `supports_reorder`."""
    _reorder_launch(tensors)(sources.contiguous())


def supports_attend_dense(query: torch.Tensor, states: KeyValue, mask: Mask, options: AttentionOptions) -> bool:
    """Whether the kernel of dense states computes this call: without gradients, and not while a graph is traced, whose
    compiler makes its own kernels."""
    if torch.compiler.is_dynamo_compiling() or not supports_states(query) or not supports_mask(mask, options):
        return False
    traced = torch.is_grad_enabled() and any(x.requires_grad for x in (query, *states))
    return not traced and takes_dense(query, *states)


def supports_attend_dequantized(query: torch.Tensor, view: View, mask: Mask, options: AttentionOptions) -> bool:
    """Whether kernels dequantize and attend to dense states here, and sdpa has no flash attention for it: heads
    wider than 256, capped logits or learned sinks."""
    layout, sinks = view.tensors.layout, view.tensors.sinks(0)
    slow = max(layout.key_dim, layout.value_dim) > backend.MAX_FLASH_DIM or not options.only_scales()
    return slow and supports_blocks(query, layout) and supports_attend_dense(query, sinks, mask, options)


@explains_failures
def attend_dense(
    query: torch.Tensor, states: KeyValue, mask: Mask, options: AttentionOptions, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`tq_hf.ops.cpu.attention.attend_dense` on the GPU, for calls that `supports_attend_dense`, into `out` if it is
    given: `[B, S, Hq, Dv]` in the query's dtype, last dimension contiguous."""
    return attend_dense_states(
        _rows(query),
        _rows(states[0]),
        _rows(states[1]),
        None if mask is None else mask.expand(query.shape[0], -1, -1, -1),
        options,
        allocate=allocator(current_workspace(query.device), "dense attention", query.device),
        out=out,
    )


@explains_failures
def append_token(tensors: LayerTensors, counts: DeviceCounts, states: KeyValue, max_cache_len: int) -> None:
    """`tq_hf.ops.dispatch.append_token` on the GPU."""
    decode_launch(tensors, counts, max_cache_len).append(*map(_rows, states))


@explains_failures
def truncate(scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Set logits of tokens that may not be sampled to -inf, by a search. See `dispatch.truncate`."""
    return truncate_by_search(scores, top_k, top_p, min_p)
