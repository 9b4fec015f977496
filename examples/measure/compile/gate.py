"""Gate for changes of structure: machine code, assertions and time of the host must not change.

    python -m examples.measure.compile.gate build/before.json  # on the commit before
    python -m examples.measure.compile.gate build/after.json --against build/before.json  # exits 1 on a difference
    python -m examples.measure.compile.gate build/some.json --only ptx --kernels 'decode.*90'

PTX is compared by hash, without debug lines and without the name of the kernel, which may be moved, renamed
and split into other inner functions. Needs no GPU. Differences of `bench_host.py` are printed and not judged: the
machine decides them as well.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from multiprocessing import Pool
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
PARTS = ("ptx", "assertions", "host")
# By target: presets and head sizes. Every target has its own code: fragments, asynchronous copies, dependent launches.
QUICK: dict[int | str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    75: (("4bit_nc", "3bit_nc"), (128,)),
    80: (("4bit_nc", "3bit_nc"), (128,)),
    90: (("k8v4", "4bit_nc", "3bit_nc", "2.5bit_nc", "2bit_nc"), (64, 128)),
    "gfx942": (("4bit_nc",), (128,)),
}
Job = tuple[str, int | str, str, int]


def jobs(full: bool) -> Iterator[Job]:
    """Kernels, targets, presets and head sizes to compile."""
    from examples.measure.compile import builds, compile_matrix

    matrix: dict[int | str, Any] = (
        {arch: (tuple(compile_matrix.PRESETS), compile_matrix.DIMS) for arch in compile_matrix.TARGETS}
        if full
        else QUICK
    )
    for arch, (presets, dims) in matrix.items():
        for dim in dims:
            for preset in presets:
                for kernel in compilers():
                    paged = kernel.startswith("paged")
                    if paged and not isinstance(arch, int) or kernel == "paged prompts" and dim != 128:
                        continue
                    if kernel.endswith("latents") and (not isinstance(arch, int) or arch == 75 or dim != 128):
                        continue
                    of_any_preset = kernel in ("dense", "prompt", "reorder", "sampling", "paged small", "paged windows")
                    if of_any_preset and preset != "4bit_nc":
                        continue
                    name = kernel.removeprefix("paged ").removesuffix(", masked").replace("prompts", "prefix")
                    if builds.launched(name, arch, dim):
                        yield kernel, arch, preset, dim


def compilers() -> dict[str, Callable[[Any, str, int], Any]]:
    """Functions of target, preset and head size that compile a kernel, or several."""
    from examples.measure.compile import builds
    from examples.measure.compile.builds import bits_of

    found: dict[str, Callable[[Any, str, int], Any]] = {
        name: lambda arch, preset, dim, make=make: make(arch, bits_of(preset), dim=dim)
        for name, make in builds.BUILDERS.items()
    }
    return found | {
        "rotate": lambda arch, preset, dim: builds.build_rotate(arch, bits_of(preset), dim=dim),
        "append and rotate": lambda arch, preset, dim: builds.build_preallocated_append(arch, bits_of(preset), dim=dim),
        "append and encode": lambda arch, preset, dim: builds.build_preallocated_append(
            arch, bits_of(preset), dim=dim, rotates=False
        ),
        "prefix, masked": lambda arch, preset, dim: builds.build_prefix(
            arch, bits_of(preset), dim=dim, mask=2, bounds=True, has_aux=True, split=True
        ),
        "dense": lambda arch, preset, dim: builds.build_dense(arch, dim=dim, mask=2, softcap=True, split=True),
        "prompt": lambda arch, preset, dim: builds.build_prompt(arch, dim=dim),
        "latents": lambda arch, preset, dim: builds.build_latents(arch, (bits_of(preset)[0], 8), mask=1),
        "paged latents": lambda arch, preset, dim: [
            builds.build_latents(arch, (bits_of(preset)[0], 8), paged=True),
            *builds.build_small_latents(arch, (bits_of(preset)[0], 8)),
        ],
        "reorder": lambda arch, preset, dim: builds.build_reorder(arch),
        "sampling": lambda arch, preset, dim: builds.build_sampling(arch)[0],
        "paged split": lambda arch, preset, dim: builds.build_paged_split(arch, preset, dim)[0],
        "paged split, softcap": lambda arch, preset, dim: builds.build_paged_split(arch, preset, dim, True)[0],
        "paged small": lambda arch, preset, dim: builds.build_small(arch, dim),
        "paged encode": lambda arch, preset, dim: builds.build_completed(arch, preset, dim, "fp16"),
        "paged prompts": lambda arch, preset, dim: builds.build_prompts(arch, preset),
        "paged windows": lambda arch, preset, dim: builds.build_windows(arch, dim, split=True),
    }


def stop_before_machine_code() -> None:
    """Let Triton compile as far as assembly: what follows depends on nothing else and takes half of the time."""
    from triton.backends.amd.compiler import HIPBackend
    from triton.backends.nvidia.compiler import CUDABackend

    CUDABackend.make_cubin = lambda self, source, *_: b""  # type: ignore[method-assign]
    HIPBackend.make_hsaco = staticmethod(lambda source, *_: b"")  # type: ignore[method-assign,assignment]


def digest(compiled: Any) -> str:
    """Hash of a kernel's assembly without comments, debug lines and its name."""
    text: str = compiled.asm["ptx"] if "ptx" in compiled.asm else compiled.asm["amdgcn"]
    lines = (
        re.sub(r"//.*|;.*$" if "amdgcn" in compiled.asm else r"//.*", "", line).strip() for line in text.splitlines()
    )
    kept = [line for line in lines if line and not line.startswith((".loc", ".file", "$L__tmp", ".ident", ".section"))]
    return hashlib.sha256("\n".join(kept).replace(compiled.metadata.name, "KERNEL").encode()).hexdigest()[:16]


def hashes(job: Job) -> tuple[str, list[str]]:
    kernel, *shape = job
    made = compilers()[kernel](*shape)
    return " · ".join(map(str, job)), [digest(each) for each in (made if isinstance(made, list) else [made])]


def ptx(full: bool, workers: int, kernels: str) -> dict[str, Any]:
    """Hashes of the kernels whose name this expression finds."""
    with Pool(workers, initializer=stop_before_machine_code) as pool:
        chosen = [job for job in jobs(full) if re.search(kernels, " · ".join(map(str, job)))]
        return dict(pool.imap_unordered(hashes, chosen))


def assertions() -> dict[str, int]:
    """Statements that assert, and contexts that expect an error or a warning, by test file."""
    found: dict[str, int] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
        count = sum(isinstance(node, ast.Assert) for node in nodes)
        count += sum(isinstance(node, ast.Attribute) and node.attr in ("raises", "warns") for node in nodes)
        found[path.name] = found.get(path.name, 0) + count
    return {name: count for name, count in found.items() if count}


def host() -> dict[str, float]:
    """Microseconds of a layer and step, as `bench_host.py` measures them."""
    from examples.measure.speed import bench_host

    return {case: round(bench_host.fast(bench_host.measure(case)[0]), 1) for case in bench_host.CASES}


def compare(before: dict[str, Any], after: dict[str, Any], kernels: str) -> list[str]:
    """Differences, one a line. Times are only printed."""
    wrong = []
    for part in after:
        old, new = before.get(part, {}), after[part]
        if part == "host":
            for name in new:
                print(f"host, {name}: {old.get(name)} before, {new[name]} now")
            continue
        names = [name for name in old if old[name] != new.get(name) and (part != "ptx" or re.search(kernels, name))]
        if part == "assertions":
            names = [name for name in names if new.get(name, 0) < old[name]]
        wrong += [f"{part}: {name}: {old[name]} before, {new.get(name)} now" for name in names]
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="where to write what was found")
    parser.add_argument("--against", type=Path, help="a result to compare with")
    parser.add_argument("--only", choices=PARTS, action="append", help="these parts (all)")
    parser.add_argument("--full", action="store_true", help="PTX of every target, preset and head size: hours")
    parser.add_argument("--kernels", default="", help="PTX of those that this expression finds: '^decode', 'paged.*90'")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    options = parser.parse_args()
    parts = {"ptx": lambda: ptx(options.full, options.workers, options.kernels), "assertions": assertions, "host": host}
    found = {name: make() for name, make in parts.items() if name in (options.only or PARTS)}
    options.result.parent.mkdir(parents=True, exist_ok=True)
    options.result.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    if options.against:
        wrong = compare(json.loads(options.against.read_text(encoding="utf-8")), found, options.kernels)
        print(*wrong, sep="\n")
        sys.exit(bool(wrong))


if __name__ == "__main__":
    os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")
    # Of its own: what this leaves there has no machine code.
    os.environ["TRITON_CACHE_DIR"] = str(ROOT / "build" / "gate-cache")
    main()
