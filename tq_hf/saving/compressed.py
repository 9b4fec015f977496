"""What a file holds of a compressed layer: writing it down, checking it, and making the layer again."""

from __future__ import annotations

import math
from typing import Any

import torch
from tq_kernels.format import LARGEST_SCALE, SMALLEST_SCALE

from ..config import TurboQuantConfig
from ..layers.compressed import TurboQuantLayer
from ..stores.base import Counts
from ..stores.growing import GrowingStore
from ..tensors.blocks import ChannelScales, KeyValue
from .expected import Expected, exactly
from .safetensors_file import typed

FIELDS = {"class": str, "counts": list, "reads_store": bool, "optional": list, "scales_are_fixed": bool}
"""`optional` are names of tensors that only some stores have; channel scales that are `scales_are_fixed` stay, whatever
comes."""

OPTIONAL = ("key_channel_scales", "value_channel_scales")
"""Those of a balanced configuration."""


def describe(layer: TurboQuantLayer, index: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A compressed layer as JSON and tensors by name: what is used of its store, rows in the order of the tokens."""
    if layer.store is None:
        raise ValueError(f"Layer {index} holds no tokens although others do; save a cache the whole model has filled.")
    counts, held = layer.store.export()
    description = {
        "class": type(layer).__name__,
        "counts": list(counts),
        "reads_store": layer.reader is not None,
        "optional": [name for name in OPTIONAL if name in held],
        "scales_are_fixed": layer.store.scales_are_fixed,
    }
    return description, held


def states_like(probe: TurboQuantLayer, batch: int) -> KeyValue:
    """Keys and values `[batch, Hkv, 0, D]` as this model makes them for the layer."""
    assert probe.store is not None
    keys, values = (part[:1, :, :0].expand(batch, -1, -1, -1) for part in probe.store.sinks)
    return keys, values


def expect(
    described: dict[str, Any], index: int, like: KeyValue, config: TurboQuantConfig, tokens: int, room: int | None
) -> tuple[Expected, int]:
    """What the file must have of layer `index`, and the bytes it takes on the layer's device.

    Args:
        described: What the file says of it, its fields typed.
        index: Number of the layer.
        like: See `states_like`.
        config: What the file was compressed with.
        tokens: Tokens that the file holds.
        room: Tokens to preallocate for, or `None`.
    """
    keys, values = like
    numbers = described["counts"]
    if len(numbers) != len(Counts._fields) or not all(typed(n, int) and n >= 0 for n in numbers):
        raise ValueError(f"Layer {index} holds {str(numbers)[:64]}, not {', '.join(Counts._fields)}: damaged.")
    if described["optional"] != (list(OPTIONAL) if config.balance else []):
        raise ValueError(f"Layer {index} has unknown tensors {str(described['optional'])[:64]}: damaged.")
    if described["scales_are_fixed"] and not config.balance:
        raise ValueError(f"Layer {index} has channel scales that are handed on, and is not balanced: damaged.")
    counts = Counts(*numbers)
    layout = config.layout(keys.shape[-1], values.shape[-1])
    held = counts.sinks + counts.blocks * layout.tokens + counts.residual
    packed = counts.blocks + counts.pending
    if (
        held != tokens
        or counts.pending * layout.tokens > counts.residual
        or counts.sinks > config.sink_tokens
        or (counts.sinks < config.sink_tokens and (packed or counts.residual))
        or (room is not None and packed > config.num_blocks(room))
    ):
        raise ValueError(f"Layer {index} holds {counts}, which is impossible for {tokens} tokens: damaged.")
    try:
        # Sizes from the store itself, without memory.
        store = GrowingStore.allocate(config, keys.to("meta"), values.to("meta"), room)
    except RuntimeError as error:
        raise ValueError(f"Layer {index} would be too large ({str(error)[:80]}): the file is damaged.") from None
    size = sum(tensor.nbytes for tensors in store.by_kind().values() for tensor in tensors)
    packed_shapes = {
        name: (tensor.dtype, [*tensor.shape[:2], packed, tensor.shape[3]])
        for name, tensor in store.blocks.tensors().items()
    }
    dense_shapes = {
        f"{part}_{name}": (like.dtype, [*like.shape[:2], rows, like.shape[3]])
        for part, rows in (("sink", counts.sinks), ("residual", counts.residual))
        for name, like in (("keys", keys), ("values", values))
    }
    channel_scales = zip(OPTIONAL, store.blocks.channel_scales, strict=True)
    channel_scale_shapes = {name: (like.dtype, list(like.shape)) for name, like in channel_scales if config.balance}
    shapes = packed_shapes | dense_shapes | channel_scale_shapes
    size += sum(math.prod(shape) * dtype.itemsize for dtype, shape in shapes.values())
    return {name: (dtype, exactly(shape), shape) for name, (dtype, shape) in shapes.items()}, size


def fill(
    layer: TurboQuantLayer, probe: TurboQuantLayer, batch: int, described: dict[str, Any], held: dict[str, torch.Tensor]
) -> None:
    """Put tensors of a file into an empty layer.

    Raises:
        ValueError: A channel has a factor that none can have.
    """
    for name in described["optional"]:
        if not bool(((held[name] >= SMALLEST_SCALE) & (held[name] <= LARGEST_SCALE)).all()):
            raise ValueError(f"Its `{name}` are not between {SMALLEST_SCALE} and {LARGEST_SCALE}: the file is damaged.")
    if described["scales_are_fixed"]:
        # The same for every sequence; the next prompt may have more.
        layer.channel_scales = ChannelScales(*(held[name][:1] for name in OPTIONAL))
    layer.lazy_initialization(*states_like(probe, batch))
    assert layer.store is not None
    layer.store.restore(Counts(*described["counts"]), held)
    # Known already, so that the next step need not dequantize everything to find out.
    if described["reads_store"]:
        layer.read_like(probe)
