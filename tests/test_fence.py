"""Names of transformers and torch that the ways stand on: each is taken away in turn, and its way says so. And what is
said of versions that nobody has tried.

`tests/support/fence.py` derives the names from our own classes. After a change of what is overridden or read, run
`python -m tests.support.fence`.
"""

import ast
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

import tq_hf
from tests.support import fence
from tests.support.tiny_models import build
from tests.test_packaging import ROOT
from tq_hf import TurboQuantCache, compat

INSTALLED = Version(transformers.__version__)
NEWEST = INSTALLED >= Version(".".join(map(str, compat.TESTED["transformers"][1])))
HAS_BATCHES = INSTALLED >= Version("5.19")
WAYS = [way for way in compat.REQUIRED_NAMES if HAS_BATCHES or way in (fence.CACHE, fence.GRAPHS)]


@pytest.fixture(scope="module")
def starts() -> dict[str, Callable[[], object]]:
    """The first call of each way."""
    model, none = build("llama"), dict.fromkeys(("logits_processor", "stopping_criteria", "generation_config"))
    graphs: Any = tq_hf.graph_decoding
    return {
        fence.CACHE: lambda: TurboQuantCache(model.config),
        fence.GRAPHS: lambda: graphs(model, None, **none),
        fence.BATCHES: lambda: tq_hf.TurboQuantBatching(model),
        fence.SERVER: lambda: compat.check_required_names(fence.SERVER, ""),  # the server's first call
    }


@pytest.mark.parametrize("way", WAYS)
def test_names_of_transformers_are_there(way: str) -> None:
    assert compat.missing_names(way) == []


@pytest.mark.skipif(not NEWEST, reason="older versions lack some of the names")
def test_the_fence_holds_all_that_our_classes_stand_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fence.Fence()
    assert found.unknown == set(), "say in tests/support/fence.py whose these are"
    assert fence.record(found) == compat.REQUIRED_NAMES, "run `python -m tests.support.fence`"
    monkeypatch.setattr(TurboQuantCache, "early_initialization", lambda self, batch_size: None)
    added = fence.record(fence.Fence())[fence.CACHE]["transformers.cache_utils:DynamicCache"]
    assert "early_initialization(batch_size)" in added.split()


def functions_of(owner: type) -> Iterator[Any]:
    """Functions of a class beneath properties and decorators."""
    for method in (method for kind in owner.__mro__ for method in vars(kind).values()):
        for function in [method.fget, method.fset] if isinstance(method, property) else [method]:
            function = getattr(function, "__func__", function)
            while hasattr(function, "__wrapped__"):
                function = function.__wrapped__
            if hasattr(function, "__code__"):
                yield function


class Without:
    """A class or a module without one of its names."""

    def __init__(self, owner: Any, gone: str) -> None:
        self._owner, self._gone = owner, gone

    def __getattr__(self, name: str) -> Any:
        if name == self._gone:
            raise AttributeError(name)
        return getattr(self._owner, name)


def take(place: str, item: str, patch: pytest.MonkeyPatch) -> list[str]:
    """Take an item of `REQUIRED_NAMES` away. Returns what a sentence has to name."""
    owner, (name, _, parts) = resolve_name(place), item.strip("+)").partition("(")
    if name.startswith("."):  # renamed wherever its class sets it
        for kind in owner.__mro__:
            patch.delitem(vars(kind).get("__annotations__", {}), name[1:], raising=False)
        for function in functions_of(owner):
            renamed = ["_renamed" if each == name[1:] else each for each in function.__code__.co_names]
            patch.setattr(function, "__code__", function.__code__.replace(co_names=tuple(renamed)))
        return [f"{place}.{name[1:]}"]
    if parts:
        patch.setattr(owner, name, lambda: None)
        return [f"{place}.{name}({part})" for part in parts.split(",")]
    kinds = [owner] if isinstance(owner, ModuleType) else [kind for kind in owner.__mro__ if kind is not object]
    try:
        for kind in [kind for kind in kinds if name in vars(kind)]:
            patch.delattr(kind, name)
    except (AttributeError, TypeError):  # a member of an enum, or a class in C
        pass
    if hasattr(owner, name):
        without = Without(owner, name)
        patch.setattr(compat, "resolve_name", lambda each: without if each == place else resolve_name(each))
    return [f"{place}.{name}"]


@pytest.mark.parametrize("way, place", [(way, place) for way in WAYS for place in compat.REQUIRED_NAMES[way]])
def test_a_name_that_has_gone_is_named_by_its_way(way: str, place: str, starts: dict[str, Callable]) -> None:
    items = [item for item in compat.REQUIRED_NAMES[way][place].split() if NEWEST or item[0] != "+"]
    for item in items:
        compat.check_required_names.cache_clear()
        with pytest.MonkeyPatch.context() as patch:
            names = take(place, item, patch)
            with pytest.raises(ImportError) as caught:
                starts[way]()
        sentence = str(caught.value)
        assert [name for name in names if name not in sentence] == []
        assert f"Version {INSTALLED} is installed and lacks" in sentence and "pip install" in sentence
    compat.check_required_names.cache_clear()


@pytest.mark.parametrize("way", WAYS)
def test_a_class_or_module_that_has_gone_is_named_by_its_way(way: str, starts: dict[str, Callable]) -> None:
    for gone in compat.REQUIRED_NAMES[way]:

        def resolve(place: str, gone: str = gone) -> Any:
            return resolve_name("transformers.no_longer" if place == gone else place)

        compat.check_required_names.cache_clear()
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ImportError, match=f"lacks {gone} "):
            patch.setattr(compat, "resolve_name", resolve)
            starts[way]()
    compat.check_required_names.cache_clear()


def test_wrappers_of_other_packages_are_no_loss(monkeypatch: pytest.MonkeyPatch, starts: dict[str, Callable]) -> None:
    own = transformers.GenerationMixin._prefill
    monkeypatch.setattr(
        transformers.GenerationMixin, "_prefill", lambda self, *args, **kwargs: own(self, *args, **kwargs)
    )
    compat.check_required_names.cache_clear()
    starts[fence.CACHE]()
    compat.check_required_names.cache_clear()


def test_an_import_that_fails_names_the_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "tq_hf"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("transformers.masking_utils.eager_mask")
    said = f"Version {INSTALLED} is installed and lacks a name: cannot import name 'eager_mask'"
    with pytest.raises(ImportError, match=said):
        importlib.import_module("tq_hf")


@pytest.mark.parametrize("package", ["tq_hf", "tq_hf/batching"])
def test_every_room_is_imported_where_errors_name_the_versions(package: str) -> None:
    tree = ast.parse((ROOT / package / "__init__.py").read_text())

    def outside(node: ast.AST) -> set[str | None]:
        """Modules of ours that are imported elsewhere, type checkers aside."""
        if ast.unparse(node).startswith(("with naming_versions()", "if TYPE_CHECKING")):
            return set()
        if isinstance(node, ast.ImportFrom) and node.level:
            return {node.module}
        return set().union(*map(outside, ast.iter_child_nodes(node)))

    assert outside(tree) == {"compat"}


def test_errors_of_our_own_stay_as_they_are() -> None:
    for error in (ImportError("no module", name="tq_kernels.no_longer"), AttributeError("none", obj=tq_hf)):
        with pytest.raises(type(error)) as caught, compat.naming_versions():
            raise error
        assert caught.value is error
    with pytest.raises(ImportError, match="lacks a name: module 'torch' has no"), compat.naming_versions():
        _ = torch.no_longer


def test_what_is_installed_here_is_known(monkeypatch):
    said = []
    monkeypatch.setattr(compat.logger, "warning", said.append)
    compat.report_untested()
    assert said == []


@pytest.mark.parametrize(
    ("installed", "clauses"),
    [
        ({"torch": "2.9.0+cu128", "transformers": "5.17.0", "triton": "3.5.0"}, []),
        ({"torch": "2.15.1", "transformers": "5.24.0", "triton": "3.9.0"}, []),
        ({"torch": "2.8.0"}, ["torch 2.8.0 (tested: 2.9 to 2.15)"]),
        ({"torch": "2.16.0a0", "triton": "3.10.0"}, ["torch 2.16.0a0 (tested: 2.9 to 2.15)", "triton 3.10.0 (tested"]),
        ({"transformers": "6.0.0"}, ["transformers 6.0.0 (tested: 5.17 to 5.24)"]),
        ({"torch": "main"}, []),
    ],
    ids=str,
)
def test_a_version_outside_of_what_was_tested_is_named(installed, clauses):
    found = compat.untested(installed)
    assert len(found) == len(clauses) and all(map(str.startswith, found, clauses))


def test_one_sentence_is_logged(monkeypatch):
    said = []
    monkeypatch.setattr(compat.logger, "warning", said.append)
    monkeypatch.setattr(compat, "version", lambda name: pytest.fail("torch is imported, and says it itself"))
    monkeypatch.setattr(compat, "TESTED", {"torch": ((1, 0), (1, 13)), "transformers": ((4, 0), (4, 9))})
    compat.report_untested()
    torch, transformers = r"torch \S+ \(tested: 1.0 to 1.13\)", r"transformers \S+ \(tested: 4.0 to 4.9\)"
    assert re.match(rf"tq_hf has not been run with {torch} and {transformers}\. Compare", said[0])


def test_lower_bounds_are_the_oldest_that_were_tested():
    text = (ROOT / "pyproject.toml").read_text()
    for name, (oldest, _) in compat.TESTED.items():
        assert re.search(rf'"{name}>={oldest[0]}\.{oldest[1]}\b', text), name


def test_the_oldest_triton_is_what_the_oldest_tests_install():
    oldest, _ = compat.TESTED["triton"]
    assert f'"triton=={oldest[0]}.{oldest[1]}.0;' in (ROOT / "Makefile").read_text()
