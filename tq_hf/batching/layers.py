"""Layers of a model over pages: the attention function that transformers registers as "turboquant_paged", and linear
layers, whose states of a request are in a page of the pool.

No mask function is registered under this name. Otherwise transformers would build a mask of all tokens by all tokens at
every step.

A linear layer reads one text from its start, and the engine passes the new tokens of all requests as one row. So during
a session `forward` of each linear module is replaced by a function that takes the row apart. That function calls the
module's own `forward` with the requests of equally many new tokens as a batch `[B, n, hidden_size]`, and with a cache
of their states (`RequestStates`). In a step of one new token per request, that is one call.

Layers take the pages from the step that their thread runs (`running`). A compiled layer calls the operator
`tq_hf::attend_pages`, or `tq_hf::read_states` and `tq_hf::write_states` around its module. These operators write to
pages that are not inputs of the graph.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any, cast

import torch
from tq_kernels.types import AttentionOptions, Tokens
from transformers import AttentionInterface
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager
from transformers.generation.continuous_batching.requests import RequestState

from ..attention import UNSUPPORTED
from ..compat import outside_inference_mode
from ..layers.base import Substitute
from ..layers.expansion import up_projection
from ..prepared import LAYER
from .allocators import StateName, StateShapes, linear_layers
from .cache import TurboQuantPagedCache

NAME = "turboquant_paged"


class Running(threading.local):
    """The step that this thread runs: its pages, which no operator reads or writes where a thread only compiles."""

    def __init__(self) -> None:  # torch.compile would read attributes of the class, and not the thread
        self.pages: TurboQuantPagedCache | None = None
        self.only_compiles = False

    @contextmanager
    def step(self, pages: TurboQuantPagedCache, only_compiles: bool = False) -> Iterator[None]:
        """Context of a step over these pages."""
        self.pages, self.only_compiles = pages, only_compiles
        try:
            yield
        finally:
            self.pages = None


running = Running()


def pages_of_step() -> TurboQuantPagedCache:
    """Return the cache of the step that this thread runs. Raise `ValueError` outside of a step."""
    if running.pages is None:
        raise ValueError(
            "This model serves a continuous batching manager of tq_hf, so it takes no other calls. Stop the manager "
            "first (`manager.stop()`, or leave the `with`): the model then has its own attention again."
        )
    return running.pages


def turboquant_paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention `[1, T, Hq, D]` of the new tokens of many requests over their pages and over themselves.

    Args:
        module: Attention module.
        query: `[1, Hq, T, D]`, the new tokens of all requests in sequence.
        key, value: `[1, Hkv, T, D]`; with latents keys `[1, Hq, T, Dk]` and values `[1, Hq, T, Dv]` of the new tokens.
        attention_mask, dropout: Not supported. The lengths of requests are the mask.
        scaling: Factor of the logits, by default `D ** -0.5`.
        **kwargs: The model's fields of `AttentionOptions` (without `position_bias`).

    Raises:
        ValueError: The call is not a step of continuous batching, or needs an option that pages do not support.
    """
    cache = pages_of_step()
    names = [name for name in UNSUPPORTED if kwargs.get(name) is not None]
    if names or dropout or attention_mask is not None:
        what = ", ".join(names) or ("dropout" if dropout else "an attention mask")
        raise ValueError(
            f"{type(module).__name__} attends with {what}, which continuous batching on packed pages does not compute. "
            "Use `generate()` with a `TurboQuantCache`."
        )
    options = AttentionOptions.of_call(query.shape[-1] ** -0.5 if scaling is None else scaling, True, kwargs)
    expanded, weight = (key, value), None
    if cache.holds_latents:
        (key, value), weight = cache.take_latents(), up_projection(module)
    if torch.compiler.is_dynamo_compiling():
        tensors = [query, key, value, module.__dict__[LAYER]]
        return attend_pages(tensors, weight, options.s_aux, options.scaling, options.softcap), None
    return cache.layer_step(cast(int, module.layer_idx), Tokens(query, key, value), options, weight, expanded), None


@torch.library.custom_op("tq_hf::attend_pages", mutates_args=())
def attend_pages(
    tensors: list[torch.Tensor],
    weight: torch.Tensor | None,
    s_aux: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """Call `TurboQuantPagedCache.layer_step` of the running step. `tensors` are queries, keys (or latents), values (or
    rotary keys) and the module's `LAYER`."""
    if running.only_compiles:
        return _empty_output(tensors, weight).zero_()
    *states, layer = tensors
    options = AttentionOptions(scaling, True, softcap, s_aux)
    return pages_of_step().layer_step(int(layer[0]), Tokens(*states), options, weight).contiguous()


@attend_pages.register_fake
def _empty_output(tensors: list[torch.Tensor], weight: torch.Tensor | None, *arguments: Any) -> torch.Tensor:
    batch, heads, tokens, dim = tensors[0].shape
    if weight is not None:
        dim = weight.shape[0] // heads - (dim - tensors[2].shape[3])
    return tensors[0].new_empty(batch, tokens, heads, dim)


AttentionInterface.register(NAME, turboquant_paged_attention)


States = dict[StateName, torch.Tensor]


class RequestStates:
    """Cache of one linear layer for one call of its module: states `[B, ...]` of the requests of the call, by name. A
    module that finds none begins a text."""

    def __init__(self, states: States) -> None:
        self.states = states

    def is_recording_past(self, layer_idx: int) -> bool:
        return False  # tokens are never taken back

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.states.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.states.get(("recurrent", state_idx))

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Append inputs `[B, channels, n]` of the convolution. Returns the inputs before, and the new ones."""
        before = self.get_conv_state(layer_idx, state_idx)
        if before is None:
            before = conv_states.new_zeros(*conv_states.shape[:-1], conv_kernel_size or conv_states.shape[-1])
        inputs = torch.cat([before, conv_states], -1)
        self.states["conv", state_idx] = inputs[..., -before.shape[-1] :]
        return inputs

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        self.states["recurrent", state_idx] = recurrent_states
        return recurrent_states


class StateOffloading(Substitute, OffloadingManager):
    """Offloading of preempted requests for models with linear layers. A preempted request of asynchronous batching may
    have a token in flight. transformers discards that token and reads the one before it a second time. Keys and values
    do not change by that, but a state does. So the request is not offloaded and starts anew."""

    def _offload_to_cpu(self, victims: list[RequestState], victim_block_tables: dict[str, Any]) -> set[str]:
        lengths = (len(state.initial_tokens) + len(state.generated_tokens) for state in victims)
        settled = [state for state, length in zip(victims, lengths, strict=True) if state.position_offset < length]
        return super()._offload_to_cpu(settled, victim_block_tables)


class LinearLayers:
    """Linear modules of a model, which take the rows of a step between `switch` and `restore`."""

    def __init__(self, model: Any) -> None:
        layers, found = linear_layers(model.config.get_text_config()), {}
        for module in model.get_decoder().modules() if layers else ():
            layer, parameters = getattr(module, "layer_idx", None), signature(type(module).forward).parameters
            if layer in layers and (name := next(iter({"cache", "cache_params"} & parameters.keys()), None)):
                found[layer] = layer, module, name  # the innermost module comes last
        self.modules: list[tuple[int, Any, str]] = [found[layer] for layer in sorted(found)]
        """Index of a layer, its module, and the name of the cache among the module's parameters."""
        self.like = torch.empty(0, model.config.get_text_config().hidden_size, dtype=model.dtype, device=model.device)
        self.shapes: StateShapes = {}
        """Filled by a probe."""
        self.peaks = 0, 0
        """Bytes of a layer at its peak, measured on a GPU: per new token of a step, and per request with one."""
        self._own: list[Any] | None = None
        """`forward` of each instance before `switch`: accelerate's hooks replace it, too."""

    def switch(self) -> None:
        if self._own is None:
            self._own = [vars(module).get("forward") for _, module, _ in self.modules]
            for layer, module, parameter in self.modules:
                module.forward = _forward_of_rows(layer, module, parameter, self._zeros(layer, 0))

    def restore(self) -> None:
        for (_, module, _), own in zip(self.modules, self._own or (), strict=False):
            del module.forward
            if own is not None:
                module.forward = own
        self._own = None

    @outside_inference_mode
    def measure(self) -> None:
        """On a GPU, measure the memory of one module, with states of these `shapes`."""
        device, peaks = self.like.device, list[int]()
        for layer, module, parameter in self.modules[:1] if device.type == "cuda" else ():
            for requests, tokens in (1, 512), (16, 1):
                before = torch.cuda.memory_allocated(device)
                torch.cuda.reset_peak_memory_stats(device)
                row = self.like.new_zeros(requests, tokens, self.like.shape[-1])
                module(row, **{parameter: RequestStates(self._zeros(layer, requests))})
                peaks.append(-(-(torch.cuda.max_memory_allocated(device) - before) // (requests * tokens)))
        self.peaks = (peaks[0], peaks[1]) if peaks else (0, 0)

    def _zeros(self, layer: int, requests: int) -> States:
        """States of this number of requests; none before a probe."""
        shapes = self.shapes.get(layer, {}).items()
        return {name: self.like.new_zeros(requests, *shape, dtype=dtype) for name, (shape, dtype) in shapes}


def _forward_of_rows(layer: int, module: Any, parameter: str, like: States) -> Callable:
    """`forward` of a linear module for the row of a step. `like` has an empty tensor `[0, ...]` per state."""
    own = module.forward

    def run(hidden_states: torch.Tensor, states: States) -> torch.Tensor:
        """Read new tokens `[B, n, hidden_size]` of requests with the states `[B, ...]`, which are replaced."""
        return own(hidden_states, **{parameter: RequestStates(states)})

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not torch.compiler.is_dynamo_compiling():  # a step with prompts never is
            return _step(layer, run, hidden_states)
        number = vars(module)[LAYER]
        read = read_states(hidden_states, list(like.values()), number)
        states = dict(zip(like, read, strict=True))
        out = run(hidden_states.transpose(0, 1), states)
        return write_states(out, [states[name] for name in like], number).transpose(0, 1)

    return forward


def _step(layer: int, run: Callable, hidden_states: torch.Tensor) -> torch.Tensor:
    """Output `[1, T, hidden_size]` of a linear layer for the new tokens of all requests."""
    allocator, step = pages_of_step().state_step(layer)
    if step.rows is None:
        states = allocator.read(layer, step.sources)
        out = run(hidden_states.transpose(0, 1), states)
        allocator.write(layer, step.targets, states)
        return out.transpose(0, 1)
    out = torch.zeros_like(hidden_states)
    for requests, rows in step.rows:
        states = allocator.read(layer, step.sources[requests])
        out[0, rows] = run(hidden_states[0, rows], states)
        allocator.write(layer, step.targets[requests], states)
    return out


@torch.library.custom_op("tq_hf::read_states", mutates_args=())
def read_states(hidden_states: torch.Tensor, like: list[torch.Tensor], layer: torch.Tensor) -> list[torch.Tensor]:
    """Read the states `[B, ...]` of a linear layer in a step of one new token per request.

    Args:
        hidden_states: `[1, B, hidden_size]`. Without them, all layers could be read before the first is written.
        like: A tensor `[0, ...]` per state, with its shape and dtype.
        layer: Index of the layer, `[]` on the CPU.
    """
    if running.only_compiles:
        return [states.zero_() for states in _read(hidden_states, like)]
    allocator, step = pages_of_step().state_step(int(layer[0]))
    return list(allocator.read(int(layer[0]), step.sources).values())


@read_states.register_fake
def _read(hidden_states: torch.Tensor, like: list[torch.Tensor], *arguments: Any) -> list[torch.Tensor]:
    return [hidden_states.new_empty(hidden_states.shape[1], *x.shape[1:], dtype=x.dtype) for x in like]


@torch.library.custom_op("tq_hf::write_states", mutates_args=())
def write_states(out: torch.Tensor, states: list[torch.Tensor], layer: torch.Tensor) -> torch.Tensor:
    """Write the states `[B, ...]` that `read_states` has read before. Returns a copy of `out`, the output of the layer,
    so that no compiler drops the call."""
    if not running.only_compiles:
        allocator, step = pages_of_step().state_step(int(layer[0]))
        named = dict(zip(allocator.shapes[int(layer[0])], states, strict=True))
        allocator.write(int(layer[0]), step.targets, named)
    return out.clone()


@write_states.register_fake
def _written(out: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return torch.empty_like(out)
