"""A token that is not finite is lost, and no other."""

import pytest
import torch
from tq_kernels.types import AttentionOptions, KeyValue

from tests.support.helpers import (
    BLOCK,
    all_packed,
    assert_same,
    dequantized,
    encoded,
    filled,
    relative_error,
    rows,
    states,
)
from tq_hf import PRESETS
from tq_hf.ops.cpu import attention as cpu_attention

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


@pytest.mark.parametrize("offset", [0.0, 3.0])
@pytest.mark.parametrize("what", [NAN, INF, -INF, 1e30])
@pytest.mark.parametrize("which", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("preset", ["k8v4", "4bit_nc", "3bit_nc", "2.5bit_nc", "2bit_nc"])
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
        assert not got[which][0, 0, LOST].isfinite().any()


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
