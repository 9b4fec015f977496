"""Packed blocks as attention reads them on a device without kernels: scores of keys, weighted sums of values.

With R the rotation and f the factors, a key is R^-1 (scale c + mean) / f, so with p = R (q / f), q . k = scale (p . c)
+ p . mean: the query is rotated, the history never is. Values likewise: sum w R^-1 (scale c) / f = R^-1 (sum (w scale)
c) / f, rotated back once a tile. Scales multiply scores and weights, of which a head has one a token, and not the
levels, of which it has D.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from ..codec.rotation import rotate_back, rotation_matrix
from ..config import TurboQuantConfig
from ..inference_mode import made_once
from ..tensors.blocks import PackedBlocks
from ..tensors.view import StoreView
from .tables_cpu import PLANES, ROWS, Take, key_levels, value_levels, value_order

FEW_QUERIES = 16
"""Up to so many rows a KV head, queries are arranged as key levels are (four times the products); beyond, keys are."""


def rotated(query: torch.Tensor, view: StoreView) -> torch.Tensor:
    """Queries `[N, G, S, Dk]` float32 as the keys of a view are stored: R (q / f), padded."""
    dim = view.blocks.layout.key_dim_padded
    query = query / _of_heads(view.blocks.factors.keys)[:, None]
    padded = torch.nn.functional.pad(query, (0, dim - query.shape[-1])) if dim > query.shape[-1] else query
    return padded @ rotation_matrix(dim, view.config.rotation_seed, query.device, torch.float32).T


def _of_heads(factor: torch.Tensor) -> torch.Tensor:
    """Factors `[B, Hkv, D]` in float32, `[N, 1, D]`."""
    return factor.float().flatten(0, 1)[:, None]


@made_once
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
        products: In what many queries weigh values: bfloat16 where the model has it and the processor multiplies it
            several times as fast, else float32.
    """

    position: int
    query: torch.Tensor
    config: TurboQuantConfig
    blocks: PackedBlocks
    value_dim: int
    take: Take
    products: torch.dtype = torch.float32

    @property
    def tokens(self) -> int:
        """Tokens of the tile."""
        return self.blocks.capacity * self.blocks.layout.tokens

    @property
    def many(self) -> bool:
        """Whether keys and values are put in the order of tokens and scaled, rather than queries and weights."""
        return self.query.shape[1] * self.query.shape[2] > FEW_QUERIES

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
    def key_rows(self) -> torch.Tensor:
        """Rotated keys token by token, `[N, n * 128, Dk padded]` float32."""
        levels = self._keys
        if self.blocks.layout.key_bits == 8:
            out = levels.mul_(self._scales[..., :1])
        else:
            heads, blocks, rows, pairs = levels.shape[:4]
            out = self.take("key rows", (heads, blocks, PLANES, rows, 2 * pairs), torch.float32)
            by_plane = levels.movedim(4, 2)
            scales = self._scales[..., 0].view(heads, blocks, PLANES, rows, 1, 1)
            torch.mul(by_plane, scales, out=out.view(by_plane.shape))
        out = out.view(*self._scales.shape[:3], -1)
        if self.blocks.key_means is not None:
            out += self.blocks.key_means.flatten(0, 1).float()[:, :, None]
        return out.flatten(1, 2)

    @cached_property
    def value_rows(self) -> torch.Tensor:
        """Values token by token as they are stored, `[N, n * 128, Dv padded]` in `products`."""
        levels = self._values
        heads, blocks, dim = levels.shape[:3]
        if self.blocks.layout.value_bits == 8:
            by_token = levels.unflatten(-1, (PLANES, ROWS // 2, 2)).movedim(2, -1)
        else:
            by_token = levels.unflatten(-1, (ROWS // 2, PLANES, 2)).movedim(2, -1).transpose(2, 3)
        out = self.take("value rows", (heads, blocks, PLANES, ROWS // 2, 2, dim), self.products)
        torch.mul(by_token, self._scales[..., 1].view(*out.shape[:-1], 1), out=out)
        return out.view(heads, self.tokens, dim)

    def scores(self, part: slice) -> torch.Tensor:
        """Logits `[N, G * s, n * 128]` of the queries of s tokens."""
        query = self.query[:, :, part].flatten(1, 2)
        heads, rows, dim = query.shape
        if self.many:
            return query @ self.key_rows.mT
        blocks = self.blocks.capacity
        if self.blocks.layout.key_bits == 8:
            scores = query @ self._keys.flatten(1, 2).mT
        else:
            # Row (r, p) meets the levels of plane p and zeros elsewhere.
            spread = query.view(heads, rows, 1, dim // 2, 1, 2) * _planes(query.device)
            spread = spread.view(heads, rows * PLANES, dim * PLANES)
            scores = spread @ self._keys.view(heads, blocks * ROWS, dim * PLANES).mT
            scores = scores.view(heads, rows, PLANES, blocks, ROWS).transpose(2, 3)
        scores = scores.reshape(heads, rows, blocks, PLANES * ROWS) * self._scales[:, None, :, :, 0]
        if self.blocks.key_means is not None:
            means = self.blocks.key_means.flatten(0, 1).float()
            scores += (query @ means.mT)[..., None]
        return scores.view(heads, rows, -1)

    def weighted(self, weights: torch.Tensor) -> torch.Tensor:
        """Sums of the values under weights `[N, R, n * 128]`, `[N, R, Dv]`."""
        heads, rows, _ = weights.shape
        blocks, layout = self.blocks.capacity, self.blocks.layout
        if self.many:
            total = (weights.to(self.products) @ self.value_rows).float()
        else:
            weights = weights.view(heads, rows, blocks, PLANES * ROWS) * self._scales[:, None, :, :, 1]
            ordered = value_order(weights, layout.value_bits).transpose(1, 2).reshape(heads * blocks, rows, -1)
            total = (ordered @ self._values.flatten(0, 1).mT).view(heads, blocks, rows, -1).sum(1)
        if self.config.rotate_values:
            dim = layout.value_dim_padded
            total = total @ rotation_matrix(dim, self.config.rotation_seed, total.device, torch.float32)
        return total[..., : self.value_dim] / _of_heads(self.blocks.factors.values)


def dequantise(
    config: TurboQuantConfig, blocks: PackedBlocks, keys: torch.Tensor, values: torch.Tensor, take: Take
) -> None:
    """`tq_hf.codec.reference.dequantise` by tables: the same bits.

    Args:
        config: Seed of the rotation.
        blocks: Blocks, all of which are read, few enough to be a tile.
        keys: `[B, Hkv, N * 128, Dk]`, written in its own dtype.
        values: `[B, Hkv, N * 128, Dv]`, likewise.
        take: Makes scratch.
    """
    tile = PackedTile(0, keys[:0], config, blocks, values.shape[-1], take)
    parts = ((keys, tile.key_rows, True), (values, tile.value_rows, config.rotate_values))
    for (out, rows, turned), factor in zip(parts, blocks.factors, strict=True):
        states = rotate_back(rows, config.rotation_seed) if turned else rows
        out.copy_((states[..., : out.shape[-1]] / _of_heads(factor)).view(out.shape))
