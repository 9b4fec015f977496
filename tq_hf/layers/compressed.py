"""One compressed layer of a cache: transformers' layer contract around a `LayerStore`."""

from __future__ import annotations

import math
import pickle
import weakref
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from tq_kernels.format import LARGEST_SCALE, SMALLEST_SCALE
from tq_kernels.types import ChannelScales, KeyValue, PackedBlocks
from transformers import PreTrainedConfig

from ..compat import attention_implementation, cached_table, outside_inference_mode, takes_attention_functions
from ..config import TurboQuantConfig
from ..ops import dispatch
from ..stores import graph_ops
from ..stores.assigned import assign
from ..stores.sizes import STEP_TOKENS, widened
from ..stores.store import LayerStore
from ..tensors.layer import Counts, View
from ..tensors.sinks import Padding, check_index
from . import advice
from .base import FullAttentionLayer, Probe, State, check_crop, rows_like
from .copies import Source, copy_of, plain
from .expansion import leave
from .handle import Handle

CHANNEL_SCALES = ("key_channel_scales", "value_channel_scales")
"""Tensors in the file of a balanced layer."""


@cached_table
def _one_nan(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One NaN, `[1, 1, 1, 1]`. All layers of all caches share it, and none writes to it."""
    return torch.full((1, 1, 1, 1), torch.nan, dtype=dtype, device=device)


class TurboQuantLayer(FullAttentionLayer):
    """A full-attention layer that stores keys and values compressed.

    `update` returns dequantized states, or lazy ones with a handle (see `tq_hf.layers.handle`) once the attention
    "turboquant" has resolved a handle of this layer, as long as the model uses it. A compiled step returns placeholders
    if the states of the last eager call were only passed to attention. Otherwise it returns dequantized states, which
    are not computed if attention reads packed latents instead (`tq_hf.layers.expansion`).

    Attributes besides the store and the channel scales:

        needs_queries   whether to defer encoding a prompt until attention passes its queries to `resolve`; False once
                        attention did not
        reader          config of the attention module that resolved a handle of this layer; names its function
        is_untouched    whether the last eager call only passed its states to attention
        expands         whether the last eager call expanded latents by `kv_b_proj`, in a known way
        _assigned       assigned keys without assigned values, or values without keys
        _had_gradients  whether states of an earlier call had gradients, which are lost
        _edits          numbers of changes of keys, values and both, appended tokens not counted
        prompt          first prompt, dense, while forward hooks of the attention module run
        _nan            one NaN, the base of lazy states

    Args:
        config: Preset of the layer.
        max_cache_len: Number of tokens to preallocate for and never exceed, or `None`.
        model_config: Config of the model (weak reference). While it names another attention function than
            "turboquant", the states of a prompt are not lazy: that function may be compiled.
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
        # Set per layer, not by class: transformers compiles decoding if it is True for all layers.
        self.is_compileable = max_cache_len is not None
        self.store: LayerStore | None = None
        self.channel_scales: ChannelScales | None = None
        """Fixed channel scales of every store of this layer; `None` to estimate them from the first prompt."""
        self.needs_queries = True
        self._model_config: Callable[[], Any] = (lambda: None) if model_config is None else weakref.ref(model_config)
        self.reader: weakref.ref[Any] | None = None
        self.is_untouched = self.expands = self._had_gradients = False
        self._assigned: dict[str, torch.Tensor] | None = None
        self._edits = {"keys": 0, "values": 0, "all": 0, "codes": 0}
        self.prompt: KeyValue | None = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise pickle.PicklingError(
            "A layer of a TurboQuantCache cannot be pickled. Write the cache to a file with `cache.save(path, model)`, "
            "and read it with `TurboQuantCache.load(path, model)`."
        )

    @property
    def keys(self) -> torch.Tensor | None:
        """All cached keys, dequantized: `[B, Hkv, T, Dk]`. A copy. An operation that writes into the copy also assigns
        the copy, and encodes the blocks that changed: write once, not row by row. A copy that is older than a change of
        the layer refuses writes; write into `clone()` of the copy to leave the cache as it is.

        Assigning both keys and values replaces all tokens (kvpress prunes in this way). Sinks, blocks and residual are
        filled as from a prompt, with the present channel scales; positions are the caller's. Blocks of 128 rows keep
        their codes if their content is unchanged, also where multiples of 128 rows before them are gone:
        `keys[:, :, :n]` is a `crop`. Other rows from packed blocks are quantized again each time (at 4 bits once: 8.4%
        error of keys, not 5.5%). Forward hooks of a module with "turboquant" attention read the exact first prompt.

        Raises:
            ValueError: An assigned tensor does not fit. The layer is unchanged then.
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
        states = self._copies()[name == "values"]
        return states if torch.compiler.is_dynamo_compiling() else copy_of(states, Source(self, name, states))

    @outside_inference_mode
    def _copies(self) -> KeyValue:
        """Copies of all keys and values; exact ones of a first prompt while hooks of attention run."""
        assert self.store is not None
        if self.prompt is not None:
            keys, values = (x[:, :, : int(self.get_seq_length())].clone() for x in self.prompt)
            return keys, values
        return _as_appended(view := self.store.view(), dispatch.dense(view))

    def stamp(self, name: str) -> Any:
        """Version of the keys or values (by `name`). Two versions are equal if the states did not change between."""
        return self.store, self._edits[name], self._edits["all"], int(self.get_seq_length())

    def write(self, name: str, states: torch.Tensor) -> None:
        """Replace the keys or values (by `name`) by `states`, and keep the others."""
        self._edits[name] += 1
        both = dict(zip(("keys", "values"), self._copies(), strict=True)) | (self._assigned or {}) | {name: states}
        self._assigned = None
        self._replace(both)
        if self.prompt is not None:
            self.prompt = both["keys"], both["values"]

    def _assign(self, name: str, value: torch.Tensor | None) -> None:
        """Replace all tokens once both keys and values were assigned."""
        if value is None and vars(self).get("store") is None:  # from the base class's `__init__`
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
            self._replace(assigned)

    def _replace(self, states: dict[str, torch.Tensor]) -> None:
        assert self.store is not None
        if assign(self.store, **states):
            self._edits["codes"] += 1
            if self._edits["codes"] == advice.OFTEN:
                advice.warn_about_encoding_again()

    def _assign_half(self, assigned: dict[str, torch.Tensor]) -> None:
        """Replace keys alone, or values alone, if they are of the same number of tokens."""
        self._assigned = None
        (name, states), other = *assigned.items(), "keys" if "values" in assigned else "values"
        if states.shape[2:3] != (int(self.get_seq_length()),):
            raise ValueError(
                f"`{name}` of a compressed layer were assigned, and `{other}` were not: its tokens are unchanged. "
                f"Assign both, also unchanged `{other}` (`layer.{other} = layer.{other}`)."
            )
        self.write(name, states)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor, prompt: bool = False) -> None:
        """Make a store for states like these, `[B, Hkv, S, D]` (S may be 0). `prompt`: whether they come next."""
        store = LayerStore.allocate(self.config, key_states, value_states, self.max_cache_len, prompt)
        if self.channel_scales is not None:
            store.set_scales(self.channel_scales)
        if self.record_past:
            store.take_steps_of(STEP_TOKENS)
        self.store = store
        model_config = self._model_config()
        # A config's own attribute lookup is slow Python.
        model_type = None if model_config is None else object.__getattribute__(model_config, "model_type")
        advice.warn_about_states(key_states, store.layout, model_type)
        self.dtype, self.device = key_states.dtype, key_states.device
        self._nan = _one_nan(key_states.dtype, key_states.device)
        self.is_initialized = True

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,
        padding: Padding | None = None,
        **kwargs: Any,
    ) -> KeyValue:
        """Store new keys `[B, Hkv, S, Dk]` and values `[B, Hkv, S, Dv]`; return keys and values for attention.

        `padding`, if known, is that of a call of several tokens: each row's first real tokens become its sinks.

        Raises:
            ValueError: The states do not fit the cache, or exceed `max_cache_len`. The cache is unchanged then.
        """
        if self._assigned is not None:
            self._assign_half(self._assigned)
        dtype = self.dtype if self.is_initialized else key_states.dtype
        if not key_states.dtype == value_states.dtype == dtype:
            key_states, value_states = widened(key_states, value_states, dtype)
        if self.store is None:
            view = self._begin(key_states, value_states, padding)
        else:
            several = self.is_compileable and key_states.shape[2:3] > (1,)  # dimensions are not checked yet
            is_step = several and self.takes_step(key_states.shape[2])
            view = self.store.append(key_states, value_states, self.needs_queries, padding, is_step)
        if view.counts is None:
            return self._first_states(view, self._with_empty_rows((key_states, value_states)))
        handle = Handle(self, view)
        if torch.compiler.is_dynamo_compiling():
            if self.reads_packed and self.is_untouched:  # expanded, so without memory; no operation reads them
                return handle.attached((self._nan.expand(handle.shape(0)), self._nan.expand(handle.shape(1))))
            if self.reads_packed and self.expands:
                leave(handle)
            return self.dense(view)
        if torch.is_grad_enabled():
            handle.sources = self._lost(view, key_states, value_states)
        if self.reads_packed or (view.past_length == 0 and self._may_read_packed()):
            return handle.lazy((self._nan, self._nan))
        if key_states.shape[2] == 1:
            self._warn_about_dequantized_steps(view)
        return handle.attached(handle.dense())

    def allocate_for(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """`update` of a cache on the meta device, which only allocates: for estimates."""
        if self.store is None:
            self.lazy_initialization(key_states, value_states)
        assert self.store is not None
        if self.max_cache_len is None:  # a preallocated layer has allocated everything
            self.store.scales_are_fixed = True  # meta tensors have no values to estimate scales from
            self.store.append(key_states, value_states)
            self.store.settle()  # in place of attention

    def _lost(self, view: View, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Tensors without their gradients in a later call: its `states`, which the store has copied, and one tensor
        that represents the states of earlier calls. A long call reads its own states, with their gradients."""
        sources = tuple(part for part in states if part.requires_grad)
        earlier, self._had_gradients = self._had_gradients, self._had_gradients or bool(sources)
        if earlier:
            return *sources, torch.zeros((), requires_grad=True)
        return sources if view.new is None else ()

    def _begin(self, keys: torch.Tensor, values: torch.Tensor, padding: Padding | None) -> View:
        """Make a store and append the first tokens. If that fails, the layer has no store."""
        several = keys.shape[2:3] > (1,)  # a slice: the number of dimensions is not checked yet
        self.lazy_initialization(keys, values, prompt=several)
        assert self.store is not None
        try:
            return self.store.append(keys, values, self.needs_queries, padding)
        except BaseException:
            self.store, self.is_initialized = None, False
            raise

    def _first_states(self, view: View, states: KeyValue) -> KeyValue:
        """States that a first call returns: its own, exact."""
        keys, values = states
        handle = Handle(self, view, states)
        self._had_gradients = torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad)
        # Aliases, because the handle refers to `keys` and `values`: a handle on these tensors would be a cycle.
        if self._may_read_packed():
            return handle.lazy(states)
        self._warn_about_dequantized_steps(view)
        return handle.attached((keys.view_as(keys), values.view_as(values)))

    def _warn_about_dequantized_steps(self, view: View) -> None:
        config = self._model_config()
        chosen = config is None or takes_attention_functions(type(config))
        advice.warn_about_dequantized_steps(view.tensors.layout, chosen and not self._may_read_packed())

    def _may_read_packed(self) -> bool:
        """Whether the model's config names "turboquant" or no attention function, or is unknown."""
        return attention_implementation(self._model_config()) in ("turboquant", None)

    @property
    def reads_packed(self) -> bool:
        """Whether attention reads the packed store in the next step: the model's attention function is "turboquant",
        and has resolved a handle of this layer."""
        reader = None if self.reader is None else self.reader()
        return reader is not None and attention_implementation(reader) == "turboquant"

    def dense(self, view: View) -> KeyValue:
        """Dequantize the states of `view`."""
        return self._with_empty_rows(_as_appended(view, graph_ops.dense(view)))

    def _with_empty_rows(self, states: KeyValue) -> KeyValue:
        """Pad `states` with zeros to `max_cache_len` rows, if this layer returns empty rows."""
        room = self.get_max_length() - states[0].shape[2]
        if not self.returns_empty_rows or room <= 0:
            return states
        keys, values = (torch.nn.functional.pad(x, (0, 0, 0, room)) for x in states)
        return keys, values

    def by_kind(self) -> dict[str, list[torch.Tensor]]:
        """All tensors of the layer, by their kind in `memory_footprint`."""
        kinds: dict[str, list[torch.Tensor]] = {"metadata": []} if self.store is None else self.store.by_kind()
        kinds["metadata"] += self.channel_scales or ()
        return kinds

    def bytes_in_16_bits(self, tokens: int | None = None) -> int:
        """Bytes of `tokens` tokens with 16-bit keys and values; by default of all cached tokens."""
        if self.store is None:
            return 0
        tokens = int(self.store.length) if tokens is None else tokens
        return math.prod(self.store.blocks.data.shape[:2]) * tokens * self.store.layout.dense_bytes

    state_fields: ClassVar[dict[str, type]] = {"counts": list, "scales_are_fixed": bool, "is_padded": bool}

    def state(self) -> State:
        """Used part of the store, with residual rows in the order of tokens; see `tq_hf.layers.base`."""
        assert self.store is not None
        counts, tensors = self.store.export()
        fields = {"scales_are_fixed": self.store.scales_are_fixed, "is_padded": "sink_index" in tensors}
        return {"counts": list(counts), **fields}, tensors

    def check_state(self, description: dict[str, Any], probe: Probe) -> dict[str, torch.Tensor]:
        (keys, values), config, numbers = probe.states, self.config, description["counts"]
        if len(numbers) != len(Counts._fields) or not all(type(n) is int and n >= 0 for n in numbers):
            raise ValueError(f"holds {str(numbers)[:64]}, not {', '.join(Counts._fields)}: damaged.")
        if description["scales_are_fixed"] and not config.balance:
            raise ValueError("has fixed channel scales, and is not balanced: damaged.")
        counts, layout = Counts(*numbers), config.layout(keys.shape[-1], values.shape[-1])
        packed = counts.blocks + counts.pending
        if (
            counts.tokens != probe.tokens
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
        if description["is_padded"]:
            tensors["sink_index"] = torch.empty(keys.shape[0], config.sink_tokens, dtype=torch.int64, device="meta")
        tensors |= rows_like(probe.states, counts.sinks, "sink_")
        return tensors | rows_like(probe.states, counts.residual, "residual_")

    def load_state(self, description: dict[str, Any], tensors: dict[str, torch.Tensor], probe: Probe) -> None:
        for name in CHANNEL_SCALES if self.config.balance else ():
            sizes = tensors[name].abs() if name == CHANNEL_SCALES[0] else tensors[name]
            if not bool(((sizes >= SMALLEST_SCALE) & (sizes <= LARGEST_SCALE)).all()):
                raise ValueError(f"has `{name}` that are not between {SMALLEST_SCALE} and {LARGEST_SCALE}: damaged.")
        if self.config.balance:
            scales = ChannelScales(*(tensors[name] for name in CHANNEL_SCALES))
            if not scales.has_marks():
                raise ValueError(f"has `{CHANNEL_SCALES[0]}` with another number of loud channels in a head: damaged.")
            # One row serves: fixed scales are the same for every sequence, and the next batch may be larger.
            self.channel_scales = scales.map(lambda x: x[:1]) if description["scales_are_fixed"] else None
        if description["is_padded"]:
            check_index(tensors["sink_index"], probe.tokens)
        self.lazy_initialization(*probe.states)
        assert self.store is not None
        self.store.restore(Counts(*description["counts"]), tensors)
        # Without them the first step would dequantize the whole cache.
        self.reader, self.is_untouched = probe.layer.reader, probe.layer.is_untouched
        self.expands = probe.layer.expands

    def activate_past_recording(self) -> None:
        super().activate_past_recording()
        if self.store is not None:
            self.store.take_steps_of(STEP_TOKENS)

    def get_seq_length(self) -> int | torch.Tensor:  # type: ignore[override]
        """Number of tokens; for a preallocated cache a tensor on its device, as in transformers' static layers."""
        return 0 if self.store is None else self.store.length

    def get_max_length(self) -> int:
        return -1 if self.max_cache_len is None else self.max_cache_len

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        """Number of sequences, or -1 before the first update."""
        return -1 if self.store is None else self.store.tensors.batch_size

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens. Raise `ValueError` for a positive number."""
        tokens_to_remove = check_crop(tokens_to_remove)
        if tokens_to_remove == 0 or self.store is None:
            return
        self._edits["all"] += 1
        self.store.crop(-tokens_to_remove)

    @property
    def num_tokens(self) -> int | None:
        """Number of tokens of a preallocated layer, counted on the host."""
        return 0 if self.store is None else self.store.num_tokens

    @num_tokens.setter
    def num_tokens(self, tokens: int | None) -> None:
        assert self.store is not None
        self.store.num_tokens = tokens

    def reset(self) -> None:
        """Remove all tokens. A growing cache frees its memory, and the next update may have any batch size. A
        preallocated cache keeps its memory and batch size, so that compiled graphs stay valid."""
        if self.store is not None:
            self.store = self.store.reset()
        self.is_initialized = self.store is not None
        self.reader, self.is_untouched, self.expands, self.needs_queries = None, False, False, True
        self._assigned, self._had_gradients = None, False
        self._edits["all"] += 1

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.store is not None:
            self.store = self.store.map(function)  # a new store, so older copies refuse writes

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Move sequence `beam_idx[i]` to index i: in place, unless the number of sequences changes."""
        if self.batch_size != beam_idx.shape[0]:
            self.batch_select_indices(beam_idx)
        elif self.store is not None:
            self._edits["all"] += 1
            self.store.reorder(beam_idx)

    def offload(self) -> None:
        """Move the store to the CPU, unless the encoding of a prompt is deferred."""
        if self.store is not None and not self.store.is_deferred:
            super().offload()


def compressed(layers: Iterable[Any]) -> dict[int, TurboQuantLayer]:
    """The compressed layers of a cache, by index."""
    return {index: layer for index, layer in enumerate(layers) if isinstance(layer, TurboQuantLayer)}


def _as_appended(view: View, states: KeyValue) -> KeyValue:
    """Dense states of `view` in the order in which the tokens came. A first call has its states in this order."""
    order = None if view.counts is None else view.tensors.order
    return states if order is None else order.swapped_states(states)
