"""Every family of transformers on a compressed cache: what is compressed, how it is read, and whether it is right.

A family is right in a mode if teacher-forced and generated logits are those of transformers' own cache; of a packed
cache, read by "turboquant", those of the same cache read dequantized by the model's default attention. Anything else is
a difference, unless transformers' own cache of that kind differs or fails alike, or the package refused in a sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel, StaticCache

from examples.measure.quality.family_configs import tiny_model
from tq_hf import TurboQuantCache, TurboQuantLayer
from tq_hf.compat import as_input

PROMPT = 140
"""Tokens of a prompt: more than a block."""
STEPS = (1, 1, 3, 1)
"""Tokens of the calls after it."""
NEW_TOKENS = 4
ROOM = PROMPT + 12
ENCODER = 300
"""Tokens of an encoder's input: by default one block of them is packed."""
TOLERANCE = 2e-3
"""Tolerance as a share of the largest logit: 100 times the float32 noise of these models, a tenth of a lost token."""
CODES_TOLERANCE = 1e-1
"""The same where float32 noise may push an entry over a boundary of its codebook; a wrong mask makes two to ten times
that."""
DENSE = dict(residual_length=10**6)
PACKED = dict(residual_length=0, sink_tokens=0, balance=False)
"""Not balanced: only "turboquant" shows queries, so that channel scales, and codes, would differ with what reads."""

DEFAULT: dict[str, Any] = {}
"""Options for models with cross-attention: defaults, also for the cache of cross-attention."""

Logits = list[torch.Tensor]


_IMAGES = "asks for an image with every prompt"
_OWN_CACHE = "keeps a cache of its own, or none"
_OTHERS_CACHE = "drafts on the cache of another model"
_TIMM = "needs timm"
_INCOMPLETE = "has no complete default config"
NOT_TESTABLE = {
    "blip": _IMAGES,
    "blip-2": _IMAGES,
    "cpmant": "fails in cached steps of several tokens",
    "diffusion_gemma": "generates blocks by diffusion",
    "evolla": "has a protein encoder that cannot be made tiny",
    "fast_vlm": _TIMM,
    "gemma3n": _TIMM,
    "gemma4_assistant": _OTHERS_CACHE,
    "gemma4_unified_assistant": _OTHERS_CACHE,
    "granite4_vision": _INCOMPLETE,
    "idefics": _IMAGES,
    "inkling_mm_model": "needs scipy",
    "instructblip": _IMAGES,
    "instructblipvideo": _IMAGES,
    "kosmos-2": _IMAGES,
    "minimax": _OWN_CACHE,
    "molmo2": "has a vision adapter that cannot be made tiny",
    "muse_spark": "has a vision tower that cannot be made tiny",
    "musicgen": "asks for codes of several codebooks",
    "musicgen_melody": "asks for codes of several codebooks",
    "nemo_speechlm": _INCOMPLETE,
    "nemotron_h_omni": _INCOMPLETE,
    "openai-gpt": _OWN_CACHE,
    "perception_lm": _TIMM,
    "pi0": _IMAGES,
    "pix2struct": _IMAGES,
    "pp_formulanet": _IMAGES,
    "prophetnet": "caches steps of one token only",
    "prophetnet/seq2seq": "caches steps of one token only",
    "qwen2_5_omni_thinker": _INCOMPLETE,
    "qwen3_omni_moe_thinker": _INCOMPLETE,
    "qwen4_exp": _INCOMPLETE,
    "qwen4_exp_text": _INCOMPLETE,
    "reformer": _OWN_CACHE,
    "switch_transformers": "hands `use_cache` on to its encoder, which refuses it",
    "udop": "asks for boxes with every prompt",
    "vibevoice_asr": "has an audio encoder that cannot be made tiny",
    "vision-encoder-decoder": _IMAGES,
    "voxtral_realtime": "asks for audio with every prompt",
    "xlm": _OWN_CACHE,
    "xlnet": _OWN_CACHE,
}
"""Model types that are not examined, each with the reason."""

KINDS = ("differs", "raises", "refused", "not loaded", "alike", "right")
"""Order of outcomes, the worst first."""


class Outcome(NamedTuple):
    """Result of one mode.

    Args:
        kind: "right"; "refused" in a sentence of this package; "not loaded": transformers itself refuses the name of
            the attention; "alike": transformers' own preallocated cache fails with the model's own attention, too;
            "differs"; "raises".
        detail: The largest difference, or what was said.
    """

    kind: str
    detail: str = ""


class Finding(NamedTuple):
    """Results of a family.

    Args:
        model_type: The family.
        layers: Layers compressed, of how many.
        read: How these are read; where there are none, the classes of the layers.
        outcomes: By mode.
    """

    model_type: str
    layers: str
    read: str
    outcomes: dict[str, Outcome]

    @property
    def verdict(self) -> str:
        """The worst of the outcomes."""
        return worst(outcome.kind for outcome in self.outcomes.values())


def worst(kinds: Iterable[str]) -> str:
    """The worst of kinds of outcomes."""
    return min(kinds, key=KINDS.index)


def teacher_forced(model: PreTrainedModel, cache: Cache, sizes: Sequence[int]) -> Logits:
    """Logits of an unpadded batch, in calls with these numbers of tokens."""
    ids = token_ids(2, sum(sizes)).to(model.device)
    logits: Logits = []
    for chunk in ids.split(list(sizes), 1):
        inputs = {"input_ids": chunk} | images(model, chunk, first=not logits)
        if model.config.is_encoder_decoder:
            inputs = {"input_ids": encoder_ids(model).to(model.device), "decoder_input_ids": chunk}
        torch.manual_seed(0)
        with torch.no_grad():
            out = model(**inputs, **as_input(cache), use_cache=True)
        logits.append(out.logits[:, -chunk.shape[1] :])
    return logits


def forward(model: PreTrainedModel, cache: Cache) -> Logits:
    """Logits of a prompt, then of `STEPS`."""
    return teacher_forced(model, cache, (PROMPT, *STEPS))


def generated(model: PreTrainedModel, cache: Cache) -> Logits:
    """Logits of a generation, left-padded."""
    inputs = {"input_ids": token_ids(2, PROMPT), "attention_mask": torch.ones(2, PROMPT, dtype=torch.long)}
    inputs["input_ids"][0, :5] = 0
    inputs["attention_mask"][0, :5] = 0
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs.pop("input_ids")
        inputs["decoder_attention_mask"] = inputs.pop("attention_mask")
        inputs |= {
            "decoder_start_token_id": 0,
            "input_ids": encoder_ids(model),
            "attention_mask": torch.ones_like(encoder_ids(model)),
        }
    inputs |= images(model, inputs["input_ids"])
    torch.manual_seed(0)
    out = model.generate(
        **inputs,
        **as_input(cache),
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


def token_ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, 99, (batch, length), generator=torch.Generator().manual_seed(length))


def encoder_ids(model: PreTrainedModel) -> torch.Tensor:
    """Inputs of an encoder, of 12 tokens where transformers' own cache takes no more than a window (T5Gemma 2)."""
    return token_ids(2, 12 if model.config.model_type == "t5gemma2" else ENCODER)


def images(model: PreTrainedModel, ids: torch.Tensor, first: bool = True) -> dict[str, torch.Tensor]:
    """An image for each row of `ids`, of models whose layers attend to images by cross-attention (Mllama): in the
    first call; each token sees the whole image."""
    if model.config.model_type != "mllama":
        return {}
    vision, batch = model.config.vision_config, len(ids)
    tiles, size = vision.max_num_tiles, vision.image_size
    shape = (batch, 1, tiles, vision.num_channels, size, size)
    seen = {"cross_attention_mask": torch.ones(batch, ids.shape[1], 1, tiles, dtype=torch.long)}
    if not first:
        return seen
    return seen | {
        "pixel_values": torch.randn(shape, generator=torch.Generator().manual_seed(0)),
        "aspect_ratio_ids": torch.ones(batch, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(batch, 1, tiles, dtype=torch.long),
    }


def has_cross_attention(model: PreTrainedModel) -> bool:
    """Whether layers attend to an encoder's tokens, or to images."""
    return model.config.is_encoder_decoder or model.config.model_type == "mllama"


def beside_cross_attention(model: PreTrainedModel, own: Cache, cross: Cache | None = None) -> Cache:
    """`own`, with `cross` (by default a cache of transformers) beside it where the model has an encoder."""
    if not model.config.is_encoder_decoder:
        return own
    return EncoderDecoderCache(own, DynamicCache(config=model.config) if cross is None else cross)


def difference(actual: Logits, expected: Logits) -> float:
    """The largest difference relative to the largest logit; infinite if there is a NaN where none is expected."""
    worst = 0.0
    for a, b in zip(actual, expected, strict=True):
        finite = b.isfinite()
        if not torch.equal(a.isfinite(), finite):
            return float("inf")
        worst = max(worst, ((a - b)[finite].abs().max() / b[finite].abs().max()).item())
    return worst


class Run(NamedTuple):
    """Logits of all scenarios, or the exception one of them raised; and the last cache."""

    logits: list[Logits] | Exception
    cache: Cache | None = None


def _run(
    model: PreTrainedModel, make: Callable[[], Cache], make_cross: Callable[[], Cache | None] = lambda: None
) -> Run:
    """Every scenario on a new cache, with another one for cross-attention."""
    logits = []
    try:
        for scenario in SCENARIOS:
            cache = make()
            logits.append(scenario(model, beside_cross_attention(model, cache, make_cross())))
    except Exception as error:
        return Run(error)
    return Run(logits, cache)


def examine(model_type: str) -> Finding:
    """Run a family in every mode.

    Raises:
        Exception: The family cannot be built or run on transformers' own cache in this harness.
    """
    model = tiny_model(model_type)
    try:
        TurboQuantCache(model.config)
    except ValueError as error:
        return Finding(model_type, "", "", {"all": _failed(error)})
    own = _run(model, lambda: DynamicCache(config=model.config)).logits
    if isinstance(own, Exception):
        raise own
    # transformers' preallocated cache must be right itself to be an example.
    preallocated = _run(model, lambda: StaticCache(model.config, ROOM)).logits
    outcomes, layers, _ = _modes("default", model, model, own, preallocated)
    reader = model
    try:
        model = tiny_model(model_type, "turboquant")
    except Exception as error:
        outcomes["turboquant"] = Outcome("not loaded", f"{type(error).__name__}: {error}"[:300])
        return Finding(model_type, layers, "", outcomes)
    more, layers, read = _modes("turboquant", model, reader, own, preallocated)
    return Finding(model_type, layers, read, outcomes | more)


def _modes(
    attention: str,
    model: PreTrainedModel,
    reader: PreTrainedModel,
    own: list[Logits],
    preallocated: list[Logits] | Exception,
) -> tuple[dict[str, Outcome], str, str]:
    """Outcomes of the modes of one attention, what is compressed, and how that is read. `reader` is the same model with
    its default attention, which reads caches dequantized."""
    outcomes, layers, read = {}, "", ""
    for growth, room in (("growing", None), ("preallocated", ROOM)):
        windows = [("dense", DENSE), ("packed", PACKED)] + [("default", DEFAULT)] * has_cross_attention(model)
        for window, options in windows:
            make = partial(TurboQuantCache, max_cache_len=room, **options)
            expected, tolerance, make_cross = own, TOLERANCE, lambda: None
            if options is DEFAULT:
                cross_room = None if room is None else encoder_ids(model).shape[1]
                make_cross = partial(TurboQuantCache, model.config, max_cache_len=cross_room)
            if options is not DENSE:
                beside, tolerance = (room if attention == "turboquant" else None), CODES_TOLERANCE
                reading = partial(TurboQuantCache, reader.config, max_cache_len=beside, **options)
                expected = _run(reader, reading, make_cross).logits
            got, cache = _run(model, partial(make, model.config), make_cross)
            if isinstance(got, Exception) or isinstance(expected, Exception):
                outcome = _failed(got if isinstance(got, Exception) else expected)
            else:
                most = max(difference(a, b) for a, b in zip(got, expected, strict=True))
                outcome = Outcome("right" if most < tolerance else "differs", f"{most:.1e}")
                compressed = [layer for layer in cache.layers if isinstance(layer, TurboQuantLayer)]
                layers = f"{len(compressed)}/{len(cache.layers)}"
                read = "packed" if all(layer.reads_packed for layer in compressed) else "dequantized"
                if not compressed:
                    read = ", ".join(dict.fromkeys(type(layer).__name__ for layer in cache.layers))
            if outcome.kind != "right" and room is not None:
                outcome = _excused(outcome, preallocated, own)
            outcomes[f"{attention}, {growth}, {window}"] = outcome
    return outcomes, layers, read


def _failed(error: Exception) -> Outcome:
    """Refused if this package says so, else an error."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    raised_in = "" if traceback is None else traceback.tb_frame.f_globals.get("__name__", "")
    ours = isinstance(error, ValueError) and raised_in.startswith("tq_hf")
    return Outcome("refused" if ours else "raises", f"{type(error).__name__}: {error}"[:300])


def _excused(outcome: Outcome, preallocated: list[Logits] | Exception, own: list[Logits]) -> Outcome:
    """The same, or "alike" if transformers' own preallocated cache fails with the model's own attention, too."""
    if isinstance(preallocated, Exception):
        return Outcome("alike", f"StaticCache: {type(preallocated).__name__}: {preallocated}"[:200])
    if max(difference(a, b) for a, b in zip(preallocated, own, strict=True)) >= TOLERANCE:
        return Outcome("alike", f"StaticCache differs, too; ours {outcome.kind} {outcome.detail}"[:200])
    return outcome
