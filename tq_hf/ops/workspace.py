"""Scratch memory shared by all layers of all models.

There is one `Workspace` per device, stream and thread: work queued on one stream by one thread runs in order, so a
buffer is free again when the next call gets it. A workspace holds one flat buffer of bytes per name. The buffer grows
to the largest request and never shrinks, so (many heads, small batch) and (few heads, large batch) alternate without
reallocating. `acquire` returns views, valid until the next `acquire` of the
same name.

A session of continuous batching has its own workspace. It reserves the scratch of its largest step before it makes its
pages (`reserve`), and allocates nothing from then on (`lock`): a step that needs more is refused.

Captured graphs take no scratch from here, neither those of `torch.compile` nor those of continuous batching: they are
captured on a stream of their own and may be replayed on any, where no order protects a buffer that other calls share.
They use memory of their own pool instead (`allocator` without a workspace).

A stream is known by its handle. Wait for the work of a stream before destroying it: CUDA may give the handle to a new
stream, and that stream then gets the same workspace.

(After vLLM's workspace manager, pull requests 40706, 40941 and 37805.)
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from ..compat import current_raw_stream, outside_inference_mode


@dataclass(frozen=True)
class Scratch:
    """A request for one buffer."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class _Buffer:
    data: torch.Tensor
    # Last request and its view: all layers make the same request.
    request: Scratch | None = None
    view: torch.Tensor | None = None


class Workspace:
    """Named scratch buffers on one device.

    Args:
        device: Where the buffers live.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[str, _Buffer] = {}
        self._locked = False

    def reserve(self, requests: Mapping[str, Scratch]) -> None:
        """Make the shared buffers at least as large as `requests`."""
        self.acquire(requests)

    def lock(self) -> None:
        """Allocate nothing from now on."""
        self._locked = True

    def acquire(self, requests: Mapping[str, Scratch]) -> dict[str, torch.Tensor]:
        """Return contiguous views of the shared buffers, valid until the next `acquire` of the same names.

        Buffers hold zeros when they are made, and later the data last written.

        Raises:
            RuntimeError: The workspace is locked, and a request is larger than what was reserved.
        """
        return {name: self._view(name, request) for name, request in requests.items()}

    def floats(self, name: str, size: int) -> torch.Tensor:
        """`acquire` as kernels call it: `size` float32 elements."""
        return self._view(name, _floats(size))

    def _view(self, name: str, request: Scratch) -> torch.Tensor:
        buffer = self._buffers.get(name)
        if buffer is not None and buffer.view is not None and (buffer.request is request or buffer.request == request):
            return buffer.view
        del buffer  # it may be freed to make a larger one
        return self._new_view(name, request)

    @outside_inference_mode
    def _new_view(self, name: str, request: Scratch) -> torch.Tensor:
        view = self._fit(name, request)[: request.nbytes].view(request.dtype).view(request.shape)
        self._buffers[name].request, self._buffers[name].view = request, view
        return view

    def _fit(self, name: str, request: Scratch) -> torch.Tensor:
        """The bytes of `name`, at least as many as `request` takes."""
        buffer = self._buffers.get(name)
        if buffer is not None and request.nbytes <= buffer.data.nbytes:
            return buffer.data
        if self._locked:
            reserved = 0 if buffer is None else buffer.data.nbytes
            raise RuntimeError(
                f"{name.capitalize()} needs {request.nbytes:,} bytes of scratch in this step, and {reserved:,} were "
                "reserved before serving began, since when nothing is allocated. Put fewer tokens or requests into a "
                "step (`max_batch_tokens`, `max_requests_per_batch` of the ContinuousBatchingConfig)."
            )
        # Free the old buffer first: peak is the larger of the two, not their sum.
        del buffer
        self._buffers.pop(name, None)
        # Counters of kernels begin at zero, and kernels leave them at zero.
        data = torch.zeros(request.nbytes, dtype=torch.uint8, device=self.device)
        self._buffers[name] = _Buffer(data)
        return data

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.data.nbytes for buffer in list(self._buffers.values()))


@lru_cache(maxsize=4096)
def _floats(size: int) -> Scratch:
    return Scratch((size,), torch.float32)


def allocator(workspace: Workspace | None, name: str, device: torch.device) -> Callable[[int], torch.Tensor]:
    """Return a function of a number of float32 elements that returns scratch: from `workspace` under `name`, or without
    a workspace allocated for each call."""
    if workspace is not None:
        return partial(workspace.floats, name)
    return lambda size: torch.empty(size, dtype=torch.float32, device=device)


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.workspaces: dict[tuple[torch.device, int], Workspace] = {}


_local = _PerThread()
_all: weakref.WeakSet[Workspace] = weakref.WeakSet()
_all_lock = threading.Lock()


@lru_cache
def _is_cuda(device: torch.device) -> bool:
    # torch makes a string of the type, which takes longer than all else here.
    return device.type == "cuda"


def current_workspace(device: torch.device) -> Workspace:
    """Return the workspace of `device`, its current stream and this thread, made on first use."""
    stream = 0
    if _is_cuda(device):
        stream = current_raw_stream(torch.cuda.current_device() if device.index is None else device.index)
    key = (device, stream)
    workspace = _local.workspaces.get(key)
    if workspace is None:
        workspace = _local.workspaces[key] = Workspace(device)
        with _all_lock:
            _all.add(workspace)
    return workspace


def workspace_bytes() -> int:
    """Number of bytes held by all workspaces of this process."""
    with _all_lock:
        workspaces = list(_all)
    return sum(workspace.nbytes for workspace in workspaces)


def release_workspaces() -> None:
    """Drop this thread's workspaces; the next use starts over."""
    _local.workspaces.clear()
