"""Names of transformers and torch that the ways stand on: each is taken away in turn, and each way says so.

`tests/support/fence.py` derives the names from our own classes. After a change of what is overridden or read, run
`python -m tests.support.fence`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from pkgutil import resolve_name

import tq_hf
from tests.support import fence
from tests.support.helpers import llama_config
from tests.support.tiny_models import build
from tests.test_packaging import ROOT
from tq_hf import TurboQuantCache, compat

INSTALLED = Version(transformers.__version__)
NEWEST = INSTALLED >= Version(".".join(map(str, compat.TESTED["transformers"][1])))
batches = pytest.mark.skipif(INSTALLED < Version("5.19"), reason="continuous batching is of another design")
WAYS = [pytest.param(way, marks=batches if way in (fence.BATCHES, fence.SERVER) else ()) for way in compat.REQUIRED_NAMES]
PLACES = [
    pytest.param(way, place, marks=batches if way in (fence.BATCHES, fence.SERVER) else ())
    for way, places in compat.REQUIRED_NAMES.items()
    for place in places
]


def starts() -> dict[str, Callable[[], object]]:
    """The first call of each way, by name."""
    model = build("llama")
    none: Any = None
    return {
        fence.CACHE: lambda: TurboQuantCache(model.config),
        fence.GRAPHS: lambda: tq_hf.graph_decoding(model, none, none, none, none),
        fence.BATCHES: lambda: tq_hf.TurboQuantBatching(model),
        fence.SERVER: lambda: compat.check_required_names(fence.SERVER, ""),  # which the server calls at first
    }


@pytest.mark.parametrize("way", WAYS)
def test_names_of_transformers_are_there(way: str) -> None:
    assert compat.missing_names(way) == []


@pytest.mark.skipif(not NEWEST, reason="older versions lack some of the names")
def test_the_fence_has_all_that_our_classes_stand_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fence.Fence()
    assert found.unknown == set(), "say in tests/support/fence.py whose these are"
    assert fence.record(found) == compat.REQUIRED_NAMES, "run `python -m tests.support.fence`"
    monkeypatch.setattr(TurboQuantCache, "early_initialization", lambda self, batch_size: None, raising=False)
    added = fence.record(fence.Fence())[fence.CACHE]["transformers.cache_utils:DynamicCache"]
    assert "early_initialization(batch_size)" in added.split()


class Taken:
    """Takes names away from classes and modules, and restores them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch

    def place(self, place: str) -> None:
        module, _, name = place.partition(":")
        if name:
            self.patch.delattr(sys.modules[module], name)
        else:
            self.patch.setitem(sys.modules, module, None)

    def item(self, place: str, item: str) -> list[str]:
        """Take an item away. Returns what a sentence has to name."""
        owner, (name, _, parts) = resolve_name(place), item.strip("+)").partition("(")
        if name.startswith("."):
            self._rename(owner, name[1:])
            return [f"{place}.{name[1:]}"]
        if parts:
            self.patch.setattr(owner, name, lambda: None)
            return [f"{place}.{name}({part})" for part in parts.split(",")]
        kinds = [owner] if isinstance(owner, ModuleType) else owner.__mro__
        try:
            for kind in [each for each in kinds if name in vars(each) and each is not object]:
                self.patch.delattr(kind, name)
            taken = not hasattr(owner, name)
        except (AttributeError, TypeError):  # members of an enum, classes in C
            taken = False
        if not taken:
            others = {each: getattr(owner, each) for each in dir(owner) if each != name}
            empty = SimpleNamespace(**others, __mro__=getattr(owner, "__mro__", ()))
            self.patch.setattr(compat, "resolve_name", lambda each: empty if each == place else resolve_name(each))
        return [f"{place}.{name}"]

    def _rename(self, owner: type, name: str) -> None:
        """Rename an attribute in all methods of a class."""
        for kind in owner.__mro__:
            if name in vars(kind).get("__annotations__", {}):
                self.patch.delitem(kind.__annotations__, name)
            for method in vars(kind).values():
                parts = [method.fget, method.fset] if isinstance(method, property) else [getattr(method, "__func__", method)]
                for function in parts:
                    while hasattr(function, "__wrapped__"):
                        function = function.__wrapped__
                    code = getattr(function, "__code__", None)
                    if code is not None and name in code.co_names:
                        names = tuple("_renamed" if each == name else each for each in code.co_names)
                        self.patch.setattr(function, "__code__", code.replace(co_names=names))


@pytest.mark.parametrize("way, place", PLACES)
def test_a_way_whose_ground_has_moved_says_so(way: str, place: str) -> None:
    """A class or a module, and each of its names and parameters, is taken away: a sentence names it and the versions."""
    start, items = starts()[way], compat.REQUIRED_NAMES[way][place].split()
    silent = []
    for item in [None, *(item for item in items if NEWEST or item[0] != "+")]:
        compat.check_required_names.cache_clear()
        with pytest.MonkeyPatch.context() as patch:
            taken = Taken(patch)
            missing = [place] if taken.place(place) is None and item is None else []
            try:
                start()
            except ImportError as error:
                sentence = str(error)
