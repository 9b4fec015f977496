"""What kernels do not serve at the sizes that models are published in: a section of `families.md`.

A family's published sizes are the defaults of its configuration class, in most families those of one checkpoint. Each
model is built and run without memory, and the functions that choose between kernels and torch are asked about the
states that its layers cache.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import torch
import transformers
from transformers import CONFIG_MAPPING

from examples.measure.quality.family_configs import model_types
from examples.provenance import RESULTS
from tq_hf import TurboQuantCache, TurboQuantConfig
from tq_hf.batching.checks import INSTEAD, check_model
from tq_hf.layers.compressed import TurboQuantLayer
from tq_hf.ops.triton.blocks import supports_layout
from tq_hf.tools.traced import trace

FILE = RESULTS / "families-published.json"


class Sizes(NamedTuple):
    """What became of a family at its published sizes.

    Args:
        layers: Key and value widths of compressed layers, as "128" or "192/128", and how many layers have them.
        torch: Those of them that torch computes on a GPU.
        batches: The sentence with which continuous batching refuses the model, or "".
        untried: Why nothing is known, or "".
    """

    layers: dict[str, int]
    torch: list[str]
    batches: str
    untried: str = ""


def sizes_of(model_type: str) -> Sizes:
    """Ask for one family."""
    config = TurboQuantConfig()
    try:
        made = trace(CONFIG_MAPPING[model_type](), torch.bfloat16)
    except Exception as error:
        return Sizes({}, [], "", f"{type(error).__name__}: {error}".split("\n")[0][:160])
    layers: dict[str, int] = {}
    beyond = set()
    for layer, calls in zip(TurboQuantCache(made.config).layers, made.calls, strict=True):
        if not isinstance(layer, TurboQuantLayer) or not calls:
            continue
        (keys, *_), (values, *_) = calls[0].likes[:2]
        name = str(keys[3]) if keys[3] == values[3] else f"{keys[3]}/{values[3]}"
        layers[name] = layers.get(name, 0) + 1
        if not supports_layout(config.layout(keys[3], values[3])):
            beyond.add(name)
    refused = ""
    try:
        check_model(made.model, config)
    except ValueError as error:
        refused = str(error)
    return Sizes(layers, sorted(beyond), refused)


def section(found: dict[str, Sizes]) -> list[str]:
    """The section's lines."""
    tried = {name: sizes for name, sizes in found.items() if not sizes.untried}
    packed = {name: sizes for name, sizes in tried.items() if sizes.layers}
    torch_only = {name: sizes for name, sizes in packed.items() if sizes.torch}
    served = sum(not sizes.batches for sizes in packed.values())
    lines = [
        "",
        "## At published sizes",
        "",
        f"The defaults of each configuration class of transformers {transformers.__version__}, in most families the "
        "sizes of one checkpoint; built and run without memory by `python -m examples.measure.quality.families sizes`, "
        "which asks the functions that choose. On a GPU kernels compute compressed layers with heads of up to 256 "
        "channels; others fall to torch, which dequantizes what attention reads.",
        "",
        f"Of {len(found)} model types {len(packed)} have compressed layers, and {len(packed) - len(torch_only)} of "
        f"those are computed by kernels. {len(tried) - len(packed)} have none at these sizes, and "
        f"{len(found) - len(tried)} do not run from their defaults alone or have no keys and values. Of those with "
        f"compressed layers {served} are served in batches; others are refused at the start.",
        "",
        "| family | widths in torch on a GPU | layers | batches |",
        "| --- | ---: | ---: | --- |",
    ]
    for name, sizes in torch_only.items():
        count = sum(sizes.layers[width] for width in sizes.torch)
        batches = sizes.batches.removesuffix(INSTEAD).strip() or "served"
        lines.append(f"| {name} | {', '.join(sizes.torch)} | {count} of {sum(sizes.layers.values())} | {batches} |")
    return lines


def measure() -> None:
    """Ask for every family, and write what is known."""
    found = {model_type: sizes_of(model_type)._asdict() for model_type in model_types()}
    FILE.write_text(json.dumps({"transformers": transformers.__version__, "families": found}, indent=1) + "\n")


def read() -> dict[str, Sizes]:
    """What the last run has found."""
    return {name: Sizes(**sizes) for name, sizes in json.loads(FILE.read_text())["families"].items()}
