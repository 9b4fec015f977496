"""In place of Triton kernels: what is launched, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tq_kernels.common.launcher import Kernel, _compiles_only
from tq_kernels.decode.launch import steps_of
from tq_kernels.types import DenseRows, KeyValue

from tq_hf.ops.triton import blocks as triton_blocks
from tq_hf.ops.workspace import release_workspaces


class Recorder:
    """In place of a Triton kernel: keeps what is launched through what it compiles."""

    def __init__(self, name: str, log: list[tuple[Any, ...]]) -> None:
        self.name, self.log = name, log
        self.options: list[dict[str, Any]] = []
        self.given: tuple[Any, ...] = ()
        self.compiles = False

    def warmup(self, *arguments: Any, grid: tuple[int, int, int], **options: Any) -> Any:
        assert options["enable_fp_fusion"] is True  # Triton 3.9 warns where nobody says it
        self.options.append(options)
        self.given = without_tensors(arguments)
        if _compiles_only.get():
            self.compiles = True
            return self._keep("only compiled", grid, arguments)
        kinds = iter(["compiled"])

        def run(x: int, y: int, z: int, stream: int, *arguments: Any) -> None:
            self._keep(next(kinds, "launched"), (x, y, z), arguments[5:])

        by_triton = lambda grid: lambda *arguments: self._keep("compiled", grid, arguments)  # noqa: E731
        fixed = dict(function=None, packed_metadata=None, src=SimpleNamespace(signature={}))
        compiled = SimpleNamespace(run=run, **fixed, __getitem__=by_triton)
        # Triton 3.5 and 3.6 say nothing more of a kernel that threads compile.
        return SimpleNamespace(result=lambda: compiled) if self.compiles else compiled

    def _keep(self, how: str, grid: tuple[int, int, int], arguments: tuple[Any, ...]) -> None:
        values = tuple(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments)
        by_address = not any(isinstance(x, torch.Tensor) for x in arguments)
        self.log.append((self.name, how, by_address, (grid, values)))


def without_tensors(x: Any) -> Any:
    """`x` with `None` for tensors, in tuples, too."""
    return tuple(map(without_tensors, x)) if isinstance(x, tuple) else None if isinstance(x, torch.Tensor) else x


def store_no_rows(states: KeyValue, dense: DenseRows, *_: Any) -> None:
    """In place of what launches a kernel on a prompt. Counts are those of nothing: left as they came, they would be any
    numbers."""
    for counts in dense.counts or ():
        counts.zero_()


@contextmanager
def recorded(
    monkeypatch: pytest.MonkeyPatch, kernels: Mapping[ModuleType, Sequence[str]]
) -> Iterator[list[tuple[Any, ...]]]:
    """What is launched of these kernels of modules, while kernels serve CPU tensors."""
    log: list[tuple[Any, ...]] = []
    for module, names in kernels.items():
        for name in names:
            monkeypatch.setattr(module, name, Kernel(Recorder(name, log)))
    monkeypatch.setattr(triton_blocks, "interpreted", lambda: True)
    monkeypatch.setattr(triton_blocks, "store_prompt_rows", store_no_rows)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    # What earlier launches left to later ones is other kernels'.
    steps_of.cache_clear()
    release_workspaces()
    with torch.no_grad():
        yield log
    release_workspaces()
    steps_of.cache_clear()
