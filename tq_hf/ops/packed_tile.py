"""Packed blocks as attention reads them on a device without kernels: scores of keys, weighted sums of values.

With R the rotation, a key is R^-1 (scale c + mean), so q . k = scale (R q . c) + R q . mean: the query is rotated, the
history never is. Values likewise: sum w R^-1 (scale c) = R^-1 sum (w scale) c, rotated back once a tile. Scales
multiply scores and weights, of which a head has one a token, and not the levels, of which it has D.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from ..codec.rotation import rotation_matrix
from ..config import TurboQuantConfig
from ..inference_mode import outside_inference_mode
from ..tensors.blocks import PackedBlocks
from ..tensors.view import StoreView
from .tables_cpu import PLANES, ROWS, Take, key_levels, value_levels, value_order

FEW_QUERIES = 16
"""Up to so many rows a KV head, queries are arranged as key levels are (four times the products); beyond, keys are."""


def rotated(query: torch.Tensor, view: StoreView) -> torch.Tensor:
    """Queries `[..., Dk]` float32 as the keys of a view are stored: R q, padded."""
    dim = view.blocks.layout.key_dim_padded
    padded = torch.nn.functional.pad(query, (0, dim - query.shape[-1])) if dim > query.shape[-1] else query
    return padded @ rotation_matrix(dim, view.config.rotation_seed, query.device, torch.float32).T


@lru_cache
@outside_inference_mode
def _planes(device: torch.device) -> torch.Tensor:
    """Which plane a row is for, `[4, 1, 4, 1]`."""
    return torch.eye(PLANES, device=device).view(PLANES, 1, PLANES, 1)


@dataclass
class PackedTile:
    """Some packed blocks of all heads; N heads in all, B * Hkv.

    Args:
        position: Position of the first token.
        query: Rotated queries `[N, G, S, Dk padded]` float32, scaled.
        config: What the blocks were encoded with.
        blocks: n blocks, all of which are read.
        value_dim: Channels of a value, without padding.
        take: Makes scratch; what it gives must last until the tile is done with.
    """

    position: int
    query: torch.Tensor
    config: TurboQuantConfig
    blocks: PackedBlocks
    value_dim: int
    take: Take

    @property
    def tokens(self) -> int:
        """Tokens of the tile."""
        return self.blocks.capacity * self.blocks.layout.tokens

    @cached_property
    def _scales(self) -> torch.Tensor:
        """`[N, n, 128, 2]` float32: of keys and values."""
        return self.blocks.scalars.flatten(0, 1).view(torch.float16).unflatten(-1, (-1, 2)).float()

    @cached_property
    def _keys(self) -> torch.Tensor:
        layout, words = self.blocks.layout, self.blocks.key_words.flatten(0, 1)
        return key_levels(words, layout.key_bits, layout.key_dim_padded, self.take)

    @cached_property
    def _values(self) -> torch.Tensor:
        layout = self.blocks.layout
        return value_levels(
            self.blocks.value_words.flatten(0, 1), layout.value_bits, layout.value_dim_padded, self.take
        )

    @cached_property
    def _keys_by_token(self) -> torch.Tensor:
        """`[N, n * 128, D]`."""
        keys = self._keys
        if self.blocks.layout.key_bits == 8:
            return keys.flatten(1, 2)
        heads, blocks, rows, pairs = keys.shape[:4]
        out = self.take("key rows", (heads, blocks, PLANES, rows, pairs), torch.complex64)
        out.copy_(keys.view(torch.complex64).squeeze(-1).movedim(-1, 2))
        return out.view(torch.float32).view(heads, self.tokens, 2 * pairs)

    @cached_property
    def _values_by_token(self) -> torch.Tensor:
        """`[N, n * 128, D]`."""
        values = self._values
        heads, blocks, dim = values.shape[:3]
        if self.blocks.layout.value_bits == 8:
            return values.transpose(2, 3).reshape(heads, self.tokens, dim)
        out = self.take("value rows", (heads, blocks, PLANES, ROWS // 2, 2, dim), torch.float32)
        out.copy_(values.unflatten(-1, (ROWS // 2, PLANES, 2)).movedim(2, -1).transpose(2, 3))
        return out.view(heads, self.tokens, dim)

    def scores(self, part: slice) -> torch.Tensor:
        """Logits `[N, G * s, n * 128]` of the queries of s tokens."""
        query = self.query[:, :, part].flatten(1, 2)
        heads, rows, dim = query.shape
        blocks, bits = self.blocks.capacity, self.blocks.layout.key_bits
        if bits == 8 or rows > FEW_QUERIES:
            scores = query @ self._keys_by_token.transpose(1, 2)
        else:
            # Row (r, p) meets the levels of plane p and zeros elsewhere.
            spread = query.view(heads, rows, 1, dim // 2, 1, 2) * _planes(query.device)
            spread = spread.view(heads, rows * PLANES, dim * PLANES)
            scores = spread @ self._keys.view(heads, blocks * ROWS, dim * PLANES).transpose(1, 2)
            scores = scores.view(heads, rows, PLANES, blocks, ROWS).transpose(2, 3)
        scores = scores.reshape(heads, rows, blocks, PLANES * ROWS) * self._scales[:, None, :, :, 0]
        if self.blocks.key_means is not None:
            means = self.blocks.key_means.flatten(0, 1).float()
            scores += (query @ means.transpose(1, 2))[..., None]
        return scores.view(heads, rows, -1)

    def weighted(self, weights: torch.Tensor) -> torch.Tensor:
        """Sums of the values under weights `[N, R, n * 128]`, `[N, R, Dv]`."""
        heads, rows, _ = weights.shape
        blocks, layout = self.blocks.capacity, self.blocks.layout
        weights = weights.view(heads, rows, blocks, PLANES * ROWS) * self._scales[:, None, :, :, 1]
        if rows > FEW_QUERIES:
            total = weights.view(heads, rows, -1) @ self._values_by_token
        else:
            ordered = value_order(weights, layout.value_bits).transpose(1, 2).reshape(heads * blocks, rows, -1)
            sums = ordered @ self._values.flatten(0, 1).transpose(1, 2)
            total = sums.view(heads, blocks, rows, -1).sum(1)
        if self.config.rotate_values:
            dim = layout.value_dim_padded
            total = total @ rotation_matrix(dim, self.config.rotation_seed, total.device, torch.float32)
        return total[..., : self.value_dim]
