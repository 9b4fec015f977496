"""A sliding layer's step over the dense windows of many requests.

Requests with one new token are computed together, and by nothing but operations of fixed shapes on the device, so that
a decode step can be captured in a CUDA graph and replayed: in a kernel that reads pages where they are, or in torch,
from a copy of the windows. Prompts are read in torch one after the other, and the host knows their lengths: once a step
they are read from the device.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention
from tq_kernels.types import AttentionOptions, Sequences, Tokens

from ..tensors.pages import LayerWindows, Place, Prompt, Singles, WindowStep
from .cpu.attention import attend_buffer, attend_dense, supports_sdpa

WINDOW_BYTES = 256 << 20
"""Most bytes of scratch that a layer takes in torch."""
TILE_QUERIES = 512
"""Number of a prompt's tokens that attend at a time."""


def plan_step(sequences: Sequences, total: int, windows: LayerWindows) -> WindowStep:
    """Find the pages and rows of the windows of a step's requests.

    Args:
        sequences: The requests; their tables list pages of `windows`.
        total: Number of tokens of the step, padding included.
        windows: Windows of any sliding layer.
    """
    device = sequences.block_table.device
    if sequences.max_q == 1:
        token = torch.arange(total, dtype=torch.int32, device=device)
        request = torch.searchsorted(sequences.cu_seqlens_q[1:], token, right=True)
        return WindowStep(_singles(None, request, sequences, windows), [])
    starts, lengths = sequences.cu_seqlens_q.tolist(), sequences.cu_seqlens_k.diff().tolist()
    block_table, singles, prompts = sequences.block_table.long(), [], []
    for i, length in enumerate(lengths):
        new = starts[i + 1] - starts[i]
        if new == 1:
            singles.append((starts[i], i))
        elif new:
            prompts.append(Prompt(slice(starts[i], starts[i + 1]), length - new, block_table[i]))
    if not singles:
        return WindowStep(None, prompts)
    tokens, requests = torch.tensor(singles, device=device).T
    return WindowStep(_singles(tokens, requests, sequences, windows), prompts)


def _singles(
    tokens: torch.Tensor | None, request: torch.Tensor, sequences: Sequences, windows: LayerWindows
) -> Singles:
    """Find the windows of tokens of these requests `[N]`. Padding tokens have request B or more."""
    count = len(sequences.block_table)
    past = torch.where(request < count, sequences.cu_seqlens_k.diff()[request.clamp(max=count - 1)] - 1, -1)
    return Singles(tokens, past.int(), sequences.block_table[request.clamp(max=count - 1)], windows)


def attend_windows(new: Tokens, windows: LayerWindows, singles: Singles, options: AttentionOptions) -> torch.Tensor:
    """Store the N new tokens, then attend to the windows: `[N, Hq, D]`."""
    query, key, value = new
    windows.write(*singles.written, key, value)
    count, heads = query.shape[:2]
    # Count the gathered rows twice: torch makes as much again of them.
    each = 2 * windows.window * (key[0].nbytes + value[0].nbytes)
    step, parts = max(1, WINDOW_BYTES // each), []
    # A padding token reads zeros: it must attend to something.
    mask = (singles.held | ~singles.exists[:, None])[:, None, None]
    for start in range(0, count, step):
        part = slice(start, start + step)
        keys, values = (x.transpose(1, 2) for x in windows.read(*(where[part] for where in singles.read)))
        if supports_sdpa(options):
            # Queries of a KV head as rows of one: sdpa's fast kernels take no mask beside groups of heads.
            rows = query[part].unflatten(1, (keys.shape[1], -1))
            found = scaled_dot_product_attention(rows, keys, values, attn_mask=mask[part], scale=options.scaling)
            parts.append(found.reshape(-1, heads, found.shape[-1]))
        else:
            parts.append(attend_dense(query[part, :, None], (keys, values), mask[part], options)[:, 0])
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.masked_fill(~singles.exists[:, None, None], 0)


def attend_prompt(new: Tokens, windows: LayerWindows, prompt: Prompt, options: AttentionOptions) -> torch.Tensor:
    """Attend to the window and to the n new tokens: `[n, Hq, D]`."""
    (query, key, value), window = new, windows.window
    held = min(prompt.past, window - 1)
    if held:
        before = windows.read(*_place(windows, prompt, prompt.past - held, prompt.past))
        keys, values = (torch.cat(states) for states in zip(before, (key, value), strict=True))
    else:
        keys, values = key, value
    queries, keys, values = (x.transpose(0, 1)[None] for x in (query, keys, values))
    parts = []
    for start in range(0, len(query), TILE_QUERIES):
        stop = min(start + TILE_QUERIES, len(query))
        first, end = max(0, held + start - window + 1), held + stop
        seen, shown = keys[:, :, first:end], values[:, :, first:end]
        rows = queries[:, :, start:stop]
        mask = None
        if end - first > window or not supports_sdpa(options):
            position = torch.arange(first, end, device=query.device)
            own = position[start - stop :, None]
            mask = ((position <= own) & (position > own - window))[None, None]
        if not supports_sdpa(options):
            assert mask is not None
            parts.append(attend_dense(rows, (seen, shown), mask, options)[0])
            continue
        if mask is not None:
            groups = rows.shape[1] // seen.shape[1]
            seen, shown = (x.repeat_interleave(groups, 1) for x in (seen, shown))
        parts.append(attend_buffer(rows, (seen, shown), mask, options)[0])
    return torch.cat(parts)


def store_prompt(new: Tokens, windows: LayerWindows, prompt: Prompt) -> None:
    """Store the newest of the n new tokens."""
    _, key, value = new
    stored, end = min(len(key), windows.window), prompt.past + len(key)
    windows.write(*_place(windows, prompt, end - stored, end), key[len(key) - stored :], value[len(key) - stored :])


def _place(windows: LayerWindows, prompt: Prompt, start: int, stop: int) -> Place:
    """Pages and rows of a request's tokens at positions `start` to `stop`, a window at most."""
    row = torch.arange(start, stop, device=windows.rows.device) % windows.window
    return prompt.block_table[row // windows.rows_per_page], row % windows.rows_per_page
