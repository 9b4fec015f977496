"""Prefixes that outlive the pool and the process: pages in host memory, and behind it in files.

A page with a hash is never written again. When a request ends, its pages are copied to host memory and from there to
files. A request whose prompt begins with tokens of such pages waits until they are back in the pool, and finds them
there as it finds those of other requests. They are the same bytes, so answers are those of a process that never ended.

The engine's thread calls `PrefixStore.pump` before each step. Only that thread changes the store: threads that read and
write files put what they have done into a queue. On a GPU, copies run on a stream of their own. They begin after the
work that was queued before them, and what reads a page waits for them on the device; the host never does.

Stored are blocks, and the rows of sinks before them. A request that begins with shared blocks needs no other state: its
ring has rows of its own tokens only.
"""

from __future__ import annotations

import json
import os
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from itertools import chain
from queue import Empty, SimpleQueue
from typing import Any

import torch
import transformers
from tq_kernels.format import BLOCK_TOKENS
from transformers.generation.continuous_batching.utils import stream_context
from transformers.utils import logging

from .. import __version__
from ..saving import fingerprint
from ..saving.safetensors_file import digest
from .allocators import linear_layers, paged_layers
from .prefixes_folder import FORMAT, PrefixFolder

logger = logging.get_logger(__name__)

STEP_BYTES = 32 << 20
"""Bytes that are copied in each direction before a step while there are answers: 0.6 ms of a bus of 50 GB/s."""
READERS = 12
"""Maximum number of threads that read files. A checksum takes a second for 1.5 GB."""
PATIENCE = 5.0
"""Seconds that the end of a session waits for a file to be written."""

Copy = tuple[int, int | None, int]
"""Hash, page (`None` of a copy to the pool) and slot."""


def checked(prefix_cache: str | os.PathLike[str] | PrefixFolder | None, model: Any) -> PrefixFolder | None:
    """The folder for prefixes of a model. Raises `ValueError` if the model shares none, or is divided among GPUs."""
    if prefix_cache is None:
        return None
    decoder = model.config.get_text_config()
    if linear_layers(decoder) or len(paged_layers(decoder)) > 1 or fingerprint.identify(model)["shard"] is not None:
        raise ValueError(
            "`prefix_cache` needs a whole model of full-attention layers: windows and states at the end of a prefix "
            "are not kept, and ranks of a group do not load files. Leave it out."
        )
    return prefix_cache if isinstance(prefix_cache, PrefixFolder) else PrefixFolder(prefix_cache)


def key_of(cache: Any, model: Any) -> str:
    """Hash of all that the bytes of pages depend on besides tokens."""
    allocator, on_gpu = cache.allocator, cache.device.type == "cuda"
    scales = {
        f"{i}.{j}": x.cpu().contiguous() for i, each in allocator.channel_scales.items() for j, x in enumerate(each)
    }
    about = [
        *(FORMAT, __version__, torch.__version__, transformers.__version__),
        *(torch.cuda.get_device_name(cache.device) if on_gpu else cache.device.type, fingerprint.identify(model)),
        *(asdict(allocator.tq_config), str(cache.dtype), allocator.layer_bytes, allocator.shape, digest(scales)),
    ]
    return sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:32]


@dataclass(eq=False)
class Loading:
    """A request whose prefix comes back: hashes of the pages that are not in the pool yet, the number of these that
    were asked for, and the pages that are held for the request."""

    names: deque[int]
    asked: int = 0
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
        self.folder, self.wake_up, self.cache, self.stream = folder, wake_up, cache, stream
        self.allocator, self.ledger, self.pool = cache.allocator, cache.allocator.ledger, cache.pool
        self.key = key_of(cache, model)
        self.allocator.salt, on_gpu = int(self.key, 16), cache.device.type == "cuda"
        self.copies = torch.cuda.Stream(cache.device) if on_gpu else None
        """Stream of the copies."""
        rows = [each.tensors.rows[0, :, :, : self.allocator.shape.sinks] for each in self.allocator.pages.values()]
        self.sizes = self.allocator.bytes_per_block, sum(each.nbytes for each in rows)
        """Bytes of a block, and of the rows of sinks, whose hashes are odd."""
        number = max(8, (folder.memory or (2 << 30 if on_gpu else 256 << 20)) // self.sizes[0])
        self.slots = torch.empty(number, self.sizes[0], dtype=torch.uint8, pin_memory=on_gpu)
        self.free, self.host = list(range(number)), OrderedDict[int, int]()
        """Slots without a page; and those with one by its hash, the least recently used first."""
        self.reading, self.writing = dict[int, int](), set[int]()
        """Slots that files are read to, by hash; and hashes of pages that are written to files."""
        self.loading, self.to_store = dict[str, Loading](), dict[int, int]()
        """Requests whose prefix comes back; and pages to be stored, by hash, which may be evicted before."""
        self.copying, self.flights = list[Copy](), deque[tuple[Any, list[Copy]]]()
        """Copies of this step; and those that may not be over, with an event behind them."""
        self.readers = ThreadPoolExecutor(max(1, min(READERS, (os.cpu_count() or 2) - 1)), "prefixes")
        self.writer = ThreadPoolExecutor(1, "prefixes")
        self.done: SimpleQueue[tuple[int, str, bool]] = SimpleQueue()
        """Hashes of files, what was done to them, and whether that worked."""
        self.blocks: Counter[str] = Counter()
        """Numbers of pages by what was done with them."""

    def found(self) -> str:
        """Sentence about the files that are there."""
        tokens = BLOCK_TOKENS * sum(name.startswith(self.key) for name in self.folder.known)
        sizes = f"{self.folder.bytes / 1e9:.1f} of {self.folder.size / 1e9:.1f} GB"
        return f"Prefixes in {self.folder.path}: up to {tokens:,} tokens of this model and preset ({sizes})."

    def metrics(self) -> tuple[tuple[str, str, str, str, dict[str, int]], ...]:
        """Metrics: name, kind, label, sentence, and numbers by label."""
        blocks = {name: self.blocks[name] for name in ("loaded", "read", "refused", "written")}
        blocks["deleted"], sizes = self.folder.number_deleted, {"host": len(self.host) * self.sizes[0]}
        return (
            ("prefix_blocks_total", "counter", "event", "Blocks loaded into the pool, and files of blocks.", blocks),
            ("prefix_bytes", "gauge", "tier", "Bytes of prefixes.", sizes | {"disk": self.folder.bytes}),
        )

    def begin(self, request_id: str, tokens: list[int]) -> None:
        """Bring back the pages of a prompt that are not in the pool. Until they are, `is_loading`."""
        names, ledger = deque[int](), self.ledger.hash_to_block
        for name in self.allocator.names(tokens):
            if not (self._is_near(name) or self.folder.has(self._file(name))):
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
        hashes = self.ledger.block_to_hash
        files = {self._file(hashes[page]): page for page in table if page in hashes}
        if used := [file for file in files if file in self.folder.known]:
            self.writer.submit(self.folder.touch, used)
        self.to_store |= {hashes[page]: page for file, page in files.items() if file not in self.folder.known}

    def release(self, request_id: str) -> None:
        """Let go of the pages that are held for a request: it has begun with them, or does not need them."""
        if (loading := self.loading.pop(request_id, None)) is not None:
            self.wait()
            for page in loading.pages:
                self._release(page)

    def yield_pages(self) -> None:
        """Hold no pages: there is no room for requests."""
        for name in list(self.loading):
            self.release(name)
        if self.flights:
            self.flights[-1][0].synchronize()
            self._land()

    def wait(self) -> None:
        """Let the next step wait for all copies, on the device."""
        if self.flights:
            self.stream.wait_event(self.flights[-1][0])

    def pump(self, busy: bool = False, margin: float = 0.0) -> bool:
        """Go on with all copies, without waiting. Returns whether some are not over.

        Args:
            busy: Whether there are answers, which long copies would slow down.
            margin: Share of the pool that the scheduler keeps free.
        """
        self.wait()  # a page that came back may be in the table of any request by now
        self._land()
        if self.loading or self.to_store:
            if self.copies is not None:
                self.copies.wait_stream(self.stream)
            budget = max(1, STEP_BYTES // self.sizes[0]) if busy else len(self.slots)
            margin = max(margin, self.allocator.shape.ring_pages / self.allocator.num_blocks)
            with stream_context(self.copies):
                for loading in self.loading.values():
                    self._load(loading, budget, busy, margin)
                self._store(len(self.copying) + budget)
        if self.copying:
            self.flights.append((self.copies and self.copies.record_event(), self.copying))
            self.copying = []
            self.wake_up()
            self._land()
        return bool(self.flights)

    def flush(self) -> bool:
        """Store what is left, at the end of a session. Returns whether all is stored."""
        self.yield_pages()
        try:
            while self.pump() or self.to_store or self.writing:
                if self.writing or self.reading:
                    self._take(*self.done.get(timeout=PATIENCE))
        except Empty:
            logger.warning(f"Some prefixes are not saved: {self.folder.path} is too slow.")
            self.to_store.clear()
            return False
        return True

    def _is_near(self, name: int) -> bool:
        """Whether a page is in the pool or in host memory, or will be."""
        return name in self.ledger.hash_to_block or name in self.host or name in self.reading

    def _file(self, name: int) -> str:
        return f"{self.key}-{name:032x}.safetensors"

    def _content(self, name: int, slot: int) -> tuple[str, str, torch.Tensor]:
        """File of a page, name of its tensor, and the bytes of it in a slot."""
        return self._file(name), ("block", "sinks")[name & 1], self.slots[slot, : self.sizes[name & 1]]

    def _copy(self, name: int, page: int, slot: int, back: bool) -> None:
        """Copy a page to a slot, or `back`."""
        data, pages = self._content(name, slot)[2], self.allocator.pages.values()
        parts = [self.allocator._copy_view[page]]
        if name & 1:
            parts = [each.tensors.rows[page, :, :, : self.allocator.shape.sinks] for each in pages]
        for part, own in zip(parts, data.chunk(len(parts)), strict=True):
            own = own.view(part.dtype).view(part.shape)
            _ = part.copy_(own, non_blocking=True) if back else own.copy_(part, non_blocking=True)
        self.copying.append((name, None if back else page, slot))

    def _slot(self) -> int | None:
        """A slot that nothing is copied or written from; `None` if there is none."""
        if self.free:
            return self.free.pop()
        copies = chain(self.copying, *(each for _, each in self.flights))
        used = self.writing.union(name for name, *_ in copies)
        name = next((name for name in self.host if name not in used), None)
        return None if name is None else self.host.pop(name)

    def _page(self, margin: float) -> int | None:
        """A page of the pool: a free one, or one that no request reads; `None` if there is none."""
        if self.cache.compute_free_capacity() > margin:
            if not self.pool.count_free_blocks(0):
                self.pool.allocate_sector(0)
            return self.pool.get_free_blocks(0, 1)[0]
        if (page := next(iter(self.ledger.cached_blocks), None)) is not None:
            del self.ledger.cached_blocks[page]
            self.ledger.hash_to_block.pop(self.ledger.block_to_hash.pop(page))
        return page

    def _release(self, page: int) -> None:
        if self.ledger.release(page):
            self.pool.free_blocks(0, [page])

    def _load(self, loading: Loading, budget: int, busy: bool, margin: float) -> None:
        """Go on with a request: read files, and copy pages to the pool while there are less than `budget` copies."""
        # More would push out of the slots what is not in the pool yet.
        while loading.asked < min(len(loading.names), len(self.slots) // 4):
            if (name := loading.names[loading.asked]) in self.host:
                self.host.move_to_end(name)
            elif not self._is_near(name):
                if (slot := self._slot()) is None:
                    break
                self.reading[name] = slot
                self.readers.submit(self._run, "read", name, slot)
            loading.asked += 1
        while loading.asked:
            name = loading.names[0]
            page = self.ledger.hash_to_block.get(name)
            if page is not None:
                self.ledger.acquire(page)
            elif name in self.host and len(self.copying) < budget and (page := self._page(margin)) is not None:
                self._copy(name, page, self.host[name], back=True)
                self.ledger.register_new_hash(page, name)
                self.blocks["loaded"] += 1
            elif name in self.reading or (name in self.host and (busy or len(self.copying) >= budget)):
                break
            else:  # the file is damaged or gone, or there is no room and will be none
                loading.names.clear()
                loading.asked = 0
                break
            loading.pages.append(page)
            loading.names.popleft()
            loading.asked -= 1

    def _store(self, budget: int) -> None:
        """Copy pages to slots while there are less than `budget` copies."""
        while self.to_store and len(self.copying) < budget:
            name, page = next(iter(self.to_store.items()))
            if name in self.host:  # its file was deleted
                self._write(name)
            elif self.ledger.hash_to_block.get(name) == page:
                if (slot := self._slot()) is None:
                    break
                self.ledger.acquire(page)
                self._copy(name, page, slot, back=False)
            del self.to_store[name]

    def _write(self, name: int) -> None:
        if name not in self.writing:
            self.writing.add(name)
            self.writer.submit(self._run, "written", name, self.host[name])

    def _run(self, what: str, name: int, slot: int) -> None:
        """Read or write a file, in a thread."""
        works = False
        try:
            works = (self.folder.read if what == "read" else self.folder.write)(*self._content(name, slot))
        finally:
            self.done.put((name, what, works))
            self.wake_up()

    def _take(self, name: int, what: str, works: bool) -> None:
        """Take note of a file that was read or written."""
        self.blocks[what if works else "refused" if what == "read" else "not written"] += 1
        if what == "written":
            self.writing.discard(name)
        elif works:
            self.host[name] = self.reading.pop(name)
        else:
            self.free.append(self.reading.pop(name))

    def _land(self) -> None:
        """Take note of files and copies that are done."""
        while not self.done.empty():
            self._take(*self.done.get())
        while self.flights and (self.copies is None or self.flights[0][0].query()):
            for name, page, slot in self.flights.popleft()[1]:
                if page is not None:
                    self._release(page)
                    self.host[name] = slot
                    self._write(name)
