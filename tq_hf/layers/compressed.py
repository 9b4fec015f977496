"""One compressed layer of a cache: transformers' layer contract around a `LayerStore`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from tq_kernels.format import LARGEST_SCALE, NEAR, SMALLEST_SCALE
from transformers import PreTrainedConfig
from transformers.utils import logging

from ..codec.balance import key_gain
from ..compat import attention_implementation, is_capturing, outside_inference_mode
from ..config import TurboQuantConfig
from ..ops import dispatch
from ..stores.base import Counts, LayerStore, check_room, check_states, widened
from ..stores.growing import GrowingStore
from ..stores.preallocated import PreallocatedStore
from ..tensors.blocks import ChannelScales, KeyValue
from ..tensors.layer import StepView, StoreView
from . import advice
from .base import FileSizes, FullAttentionLayer, TensorSize, check_crop
from .handle import Handle, placeholders

logger = logging.get_logger(__name__)

SAMPLED_TOKENS = 128
"""So many of the newest tokens are looked at, if as many are dense."""
SMALLEST_RMS, LARGEST_RMS = 1e-6, 65504.0
"""A head whose vectors are outside has scales beyond fp16, or of so few bits that they count."""
CHANNEL_SCALES = ("key_channel_scales", "value_channel_scales")
"""Tensors of a balanced layer in a file."""
GREAT_SPREAD = 4.0
"""`key_gain` of keys alone that argues for keys of 8 bits; models that were measured have less than half of it."""


class FirstPrompt:
    """The first prompt of a cache.

    Args:
        auto: Whether "auto" chose the preset: then it is said, too, how far keys are from balanced.
    """

    def __init__(self, auto: bool) -> None:
        self.auto = auto
        self.seen: set[int] = set()
        """Layers that hold it."""

    @property
    def ready(self) -> bool:
        """Whether there is one, and the device may be waited for: not while a graph of its work is made."""
        return bool(self.seen) and not (torch.compiler.is_compiling() or is_capturing())

    def see(self, index: int, keys: torch.Tensor) -> None:
        """A layer is given keys `[B, Hkv, S, D]`, which count if they are numbers."""
        if not keys.is_meta:
            self.seen.add(index)

    def report(self, layers: Sequence[Any]) -> None:
        """Say what is to be said of these layers, which hold the prompt. Waits for the device."""
        seen = [(i, layers[i], sizes) for i in sorted(self.seen) if (sizes := _sizes(layers[i])) is not None]
        lost = [found for index, layer, sizes in seen if (found := _lost(index, layer, sizes))]
        if lost:
            more = f" So it is in {len(lost) - 1} more layers." if lost[1:] else ""
            logger.warning(lost[0] + more)
        if self.auto and seen:
            _report_balance(seen)


def _sizes(layer: TurboQuantLayer) -> KeyValue | None:
    """RMS of channels `[B, Hkv, D]` float32 of a layer's keys, about their mean, and of its values."""
    parts = layer.store.view().dense_parts if layer.store is not None else []
    if not parts or parts[-1][1][0].shape[2] == 0:
        return None
    k, v = (x[:, :, -SAMPLED_TOKENS:].float() for x in parts[-1][1])
    return k.std(2, correction=0), v.square().mean(2).sqrt()


def _lost(index: int, layer: TurboQuantLayer, sizes: KeyValue) -> str | None:
    """What is wrong with a layer that scales in fp16 cannot hold."""
    assert layer.store is not None
    for what, size, factor in zip(("Keys", "Values"), sizes, layer.store.blocks.channel_scales, strict=True):
        stored = (size.to(factor.device) * factor).square().mean(-1).sqrt()
        least, most = torch.stack([torch.where(stored > 0, stored, 1).min(), stored.max()]).tolist()
        if least < SMALLEST_RMS or most > LARGEST_RMS:
            advice = f"Leave the layer out (`skip_layers=({index},)`)"
            advice += "." if layer.config.balance else ", or balance it (`balance=True`)."
            return (
                f"{what} of layer {index} have an RMS of {least if least < SMALLEST_RMS else most:.1e} in some head, "
                f"beyond what 16-bit scales hold ({SMALLEST_RMS:.0e} to {LARGEST_RMS:,.0f}): they are stored wrong. "
                f"{advice}"
            )
    return None


def _report_balance(seen: Sequence[tuple[int, TurboQuantLayer, KeyValue]]) -> None:
    """Say how far keys are from balanced, by their channel scales or, where nobody showed queries, by themselves."""
    if not all(layer.needs_queries and layer.config.balance for _, layer, _ in seen):
        gain, index = max((key_gain(keys, torch.ones_like(keys)).max().item(), index) for index, _, (keys, _) in seen)
        if gain > GREAT_SPREAD and seen[0][1].config.key_bits < 8:
            logger.warning(
                f"preset='auto': channels of keys are unlike in layer {index} ({gain:.0f} times the energy of equal "
                "ones), and are not balanced, as nobody showed queries or `balance=False`. Consider preset='k8v4', or "
                "balance and attn_implementation='turboquant', which shows them."
            )
        return
    found, heads, far = [], 0, 0
    for index, layer, _ in seen:
        assert layer.store is not None
        factor = layer.store.blocks.channel_scales.keys.float().cpu()
        away = (factor / factor.median(-1, keepdim=True).values).log().abs().amax(-1).exp()  # [B, Hkv]
        heads, far = heads + away.numel(), far + int((away > NEAR).sum())
        found.append((away.max().item(), index, key_gain(1 / factor, factor).max().item()))
    times, index, gain = max(found)
    if far == 0:
        logger.info(f"preset='auto': keys are balanced, within {NEAR:g} times in all heads.")
        return
    logger.warning(
        f"preset='auto': keys of {far} of {heads} heads are not balanced, in layer {index} by {times:.0f} times (their "
        f"error would be {gain**0.5:.1f} times that of balanced ones). Their channels have channel scales, so "
        f"{seen[0][1].config.preset} serves as on other models; with `balance=False` take preset='k8v4'."
    )


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

    @property
    def keys(self) -> torch.Tensor | None:
        """All cached keys, dequantized: `[B, Hkv, T, Dk]`. A new tensor; writing to it changes nothing."""
        return None if self.store is None else dispatch.dense(self.store.view())[0]

    @keys.setter
    def keys(self, value: torch.Tensor | None) -> None:
        self._refuse("keys", value)

    @property
    def values(self) -> torch.Tensor | None:
        """All cached values, dequantized: `[B, Hkv, T, Dv]`. A new tensor; writing to it changes nothing."""
        return None if self.store is None else dispatch.dense(self.store.view())[1]

    @values.setter
    def values(self, value: torch.Tensor | None) -> None:
        self._refuse("values", value)

    def _refuse(self, name: str, value: torch.Tensor | None) -> None:
        """Raise a `ValueError` for states that somebody assigns (kvpress prunes so)."""
        if value is None and vars(self).get("store") is None:  # as the base class begins
            return
        came = f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise ValueError(
            f"`{name}` of a compressed layer cannot be assigned, and was given {came}: the layer holds codes, from "
            f"which its `{name}` are made at each look. Change what is held by methods of the cache (`update`, `crop`, "
            "`reorder_cache`, `batch_select_indices`, `reset`). What assigns states (kvpress prunes so) needs a "
            "`DynamicCache`, or the layer in `skip_layers`."
        )

    @outside_inference_mode
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make the store for states like these, `[B, Hkv, S, D]` (S may be 0)."""
        check_states(key_states, value_states)
        store: LayerStore
        if self.max_cache_len is None:
            store = GrowingStore.allocate(self.config, key_states, value_states)
        else:
            store = PreallocatedStore.allocate(self.config, key_states, value_states, self.max_cache_len)
        if self.channel_scales is not None:
            store.set_scales(self.channel_scales)
        self.store = store
        model_config = None if self._model_config is None else self._model_config()
        advice.warn_about_states(key_states, store.layout, getattr(model_config, "model_type", None))
        self.dtype, self.device = key_states.dtype, key_states.device
        self._nan = key_states.new_full((1, 1, 1, 1), torch.nan)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys `[B, Hkv, S, Dk]` and values `[B, Hkv, S, Dv]`; return what attention should be given.

        Raises:
            ValueError: The states do not fit the cache, or exceed `max_cache_len`. The cache is unchanged then.
        """
        held = self.dtype if self.is_initialized else key_states.dtype
        if not key_states.dtype == value_states.dtype == held:
            key_states, value_states = widened(key_states, value_states, held)
        if self.store is None:
            check_states(key_states, value_states)
            if self.max_cache_len is not None:
                check_room(key_states.shape[2], 0, self.max_cache_len)
            self.lazy_initialization(key_states, value_states)
        assert self.store is not None
        view = self.store.append(key_states, value_states, defer=self.needs_queries)
        # Never of a `StepView`: even a prompt of one token is read from a preallocated store.
        if isinstance(view, StoreView) and view.past_length == 0:
            return self._first_states(view, self._shown((key_states, value_states)))
        if torch.compiler.is_compiling():
            return self._compiled_states(view)
        handle = Handle(self, view)
        if self.reads_packed:
            return handle.lazy((self._nan, self._nan))
        if key_states.shape[2] == 1 and self._nan.is_cuda:
            advice.of_dequantized_steps(self.store.layout, self._may_read_packed())
        return handle.attached(self.dense(view))

    def _first_states(self, view: StoreView | StepView, states: KeyValue) -> KeyValue:
        """What a first call returns: its own states."""
        keys, values = states
        handle = Handle(self, view, states)
        # Aliases: a handle on the very tensors that it holds would keep itself alive.
        if self._may_read_packed():
            return handle.lazy(states)
        return handle.attached((keys.view_as(keys), values.view_as(values)))

    def _compiled_states(self, view: StoreView | StepView) -> KeyValue:
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

    def shown_length(self, view: StoreView | StepView) -> int:
        """Tokens that states for `view` must have."""
        return max(view.length, self.get_max_length()) if self.shows_room else view.length

    def dense(self, view: StoreView | StepView) -> KeyValue:
        """The states `view` stands for, dequantized."""
        assert self.store is not None
        return self._shown(self.store.dense(view))

    def _shown(self, states: KeyValue) -> KeyValue:
        """`states`, with zeros for empty room if that is shown."""
        room = self.get_max_length() - states[0].shape[2]
        if not self.shows_room or room <= 0:
            return states
        keys, values = (torch.nn.functional.pad(x, (0, 0, 0, room)) for x in states)
        return keys, values

    def by_kind(self) -> dict[str, list[torch.Tensor]]:
        """Every tensor held, by the kind `memory_footprint` reports; `{}` before the first update."""
        if self.store is None:
            return {}
        kinds = self.store.by_kind()
        return kinds | {"metadata": [*kinds["metadata"], self._nan]}

    state_fields = {"class": str, "counts": list, "reads_store": bool, "optional": list, "scales_are_fixed": bool}
    """Of `state`: `optional` are names of tensors that only some layers have."""

    def state(self, index: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """What a file holds of this layer: JSON, and tensors by name, rows in the order of the tokens.

        Raises:
            ValueError: It holds no tokens.
        """
        if self.store is None:
            raise ValueError(
                f"Layer {index} holds no tokens although others do; save a cache the whole model has filled."
            )
        counts, tensors = self.store.export()
        description = {
            "class": type(self).__name__,
            "counts": list(counts),
            "reads_store": self.reader is not None,
            "optional": [name for name in CHANNEL_SCALES if name in tensors],
            "scales_are_fixed": self.store.scales_are_fixed,
        }
        return description, tensors

    def _states_like(self, batch: int) -> KeyValue:
        """Keys and values `[batch, Hkv, 0, D]` as the model makes them."""
        assert self.store is not None
        keys, values = (part[:1, :, :0].expand(batch, -1, -1, -1) for part in self.store.sinks)
        return keys, values

    def expected_state(
        self, described: dict[str, Any], index: int, sizes: FileSizes, other: Any
    ) -> tuple[dict[str, TensorSize], dict[torch.device, int]]:
        """What a file must have of a layer of which this one, of the same model, holds a few tokens.

        Args:
            described: What the file says of it, its fields typed.
            index: Number of the layer.
            sizes: Of the whole file.
            other: Not needed here.

        Returns:
            Tensors by name, and the bytes that the layer takes.

        Raises:
            ValueError: The description is of no possible layer.
        """
        config, batch, tokens, _, room = sizes
        keys, values = self._states_like(batch)
        numbers = described["counts"]
        if len(numbers) != len(Counts._fields) or not all(type(n) is int and n >= 0 for n in numbers):
            raise ValueError(f"Layer {index} holds {str(numbers)[:64]}, not {', '.join(Counts._fields)}: damaged.")
        if described["optional"] != (list(CHANNEL_SCALES) if config.balance else []):
            raise ValueError(f"Layer {index} has unknown tensors {str(described['optional'])[:64]}: damaged.")
        if described["scales_are_fixed"] and not config.balance:
            raise ValueError(f"Layer {index} has channel scales that are handed on, and is not balanced: damaged.")
        counts = Counts(*numbers)
        layout = config.layout(keys.shape[-1], values.shape[-1])
        packed = counts.blocks + counts.pending
        if (
            counts.sinks + counts.blocks * layout.tokens + counts.residual != tokens
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
        shapes = {
            name: (tensor.dtype, [*tensor.shape[:2], packed, tensor.shape[3]])
            for name, tensor in store.blocks.tensors().items()
        }
        for part, rows in (("sink", counts.sinks), ("residual", counts.residual)):
            for name, like in (("keys", keys), ("values", values)):
                shapes[f"{part}_{name}"] = (like.dtype, [*like.shape[:2], rows, like.shape[3]])
        if config.balance:
            for name, like in zip(CHANNEL_SCALES, store.blocks.channel_scales, strict=True):
                shapes[name] = (like.dtype, list(like.shape))
        size = sum(tensor.nbytes for tensors in store.by_kind().values() for tensor in tensors)
        size += sum(prod(shape) * dtype.itemsize for dtype, shape in shapes.values())
        expected = {name: TensorSize(dtype, shape, shape) for name, (dtype, shape) in shapes.items()}
        return expected, {keys.device: size}

    def load_state(
        self, described: dict[str, Any], tensors: dict[str, torch.Tensor], sizes: FileSizes, probes: tuple[Any, Any]
    ) -> TurboQuantLayer:
        """Put what a file holds into this layer, which is empty. Returns it.

        Args:
            described: As of `expected_state`, which has passed it.
            tensors: The file's, by name.
            sizes: Of the whole file.
            probes: Layers of the model that hold a few tokens; the first is one like this.

        Raises:
            ValueError: A channel has a scale that none can have.
        """
        for name in described["optional"]:
            if not bool(((tensors[name] >= SMALLEST_SCALE) & (tensors[name] <= LARGEST_SCALE)).all()):
                raise ValueError(
                    f"Its `{name}` are not between {SMALLEST_SCALE} and {LARGEST_SCALE}: the file is damaged."
                )
        if described["scales_are_fixed"]:
            # The same for every sequence; the next prompt may have more.
            self.channel_scales = ChannelScales(*(tensors[name][:1] for name in CHANNEL_SCALES))
        self.lazy_initialization(*probes[0]._states_like(sizes.batch))
        assert self.store is not None
        self.store.restore(Counts(*described["counts"]), tensors)
        # Known already, so that the next step need not dequantize everything to find out.
        if described["reads_store"]:
            self.reader, self.is_untouched = probes[0].reader, probes[0].is_untouched
        return self

    def get_seq_length(self) -> int | torch.Tensor:  # type: ignore[override]
        """Tokens held; of a preallocated cache a tensor on its device, as for transformers' static layers."""
        return 0 if self.store is None else self.store.length

    def get_max_length(self) -> int:
        """`max_cache_len`, or -1 for none."""
        return -1 if self.max_cache_len is None else self.max_cache_len

    @property
    def batch_size(self) -> int:
        """Sequences held, or -1 before the first update."""
        return -1 if self.store is None else self.store.batch_size

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens.

        Raises:
            ValueError: `tokens_to_remove` is positive.
        """
        tokens_to_remove = check_crop(tokens_to_remove)
        if tokens_to_remove == 0 or self.store is None:
            return
        self.store.crop(-tokens_to_remove)

    def count_replayed(self, length: int) -> None:
        """See `FullAttentionLayer.count_replayed`."""
        assert isinstance(self.store, PreallocatedStore)
        self.store.num_held = length

    def reset(self) -> None:
        """Forget everything. Memory is released and the next update may have any batch size; a preallocated cache keeps
        its memory and batch size instead, so that compiled graphs stay valid."""
        if self.store is not None:
            self.store = self.store.reset()
        self.is_initialized = self.store is not None
        self.reader, self.is_untouched, self.needs_queries = None, False, True

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.store is not None:
            self.store = self.store.map(function)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Take sequence `beam_idx[i]` to place i: in place, unless that makes more or fewer."""
        if self.batch_size != beam_idx.shape[0]:
            self.batch_select_indices(beam_idx)
        elif self.store is not None:
            self.store.reorder(beam_idx)

    def offload(self) -> None:
        """Move the store to the CPU, unless a prompt is deferred until its queries are seen."""
        if self.store is not None and self.store.is_deferred:
            return
        self._map(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move an offloaded store back to its device."""
        self._map(lambda tensor: tensor.to(self.device, non_blocking=True))
