"""Switches of the recipe (`examples/measure/quality/ablation.py`): with none it is the method, each does its part."""

from typing import get_args

import pytest
import torch
from tq_kernels.format import CODES
from tq_kernels.types import KeyValue, PackedBlocks

from examples.measure.quality import ablation
from examples.measure.quality.ablation import Correction, Switches, switched
from examples.measure.quality.evaluate import ablations
from tests.support.helpers import all_packed, llama_config, relative_error, states
from tq_hf import TurboQuantCache, TurboQuantConfig
from tq_hf.codec import reference
from tq_hf.codec.reference import levels_of
from tq_hf.codec.rotation import rotate_back
from tq_hf.ops import dispatch
from tq_hf.tools.estimate import Estimator

CORRECTIONS = get_args(Correction)
MSE = {2: 0.0925, 3: 0.0276, 4: 0.00931}
"""Of a vector's energy, as in tests/codec/test_reference.py."""


def round_trip(switches: Switches, config: TurboQuantConfig, keys: torch.Tensor, values: torch.Tensor) -> KeyValue:
    layout = config.layout(keys.shape[-1], values.shape[-1])
    blocks = PackedBlocks.allocate(layout, *keys.shape[:2], keys.shape[2] // layout.tokens, keys.device)
    ablation.encode(switches, config, (keys, values), blocks, 0)
    restored = torch.empty_like(keys), torch.empty_like(values)
    ablation.dequantize(switches, config, blocks, *restored)
    return restored


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("dim", [40, 64])
def test_with_nothing_switched_it_is_the_method(dim, bits):
    config, pair = all_packed(key_bits=bits, value_bits=bits), states(0, batch=2, tokens=256, dim=dim, value_dim=72)
    layout = config.layout(dim, 72)
    blocks = PackedBlocks.allocate(layout, 2, 2, 2, pair[0].device)
    reference.encode(config, *pair, blocks, 0)
    expected = torch.empty_like(pair[0]), torch.empty_like(pair[1])
    reference.dequantize(config, blocks, *expected)
    for ours, theirs, exact in zip(round_trip(Switches(), config, *pair), expected, pair, strict=True):
        assert relative_error(ours, theirs) < 0.1 * relative_error(theirs, exact)


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_error_of_a_correction_is_the_one_theory_gives(bits, correction):
    m, switches = MSE[bits], Switches(key_correction=correction, value_correction=correction)
    pair = states(1, dim=128)
    restored = round_trip(switches, all_packed(key_bits=bits, value_bits=bits, loud=False), *pair)
    for ours, exact, shrink in zip(restored, pair, (CODES[bits].key_shrink, 1.0), strict=True):
        inner = shrink**2 / (1 - m) - 2 * shrink + 1
        expected = {"none": m, "projection": m, "inner": inner, "norm": 2 - 2 * (1 - m) ** 0.5}[correction] ** 0.5
        assert relative_error(ours, exact) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_each_correction_keeps_what_it_promises(bits):
    z = torch.randn(2, 128, 128, generator=torch.Generator().manual_seed(2))

    def restore(correction):
        codes, scale = ablation.quantize(z, bits, correction, is_value=False)
        assert scale.dtype == torch.float16
        return scale.float()[..., None] * levels_of(codes, bits, is_value=False)

    square = (z * z).sum(-1)
    torch.testing.assert_close(restore("norm").norm(dim=-1), z.norm(dim=-1), rtol=2**-10, atol=0)
    projected = restore("projection")
    assert (((z - projected) * projected).sum(-1).abs() <= 2**-10 * square).all()
    _, scale = ablation.quantize(z, bits, "none", is_value=False)
    trellis = CODES[bits].trellis
    unit = 1 if trellis is None else trellis.unit / trellis.steps
    torch.testing.assert_close(unit * scale.float(), z.square().mean(-1).sqrt(), rtol=2**-10, atol=0)


def test_without_means_a_common_offset_of_keys_is_not_harmless():
    keys, values = states(6, dim=128)
    offset = torch.randn(128, generator=torch.Generator().manual_seed(7))
    offset *= 10 * keys.norm(dim=-1).mean() / offset.norm()
    errors = [
        relative_error(round_trip(Switches(key_mean=mean), all_packed(), keys + offset, values)[0] - offset, keys)
        for mean in (True, False)
    ]
    assert errors[1] > 3 * errors[0]


def test_without_signs_a_row_of_the_transform_ends_up_in_one_channel():
    values = states(0, dim=64)[1]
    spike = rotate_back(torch.eye(64), None)[5]
    spike = spike * 10 * torch.randn(1, 2, 128, 1, generator=torch.Generator().manual_seed(3))
    pair = (values, values + spike)
    errors = [
        relative_error(round_trip(Switches(random_signs=signs), all_packed(), *pair)[1], pair[1])
        for signs in (True, False)
    ]
    assert errors[1] > 1.2 * errors[0]


def test_values_that_are_not_rotated_lose_the_channels_beside_a_loud_one():
    keys, values = states(0, dim=64)
    values[..., 7] *= 100
    quiet = torch.arange(64) != 7
    errors = [
        relative_error(
            round_trip(Switches(rotate_values=turned), all_packed(), keys, values)[1][..., quiet], values[..., quiet]
        )
        for turned in (True, False)
    ]
    assert errors[1] > 3 * errors[0]


def test_caches_store_by_the_switches_and_the_package_is_itself_afterwards():
    pair, read = states(1, tokens=400, dim=64), []
    functions = dispatch.encode, dispatch.dequantize, dispatch.attend
    for switches in (Switches(), Switches(key_mean=False), Switches()):
        with switched(switches):
            cache = TurboQuantCache(llama_config(dim=64), residual_length=0)
            cache.update(*pair, 0)
            read.append(cache.layers[0].keys)
            assert cache.layers[0].store.blocks.key_means[..., :64].any() == switches.key_mean
    assert torch.equal(read[0], read[2]) and not torch.equal(read[0], read[1])
    assert (dispatch.encode, dispatch.dequantize, dispatch.attend) == functions


def test_the_rows_of_an_ablation_count_no_mean_where_there_is_none():
    rows = {method.name: method for method in ablations(Estimator(llama_config(dim=128), torch.bfloat16), 1000)}
    assert rows["4bit_nc, no key mean"].switches == Switches(key_mean=False)
    assert rows["4bit_nc, defaults"].bytes_packed - rows["4bit_nc, no key mean"].bytes_packed == 2 * 128 / 128
    assert rows["4bit_nc, values: norm"].switches == Switches(value_correction="norm")
    assert len(rows) == 49
