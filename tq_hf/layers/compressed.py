"""One compressed layer of a cache: transformers' layer contract around a `LayerStore`."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from tq_kernels.format import LARGEST_SCALE, SMALLEST_SCALE
from tq_kernels.types import ChannelScales, KeyValue, PackedBlocks
from transformers import PreTrainedConfig

from ..compat import attention_implementation, cached_table, outside_inference_mode
from ..config import TurboQuantConfig
from ..ops import dispatch
from ..stores import graph_ops
from ..stores.base import LayerStore, widened
from ..stores.growing import GrowingStore
from ..stores.preallocated import PreallocatedStore
from ..tensors.layer import Counts, View
from . import advice
from .base import FullAttentionLayer, Probe, State, check_crop, rows_like
from .copies import copy_of, plain
from .handle import Handle, placeholders

CHANNEL_SCALES = ("key_channel_scales", "value_channel_scales")
"""Tensors in the file of a balanced layer."""


@cached_table
def _one_nan(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`[1, 1, 1, 1]`, of all layers of all caches: nobody writes to it."""
    return torch.full((1, 1, 1, 1), torch.nan, dtype=dtype, device=device)


class TurboQuantLayer(FullAttentionLayer):
    """A full-attention layer whose keys and values are held compressed.

    What `update` returns depends on who reads it. The attention function "turboquant" reads the packed store, by a
    handle on the keys and values (see `tq_hf.layers.handle`); a layer whose handle it has resolved returns lazy states,
    for as long as that model uses it. Any other attention reads dequantized states; so does a model whose keys do not
    reach attention as they left `update` (MLA latents, models without an attention interface).

    A compiled step goes by one bit: did the last eager call hand its states to attention and do nothing else with them?
    If so it returns placeholders, otherwise dequantized states.

    Args:
        config: What to compress to.
        max_cache_len: Tokens to preallocate for and never exceed, or `None`.
        model_config: The config of the model, held weakly. While it names another attention than "turboquant" the
            states of a prompt are not lazy: other attention functions may be compiled.
    """

    is_sliding = False
    supports_early_init = True

    def __init__(
        self,
        config: TurboQuantConfig,
        max_cache_len: int | None = None,
        model_config: PreTrainedConfig | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.config = config
        self.max_cache_len = max_cache_len
        # An attribute of the layer, not of the class: transformers compiles decoding if all layers have it.
        self.is_compileable = max_cache_len is not None
        self.store: LayerStore | None = None
        self.channel_scales: ChannelScales | None = None
        """Channel scales to use, if they were handed on."""
        self.needs_queries = True
        """Whether a prompt is encoded only when attention has shown its queries, or something else is asked of it."""
        self._model_config = None if model_config is None else weakref.ref(model_config)
        self.reader: weakref.ref[Any] | None = None
        """The config of the attention module that resolved a handle of this layer, held weakly; it names the attention
        function that the model uses now."""
        self.is_untouched = False
        """Whether the last eager call was seen to do nothing with the states but hand them to attention."""
        self._assigned: dict[str, torch.Tensor] | None = None
        """Keys or values that were assigned, until the others are."""
        self._had_gradients = False
        """Whether keys or values of an earlier call had gradients, which are lost."""
        self._edits = {"keys": 0, "values": 0, "all": 0}
        """Number of changes to what is held, but for tokens appended."""
        self.prompt: KeyValue | None = None
        """A first prompt as it came, while hooks of the attention module that read it run."""

    @property
    def keys(self) -> torch.Tensor | None:
        """All cached keys, dequantized: `[B, Hkv, T, Dk]`. A copy: an operation that writes into it assigns it, and
        encodes the blocks that changed, so write once rather than row by row. A copy that was made before the layer
        changed refuses writes; `clone()` one to write to a tensor of your own.

        Once both keys and values are assigned (kvpress prunes so), they replace all tokens: sinks, blocks and residual
        are made of them as of a prompt, with the channel scales there are; positions are the caller's. Blocks of 128
        rows that are as they were read, and where they were, keep their codes: `keys[:, :, :n]` is a `crop`. Other rows
        from packed blocks are quantized twice: shuffled, at 4 bits, the error of keys grew from 5.5% to 8.4% and that
        of values from 9.0% to 9.5%. Forward hooks of a module with "turboquant" attention read a first prompt as it
        came.

        Raises:
            ValueError: What is assigned does not fit. The layer is unchanged then.
        """
        return self._read("keys")

    @keys.setter
    def keys(self, value: torch.Tensor | None) -> None:
        self._assign("keys", value)

    @property
    def values(self) -> torch.Tensor | None:
        """All cached values, dequantized: `[B, Hkv, T, Dv]`; see `keys`."""
        return self._read("values")

    @values.setter
    def values(self, value: torch.Tensor | None) -> None:
        self._assign("values", value)

    def _read(self, name: str) -> torch.Tensor | None:
        if self._assigned is not None and name in self._assigned:
            return self._assigned[name]
        if self.store is None:
            return None
        states = self._held()[name == "values"]
        return states if torch.compiler.is_compiling() else copy_of(self, name, states)

    @outside_inference_mode
    def _held(self) -> KeyValue:
        """Copies of all keys and values held, those of a first prompt as it came while its hooks run."""
        assert self.store is not None
        if self.prompt is not None:
            keys, values = (x[:, :, : int(self.get_seq_length())].clone() for x in self.prompt)
            return keys, values
        return dispatch.dense(self.store.view())

    def stamp(self, name: str) -> Any:
        return self.store, self._edits[name], self._edits["all"], int(self.get_seq_length())

    def write(self, name: str, states: torch.Tensor) -> None:
        self._edits[name] += 1
        held = dict(zip(("keys", "values"), self._held(), strict=True)) | (self._assigned or {}) | {name: states}
        self._assigned = None
        assert self.store is not None
        self.store.assign(**held)
        if self.prompt is not None:
            self.prompt = held["keys"], held["values"]

    def _assign(self, name: str, value: torch.Tensor | None) -> None:
        """Hold keys and values that were assigned, once both were."""
        if value is None and vars(self).get("store") is None:  # as the base class begins
            return
        if self.store is None or not isinstance(value, torch.Tensor):
            came = f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise ValueError(
                f"`{name}` of a compressed layer that holds {int(self.get_seq_length())} tokens was assigned {came}. "
                "Assign `keys` and `values`, tensors, to a layer that holds tokens; `cache.update` and `cache.reset` "
                "fill and empty it."
            )
        self._edits["all"] += 1
        assigned, self._assigned = {**(self._assigned or {}), name: plain(value)}, None
        if len(assigned) == 1:
            self._assigned = assigned
        else:
            self.prompt = None
            self.store.assign(**assigned)

    def _assign_half(self, assigned: dict[str, torch.Tensor]) -> None:
        """Hold assigned keys, or values, beside those of the same tokens that are held."""
        self._assigned = None
        (name, states), other = *assigned.items(), "keys" if "values" in assigned else "values"
        if states.shape[2:3] != (int(self.get_seq_length()),):
            raise ValueError(
                f"`{name}` of a compressed layer were assigned, and `{other}` were not: it holds the tokens that it "
                f"held. Assign both, also `{other}` that stay (`layer.{other} = layer.{other}`)."
            )
        self.write(name, states)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor, prompt: bool = False) -> None:
        """Make the store for states like these, `[B, Hkv, S, D]` (S may be 0), or for this `prompt`."""
        store: LayerStore
        if self.max_cache_len is None:
            store = GrowingStore.allocate(self.config, key_states, value_states, prompt=prompt)
        else:
            store = PreallocatedStore.allocate(self.config, key_states, value_states, self.max_cache_len, prompt)
        if self.channel_scales is not None:
            store.set_scales(self.channel_scales)
        self.store = store
        model_config = None if self._model_config is None else self._model_config()
        # A config would look it up in Python.
        model_type = None if model_config is None else object.__getattribute__(model_config, "model_type")
        advice.warn_about_states(key_states, store.layout, model_type)
        self.dtype, self.device = key_states.dtype, key_states.device
        self._nan = _one_nan(key_states.dtype, key_states.device)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys `[B, Hkv, S, Dk]` and values `[B, Hkv, S, Dv]`; return what attention should be given.

        Raises:
            ValueError: The states do not fit the cache, or exceed `max_cache_len`. The cache is unchanged then.
        """
        if self._assigned is not None:
            self._assign_half(self._assigned)
        dtype = self.dtype if self.is_initialized else key_states.dtype
        if not key_states.dtype == value_states.dtype == dtype:
            key_states, value_states = widened(key_states, value_states, dtype)
        if self.store is None:
            view = self._begin(key_states, value_states)
        else:
            view = self.store.append(key_states, value_states, defer=self.needs_queries)
        if view.counts is None:
            return self._first_states(view, self._shown((key_states, value_states)))
        if torch.compiler.is_compiling():
            return self._compiled_states(view)
        handle = Handle(self, view)
        if torch.is_grad_enabled():
            handle.sources = self._lost(view, key_states, value_states)
        if self.reads_packed:
            return handle.lazy((self._nan, self._nan))
        if key_states.shape[2] == 1 and self._nan.is_cuda:
            advice.of_dequantized_steps(view.tensors.layout, self._may_read_packed())
        return handle.attached(handle.dense())

    def _lost(self, view: View, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What a later call would have gradients for and does not: its `states` that the store has copied, and a
        stand-in for those of earlier calls. A long call reads its own states, with their gradients."""
        sources = tuple(part for part in states if part.requires_grad)
        earlier, self._had_gradients = self._had_gradients, self._had_gradients or bool(sources)
        if earlier:
            return *sources, torch.zeros((), requires_grad=True)
        return sources if view.new is None else ()

    def _begin(self, keys: torch.Tensor, values: torch.Tensor) -> View:
        """Make a store and append the first tokens; no store if that fails."""
        several = keys.shape[2:3] > (1,)  # of a shape that is still to be checked
        self.lazy_initialization(keys, values, prompt=several)
        assert self.store is not None
        try:
            append = self.store.append_checked if several else self.store.append
            return append(keys, values, defer=self.needs_queries)
        except BaseException:
            self.store, self.is_initialized = None, False
            raise

    def _first_states(self, view: View, states: KeyValue) -> KeyValue:
        """What a first call returns: its own states."""
        keys, values = states
        handle = Handle(self, view, states)
        self._had_gradients = torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad)
        # Aliases: a handle on the very tensors that it holds would keep itself alive.
        if self._may_read_packed():
            return handle.lazy(states)
        return handle.attached((keys.view_as(keys), values.view_as(values)))

    def _compiled_states(self, view: View) -> KeyValue:
        """What a step within a graph returns."""
        if self.reads_packed and self.is_untouched:
            return placeholders(Handle(self, view), self._nan)
        return self.dense(view)

    def _may_read_packed(self) -> bool:
        """Whether the model's config names "turboquant", or nothing is known of it."""
        if self._model_config is None:
            return True
        return attention_implementation(self._model_config()) in ("turboquant", None)

    @property
    def reads_packed(self) -> bool:
        """Whether the attention function reads the packed store at the next step: a model that uses it now has
        resolved a handle of this layer."""
        reader = None if self.reader is None else self.reader()
        return reader is not None and attention_implementation(reader) == "turboquant"

    def shown_length(self, view: View) -> int:
        """Tokens that states for `view` must have."""
        return max(view.length, self.get_max_length()) if self.shows_room else view.length

    def dense(self, view: View) -> KeyValue:
        """The states `view` stands for, dequantized."""
        return self._shown(graph_ops.dense(view))

    def _shown(self, states: KeyValue) -> KeyValue:
        """`states`, with zeros for empty room if that is shown."""
        room = self.get_max_length() - states[0].shape[2]
        if not self.shows_room or room <= 0:
            return states
        keys, values = (torch.nn.functional.pad(x, (0, 0, 0, room)) for x in states)
        return keys, values

    def by_kind(self) -> dict[str, list[torch.Tensor]]:
        """Every tensor of the layer, by the kind `memory_footprint` reports; `{}` before the first update."""
        if self.store is None:
            return {}
        return self.store.by_kind()

    def bytes_in_16_bits(self, tokens: int | None = None) -> int:
        """Bytes of `tokens` tokens with 16-bit keys and values, by default of all that are cached."""
        if self.store is None:
            return 0
        tokens = int(self.store.length) if tokens is None else tokens
        return math.prod(self.store.blocks.scales.shape[:2]) * tokens * self.store.layout.dense_bytes

    state_fields: ClassVar[dict[str, type]] = {"counts": list, "scales_are_fixed": bool}

    def state(self) -> State:
        """See `tq_hf.layers.base`: what is used of the store, residual rows in the order of the tokens."""
        assert self.store is not None
        counts, tensors = self.store.export()
        return {"counts": list(counts), "scales_are_fixed": self.store.scales_are_fixed}, tensors

    def check_state(self, description: dict[str, Any], probe: Probe) -> dict[str, torch.Tensor]:
        (keys, values), config, numbers = probe.states, self.config, description["counts"]
        if len(numbers) != len(Counts._fields) or not all(type(n) is int and n >= 0 for n in numbers):
            raise ValueError(f"holds {str(numbers)[:64]}, not {', '.join(Counts._fields)}: damaged.")
        if description["scales_are_fixed"] and not config.balance:
            raise ValueError("has channel scales that are handed on, and is not balanced: damaged.")
        counts, layout = Counts(*numbers), config.layout(keys.shape[-1], values.shape[-1])
        packed = counts.blocks + counts.pending
        if (
            counts.sinks + counts.blocks * layout.tokens + counts.residual != probe.tokens
            or counts.pending * layout.tokens > counts.residual
            or counts.sinks > config.sink_tokens
            or (counts.sinks < config.sink_tokens and (packed or counts.residual))
            or (self.max_cache_len is not None and packed > config.num_blocks(self.max_cache_len))
        ):
            raise ValueError(f"holds {counts}, which is impossible for {probe.tokens} tokens: damaged.")
        blocks = PackedBlocks.allocate(layout, keys.shape[0], keys.shape[1], packed, torch.device("meta"))
        tensors = blocks.tensors()
        if config.balance:
            tensors |= zip(CHANNEL_SCALES, blocks.channel_scales, strict=True)
        tensors |= rows_like(probe.states, counts.sinks, "sink_")
        return tensors | rows_like(probe.states, counts.residual, "residual_")

    def load_state(self, description: dict[str, Any], tensors: dict[str, torch.Tensor], probe: Probe) -> None:
        for name in CHANNEL_SCALES if self.config.balance else ():
            if not bool(((tensors[name] >= SMALLEST_SCALE) & (tensors[name] <= LARGEST_SCALE)).all()):
                raise ValueError(f"has `{name}` that are not between {SMALLEST_SCALE} and {LARGEST_SCALE}: damaged.")
        if description["scales_are_fixed"]:
            # The same for every sequence; the next prompt may have more.
            self.channel_scales = ChannelScales(*(tensors[name][:1] for name in CHANNEL_SCALES))
        self.lazy_initialization(*probe.states)
        assert self.store is not None
        self.store.restore(Counts(*description["counts"]), tensors)
        # Else the next step would dequantize everything to find out.
        self.reader, self.is_untouched = probe.layer.reader, probe.layer.is_untouched

    def get_seq_length(self) -> int | torch.Tensor:  # type: ignore[override]
        """Tokens held; of a preallocated cache a tensor on its device, as for transformers' static layers."""
        return 0 if self.store is None else self.store.length

    def get_max_length(self) -> int:
        """`max_cache_len`, or -1 for none."""
        return -1 if self.max_cache_len is None else self.max_cache_len

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        """Sequences held, or -1 before the first update."""
        return -1 if self.store is None else self.store.tensors.batch_size

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens.

        Raises:
            ValueError: `tokens_to_remove` is positive.
        """
        tokens_to_remove = check_crop(tokens_to_remove)
        if tokens_to_remove == 0 or self.store is None:
            return
        self._edits["all"] += 1
        self.store.crop(-tokens_to_remove)

    def count_replayed(self, length: int) -> None:
        assert isinstance(self.store, PreallocatedStore)
        self.store.num_held = length

    def reset(self) -> None:
        """Forget everything. Memory is released and the next update may have any batch size; a preallocated cache keeps
        its memory and batch size instead, so that compiled graphs stay valid."""
        if self.store is not None:
            self.store = self.store.reset()
        self.is_initialized = self.store is not None
        self.reader, self.is_untouched, self.needs_queries = None, False, True
        self._assigned, self._had_gradients = None, False
        self._edits["all"] += 1

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.store is not None:
            self.store = self.store.map(function)  # another one, so copies of its states are of the past

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Take sequence `beam_idx[i]` to place i: in place, unless that makes more or fewer."""
        if self.batch_size != beam_idx.shape[0]:
            self.batch_select_indices(beam_idx)
        elif self.store is not None:
            self._edits["all"] += 1
            self.store.reorder(beam_idx)

    def offload(self) -> None:
        """Move the store to the CPU, unless a prompt is deferred until its queries are seen."""
        if self.store is not None and self.store.is_deferred:
            return
        self._map(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move an offloaded store back to its device."""
        self._map(lambda tensor: tensor.to(self.device, non_blocking=True))
