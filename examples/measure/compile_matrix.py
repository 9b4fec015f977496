"""What the compiler makes of every kernel for every card we name: registers, stack, shared memory, and of the decode
kernel the instructions of an element by pipe.

    python examples/measure/compile_matrix.py           # writes examples/results/compile_matrix.json; no GPU needed
    python examples/measure/compile_matrix.py 75 90     # these targets anew; the others stay as they are

A quarter of an hour on one core, or what Triton's own cache leaves of it.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import sass
import triton
from builds import BUILDERS, launched
from report import RESULTS

from tq_hf import PRESETS

TARGETS: tuple[int | str, ...] = (75, 80, 86, 89, 90, 100, "gfx942")
DIMS = (64, 128, 256)
PREFIX = "4bit_nc"
"""The preset whose kernel of many queries is compiled: it takes as long as all others together."""
PATH = RESULTS / "compile_matrix.json"

Row = dict[str, Any]


def name_of(arch: int | str) -> str:
    """A target as it is written: sm_75."""
    return f"sm_{arch}" if isinstance(arch, int) else arch


def row(arch: int | str, preset: str, dim: int) -> Row:
    """What every kernel takes."""
    bits = PRESETS[preset].key_bits, PRESETS[preset].value_bits
    found: Row = {"target": name_of(arch), "preset": preset, "dim": dim}
    for kernel, build in BUILDERS.items():
        if not launched(kernel, arch, dim) or (kernel == "prefix" and preset != PREFIX):
            continue
        compiled = build(arch, bits, dim)
        found[kernel] = {**sass.resources(compiled)._asdict(), "instructions": len(sass.code(compiled))}
        if kernel == "decode":
            on = sass.plan(arch, *bits, dim=dim)
            found[kernel]["per_element"] = sass.per_element(compiled, on, dim, sass.target_of(arch).fragments)
    return found


def load() -> dict[str, Any]:
    """The results file; empty if there is none."""
    return json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {}


def save(rows: list[Row]) -> None:
    """Write the results file, a line for each row."""
    rows.sort(key=lambda row: (list(map(name_of, TARGETS)).index(row["target"]), row["dim"]))
    head = {"command": "python examples/measure/compile_matrix.py", "triton": triton.__version__}
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    PATH.write_text(f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=[str(target) for target in TARGETS])
    chosen = [target for target in TARGETS if str(target) in parser.parse_args().targets]
    rows = [row for row in load().get("rows", []) if row["target"] not in map(name_of, chosen)]
    for arch in chosen:
        for dim in DIMS:
            for preset in PRESETS:
                rows.append(row(arch, preset, dim))
                print(rows[-1]["target"], preset, dim, rows[-1]["decode"], flush=True)
    save(rows)


if __name__ == "__main__":
    main()
