"""Encode and dequantize in torch: errors, exact definitions, bits that depend on the tokens alone and on no mode of the
caller, and tokens that are not finite, which are lost alone."""

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tq_kernels.format import CODES
from tq_kernels.types import AttentionOptions, KeyValue, PackedBlocks

from tests.support.helpers import (
    BLOCK,
    all_packed,
    assert_same,
    concatenated,
    dequantized,
    encoded,
    every_pair,
    filled,
    llama_config,
    relative_error,
    rows,
    states,
)
from tests.support.tiny_models import build, token_ids
from tq_hf import PRESETS, TurboQuantCache
from tq_hf.codec import codebook, reference, rotation, trellis
from tq_hf.codec.packing import unpack
from tq_hf.codec.reference import levels_of, quantize
from tq_hf.codec.rotation import rotate
from tq_hf.compat import as_input, cached_table
from tq_hf.ops.cpu import attention as cpu_attention
from tq_hf.ops.cpu import packed
from tq_hf.stores import sizes

SPHERE_MSE = {2: 0.0925, 3: 0.0276, 4: 0.00931}
"""At head_dim 128, relative to the vector's energy: 0.98 of what test_codebook.py and test_trellis_codes.py find."""

FP8_ERROR = 0.0257
"""Relative error of e4m3 on Gaussian channels (2**-4 / sqrt(3) at most), the largest of which is exact."""


def expected_error(bits: int, is_value: bool, loud: float = 0.0) -> float:
    """Relative error of codes with mean squared error m: cos^2 of the angle to the levels is 1 - m. A share of the
    channels may be `loud`: they are not coded, and error that falls on them is dropped."""
    shrink = 1.0 if is_value else CODES[bits].key_shrink
    square = FP8_ERROR**2 if bits == 8 else shrink**2 / (1 - SPHERE_MSE[bits]) - 2 * shrink + 1
    return ((1 - loud) ** 2 * square + loud * FP8_ERROR**2) ** 0.5


def coded(keys: torch.Tensor, blocks: PackedBlocks) -> torch.Tensor:
    """Keys without loud channels, which are the first ones."""
    return torch.where(torch.arange(keys.shape[-1]) < blocks.layout.loud, 0, keys)


def round_trip(config, keys, values):
    return dequantized(config, encoded(config, keys, values))


@pytest.mark.parametrize("name", PRESETS)
def test_error_of_a_preset_is_that_of_its_codebooks(name):
    config = PRESETS[name]
    keys, values = states(0, batch=2, tokens=2 * BLOCK, dim=128)
    restored_keys, restored_values = round_trip(config, keys, values)
    expected = expected_error(config.key_bits, False, config.layout(128).loud / 128)
    assert relative_error(restored_keys, keys) == pytest.approx(expected, rel=0.02)
    assert relative_error(restored_values, values) == pytest.approx(expected_error(config.value_bits, True), rel=0.02)


@pytest.mark.parametrize("is_value", [False, True], ids=["keys", "values"])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_scales_make_up_for_what_quantizing_took_from_inner_products(bits, is_value):
    z = torch.randn(2, 128, 128, generator=torch.Generator().manual_seed(2))
    fp16 = 2**-11 if bits == 4 else 4 * 2**-11  # scales of trellis codes are those of rounded channels
    codes, scale = quantize(z, bits, is_value=is_value)
    assert scale.dtype == torch.float16
    restored = scale.float()[..., None] * levels_of(codes, bits, is_value=is_value)
    shrink = 1.0 if is_value else CODES[bits].key_shrink
    torch.testing.assert_close((restored * z).sum(-1), shrink * (z * z).sum(-1), rtol=2 * fp16, atol=0)


def test_fp8_scale_puts_the_largest_channel_at_the_largest_level():
    z = torch.randn(32, 64, generator=torch.Generator().manual_seed(4)) * 100
    codes, scale = quantize(z, 8, is_value=False)
    restored = scale.float()[:, None] * levels_of(codes, 8, is_value=False)
    assert ((codes & 0x7F) == 0x7E).any(-1).all()  # 448
    assert restored.isfinite().all()
    assert ((restored - z).abs() <= 2**-4 * 1.001 * z.abs() + 2**-9 * z.abs().amax(-1, keepdim=True) / 448).all()


def test_block_carries_the_mean_of_its_own_rotated_keys():
    config = all_packed()
    keys, values = states(5, tokens=2 * BLOCK, dim=64)
    keys[:, :, BLOCK:] += 3.0
    blocks = encoded(config, keys, values)
    found = torch.cat([blocks.key_means[..., :64], blocks.key_means[..., 64::2]], -1).float()  # units are the others
    expected = torch.cat([rotate(coded(keys, blocks), config.seed), keys[..., : blocks.layout.loud]], -1)
    torch.testing.assert_close(found, expected.unflatten(2, (2, BLOCK)).mean(3), rtol=2**-10, atol=1e-5)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_common_offset_of_ten_times_the_keys_is_harmless(bits):
    keys, values = states(6, dim=128)
    offset = torch.randn(128, generator=torch.Generator().manual_seed(7))
    offset *= 10 * keys.norm(dim=-1).mean() / offset.norm()

    def key_error(config, shift):
        return relative_error(round_trip(config, keys + shift, values)[0] - shift, keys)

    plain = key_error(all_packed(key_bits=bits), 0 * offset)
    assert key_error(all_packed(key_bits=bits), offset) < 1.02 * plain


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_zero_vectors_come_back_as_zeros(bits):
    config = all_packed(key_bits=bits, value_bits=bits)
    keys, values = states(8, dim=32)
    values[:, :, 5] = 0
    restored = round_trip(config, torch.zeros_like(keys), values)
    assert torch.equal(restored[0], torch.zeros_like(keys))
    assert torch.equal(restored[1][:, :, 5], values[:, :, 5])
    assert restored[1].isfinite().all()


@pytest.mark.parametrize("scale", [1e-3, 1e-2, 1e2, 1e4])
@pytest.mark.parametrize("name", ["k8v4", "3bit_nc"])
def test_error_does_not_depend_on_the_size_of_the_states(name, scale):
    keys, values = states(9, dim=64)
    at_one = round_trip(PRESETS[name], keys, values)
    scaled = round_trip(PRESETS[name], keys * scale, values * scale)
    for one, other, exact in zip(at_one, scaled, (keys, values), strict=True):
        assert relative_error(other / scale, exact) == pytest.approx(relative_error(one, exact), rel=0.02)


@pytest.mark.parametrize("scale", [1e-30, 5e-8, 1e-7, 1e5, 1e8])
@pytest.mark.parametrize("name", ["k8v4", "3bit_nc"])
def test_states_beyond_fp16_scales_stay_finite(name, scale):
    """Where an fp16 scale under- or overflows the states are wrong, and never NaN: bf16 has that range."""
    keys, values = states(10, dim=64)
    restored = round_trip(PRESETS[name], keys * scale, values * scale)
    assert all(part.isfinite().all() for part in restored)


def test_norms_may_differ_wildly_within_a_block():
    config = all_packed()
    keys, values = states(11, dim=64)
    keys[:, :, 1::2] = -keys[:, :, ::2]  # their mean is zero, however large the largest
    factor = torch.logspace(-2, 3, BLOCK // 2).repeat_interleave(2)[:, None]
    for restored, exact in zip(round_trip(config, keys * factor, values * factor), (keys, values), strict=True):
        each = ((restored / factor - exact).norm(dim=-1) / exact.norm(dim=-1)).squeeze()
        assert each.max() < 0.2


@pytest.mark.parametrize("tile", [1, 3, 16])
@pytest.mark.parametrize("name", ["k8v4", "4bit_nc", "2.5bit_nc"])
def test_bits_do_not_depend_on_how_many_blocks_are_encoded_at_once(name, tile, monkeypatch):
    config = PRESETS[name]
    keys, values = states(12, batch=2, tokens=5 * BLOCK, dim=40)
    one_by_one = [encoded(config, *rows((keys, values), i * BLOCK, (i + 1) * BLOCK)) for i in range(5)]
    monkeypatch.setattr(reference, "TILE_BLOCKS", tile)
    together = encoded(config, keys, values)
    for field, tensor in together.tensors().items():
        parts = torch.cat([block.tensors()[field] for block in one_by_one], 2)
        assert torch.equal(tensor.view(torch.int16), parts.view(torch.int16)), field
    assert_same(dequantized(config, together), concatenated(*(dequantized(config, block) for block in one_by_one)))


def test_bits_of_a_sequence_do_not_depend_on_its_batch_or_heads():
    config = PRESETS["4bit_nc"]
    keys, values = states(13, batch=3, heads=4, tokens=2 * BLOCK, dim=80)
    together = encoded(config, keys, values)
    alone = encoded(config, keys[1:2, 2:3], values[1:2, 2:3])
    for field, tensor in alone.tensors().items():
        assert torch.equal(tensor, together.tensors()[field][1:2, 2:3]), field


def test_encode_writes_only_the_blocks_it_was_given():
    config = PRESETS["3bit_nc"]
    blocks = encoded(config, *states(14, tokens=4 * BLOCK))
    before = blocks.map(torch.clone)
    fresh = states(15)
    reference.encode(config, *fresh, blocks, 2)
    alone = encoded(config, *fresh)
    for field, tensor in blocks.tensors().items():
        assert torch.equal(tensor[:, :, [0, 1, 3]], before.tensors()[field][:, :, [0, 1, 3]]), field
        assert torch.equal(tensor[:, :, 2:3], alone.tensors()[field]), field


@pytest.mark.parametrize("dim, value_dim", [(20, 20), (36, 12), (1, 3), (100, 64)])
@pytest.mark.parametrize("bits", [3, 4])
def test_head_dims_that_are_no_multiple_of_eight_are_padded(bits, dim, value_dim):
    config = all_packed(key_bits=bits, value_bits=bits)
    keys, values = states(16, tokens=2 * BLOCK, dim=dim, value_dim=value_dim)
    restored = round_trip(config, keys, values)
    for part, exact in zip(restored, (keys, values), strict=True):
        assert part.shape == exact.shape
        # Part of the error falls on the padding and is dropped; what a padded vector rotates to is not quite Gaussian.
        assert relative_error(part, exact) < 1.1 * expected_error(bits, part is values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["k8v4", "3bit_nc"])
def test_16_bit_states_are_encoded_like_their_float32_values(name, dtype):
    pair = states(17, dim=40, dtype=dtype)
    blocks = encoded(PRESETS[name], *pair)
    for field, tensor in encoded(PRESETS[name], pair[0].float(), pair[1].float()).tensors().items():
        assert torch.equal(tensor, blocks.tensors()[field]), field
    restored = dequantized(PRESETS[name], blocks, like=pair)
    exact = dequantized(PRESETS[name], blocks)
    assert_same(restored, (exact[0].to(dtype), exact[1].to(dtype)))


def without_mean(keys: torch.Tensor, blocks: PackedBlocks) -> torch.Tensor:
    """What is quantized of the keys of one block."""
    return rotate(coded(keys, blocks), 0) - blocks.key_means[:, :, 0, None, : keys.shape[-1]].float()


def test_scales_hold_the_key_scale_low_and_the_value_scale_high():
    config = all_packed()
    keys, values = states(18, dim=64)
    blocks = encoded(config, keys, values)
    scales = blocks.scales[:, :, 0]
    key_scale = (scales & 0xFFFF).to(torch.uint16).view(torch.float16)
    value_scale = (scales >> 16 & 0xFFFF).to(torch.uint16).view(torch.float16)
    assert torch.equal(key_scale, quantize(without_mean(keys, blocks), 4, is_value=False)[1])
    assert torch.equal(value_scale, quantize(rotate(values, 0), 4, is_value=True)[1])


def test_words_hold_the_codes_of_rotated_states():
    config = all_packed(key_bits=3, value_bits=2)
    keys, values = states(19, dim=64)
    blocks = encoded(config, keys, values)
    assert torch.equal(
        unpack(blocks.key_words[:, :, 0, : blocks.layout.loud_at], 3, 64, is_value=False),
        quantize(without_mean(keys, blocks), 3, is_value=False)[0],
    )
    assert torch.equal(
        unpack(blocks.value_words[:, :, 0], 2, 64, is_value=True), quantize(rotate(values, 0), 2, is_value=True)[0]
    )


def test_another_seed_gives_other_bits_and_the_same_quality():
    keys, values = states(20, dim=128)
    first, second = (all_packed(seed=seed) for seed in (0, 1))
    assert not torch.equal(encoded(first, keys, values).key_words, encoded(second, keys, values).key_words)
    for config in (first, second):
        restored, _ = round_trip(config, keys, values)
        assert relative_error(restored, keys) == pytest.approx(expected_error(4, False, 4 / 128), rel=0.02)


DIM, BLOCKS = 64, 3
LOST = 128 + 77
NAN, INF = float("nan"), float("inf")


def spoilt(what: float, which: int, offset: float = 0.0) -> tuple[KeyValue, KeyValue]:
    """States of three blocks, sound and with one channel of one token of the first head as it must not be."""
    keys, values = states(0, tokens=BLOCKS * BLOCK, dim=DIM)
    keys = keys + offset * torch.randn(DIM, generator=torch.Generator().manual_seed(1))
    broken = keys.clone(), values.clone()
    broken[which][0, 0, LOST, 9] = what
    return (keys, values), broken


def without_lost(x: torch.Tensor) -> torch.Tensor:
    return x[:, :, torch.arange(x.shape[2]) != LOST]


@pytest.mark.parametrize(
    ("preset", "which", "what", "offset"),
    every_pair(("k8v4", "4bit_nc", "3bit_nc", "2.5bit_nc", "2bit_nc"), (0, 1), (NAN, INF, -INF, 1e30), (0.0, 3.0)),
)
def test_other_tokens_are_restored(preset, which, what, offset):
    config = PRESETS[preset]
    sound, broken = spoilt(what, which, offset)
    got = dequantized(config, encoded(config, *broken))
    want = dequantized(config, encoded(config, *sound))
    centred = sound[0] - sound[0].mean(2, keepdim=True)
    plain = relative_error(want[0] - sound[0] + centred, centred)
    # A block that has no mean is coded with it.
    allowed = 1.1 * max(1, (sound[0].norm() / centred.norm()).item()) * plain
    error = without_lost(got[0] - sound[0])
    assert relative_error(error + without_lost(centred), without_lost(centred)) < allowed
    if config.value_bits < 4 and which == 1:  # those in its words have other codes
        others = [without_lost(pair[1]) for pair in (got, want, sound)]
        assert relative_error(others[0], others[2]) < 1.05 * relative_error(others[1], others[2])
    else:
        assert torch.equal(without_lost(got[1]), without_lost(want[1]))
    for block in (0, 2):
        assert_same(*(rows(pair, BLOCK * block, BLOCK * (block + 1)) for pair in (got, want)))
    assert_same(*((keys[:, 1:], values[:, 1:]) for keys, values in (got, want)))
    if what != 1e30 and (preset != "k8v4" or which == 1 or what != what):  # FP8 codes of infinity are the largest
        loud = config.layout(DIM).loud if which == 0 else 0  # the first channels
        assert not got[which][0, 0, LOST, loud:].isfinite().any()


def test_a_lost_key_that_is_masked_is_not_seen():
    config = all_packed()
    sound, broken = spoilt(NAN, 0)
    query = torch.randn(1, 4, 3, DIM, generator=torch.Generator().manual_seed(2))
    mask = torch.ones(1, 1, 3, BLOCKS * BLOCK, dtype=torch.bool)
    mask[..., LOST] = False
    outputs = []
    for pair in (sound, broken):
        view = filled(config, pair).view()
        outputs.append(cpu_attention.attend(query, view, mask, AttentionOptions(DIM**-0.5, causal=False)))
    assert relative_error(outputs[1], outputs[0]) < 0.1


CPU = torch.device("cpu")
IDS = token_ids(1, 310)
TABLES = {
    "levels": (codebook.levels, lambda bits: (bits, CPU)),
    "boundaries": (codebook.boundaries, lambda bits: (4, CPU)),
    "codes": (codebook.codes_of_ceilings, lambda bits: (4, CPU)),
    "signs": (rotation.signs, lambda bits: (64, bits, CPU)),
    "no signs": (rotation.signs, lambda bits: (64, None, CPU)),
    "rotation": (rotation.rotation_matrix, lambda bits: (96, bits, CPU, torch.float32)),
    "errors": (trellis._errors, lambda bits: (min(bits, 3), CPU)),
    "words": (packed.table, lambda bits: (min(bits, 4), torch.float32, CPU)),
    "planes": (packed._planes, lambda bits: (CPU,)),
    "no blocks": (sizes._no_blocks, lambda bits: (config_of(bits), (1, 2, 16, 16), CPU)),
}


def config_of(bits: int):
    return TurboQuantCache(llama_config(1), {2: "2bit_nc", 3: "3bit_nc", 4: "4bit_nc", 8: "k8v4"}[bits]).config


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


MODES = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "meta": lambda: torch.device("meta"),
    "fake": FakeTensorMode,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def tensors_of(table) -> list[torch.Tensor]:
    if isinstance(table, PackedBlocks):
        return [*table.tensors().values(), *table.channel_scales]
    table = table if isinstance(table, tuple) else (table,)
    return [torch.view_as_real(x) if x.is_complex() else x for x in table]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_the_same_in_every_mode(name, bits, mode):
    make, arguments = TABLES[name][0].__wrapped__, TABLES[name][1](bits)
    expected = tensors_of(cached_table(make)(*arguments))
    with MODES[mode]():
        found = cached_table(make)(*arguments)
    for table, like in zip(tensors_of(found), expected, strict=True):
        assert type(table) is torch.Tensor and not table.is_inference()
        torch.testing.assert_close(table, like, rtol=0, atol=0, equal_nan=True)


@torch.no_grad()
@pytest.mark.parametrize("mode", ["float64", "bfloat16", "meta"])
@pytest.mark.parametrize("options", [{}, {"max_cache_len": 400}, {"preset": "3bit_nc"}], ids=str)
def test_a_whole_model_runs_in_a_mode_as_outside_of_it(mode, options):
    model = build("llama", attention="turboquant")

    def logits() -> torch.Tensor:
        cache = TurboQuantCache(model.config, **options)
        return torch.cat([model(part, **as_input(cache)).logits[:, -1] for part in IDS.split([300, 1, 9], dim=1)])

    expected = logits()
    with MODES[mode]():
        found = logits()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_fake_tensors_are_refused():
    cache = TurboQuantCache(llama_config(1))
    with FakeTensorMode(), pytest.raises(ValueError, match="Keys are fake tensors.*Leave `FakeTensorMode`"):
        cache.update(*(x.clone() for x in (torch.empty(1, 2, 9, 16), torch.empty(1, 2, 9, 16))), 0)
    cache.update(*states(0, tokens=9), 0)
    assert cache.get_seq_length() == 9
