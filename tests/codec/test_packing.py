"""The packed format: what `tq_hf.codec.packing` documents, bit by bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tq_hf import BlockLayout
from tq_hf.codec.packing import pack, unpack

BITS = [2, 3, 4, 8]
TOKENS, ROWS = 128, 32


def random_codes(seed: int, bits: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 2**bits, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def slow_places(token: int, channel: int, code: int, dim: int, bits: int, is_value: bool) -> list[tuple[int, int, int]]:
    """Where one code goes, restated from the documentation: (word, lowest bit, what is put there)."""
    plane, row = divmod(token, ROWS)
    tile_rows, tile_columns = (dim, ROWS) if is_value else (ROWS, dim)
    m, k = (channel, row) if is_value else (row, channel)
    quarter = 0
    if bits in (2, 3):
        quarter = channel // (dim // 4)
        if is_value:
            tile_rows, m = tile_rows // 4, m % (dim // 4)
        else:
            tile_columns, k = tile_columns // 4, k % (dim // 4)
    word, e = m * (tile_columns // 2) + k // 2, k % 2
    tile_words = tile_rows * tile_columns // 2
    i = 2 * plane + e
    if bits == 8:
        place, v = plane // 2 * tile_words + word, plane % 2
        return [(place, 16 * e + 15 - v, code >> 7), (place, 16 * e + 7 - 7 * v, code & 0x7F)]
    if bits == 4:
        negative = code < 8
        magnitude = 7 - code if negative else code - 8
        sign_bit = 8 * i + 7 if i < 4 else 8 * (i - 4) + 3
        return [(word, 4 * i, magnitude), (word, sign_bit, int(negative))]
    tile, h = divmod(quarter, 2)
    place = tile * tile_words + word
    if bits == 2:
        return [(place, 4 * i + 2 * h + 1, code & 1), (place, (4 * i + 2 * h + 2) % 32, code >> 1)]
    crumb = (place, 4 * i + 2 * h)
    sign_bit = 8 * i + 7 - 2 * quarter if i < 4 else 8 * (i - 4) + 6 - 2 * quarter
    return [(*crumb, code & 3), (2 * tile_words + word, sign_bit, code >> 2)]


def slow_pack(codes: torch.Tensor, bits: int, is_value: bool) -> torch.Tensor:
    """One block `[128, D]`, one code at a time."""
    dim = codes.shape[-1]
    words = [0] * (TOKENS * dim * bits // 32)
    for token, channels in enumerate(codes.tolist()):
        for channel, code in enumerate(channels):
            for word, shift, content in slow_places(token, channel, code, dim, bits, is_value):
                words[word] |= content << shift
    return torch.tensor([w - 2**32 if w >= 2**31 else w for w in words], dtype=torch.int32)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    bits=st.sampled_from(BITS),
    dim=st.integers(1, 34).map(lambda n: 8 * n),
    is_value=st.booleans(),
    lead=st.lists(st.integers(0, 3), max_size=3),
)
def test_unpack_inverts_pack(seed, bits, dim, is_value, lead):
    codes = random_codes(seed, bits, *lead, TOKENS, dim)
    words = pack(codes, bits, is_value=is_value)
    assert words.dtype == torch.int32
    assert words.shape == (*lead, TOKENS * dim * bits // 32)
    assert torch.equal(unpack(words, bits, dim, is_value=is_value), codes)


@pytest.mark.parametrize("is_value", [False, True], ids=["keys", "values"])
@pytest.mark.parametrize("dim", [8, 24, 64])
@pytest.mark.parametrize("bits", BITS)
def test_words_are_those_of_the_documented_format(bits, dim, is_value):
    codes = random_codes(dim, bits, TOKENS, dim)
    assert torch.equal(pack(codes, bits, is_value=is_value), slow_pack(codes, bits, is_value))


@pytest.mark.parametrize("is_value", [False, True], ids=["keys", "values"])
@pytest.mark.parametrize("bits", BITS)
def test_one_code_changes_only_its_own_bits(bits, is_value):
    dim, count = 16, 2**bits
    background = pack(torch.zeros(TOKENS, dim, dtype=torch.int32), bits, is_value=is_value)
    taken = torch.zeros_like(background)
    for token in range(0, TOKENS, 31):
        codes = torch.zeros(dim, count, TOKENS, dim, dtype=torch.int32)
        for channel in range(dim):
            codes[channel, :, token, channel] = torch.arange(count)
        for changes in pack(codes, bits, is_value=is_value) ^ background:  # of one channel: [count, W]
            changed = torch.zeros_like(background)
            for change in changes:
                changed |= change
            assert not (taken & changed).any()
            assert sum(word.bit_count() for word in (changed.long() & 0xFFFFFFFF).tolist()) == bits
            taken |= changed


@pytest.mark.parametrize(
    "bits, is_value, token, channel, code, expected",
    [
        # the table of the module's docstring, read off by hand for 16 channels
        (4, False, 0, 0, 15, {0: 0x00000007}),
        (4, False, 0, 1, 7, {0: 0x00008000}),
        (4, False, 33, 2, 8 + 5, {8 + 1: 0x00000500}),
        (4, False, 96 + 31, 15, 3, {31 * 8 + 7: 0x40000000 | 0x08000000}),
        (4, True, 1, 3, 12, {3 * 16: 0x00000040}),
        (3, False, 0, 0, 3, {0: 0x3}),
        (3, False, 64, 4, 7, {0: 0x000C0000, 64 * 2: 0x00000010}),
        (3, True, 32, 15, 7, {64 + 3 * 16: 0x00000C00, 128 + 3 * 16: 0x00020000}),
        (2, False, 32, 13, 2, {64: 0x00010000}),
        (2, False, 96, 13, 2, {64: 0x00000001}),
        (2, True, 3, 0, 1, {1: 0x00000020}),
        (8, False, 0, 0, 0xAB, {0: 0x00009580}),
        (8, False, 32, 1, 0xAB, {0: 0x402B0000}),
        (8, False, 64, 1, 0xAB, {256: 0x95800000}),
        (8, True, 97, 2, 0xAB, {256 + 2 * 16: 0x402B0000}),
    ],
)
def test_single_codes_lie_where_the_table_says(bits, is_value, token, channel, code, expected):
    neutral = 8 if bits == 4 else 0  # the code whose word is 0: at 4 bits the smallest positive level
    codes = torch.full((TOKENS, 16), neutral, dtype=torch.int32)
    codes[token, channel] = code
    words = pack(codes, bits, is_value=is_value).to(torch.int64) & 0xFFFFFFFF
    assert {i: words[i].item() for i in words.nonzero().flatten().tolist()} == expected


@pytest.mark.parametrize("bits, full, empty", [(2, 3, 0), (3, 7, 0), (4, 0, 8), (8, 255, 0)])
@pytest.mark.parametrize("is_value", [False, True], ids=["keys", "values"])
def test_one_code_fills_every_bit_and_another_none(bits, full, empty, is_value):
    """Of 4 bits, code 0 is the largest magnitude with the sign set; the smallest positive level is the empty word."""
    assert (pack(torch.full((TOKENS, 16), full), bits, is_value=is_value) == -1).all()
    assert (pack(torch.full((TOKENS, 16), empty), bits, is_value=is_value) == 0).all()


@pytest.mark.parametrize("dim", [8, 80, 128, 256])
@pytest.mark.parametrize("bits", BITS)
def test_size_is_the_one_the_layout_counts(bits, dim):
    layout = BlockLayout(dim, dim, bits, bits)
    codes = random_codes(0, bits, 2, TOKENS, dim)
    assert pack(codes, bits, is_value=False).shape == (2, layout.key_words)
    assert pack(codes, bits, is_value=True).shape == (2, layout.value_words)
    assert 4 * layout.key_words == TOKENS * dim * bits // 8


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_any_integer_type_packs_alike(dtype):
    codes = random_codes(0, 8, TOKENS, 16)
    assert torch.equal(pack(codes.to(dtype), 8, is_value=False), pack(codes, 8, is_value=False))


@pytest.mark.parametrize("is_value", [False, True], ids=["keys", "values"])
@pytest.mark.parametrize("bits", BITS)
def test_strides_do_not_matter(bits, is_value):
    codes = random_codes(1, bits, 3, 16, TOKENS).transpose(-1, -2)
    assert not codes.is_contiguous()
    words = pack(codes, bits, is_value=is_value)
    assert torch.equal(words, pack(codes.contiguous(), bits, is_value=is_value))
    spaced = torch.stack([words, words], -1)[..., 0]
    assert not spaced.is_contiguous()
    assert torch.equal(unpack(spaced, bits, 16, is_value=is_value), codes)
