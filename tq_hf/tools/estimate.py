"""Estimates of the memory of a cache, and of the context that fits, from a model's config alone.

Sizes are not computed by formulas. The model runs on a few tokens on torch's `meta` device, without memory, and the
calls of its layers to the cache are recorded. A cache of the real classes then gets the same calls with the requested
batch and length, also on the `meta` device, and its tensors are counted. Hybrid models, sliding windows, MLA latents
and linear attention are therefore exact. An estimate equals `cache.memory_footprint()` after a prefill of that length.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from transformers import DynamicCache, PreTrainedConfig, StaticCache
from transformers.cache_utils import Cache

from ..cache import TurboQuantCache
from ..config import TurboQuantConfig, number_of_positions
from ..memory import MemoryFootprint, measure
from ..saving.recorded import replay
from .display import print_rows
from .traced import bytes_of_weights, quantization_of, trace

MOST = 2**40
"""Largest number of tokens or sequences to try. A cache that fits at this number does not grow."""


class Estimator:
    """Sizes of the caches of one model.

    Args:
        model_config: Config of the model. For a multimodal model the cache of the decoder is estimated, without images.
            For an encoder-decoder the self-attention cache of the decoder is estimated.
        dtype: Dtype of the loaded model, by default that of the config, or bfloat16 if the config has none.
        weight_bytes: Number of bytes of the weights, by default counted.

    Raises:
        ValueError: The model is no decoder, has no cache, or does not run without memory.
    """

    def __init__(
        self, model_config: PreTrainedConfig, dtype: torch.dtype | None = None, weight_bytes: int | None = None
    ) -> None:
        text_config = model_config.get_text_config(decoder=True)
        named = dtype or text_config.dtype or model_config.dtype or torch.bfloat16
        self.dtype: torch.dtype = getattr(torch, named) if isinstance(named, str) else named
        run = trace(model_config, self.dtype)
        self.config, self.calls = run.config, run.calls
        self.quantization, options = quantization_of(model_config)
        """Quantization method of the checkpoint's weights, or `None`."""
        counted, note = bytes_of_weights(run.model, self.quantization, options)
        self.weight_bytes = counted if weight_bytes is None else weight_bytes
        """Bytes of the whole model's weights: quantized as its config says, otherwise in `dtype`."""
        self.notes = [note] if note and weight_bytes is None else []
        """Sentences for the user about parts that are not counted, or not exactly."""
        if not run.whole:
            self.notes.append("Only the decoder's weights are counted: the rest needs a package that is not installed.")
        if run.cross_bytes:
            self.notes.append(
                f"The model also caches {run.cross_bytes:,} bytes for each token of the encoder's input. They are not "
                "compressed and not counted here."
            )
        elif not all(self.calls):
            empty = sum(not calls for calls in self.calls)
            self.notes.append(f"{empty} of {len(self.calls)} layers cache nothing without images, and are not counted.")
        self.max_positions: int | None = number_of_positions(self.config, alone=True)

    def footprint(
        self,
        preset: str | TurboQuantConfig | None,
        context: int,
        batch: int = 1,
        *,
        decoding: bool = False,
        max_cache_len: int | None = None,
    ) -> MemoryFootprint:
        """Estimate the bytes of a cache after a prefill. They equal `memory_footprint()` of a real cache, without
        `by_device`.

        Args:
            preset: A preset or configuration, or `None` for transformers' `DynamicCache`.
            context: Number of tokens of the prefill.
            batch: Number of sequences.
            decoding: Whether to append one new token. Sliding-window layers of a `DynamicCache` hold the whole prompt
                before the first new token, and only their window after it.
            max_cache_len: Number of tokens to preallocate. If `preset` is `None`, a `StaticCache` is estimated.

        Raises:
            ValueError: The preset does not exist, a number is less than 1, or `max_cache_len` is too small.
        """
        for name, value in (("context", context), ("batch", batch)):
            if value < 1:
                raise ValueError(f"`{name}` is {value}; it must be 1 or more.")
        if max_cache_len is not None and max_cache_len < context + decoding:
            raise ValueError(
                f"`max_cache_len` is {max_cache_len}; it must be {context + decoding} or more for this context."
            )
        if preset is not None:
            cache: Cache = TurboQuantCache(self.config, preset, max_cache_len=max_cache_len)
        else:
            cache = StaticCache(self.config, max_cache_len) if max_cache_len else DynamicCache(config=self.config)
        total: Any = Counter()
        # Measure one layer of each kind: layers of the same class, settings and calls have the same size.
        kinds: dict[Any, list[Any]] = {}
        for layer, calls in zip(cache.layers, self.calls, strict=True):
            plain = (int, str, TurboQuantConfig)
            settings = tuple((k, v) for k, v in vars(layer).items() if isinstance(v, plain))
            kinds.setdefault((type(layer), tuple(calls), settings), []).append(layer)
        for (_, calls, _), alike in kinds.items():
            for tokens in (context, 1) if decoding else (context,):
                replay(calls, alike[0], batch, tokens)
            sizes = measure(alike[:1], context + decoding).sizes
            total.update({name: len(alike) * size for name, size in sizes.items()})
        return MemoryFootprint(**total)

    def max_context(
        self, preset: str | TurboQuantConfig | None, memory: int, batch: int = 1, *, preallocated: bool = False
    ) -> int | None:
        """Find the longest prefill, or with `preallocated` the largest `max_cache_len`, whose cache takes at most
        `memory` bytes; 0 if none fits, `None` if all fit. `max_positions` does not bound it."""
        return _largest(
            lambda n: self.footprint(preset, n, batch, max_cache_len=n if preallocated else None).total <= memory
        )

    def max_batch(
        self, preset: str | TurboQuantConfig | None, memory: int, context: int, *, max_cache_len: int | None = None
    ) -> int | None:
        """Find the most sequences of `context` tokens whose cache takes at most `memory` bytes; 0 if one does
        not fit."""
        return _largest(lambda n: self.footprint(preset, context, n, max_cache_len=max_cache_len).total <= memory)


@dataclass(frozen=True)
class Estimate:
    """Sizes of a cache with one preset, or of transformers' own cache: after the prefill, and after the first new
    token."""

    preset: str | None
    footprint: MemoryFootprint
    decoding: MemoryFootprint
    max_context: int | None = None
    max_batch: int | None = None


def estimate(
    estimator: Estimator,
    presets: Iterable[str | TurboQuantConfig | None],
    context: int,
    batch: int = 1,
    memory: int | None = None,
    max_cache_len: int | None = None,
) -> Iterator[Estimate]:
    """Yield an `Estimate` of each preset, `None` for transformers' own cache. With `memory`, a number of bytes, an
    estimate also has `max_context` and `max_batch`. Other arguments are those of `Estimator.footprint`."""
    for preset in presets:
        footprint = estimator.footprint(preset, context, batch, max_cache_len=max_cache_len)
        decoding = estimator.footprint(preset, context, batch, decoding=True, max_cache_len=max_cache_len)
        fits: tuple[int | None, int | None] = None, None
        if memory is not None:
            longest = estimator.max_context(preset, memory, batch, preallocated=max_cache_len is not None)
            fits = longest, estimator.max_batch(preset, memory, context, max_cache_len=max_cache_len)
        yield Estimate(_label(preset), footprint, decoding, *fits)


def _label(preset: str | TurboQuantConfig | None) -> str | None:
    """Name of a preset, with presets by layer as "4bit_nc,0=k8v4,-1=dense"."""
    if not isinstance(preset, TurboQuantConfig):
        return preset
    layers = [*dict(preset.layers).items(), *((index, "dense") for index in preset.skip_layers)]
    return ",".join([preset.preset or "", *(f"{index}={name}" for index, name in layers)])


def parse_memory(text: str) -> int:
    """Parse an amount of memory: "24GB" (10**9 bytes), "24GiB" (2**30 bytes), or "24" (GiB). Raise `ValueError` for
    other texts."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B)?\s*", text, flags=re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not an amount of memory; write for example 24GB, 24GiB or 24 (GiB).")
    number, unit, binary = float(match[1]), match[2] or "G", match[3] or match[2] is None
    return math.floor(number * (1024 if binary else 1000) ** (" KMGT".index(unit.upper())))


def _largest(fits: Callable[[int], bool]) -> int | None:
    """Find the largest number that fits, if all smaller ones fit. Returns 0 if 1 does not fit, `None` above `MOST`."""
    most = 1
    while fits(most):
        if most == MOST:
            return None
        most *= 2
    return bisect_left(range(most // 2 + 1, most), True, key=lambda n: not fits(n)) + most // 2


@dataclass(frozen=True)
class Report:
    """Options and results of `tq-hf estimate`."""

    name: str
    estimator: Estimator
    context: int
    batch: int
    max_cache_len: int | None
    memory: int | None
    """Number of bytes of the GPU, or `None` without `--gpu-memory`."""
    free: int | None
    """Number of bytes of the GPU for the cache. 0 if the weights alone do not fit, `None` without `--gpu-memory`."""
    rows: list[Estimate]


def as_json(report: Report) -> dict[str, Any]:
    """Convert a report to JSON. Sizes are in bytes."""
    presets: list[dict[str, Any]] = [
        {"preset": row.preset}
        | {
            name: footprint.sizes | {"total": footprint.total}
            for name, footprint in (("after_prefill", row.footprint), ("decoding", row.decoding))
        }
        | ({} if report.free is None else {"max_context": row.max_context, "max_batch": row.max_batch})
        for row in report.rows
    ]
    return {
        "model": report.name,
        "dtype": str(report.estimator.dtype).removeprefix("torch."),
        "quantization": report.estimator.quantization,
        "context": report.context,
        "batch": report.batch,
        "max_cache_len": report.max_cache_len,
        "weight_bytes": report.estimator.weight_bytes,
        "max_position_embeddings": report.estimator.max_positions,
        "gpu_memory_bytes": report.memory,
        "cache_memory_bytes": report.free,
        "notes": report.estimator.notes,
        "presets": presets,
    }


def print_table(report: Report, console: Console) -> None:
    most = max(row.footprint.total for row in report.rows)
    unit, size_of = ("GiB", 2**30) if most >= 10 * 2**30 else ("MiB", 2**20)
    sequences = "one sequence" if report.batch == 1 else f"{report.batch} sequences"
    room = "" if report.max_cache_len is None else f", preallocated for {report.max_cache_len:,}"
    title = f"KV cache of {report.name}, {sequences} of {report.context:,} tokens{room}, in {unit}"
    console.print(title, soft_wrap=True)
    # Only sliding-window layers of a DynamicCache shrink: they hold the whole prompt until the first new token.
    shrinks = any(row.footprint.total > 1.01 * row.decoding.total for row in report.rows)
    # Show either bytes by kind or the context and batch that fit: both are too wide for a terminal.
    fits = report.free is not None
    headings = ["preset"] + ([] if fits else ["packed", "dense", "other layers"])
    headings += ["after prefill", "decoding"] if shrinks else ["total"]
    headings += ["share of bf16"] + (["max context", "max batch"] if fits else [])
    rows = []
    for row in report.rows:
        last = row.decoding if shrinks else row.footprint
        sizes = [] if fits else [last.packed + last.metadata, last.residual, last.uncompressed]
        sizes += [row.footprint.total, last.total] if shrinks else [last.total]
        cells = [f"{size / size_of:,.1f}" for size in sizes] + [f"{last.ratio:.1%}"]
        if fits:
            cells += ["any" if most is None else f"{most:,}" for most in (row.max_context, row.max_batch)]
        rows.append([row.preset or ("DynamicCache" if report.max_cache_len is None else "StaticCache"), *cells])
    print_rows(headings, rows, console)
    for sentence in _remarks(report, shrinks):
        console.print(sentence)


def _remarks(report: Report, shrinks: bool) -> list[str]:
    estimator, remarks = report.estimator, []
    if shrinks:
        remarks.append(
            "The sliding-window layers of a DynamicCache hold the whole prompt until the first new token, and only "
            "their window after it. The context and batch that fit are those after the prefill."
        )
    if report.free is not None and report.memory is not None:
        weights = f"{estimator.weight_bytes / 2**30:,.1f} GiB of weights"
        if estimator.quantization is not None and not estimator.notes:
            weights += f" (quantized: {estimator.quantization})"
        if report.free:
            remarks.append(
                f"Of {report.memory / 2**30:,.1f} GiB, {report.free / 2**30:,.1f} GiB are left for the cache beside "
                f"{weights} and the reserve."
            )
        else:
            remarks.append(
                f"The weights alone do not fit: {weights}, and {report.memory / 2**30:,.1f} GiB less the reserve. If "
                "the weights are smaller, pass `--weights 13GB`."
            )
    remarks += estimator.notes
    if estimator.max_positions is not None:
        beyond = ", fewer than `--context`" if report.context > estimator.max_positions else ""
        remarks.append(f"The model is made for up to {estimator.max_positions:,} tokens{beyond}.")
    return remarks
