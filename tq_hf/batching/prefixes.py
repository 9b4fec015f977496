"""Prefixes that outlive the pool and the process: pages in host memory, and behind it in files.

A page with a hash is never written again. When a request ends, its pages are copied to host memory and from there to
files. A request whose prompt begins with tokens of such pages waits until they are back in the pool, where it finds
them as it finds those of other requests. The pages are the same bytes, so answers are those of a process that never
ended.

The engine's thread calls `PrefixStore.pump` before each step. Only that thread changes the store: threads that read and
write files put what they have done into a queue. On a GPU, copies run on a stream of their own: they begin after the
work that was queued before them, and what reads a page waits for them on the device. The host waits for neither.

Only blocks of tokens are stored, and the rows of sinks before them. A request that begins with shared blocks has no
other state: the rows of its ring are those of its own tokens.
"""

from __future__ import annotations

import json
import os
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from importlib.metadata import version
from queue import Empty, SimpleQueue
from typing import Any

import torch
from tq_kernels.format import BLOCK_TOKENS
from transformers.generation.continuous_batching.utils import stream_context
from transformers.utils import logging

from ..saving import fingerprint
from ..saving.safetensors_file import digest
from .allocators import linear_layers, paged_layers
from .prefixes_folder import FORMAT, PrefixFolder

logger = logging.get_logger(__name__)

STEP_BYTES = 32 << 20
"""Bytes that are copied in each direction before a step while there are answers: 0.6 ms of a bus of 50 GB/s."""
READERS = 12
"""Most threads that read files: a checksum runs at some 1.5 GB/s."""
PATIENCE = 5.0
"""Seconds that the end of a session waits for files to be written."""


def checked(prefix_cache: str | os.PathLike[str] | PrefixFolder | None, model: Any) -> PrefixFolder | None:
    """The folder for prefixes of a model. Raises `ValueError` if the model shares none, or is divided among GPUs."""
    if prefix_cache is None:
        return None
    decoder = model.config.get_text_config()
    if linear_layers(decoder) or len(paged_layers(decoder)) > 1:
        raise ValueError(
            "`prefix_cache` needs a model of full-attention layers only: one with sliding or linear layers shares no "
            "prefixes, because windows and states at the end of a prefix are not kept. Leave it out."
        )
    if (shard := fingerprint.identify(model)["shard"]) is not None:
        raise ValueError(f"`prefix_cache` needs a whole model, and this process has {shard}. Leave it out.")
    return prefix_cache if isinstance(prefix_cache, PrefixFolder) else PrefixFolder(prefix_cache)


def key_of(cache: Any, model: Any) -> str:
    """Hash of all that the bytes of pages depend on besides tokens."""
    allocator, device = cache.allocator, cache.device
    scales = allocator.channel_scales.items()
    tensors = {f"{layer}.{i}": x.cpu().contiguous() for layer, each in scales for i, x in enumerate(each)}
    from .. import __version__

    about = {
        "format": [FORMAT, __version__, *(version(name) for name in ("torch", "transformers"))],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "model": fingerprint.identify(model),
        "config": asdict(allocator.tq_config),
        "pages": [str(cache.dtype), allocator.layer_bytes, allocator.num_key_value_heads, allocator.shape],
        "scales": digest(tensors),
    }
    return sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:32]


Copy = tuple[int, int | None, int]
"""Hash, page (`None` of a copy to the pool) and slot."""


@dataclass(eq=False)
class Loading:
    """A request whose prefix comes back.

    Args:
        names: Hashes of the pages that are not in the pool yet, in order.
        begun: Number of `names` that are in host memory or being read.
        pages: Pages that are held for the request.
    """

    names: deque[int]
    begun: int = 0
    pages: list[int] = field(default_factory=list)


class PrefixStore:
    """Pages of prefixes beside the pool of a cache.

    Args:
        folder: The files.
        model: The model. Its fingerprint is part of the key.
        wake_up: Function that wakes the engine. Other threads call it, too.
        cache: The cache, with all pages in one allocator.
        stream: Stream of the steps; `None` on a CPU.

    Raises:
        ValueError: Requests of this cache share no pages.
    """

    def __init__(self, folder: PrefixFolder, model: Any, wake_up: Callable[[], None], cache: Any, stream: Any) -> None:
        if not cache.use_prefix_sharing:
            raise ValueError("`prefix_cache` needs requests that share pages. Leave out `allow_block_sharing=False`.")
        self.folder, self.cache, self.allocator, self.wake_up = folder, cache, cache.allocator, wake_up
        self.ledger, self.pool = cache.allocator.ledger, cache.pool
        self.key = key_of(cache, model)
        self.allocator.salt = int(self.key, 16)
        self.stream, on_gpu = stream, cache.device.type == "cuda"
        self.copies = torch.cuda.Stream(cache.device) if on_gpu else None
        """Stream of the copies."""
        size = self.allocator.bytes_per_block
        number = max(8, (folder.memory or (2 << 30 if on_gpu else 256 << 20)) // size)
        self.slots = torch.empty(number, size, dtype=torch.uint8, pin_memory=on_gpu)
        self.free = list(range(number))
        self.host: OrderedDict[int, int] = OrderedDict()
        """Slots by the hash of their page, the least recently used first."""
        self.pins: Counter[int] = Counter()
        """Number of uses of a page in host memory that are not over, by hash."""
        self.reading: dict[int, int] = {}
        """Slots that files are read to, by hash."""
        self.writing: set[int] = set()
        """Hashes of pages that are written to files."""
        self.loading: dict[str, Loading] = {}
        self.to_store: dict[int, int] = {}
        """Pages that are not stored yet, by hash. They may be evicted before."""
        self.flights: deque[tuple[Any, list[Copy]]] = deque()
        """Copies that may not be over, with an event behind them."""
        self.readers = ThreadPoolExecutor(max(1, min(READERS, (os.cpu_count() or 2) - 1)), "prefixes")
        self.writer = ThreadPoolExecutor(1, "prefixes")
        self.done: SimpleQueue[tuple[int, bool | None]] = SimpleQueue()
        """Hashes whose file was read or not; with `None`, written."""
        self.blocks: Counter[str] = Counter()
        """Numbers of pages by what was done with them."""

    def found(self) -> str:
        """Sentence about the files that are there."""
        tokens, gb = BLOCK_TOKENS * self.folder.count(self.key), 1e9
        sizes = f"{self.folder.bytes / gb:.1f} of {self.folder.size / gb:.1f} GB"
        return f"Prefixes in {self.folder.path}: some {tokens:,} tokens of this model, preset and version ({sizes})."

    def metrics(self) -> tuple[tuple[str, str, str, str, dict[str, int]], ...]:
        """Metrics: name, kind, label, sentence, and numbers by label."""
        names = ("loaded", "read", "damaged_or_gone", "stored")
        events = {name: self.blocks[name] for name in names} | {"deleted": self.folder.number_deleted}
        sizes = {"host": len(self.host) * self.slots.shape[1], "disk": self.folder.bytes}
        return (
            ("prefix_blocks_total", "counter", "event", "Blocks of prefixes back in the pool, and of files.", events),
            ("prefix_bytes", "gauge", "tier", "Bytes of prefixes outside of the pool.", sizes),
        )

    def begin(self, request_id: str, tokens: list[int]) -> None:
        """Bring back the pages of a prompt that are not in the pool. The request is in `loading` until they are."""
        names, ledger = deque[int](), self.ledger.hash_to_block
        for name in self.allocator.names(tokens):
            if not (name in ledger or name in self.host or name in self.reading or self.folder.has(self._file(name))):
                break
            names.append(name)
        if any(name not in ledger for name in names):
            self.loading[request_id] = Loading(names)
            self.wake_up()

    def is_loading(self, request_id: str) -> bool:
        """Whether a request waits for pages."""
        return request_id in self.loading and bool(self.loading[request_id].names)

    def end(self, request_id: str, table: list[int]) -> None:
        """Let go of a request, and store the pages of its table that have a hash."""
        self.release(request_id)
        names = [self.ledger.block_to_hash[page] for page in table if page in self.ledger.block_to_hash]
        files = {name: self._file(name) for name in names}
        if used := [file for file in files.values() if file in self.folder.known]:
            self.writer.submit(self.folder.touch, used)
        missing = (name for name, file in files.items() if file not in self.folder.known)
        self.to_store |= {name: self.ledger.hash_to_block[name] for name in missing}

    def release(self, request_id: str) -> None:
        """Let go of the pages that are held for a request: it has begun with them, or has ended."""
        if (loading := self.loading.pop(request_id, None)) is not None:
            self._cut(loading)
            self.wait()
            for page in loading.pages:
                self._release(page)

    def yield_pages(self) -> None:
        """Hold no pages: there is no room for requests."""
        for name in list(self.loading):
            self.release(name)
        if any(page is not None for _, copies in self.flights for _, page, _ in copies):
            self.flights[-1][0].synchronize()
            self._land()

    def reset(self) -> None:
        """Let go of everything that belongs to requests."""
        self.yield_pages()
        self.to_store.clear()

    def wait(self) -> None:
        """Let later steps wait for the copies, on the device."""
        if self.copies is not None and self.flights:
            self.stream.wait_event(self.flights[-1][0])

    def pump(self, busy: bool = False, margin: float = 0.0) -> bool:
        """Go on with all copies, without waiting. `busy`: whether there are answers; `margin` is the scheduler's. Returns
        whether to call again at once."""
        self.wait()  # a page that came back may be in the table of any request by now
        self._land()
        if not (self.loading or self.to_store):
            return bool(self.flights)
        budget = max(1, STEP_BYTES // self.slots.shape[1]) if busy else len(self.slots)
        loaded, stored = list[Copy](), list[Copy]()
        margin = max(margin, self.allocator.shape.ring_pages / self.allocator.num_blocks)
        if self.copies is not None:
            self.copies.wait_stream(self.stream)
        with stream_context(self.copies):
            for loading in self.loading.values():
                loaded += self._load(loading, budget - len(loaded), busy, margin)
            while self.to_store and len(stored) < budget:
                name, page = next(iter(self.to_store.items()))
                if self.ledger.hash_to_block.get(name) == page and name not in self.host:
                    if (slot := self._slot()) is None:
                        break
                    self.ledger.acquire(page)
                    for on_device, on_host in self._parts(name, page, slot):
                        on_host.copy_(on_device, non_blocking=True)
                    stored.append((name, page, slot))
                elif name in self.host:  # its file was deleted
                    self._write(name)
                del self.to_store[name]
            if loaded or stored:
                event = None if self.copies is None else self.copies.record_event()
                self.flights.append((event, loaded + stored))
        self._land()
        if loaded:
            self.wake_up()
        return bool(loaded or stored or self.flights)

    def flush(self) -> None:
        """Store what is left, at the end of a session."""
        self.yield_pages()
        try:
            while self.pump() or self.to_store or self.writing:
                if self.writing or self.reading:
                    self._take(*self.done.get(timeout=PATIENCE))
        except Empty:
            logger.warning(f"Some prefixes are not saved: {self.folder.path} is too slow.")

    def _file(self, name: int) -> str:
        return f"{self.key}-{name:032x}.safetensors"

    def _part(self, name: int, slot: int) -> tuple[str, torch.Tensor]:
        """Name and bytes `[n]` of what is stored of a page: a block, or rows of sinks, whose hashes are odd."""
        if name & 1:
            layers = self.allocator.pages.values()
            size = sum(each.tensors.rows[0, :, :, : self.allocator.shape.sinks].nbytes for each in layers)
            return "sinks", self.slots[slot, :size]
        return "block", self.slots[slot]

    def _parts(self, name: int, page: int, slot: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of what is stored of a page: tensors of the pool, and those of a slot."""
        kind, data = self._part(name, slot)
        if kind == "block":
            yield self.allocator._copy_view[page], data
            return
        rows = [each.tensors.rows[page, :, :, : self.allocator.shape.sinks] for each in self.allocator.pages.values()]
        for one, own in zip(rows, data.split([each.nbytes for each in rows]), strict=True):
            yield one, own.view(one.dtype).view(one.shape)

    def _slot(self) -> int | None:
        """A slot that is not in use; `None` if all are."""
        if self.free:
            return self.free.pop()
        name = next((name for name in self.host if not self.pins[name]), None)
        return None if name is None else self.host.pop(name)

    def _pin(self, name: int, number: int = 1) -> None:
        self.pins[name] += number
        if self.pins[name] <= 0:
            del self.pins[name]

    def _page(self, margin: float) -> int | None:
        """A page of the pool: a free one, or one that no request reads; `None` if there is none."""
        if self.cache.compute_free_capacity() > margin:
            if not self.pool.count_free_blocks(0):
                self.pool.allocate_sector(0)
            return self.pool.get_free_blocks(0, 1)[0]
        for page in self.ledger.cached_blocks:
            del self.ledger.cached_blocks[page]
            self.ledger.hash_to_block.pop(self.ledger.block_to_hash.pop(page))
            return page
        return None

    def _release(self, page: int) -> None:
        if self.ledger.release(page):
            self.pool.free_blocks(0, [page])

    def _cut(self, loading: Loading) -> None:
        """Go without the pages that are not back yet."""
        for name in list(loading.names)[: loading.begun]:
            self._pin(name, -1)
        loading.names.clear()
        loading.begun = 0

    def _load(self, loading: Loading, budget: int, busy: bool, margin: float) -> list[Copy]:
        """Go on with a request: read files, and copy up to `budget` pages to the pool. Returns the copies."""
        copies = list[Copy]()
        for name in list(loading.names)[loading.begun :]:
            if not (name in self.ledger.hash_to_block or name in self.host or name in self.reading):
                if (slot := self._slot()) is None:
                    break
                self.reading[name] = slot
                self.readers.submit(self._read, name, slot)
            self._pin(name)
            loading.begun += 1
        while loading.begun:
            name = loading.names[0]
            page = self.ledger.hash_to_block.get(name)
            if page is not None:
                self.ledger.acquire(page)
            elif name in self.reading or len(copies) >= budget:
                break
            elif name not in self.host:  # its file is damaged or gone
                self._cut(loading)
                break
            elif (page := self._page(margin)) is not None:
                for on_device, on_host in self._parts(name, page, self.host[name]):
                    on_device.copy_(on_host, non_blocking=True)
                self.ledger.register_new_hash(page, name)
                copies.append((name, None, self.host[name]))
                self._pin(name)
                self.host.move_to_end(name)
            else:
                if not busy:  # no request will give pages back
                    self._cut(loading)
                break
            loading.pages.append(page)
            loading.names.popleft()
            loading.begun -= 1
            self._pin(name, -1)
        self.blocks["loaded"] += len(copies)
        return copies

    def _read(self, name: int, slot: int) -> None:
        """Read a file, in a thread."""
        whole = False
        try:
            whole = self.folder.read(self._file(name), *self._part(name, slot))
        finally:
            self.done.put((name, whole))
            self.wake_up()

    def _write(self, name: int) -> None:
        """Write a page in host memory to its file, in a thread."""
        if name not in self.writing:
            self._pin(name)
            self.writing.add(name)
            self.writer.submit(self._write_now, name, *self._part(name, self.host[name]))

    def _write_now(self, name: int, part: str, data: torch.Tensor) -> None:
        try:
            self.blocks["stored"] += self.folder.write(self._file(name), part, data, 0.0)
        finally:
            self.done.put((name, None))
            self.wake_up()

    def _take(self, name: int, whole: bool | None) -> None:
        """Take note of a file that was read or written."""
        if whole is None:
            self.writing.discard(name)
            self._pin(name, -1)
        else:
            slot = self.reading.pop(name)
            self.blocks["read" if whole else "damaged_or_gone"] += 1
            if whole:
                self.host[name] = slot
            else:
                self.free.append(slot)

    def _land(self) -> None:
        """Take note of files and copies that are done."""
        while not self.done.empty():
            self._take(*self.done.get())
        while self.flights and (self.flights[0][0] is None or self.flights[0][0].query()):
            for name, page, slot in self.flights.popleft()[1]:
                if page is None:
                    self._pin(name, -1)
                    continue
                self._release(page)
                self.host[name] = slot
                self._write(name)
