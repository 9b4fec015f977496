"""A safetensors file, written so that a kill leaves the old one, and read as if its author meant harm.

The `safetensors` package writes and reads the format. It refuses a file whose header is no JSON of tensors, whose
tensors overlap or leave gaps, or which is shorter or longer than its header says, and allocates nothing before. This
module adds what it leaves open: only regular files are opened, JSON within JSON is read strictly, and a new file takes
the old one's place in one step.
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
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

MAX_DIMENSION = 2**48

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Those a cache holds; the format has more."""


class Header(NamedTuple):
    """What a file says of itself: the strings under `__metadata__`, and its tensors by name, on the meta device."""

    metadata: dict[str, str]
    entries: dict[str, torch.Tensor]


def write(path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write contiguous CPU tensors to `path`, whole or not at all.

    The file is written beside `path` under a temporary name, forced to the disk and put in place of the old one in
    one step. A symbolic link at `path` is replaced; what it points to stays as it is.

    Raises:
        FileNotFoundError: The folder does not exist.
        PermissionError: No file may be made in the folder.
        ValueError: `path` is a folder, a device, or anything else that is not a regular file.
        OSError: The disk is full, or fails.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"The folder {target.parent} does not exist; make it, or save somewhere else.")
    if target.exists() and not target.is_file():
        raise ValueError(f"{target} is a folder or a device, not a file that can be replaced; give a file name in it.")
    # Beside the target: a rename across file systems is not one step.
    temporary = target.with_name(f".{target.name[:64]}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    except PermissionError:
        raise PermissionError(
            f"{target} cannot be saved: no file may be written in {target.parent}. Give a folder of your own."
        ) from None
    try:
        try:
            save_file(dict(tensors), temporary, metadata=dict(metadata))
        except SafetensorError as error:
            raise OSError(
                f"{target} cannot be saved ({str(error)[:200]}). What was there before is still there."
            ) from None
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, mode)  # safetensors makes files that nobody else may read
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    if os.name == "posix":
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def held_open(path: str | os.PathLike[str]) -> Iterator[str | os.PathLike[str]]:
    """A path of the regular file that is at `path` now, whatever takes its place there meanwhile.

    Raises:
        FileNotFoundError: There is nothing at `path`.
        ValueError: It is a folder, a pipe or a device (whose reading could take forever), or may not be read.
    """
    try:
        # O_NONBLOCK: opening a pipe would otherwise wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise FileNotFoundError(f"There is no file {path}; save a cache there first (`cache.save`).") from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder; give the file that `cache.save` wrote.") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be opened ({error}); give a file that may be read.") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path} is a folder or a device, not a file; give the file that `cache.save` wrote.")
        # safetensors opens paths only, and torch opens them again. (Windows replaces no file that is open.)
        descriptor_path = f"/dev/fd/{descriptor}"
        yield descriptor_path if os.path.exists(descriptor_path) else path
    finally:
        os.close(descriptor)


def read_header(path: str | os.PathLike[str]) -> Header:
    """The header of a file that is `held_open`.

    Raises:
        ValueError: It is not a complete safetensors file of dtypes that caches have. Nothing was allocated.
    """
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"It is truncated, damaged, or no safetensors file ({str(error)[:200]}). Copy or save it again."
        ) from None
    entries = {}
    for name, described in slices.items():
        dtype = described.get_dtype()
        if dtype not in DTYPES:
            raise ValueError(
                f"{name[:64]!r} is of dtype {dtype}; a cache has {', '.join(DTYPES)}: the file is damaged."
            )
        entries[name] = torch.empty(described.get_shape(), dtype=DTYPES[dtype], device="meta")
    return Header(metadata, entries)


def read_tensors(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """All tensors of a file whose header has been checked, on the CPU.

    Raises:
        ValueError: The file was changed in the meantime.
    """
    try:
        with safe_open(path, "pt") as file:
            # Copies: what is handed out lies in the file, and would keep all of it.
            return {name: file.get_tensor(name).clone() for name in sorted(file.keys())}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"It was changed while it was read ({str(error)[:200]}). Load it again.") from None


def parse_json(text: str, what: str) -> Any:
    """JSON without what Python's parser adds or forgives: duplicate keys, NaN, endless nesting.

    Raises:
        ValueError: `text` is not such JSON; the message begins with `what`.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise ValueError("a key appears twice")
        return dict(pairs)

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a JSON number")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is not valid JSON ({str(error)[:80]}): the file is damaged.") from None


def check_fields(table: Any, fields: Mapping[str, Any], what: str) -> None:
    """Raise a `ValueError` unless a JSON table has exactly these fields, of these types."""
    if type(table) is not dict or table.keys() != fields.keys():
        raise ValueError(f"{what} does not have exactly the fields {', '.join(fields)}: the file is damaged.")
    for name, types in fields.items():
        if type(table[name]) not in (types if type(types) is tuple else (types,)):
            raise ValueError(f"`{name}` ({what.lower()}) is {str(table[name])[:64]}: the file is damaged.")


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """A checksum of contiguous CPU tensors: names, dtypes, shapes and every byte."""
    state = hashlib.blake2b(digest_size=32)
    for name, tensor in sorted(tensors.items()):
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.numel():
            data: Any = tensor.reshape(-1).view(torch.uint8).numpy()
            state.update(data)
    return state.hexdigest()


def text_digest(text: str) -> str:
    """A checksum of a string."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()
