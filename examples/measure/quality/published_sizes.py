"""Operations without a kernel at the published sizes of models: a section of `families.md`.

A family's published sizes are the defaults of its configuration class, in most families those of one checkpoint. Each
model is built and run without memory, and the functions that choose between kernels and torch are asked about the
states that its layers cache, as if they were on GPUs that need not be there.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from tq_kernels.types import AttentionOptions
from transformers import CONFIG_MAPPING

from examples.measure.quality.family_configs import model_types
from examples.provenance import RESULTS
from tq_hf import TurboQuantCache, TurboQuantConfig
from tq_hf.batching.checks import check_model, pages_config
from tq_hf.batching.options import INSTEAD
from tq_hf.config import holds_latents
from tq_hf.layers.compressed import TurboQuantLayer
from tq_hf.ops.backend import MAX_FLASH_DIM
from tq_hf.ops.triton.blocks import supports_attend_dense, supports_blocks, supports_latents, supports_prefix
from tq_hf.ops.triton.pages import supports_paged_decode, supports_paged_latents, supports_paged_prompts
from tq_hf.tools.traced import trace

FILE = RESULTS / "families-published.json"
CARDS = {"": (9, 0), " (8.x)": (8, 0)}
"""Compute capabilities that are asked about: what falls to torch on the first does on all."""


class Sizes(NamedTuple):
    """Result of a family at its published sizes.

    Args:
        layers: Key and value widths of compressed layers, as "128" or "192/128", and how many layers have them.
        torch: What torch computes of them on a GPU, by width.
        batches: The sentence with which continuous batching refuses the model, or "".
        untried: Why nothing is known, or "".
    """

    layers: dict[str, int]
    torch: dict[str, list[str]]
    batches: str
    untried: str = ""


@contextmanager
def card(capability: tuple[int, int]) -> Iterator[torch.Tensor]:
    """An NVIDIA GPU of this compute capability, and states on it, for those who only ask for their kind."""
    from tq_kernels.common.device import target  # Triton is not everywhere

    major, minor = capability
    properties = SimpleNamespace(
        major=major, minor=minor, multi_processor_count=100, shared_memory_per_multiprocessor=100 << 10
    )
    target.cache_clear()
    try:
        with patch.object(torch.cuda, "get_device_properties", lambda device: properties), FakeTensorMode():
            yield torch.empty(0, dtype=torch.bfloat16, device="cuda")
    finally:
        target.cache_clear()


def in_torch(key_dim: int, value_dim: int, batches: bool, latents: bool = False) -> list[str]:
    """Operations in torch for heads of these widths: single steps, prompts after a history, and both in batches."""
    config, pages = TurboQuantConfig(), pages_config("4bit_nc")
    if latents:
        config, pages = config.of_latents(), pages.of_latents()
    layout, paged = config.layout(key_dim, value_dim), pages.layout(key_dim, value_dim)
    falls: list[str] = []
    for suffix, capability in CARDS.items():
        with card(capability) as states:
            keys, values = (states.new_empty(1, 1, 1, dim) for dim in (key_dim, value_dim))
            # Wide heads use the kernel of dense states where torch has no flash attention.
            wide = max(key_dim, value_dim) > MAX_FLASH_DIM
            wide = wide and supports_attend_dense(keys, (keys, values), None, AttentionOptions(1.0))
            steps, decode = (
                (supports_latents, supports_paged_latents) if latents else (supports_blocks, supports_paged_decode)
            )
            computed = {"steps": steps(states, layout), "prompts": supports_prefix(states, layout) or wide}
            if batches:
                computed |= {
                    "steps in batches": decode(states, paged),
                    "prompts in batches": not latents and supports_paged_prompts(states, paged),
                }
        falls += [name + suffix for name, done in computed.items() if not done and name not in falls]
    return falls


def sizes_of(model_type: str) -> Sizes:
    """Ask for one family."""
    try:
        made = trace(CONFIG_MAPPING[model_type](), torch.bfloat16)
    except Exception as error:
        return Sizes({}, {}, "", f"{type(error).__name__}: {error}".split("\n")[0][:160])
    refused = ""
    try:
        check_model(made.model, pages_config("4bit_nc"))
    except ValueError as error:
        refused = str(error)
    layers: dict[str, int] = {}
    falls: dict[str, list[str]] = {}
    for layer, calls in zip(TurboQuantCache(made.config).layers, made.calls, strict=True):
        if not isinstance(layer, TurboQuantLayer) or not calls:
            continue
        (keys, *_), (values, *_) = calls[0].likes[:2]
        name = str(keys[3]) if keys[3] == values[3] else f"{keys[3]}/{values[3]}"
        layers[name] = layers.get(name, 0) + 1
        latents = holds_latents(made.model.config.get_text_config())
        if name not in falls and (names := in_torch(keys[3], values[3], not refused, latents)):
            falls[name] = names
    return Sizes(layers, falls, refused)


def section(found: dict[str, Sizes]) -> list[str]:
    """The section's lines."""
    tried = {name: sizes for name, sizes in found.items() if not sizes.untried}
    packed = {name: sizes for name, sizes in tried.items() if sizes.layers}
    falling = sum(bool(sizes.torch) for sizes in packed.values())
    started = sum(not sizes.batches for sizes in packed.values())
    rows: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, sizes in packed.items():
        # Without the class that the sentence begins with.
        batches = sizes.batches.removesuffix(INSTEAD).partition(" ")[2].strip() or "start"
        for width, operations in sizes.torch.items():
            rows[width, ", ".join(operations), batches].append(name)
    return [
        "",
        "## At published sizes",
        "",
        f"The defaults of each configuration class of transformers {transformers.__version__}, in most families the "
        "sizes of one checkpoint (in some, such as Bloom and GLM-4.5, of none); built and run without memory by "
        "`python -m examples.measure.quality.families sizes`, which asks the functions that choose what computes "
        "compressed layers in bf16 on an NVIDIA GPU. They look at widths: of heads wider than 256 channels torch "
        "computes first prompts in batches; of heads wider than 512 everything; of heads "
        "of 129 to 256 channels prompts on compute capability 8.x (A100, RTX 30 and 40, L4); in "
        "batches, of widths that 8 does not divide, everything. On 7.5 (T4) torch computes prompts after a history and "
        "in batches, of any width. Whatever the width, it also attends where the table above says dequantized, and "
        "where a model adds a bias to its logits (T5).",
        "",
        f"Of {len(found)} model types {len(packed)} have compressed layers, and of {len(packed) - falling} of those "
        f"no width falls to torch on 8.0 and newer. {len(tried) - len(packed)} have none at these sizes, and "
        f"{len(found) - len(tried)} do not run from their defaults alone or have no keys and values. Of those with "
        f"compressed layers {started} are not refused in batches when these start.",
        "",
        "| keys/values | in torch on a GPU | batches | families |",
        "| ---: | --- | --- | --- |",
        *(f"| {' | '.join(row)} | {', '.join(sorted(names))} |" for row, names in sorted(rows.items(), key=_widest)),
    ]


def _widest(row: tuple[tuple[str, ...], list[str]]) -> tuple[int, tuple[str, ...]]:
    """Order of rows: the widest keys first."""
    return -int(row[0][0].partition("/")[0]), row[0]


def measure() -> None:
    """Ask for every family, and write what is known."""
    found = {model_type: sizes_of(model_type)._asdict() for model_type in model_types()}
    FILE.write_text(json.dumps({"transformers": transformers.__version__, "families": found}, indent=1) + "\n")


def read() -> dict[str, Sizes]:
    """Results of the last run."""
    return {name: Sizes(**sizes) for name, sizes in json.loads(FILE.read_text())["families"].items()}
