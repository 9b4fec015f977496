"""Configuration of a compressed KV cache: presets, and their options.

A frozen `TurboQuantConfig` determines every bit of a compressed cache. `tq_kernels.layout.BlockLayout` derives sizes
from a config (`config.layout(head_dim)`). Settled parts of the method are not options;
`examples/measure/quality/ablation.py` measures the effect of each part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from tq_kernels.format import code_of, due_blocks, loud_channels
from tq_kernels.layout import BlockLayout


@dataclass(frozen=True)
class TurboQuantConfig:
    """Options of a compressed KV cache. Frozen; equal configurations give equal bits on every device.

    Args:
        preset: Name of the preset that this was made from, or `None` if it was assembled by hand.
        key_bits: Bits per key channel: 2 or 3 (trellis codes), 4 (Lloyd-Max codes) or 8 (FP8 e4m3 with a scale per
            token and head).
        value_bits: The same for values.
        residual_length: Number of newest tokens kept exact (transformers' `residual_length`). A block of 128 tokens is
            encoded once it is complete *and* wholly older than this. 0 leaves only the incomplete block dense.
        sink_tokens: Number of first tokens kept exact. Attention sinks carry a large part of the attention mass, which
            amplifies their error.
        skip_layers: Indices of layers left dense. Negative ones count from the end.
        seed: Seed of the rotation's random signs. Equal seeds give equal bits on every device and rank.
        balance: Scale channels that are much louder or quieter than others, so that the error does not depend on how a
            model scales its channels (see `tq_hf.codec.balance`).
        loud: Store the loudest channels of keys, which make most of the logits, in FP8 beside the codes. Heads with 64
            or 128 channels have four, with 256 eight; smaller heads and FP8 keys none. Needs `balance`: it finds them.
        layers: Preset per layer by index, e.g. `{0: "k8v4", -1: None}`: the layer has the bits of that preset, and all
            other options as here. `None` is dense, as in `skip_layers`, where it is kept; presets are kept as sorted
            pairs.

    Raises:
        ValueError: An option is outside its range. The message says what came and what is allowed.
    """

    preset: str | None = None
    key_bits: int = 4
    value_bits: int = 4
    residual_length: int = 128
    sink_tokens: int = 4
    skip_layers: tuple[int, ...] = ()
    seed: int = 0
    balance: bool = True
    loud: bool = True
    layers: Mapping[int, str | None] | tuple[tuple[int, str], ...] = ()

    def __post_init__(self) -> None:
        for name in ("key_bits", "value_bits"):
            code_of(getattr(self, name), name)
        for name in ("residual_length", "sink_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"`{name}` is {value!r}; it must be a number of tokens, 0 or more.")
        for name in ("balance", "loud"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"`{name}` is {value!r}; it must be True or False.")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not 0 <= self.seed < 2**63:
            raise ValueError(f"`seed` is {self.seed!r}; it must be a whole number, 0 or more and below 2**63.")
        layers: Any = self.skip_layers
        indices = tuple(layers) if isinstance(layers, Iterable) else (None,)
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in indices):
            raise ValueError(
                f"`skip_layers` is {layers!r}; it must be a sequence of layer indices, e.g. (0, 1, -2, -1)."
            )
        pairs: Any = list(self.layers.items()) if isinstance(self.layers, Mapping) else self.layers
        if not isinstance(pairs, (list, tuple)) or not all(map(_is_pair, pairs)):
            raise ValueError(
                f"`layers` is {self.layers!r}; it must be presets by layer indices, e.g. {{0: 'k8v4', -1: None}}."
            )
        presets = [(i, None if name is None else preset_name(name)) for i, name in pairs]
        named = _unique_presets([*((i, None) for i in indices), *presets])
        dense = (i for i, name in named.items() if name is None and i not in indices)
        object.__setattr__(self, "skip_layers", (*indices, *dense))
        object.__setattr__(self, "layers", tuple(sorted((i, name) for i, name in named.items() if name is not None)))

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> TurboQuantConfig:
        """Return the configuration of a preset with some options replaced. Other bits make `preset` `None`.

        Raises:
            ValueError: The preset or an option does not exist, or a value is outside its range.
        """
        preset = PRESETS[preset_name(name)]
        if not overrides:
            return preset
        known = {field.name for field in fields(cls)} - {"preset"}
        if unknown := sorted(set(overrides) - known):
            raise ValueError(f"Unknown option(s) {', '.join(unknown)}. Valid options: {', '.join(sorted(known))}.")
        config = cls(**{field.name: getattr(preset, field.name) for field in fields(preset)} | overrides)
        bits = (config.key_bits, config.value_bits)
        # Drop the name if the bits are not those of the preset.
        return config if bits == (preset.key_bits, preset.value_bits) else replace(config, preset=None)

    def layout(self, head_dim: int, value_head_dim: int | None = None) -> BlockLayout:
        """Return all byte sizes for heads of `head_dim` channels, and values of `value_head_dim` channels if that is
        another number."""
        fp8 = code_of(self.key_bits).is_fp8
        return BlockLayout(
            key_dim=head_dim,
            value_dim=head_dim if value_head_dim is None else value_head_dim,
            key_bits=self.key_bits,
            value_bits=self.value_bits,
            loud=0 if fp8 or not (self.balance and self.loud) else loud_channels(head_dim),
        )

    def of_latents(self) -> TurboQuantConfig:
        """Return the configuration of a layer whose keys are latents and whose values are rotary keys (MLA).

        Rotary keys have 8 bits in all presets: they are a ninth of the channels, and in a small trained model `4bit_nc`
        loses half as much with 8 bits for them as with 4 (KL .00031 and .00056; `examples/results/README.md`). Latents
        have no loud channels.
        """
        return replace(self, loud=False, value_bits=self.value_bits if self.preset is None else 8)

    def of_layer(self, model_config: Any) -> TurboQuantConfig:
        """Return the configuration of a layer with this config of transformers."""
        return self.of_latents() if holds_latents(model_config) else self

    def num_blocks(self, length: int) -> int:
        """Number of packed blocks in a cache of `length` tokens: complete and wholly older than `residual_length`."""
        return due_blocks(length, self.sink_tokens, self.residual_length)

    def by_layer(self, num_layers: int) -> list[TurboQuantConfig | None]:
        """Return the configuration of each layer of a cache, `None` for a dense layer.

        Raises:
            ValueError: An index is outside the model, or two indices of one layer have different presets.
        """
        pairs = [*((i, None) for i in self.skip_layers), *dict(self.layers).items()]
        for index, name in pairs:
            if not -num_layers <= index < num_layers:
                raise ValueError(
                    f"`{'skip_layers' if name is None else 'layers'}` names layer {index}, but the model has "
                    f"{num_layers} layers; use {-num_layers} to {num_layers - 1}."
                )
        named = _unique_presets([(index % num_layers, name) for index, name in pairs])
        configs: dict[str | None, TurboQuantConfig | None] = {None: None}
        for name in filter(None, named.values()):
            preset = PRESETS[name]
            configs[name] = replace(self, preset=name, key_bits=preset.key_bits, value_bits=preset.value_bits)
        return [configs[named[i]] if i in named else self for i in range(num_layers)]


def holds_latents(model_config: Any) -> bool:
    """Whether layers with this config of transformers cache latents and rotary keys (MLA)."""
    return bool(getattr(model_config, "kv_lora_rank", None))


POSITIONS = ("max_position_embeddings", "max_target_positions", "n_positions", "max_seq_len")
"""Names of the number of positions in transformers' configs. A config has at most one of them."""
EXTENDED = ("linear", "yarn")
"""Kinds of rotary embeddings that multiply the number of positions by `factor`. Configs may name the smaller number."""
FOLLOWING = ("dynamic", "longrope")
"""Kinds of rotary embeddings whose frequencies follow the longest text of a call, beyond the positions of the training.
Requests of one step would change each other's answers there."""


def number_of_positions(model_config: Any, alone: bool = False) -> int | None:
    """Number of positions that the config of a decoder allows, `alone` or to requests of one step; `None` for any."""
    named = [n for name in POSITIONS if isinstance(n := getattr(model_config, name, None), int) and n > 0]
    for rope in rotary_embeddings(model_config):
        kind, before = rope.get("rope_type"), rope.get("original_max_position_embeddings")
        if kind in EXTENDED and named:
            named = [max(min(named), int((before or min(named)) * (rope.get("factor") or 1)))]
        elif kind == "longrope" and before and not alone:
            named.append(before)
    return min(named, default=None)


def rotary_embeddings(model_config: Any) -> list[dict[str, Any]]:
    """Parameters of the rotary embeddings of a decoder: one dict, or one for each type of layer."""
    rope: dict[str, Any] = getattr(model_config, "rope_parameters", None) or {}
    return [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]


def _is_pair(pair: Any) -> bool:
    """Whether `pair` is a sequence of two items, the first one an int."""
    return isinstance(pair, (list, tuple)) and len(pair) == 2 and type(pair[0]) is int


def _unique_presets(pairs: Iterable[tuple[int, str | None]]) -> dict[int, str | None]:
    """Map layer indices to presets, `None` for dense. Raises `ValueError` if a layer has two presets."""
    named: dict[int, str | None] = {}
    for index, name in pairs:
        if named.setdefault(index, name) != name:
            first, second = named[index] or "dense", name or "dense"
            raise ValueError(
                f"Layer {index} is {first} and {second} in `layers` and `skip_layers`. Name this layer once."
            )
    return named


def config_of(preset: str | TurboQuantConfig, overrides: Mapping[str, Any]) -> TurboQuantConfig:
    """Return the configuration of a preset with some options replaced, or return a configuration unchanged. Raise
    `ValueError` if the preset or an option does not exist, or if options come in addition to a configuration."""
    if not isinstance(preset, TurboQuantConfig):
        return TurboQuantConfig.from_preset(preset, **overrides)
    if overrides:
        raise ValueError(
            f"Got a TurboQuantConfig and also {', '.join(sorted(overrides))}. Put the options into the config "
            "(`dataclasses.replace`), or pass a preset's name."
        )
    return preset


def preset_name(name: str) -> str:
    """Normalize the name of a preset. Upper case and vLLM's names ("turboquant_4bit_nc") are allowed. Raise
    `ValueError` if no preset has this name."""
    plain = name.lower().removeprefix("turboquant_") if isinstance(name, str) else None
    if plain not in PRESETS:
        raise ValueError(f"Unknown preset {name!r}. Valid presets: {', '.join(PRESETS)}.")
    return plain


PRESETS = {
    name: TurboQuantConfig(preset=name, key_bits=key_bits, value_bits=value_bits)
    for name, key_bits, value_bits in (
        ("k8v4", 8, 4),
        ("4bit_nc", 4, 4),
        ("3.5bit_nc", 4, 3),
        ("k3v4_nc", 3, 4),
        ("3bit_nc", 3, 3),
        ("2.5bit_nc", 3, 2),
        ("2bit_nc", 2, 2),
    )
}
"""Presets, best first. k8v4, 4bit_nc, k3v4_nc and 3bit_nc have the same names as in vLLM (`nc`: norm-corrected).

Presets of half a bit spend the extra bit on the keys: 3.5 bits is 4-bit keys with 3-bit values, 2.5 bits is 3-bit keys
with 2-bit values. (The TurboQuant paper gives 32 outlier channels one bit more. After a random rotation no channel is
an outlier, and an error in keys costs more than an error in values.)
"""
