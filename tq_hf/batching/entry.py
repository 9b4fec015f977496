"""Public API of batching on packed pages: the wrapper `TurboQuantBatching`, the context `continuous_batching`."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, ContinuousMixin, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.utils import WorkloadHints
from transformers.utils import logging

from ..balance import Balance
from ..compat import check_required_names
from ..config import TurboQuantConfig
from .checks import check_model, pages_config, warn_about_graph_mixing
from .manager import TurboQuantBatchingManager
from .options import check_refused, number, options_of, prompt_ids, shown, with_defaults
from .prefixes import PrefixFolder, checked
from .requests import named, one_line

logger = logging.get_logger(__name__)

CACHED_MANAGER = "_cached_continuous_batching_manager"
"""Attribute of a model under which transformers keeps a manager for the next session."""


class TurboQuantBatching(ContinuousMixin):
    """transformers' continuous batching on packed pages.

    ```python
    batching = TurboQuantBatching(model, "4bit_nc")
    answers = batching.generate_batch([tokenizer(text).input_ids for text in texts], max_new_tokens=256)
    ```

    Methods are those of transformers, such as `generate_batch` and `continuous_batching_context_manager`. Answers equal
    those of `generate()` on a `TurboQuantCache` with the same channel scales, except that a shared prefix, and earlier
    parts of a prompt that takes several steps, are read packed. Pages hold full attention (packed), and sliding windows
    or the states of linear layers (dense). "Many requests at once" in `examples/README.md` has compile levels,
    schedulers, the size of the pool, and `sleep`.

    A model with sliding or linear layers shares no prefixes. A prompt longer than the model's positions fails with a
    sentence as its `error`; an answer ends with the last position. That is the last one of the training where rotary
    embeddings are of the kind dynamic or longrope: beyond, requests would change each other's answers.

    Args:
        model: A decoder, or a wrapper of one (PEFT).
        preset: Name of a preset (see `tq_hf.PRESETS`), or a `TurboQuantConfig`. Layers in `skip_layers` are computed in
            torch, request by request, without CUDA graphs: no kernel reads their pages yet.
        balance: Per-channel scales: `True` finds them by a short run of the model before the first request; `False`
            uses none; a `Balance` brings its own; `None` does as the preset says.
        tokenizer: Tokenizer of the model, for `stop_strings`, `response_format` and `structured_outputs`.
        prefix_cache: A folder, or a `PrefixFolder`, in which pages outlive the process: of a prompt that begins as
            earlier requests did, only the rest is read.
        **overrides: Fields of `TurboQuantConfig` that replace the preset's.

    Raises:
        ValueError: The model has layers that pages cannot hold, or an option does not exist or is outside its range.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        preset: str | TurboQuantConfig = "4bit_nc",
        *,
        balance: bool | Balance | None = None,
        tokenizer: Any = None,
        prefix_cache: str | os.PathLike[str] | PrefixFolder | None = None,
        **overrides: Any,
    ) -> None:
        check_required_names("continuous batching", "Use `generate()` with a `TurboQuantCache`.")
        if isinstance(balance, bool):
            overrides["balance"] = balance
        elif not (balance is None or isinstance(balance, Balance)):
            raise ValueError(f"`balance` is {balance!r}; it must be True or False, or a `Balance`.")
        self.model = inner_model(model)
        self.config = pages_config(preset, **overrides)
        if not (tokenizer is None or hasattr(tokenizer, "decode")):
            raise ValueError(f"`tokenizer` is {shown(tokenizer)}; it must be a tokenizer of transformers.")
        self.tokenizer = tokenizer
        self._balance = balance if isinstance(balance, Balance) else None
        if self._balance and not self.config.balance:
            raise ValueError("`balance` has channel scales, and the preset has `balance=False`: leave out either.")
        check_model(self.model, self.config)
        self.prefix_cache = None if prefix_cache is None else checked(prefix_cache, self.model)
        warn_about_graph_mixing(self.model)

    def __repr__(self) -> str:
        bits = self.config.preset or f"key_bits={self.config.key_bits}, value_bits={self.config.value_bits}"
        return f"TurboQuantBatching({type(self.model).__name__}, {bits})"

    @property
    def generation_config(self) -> GenerationConfig:  # type: ignore[override]
        return self.model.generation_config

    @property
    def balance(self) -> Balance | None:
        """Channel scales, measured at the first access; `None` if channels are not balanced."""
        if self._balance is None and self.config.balance:
            self.model.eval()  # the manager does the same
            self._balance = Balance.of(self.model)
        return self._balance

    def generate_batch(
        self, inputs: list[list[int]], generation_config: GenerationConfig | None = None, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Generate answers to prompts.

        Args:
            inputs: Prompts, each a list or a tensor `[T]` of token ids.
            generation_config: Options of all answers. Unset fields are those of the model's generation config. Fields
                are applied or refused as "Options of a request" in `examples/README.md` lists them.
            *args, **kwargs: Arguments of transformers' method.

        Returns:
            Outputs by request id, in the order of prompts. `error` is `None`, or the reason why the request failed.
            `generated_tokens` of a failed request are the tokens before the failure, often none. One line in the log
            lists all failed requests.

        Raises:
            ValueError: A prompt is not a list of the model's tokens; or an option is unknown to transformers, which
                would ignore it, or would change answers and is not applied.
        """
        known = signature(super().generate_batch).parameters.keys() | {"max_new_tokens"}
        if unknown := sorted(kwargs.keys() - known):
            raise ValueError(
                f"`generate_batch` takes no {', '.join(unknown)}. Say how to decode in `generation_config`: greedily, "
                "or by sampling."
            )
        generation_config = with_defaults(generation_config, self.generation_config)
        if (limit := kwargs.pop("max_new_tokens", None)) is not None:
            generation_config.max_new_tokens = limit
        # transformers logs what a request is refused for, and returns no answers.
        vocabulary = self.model.config.get_text_config().vocab_size
        if not isinstance(inputs, Iterable):
            raise ValueError(f"`inputs` is {shown(inputs)}; it must be a list of prompts, each a list of token ids.")
        inputs = [prompt_ids(prompt, vocabulary) for prompt in inputs]
        options_of(generation_config, prompt=max(map(len, inputs), default=0), vocabulary=vocabulary)
        with ExitStack() as at_end:
            # transformers collects garbage at the end of a session. To look at all objects that there are before takes
            # longer than an answer of few tokens. Python 3.12 begins with some hundred frozen objects.
            if gc.get_freeze_count() < 10_000:
                gc.freeze()
                at_end.callback(gc.unfreeze)
            outputs = super().generate_batch(inputs, generation_config, *args, **kwargs)
        reasons: dict[str, list[str]] = {}
        for name, output in outputs.items():
            if output.error is not None:
                reasons.setdefault(one_line(output.error), []).append(name)
        if reasons:
            why = "; ".join(f"{named(names)}: {reason}" for reason, names in reasons.items())
            count = sum(map(len, reasons.values()))
            logger.error(f"{count} of {len(outputs)} requests failed, and their outputs have an `error`: {why}")
        return outputs

    @torch.no_grad()
    def init_continuous_batching(
        self,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: WorkloadHints | None = None,
    ) -> TurboQuantBatchingManager:
        """Create a manager, with the model's generation config and transformers' options of the engine by default.

        The manager of the last session (`persistent_manager=True`) is returned instead if generation config, weights
        and adapters are the same and its pages suffice for `workload_hints`, lengths and number of requests.

        Raises:
            ValueError: Packed pages do not support the model, an option or the generation config, or an argument has
                another type. A session of the last manager runs.
        """
        for name, kind, value in (
            ("continuous_batching_config", ContinuousBatchingConfig, continuous_batching_config),
            ("workload_hints", WorkloadHints, workload_hints),
        ):
            if not isinstance(value, kind | None):
                raise ValueError(f"`{name}` is {shown(value)}; it must be a `{kind.__name__}`.")
        for name, value in vars(workload_hints or WorkloadHints()).items():
            number(name, value, 0)
        generation_config = with_defaults(generation_config, self.generation_config)
        check_refused(vars(generation_config))  # before a kept manager is destroyed
        if generation_config.eos_token_id is None:
            generation_config.eos_token_id = -1  # transformers would take that of the model's config
        manager = getattr(self.model, CACHED_MANAGER, None)
        if isinstance(manager, TurboQuantBatchingManager):
            manager.check_idle()
            if manager.suits(self, generation_config, workload_hints):
                if manager.batch_processor is None:
                    check_model(self.model, self.config)  # an adapter may have come while the manager slept
                manager.generation_config = generation_config  # with another `max_new_tokens`
                manager.switch_to_cb_friendly_attn(self.model)
                self.model.eval()
                return manager
            self.destroy_cached_continuous_batching_manager()
        options = continuous_batching_config or ContinuousBatchingConfig()
        return TurboQuantBatchingManager(self, generation_config, options, workload_hints)

    def sleep(self) -> int:
        """Free the memory of a persistent manager (`persistent_manager=True`) between sessions, and return the number
        of bytes freed: on a GPU as counted by the allocator, elsewhere the bytes of the pool.

        This drops pages, shared prefixes among them, and captured graphs. `wake()` or the next session allocates pages
        again. A step that is being compiled in the background is waited for. Raises `ValueError` if a session runs.
        """
        manager = getattr(self.model, CACHED_MANAGER, None)
        return manager.sleep() if isinstance(manager, TurboQuantBatchingManager) else 0

    def wake(self) -> None:
        """Allocate the pages of a sleeping manager before its next session."""
        manager = getattr(self.model, CACHED_MANAGER, None)
        if isinstance(manager, TurboQuantBatchingManager) and manager.batch_processor is None:
            check_model(self.model, self.config)
            manager.switch_to_cb_friendly_attn(self.model)
            manager.warmup()  # which restores the attention if it fails
            manager.restore_attention()

    def destroy_cached_continuous_batching_manager(self) -> None:
        """Destroy the manager of the last session and free its memory."""
        manager = getattr(self.model, CACHED_MANAGER, None)
        if manager is not None:
            manager.destroy()
            delattr(self.model, CACHED_MANAGER)


@contextmanager
def continuous_batching(
    model: torch.nn.Module,
    preset: str | TurboQuantConfig = "4bit_nc",
    *,
    balance: bool | Balance | None = None,
    tokenizer: Any = None,
    **overrides: Any,
) -> Iterator[TurboQuantBatching]:
    """Context in which `model.generate_batch` uses packed pages, for code that calls `generate_batch` itself (TRL).

    ```python
    with continuous_batching(trainer.model, "4bit_nc"):
        trainer.train()
    ```

    Within the context, one method of this model object is replaced.

    Args:
        model, preset, balance, tokenizer, **overrides: Arguments of `TurboQuantBatching`.

    Yields:
        The `TurboQuantBatching` of the model.

    Raises:
        ValueError: As for `TurboQuantBatching`. The model is in this context already, or has a persistent manager.
    """
    batching = TurboQuantBatching(model, preset, balance=balance, tokenizer=tokenizer, **overrides)
    attributes, name = vars(batching.model), "init_continuous_batching"
    if name in attributes:
        raise ValueError(
            f"This {type(batching.model).__name__} is within a `with continuous_batching(...)` already. Leave that "
            "`with` first."
        )
    if hasattr(batching.model, CACHED_MANAGER):
        raise ValueError(
            "The model keeps a continuous batching manager of an earlier session, which would be used instead. Call "
            "`model.destroy_cached_continuous_batching_manager()` first."
        )
    attributes[name] = batching.init_continuous_batching
    try:
        yield batching
    finally:
        del attributes[name]
        batching.destroy_cached_continuous_batching_manager()


def inner_model(model: Any) -> PreTrainedModel:
    """Return the transformers model inside of wrappers: PEFT, `torch.compile`, data parallelism. Raise `ValueError` if
    there is none."""
    inner = model
    while not isinstance(inner, PreTrainedModel):
        if hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        elif (inner := getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)) is None:
            raise ValueError(
                f"`model` must be a model of transformers or a wrapper of one, not {type(model).__name__}."
            )
    return inner
