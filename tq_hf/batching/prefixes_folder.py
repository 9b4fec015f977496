"""A folder of pages: one safetensors file per block of a prefix, which processes share and a restart finds again.

The name of a file is a hash of all tokens up to the end of its block and of everything else that its bytes depend on:
the model, the preset, the versions. The header says both again, and has a checksum of the bytes. A file whose header is
another or whose checksum is wrong is passed over. The checksum finds damage; it is no signature: those who can write to
the folder can change answers.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from ..saving.safetensors_file import opened, parse_json, replacing

logger = logging.get_logger(__name__)

FORMAT = "tq_hf.prefix 1"
OURS = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}\.safetensors|\.[0-9a-f]{32}-[0-9a-f]{31,32}.*\.tmp")
"""Names of files that may be deleted: all others in the folder are left alone."""
LARGEST_HEADER = 4096
"""Bytes of a header that are read."""
STALE = 3600
"""Seconds after which a file that a process began to write is taken for abandoned."""
KEPT = 0.95
"""Share of the limit that is left when files are deleted, so that files are not listed for each new one."""


class PrefixFolder:
    """A folder for pages of prefixes, with a limit. Several processes may use it, and several managers an object.

    Args:
        folder: Path of the folder. It is created if there is none.
        size: Bytes of all files. Beyond, the files that were used least recently are deleted.
        memory: Bytes of host memory in front of the files, pinned for a GPU. By default 2 GiB for a GPU, else 256 MiB.

    Raises:
        ValueError: The folder cannot be made or written to, or a number of bytes is not above 0.
    """

    def __init__(self, folder: str | os.PathLike[str], size: int = 20 * 10**9, memory: int | None = None) -> None:
        for name, number in (("size", size), ("memory", memory)):
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
                raise ValueError(f"`{name}` is {number!r}; it must be a whole number of bytes above 0.")
        self.path, self.size, self.memory = Path(folder), size, memory
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{self.path} cannot be a folder for prefixes ({error}). Pass another one.") from None
        if not os.access(self.path, os.R_OK | os.W_OK | os.X_OK):
            raise ValueError(f"The folder {self.path} is not writable. Pass another one for prefixes.")
        self._lock = threading.Lock()
        self.known: set[str] = set()
        """Names of files that were there when this process looked last."""
        self.bytes = self._listed = self.number_deleted = 0
        with self._lock:
            self._trim()

    def count(self, key: str) -> int:
        """Number of files for a key."""
        return sum(name.startswith(key) for name in tuple(self.known))

    def has(self, name: str) -> bool:
        """Whether there is a file: of this process, or written by another one."""
        return name in self.known or (self.path / name).exists()

    def read(self, name: str, part: str, into: torch.Tensor) -> bool:
        """Read the bytes of a page.

        Args:
            name: Name of the file.
            part: Name of the tensor.
            into: CPU tensor `[n]` uint8. Its contents are undefined if the file cannot be used.

        Returns:
            Whether the file has these bytes. One line of the log says why a file that is there does not.
        """
        try:
            with opened(self.path / name) as path, open(path, "rb", buffering=0) as file:
                length = int.from_bytes(file.read(8), "little")
                described = parse_json(file.read(min(length, LARGEST_HEADER)).decode())
                checksum = described["__metadata__"]["checksum"]
                if described != _header(name, part, len(into), checksum):
                    raise ValueError("it is of another model, preset or version")
                data: Any = into.numpy()
                if file.readinto(data) != len(into) or file.read(1):
                    raise ValueError("it has another length than its header says")
                if hashlib.sha256(data).hexdigest() != checksum:
                    raise ValueError("its checksum is wrong")
        except FileNotFoundError:
            self.known.discard(name)
            return False
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.known.discard(name)
            logger.warning(f"{self.path / name} is passed over, and its tokens are read again: {str(error)[:200]}")
            return False
        return True

    def write(self, name: str, part: str, data: torch.Tensor, age: float) -> bool:
        """Write the bytes of a page, CPU `[n]` uint8. `age` is that of `touch`. Returns whether the file is there; a line
        of the log says why not."""
        path, values = self.path / name, memoryview(data.numpy())  # type: ignore[arg-type]
        header = json.dumps(_header(name, part, len(data), hashlib.sha256(values).hexdigest())).encode()
        header += b" " * (-len(header) % 8)
        try:
            with replacing(path) as temporary, open(temporary, "wb") as file:
                file.write(len(header).to_bytes(8, "little") + header)
                file.write(values)
        except (OSError, ValueError) as error:
            logger.warning_once(f"Prefixes cannot be saved in {self.path}: {getattr(error, 'strerror', None) or error}")
            return False
        self.touch([name], age)
        with self._lock:
            self.known.add(name)
            self.bytes += len(data)
            # Others write, too: look again after a part of the limit.
            if self.bytes > self.size or self.bytes - self._listed > self.size * (1 - KEPT):
                self._trim()
        return True

    def touch(self, names: Iterable[str], age: float = 0.0) -> None:
        """Note that files were used `age` seconds ago, each a millisecond before the one in front of it: the ends of
        prefixes are deleted first."""
        now = time.time() - age
        for i, name in enumerate(names):
            try:
                os.utime(self.path / name, (now - i / 1000, now - i / 1000), follow_symlinks=False)
            except OSError:
                self.known.discard(name)

    def _trim(self) -> None:
        """List the files, and delete those that were used least recently if they have more bytes than the limit."""
        files, now = [], time.time()
        with os.scandir(self.path) as entries:
            for entry in entries:
                if OURS.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    try:
                        found = entry.stat(follow_symlinks=False)
                    except OSError:  # deleted meanwhile
                        continue
                    is_whole = not entry.name.startswith(".")
                    if is_whole or now - found.st_mtime > STALE:
                        files.append((is_whole, found.st_mtime, found.st_size, entry.name))
        files.sort(reverse=True)
        left = sum(size for _, _, size, _ in files)
        most = self.size if left <= self.size else self.size * KEPT
        while files and (left > most or not files[-1][0]):
            _, _, size, name = files.pop()
            try:
                os.unlink(self.path / name)
                self.number_deleted += 1
            except OSError:  # another process was faster, or may not
                pass
            left -= size
        self.known = {name for _, _, _, name in files}
        self.bytes = self._listed = left


def _header(name: str, part: str, size: int, checksum: str) -> dict[str, Any]:
    """What the header of a file must say."""
    about = {"format": FORMAT, "name": name, "checksum": checksum}
    return {"__metadata__": about, part: {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
