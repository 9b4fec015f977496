"""A folder of pages: one safetensors file per block of a prefix, shared by processes and found again after a restart.

The name of a file is a hash of all tokens up to the end of its block, and of all else that its bytes depend on: model,
preset, versions. The header repeats the name, and has a checksum of the bytes. Other headers and checksums are passed
over. The checksum finds damage and is no signature: those who can write to the folder can change answers.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from ..saving.safetensors_file import opened, parse_json, replacing

logger = logging.get_logger(__name__)

FORMAT = "tq_hf.prefix 1"
OURS = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}\.safetensors|\.[0-9a-f]{32}-[0-9a-f]{31}.*\.tmp")
"""Names of files that may be deleted. All others are left alone."""
STALE = 3600
"""Seconds after which a file that a process began to write is taken for abandoned."""
KEPT = 0.95
"""Share of the limit that is left when files are deleted."""


class PrefixFolder:
    """A folder for pages of prefixes. Several processes may use the folder, and several managers this object.

    Args:
        folder: Path of the folder, which is created if there is none.
        size: Bytes of all files. Beyond, the files that were used least recently are deleted.
        memory: Bytes of host memory in front of the files, pinned for a GPU. By default 2 GiB for a GPU, else 256 MiB.

    Raises:
        ValueError: The folder cannot be made or listed, or a number of bytes is not a whole number above 0.
    """

    def __init__(self, folder: str | os.PathLike[str], size: int = 20 * 10**9, memory: int | None = None) -> None:
        self.path, self.size, self.memory = Path(folder), size, memory
        if not all(isinstance(each, int) and each > 0 for each in (size, 1 if memory is None else memory)):
            raise ValueError(
                f"`size` is {size!r}, and `memory` {memory!r}; they must be whole numbers of bytes above 0."
            )
        self.known: set[str] = set()
        """Names of files that were there when this process looked last."""
        self.bytes = self._listed = self.number_deleted = 0
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._trim()
        except OSError as error:
            raise ValueError(f"{self.path} cannot be a folder for prefixes ({error}). Pass another one.") from None

    def has(self, name: str) -> bool:
        """Whether there is a file: of this process, or written by another one since."""
        return name in self.known or (self.path / name).exists()

    def read(self, name: str, part: str, into: torch.Tensor) -> bool:
        """Read the bytes of a page.

        Args:
            name: Name of the file.
            part: Name of the tensor in the file.
            into: CPU tensor `[n]` uint8. Its contents are undefined if the file does not fit.

        Returns:
            Whether the file fits. If there is one that does not, a line of the log says why.
        """
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
        content: Any = memoryview(data.numpy())  # type: ignore[arg-type]
        header = json.dumps(_header(name, part, len(data), sha256(content).hexdigest())).encode()
        header += b" " * (-len(header) % 8)
        try:
            with replacing(self.path / name) as temporary, open(temporary, "wb") as file:
                file.write(len(header).to_bytes(8, "little") + header)
                file.write(content)
            self.known.add(name)
            self.bytes += len(data)
            # Others write, too: look again after a part of the limit.
            if self.bytes > min(self.size, self._listed + (1 - KEPT) * self.size):
                self._trim()
            return True
        except (OSError, ValueError) as error:
            logger.warning_once(f"Prefixes cannot be saved in {self.path}: {getattr(error, 'strerror', None) or error}")
            return False

    def touch(self, names: Iterable[str]) -> None:
        """Note that files are used, each a millisecond before the one in front: ends of prefixes are deleted first."""
        now = time.time()
        for i, name in enumerate(names):
            try:
                os.utime(self.path / name, (now - i / 1000, now - i / 1000))
            except OSError:
                self.known.discard(name)

    def _trim(self) -> None:
        """List the files. If they have more bytes than the limit, delete those that were used least recently."""
        files = []
        for path in self.path.iterdir():
            with suppress(OSError):  # another process has deleted it
                found = path.lstat()
                if OURS.fullmatch(path.name) and path.suffix != ".tmp":
                    files.append((found.st_mtime, found.st_size, path))
                elif OURS.fullmatch(path.name) and time.time() - found.st_mtime > STALE:
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
    """What the header of a file must say."""
    about = {"format": FORMAT, "name": name, "checksum": checksum}
    return {"__metadata__": about, part: {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
