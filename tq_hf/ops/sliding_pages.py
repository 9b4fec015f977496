"""A sliding layer's step over the dense windows of many requests.

Requests with one new token are computed together, and by nothing but operations of fixed shapes on the device, so that
a decode step can be captured in a CUDA graph and replayed: in a kernel that reads pages where they are, or in torch,
from a copy of the windows. Prompts are read in torch one after the other, and the host knows their lengths: once a step
they are read from the device.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention
from tq_kernels.types import AttentionOptions, Sequences, Tokens

from ..tensors.pages import LayerWindows, WindowStep
from .cpu.attention import attend_dense, dense_sdpa, supports_sdpa

WINDOW_BYTES = 256 << 20
"""Most bytes of scratch that a layer takes in torch."""
TILE_QUERIES = 512
"""Number of a prompt's tokens that attend at a time."""


def plan_step(sequences: Sequences, total: int) -> WindowStep:
    """Find the windows of a step's requests, whose tables list pages of windows. `total` is the number of tokens of the
    step, padding included: each is one of its own if no request has more."""
    device, past = sequences.block_table.device, sequences.cu_seqlens_k.diff() - sequences.cu_seqlens_q.diff()
    if sequences.max_q == 1:
        token = torch.arange(total, dtype=torch.int32, device=device)
        request = torch.searchsorted(sequences.cu_seqlens_q[1:], token, right=True)  # of padding tokens: B or more
        held = request.clamp(max=len(past) - 1)
        return WindowStep(None, torch.where(request < len(past), past[held], -1), sequences.block_table[held], [])
    bounds, lengths = sequences.cu_seqlens_q.tolist(), past.tolist()
    new = [slice(start, stop) for start, stop in pairwise(bounds)]
    ones = [i for i, part in enumerate(new) if part.stop - part.start == 1]
    tokens, requests = torch.tensor([[new[i].start, i] for i in ones], dtype=torch.int64, device=device).view(-1, 2).T
    prompts = [(part, lengths[i], sequences.block_table[i]) for i, part in enumerate(new) if part.stop - part.start > 1]
    return WindowStep(tokens, past[requests], sequences.block_table[requests], prompts)


def attend_windows(new: Tokens, windows: LayerWindows, plan: WindowStep, options: AttentionOptions) -> torch.Tensor:
    """Store the N new tokens, then attend to the windows: `[N, Hq, D]`."""
    (query, key, value), (exists, places, held, (page, row)) = new, plan.rows(windows)
    windows.write(*places, key, value)
    count, heads = query.shape[:2]
    # Count the gathered rows twice: torch makes as much again of them.
    each = 2 * windows.window * (key[0].nbytes + value[0].nbytes)
    step, parts = max(1, WINDOW_BYTES // each), []
    # A padding token reads zeros: it must attend to something.
    mask = (held | ~exists[:, None])[:, None, None]
    for start in range(0, count, step):
        part = slice(start, start + step)
        keys, values = (x.transpose(1, 2) for x in windows.read(page[part], row[part]))
        if supports_sdpa(options):
            # Queries of a KV head as rows of one: sdpa's fast kernels take no mask beside groups of heads.
            rows = query[part].unflatten(1, (keys.shape[1], -1))
            found = scaled_dot_product_attention(rows, keys, values, attn_mask=mask[part], scale=options.scaling)
            parts.append(found.reshape(-1, heads, found.shape[-1]))
        else:
            parts.append(attend_dense(query[part, :, None], (keys, values), mask[part], options)[:, 0])
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.masked_fill(~exists[:, None, None], 0)


def attend_prompt(
    new: Tokens, windows: LayerWindows, past: int, block_table: torch.Tensor, options: AttentionOptions, store: bool
) -> torch.Tensor:
    """Attend from the n new tokens of a request after `past` others to the window before each: `[n, Hq, D]`. Then
    `store` the newest."""
    (query, key, value), window = new, windows.window
    position = torch.arange(max(0, past - window + 1), past + len(query), device=query.device)
    held = min(past, window - 1)
    keys, values = key, value
    if held:
        before = windows.read(*windows.places(block_table, position[:held]))
        keys, values = (torch.cat(states) for states in zip(before, (key, value), strict=True))
    if store:
        newest = position[-min(len(key), window) :]
        windows.write(*windows.places(block_table, newest), key[-window:], value[-window:])
    queries, keys, values = (x.transpose(0, 1)[None] for x in (query, keys, values))
    parts = []
    for start in range(0, len(query), TILE_QUERIES):
        stop = min(start + TILE_QUERIES, len(query))
        first, end = max(0, held + start - window + 1), held + stop
        seen, shown = keys[:, :, first:end], values[:, :, first:end]
        rows = queries[:, :, start:stop]
        mask = None
        if end - first > window:
            own = position[held + start : end, None]
            mask = ((position[first:end] <= own) & (position[first:end] > own - window))[None, None]
        if supports_sdpa(options) and mask is not None:  # sdpa's fast kernels take no mask beside groups of heads
            seen, shown = (x.repeat_interleave(rows.shape[1] // x.shape[1], 1) for x in (seen, shown))
        attend = dense_sdpa if supports_sdpa(options) else attend_dense
        parts.append(attend(rows, (seen, shown), mask, options)[0])
    return torch.cat(parts)
