"""Prefixes that outlive the pool and the process: pages in host memory, and behind it in files.

When a request ends, its pages with a hash, which are never written again, are copied to host memory and from there to
files: blocks, and the rows of sinks before them. A request whose prompt begins with their tokens waits until they are
back in the pool, and shares them as those of other requests: they are the same bytes.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import save_file
from tq_kernels.format import BLOCK_TOKENS
from transformers.generation.continuous_batching.utils import stream_context
from transformers.utils import logging

from .. import __version__
from ..saving import fingerprint
from ..saving.safetensors_file import digest, opened, parse_json, replacing
from .allocators import linear_layers, paged_layers
from .options import number

logger = logging.get_logger(__name__)

FORMAT = "tq_hf.prefix 2"
OURS = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}\.safetensors|\.[0-9a-f]{32}-[0-9a-f]{31}.*\.tmp")
"""Names of files that may be deleted. All others are left alone."""
STALE, KEPT = 3600, 0.95
"""Seconds until a file that a process began to write is abandoned; share of the limit that is left by deletion."""
STEP_BYTES = 32 << 20
"""Bytes that are copied in each direction before a step while there are answers: 0.6 ms of a bus of 50 GB/s."""
READERS, PATIENCE = 12, 5.0
"""Most threads that read files (a checksum takes a second for 1.5 GB); seconds that a session waits at its end."""


class PrefixFolder:
    """A folder for pages of prefixes: one safetensors file per block. Several processes may use the folder.

    A file's name is a hash of all tokens up to its block's end, and of all else that its bytes depend on. The header
    repeats the name, and has a checksum of the bytes.

    Args:
        folder: Path of the folder, which is created if there is none.
        size: Bytes of all files. Beyond, the files that were used least recently are deleted.
        memory: Bytes of host memory in front of the files, pinned for a GPU. By default 2 GiB for a GPU, else 256 MiB.

    Raises:
        ValueError: The folder is no path, or cannot be made or listed; or a number of bytes is no whole number above 0.
    """

    def __init__(self, folder: str | os.PathLike[str], size: int = 20 * 10**9, memory: int | None = None) -> None:
        if not folder or not isinstance(folder, (str, os.PathLike)):
            raise ValueError(f"A folder for prefixes is {folder!r}; it must be a path.")
        self.path, self.size = Path(folder), number("size", size, 1, 2**62)
        self.memory = None if memory is None else number("memory", memory, 1, 2**62)
        self.known: set[str] = set()
        """Names of files that were there when this process looked last."""
        self.bytes = self._listed = self.number_deleted = 0
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._trim()
        except OSError as error:
            raise ValueError(f"{self.path} cannot be a folder for prefixes ({error}). Pass another one.") from None

    def read(self, name: str, part: str, into: torch.Tensor) -> bool:
        """Read the bytes of a page from tensor `part` of file `name` to a CPU tensor `[n]` uint8. Returns whether the
        file fits. If there is one that does not, a line of the log says why."""
        data: Any = into.numpy()
        try:
            with opened(self.path / name) as path, open(path, "rb", buffering=0) as file:
                described = parse_json(file.read(min(4096, int.from_bytes(file.read(8), "little"))).decode())
                checksum = described["__metadata__"]["checksum"]
                if described != _header(name, part, len(data), checksum):
                    raise ValueError("it is of another model, preset or version")
                if file.readinto(data) != len(data) or file.read(1) or sha256(data).hexdigest() != checksum:
                    raise ValueError("its checksum or its length is wrong")
            return True
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.known.discard(name)
            if not isinstance(error, FileNotFoundError):
                logger.warning(f"{self.path / name} is passed over, its tokens are read again: {str(error)[:200]}")
            return False

    def write(self, name: str, part: str, data: torch.Tensor) -> bool:
        """Write the bytes of a page, CPU `[n]` uint8, in one step. Returns whether the file is there."""
        content: Any = data.numpy()
        about = _header(name, part, len(data), sha256(content).hexdigest())["__metadata__"]
        try:
            with replacing(self.path / name) as temporary:
                save_file({part: data}, temporary, metadata=about)
            self.known.add(name)
            self.bytes += len(data)
            # Others write, too: look again after a part of the limit.
            if self.bytes > min(self.size, self._listed + (1 - KEPT) * self.size):
                self._trim()
            return True
        except (OSError, ValueError, SafetensorError) as error:
            logger.warning_once(f"Prefixes cannot be saved in {self.path}: {getattr(error, 'strerror', None) or error}")
            return False

    def touch(self, names: Iterable[str]) -> None:
        """Note that files are used, each a millisecond before the one in front: ends of prefixes are deleted first."""
        for i, name in enumerate(names):
            try:
                os.utime(self.path / name, (time.time() - i / 1000,) * 2)
            except OSError:
                self.known.discard(name)

    def _trim(self) -> None:
        """List the files. If they have more bytes than the limit, delete the files that were used least recently."""
        files = []
        for path in filter(lambda path: OURS.fullmatch(path.name), self.path.iterdir()):
            with suppress(OSError):  # another process has deleted it
                found = path.lstat()
                if path.suffix != ".tmp":
                    files.append((found.st_mtime, found.st_size, path))
                elif time.time() - found.st_mtime > STALE:
                    path.unlink()
        files.sort(reverse=True)
        self.bytes = sum(size for _, size, _ in files)
        most = self.size if self.bytes <= self.size else KEPT * self.size
        while self.bytes > most:
            _, size, path = files.pop()
            self.bytes -= size
            with suppress(OSError):
                path.unlink()
                self.number_deleted += 1
        self.known, self._listed = {path.name for _, _, path in files}, self.bytes


def _header(name: str, part: str, size: int, checksum: str) -> dict[str, Any]:
    about = {"format": FORMAT, "name": name, "checksum": checksum}
    return {"__metadata__": about, part: {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}


def checked(prefix_cache: str | os.PathLike[str] | PrefixFolder, model: Any) -> PrefixFolder:
    """Folder for prefixes of a model. Raises `ValueError` if the model shares none, or is divided among GPUs."""
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
    by_layer = allocator.channel_scales.items()
    scales = {f"{layer}.{i}": x.cpu().contiguous() for layer, each in by_layer for i, x in enumerate(each)}
    about = [
        *(FORMAT, __version__, torch.__version__, transformers.__version__),
        *(torch.cuda.get_device_name(cache.device) if on_gpu else cache.device.type, fingerprint.identify(model)),
        *(asdict(allocator.tq_config), str(cache.dtype), allocator.layer_bytes, allocator.shape, digest(scales)),
    ]
    return sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:32]


class Loading(NamedTuple):
    """A request whose prefix comes back: hashes of pages to be asked for, hashes of pages before them that are in host
    memory or being read, and pages that are held for the request."""

    names: deque[int]
    asked: deque[int]
    pages: list[int]


class PrefixStore:
    """Pages of prefixes beside the pool of a cache. Only the engine's thread calls it, with `pump` before each step.

    On a GPU, copies run on a stream of their own. They begin after the work that was queued before them, and what reads
    a page waits for them on the device; the host never does. `stream` is that of the steps. Threads that read and write
    files call `wake_up` once they are done.
    """

    def __init__(self, cache: Any, stream: Any, folder: PrefixFolder, model: Any, wake_up: Callable[[], None]) -> None:
        if not cache.use_prefix_sharing:
            raise ValueError("`prefix_cache` needs requests that share pages. Leave out `allow_block_sharing=False`.")
        self.folder, self.wake_up, self.cache, self.stream = folder, wake_up, cache, stream
        self.allocator, self.ledger, self.pool = cache.allocator, cache.allocator.ledger, cache.pool
        self.key, on_gpu = key_of(cache, model), cache.device.type == "cuda"
        self.allocator.salt = int(self.key, 16)
        self.copies = torch.cuda.Stream(cache.device) if on_gpu else None
        rows = [each.tensors.rows[0, :, : self.allocator.shape.sinks] for each in self.allocator.pages.values()]
        self.sizes = self.allocator.bytes_per_block, sum(each.nbytes for each in rows)
        """Bytes of a block, and of the rows of sinks, whose hashes are odd."""
        count = max(8, (folder.memory or (2 << 30 if on_gpu else 256 << 20)) // self.sizes[0])
        self.slots = torch.empty(count, self.sizes[0], dtype=torch.uint8, pin_memory=on_gpu)
        self.host = OrderedDict[int, int]((~slot, slot) for slot in range(count))
        """Slots by the hash of their page, the least recently used first; by a negative number without a page."""
        self.reading, self.writing = dict[int, tuple[int, Future[bool]]](), dict[int, Future[bool]]()
        """Files that are read, each to a slot, and files that are written, by hash."""
        self.loading, self.to_store = dict[str, Loading](), dict[int, int]()
        """Requests whose prefix comes back; and pages to be stored, by hash, which may be evicted before."""
        self.copying, self.flights = list[tuple[int, int | None, int]](), deque[tuple[Any, list[Any]]]()
        """Copies of this step (hash, page unless it goes to the pool, slot); copies that may not be over, by event."""
        self.came: Any = None
        """Event after copies to the pool that no step waits for yet. Copies that store pages are never waited for."""
        self.readers = ThreadPoolExecutor(max(1, min(READERS, (os.cpu_count() or 2) - 1)), "prefixes")
        self.writer = ThreadPoolExecutor(1, "prefixes")
        self.blocks = Counter[str]()

    def found(self) -> str:
        """Sentence about the files that are there."""
        tokens = BLOCK_TOKENS * sum(name.startswith(self.key) for name in tuple(self.folder.known))
        sizes = f"{self.folder.bytes / 1e9:.1f} of {self.folder.size / 1e9:.1f} GB"
        return f"Prefixes in {self.folder.path}: up to {tokens:,} tokens of this model and preset ({sizes})."

    def metrics(self) -> tuple[tuple[str, str, str, str, dict[str, int]], ...]:
        """Metrics: name, kind, label, sentence, and numbers by label."""
        blocks = {name: self.blocks[name] for name in ("loaded", "read", "refused", "written")}
        blocks["deleted"], host = self.folder.number_deleted, sum(name >= 0 for name in tuple(self.host))
        sizes = {"host": host * self.sizes[0], "disk": self.folder.bytes}
        events = "prefix_blocks_total", "counter", "event", "Blocks loaded into the pool, and files of blocks.", blocks
        return events, ("prefix_bytes", "gauge", "tier", "Bytes of prefixes outside of the pool.", sizes)

    def begin(self, request_id: str, tokens: list[int]) -> None:
        """Bring back the pages of a prompt that are not in the pool. Until they are, `is_loading`."""
        names = deque[int]()
        for name in self.allocator.names(tokens):
            file = self._content(name)[0]
            if not (self._is_near(name) or file in self.folder.known or os.path.exists(self.folder.path / file)):
                break
            names.append(name)
        if any(name not in self.ledger.hash_to_block for name in names):
            self.loading[request_id] = Loading(names, deque(), [])
            self.wake_up()

    def is_loading(self, request_id: str) -> bool:
        return request_id in self.loading and any(self.loading[request_id][:2])

    def end(self, request_id: str, table: list[int]) -> None:
        """Let go of a request, and store the pages of its table that have a hash."""
        self.release(request_id)
        hashes = self.ledger.block_to_hash
        files = {self._content(hashes[page])[0]: page for page in table if page in hashes}
        if used := [file for file in files if file in self.folder.known]:
            self.writer.submit(self.folder.touch, used)
        self.to_store |= {hashes[page]: page for file, page in files.items() if file not in self.folder.known}

    def release(self, request_id: str) -> None:
        """Let go of the pages that are held for a request: it has begun with them, or does not need them."""
        self.wait()
        if (loading := self.loading.pop(request_id, None)) is not None:
            for page in loading.pages:
                self.allocator.release(page)

    def yield_pages(self) -> None:
        """Hold no pages: there is no room for requests."""
        for name in [name for name, loading in self.loading.items() if loading.pages]:
            self.release(name)
        if self.flights:
            self.flights[-1][0].synchronize()
            self._land()

    def wait(self) -> None:
        """Let the next step wait for pages that come back, on the device."""
        if self.came is not None:
            self.stream.wait_event(self.came)
            self.came = None

    def pump(self, busy: bool = False, margin: float = 0.0) -> bool:
        """Go on with all copies, without waiting; short ones if `busy` with answers. `margin` is the share of the pool
        that the scheduler keeps free. Returns whether some copies are not over."""
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
                if self.copying and self.copies is not None:
                    self.came = self.copies.record_event()
                self._store(len(self.copying) + budget)
        if self.copying:
            self.flights.append((self.copies and self.copies.record_event(), self.copying))
            self.copying = []
            self.wake_up()
            self._land()
        return bool(self.flights)

    def flush(self) -> bool:
        """Store what is left, at the end of a session, for some seconds at most. Returns whether all is stored."""
        for name in list(self.loading):
            self.release(name)
        while self.pump() or self.to_store or self.writing:
            if wait([*self.writing.values(), *(future for _, future in self.reading.values())], PATIENCE).not_done:
                return False
        return True

    def _is_near(self, name: int) -> bool:
        """Whether a page is in the pool or in host memory, or will be."""
        return name in self.ledger.hash_to_block or name in self.host or name in self.reading

    def _content(self, name: int, slot: int = 0) -> tuple[str, str, torch.Tensor]:
        """File of a page, name of its tensor, and the bytes of it in a slot."""
        file, odd = f"{self.key}-{name:032x}.safetensors", name & 1
        return file, ("block", "sinks")[odd], self.slots[slot, : self.sizes[odd]]

    def _copy(self, name: int, page: int, slot: int, back: bool) -> None:
        """Copy a page to a slot, or `back`."""
        parts, data = [self.allocator._copy_view[page]], self._content(name, slot)[2]
        if name & 1:
            sinks, layers = self.allocator.shape.sinks, self.allocator.pages.values()
            parts = [each.tensors.rows[page, :, :sinks] for each in layers]
        for part, own in zip(parts, data.chunk(len(parts)), strict=True):
            pair = part, own.view(part.dtype).view(part.shape)
            pair[not back].copy_(pair[back], non_blocking=True)
        self.copying.append((name, None if back else page, slot))

    def _slot(self) -> int | None:
        """A slot that nothing is copied or written from; `None` if there is none."""
        used = self.writing.keys() | {name for name, *_ in chain(self.copying, *(each for _, each in self.flights))}
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

    def _load(self, loading: Loading, budget: int, busy: bool, margin: float) -> None:
        """Go on with a request: read files, and copy pages to the pool while there are less than `budget` copies."""
        # More would push out of the slots what is not in the pool yet.
        names, asked, pages = loading
        while names and len(asked) < len(self.slots) // 4:
            if (name := names[0]) in self.host:
                self.host.move_to_end(name)
            elif not self._is_near(name):
                if (slot := self._slot()) is None:
                    break
                self.reading[name] = slot, self._run(self.readers, self.folder.read, name, slot)
            asked.append(names.popleft())
        while asked:
            name = asked[0]
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
                names.clear()
                asked.clear()
                break
            pages.append(page)
            asked.popleft()

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

    def _run(self, threads: ThreadPoolExecutor, work: Callable[..., bool], name: int, slot: int) -> Future[bool]:
        future = threads.submit(work, *self._content(name, slot))
        future.add_done_callback(lambda future: self.wake_up())
        return future

    def _write(self, name: int) -> None:
        if name not in self.writing:
            self.writing[name] = self._run(self.writer, self.folder.write, name, self.host[name])

    def _land(self) -> None:
        """Take note of files and copies that are done."""
        for name in [name for name, future in self.writing.items() if future.done()]:
            self.blocks["written"] += self.writing.pop(name).result()
        for name in [name for name, (_, future) in self.reading.items() if future.done()]:
            slot, future = self.reading.pop(name)
            self.blocks["read" if future.result() else "refused"] += 1
            self.host[name if future.result() else ~slot] = slot
        while self.flights and (self.copies is None or self.flights[0][0].query()):
            for name, page, slot in self.flights.popleft()[1]:
                if page is not None:
                    self.allocator.release(page)
                    self.host[name] = slot
                    self._write(name)
