"""The rooms of the two packages: imports go down, never up; no file has more than 600 lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_packaging import KERNELS, ROOT, imported_modules

ROOMS = {
    "tq_kernels": [["decode", "prefix"], ["codec", "turing"], ["common"], ["types"], ["format"]],
    "tq_hf": [
        ["tools"],
        ["batching", "graph_decoding"],
        ["cache"],
        ["auto"],
        ["saving"],
        ["balance", "memory", "attention"],
        ["layers"],
        ["stores"],
        ["ops"],
        ["codec"],
        ["tensors"],
        ["config"],
        ["layout"],
        ["autocast", "inference_mode", "compat", "versions"],
    ],
}
"""Top to bottom; rooms side by side do not know one another."""
FOLDERS = {"tq_kernels": KERNELS / "tq_kernels", "tq_hf": ROOT / "tq_hf"}


def arrows(package: str) -> set[tuple[str, str]]:
    """Which room imports which."""
    folder = FOLDERS[package]
    found = set()
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).with_suffix("").parts
        for name in imported_modules(path, ".".join((package, *parts))):
            top, _, rest = name.partition(".")
            if top == package and rest and parts != ("__init__",):
                found.add((parts[0], rest.partition(".")[0]))
    return {(room, other) for room, other in found if room != other and not other.startswith("__")}  # `__version__`


@pytest.mark.parametrize("package", ROOMS)
def test_imports_go_down_the_list_of_rooms(package: str) -> None:
    floor = {room: i for i, rooms in enumerate(ROOMS[package]) for room in rooms}
    found = arrows(package)
    assert found
    assert [f"{room} -> {other}" for room, other in sorted(found) if floor[room] >= floor[other]] == []


@pytest.mark.parametrize("folder", [KERNELS, ROOT / "tq_hf", ROOT / "tests"], ids=str)
def test_no_file_has_more_than_600_lines(folder: Path) -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in folder.rglob("*.py")}
    assert [name for name, lines in lengths.items() if lines > 600] == []
