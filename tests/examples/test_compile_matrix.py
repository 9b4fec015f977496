"""The committed counts of compiled kernels are whole and within their limits; predictions rest on them."""

import pytest

from examples.measure.compile import cards, compile_matrix
from examples.measure.report.tables import RENDERERS
from tq_hf import PRESETS

RECORD = compile_matrix.load()
ROWS = RECORD["rows"]
MOST = {64: 4.0, 128: 2.6, 256: 2.4}
"""Instructions of the decode kernel per element on NVIDIA GPUs, by head_dim; the gate of sm_75 is 8. (The budgets of
presets are in `tests/kernels`.)"""
MOST_AMD = 16.0
STACK = {
    # Decode: read before the loop over blocks and behind it, at 64 and 128 channels to keep three or four warps a
    # scheduler; in the loop only where `IN_LOOP` says so.
    ("sm_86", "decode"): {64: 16, 128: 8, 256: 8},
    ("sm_89", "decode"): {64: 16, 128: 8, 256: 8},
    ("sm_90", "decode"): {64: 40, 128: 112, 256: 48},
    ("sm_100", "decode"): {64: 48, 128: 128, 256: 80},
    # Dequantize: at 255 registers, of 64 and 128 channels 7 to 18 accesses a block of 3,300 to 8,500 instructions. Of
    # 256 on sm_75 ptxas gives it 64 registers.
    ("sm_75", "dequantize keys"): {128: 48, 256: 3496},
    ("sm_75", "dequantize values"): {128: 32, 256: 2992},
    ("sm_80", "dequantize keys"): {64: 80, 256: 240},
    ("sm_80", "dequantize values"): {256: 56},
    ("sm_86", "dequantize keys"): {64: 48, 256: 176},
    ("sm_86", "dequantize values"): {256: 56},
    ("sm_89", "dequantize keys"): {64: 48, 256: 176},
    ("sm_89", "dequantize values"): {256: 56},
    ("sm_90", "dequantize keys"): {128: 32},
    # Encode: on sm_90 at 128 registers, which 16 warps a multiprocessor leave; 6 to 9 reads a block of 2,100
    # instructions or more, and no write. Of 256 channels at 255, of which two tiles are 128: 6 to 21 reads a block. On
    # sm_75, where it is 600 and more, sixteen warps would take two thirds of the stack each, and so more in all; of 128
    # channels there trellis codes keep up to 14 of their constants on it.
    ("sm_75", "encode keys"): {128: 120, 256: 1072},
    ("sm_75", "encode values"): {128: 104, 256: 1008},
    ("sm_80", "encode keys"): {256: 24},
    ("sm_80", "encode values"): {256: 8},
    ("sm_86", "encode keys"): {256: 40},
    ("sm_86", "encode values"): {256: 40},
    ("sm_89", "encode keys"): {256: 40},
    ("sm_89", "encode values"): {256: 40},
    ("sm_90", "encode keys"): {128: 40, 256: 328},
    ("sm_90", "encode values"): {64: 24, 128: 40, 256: 320},
    ("sm_100", "encode keys"): {128: 32, 256: 584},
    ("sm_100", "encode values"): {64: 16, 256: 248},
    # Attention of many queries: at 255 registers; of 64 channels four reads a turn of the loop over blocks.
    ("sm_80", "prefix"): {64: 32},
    ("sm_86", "prefix"): {64: 24},
    ("sm_89", "prefix"): {64: 24},
    ("sm_90", "prefix"): {256: 576},
    ("sm_100", "prefix"): {256: 160},
}
"""Bytes of stack that a kernel takes at most by the size of heads, where it takes any."""
IN_LOOP = {("sm_90", "2.5bit_nc", 128): 7, ("sm_100", "2.5bit_nc", 128): 10}
"""Reads and writes of the stack in the decode kernel's loop over blocks, where there are any: eight programs of a
multiprocessor leave 128 registers a thread."""


def test_every_target_preset_and_size_is_there() -> None:
    wanted = {(target, preset, dim) for target, dim, preset in compile_matrix.everything(compile_matrix.TARGETS)}
    nvidia = [target for target in compile_matrix.TARGETS if isinstance(target, int)]
    assert nvidia == [75, 80, 86, 89, 90, 100] and len(wanted) >= len(nvidia) * len(PRESETS) * 3
    assert {(row["target"], row["preset"], row["dim"]) for row in ROWS} == wanted and len(ROWS) == len(wanted)
    shown = RENDERERS["compile_matrix"](RECORD)
    assert all(f"| {row['target']} | `{row['preset']}` | {row['dim']} |" in shown for row in ROWS)


@pytest.mark.parametrize("dim", MOST)
def test_decode_is_within_its_budget(dim: int) -> None:
    found = {(row["target"], row["preset"]): row["decode"]["per_element"]["total"] for row in ROWS if row["dim"] == dim}
    limits = {key: MOST[dim] if key[0].startswith("sm_") else MOST_AMD for key in found}
    assert {key: total for key, total in found.items() if total > limits[key]} == {}


def test_kernels_take_stack_where_it_is_known_and_no_more() -> None:
    found = {
        (row["target"], row["preset"], row["dim"], kernel): used["stack"]
        for row in ROWS
        for kernel, used in row.items()
        if isinstance(used, dict)
    }
    limits = {key: STACK.get((key[0], key[3]), {}).get(key[2], 0) for key in found}
    assert {key: stack for key, stack in found.items() if stack > limits[key]} == {}


def test_the_loop_of_decode_spills_where_it_is_known_and_no_more() -> None:
    found = {(row["target"], row["preset"], row["dim"]): row["decode"].get("spilled_in_loop", 0) for row in ROWS}
    assert {key: count for key, count in found.items() if count > IN_LOOP.get(key, 0)} == {}


def test_turing_has_the_shared_memory_and_the_registers() -> None:
    for row in ROWS:
        if row["target"] == "sm_75":
            used = [value for value in row.values() if isinstance(value, dict)]
            assert max(x["shared"] for x in used) <= 64 * 1024 and max(x["registers"] for x in used) <= 255


def test_predictions_are_those_of_these_counts() -> None:
    record = cards.load()
    again = cards.predictions(cards.Fit(**record["fit"]), cards.counted())
    for old, new in zip(record["predictions"], again, strict=True):
        assert (old["card"], old["preset"]) == (new["card"], new["preset"])
        assert new["us"] == pytest.approx(old["us"])
