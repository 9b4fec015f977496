"""The rooms of the two packages: imports go down, never up; what a file and a function may have."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.test_packaging import KERNELS, ROOT, imported_modules

ROOMS = {
    "tq_kernels": [
        ["latents"],
        ["decode", "prefix", "sampling"],
        ["codec", "turing"],
        ["common"],
        ["types"],
        ["layout"],
        ["format"],
    ],
    "tq_hf": [
        ["tools"],
        ["batching", "graph_decoding"],
        ["cache"],
        ["saving"],
        ["balance", "memory", "attention"],
        ["layers"],
        ["stores"],
        ["ops"],
        ["codec"],
        ["tensors"],
        ["config"],
        ["prepared"],
        ["compat"],
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


def test_backends_are_asked_for_through_dispatch() -> None:
    """Which backend computes is one room's decision: no other imports `ops.triton`, `ops.cpu` or `ops.backend`, and in
    that room no other file imports the kernels' side."""
    folder, backends = FOLDERS["tq_hf"], ("tq_hf.ops.triton", "tq_hf.ops.cpu", "tq_hf.ops.backend")
    found = {}
    for path in folder.rglob("*.py"):
        name = path.relative_to(folder).with_suffix("")
        refused = backends if name.parts[0] != "ops" else backends[:1]
        if name.parts[:2] not in (("ops", "dispatch"), ("ops", "triton")):
            imported = imported_modules(path, ".".join(("tq_hf", *name.parts)))
            found[str(name)] = sorted(x for x in imported if x.startswith(refused))
    assert "attention" in found and {name: imported for name, imported in found.items() if imported} == {}


BUDGETS = {
    "tq_kernels": {
        "latents": 600,  # attention over packed latents: queries rotated, tiles of tokens, merged; pages; shares
        "decode": 1942,  # four warps for wide heads; steps of several tokens; the launch that appends to pages
        "prefix": 1496,  # values of wide heads in two launches
        "codec": 2257,  # trellis codes of two words in a register; launches for blocks of pages
        "sampling": 144,  # top_k, top_p and min_p without a sort
        "turing": 889,
        "common": 1285,  # the power of two of a row; signs from two bits; one way to launch again; compiling in threads
        "types": 322,  # options of a call; where rows go; addresses, strides; sequences; rows of latents in pages
        "layout": 124,
        "format": 219,  # a code a width, and what decides its trellis
        "__init__": 5,
    },
    "tq_hf": {
        "tools": 2771,  # a server of its own: OpenAI's forms, bounds of requests; compare; display
        "batching": 4888,  # latents; options by request; requests that fail alone; prefixes in files; grammars
        "graph_decoding": 1359,  # linear layers; stop strings; drafts, over windows; caches that a model replaces
        "saving": 872,  # layers that are uneven on purpose; layers that share the order of padded rows
        "layers": 1827,  # latents not expanded, of shards too; rollback of uneven layers; rings; copies; advice
        "stores": 938,  # one way into operators; one store; blocks that keep their codes when rows are assigned or cut
        "ops": 2699,  # latents; pages of them by kernels; wide heads, one by one; tokens to sample; launch over pages
        "codec": 909,  # trellis codes: encoding by Viterbi's algorithm; shapes of channel scales
        "tensors": 812,  # pending tokens; rows of latents; the order of padded rows; dense blocks of pages; cut blocks
        "cache": 531,  # bits of latent layers; padding of a call; room for a whole answer; models that drop a cache
        "attention": 441,  # latents, dense states: functions of their own; lost gradients; a cache that gains nothing
        "memory": 89,
        "balance": 116,  # kernels of a probe are compiled together
        "config": 241,  # which layers hold latents, and their bits
        "prepared": 200,  # one product for projections of the same states
        "compat": 599,  # names of transformers that each way stands on; padding of a mask; tracing in one thread
        "__init__": 71,  # public names on first use
    },
}
"""Lines a room. A capability that needs more raises its room's budget in the commit that needs it, with the reason."""
PRODUCT, TESTS = 28_646, 34_801
"""Lines in all, of both packages and of `tests/`. They only fall, but for what a planned capability is granted.
Prefixes in files and grammars were granted 700, which are paid for; prompts at the speed of their products 400 (plans
of cuDNN, compiled and captured prompts, steps with prompts as graphs; what graphs and compiled layers follow; threads
that build launchers), which are paid for but 116; loud channels 600. Sentences for options of the engine took 45 more,
and Triton 3.8 and 3.9 another 28, against 860 of tests."""
FILES = 127  # prepared.py; {codec/loud,stores/assigned,ops/latent_pages}.py; batching/{prefixes,grammars}.py


@pytest.mark.parametrize("package", ROOMS)
def test_a_room_keeps_to_its_budget(package: str) -> None:
    folder, lines = FOLDERS[package], dict.fromkeys(BUDGETS[package], 0)
    for path in folder.rglob("*.py"):
        lines[path.relative_to(folder).with_suffix("").parts[0]] += len(path.read_text().splitlines())
    assert {room: count for room, count in lines.items() if count > BUDGETS[package][room]} == {}


def lines_of(*folders: Path) -> int:
    return sum(len(path.read_text().splitlines()) for folder in folders for path in folder.rglob("*.py"))


def test_the_whole_keeps_to_its_budget() -> None:
    """Rooms may trade lines with one another; a room that grows takes them from another."""
    assert lines_of(*FOLDERS.values()) <= PRODUCT
    assert lines_of(ROOT / "tests") <= TESTS


def test_there_are_no_more_files() -> None:
    assert sum(len(list(folder.rglob("*.py"))) for folder in FOLDERS.values()) <= FILES


@pytest.mark.parametrize("folder", [KERNELS, ROOT / "tq_hf", ROOT / "tests"], ids=str)
def test_no_file_has_more_than_600_lines(folder: Path) -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in folder.rglob("*.py")}
    assert [name for name, lines in lengths.items() if lines > 600] == []


def test_no_function_has_more_than_ten_parameters() -> None:
    """Of the package; a kernel's launch may have more, and a command as many options as users want."""
    counts = {}
    for path in FOLDERS["tq_hf"].rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                if any(ast.unparse(each).startswith("app.command(") for each in getattr(node, "decorator_list", ())):
                    continue
                parameters = [node for node in ast.walk(node.args) if isinstance(node, ast.arg)]
                counts[f"{path.name} {getattr(node, 'name', 'lambda')}"] = len(parameters)
    assert counts and {name: count for name, count in counts.items() if count > 10} == {}


def test_no_two_classes_have_the_same_name() -> None:
    """In both packages together: a name that is read in one file says one thing in all."""
    places: dict[str, list[str]] = {}
    for folder in FOLDERS.values():
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert len(places) > 100
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def private_names(path: Path) -> tuple[set[str], set[str]]:
    """Names with one leading underscore that a file defines, and those that it reads from an object."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    defined = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    defined |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    defined |= {
        node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    reads = {node.attr for node in nodes if isinstance(node, ast.Attribute)} - {
        "_fields",
        "_replace",
    }  # of a named tuple
    return defined, {name for name in reads if name.startswith("_") and not name.startswith("__")}


def test_private_names_of_torch_and_transformers_stand_in_compat() -> None:
    """But for batching and tools, which subclass what is transformers' (`tests/batching/test_upstream.py`)."""
    folder = FOLDERS["tq_hf"]
    names = {path.relative_to(folder): private_names(path) for path in folder.rglob("*.py")}
    ours = set().union(*(defined for defined, _ in names.values()))
    foreign = {path: reads - ours for path, (_, reads) in names.items() if path.parts[0] not in ("batching", "tools")}
    assert foreign.pop(Path("compat.py"))
    assert {str(path): reads for path, reads in foreign.items() if reads} == {}
