"""Steps over pages of latents (MLA): kernels attend from requests with few new tokens, torch from others, one by one.

A request's few new queries absorb the up-projection and attend to its latents. Many new queries attend to keys and
values of its heads, which the up-projection makes of all latents: absorbed, each query would compute with `R` channels
per head instead of `Dk`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import scaled_dot_product_attention
from tq_kernels.types import AttentionOptions, KeyValue, Sequences

from ..tensors.pages import LayerPages
from . import dispatch, reference
from .cpu import attention as cpu_attention
from .workspace import Workspace

ABSORBED_TOKENS = 16
"""Most new tokens of a request whose queries absorb the up-projection, as in steps of a `TurboQuantCache`."""
EXPANDED_BYTES = 256 << 20
"""Most bytes of keys and values that are expanded at a time, some heads of one request. One head may take more."""


@torch.compiler.disable
def latent_step(
    query: torch.Tensor,
    expanded: KeyValue | None,
    new: KeyValue,
    weight: torch.Tensor,
    pages: LayerPages,
    sequences: Sequences,
    options: AttentionOptions,
    workspace: Workspace | None = None,
) -> torch.Tensor:
    """Attend from every request's new tokens to its pages and to the new tokens; then store the new tokens.

    Args:
        query: `[1, Hq, T, Dk]`, T tokens of all requests.
        expanded: Keys `[1, Hq, T, Dk]` and values `[1, Hq, T, Dv]` that the model made of `new`; `None` to make them
            here, where they are needed.
        new: Latents `[1, 1, T, R]` and rotary keys `[1, 1, T, Dr]`.
        weight: Up-projection `[Hq * (Dk - Dr + Dv), R]`.
        pages, sequences, options, workspace: As in `dispatch.paged_step`.

    Returns:
        `[1, T, Hq, Dv]` in the query's dtype, 0 for padding tokens.
    """

    def by_kernels(query: torch.Tensor, new: KeyValue, sequences: Sequences, scratch: Workspace | None) -> torch.Tensor:
        """`latent_step` of few new tokens of each request, whose lengths are read on the device."""

        def means_of(latent: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
            return dispatch.attend_latent_pages(latent, rotary, new, pages, sequences, options, scratch)

        return dispatch.absorbed(query, weight, pages.layout.value_dim, means_of)

    if dispatch.supports_latent_step(query, new, pages, sequences.max_q, options):
        if sequences.max_q == 1:
            return by_kernels(query, new, sequences, workspace)
        # Memory is reserved for requests with one new token, and for what is expanded.
        heads, count = query.shape[1], sequences.cu_seqlens_q.shape[0] - 1
        if dispatch.latent_scratch(count, heads, sequences.max_q, pages.config, pages.layout, query) <= EXPANDED_BYTES:
            return by_kernels(query, new, sequences, None)
    expanded = expand(weight, query.shape, new) if expanded is None else expanded
    out = query.new_zeros(1, query.shape[2], query.shape[1], expanded[1].shape[3])
    if singles := dispatch.supports_latent_step(query, new, pages, 1, options):
        token, alone = _singles(sequences)
        states = new[0][:, :, token], new[1][:, :, token]
        out[:, token] = by_kernels(query[:, :, token], states, alone, workspace)
    for request in reference.requests(sequences, pages.tensors):
        part = request.tokens
        if singles and part.stop - part.start == 1:
            continue
        latents, rotary, keys, values = (x[:, :, part] for x in (*new, *expanded))
        queries, states = query[:, :, part], (keys, values)
        if not request.past and cpu_attention.supports_sdpa(options):
            # Read a whole prompt as generate() does.
            found = scaled_dot_product_attention(queries, *states, is_causal=True, scale=options.scaling)
            out[:, part] = found.transpose(1, 2)
        elif pages.blocks is None and request.past and queries.shape[2] <= ABSORBED_TOKENS:
            view = reference.view_of(pages, request, (latents, rotary))
            out[:, part] = dispatch.attend_absorbed(queries, weight, view, None, options)
        else:
            held = _held(pages, request, (latents, rotary))
            for some, up in _by_heads(weight, query, held):
                states, few = expand(up, queries[:, some].shape, held), options
                if options.s_aux is not None:
                    few = options._replace(s_aux=options.s_aux[some])
                out[:, part, some] = dispatch.attend_dense(queries[:, some], states, None, few)
        dispatch.store_request(pages, request, (latents, rotary))
    return out


def _singles(sequences: Sequences) -> tuple[torch.Tensor, Sequences]:
    """Tokens `[n]` of the n requests that have one, and these requests alone."""
    starts, lengths, table, packed, *_ = sequences
    assert packed is not None
    chosen = (starts.diff() == 1).nonzero()[:, 0]
    ends = torch.nn.functional.pad(lengths.diff()[chosen].cumsum(0), (1, 0)).int()
    first = torch.arange(len(ends), dtype=torch.int32, device=ends.device)
    return starts[chosen].long(), Sequences(first, ends, table[chosen], packed[chosen], 1)


def _by_heads(weight: torch.Tensor, query: torch.Tensor, held: KeyValue) -> Iterator[tuple[slice, torch.Tensor]]:
    """Some heads of `query` `[1, Hq, T, Dk]`, and the part of `weight` that expands states `held` for them."""
    up = weight.unflatten(0, (query.shape[1], -1))
    size = held[0].shape[2] * (up.shape[1] + query.shape[3]) * query.element_size()
    for start in range(0, len(up), step := max(1, EXPANDED_BYTES // size)):
        heads = slice(start, start + step)
        yield heads, up[heads].flatten(0, 1)


def _held(pages: LayerPages, request: reference.Request, new: KeyValue) -> KeyValue:
    """Latents `[1, 1, past + n, R]` and rotary keys `[1, 1, past + n, Dr]` of a request, `new` ones included."""
    if pages.blocks is not None:
        return reference.rows_of(pages, request, new)
    return dispatch.dense(reference.view_of(pages, request, new))


def scratch_bytes(longest: int, states: KeyValue) -> int:
    """Bytes that a step takes beside its new tokens: a packed and a dense copy of a request with `longest` tokens, as
    wide as `states`, and a part of it expanded."""
    return EXPANDED_BYTES + 4 * longest * sum(x.shape[-1] * x.element_size() for x in states)


def expand(weight: torch.Tensor, query: torch.Size, states: KeyValue) -> KeyValue:
    """Keys `[B, Hq, T, Dk]` and values `[B, Hq, T, Dv]` that `weight` makes of latents `[B, 1, T, R]` and rotary keys
    `[B, 1, T, Dr]`, for queries `[B, Hq, S, Dk]` of size `query`."""
    (latents, rotary), heads = states, query[1]
    made = latents @ weight.unflatten(0, (heads, -1)).mT
    content = query[3] - rotary.shape[3]
    return torch.cat([made[..., :content], rotary.expand(-1, heads, -1, -1)], -1), made[..., content:]
