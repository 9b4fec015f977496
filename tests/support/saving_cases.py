"""What tests of saved caches share: filled caches, and the parts of a file."""

from __future__ import annotations

import json
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from tests.support.tiny_models import build, token_ids
from tq_hf import TurboQuantCache
from tq_hf.compat import as_input

_built = lru_cache(build)


def model_named(name: str, attention: str | None = None, **changes: Any) -> Any:
    """A random model of a family, built once, with this `attention` from now on."""
    model = _built(name, **changes)
    if attention is not None:
        model.set_attn_implementation(attention)
    return model


def run(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **as_input(cache)).logits


def filled(
    name: str, length: int = 300, batch: int = 2, attention: str = "turboquant", layers: int = 0, **options: Any
) -> Any:
    """A model and a cache that holds a prompt and one more token; `layers` are those of the model, 0 as they are."""
    model = model_named(name, **(dict(num_hidden_layers=layers) if layers else {}), attention=attention)
    cache = TurboQuantCache(model.config, model=model, **options)
    run(model, cache, token_ids(batch, length - 1))
    run(model, cache, token_ids(batch, 1, seed=1))
    return model, cache


def reloaded(folder: Path, model: Any, cache: Any, **options: Any) -> TurboQuantCache:
    """The cache as it comes back from a file, `c.safetensors`."""
    cache.save(folder / "c.safetensors", model)
    return TurboQuantCache.load(folder / "c.safetensors", model, **options)


def assert_continue_alike(model: Any, one: Any, other: Any, calls: tuple[int, ...] = (1, 1, 9, 1)) -> None:
    """Both caches give the same logits, bit for bit, in calls of these many tokens."""
    for step, count in enumerate(calls):
        ids = token_ids(2, count, seed=step)
        assert torch.equal(run(model, one, ids), run(model, other, ids)), f"call {step}"


def split(content: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]
