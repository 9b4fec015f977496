"""Stresses that leave what a model computes unchanged, and change what its cache has to store.

Real models sit anywhere on the orbit of such changes, the small ones that are measured here at one point of it.

    rescale     a pair of key channels that the rotary embedding turns together is multiplied and the queries' divided;
                a value channel is multiplied and its column of the output projection divided
    key bias    a vector is added to all keys of a head before the rotary embedding, so that it turns with the position,
                and what it adds to the logits is taken off again where the keys are read
    padding     masked tokens come first, as in the shorter rows of a batch; sinks are then padding
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache

PROFILES = ("slow", "fast")


def _heads(config: Any) -> tuple[int, int, int]:
    """Query heads, KV heads and head_dim."""
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_attention_heads, config.num_key_value_heads, dim


@torch.no_grad()
def rescaled(model: Any, pairs: int, factor: float, values: int = 0, seed: int = 0) -> Any:
    """A copy of a Llama-like model that computes the same with other channels.

    Args:
        model: Separate projections and a rotary embedding of channels (i, i + D / 2); with or without QK-norm.
        pairs: Rotary pairs of every key head to multiply, drawn anew for each layer and, without QK-norm (whose weights
            all heads share), for each KV head.
        factor: What to multiply by.
        values: Value channels of every KV head to multiply.
        seed: Which ones.
    """
    model = copy.deepcopy(model)
    query_heads, kv_heads, dim = _heads(model.config)
    group = query_heads // kv_heads
    for index, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        generator = torch.Generator().manual_seed(1000 * seed + index)

        def drawn(count: int, channels: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randperm(channels, generator=generator)[:count]

        normed = hasattr(attention, "k_norm")
        keys = torch.ones(1 if normed else kv_heads, dim)
        for head in keys:
            pair = drawn(pairs, dim // 2)
            head[pair] = head[pair + dim // 2] = factor
        loud = torch.ones(kv_heads, dim)
        for head in loud:
            head[drawn(values, dim)] = factor
        keys, loud = keys.to(model.device), loud.to(model.device)
        if normed:
            attention.k_norm.weight *= keys[0]
            attention.q_norm.weight /= keys[0]
        else:
            _scale_rows(attention.k_proj, keys)
            _scale_rows(attention.q_proj, 1 / keys.repeat_interleave(group, 0))
        _scale_rows(attention.v_proj, loud)
        attention.o_proj.weight /= loud.repeat_interleave(group, 0).flatten()
    return model


def _scale_rows(projection: torch.nn.Linear, factors: torch.Tensor) -> None:
    projection.weight *= factors.flatten()[:, None]
    if projection.bias is not None:
        projection.bias *= factors.flatten()


def profile(wavelengths: torch.Tensor, name: str) -> torch.Tensor:
    """How a key bias is spread over rotary pairs, `[D / 2]`, of unit norm.

    Args:
        wavelengths: Of each pair, in tokens.
        name: "slow" is Qwen2.5-7B's: 99% of it in wavelengths above 512 tokens, about even over most of them and
            rising over the slowest quarter (turboquant-pro, benchmarks/item4_result.json; places are relative to the
            range from 512 to the longest). "fast" is even over wavelengths of 8 to 512 tokens.
    """
    if name == "fast":
        spread = ((wavelengths >= 8) & (wavelengths <= 512)).float()
    else:
        place = (wavelengths / 512).log() / (wavelengths.max() / 512).log()
        spread = torch.zeros_like(wavelengths)
        places, sizes = zip(*SLOW, strict=True)
        for (p0, s0), (p1, s1) in zip(SLOW, SLOW[1:], strict=False):
            inside = (place >= p0) & (place <= p1)
            spread = torch.where(inside, s0 + (s1 - s0) * (place - p0) / (p1 - p0), spread)
        spread = torch.where(place < places[0], sizes[0], spread)
    return spread / spread.norm()


SLOW = ((-0.5, 0.02), (-0.1, 0.07), (0.0, 0.13), (0.05, 0.4), (0.1, 0.7), (0.6, 0.75), (0.75, 1.5), (0.9, 2.9), (1, 8))
"""Mean size of the bias by place, read off the curve of Qwen2.5-7B."""


@dataclass
class KeyBias:
    """Vectors that turn with the position.

    Args:
        vectors: For each layer `[Hkv, D]`, before the rotary embedding.
        cos: `[T, D]` of the rotary embedding.
        sin: The same.
    """

    vectors: list[torch.Tensor]
    cos: torch.Tensor
    sin: torch.Tensor

    def at(self, layer: int, positions: slice) -> torch.Tensor:
        """Vectors to add to the keys of a layer at these positions, `[Hkv, S, D]`."""
        vector = self.vectors[layer][:, None]
        half = vector.shape[-1] // 2
        turned = torch.cat([-vector[..., half:], vector[..., :half]], dim=-1)
        return vector * self.cos[positions] + turned * self.sin[positions]

    def added(self, cache: Cache) -> Cache:
        """`cache`, which from now on stores keys with these vectors added."""
        update = cache.update

        def with_bias(keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
            past = int(cache.get_seq_length(layer))
            return update(keys + self.at(layer, slice(past, past + keys.shape[2])), values, layer, *args, **kwargs)

        cache.update = with_bias  # type: ignore[method-assign]
        return cache

    @contextmanager
    def taken_off(self, attention: str) -> Iterator[None]:
        """Within, the attention implementation of this name takes off its logits what these vectors add to them."""
        plain = AttentionInterface()[attention]

        def without(module: Any, query: torch.Tensor, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
            tokens, new = key.shape[2], query.shape[2]
            scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
            if mask is None:
                mask = torch.ones(new, tokens, dtype=torch.bool, device=query.device).tril(tokens - new)[None, None]
            vectors = self.at(module.layer_idx, slice(0, tokens))
            vectors = vectors.repeat_interleave(query.shape[1] // len(vectors), 0)
            logits = -scaling * (query @ vectors.transpose(-1, -2))
            return plain(module, query, key, value, logits.masked_fill(~mask[..., :tokens], -torch.inf), **kwargs)

        AttentionInterface.register(attention, without)
        try:
            yield
        finally:
            AttentionInterface.register(attention, plain)


def key_bias(model: Any, keys: Sequence[torch.Tensor], strength: float, spread: str, seed: int = 0) -> KeyBias:
    """A bias of `strength` times the mean length of a head's keys in the first and last layer, and of that length in
    the others, as in Qwen2.5-7B.

    Args:
        model: A Llama-like model.
        keys: Its keys, `[N, Hkv, T, D]` of each layer.
        strength: Times a key's length.
        spread: A name of `PROFILES`.
        seed: Draws directions within rotary pairs.
    """
    tokens, dim = keys[0].shape[2:]
    positions = torch.arange(tokens, device=keys[0].device)
    cos, sin = (x[0] for x in model.model.rotary_emb(keys[0], positions[None]))
    wavelengths = 2 * math.pi / model.model.rotary_emb.inv_freq.float()
    size = profile(wavelengths, spread).to(keys[0].device)
    vectors = []
    for layer, states in enumerate(keys):
        generator = torch.Generator().manual_seed(1000 * seed + layer)
        angle = 2 * math.pi * torch.rand(states.shape[1], dim // 2, generator=generator).to(size)
        direction = torch.cat([size * angle.cos(), size * angle.sin()], dim=-1)
        times = strength if layer in (0, len(keys) - 1) else 1.0
        vectors.append(times * states.norm(dim=-1).mean((0, 2))[:, None] * direction)
    return KeyBias(vectors, cos, sin)


@dataclass(frozen=True)
class Stress:
    """Change of a model or of its cache's inputs: one of these, or none.

    Args:
        injection: Length of a vector added to all keys of a head, times a key's (`quality.injection`).
        rescale: Rotary pairs, factor and value channels (`rescaled`).
        bias: Profile and strength (`key_bias`).
        padding: Tokens of padding before every document.
    """

    injection: float = 0.0
    rescale: tuple[float, float, float] | None = None
    bias: tuple[str, float] | None = None
    padding: int = 0

    @property
    def name(self) -> str:
        """Its name in the results; injections have none, but a column."""
        if self.rescale:
            pairs, factor, values = self.rescale
            parts = [f"{pairs:g} pairs"] if pairs else []
            return " + ".join([*parts, *([f"{values:g} values"] if values else [])]) + f" x{factor:g}"
        if self.padding:
            return f"{self.padding} padding"
        return f"{self.bias[0]} bias x{self.bias[1]:g}" if self.bias else ""

    def __str__(self) -> str:
        return self.name or f"x{self.injection:g}"


UNSTRESSED = Stress()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Let stresses be chosen on the command line."""
    parser.add_argument(
        "--inject", nargs="*", type=float, help="times a key's length; of bytes 1 3 10 without a stress"
    )
    parser.add_argument(
        "--rescale",
        nargs="+",
        type=float,
        action="append",
        default=[],
        metavar=("PAIRS", "FACTOR [VALUES]"),
        help="multiply the channels of this number of rotary pairs of keys (and of value channels) by a factor",
    )
    parser.add_argument(
        "--bias",
        nargs=2,
        action="append",
        default=[],
        metavar=("PROFILE", "STRENGTH"),
        help=f"add a bias before the rotary embedding: {' or '.join(PROFILES)}, times a key's length",
    )
    parser.add_argument("--pad", nargs="*", type=int, default=[], help="tokens of padding before every document")


def chosen(arguments: argparse.Namespace) -> list[Stress]:
    """None, and those asked for.

    Raises:
        SystemExit: A stress lacks a number, or has an unknown profile.
    """
    if any(len(given) not in (2, 3) for given in arguments.rescale):
        raise SystemExit("--rescale takes PAIRS FACTOR [VALUES]")
    if any(spread not in PROFILES for spread, _ in arguments.bias):
        raise SystemExit(f"--bias takes a profile, {' or '.join(PROFILES)}, and a strength")
    made = [UNSTRESSED]
    injections = arguments.inject
    if injections is None:
        injections = [] if arguments.rescale or arguments.bias or arguments.pad else [1.0, 3.0, 10.0]
    made += [Stress(injection=strength) for strength in injections]
    made += [Stress(rescale=(given[0], given[1], given[2] if given[2:] else 0)) for given in arguments.rescale]
    made += [Stress(bias=(spread, float(strength))) for spread, strength in arguments.bias]
    return made + [Stress(padding=tokens) for tokens in arguments.pad]
