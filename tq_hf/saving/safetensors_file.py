"""Safetensors files: written atomically, and read without trust in their contents.

The `safetensors` package writes and reads the format. Before it allocates memory, it refuses a file with a header that
is not JSON of tensors, with overlapping tensors or gaps, or with another length than the header says. This module adds
three guarantees: only regular files are opened, JSON within JSON is parsed strictly, and a new file replaces the old
file in one step.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

MAX_DIMENSION = 2**48
"""Largest number of tokens or sequences that a file may name."""


def write(path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write contiguous CPU tensors to `path`, completely or not at all, flushed to disk. Raises as `replacing` does."""
    target = Path(path)
    with replacing(target) as temporary:
        try:
            save_file(dict(tensors), temporary, metadata=dict(metadata))
        except SafetensorError as error:
            raise OSError(
                f"{target} cannot be saved ({str(error)[:200]}). A file that was there before is unchanged."
            ) from None
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
    if os.name == "posix":
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Context that yields an empty file next to `target`, which then replaces the old file in one step.

    A symbolic link at `target` is replaced, and the file behind the link stays as it is.

    Raises:
        OSError: The folder does not exist or is not writable; the disk is full or fails.
        ValueError: `target` is a folder, a device, or anything else but a regular file.
    """
    if not target.parent.is_dir():
        raise FileNotFoundError(f"The folder {target.parent} does not exist. Create it, or save somewhere else.")
    if target.exists() and not target.is_file():
        raise ValueError(f"{target} is a folder or a device, and only a file can be replaced. Pass the path of a file.")
    # Write into the same folder: a rename across file systems is not one step.
    temporary = target.with_name(f".{target.name[:64]}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    except PermissionError:
        raise PermissionError(
            f"{target} cannot be saved: the folder {target.parent} is not writable. Save in another folder."
        ) from None
    try:
        yield temporary
        os.chmod(temporary, mode)  # safetensors creates files that only their owner can read
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[str | os.PathLike[str]]:
    """Context that opens the regular file at `path`. Yields a path of this file that stays valid if the file is
    replaced.

    Raises:
        FileNotFoundError: There is no file at `path`.
        ValueError: `path` is a folder, a pipe or a device (a read could take forever), or is not readable.
    """
    try:
        # O_NONBLOCK: opening a pipe would otherwise wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise FileNotFoundError(f"There is no file {path}; save a cache there first (`cache.save`).") from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder. Pass the file that `cache.save` wrote.") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be opened ({error}). Pass a readable file.") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path} is a folder or a device, not a file. Pass the file that `cache.save` wrote.")
        # Yield a path, because safetensors takes no descriptors. (Windows does not replace a file that is open.)
        descriptor_path = f"/dev/fd/{descriptor}"
        yield descriptor_path if os.path.exists(descriptor_path) else path
    finally:
        os.close(descriptor)


def read_header(path: str | os.PathLike[str]) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Read the header of an `opened` file: its metadata, and its tensors by name on the meta device. Raise `ValueError`
    if the file is not a complete safetensors file, or has a dtype that torch lacks."""
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name).to("meta") for name in file.keys()}
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"It is truncated, damaged, or no safetensors file ({str(error)[:200]}). Copy or save it again."
        ) from None


def read_tensors(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Read all tensors of a file with a checked header, to the CPU. Raise `ValueError` if the file has changed."""
    try:
        with safe_open(path, "pt") as file:
            # Copy: each tensor is a view of the mapped file and would keep the whole mapping alive.
            return {name: file.get_tensor(name).clone() for name in sorted(file.keys())}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"It was changed while it was read ({str(error)[:200]}). Load it again.") from None


def parse_json(text: str) -> Any:
    """Parse `text`, or raise `ValueError` unless it is strict JSON: no duplicate keys, no NaN, no deep nesting."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise ValueError("a key appears twice")
        return dict(pairs)

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a JSON number")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"The description is not valid JSON ({str(error)[:80]}): the file is damaged.") from None


def check_fields(table: Any, fields: Mapping[str, Any], what: str) -> None:
    """Raise `ValueError` unless a JSON table has exactly these fields with these types."""
    if type(table) is not dict or table.keys() != fields.keys():
        raise ValueError(f"{what} does not have exactly the fields {', '.join(fields)}: the file is damaged.")
    for name, types in fields.items():
        if type(table[name]) not in (types if type(types) is tuple else (types,)):
            raise ValueError(f"`{name}` ({what.lower()}) is {str(table[name])[:64]}: the file is damaged.")


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Checksum of contiguous CPU tensors: names, dtypes, shapes and all bytes."""
    state = hashlib.blake2b(digest_size=32)
    for name, tensor in sorted(tensors.items()):
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.numel():
            data: Any = tensor.reshape(-1).view(torch.uint8).numpy()
            state.update(data)
    return state.hexdigest()


def text_digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()
