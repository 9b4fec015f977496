"""What several test modules need: seeded states, a filled store, snapshots, and the arithmetic of bytes held."""

from __future__ import annotations

import gc
import types
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from tq_kernels.format import loud_channels
from tq_kernels.types import ChannelScales, KeyValue, PackedBlocks
from transformers import CompileConfig, Gemma3TextConfig, LlamaConfig

from tq_hf import BlockLayout, TurboQuantConfig
from tq_hf.codec.reference import dequantize, encode
from tq_hf.layers.compressed import _one_nan
from tq_hf.stores.store import LayerStore

CPU = torch.device("cpu")
BLOCK = BlockLayout.tokens


def slow(*values: Any) -> Any:
    """A case that takes long, and whose parts other cases have."""
    return pytest.param(*values, marks=pytest.mark.slow)


def quick_of(every: Iterable[tuple[Any, ...]], *quick: tuple[Any, ...]) -> list[Any]:
    """Cases, of which all but these take long."""
    every = list(every)
    assert set(map(repr, quick)) <= set(map(repr, every))
    return [case if case in quick else slow(*case) for case in every]


def every_pair(*columns: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Half of the rows of a table of three columns or more, in which any two values of two columns still meet."""
    rows = [list(zip(*cells, strict=True)) for cells in product(*map(enumerate, columns))]
    return [values for places, values in rows if sum(places) % 2 == 0]


def compile_config(backend: str = "eager", *, fullgraph: bool = True) -> CompileConfig:
    """Compile on a CPU too, by default with no graph break allowed. "eager" runs a graph as Dynamo records it;
    "aot_eager" makes its mutations functional first, which takes as long again."""
    config = CompileConfig(fullgraph=fullgraph, backend=backend, mode=None)
    config._compile_all_devices = True
    return config


def cumulative(lengths: Sequence[int]) -> torch.Tensor:
    """Sums of the first 0, 1, ... lengths, int32."""
    return torch.tensor([0, *lengths]).cumsum(0).int()


def marked(scales: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Key channel scales `[..., D]` with marks at random channels."""
    order = torch.rand(scales.shape, generator=generator).argsort(-1)[..., : loud_channels(scales.shape[-1])]
    return scales.scatter(-1, order, -scales.gather(-1, order))


def states(
    seed: int,
    batch: int = 1,
    heads: int = 2,
    tokens: int = BLOCK,
    dim: int = 16,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> KeyValue:
    """Gaussian keys `[B, Hkv, T, dim]` and values `[B, Hkv, T, value_dim]`."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(batch, heads, tokens, dim, generator=generator)
    values = torch.randn(batch, heads, tokens, dim if value_dim is None else value_dim, generator=generator)
    return keys.to(dtype), values.to(dtype)


def rows(pair: KeyValue, start: int, stop: int | None = None) -> KeyValue:
    """Tokens `start` to `stop` of keys and values."""
    return pair[0][:, :, start:stop], pair[1][:, :, start:stop]


def concatenated(*pairs: KeyValue) -> KeyValue:
    """Keys and values of several calls, one after the other."""
    return torch.cat([keys for keys, _ in pairs], 2), torch.cat([values for _, values in pairs], 2)


def all_packed(**options) -> TurboQuantConfig:
    """A configuration without sinks and residual: every complete block is packed."""
    return TurboQuantConfig(**(dict(residual_length=0, sink_tokens=0) | options))


def encoded(
    config: TurboQuantConfig, keys: torch.Tensor, values: torch.Tensor, channel_scales: ChannelScales | None = None
) -> PackedBlocks:
    """The packed blocks of whole blocks of tokens, encoded in one call."""
    layout = config.layout(keys.shape[-1], values.shape[-1])
    blocks = PackedBlocks.allocate(layout, *keys.shape[:2], keys.shape[2] // layout.tokens, keys.device)
    blocks = blocks if channel_scales is None else replace(blocks, channel_scales=channel_scales)
    encode(config, keys, values, blocks, 0)
    return blocks


def dequantized(config: TurboQuantConfig, blocks: PackedBlocks, like: KeyValue | None = None) -> KeyValue:
    """Blocks as dense keys and values, in the dtype of `like` (float32 without)."""
    shape = (*blocks.scales.shape[:2], blocks.capacity * blocks.layout.tokens)
    dtype = torch.float32 if like is None else like[0].dtype
    keys = torch.empty(*shape, blocks.layout.key_dim, dtype=dtype)
    values = torch.empty(*shape, blocks.layout.value_dim, dtype=dtype)
    dequantize(config, blocks, keys, values)
    return keys, values


def filled(
    config: TurboQuantConfig, pair: KeyValue, calls: list[int] | None = None, max_cache_len: int | None = None
) -> LayerStore:
    """A store that was given `pair` in calls of these many tokens (by default in one call)."""
    store = LayerStore.allocate(config, *pair, max_cache_len)
    start = 0
    for size in [pair[0].shape[2]] if calls is None else calls:
        store.append(*rows(pair, start, start + size))
        start += size
    assert start == pair[0].shape[2]
    return store


def packed_tensors(store: LayerStore) -> dict[str, torch.Tensor]:
    """The used blocks of a store, those not yet dropped from the residual included."""
    counts = store.settle()
    return store.blocks.slice(0, counts.blocks + counts.pending).tensors()


def residual_tensors(store: LayerStore) -> KeyValue:
    """The dense rows of a store that no packed block holds."""
    _, blocks, count, _ = store.settle().without_encoded_rows()
    return concatenated(store.tensors.sinks(0), *(part for _, part in store.tensors.ring_parts(blocks * BLOCK, count)))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Room that is not filled may hold NaN, which equals nothing."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def snapshot(store: LayerStore | None) -> dict[str, object]:
    """Everything a store holds, cloned: equal by `assert_unchanged` only if nothing was touched."""
    if store is None:
        return {}
    tensors = {f"{kind} {i}": t.clone() for kind, group in store.by_kind().items() for i, t in enumerate(group)}
    return tensors | {"counts": store.settle(), "length": int(store.length)}


def assert_unchanged(store: LayerStore | None, before: dict[str, object]) -> None:
    """The store is as it was at `before = snapshot(store)`."""
    after = snapshot(store)
    assert after.keys() == before.keys()
    for name, held in before.items():
        if isinstance(held, torch.Tensor):
            assert torch.equal(as_bytes(held), as_bytes(after[name])), name
        else:
            assert held == after[name], name


def assert_same(actual: KeyValue, expected: KeyValue) -> None:
    """Keys and values are equal bit for bit."""
    for what, a, b in zip(("keys", "values"), actual, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, f"{what}: {a.shape} {a.dtype}, expected {b.shape} {b.dtype}"
        assert torch.equal(a, b), f"{what} differ"


def relative_error(approximate: torch.Tensor, exact: torch.Tensor) -> float:
    """Root of the squared error over the squared norm, over all entries."""
    exact = exact.double()
    return ((approximate.double() - exact).norm() / exact.norm()).item()


def prefill_bytes(config: TurboQuantConfig, batch: int, dim: int, tokens: int) -> dict[str, int]:
    """Bytes a layer of two KV heads and 16-bit states holds after one prefill, by the kinds of `MemoryFootprint`, from
    the documentation alone.

    Whole blocks older than the residual are packed without spare room; the residual is a ring of whole blocks with
    room for what decoding will need, up to an eighth and a block more than it holds; every channel of a head has a
    factor.
    """
    layout = config.layout(dim)
    sinks = min(config.sink_tokens, tokens)
    blocks = max(0, (tokens - sinks - config.residual_length) // 128)
    held = tokens - sinks - 128 * blocks
    room = max(held, min(config.residual_length + 128, held * 9 // 8 + 128))
    residual = -(-room // 128) * 128
    rows = 2 * batch
    return {
        "packed": rows * blocks * layout.block_bytes,
        "metadata": rows * 2 * (2 * dim),  # channel scales
        "residual": rows * (residual + config.sink_tokens) * 2 * dim * 2,
    }


def storages_reachable_from(root: object) -> dict[int, int]:
    """Bytes of every tensor storage in an object graph, by address, found by the garbage collector; without the NaN
    that all layers of a process share."""
    found, seen, queue = {}, set(), [root]
    while queue:
        item = queue.pop()
        if id(item) in seen or isinstance(item, (type, types.ModuleType, types.FunctionType, types.MethodType)):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            is_nan = item.is_floating_point() and item is _one_nan(item.dtype, item.device)
            if storage.nbytes() and not is_nan:
                found[storage.data_ptr()] = storage.nbytes()
        queue.extend(gc.get_referents(item))
    return found


def llama_config(layers: int = 2, dim: int = 16, **options) -> LlamaConfig:
    """The config of a small Llama: enough for a cache, no weights."""
    sizes = dict(hidden_size=64, intermediate_size=64, vocab_size=64, num_attention_heads=4, num_key_value_heads=2)
    return LlamaConfig(num_hidden_layers=layers, head_dim=dim, **(sizes | options))


def gemma_config(kinds: list[str], window: int = 16, **options) -> Gemma3TextConfig:
    """Likewise of a small Gemma 3 with layers of these kinds."""
    sizes = dict(hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    layers = dict(num_hidden_layers=len(kinds), layer_types=kinds, sliding_window=window)
    return Gemma3TextConfig(**(sizes | layers | options))


class CountedBytes(TorchDispatchMode):
    """Counts the bytes operations write: every result that is not a view of an argument."""

    written = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        in_place = func._schema.is_mutable
        flat = [a for arg in args for a in (arg if isinstance(arg, (list, tuple)) else [arg])]
        inputs = {a.untyped_storage().data_ptr() for a in flat if isinstance(a, torch.Tensor)}
        for result in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(result, torch.Tensor) and (in_place or result.untyped_storage().data_ptr() not in inputs):
                self.written += result.nbytes
        return out


def module_with(**attributes: Any) -> torch.nn.Module:
    """An attention module that has nothing else."""
    module = torch.nn.Module()
    vars(module).update(attributes)
    return module
