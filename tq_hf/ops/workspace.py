"""Scratch memory shared by all layers of all models.

There is one `Workspace` per device, stream and thread: work queued on one stream by one thread runs in order, so a
buffer is free again when the next call gets it. A workspace holds one flat buffer of bytes per name. The buffer grows
to the largest request and never shrinks, so (many heads, small batch) and (few heads, large batch) alternate without
reallocating. `take` returns views, valid until the next `take` of the same name.

A session of continuous batching has its own workspace. It reserves the scratch of its largest step before it makes its
pages, and allocates nothing from then on (`lock`): a step that needs more is refused.

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
from collections.abc import Callable
from functools import lru_cache, partial

import torch

from ..compat import current_raw_stream, outside_inference_mode


class Workspace:
    """Named scratch buffers on one device.

    Args:
        device: Where the buffers live.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[str, torch.Tensor] = {}
        self._latest: dict[str, tuple[tuple[int, ...], torch.dtype, torch.Tensor]] = {}
        """Shape and dtype last asked for, and the view of them: all layers ask for the same."""
        self._locked = False

    def lock(self) -> None:
        """Allocate nothing from now on."""
        self._locked = True

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous view of the shared buffer `name`, valid until the next `take` of the same name.

        A buffer holds zeros when it is made, and later the data last written.

        Raises:
            RuntimeError: The workspace is locked, and the buffer is smaller.
        """
        latest = self._latest.get(name)
        if latest is not None and latest[0] == shape and latest[1] == dtype:
            return latest[2]
        del latest  # its buffer may be freed to make a larger one
        return self._new_view(name, shape, dtype)

    def floats(self, name: str, size: int) -> torch.Tensor:
        """`take` as kernels call it: `size` float32 elements."""
        return self.take(name, (size,), torch.float32)

    @outside_inference_mode
    def _new_view(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        view = self._fit(name, nbytes)[:nbytes].view(dtype).view(shape)
        self._latest[name] = shape, dtype, view
        return view

    def _fit(self, name: str, nbytes: int) -> torch.Tensor:
        """The bytes of `name`, at least `nbytes`."""
        reserved = self._buffers[name].nbytes if name in self._buffers else 0
        if name in self._buffers and nbytes <= reserved:
            return self._buffers[name]
        if self._locked:
            raise RuntimeError(
                f"{name.capitalize()} needs {nbytes:,} bytes of scratch in this step, and {reserved:,} were "
                "reserved before serving began, since when nothing is allocated. Put fewer tokens or requests into a "
                "step (`max_batch_tokens`, `max_requests_per_batch` of the ContinuousBatchingConfig)."
            )
        # Free the old buffer first: peak is the larger of the two, not their sum.
        self._latest.pop(name, None)
        self._buffers.pop(name, None)
        # Counters of kernels begin at zero, and kernels leave them at zero.
        self._buffers[name] = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        return self._buffers[name]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.nbytes for buffer in list(self._buffers.values()))


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
    return workspace


def release_workspaces() -> None:
    """Drop this thread's workspaces; the next use starts over."""
    _local.workspaces.clear()
