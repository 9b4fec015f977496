"""Scratch memory shared by all layers of all models: reserve, lock, acquire.

There is one `Workspace` per device, stream and thread: work queued on one stream by one thread runs in order, so a
buffer is free again when the next call gets it, and nothing else ever sees it. A workspace holds one flat buffer per
name. It grows to the largest request and never shrinks; each dimension's maximum is kept apart, so that alternating
(many heads, small batch) and (few heads, large batch) does not reallocate. `reserve` makes room ahead (the buffer is
the maximum of the reservations, never their sum), `lock` promises stable addresses from then on (for CUDA graphs of
one's own; compiled decoding takes its scratch from its graph), and `acquire` returns views, valid until the next
`acquire` of the same name.

(The lifecycle of vLLM's workspace manager, pull requests 40706, 40941 and 37805.)
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..inference_mode import outside_inference_mode


@dataclass(frozen=True)
class Scratch:
    """A request for one buffer."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class _Buffer:
    limits: tuple[int, ...]
    data: torch.Tensor
    # What was asked for last, and its view: one layer after the other asks for the same.
    request: Scratch | None = None
    view: torch.Tensor | None = None


class Workspace:
    """Named scratch buffers on one device.

    Args:
        device: Where the buffers live.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.locked = False
        self._buffers: dict[str, _Buffer] = {}

    def reserve(self, caller: str, requests: Mapping[str, Scratch]) -> None:
        """Make room for `requests`, so that a later `acquire` of these or smaller shapes allocates nothing.

        Raises:
            RuntimeError: The workspace is locked and too small; the message names `caller`.
        """
        for name, request in requests.items():
            self._fit(caller, name, request)

    def acquire(self, caller: str, requests: Mapping[str, Scratch]) -> dict[str, torch.Tensor]:
        """Contiguous views of the shared buffers, uninitialised, valid until the next `acquire` of the same names.

        Raises:
            RuntimeError: The workspace is locked and too small; the message names `caller`.
        """
        return {name: self.view(caller, name, request) for name, request in requests.items()}

    def view(self, caller: str, name: str, request: Scratch) -> torch.Tensor:
        """`acquire` of one buffer."""
        buffer = self._buffers.get(name)
        if buffer is not None and buffer.view is not None and (buffer.request is request or buffer.request == request):
            return buffer.view
        del buffer  # it may be freed to make a larger one
        return self._new_view(caller, name, request)

    @outside_inference_mode
    def _new_view(self, caller: str, name: str, request: Scratch) -> torch.Tensor:
        view = self._fit(caller, name, request)[: math.prod(request.shape)].view(request.shape)
        self._buffers[name].request, self._buffers[name].view = request, view
        return view

    @outside_inference_mode
    def _fit(self, caller: str, name: str, request: Scratch) -> torch.Tensor:
        buffer = self._buffers.get(name)
        limits: Sequence[int] = request.shape
        if buffer is not None and buffer.data.dtype == request.dtype and len(buffer.limits) == len(request.shape):
            limits = tuple(map(max, buffer.limits, request.shape))
            if math.prod(limits) <= buffer.data.numel():
                buffer.limits = limits
                return buffer.data
        if self.locked:
            if buffer and buffer.data.dtype == request.dtype and math.prod(request.shape) <= buffer.data.numel():
                return buffer.data  # of another shape than was reserved, and nothing has to grow for it
            held = "nothing" if buffer is None else f"{list(buffer.limits)} of {buffer.data.dtype}"
            raise RuntimeError(
                f"{caller} needs scratch {name!r} of {list(request.shape)} {request.dtype}, but the workspace on "
                f"{self.device} is locked with {held}. Reserve the largest shape before `lock()`, or call `unlock()`."
            )
        # Free the old buffer first: peak is the larger of the two, not their sum.
        del buffer
        self._buffers.pop(name, None)
        data = torch.empty(math.prod(limits), dtype=request.dtype, device=self.device)
        self._buffers[name] = _Buffer(tuple(limits), data)
        return data

    def lock(self) -> None:
        """Refuse to grow from now on: addresses stay as they are."""
        self.locked = True

    def unlock(self) -> None:
        """Allow growth again. Graphs captured under the lock must not be replayed after the workspace has grown."""
        self.locked = False

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.data.nbytes for buffer in self._buffers.values())


def acquire(
    workspace: Workspace | None, caller: str, device: torch.device, requests: Mapping[str, Scratch]
) -> dict[str, torch.Tensor]:
    """Scratch from `workspace`, or allocated for this call alone if that is `None`."""
    if workspace is not None:
        return workspace.acquire(caller, requests)
    return {name: torch.empty(r.shape, dtype=r.dtype, device=device) for name, r in requests.items()}


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.workspaces: dict[tuple[torch.device, int], Workspace] = {}


_local = _PerThread()
_all: weakref.WeakSet[Workspace] = weakref.WeakSet()


def current_workspace(device: torch.device) -> Workspace:
    """The workspace of `device`, its current stream and this thread; made on first use."""
    # Without a `torch.cuda.Stream` around it: this runs for every layer of every step.
    stream = 0
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        stream = torch._C._cuda_getCurrentRawStream(index)
    key = (device, stream)
    if key not in _local.workspaces:
        _local.workspaces[key] = Workspace(device)
        _all.add(_local.workspaces[key])
    return _local.workspaces[key]


def workspace_bytes() -> int:
    """Bytes held by all workspaces of this process."""
    return sum(workspace.nbytes for workspace in list(_all))


def release_workspaces() -> None:
    """Drop this thread's workspaces; the next use starts over."""
    _local.workspaces.clear()
