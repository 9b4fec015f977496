"""A preallocated layer whose lengths live on the device, for compiled decoding.

The tensors are those of `LayerStore`, allocated once and written in place. What changes from step to step lives in
three small tensors, so that a captured graph serves every length:

    state  [4] int32   what is held between calls, as `Counts`
    seen   [5] int32   what the last decode step attends to: sinks, blocks, window rows, slot of the first window row;
                       and the blocks that became due in it
    length []  int64   tokens held, as `get_seq_length` returns it

Decode steps (one new token) never read them on the host. Everything else does, through `opened`: it takes a
`LayerStore` out, works on it in the usual way and puts the result back in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from ..compat import mark_static_address
from ..config import TurboQuantConfig
from ..inference_mode import outside_inference_mode
from ..ops import triton_backend
from ..tensors.blocks import PackedBlocks
from ..tensors.window import KeyValue
from .growing import Counts, LayerStore, stored_tensors

_configs: list[TurboQuantConfig] = []


def config_number(config: TurboQuantConfig) -> int:
    """A number that stands for `config` in this process; equal configurations have equal numbers."""
    if config not in _configs:
        _configs.append(config)
    return _configs.index(config)


def numbered_config(number: int) -> TurboQuantConfig:
    """The configuration a number stands for."""
    return _configs[number]


@dataclass(frozen=True)
class StaticStore:
    """The tensors of a preallocated layer; see the module.

    Args:
        config: What to compress to.
        config_number: Its number, an operator argument.
        max_length: Tokens there is room for.
        blocks: Room for all blocks of `max_length` tokens.
        sinks: `[B, Hkv, sink_tokens, D]`.
        window: Ring buffers `[B, Hkv, capacity, D]`.
        state: See the module.
        seen: See the module.
        length: See the module.
    """

    config: TurboQuantConfig
    config_number: int
    max_length: int
    blocks: PackedBlocks
    sinks: KeyValue
    window: KeyValue
    state: torch.Tensor
    seen: torch.Tensor
    length: torch.Tensor

    @classmethod
    @outside_inference_mode
    def allocate(
        cls, config: TurboQuantConfig, keys: torch.Tensor, values: torch.Tensor, max_length: int
    ) -> StaticStore:
        """Room for `max_length` tokens like those of keys `[B, Hkv, *, Dk]` and values `[B, Hkv, *, Dv]`."""
        store = LayerStore(config, keys, values, max_length)
        static = cls(
            config=config,
            config_number=config_number(config),
            max_length=max_length,
            blocks=store.blocks,
            sinks=store.sinks,
            window=(store.window.keys, store.window.values),
            state=torch.zeros(4, dtype=torch.int32, device=keys.device),
            seen=torch.zeros(5, dtype=torch.int32, device=keys.device),
            length=torch.zeros((), dtype=torch.int64, device=keys.device),
        )
        triton_backend.prepare(config, store.layout, keys)
        for tensors in static.tensors().values():
            for tensor in tensors:
                mark_static_address(tensor)
        return static

    @contextmanager
    def opened(self) -> Iterator[LayerStore]:
        """The store as a `LayerStore`; on leaving, what it holds is written back in place. Waits for the device."""
        counts = Counts(*self.state.tolist())
        window = self._copied_window()
        store = LayerStore.resumed(self.config, self.blocks, self.sinks, window, counts, self.max_length)
        yield store
        if store.window.count > self.window[0].shape[2]:
            store.settle()
        kept = store.window.copied(self.window[0].shape[2])
        self.window[0].copy_(kept.keys)
        self.window[1].copy_(kept.values)
        self.state.copy_(torch.tensor(store.counts, dtype=torch.int32))
        self.length.fill_(store.length)

    @outside_inference_mode
    def _copied_window(self) -> KeyValue:
        """What an opened store works on: a view of it must outlive the writing back."""
        return self.window[0].clone(), self.window[1].clone()

    @outside_inference_mode
    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> StaticStore:
        """A store of the results of `function` on every tensor of the tokens (batch selection, device moves)."""
        return replace(
            self,
            blocks=self.blocks.map(function),
            sinks=(function(self.sinks[0]), function(self.sinks[1])),
            window=(function(self.window[0]), function(self.window[1])),
        )

    def overwrite(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """The same in place, for functions that keep shapes."""
        for tensor in (*self.blocks.tensors().values(), *self.sinks, *self.window):
            tensor.copy_(function(tensor))

    def reset(self) -> None:
        """Hold nothing; the tensors stay where they are."""
        self.state.zero_()
        self.length.zero_()

    @property
    def shaped(self) -> tuple[torch.Size, torch.Size]:
        """The shapes of all keys and values there is room for, `[B, Hkv, max_length, D]`."""
        keys, values = self.sinks
        return (
            torch.Size((*keys.shape[:2], self.max_length, keys.shape[3])),
            torch.Size((*values.shape[:2], self.max_length, values.shape[3])),
        )

    @property
    def batch_size(self) -> int:
        """Sequences held."""
        return self.blocks.scalars.shape[0]

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """Every tensor held, by the kind `memory_footprint` reports."""
        with_counts = [self.state, self.seen, self.length]
        kinds = stored_tensors(self.blocks, self.sinks, self.window)
        return {**kinds, "metadata": kinds["metadata"] + with_counts}
