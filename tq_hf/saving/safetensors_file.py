"""A safetensors file, written so that a kill leaves the old one, and read as if its author meant harm.

The format is eight bytes of header length, a JSON header, and the tensors' bytes. (The safetensors package reads what
is written here; it also writes, but not in one step that can be forced to the disk first.) Reading trusts none of it:
the file must be a regular one, the header small and well-formed, and the tensors must lie in the file one after the
other without gap or overlap. Nothing of a tensor is allocated before that has been checked.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

MAX_HEADER_BYTES = 16 * 2**20
"""A header has about a hundred bytes a tensor; that of a thousand layers has one MiB."""

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


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: what it is, and where its bytes lie after the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    """A checked header.

    Args:
        metadata: The strings under `__metadata__`.
        entries: The tensors by name.
        data_start: Where the first tensor's bytes lie in the file.
    """

    metadata: dict[str, str]
    entries: dict[str, Entry]
    data_start: int

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.stop - entry.start for entry in self.entries.values())


def write(path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write contiguous CPU tensors to `path`, whole or not at all.

    The file is written beside `path` under a temporary name, forced to the disk and put in place of the old one in
    one step. A symbolic link at `path` is replaced; what it points to stays as it is.

    Raises:
        FileNotFoundError: The folder does not exist.
        ValueError: `path` is a folder, a device, or anything else that is not a regular file.
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
            for part in _contents(tensors, metadata):
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    if os.name == "posix":
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _contents(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> Iterator[Any]:
    """The parts of a file, in order."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    # Wide dtypes first, as safetensors does: every tensor is then aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    end = 0
    for name, tensor in ordered:
        if tensor.dtype not in names:
            raise ValueError(f"Tensors of {tensor.dtype} cannot be saved; {name!r} is one.")
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        yield _bytes(tensor)


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """`path` opened for reading, if it is a regular file or a link to one.

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
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is a folder or a device, not a file; give the file that `cache.save` wrote.")
    return os.fdopen(descriptor, "rb")


def parse_json(text: str | bytes, what: str) -> Any:
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


def typed(value: Any, types: type | tuple[type, ...]) -> bool:
    """`isinstance`, with a bool not taken for an int."""
    return isinstance(value, types) and (not isinstance(value, bool) or types is bool)


def check_fields(table: Any, fields: Mapping[str, Any], what: str) -> None:
    """Raise a `ValueError` unless a JSON table has exactly these fields, of these types."""
    if not isinstance(table, dict) or table.keys() != fields.keys():
        raise ValueError(f"{what} does not have exactly the fields {', '.join(fields)}: the file is damaged.")
    for name, types in fields.items():
        if not typed(table[name], types):
            raise ValueError(f"`{name}` ({what.lower()}) is {str(table[name])[:64]}: the file is damaged.")


def read_header(file: BinaryIO) -> Header:
    """The header of an open file, checked against itself and the file's size.

    Raises:
        ValueError: It is not the header of a complete safetensors file. The message says why; nothing was allocated.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 10 or length < 2:
        raise ValueError("The file is not a safetensors file: it is too short, or empty.")
    if length > MAX_HEADER_BYTES:
        raise ValueError(
            f"The file is not a safetensors file of a cache: its header would have {length} bytes, and "
            f"{MAX_HEADER_BYTES} are allowed."
        )
    if length > size - 8:
        raise ValueError(f"The file is truncated or no safetensors file: a header of {length} bytes, {size} in all.")
    content = parse_json(file.read(length), "The header")
    if not isinstance(content, dict):
        raise ValueError(f"The header is a JSON {type(content).__name__}, not an object: this is no safetensors file.")
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("The header's `__metadata__` is not a table of strings: the file is damaged.")
    entries = {name: _entry(name, entry) for name, entry in content.items()}
    header = Header(metadata, entries, 8 + length)
    end = 0
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.stop)):
        if entry.start != end:
            raise ValueError("The tensors overlap or leave gaps: the file is damaged.")
        end = entry.stop
    if end != size - header.data_start:
        problem = "truncated" if end > size - header.data_start else "followed by something else"
        raise ValueError(
            f"The file is {problem}: its tensors need {end} bytes, and it has {size - header.data_start}. "
            "Copy or save it again."
        )
    return header


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_DIMENSION


def _entry(name: str, entry: Any) -> Entry:
    problem = f"The header's entry for {name[:64]!r} is damaged"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{problem}: it must have a dtype, a shape and data offsets.")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
        raise ValueError(f"{problem}: its dtype is {str(entry['dtype'])[:32]!r}; allowed are {', '.join(DTYPES)}.")
    if not isinstance(shape, list) or len(shape) > 8 or not all(map(_is_size, shape)):
        raise ValueError(f"{problem}: its shape is {str(shape)[:64]}; it must be up to 8 sizes.")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise ValueError(f"{problem}: its offsets are {str(offsets)[:64]}; they must be a start and an end.")
    dtype = DTYPES[entry["dtype"]]
    if offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise ValueError(
            f"{problem}: {entry['dtype']} of shape {shape} needs {math.prod(shape) * dtype.itemsize} bytes, but its "
            f"offsets are {offsets}."
        )
    return Entry(dtype, tuple(shape), *offsets)


def read_tensors(file: BinaryIO, header: Header) -> dict[str, torch.Tensor]:
    """All tensors of a file whose header has been checked, on the CPU.

    Raises:
        ValueError: The file became shorter in the meantime.
    """
    tensors = {}
    for name, entry in sorted(header.entries.items()):
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        file.seek(header.data_start + entry.start)
        remaining = memoryview(_bytes(tensor))
        while len(remaining):
            count = file.readinto(remaining)  # type: ignore[attr-defined]
            if not count:
                raise ValueError(f"The file ends within {name!r}: it was changed while it was read. Load it again.")
            remaining = remaining[count:]
        tensors[name] = tensor
    return tensors


def _bytes(tensor: torch.Tensor) -> Any:
    """The bytes of a contiguous CPU tensor as a numpy array over its memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else bytearray()


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """A checksum of contiguous CPU tensors: names, dtypes, shapes and every byte."""
    state = hashlib.blake2b(digest_size=32)
    for name, tensor in sorted(tensors.items()):
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        state.update(_bytes(tensor))
    return state.hexdigest()


def text_digest(text: str) -> str:
    """A checksum of a string."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()
