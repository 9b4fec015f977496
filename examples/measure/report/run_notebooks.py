"""Run the notebooks on this machine and keep their outputs: `make notebooks`.

Outputs are made fit to commit: no times of execution in the metadata, no warnings and progress bars, no folder of this
machine, pictures with few colours. `make test` runs the notebooks too, and keeps nothing.
"""

from __future__ import annotations

import argparse
import base64
import io
import re
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

from examples.provenance import ROOT

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
FOLDER = re.compile(r"(?<![\w/.])/(?:[\w.+-]+/)+(?=[\w.+-]+)")
"""The folders of an absolute path, up to its last part."""


def cleaned(text: str) -> str:
    """`text` without folders of this machine."""
    return FOLDER.sub(".../", text)


def smaller(picture: str) -> str:
    """A PNG picture in base64 with 64 colours, which is what diagrams need."""
    reduced, source = io.BytesIO(), Image.open(io.BytesIO(base64.b64decode(picture)))
    source.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(reduced, "PNG", optimize=True)
    return base64.b64encode(reduced.getvalue()).decode()


def clean(cell: Any) -> None:
    """Make the outputs of a cell fit to commit."""
    cell.metadata.pop("execution", None)
    cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    for output in cell.outputs:
        if "text" in output:
            output.text = cleaned(output.text)
        if "text/plain" in output.get("data", {}):
            output.data["text/plain"] = cleaned(output.data["text/plain"])
        if "image/png" in output.get("data", {}):
            output.data["image/png"] = smaller(output.data["image/png"])


def run(path: Path) -> None:
    """Run a notebook in its folder and write it with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=1800, coalesce_streams=True, resources={"metadata": {"path": str(path.parent)}}
    ).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            clean(cell)
    notebook.metadata = {"colab": {"provenance": []}} | {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    nbformat.write(notebook, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="notebooks without their ending; all if there are none")
    names = parser.parse_args().names
    for path in NOTEBOOKS:
        if not names or path.stem in names:
            run(path)
            print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB", flush=True)


if __name__ == "__main__":
    main()
