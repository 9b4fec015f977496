"""Every family of transformers on a compressed cache: what is compressed, how it is read, and whether it is right.

A family is right in a mode if teacher-forced and generated logits are those of transformers' own cache; of a packed
cache, read by "turboquant", those of the same cache read dequantised by the model's default attention. Anything else is
a difference, unless transformers' own cache of that kind differs or fails alike, or the package refused in a sentence.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from family_configs import tiny_model
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedConfig, PreTrainedModel, StaticCache

from tq_hf import TurboQuantCache, TurboQuantLayer

PROMPT = 140
"""Tokens of a prompt: more than a block."""
STEPS = (1, 1, 3, 1)
"""Tokens of the calls after it."""
NEW_TOKENS = 4
ROOM = PROMPT + 12
TOLERANCE = 2e-3
"""Of the largest logit. Two orders above float32 noise of these models, one below what a lost token makes."""
CODES_TOLERANCE = 2e-2
"""The same where float32 noise may push an entry over a boundary of its codebook."""
DENSE = dict(residual_length=10**6)
PACKED = dict(residual_length=0, sink_tokens=0)

Logits = list[torch.Tensor]


class Outcome(NamedTuple):
    """What came of one mode: "right", "refused", "alike" (transformers' own cache fails, too), "differs", "raises"."""

    kind: str
    detail: str = ""


class Finding(NamedTuple):
    """What was found out about a family."""

    model_type: str
    layers: str
    read: str
    outcomes: dict[str, Outcome]

    @property
    def verdict(self) -> str:
        """The worst of the outcomes."""
        kinds = {outcome.kind for outcome in self.outcomes.values()}
        return next(kind for kind in ("differs", "raises", "refused", "alike", "right") if kind in kinds)


def forward(model: PreTrainedModel, cache: Cache) -> Logits:
    """Logits of an unpadded batch, teacher forced: a prompt, then `STEPS`."""
    ids = _ids(2, PROMPT + sum(STEPS))
    logits, start = [], 0
    for size in (PROMPT, *STEPS):
        chunk = ids[:, start : start + size]
        start += size
        inputs = {"input_ids": chunk}
        if model.config.is_encoder_decoder:
            inputs = {"input_ids": _ids(2, 12), "decoder_input_ids": chunk}
        torch.manual_seed(0)
        with torch.no_grad():
            logits.append(model(**inputs, past_key_values=cache, use_cache=True).logits[:, -size:])
    return logits


def generated(model: PreTrainedModel, cache: Cache) -> Logits:
    """Logits of a generation, left-padded."""
    inputs = {"input_ids": _ids(2, PROMPT), "attention_mask": torch.ones(2, PROMPT, dtype=torch.long)}
    inputs["input_ids"][0, :5] = 0
    inputs["attention_mask"][0, :5] = 0
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs.pop("input_ids")
        inputs["decoder_attention_mask"] = inputs.pop("attention_mask")
        inputs |= {"decoder_start_token_id": 0, "input_ids": _ids(2, 12), "attention_mask": torch.ones(2, 12, dtype=torch.long)}
    torch.manual_seed(0)
    out = model.generate(
        **inputs,
        past_key_values=cache,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        num_beams=1,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return list(out.logits)


SCENARIOS: tuple[Callable[[PreTrainedModel, Cache], Logits], ...] = (forward, generated)


def _ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, 99, (batch, length), generator=torch.Generator().manual_seed(length))


def _cache(model: PreTrainedModel, own: Cache) -> Cache:
    """`own`, with a cross-attention cache of transformers beside it where the model wants one."""
    return EncoderDecoderCache(own, DynamicCache(config=model.config)) if model.config.is_encoder_decoder else own


def difference(actual: Logits, expected: Logits) -> float:
    """The largest difference relative to the largest logit; infinite if there is a NaN where none is expected."""
    worst = 0.0
    for a, b in zip(actual, expected, strict=True):
        finite = b.isfinite()
        if not torch.equal(a.isfinite(), finite):
            return float("inf")
        worst = max(worst, ((a - b)[finite].abs().max() / b[finite].abs().max()).item())
    return worst


def examine(model_type: str) -> Finding:
    """Run a family in every mode.

    Raises:
        Exception: The family cannot be built or run on transformers' own cache in this harness.
    """
    model = tiny_model(model_type)
    references = [run(model, _cache(model, DynamicCache(config=model.config))) for run in SCENARIOS]
    # transformers' preallocated cache must be right itself to be an example.
    preallocated = _attempt(lambda: [run(model, _cache(model, StaticCache(model.config, ROOM))) for run in SCENARIOS])
    outcomes: dict[str, Outcome] = {}
    read = layers = ""
    for name in ("default", "turboquant"):
        if name == "turboquant":
            built = _attempt(lambda: tiny_model(model_type, name))
            if isinstance(built, Exception):
                outcomes[name] = _failed(built)
                break
            model = built
        dense = copy.deepcopy(model.config)
        dense._attn_implementation = "eager"
        for room in (None, ROOM):
            for options in (DENSE, PACKED):
                mode = ", ".join((name, "preallocated" if room else "growing", "dense" if options is DENSE else "packed"))
                caches: list[TurboQuantCache] = []

                def fresh(config: PreTrainedConfig = model.config, **more: Any) -> Cache:
                    caches.append(TurboQuantCache(config, **more))
                    return _cache(model, caches[-1])

                expected, tolerance = references, TOLERANCE
                if options is PACKED:
                    # A config of its own that names another attention: these caches are read dequantised.
                    beside = room if name == "turboquant" else None
                    tolerance = TOLERANCE if beside == room else CODES_TOLERANCE
                    reading = _attempt(lambda: [run(model, fresh(dense, max_cache_len=beside, **options)) for run in SCENARIOS])
                    if isinstance(reading, Exception):
                        outcomes[mode] = _failed(reading)
                        continue
                    expected = reading
                got = _attempt(lambda: [run(model, fresh(max_cache_len=room, **options)) for run in SCENARIOS])
                if isinstance(got, Exception):
                    outcomes[mode] = _failed(got)
                else:
                    worst = max(difference(a, b) for a, b in zip(got, expected, strict=True))
                    outcomes[mode] = Outcome("right" if worst < tolerance else "differs", f"{worst:.1e}")
                    compressed = [layer for layer in caches[-1].layers if isinstance(layer, TurboQuantLayer)]
                    layers = f"{len(compressed)}/{len(caches[-1].layers)}"
                    if name == "turboquant":
                        read = "packed" if all(x._receipt.signed for x in compressed) else "dequantised"
                if outcomes[mode].kind in ("differs", "raises") and room is not None:
                    outcomes[mode] = _excused(outcomes[mode], preallocated, references)
    return Finding(model_type, layers, read, outcomes)


def _attempt(function: Callable[[], Any]) -> Any:
    """What a function returns, or the exception it raises."""
    try:
        return function()
    except Exception as error:
        return error


def _failed(error: Exception) -> Outcome:
    """Refused if this package says so, else an error."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    raised_in = "" if traceback is None else traceback.tb_frame.f_globals.get("__name__", "")
    ours = isinstance(error, ValueError) and raised_in.startswith("tq_hf")
    return Outcome("refused" if ours else "raises", f"{type(error).__name__}: {error}"[:300])


def _excused(outcome: Outcome, preallocated: list[Logits] | Exception, references: list[Logits]) -> Outcome:
    """The same, or "alike" if transformers' own preallocated cache fails with the model's own attention, too."""
    if isinstance(preallocated, Exception):
        return Outcome("alike", f"StaticCache: {type(preallocated).__name__}: {preallocated}"[:200])
    if max(difference(a, b) for a, b in zip(preallocated, references, strict=True)) >= TOLERANCE:
        return Outcome("alike", f"StaticCache differs, too; ours {outcome.kind} {outcome.detail}"[:200])
    return outcome
