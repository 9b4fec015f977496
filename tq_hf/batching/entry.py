"""Two ways in: an adapter around a model, and a context in which the model's own `generate_batch` uses packed pages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from inspect import signature
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, ContinuousMixin, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.utils import WorkloadHints

from ..balance import Balance
from ..config import TurboQuantConfig
from .checks import check_generation, check_model, pages_config
from .manager import TurboQuantBatchingManager

_KEPT = "_cached_continuous_batching_manager"
"""Where transformers keeps a manager on its model for the next session."""


class TurboQuantBatching(ContinuousMixin):
    """Continuous batching of a model on packed pages, with transformers' own methods: `generate_batch`,
    `continuous_batching_context_manager`, `init_continuous_batching`.

    ```python
    batching = TurboQuantBatching(model, "4bit_nc")
    answers = batching.generate_batch([tokenizer(text).input_ids for text in texts], max_new_tokens=256)
    ```

    Args:
        model: A decoder, or something around one (PEFT). Its full-attention layers are packed; sliding ones, if it has
            any, hold their windows densely in the same pool, and prompts are not shared then.
        preset: Name of a preset (see `tq_hf.PRESETS`), or a `TurboQuantConfig`. Its sinks and window are left out:
            dense are only the tokens of a request's open block of 128. With `sink_tokens=4` beside it the first tokens
            are, too, in a page that requests with the same first tokens share. (On GPUs of compute capability 7.5 they
            are read in torch, one request after the other.)
        balance: Whether channels that are much louder or quieter than others are given channel scales, found by a short
            run of the model before the first request (by default what the preset says); or the channel scales
            themselves.
        **overrides: Options of `TurboQuantConfig` that replace the preset's.

    Raises:
        ValueError: The model has layers that pages cannot hold, or an option does not exist or is outside its range.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        preset: str | TurboQuantConfig = "4bit_nc",
        *,
        balance: bool | Balance | None = None,
        **overrides: Any,
    ) -> None:
        if isinstance(balance, bool):
            overrides["balance"] = balance
        elif not (balance is None or isinstance(balance, Balance)):
            raise ValueError(f"`balance` is {balance!r}; it must be True or False, or a `Balance`.")
        self.model = inner_model(model)
        self.config = pages_config(preset, **overrides)
        if isinstance(balance, Balance) and not self.config.balance:
            raise ValueError("Channel scales are given, and the preset has `balance=False`: leave out either.")
        check_model(self.model, self.config)
        self._balance = balance if isinstance(balance, Balance) else None

    @property
    def generation_config(self) -> GenerationConfig:  # type: ignore[override]
        """The model's."""
        return self.model.generation_config

    @property
    def balance(self) -> Balance | None:
        """Channel scales of the model's channels, found once; `None` if channels are not balanced."""
        if self._balance is None and self.config.balance:
            self.model.eval()  # as the manager will
            self._balance = Balance.of(self.model)
        return self._balance

    def generate_batch(self, inputs: list[list[int]], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Answers to prompts, by transformers' own method and with its arguments.

        Raises:
            ValueError: An option is none of those, and would be left out without a word.
        """
        known = signature(super().generate_batch).parameters.keys() | {"max_new_tokens"}
        if unknown := sorted(kwargs.keys() - known):
            raise ValueError(
                f"`generate_batch` takes no {', '.join(unknown)}. Say how to decode in `generation_config`: greedily, "
                "or by sampling."
            )
        return super().generate_batch(inputs, *args, **kwargs)

    @torch.no_grad()
    def init_continuous_batching(
        self,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: WorkloadHints | None = None,
    ) -> TurboQuantBatchingManager:
        """A manager, or the one kept from the last session (`persistent_manager=True`) if it generates as asked for
        and the model's weights and adapters are the same.

        Args:
            generation_config: By default the model's.
            continuous_batching_config: By default transformers'.
            workload_hints: What is known of the requests.

        Raises:
            ValueError: Answers are asked for in a way that continuous batching does not generate them.
        """
        generation_config = deepcopy(self.generation_config if generation_config is None else generation_config)
        check_generation(generation_config)
        if generation_config.eos_token_id is None:
            generation_config.eos_token_id = -1  # the engine's way to say that no token ends an answer
        kept = getattr(self.model, _KEPT, None)
        if isinstance(kept, TurboQuantBatchingManager):
            if kept.config == self.config and kept.generates_as(generation_config) and kept.can_go_on():
                kept.switch_to_cb_friendly_attn(self.model)
                self.model.eval()
                return kept
            self.destroy_cached_continuous_batching_manager()
        return TurboQuantBatchingManager(
            self.model,
            generation_config,
            ContinuousBatchingConfig() if continuous_batching_config is None else continuous_batching_config,
            workload_hints,
            config=self.config,
            balance=self.balance,
        )

    def destroy_cached_continuous_batching_manager(self) -> None:
        """Give up the manager kept from the last session, and its memory."""
        kept = getattr(self.model, _KEPT, None)
        if kept is not None:
            kept.destroy()
            delattr(self.model, _KEPT)


@contextmanager
def continuous_batching(
    model: torch.nn.Module,
    preset: str | TurboQuantConfig = "4bit_nc",
    *,
    balance: bool | Balance | None = None,
    **overrides: Any,
) -> Iterator[TurboQuantBatching]:
    """Let `model.generate_batch` use packed pages within a `with`, for code that calls it itself (TRL).

    ```python
    with continuous_batching(trainer.model, "4bit_nc"):
        trainer.train()
    ```

    One method of this one model object is replaced, and is as before afterwards. Arguments are those of
    `TurboQuantBatching`, which this gives.

    Raises:
        ValueError: As `TurboQuantBatching`, or the model is within such a `with` already.
    """
    batching = TurboQuantBatching(model, preset, balance=balance, **overrides)
    held = vars(batching.model)
    name = "init_continuous_batching"
    if name in held:
        raise ValueError(
            f"This {type(batching.model).__name__} is within a `with continuous_batching(...)` already. Leave that "
            "first."
        )
    if hasattr(batching.model, _KEPT):
        raise ValueError(
            "The model keeps a continuous batching manager of an earlier session, which would be used instead. Call "
            "`model.destroy_cached_continuous_batching_manager()` first."
        )
    held[name] = batching.init_continuous_batching
    try:
        yield batching
    finally:
        del held[name]
        batching.destroy_cached_continuous_batching_manager()


def inner_model(model: Any) -> PreTrainedModel:
    """The transformers model in what is wrapped around it: PEFT, `torch.compile`, data parallelism.

    Raises:
        ValueError: There is none.
    """
    inner = model
    while not isinstance(inner, PreTrainedModel):
        if hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        elif (wrapped := getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)) is not None:
            inner = wrapped
        else:
            raise ValueError(f"`model` must be a model of transformers, or around one, not {type(model).__name__}.")
    return inner
