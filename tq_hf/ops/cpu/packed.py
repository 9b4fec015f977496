"""Packed blocks in torch, for devices without kernels: scores of keys, and weighted sums of values.

With R the rotation and f the channel scales, a key is R^-1 (scale c + mean) / f, so with p = R (q / f), q . k = scale
(p . c) + p . mean: the query is rotated, the history never is. Loud channels, which are not in p, add their own
products. For values, sum w R^-1 (scale c) / f = R^-1 (sum (w
scale) c) / f, rotated back once a tile. Scales multiply scores and weights, one number per token and head, and not the
levels, D numbers.

Words become levels by table lookup (bit layout in `tq_hf.codec.packing`). A few integer operations on whole int32
words arrange the bits so that each 16-bit half of a word is an index of four codes, and one `index_select` gives their
four levels: per number a quarter of a lookup and less than one integer operation. An entry is one element of 16 bytes
in float32, of 8 in bfloat16, which has every level exactly: a 1-d `index_select` of single elements is the fastest
gather of ATen.

    4 bits  magnitudes of codes 0..3 are in the low half already; a delta swap (bits 3, 11 <-> 23, 31) brings their
            signs, and those of codes 4..7 to the other half
    3 bits  the same swap for four quarters at once (bits 0, 2, .. 14 <-> 17, 19, .. 31); each quarter's nibbles, which
            have the lower bit of the code before, are then joined by its signs
    2 bits  the lower three bits of nibbles; the lowest combines a bit of the code before and one of the code before it
    8 bits  no table: shifted and masked, the two planes of a word are fp16 numbers

Levels come in the order of the words, which is not that of the tokens (`key_levels`, `value_levels`); a caller
with few queries arranges those instead. The three tables take 2.5 MiB in all in float32, half of that in bfloat16.

On MPS the integer operations exist for int32, and complex128 does not: entries are rows of four floats there. This has
been read in the list of operators, not run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from tq_kernels.format import code_of, padded_dim
from tq_kernels.types import PackedBlocks

from ...codec.packing import PLANES, QUARTERS, ROWS, rotated_words
from ...codec.reference import loud_index, loud_states
from ...codec.rotation import rotation_matrix
from ...compat import cached_table
from ...config import TurboQuantConfig

Take = Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor]
"""Scratch of a name, shape and dtype, valid until the next of that name."""

_SIGN_BITS = (7, 15, 3, 11)
"""Positions of the signs of an index's four nibbles at 3 and 4 bits."""


@cached_table
def table(bits: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Levels of the four nibbles of an index, in one element: `[65536]` for 3 and 4 bits, `[30584]` for 2.

    For levels in float32 an element is complex128, in bfloat16 float64. On MPS `[..., 4]` in `dtype`, the same bytes.
    """
    code, columns = code_of(bits), []
    index = torch.arange(0x10000 if code.magnitudes else 0x7778, device="cpu")
    of_code = torch.tensor(code.levels, dtype=torch.float32, device="cpu") / 64
    for i in range(4):
        signs = 1 - 2 * (index >> _SIGN_BITS[i] & 1) if code.magnitudes else 1
        columns.append(of_code[index >> 4 * i & 7] * signs)
    entries = torch.stack(columns, -1).to(dtype)
    element = torch.complex128 if dtype == torch.float32 else torch.float64
    return entries.to(device) if device.type == "mps" else entries.view(element).squeeze(-1).to(device)


def _swapped(words: torch.Tensor, mask: int, distance: int, out: torch.Tensor) -> torch.Tensor:
    """`words` with the bits of `mask` exchanged for those `distance` higher, written to `out`."""
    torch.bitwise_right_shift(words, distance, out=out)  # no temporary: an allocation takes longer than a pass
    return out.bitwise_xor_(words).bitwise_and_(mask).mul_(1 + (1 << distance)).bitwise_xor_(words)


_LOWER_THREE = 0x77777777
"""Mask of the lower three bits of each nibble."""


def _crumb_indices(words: torch.Tensor, bits: int, out: torch.Tensor) -> None:
    """Words of 2 or 3 bits to words of two indices.

    Args:
        words: `[..., bits, M, K]`: two tiles of crumbs, and at 3 bits one of signs.
        bits: 2 or 3.
        out: `[..., 2, 2, M, K]`: quarter 2 t + h of the channels at t, h.
    """
    crumbs = words[..., :2, :, :]
    lower, upper = out[..., 0, :, :], out[..., 1, :, :]
    if not code_of(bits).magnitudes:
        # A nibble's lowest bit is the upper one of the code before: with the lower one of the code before that.
        for part, word, other in ((lower, crumbs, 3), (upper, rotated_words(crumbs, 30), 1)):
            index = rotated_words(crumbs, other).bitwise_and_(0x11111111).bitwise_xor_(word)
            torch.bitwise_and(index, _LOWER_THREE, out=part)
        return
    torch.bitwise_and(crumbs, _LOWER_THREE, out=lower)
    torch.bitwise_and(rotated_words(crumbs, 30), _LOWER_THREE, out=upper)
    signs = _swapped(words[..., 2, :, :], 0x5555, 17, torch.empty_like(words[..., 2, :, :]))
    for quarter in range(QUARTERS):
        # From bits 7 and 6 of each byte, less 2 a quarter, to bits 7 and 3.
        index, right = out[..., quarter // 2, quarter % 2, :, :], 3 - 2 * quarter
        index.bitwise_or_((signs << 2 * quarter).bitwise_and_(-0x7F7F7F80))
        index.bitwise_or_((signs >> right if right > 0 else signs << -right).bitwise_and_(0x08080808))


def _look_up(bits: int, words: torch.Tensor, dtype: torch.dtype, take: Take, name: str) -> torch.Tensor:
    """Words of two indices to their levels in `dtype`, eight a word, in the order of the words: flat scratch."""
    entries = table(bits, dtype, words.device)
    index = take(f"{name} index", (*words.shape[:-1], 2 * words.shape[-1]), torch.int32)
    index = index.copy_(words.view(torch.uint16)).flatten()
    out = take(f"{name} levels", (len(index), *entries.shape[1:]), entries.dtype)
    torch.index_select(entries, 0, index, out=out)
    return out.view(dtype).flatten()


def _fp8_planes(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Words `[..., K]` of 8 bits to the fp16 levels of their even and odd planes, `[..., 2 K]`."""
    even = words & -0x407F4080  # 0xBF80BF80
    odd = (words << 7).bitwise_and_(0x3F803F80).bitwise_or_((words << 1).bitwise_and_(-0x7FFF8000))  # 0x80008000
    return even.view(torch.float16), odd.view(torch.float16)


def key_levels(words: torch.Tensor, bits: int, dim: int, take: Take) -> torch.Tensor:
    """Levels of the keys of whole blocks in scratch, float32.

    Args:
        words: `[N, n, W]` int32, a block's words contiguous.
        bits: 2, 3, 4 or 8.
        dim: D, padded.
        take: Makes scratch.

    Returns:
        8 bits: `[N, n, 128, D]`. Otherwise `[N, n, 32, D / 2, 4, 2]`: row, pair of channels, plane, channel.
    """
    lead = words.shape[:-1]
    code = code_of(bits)
    if code.is_fp8:
        out = take("key levels", (*lead, 2, 2, ROWS, dim), torch.float32)
        for v, plane in enumerate(_fp8_planes(words.unflatten(-1, (2, ROWS, dim // 2)))):
            out[..., v, :, :] = plane
        return out.view(*lead, PLANES * ROWS, dim)
    if not code.is_trellis:
        index = take("key words", (*lead, ROWS, dim // 2), torch.int32)
        _swapped(words.unflatten(-1, (ROWS, dim // 2)), 0x0808, 20, index)
    else:
        index = take("key words", (*lead, ROWS, 2, 2, dim // 8), torch.int32)
        _crumb_indices(words.unflatten(-1, (bits, ROWS, dim // 8)), bits, index.movedim(-4, -2))
    return _look_up(bits, index, torch.float32, take, "key").view(*lead, ROWS, dim // 2, PLANES, 2)


def value_levels(words: torch.Tensor, bits: int, dim: int, dtype: torch.dtype, take: Take) -> torch.Tensor:
    """Levels of the values of whole blocks in scratch, `[N, D, n, 128]`, tokens in the order of `value_order`.

    Arguments are those of `key_levels`, and the dtype of the levels: float32 or bfloat16.
    """
    heads, blocks = words.shape[:-1]
    code = code_of(bits)
    if code.is_fp8:
        out = take("value levels", (heads, dim, blocks, 2, 2, ROWS), dtype)
        for v, plane in enumerate(_fp8_planes(words.unflatten(-1, (2, dim, ROWS // 2)))):
            out[..., v, :] = plane.permute(0, 3, 1, 2, 4)
        return out.view(heads, dim, blocks, PLANES * ROWS)
    if not code.is_trellis:
        index = take("value words", (heads, blocks, dim, ROWS // 2), torch.int32)
        _swapped(words.unflatten(-1, (dim, ROWS // 2)), 0x0808, 20, index)
    else:
        index = take("value words", (heads, blocks, 2, 2, dim // 4, ROWS // 2), torch.int32)
        _crumb_indices(words.unflatten(-1, (bits, dim // 4, ROWS // 2)), bits, index)
    # A head's blocks side by side, so that one product sums over all tokens.
    by_channel = index.view(heads, blocks, dim, ROWS // 2).transpose(1, 2)
    return _look_up(bits, by_channel, dtype, take, "value").view(heads, dim, blocks, PLANES * ROWS)


def value_order(by_token: torch.Tensor, bits: int) -> torch.Tensor:
    """`[..., 128]` in the order of tokens to the order in which `value_levels` has them: token 32 p + 2 j + e (plane p)
    is at 8 j + 2 p + e, and at 8 bits where it was."""
    if code_of(bits).is_fp8:
        return by_token
    # Pairs are moved as one element each, in a quarter of the time.
    pairs = torch.view_as_complex(by_token.unflatten(-1, (PLANES, ROWS // 2, 2)))
    return torch.view_as_real(pairs.transpose(-2, -1).contiguous()).flatten(-3)


FEW_QUERIES = 16
"""Most rows per KV head for which queries are permuted to the order of key levels (four times the products); with more
rows, keys are permuted."""


def rotated(query: torch.Tensor, scales: torch.Tensor, seed: int | None, loud: int = 0) -> torch.Tensor:
    """Queries `[N, G, S, D]` float32 as states with channel scales `[B, Hkv, D]` are stored: R (q / f), padded, and
    then their `loud` channels."""
    dim = padded_dim(query.shape[-1])
    query = query / of_heads(scales)[:, None]
    apart = [query[..., :0]]
    if loud:
        index = loud_index(scales.flatten(0, 1), loud)[:, None, None].expand(*query.shape[:-1], -1)
        apart, query = [query.gather(-1, index)], query.scatter(-1, index, 0)
    padded = torch.nn.functional.pad(query, (0, dim - query.shape[-1])) if dim > query.shape[-1] else query
    return torch.cat([padded @ rotation_matrix(dim, seed, query.device, torch.float32).T, *apart], -1)


def of_heads(factor: torch.Tensor) -> torch.Tensor:
    """Sizes of channel scales `[B, Hkv, D]` in float32, `[N, 1, D]`."""
    return factor.abs().float().flatten(0, 1)[:, None]


@cached_table
def _planes(device: torch.device) -> torch.Tensor:
    """One-hot plane of each row, `[4, 1, 4, 1]`."""
    return torch.eye(PLANES, dtype=torch.float32, device=device).view(PLANES, 1, PLANES, 1)


@dataclass
class PackedTile:
    """Some packed blocks of all N = B * Hkv heads.

    Args:
        position: Position of the first token.
        query: Queries `[N, G, S, Dk padded + loud]` float32 from `rotated`, scaled.
        config: Configuration of the blocks.
        blocks: n blocks, all read.
        value_dim: Number of channels of a value, without padding.
        take: Function that makes scratch, valid as long as the tile is used.
        products: Dtype of the products of weights with values: bfloat16 where the model has it and the processor
            multiplies it several times as fast, else float32. Products with keys are float32: in bfloat16 ATen would
            round the logits, and large ones are then wrong by more than the output's last place.
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
        """Number of tokens."""
        return self.blocks.capacity * self.blocks.layout.tokens

    @property
    def many(self) -> bool:
        """Whether keys and values are put in the order of tokens and scaled, rather than queries and weights."""
        return self.query.shape[1] * self.query.shape[2] > FEW_QUERIES

    @cached_property
    def _scales(self) -> torch.Tensor:
        """`[N, n, 128, 2]` float32: of keys and values."""
        return self.blocks.scales.flatten(0, 1).view(torch.float16).unflatten(-1, (-1, 2)).float()

    @cached_property
    def _keys(self) -> torch.Tensor:
        layout = self.blocks.layout
        words = self.blocks.key_words[..., : layout.loud_at].flatten(0, 1)
        return key_levels(words, layout.key_bits, layout.key_dim_padded, self.take)

    @cached_property
    def _values(self) -> torch.Tensor:
        layout, words = self.blocks.layout, self.blocks.value_words.flatten(0, 1)
        return value_levels(words, layout.value_bits, layout.value_dim_padded, self.products, self.take)

    @cached_property
    def key_rows(self) -> torch.Tensor:
        """Rotated keys token by token, without loud channels, `[N, n * 128, Dk padded]` float32."""
        levels = self._keys
        heads, blocks = levels.shape[:2]
        by_plane = levels.unflatten(2, (PLANES, ROWS))[..., None] if levels.dim() == 4 else levels.movedim(4, 2)
        out = self.take("key rows", by_plane.shape, torch.float32)
        torch.mul(by_plane, self._scales[..., 0].view(heads, blocks, PLANES, ROWS, 1, 1), out=out)
        out = out.view(*self._scales.shape[:3], -1)
        out += self._means[:, :, None]
        return out.flatten(1, 2)

    @cached_property
    def _means(self) -> torch.Tensor:
        return self.blocks.key_means[..., : self.blocks.layout.key_dim_padded].flatten(0, 1).float()

    @cached_property
    def loud_rows(self) -> torch.Tensor:
        """Loud channels of keys token by token, `[N, n * 128, loud]` float32."""
        return loud_states(self.blocks).flatten(2, 3).flatten(0, 1)

    @cached_property
    def value_rows(self) -> torch.Tensor:
        """Values token by token as they are stored, `[N, n * 128, Dv padded]` in `products`."""
        levels = self._values.transpose(1, 2)
        heads, blocks, dim = levels.shape[:3]
        if code_of(self.blocks.layout.value_bits).is_fp8:
            by_token = levels.unflatten(-1, (PLANES, ROWS // 2, 2)).movedim(2, -1)
        else:
            by_token = levels.unflatten(-1, (ROWS // 2, PLANES, 2)).movedim(2, -1).transpose(2, 3)
        out = self.take("value rows", (heads, blocks, PLANES, ROWS // 2, 2, dim), self.products)
        torch.mul(by_token, self._scales[..., 1].view(*out.shape[:-1], 1), out=out)
        return out.view(heads, self.tokens, dim)

    def scores(self, part: slice) -> torch.Tensor:
        """Logits `[N, G * s, n * 128]` of the queries of s tokens."""
        layout = self.blocks.layout
        query, of_loud = self.query[:, :, part].flatten(1, 2).split([layout.key_dim_padded, layout.loud], -1)
        scores = query @ self.key_rows.mT if self.many else self._scores_of_few(query)
        return torch.baddbmm(scores, of_loud, self.loud_rows.mT) if layout.loud else scores

    def _scores_of_few(self, query: torch.Tensor) -> torch.Tensor:
        heads, rows, dim = query.shape
        # Tokens come first: these products are a third faster than with the few rows of queries first.
        if code_of(self.blocks.layout.key_bits).is_fp8:
            scores = self._keys.flatten(1, 2) @ query.mT
            scores = scores.mT
        else:
            # Column (r, p) meets the levels of plane p and zeros elsewhere.
            spread = query.view(heads, rows, 1, dim // 2, 1, 2) * _planes(query.device)
            spread = spread.view(heads, rows * PLANES, dim * PLANES).mT
            scores = self._keys.view(heads, -1, dim * PLANES) @ spread
            scores = scores.view(heads, -1, ROWS, rows, PLANES).permute(0, 3, 1, 4, 2)
        scores = scores.reshape(heads, rows, -1, PLANES * ROWS)
        means = (query @ self._means.mT)[..., None]
        return torch.addcmul(means, scores, self._scales[:, None, :, :, 0]).flatten(2)

    def weighted(self, weights: torch.Tensor) -> torch.Tensor:
        """Sums of the values under weights `[N, R, n * 128]`, `[N, R, Dv]`."""
        layout = self.blocks.layout
        if self.many:
            total = weights.to(self.products) @ self.value_rows
        else:
            weights = weights.unflatten(2, (-1, PLANES * ROWS)) * self._scales[:, None, :, :, 1]
            ordered = value_order(weights, layout.value_bits).flatten(2).to(self.products)
            total = ordered @ self._values.flatten(2).mT
        total = total.float() @ rotation_matrix(layout.value_dim_padded, self.config.seed, total.device, torch.float32)
        return total[..., : self.value_dim] / of_heads(self.blocks.channel_scales.values)
