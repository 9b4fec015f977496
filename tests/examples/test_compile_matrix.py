"""The committed counts of compiled kernels are whole and within their limits; predictions rest on them."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import cards  # noqa: E402
import compile_matrix  # noqa: E402
from tables import RENDERERS  # noqa: E402

from tq_hf import PRESETS  # noqa: E402

RECORD = compile_matrix.load()
ROWS = RECORD["rows"]
MOST = {64: 4.0, 128: 2.6, 256: 2.4}
"""Instructions of the decode kernel per element on NVIDIA GPUs, by head_dim; the gate of sm_75 is 8. (The budgets of
presets are in `tests/kernels`.)"""
MOST_AMD = 16.0
STACK: dict[tuple[str, str], int] = {}
"""Bytes of stack allowed where it is not 0, none of them in the loop over blocks of decode."""


def test_every_target_preset_and_size_is_there() -> None:
    wanted = {
        (compile_matrix.name_of(target), preset, dim)
        for target in compile_matrix.TARGETS
        for preset in PRESETS
        for dim in compile_matrix.DIMS
    }
    assert {(row["target"], row["preset"], row["dim"]) for row in ROWS} == wanted and len(ROWS) == len(wanted)
    shown = RENDERERS["compile_matrix"](RECORD)
    assert all(f"| {row['target']} | `{row['preset']}` | {row['dim']} |" in shown for row in ROWS)


@pytest.mark.parametrize("dim", MOST)
def test_decode_is_within_its_budget(dim: int) -> None:
    found = {(row["target"], row["preset"]): row["decode"]["per_element"]["total"] for row in ROWS if row["dim"] == dim}
    limits = {key: MOST[dim] if key[0].startswith("sm_") else MOST_AMD for key in found}
    assert {key: total for key, total in found.items() if total > limits[key]} == {}


def test_kernels_spill_where_it_is_known_and_no_more() -> None:
    found: dict[tuple[str, str], int] = {}
    for row in ROWS:
        for kernel, used in row.items():
            if isinstance(used, dict) and used["stack"]:
                key = (row["target"], kernel)
                found[key] = max(found.get(key, 0), used["stack"])
    assert found == STACK


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
