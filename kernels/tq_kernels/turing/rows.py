"""Query rows of `prefix_attention_fragments`: normalised, divided by the channel scales of the keys, rotated; and the
rotation back of what they attend to."""

import triton
import triton.language as tl

from .fragments import (
    LANES,
    column_max,
    pair_of,
    row_max,
    scaled,
    transposed,
    zero_quads,
)
from .tiles import (
    add_dense_values,
    dense_scores,
    load_elements,
)


@triton.jit
def row_scale(row, valid, t, DIM: tl.constexpr):
    """The power of two that row g is divided by for its elements to be below 1."""
    largest = tl.zeros([LANES], tl.float32)
    for chunk in tl.static_range((DIM + 15) // 16):
        x = load_elements(row, valid, t, chunk, DIM)
        for i in tl.static_range(4):
            largest = tl.maximum(largest, tl.abs(x[i]))
    exponent = (row_max(largest).to(tl.int32, bitcast=True) >> 23) + 1
    exponent = tl.minimum(tl.maximum(exponent, 64), 190)
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def row_pairs(row, valid, t, scale, channel_scales, DIM: tl.constexpr, DIVIDE: tl.constexpr):
    """Pairs of row g's channels, less `scale`, and with DIVIDE divided by their channel scales."""
    inverse = 1.0 / scale
    pairs = ()
    for chunk in tl.static_range((DIM + 15) // 16):
        x = load_elements(row, valid, t, chunk, DIM)
        y = ()
        if DIVIDE:
            f = load_elements(channel_scales, t >= 0, t, chunk, DIM)
            for i in tl.static_range(4):
                y += (x[i] * inverse / tl.where(f[i] == 0, 1.0, f[i]),)
        else:
            for i in tl.static_range(4):
                y += (x[i] * inverse,)
        pairs += (pair_of(y[0], y[1]), pair_of(y[2], y[3]))
    return pairs


@triton.jit
def rotated(plain, rotation, g, t, DIM: tl.constexpr, QUARTERS: tl.constexpr, TILES: tl.constexpr):
    """Operands b of rotated rows, in the order of `load_rows`; `plain` are TILES tuples of DIM channels' pairs."""
    WIDTH: tl.constexpr = DIM // QUARTERS
    tiles = ()
    for _ in tl.static_range(TILES):
        tiles += ((),)
    for quarter in tl.static_range(QUARTERS):
        for chunk in tl.static_range((WIDTH + 15) // 16):
            # The order of channels that `load_rows` has: rows i < 8 of the product are step 0, the others step 1.
            channel = 16 * chunk + 4 * (g // 2) + g % 2
            low = rotation + (quarter * WIDTH + channel) * DIM
            s = dense_scores(
                low, low + 2 * DIM, channel < WIDTH, channel + 2 < WIDTH, plain, t, DIM, TILES, True
            )  # fmt: skip
            new = ()
            for tile in tl.static_range(TILES):
                quad = s[tile]
                first = transposed(pair_of(quad[0] * (DIM**-0.5), quad[1] * (DIM**-0.5)))
                second = transposed(pair_of(quad[2] * (DIM**-0.5), quad[3] * (DIM**-0.5)))
                new += (tiles[tile] + (first, second),)
            tiles = new
    return tiles


@triton.jit
def rotated_back(acc, rotation, g, t, DIM: tl.constexpr, DV: tl.constexpr, QUARTERS: tl.constexpr, TILES: tl.constexpr):
    """Quads of `add_dense_values` of R^T acc, from those of `add_packed_values`."""
    WIDTH: tl.constexpr = DIM // QUARTERS
    CHUNKS: tl.constexpr = (WIDTH + 15) // 16
    # Normalised rows: fp16 then holds any output to 11 bits.
    peaks, inverse = (), ()
    for tile in tl.static_range(TILES):
        for e in tl.static_range(2):
            peak = tl.zeros([LANES], tl.float32)
            for i in tl.static_range(QUARTERS * CHUNKS):
                for half in tl.static_range(2):
                    inside = 16 * (i % CHUNKS) + 8 * half + g < WIDTH
                    peak = tl.maximum(peak, tl.where(inside, tl.abs(acc[i * TILES + tile][2 * half + e]), 0.0))
            peak = column_max(peak)
            peak = tl.where(peak > 0, peak, 1.0)
            peaks += (peak * (DIM**-0.5),)
            inverse += (1.0 / peak,)
    out = zero_quads(((DV + 15) // 16) * TILES)
    for i in tl.static_range(QUARTERS * CHUNKS):
        for half in tl.static_range(2):
            channel = 16 * (i % CHUNKS) + 8 * half + g
            inside = channel < WIDTH
            b = ()
            for tile in tl.static_range(TILES):
                quad = acc[i * TILES + tile]
                low = tl.where(inside, quad[2 * half] * inverse[2 * tile], 0.0)
                high = tl.where(inside, quad[2 * half + 1] * inverse[2 * tile + 1], 0.0)
                b += (transposed(pair_of(low, high)),)
            row = rotation + ((i // CHUNKS) * WIDTH + channel) * DIM
            out = add_dense_values(out, row, inside, b, t, DIM if DIM < DV else DV, TILES, True)
    back = ()
    for i in tl.static_range(((DV + 15) // 16) * TILES):
        back += (scaled(out[i], peaks[2 * (i % TILES)], peaks[2 * (i % TILES) + 1]),)
    return back
