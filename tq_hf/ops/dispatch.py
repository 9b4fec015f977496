"""Operations on packed blocks, each with the choice of its backend.

Other rooms import backends' names from here only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.nn.functional import scaled_dot_product_attention
from tq_kernels.format import BLOCK_TOKENS, due_blocks
from tq_kernels.layout import BlockLayout
from tq_kernels.types import AttentionOptions, ChannelScales, DenseRows, KeyValue, Mask, PackedBlocks, Sequences, Tokens

from ..codec import reference as codec_reference
from ..compat import is_capturing, outside_autocast, outside_inference_mode
from ..config import TurboQuantConfig
from ..tensors.layer import Counts, DeviceCounts, LayerTensors, View, check_room, counts_after
from ..tensors.pages import LayerPages, LayerWindows, WindowStep
from ..tensors.residual import write_tokens
from . import reference, sliding_pages
from .backend import MAX_FLASH_DIM, check_choice, say_torch_computes  # noqa: F401
from .cpu import attention as cpu_attention
from .triton import blocks as triton_blocks
from .triton import pages as triton_pages
from .triton.blocks import compile_kernels, prepare, supports_mask  # noqa: F401
from .triton.pages import (  # noqa: F401
    SCRATCH,
    attend_latent_pages,
    decode_scratch_bytes,
    latent_scratch,
    planning,
    plans_prompts,
    prompt_buffer_bytes,
    step_scratch_bytes,
    supports_latent_step,
    supports_paged_decode,
    supports_paged_latents,
    supports_paged_prompts,
    widest_paged_head,
)
from .workspace import Workspace, current_workspace


def store_prompt(
    prompt: KeyValue,
    dense: DenseRows,
    scales: ChannelScales | None,
    balanced: bool,
    queries: torch.Tensor | None = None,
    attended: torch.Tensor | None = None,
) -> None:
    """Store rows of a prompt that stay dense, and write the channel scales of its blocks.

    Args:
        prompt: Keys `[B, Hkv, T, Dk]` and values `[B, Hkv, T, Dv]`.
        dense: Rows to store, and their destination.
        scales: Channel scales to write; `None` to leave them.
        balanced: Whether to compute scales from the prompt without its sinks. Otherwise ones are written.
        queries: `[B, Hq, T, Dk]` of the same tokens, or `None` if unknown.
        attended: True for tokens that are not padding, `[B or 1, T]` bool; `None` for all.

    Raises:
        ValueError: There is another number of queries, or of entries in `attended`, than of keys.
    """
    tokens = prompt[0].shape[2]
    if (queries is not None and queries.shape[2] != tokens) or (attended is not None and attended.shape[1] != tokens):
        came = [None if x is None else list(x.shape) for x in (queries, attended)]
        raise ValueError(
            f"Channel scales of {tokens} keys need queries and padding of these {tokens} tokens, but got queries "
            f"{came[0]} and padding {came[1]}. Leave out `queries` that are of other tokens."
        )
    kernels = triton_blocks.supports_prompt(*prompt)
    if not kernels and balanced and scales is not None:
        say_torch_computes("Balancing channels", prompt[0], *(x.shape[-1] for x in prompt))
    backend = triton_blocks if kernels else reference
    backend.store_prompt(*prompt, dense, scales, balanced, queries, attended)


def encode(
    config: TurboQuantConfig, states: KeyValue, out: PackedBlocks, start: int, tokens: tuple[int, int] | None = None
) -> None:
    """Encode whole blocks of keys `[B, Hkv, T, Dk]` and values `[B, Hkv, T, Dv]`, from block `start` of `out` on.

    `tokens` selects the range `tokens[0]` to `tokens[1]` of the T tokens.
    """
    if out.data.is_meta:  # an estimate counts bytes only
        return
    kernels = triton_blocks.supports_blocks(states[0], out.layout)
    if not kernels:
        say_torch_computes("Encoding", states[0], out.layout.key_dim, out.layout.value_dim)
    with outside_autocast(states[0]):
        if kernels:
            triton_blocks.encode(config, states, out, start, tokens)
        else:
            keys, values = (x[:, :, slice(*(tokens or (None,)))] for x in states)
            codec_reference.encode(config, keys, values, out, start)


def dequantize(config: TurboQuantConfig, blocks: PackedBlocks, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Write the N blocks of `blocks` densely to `keys` `[B, Hkv, N * 128, Dk]` and `values` `[B, Hkv, N * 128, Dv]`."""
    kernels = triton_blocks.supports_blocks(keys, blocks.layout)
    if not kernels:
        say_torch_computes("Dequantizing", keys, blocks.layout.key_dim, blocks.layout.value_dim)
    backend = triton_blocks if kernels else cpu_attention
    with outside_autocast(keys):
        backend.dequantize(config, blocks, keys, values)


def dense(view: View) -> KeyValue:
    """Return all tokens of `view` as dense keys and values, `[B, Hkv, view.length, D]` in the model's dtype."""
    keys, values = map(view.tensors.rows.new_empty, view.tensors.dense_shapes(view.length))
    reference.write_dense(view, keys, values, dequantize)
    return keys, values


def plain_kernels(states: torch.Tensor, layout: BlockLayout) -> bool:
    """Whether kernels compute with these states and blocks, compiled without inline PTX."""
    return triton_blocks.supports_blocks(states, layout) and not triton_blocks.supports_inline_ptx(states.device)


def supports_buffered_attend(query: torch.Tensor, options: AttentionOptions) -> bool:
    """Whether `buffered_attend` computes this call: on a GPU, where sdpa is fast, with options that sdpa has."""
    return query.is_cuda and cpu_attention.supports_sdpa(options)


def buffered_attend(query: torch.Tensor, view: View, mask: Mask, options: AttentionOptions) -> torch.Tensor:
    """`attend` by sdpa over all tokens of `view`, dense in the workspace that all layers share."""
    return cpu_attention.dense_sdpa(query, _buffered(view), mask, options)


def _buffered(view: View) -> KeyValue:
    """`dense(view)` in the workspace that all layers share."""
    workspace, row = current_workspace(view.tensors.row.device), view.tensors.row
    key_shape, value_shape = view.tensors.dense_shapes(view.length)
    keys = workspace.take("continuation keys", key_shape, row.dtype)
    values = workspace.take("continuation values", value_shape, row.dtype)
    reference.write_dense(view, keys, values, dequantize)
    return keys, values


def _head(view: View, head: int) -> View:
    """One KV head of a view without a pending token."""

    def part(states: torch.Tensor) -> torch.Tensor:
        own = states[:, head : head + 1]
        return own if own.dim() == 4 else own.contiguous()  # channel scales have no strides

    new = None if view.new is None else (part(view.new[0]), part(view.new[1]))
    return view._replace(tensors=view.tensors.map(part), pending=None, new=new)


def dequantized_attend(query: torch.Tensor, view: View, mask: Mask, options: AttentionOptions) -> torch.Tensor:
    """`attend` by the kernel of dense states, one KV head after the other: a head's states are dense in the workspace.

    Dequantizing costs a twelfth of attention's operations at 500 queries of 8 heads.
    """
    heads = view.written_rows().shape[1]
    groups = query.shape[1] // heads
    out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], view.tensors.layout.value_dim)
    for head in range(heads):
        own = slice(head * groups, (head + 1) * groups)
        states = _buffered(_head(view, head))
        few = options._replace(s_aux=None if options.s_aux is None else options.s_aux[own])
        triton_blocks.attend_dense(query[:, own], states, mask, few, out=out[:, :, own])
    return out


def reorder(tensors: LayerTensors, sources: torch.Tensor) -> None:
    """Copy sequence `sources[b]` to place b of every tensor, in place. `sources` is `[B]`."""
    sources = sources.to(tensors.row.device)
    if triton_blocks.supports_reorder(tensors):
        triton_blocks.reorder(tensors, sources)
        return
    for tensor in tensors.arguments():
        tensor.copy_(tensor.index_select(0, sources))


def check_mask(mask: torch.Tensor, length: int) -> None:
    """Raise `ValueError` if a mask `[B or 1, 1 or Hq, S or 1, columns]` has fewer columns than the `length` tokens that
    are attended to: kernels would read beyond it."""
    if mask.shape[-1] < length:
        raise ValueError(
            f"The attention mask {list(mask.shape)} has {mask.shape[-1]} columns for {length} tokens. Give it a column "
            f"for every token in the cache, the newest included, or in a compiled step for all there is room for."
        )


def attend(query: torch.Tensor, view: View, mask: Mask, options: AttentionOptions) -> torch.Tensor:
    """Attention of queries `[B, Hq, S, Dk]` over `view`, `[B, S, Hq, Dv]` contiguous. New tokens of a decode step with
    counts on the device are appended first, unless they are.

    Arguments are those of `tq_hf.ops.cpu.attention.attend`.

    Raises:
        ValueError: The mask has fewer columns than `view` has tokens.
    """
    if isinstance(view.counts, DeviceCounts):
        if triton_blocks.supports_step(query, view.tensors):
            return triton_blocks.attend(query, view, mask, options)
        view = on_host(view)
    if mask is not None:
        check_mask(mask, view.length)
    if triton_blocks.supports_attend(query, view, mask, options):
        return triton_blocks.attend(query, view, mask, options)
    # Whatever the sizes: with 17 to 2,048 queries on 4k to 128k tokens at 4 bits, dequantizing for sdpa is faster for
    # 2,048 on 4k alone, by 2% (H200, `examples/measure/speed/benchmark.py prefix`).
    if triton_blocks.supports_attend_many(query, view, mask, options):
        return triton_blocks.attend_many(query, view, mask, options)
    if triton_blocks.supports_attend_dequantized(query, view, mask, options):
        return dequantized_attend(query, view, mask, options)
    few = query.shape[2] <= triton_blocks.MAX_QUERIES
    what = "Attention of decode steps" if few else "Attention of many queries over compressed tokens"
    say_torch_computes(what, query, view.tensors.layout.key_dim, view.tensors.layout.value_dim)
    if supports_buffered_attend(query, options):
        return buffered_attend(query, view, mask, options).contiguous()
    return cpu_attention.attend(query, view, mask, options).contiguous()


def supports_latents(states: torch.Tensor, layout: BlockLayout) -> bool:
    """Whether steps over blocks of latents are computed without dense latents: by kernels, or in torch on a CPU."""
    return states.is_cpu or triton_blocks.supports_latents(states, layout)


def supports_attend_absorbed(query: torch.Tensor, view: View, mask: Mask, options: AttentionOptions) -> bool:
    """Whether `attend_absorbed` computes this call: by kernels, or in torch on a CPU."""
    if triton_blocks.supports_attend_latents(query, view, mask, options):
        return True
    return query.is_cpu and view.new is None


def attend_absorbed(
    query: torch.Tensor, weight: torch.Tensor, view: View, mask: Mask, options: AttentionOptions
) -> torch.Tensor:
    """Attention over latents that a model would expand to keys and values of its heads, without expanding them: queries
    absorb the up-projection of keys, and means of latents are projected to values.

    Args:
        query: `[B, Hq, S, Dk]`: parts for content, then the rotary part of `Dr` channels.
        weight: `[Hq * (Dk - Dr + Dv), R]`: the up-projection; of each head content of keys, then values.
        view: Latents `[B, 1, T, R]` as keys, rotary keys `[B, 1, T, Dr]` as values.
        mask, options: As in `attend`.

    Returns:
        `[B, S, Hq, Dv]`, contiguous.

    Raises:
        ValueError: The mask has fewer columns than `view` has tokens.
    """
    if mask is not None:
        check_mask(mask, view.length if isinstance(view.counts, Counts) else 0)

    def means_of(latent: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        if triton_blocks.supports_attend_latents(query, view, mask, options):
            return triton_blocks.attend_latents(latent, rotary, view, mask, options)
        batch, _, queries, _ = query.shape
        counted = on_host(view) if isinstance(view.counts, DeviceCounts) else view
        by_batch = latent.unflatten(1, (batch, queries)).transpose(0, 1)
        means = cpu_attention.attend(torch.cat([by_batch, rotary], -1), counted, mask, options, latents=True)
        return means.permute(2, 0, 1, 3).flatten(1, 2)

    return absorbed(query, weight, view.tensors.layout.value_dim, means_of)


def absorbed(
    query: torch.Tensor,
    weight: torch.Tensor,
    rotary_dim: int,
    attend: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """`attend_absorbed` by a function of `latent` `[Hq, B * S, R]` and `rotary` `[B, Hq, S, Dr]`, which returns means
    of latents `[Hq, B * S, R]`."""
    batch, heads, queries, dim = query.shape
    up = weight.unflatten(0, (heads, -1))
    content, rotary = query.split([dim - rotary_dim, rotary_dim], 3)
    means = attend(content.transpose(0, 1).flatten(1, 2) @ up[:, : content.shape[3]], rotary)
    out = means @ up[:, content.shape[3] :].mT  # [Hq, B * S, Dv]
    return out.unflatten(1, (batch, queries)).permute(1, 2, 0, 3).contiguous()


def check_host_reads(tensors: LayerTensors) -> None:
    """Raise a `RuntimeError` while a CUDA graph is captured: the host cannot read counts then."""
    if is_capturing():
        key_dim, value_dim = tensors.layout.key_dim, tensors.layout.value_dim
        raise RuntimeError(
            f"No kernel attends to these heads (keys of {key_dim} channels, values of {value_dim}) on this device, or "
            "TQ_HF_BACKEND is torch. Attention in torch reads counts on the host, which a CUDA graph cannot do. "
            "Generate with `disable_compile=True`, or make the cache without `max_cache_len`."
        )


@torch.compiler.disable
@outside_inference_mode
def append_token(view: View) -> None:
    """Append the new tokens of a preallocated store's decode step, at most 128, unless they are appended, and encode
    the block that becomes due.

    Raises:
        ValueError: There is no room, without kernels. In a kernel a device-side assertion fails.
        RuntimeError: No kernel supports the heads, and a CUDA graph is captured.
    """
    tensors, counts, states = view.tensors, view.counts, None if view.pending is None else view.pending.states
    if view.pending is None or states is None:
        return
    assert isinstance(counts, DeviceCounts)
    if triton_blocks.supports_blocks(tensors.rows, tensors.layout):
        triton_blocks.append_token(tensors, counts, states, view.length)
    else:
        say_torch_computes("Appending to a preallocated cache", states[0], *(x.shape[-1] for x in states))
        check_host_reads(tensors)
        config, tokens, held = tensors.config, states[0].shape[2], counts.read().without_encoded_rows()
        check_room(tokens, held.tokens, view.length)
        after = counts_after(held, tokens, config.sink_tokens, config.residual_length)
        append_rows(tensors, held, after, states)
        counts.write(after)
    view.pending.states = None


def append_rows(tensors: LayerTensors, held: Counts, after: Counts, states: KeyValue) -> None:
    """Write a few tokens to sinks and ring, which have room, and encode the blocks that become due: of the counts
    `held` before and those `after`."""
    first, sunk = held.blocks * BLOCK_TOKENS, (held.sinks, after.sinks - held.sinks)
    write_tokens(tensors.rows, tensors.ring_rows, states, sunk, first + held.residual)
    for skipped, part in tensors.ring_parts(first, after.pending * BLOCK_TOKENS):
        encode(tensors.config, part, tensors.blocks, held.blocks + skipped // BLOCK_TOKENS)


def on_host(view: View) -> View:
    """View with counts on the host, of a decode step with counts on the device: its new tokens are appended."""
    append_token(view)
    check_host_reads(view.tensors)
    assert isinstance(view.counts, DeviceCounts)
    counts = view.counts.read()._replace(pending=0)
    return View(view.tensors, counts, counts.tokens)


def dense_tokens(tensors: LayerTensors, held: torch.Tensor, length: int) -> KeyValue:
    """Return all tokens as dense keys and values `[B, Hkv, length, D]`, zeros after the last. Counts `held` stay on
    the device, so that a captured graph can replay this."""
    tokens, num_sinks, capacity = tensors.layout.tokens, tensors.config.sink_tokens, tensors.ring_rows
    room = max(0, length - num_sinks)
    keys, values = map(tensors.rows.new_empty, tensors.dense_shapes(length))
    if tensors.blocks.capacity:
        packed = slice(num_sinks, num_sinks + tensors.blocks.capacity * tokens)
        dequantize(tensors.config, tensors.blocks, keys[:, :, packed], values[:, :, packed])
    sinks, blocks, rows = held[:3, 0].unbind()
    first, device = blocks * tokens, tensors.row.device
    # Rewrite as many rows of the result as the ring has: residual rows, and near the end some packed rows before them.
    row = first.clamp(max=max(0, room - capacity)) + torch.arange(min(capacity, room), device=device)
    in_residual, slot, target = (row >= first)[:, None], row % capacity, num_sinks + row.long()
    empty = (torch.arange(length, device=device) >= sinks + first + rows)[:, None]
    for out, dense, sink in zip((keys, values), tensors.states(slice(None)), tensors.sinks(num_sinks), strict=True):
        out[:, :, :num_sinks] = sink[:, :, :length]
        near = torch.where(in_residual, dense.index_select(2, slot), out.index_select(2, target))
        out.index_copy_(2, target, near).masked_fill_(empty, 0)
    return keys, values


def attend_dense(query: torch.Tensor, states: KeyValue, mask: Mask, options: AttentionOptions) -> torch.Tensor:
    """`tq_hf.ops.cpu.attention.attend_dense`, contiguous, by a kernel where one takes the call."""
    if triton_blocks.supports_attend_dense(query, states, mask, options):
        return triton_blocks.attend_dense(query, states, mask, options)
    say_torch_computes("Attention with capped logits or learned sinks", query, *(x.shape[-1] for x in states))
    return cpu_attention.attend_dense(query, states, mask, options).contiguous()


@torch.compiler.disable
def paged_step(
    new: Tokens,
    pages: LayerPages,
    sequences: Sequences,
    options: AttentionOptions,
    workspace: Workspace | None = None,
    *,
    store: bool = True,
) -> torch.Tensor:
    """Attend from every request's new tokens to its pages and to the new tokens; then store the new tokens.

    A request's queries attend, causally, to its sinks, to the blocks that `sequences` counts as packed, to the rows
    after them in its ring, and to the new tokens exactly. Then new rows are written to the ring and to the sink page,
    and completed blocks are encoded, from ring rows and from new keys and values.

    Args:
        new: The T tokens of all requests, with any strides.
        pages: The layer's view of the pool, written in place.
        sequences: Lengths and block tables of the requests.
        options: Causal and without biases.
        workspace: Source of the kernels' scratch outside of captured graphs; by default it is allocated.
        store: Whether to encode blocks and to store prompts. False if another layer with the same keys and values
            reads the pages later in this step. (A single new token is written by every layer.)

    Returns:
        `[T, Hq, D]` in the query's dtype, 0 for padding tokens.

    Raises:
        RuntimeError: The workspace is locked, and the step needs more than was reserved.
    """

    # For heads without a kernel of many queries: more than 256 channels, on 8.x more than 128, on 7.5 all.
    def prompts_by_torch(out: torch.Tensor) -> None:
        for request in reference.requests(sequences, pages.tensors):
            if request.tokens.stop - request.tokens.start > 1:
                out[request.tokens] = _request_output(*_states_of(request, new), pages, request, options)

    query = new.query
    if triton_pages.supports_paged_step(query, new.key, pages):
        by_kernel = sequences.max_q == 1 or triton_pages.supports_paged_prompts(query, pages.layout)
        by_torch = None if by_kernel else prompts_by_torch
        arguments = (new, pages, sequences, options, workspace)
        return triton_pages.paged_step(*arguments, store=store, attend_prompts=by_torch)
    if pages.blocks is None:  # the manager has reported dense layers
        what = "A decode step of a batch" if sequences.max_q == 1 else "A step with prompts of a batch"
        say_torch_computes(what, query, query.shape[-1])
    out = torch.zeros_like(query)
    for request in reference.requests(sequences, pages.tensors):
        queries, states = _states_of(request, new)
        out[request.tokens] = _request_output(queries, states, pages, request, options)
        if store:
            store_request(pages, request, states)
    return out


def _states_of(request: reference.Request, new: Tokens) -> tuple[torch.Tensor, KeyValue]:
    """A request's queries `[1, Hq, n, D]`, and its new keys and values `[1, Hkv, n, D]`."""
    queries, keys, values = (x[request.tokens].transpose(0, 1)[None] for x in new)
    return queries, (keys, values)


def _request_output(
    query: torch.Tensor, new: KeyValue, pages: LayerPages, request: reference.Request, options: AttentionOptions
) -> torch.Tensor:
    """Attention of a request's queries `[1, Hq, n, D]` before its `new` keys and values `[1, Hkv, n, D]` are stored,
    `[n, Hq, D]`."""
    if pages.blocks is not None:
        return attend_dense(query, reference.rows_of(pages, request, new), None, options)[0]
    if request.past or not cpu_attention.supports_sdpa(options):
        return attend(query, reference.view_of(pages, request, new), None, options)[0]
    if query.shape[-1] > MAX_FLASH_DIM:
        say_torch_computes("A prompt of a batch", query, query.shape[-1])
        return cpu_attention.dense_sdpa(query, new, None, options)[0]
    # Read a whole prompt as generate() does.
    out = scaled_dot_product_attention(query, *new, is_causal=True, scale=options.scaling, enable_gqa=True)
    return out[0].transpose(0, 1)


def store_request(pages: LayerPages, request: reference.Request, new: KeyValue) -> None:
    """Encode the blocks that `new` keys and values `[1, Hkv, n, D]` complete, and write rows to ring and sink page."""
    sinks, ring = pages.tensors.sinks, pages.tensors.ring_rows
    past, length = request.past, request.past + new[0].shape[2]
    first, end = (due_blocks(n, sinks, 0) for n in (past, length))
    if end > first:
        start, stop = (sinks + block * BLOCK_TOKENS for block in (first, end))
        row = (torch.arange(min(start, past), past, device=new[0].device) - sinks) % ring
        old = pages.states(pages.rows(request.rows)[:, :, row])
        keys, values = (
            torch.cat([rows, states[:, :, max(0, start - past) : stop - past]], 2)
            for rows, states in zip(old, new, strict=True)
        )
        if pages.blocks is not None:
            pages.write_block_rows(request.blocks[first:end], (keys, values))
        else:
            blocks = PackedBlocks.allocate(pages.layout, 1, pages.kv_heads, end - first, keys.device)
            blocks = replace(blocks, channel_scales=pages.channel_scales)
            encode(pages.config, (keys, values), blocks, 0)
            pages.write_packed(request.blocks[first:end], blocks)
    token = torch.arange(past, length, device=new[0].device)
    stays = (token < sinks) | (token >= length - ring)
    row = torch.where(token < sinks, ring + token, (token - sinks) % ring)
    pages.write_rows(request.rows, row[stays], (new[0][:, :, stays], new[1][:, :, stays]))


@torch.compiler.disable
def windowed_step(
    new: Tokens, windows: LayerWindows, step: WindowStep, options: AttentionOptions, *, store: bool = True
) -> torch.Tensor:
    """Attend from every request's new tokens to the window before each of them, then store the new tokens.

    Args:
        new: The T tokens of all requests, with any strides.
        windows: The layer's view of the pool, written in place.
        step: Result of `sliding_pages.plan_step` for this step.
        options: Causal and without biases.
        store: Whether to store prompts. False if another layer with the same keys and values reads the windows later in
            this step.

    Returns:
        `[T, Hq, D]` in the query's dtype, 0 for padding tokens.
    """
    if step.tokens is None:
        return _window_step(new, windows, step, options)
    out = torch.zeros_like(new.query)
    if len(step.tokens):
        ones = Tokens(*(x[step.tokens] for x in new))
        out[step.tokens] = _window_step(ones, windows, step, options)
    for tokens, past, block_table in step.prompts:
        prompt = Tokens(*(x[tokens] for x in new))
        out[tokens] = sliding_pages.attend_prompt(prompt, windows, past, block_table, options, store)
    return out


def _window_step(new: Tokens, windows: LayerWindows, step: WindowStep, options: AttentionOptions) -> torch.Tensor:
    """Store the N new tokens of requests with one each, then attend to their windows: `[N, Hq, D]`."""
    if triton_pages.supports_attend_windows(new.query, new.key, windows):
        return triton_pages.attend_windows(new, windows, step, options)
    say_torch_computes("A sliding layer's decode step of a batch", new.query, new.query.shape[-1])
    return sliding_pages.attend_windows(new, windows, step, options)


def truncate(scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Set logits outside of `top_k`, then `top_p`, then `min_p` to -inf, as transformers' processors do.

    The kept tokens are those of transformers, and all with the same logit as the least likely of them. transformers
    keeps an arbitrary part of these under `top_p`.

    Args:
        scores: `[N, vocabulary]` float32, contiguous, overwritten.
        top_k: `[N]` int32; 0 for all tokens.
        top_p, min_p: `[N]` float32; 1 and 0 for all tokens.
    """
    backend = triton_blocks if triton_blocks.supports_states(scores) else reference
    return backend.truncate(scores, top_k, top_p, min_p)
