"""What each preset may cost a real model, SmolLM2-135M. The first tokens of a real model are attention sinks, and its
keys have strong means: the shipped model has neither.

Weights and text come from the package registry (`examples/real_model.py`). Where it cannot be reached, these tests are
skipped. Documents are read into plain caches once. All but their last tokens are packed, with exact sinks and no
residual, and the last tokens are read through the packed cache in one call.

The rotation is fixed (`seed`); KL then moves by less than a hundredth between machines, as in `test_quality.py`. Limits
are a quarter above what was measured, the standard deviation over five rotations (5 to 22% by preset).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tq_kernels.types import PackedBlocks
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from examples import real_model
from examples.measure.quality import prose
from examples.measure.quality.evaluate_passkey import compress
from tests.support.helpers import slow
from tq_hf import PRESETS, TurboQuantCache, TurboQuantConfig
from tq_hf.compat import as_input

DOCUMENTS = 2
HISTORY = 4 + 5 * 128
"""Sinks and whole blocks: nothing but the sinks stays exact."""
SCORED = 124

LIMITS = {
    "k8v4": (0.0021, 0.97),
    "4bit_nc": (0.0046, 0.96),
    "3.5bit_nc": (0.0078, 0.96),
    "k3v4_nc": (0.0133, 0.96),
    "3bit_nc": (0.0165, 0.96),
    "2.5bit_nc": (0.0344, 0.93),
    "2bit_nc": (0.0861, 0.92),
}
"""Most KL from the plain cache (nats, mean of a token), and least share of tokens with the same likeliest one."""

Change = Callable[[PackedBlocks], object]


@dataclass(frozen=True)
class Reading:
    """A model, the plain cache of all but the last tokens of the documents, those tokens `[N, S]`, and their
    log-probabilities `[N, S, V]`."""

    model: Any
    dense: DynamicCache
    last: torch.Tensor
    log_probs: torch.Tensor

    @torch.no_grad()
    def measured(self, preset: str, change: Change | None = None, **options: Any) -> tuple[float, float]:
        """What a preset costs, in the units of `LIMITS`. `change` is made to the packed blocks of each layer before
        they are read."""
        config = TurboQuantConfig.from_preset(preset, **{"residual_length": 0} | options)
        cache = compress(self.dense, TurboQuantCache(self.model.config, config))
        for layer in cache.layers if change else ():
            layer.store.encode_deferred()
            change(layer.store.blocks)
        log_probs = self.model(self.last, **as_input(cache)).logits.log_softmax(-1)
        kl = (self.log_probs.exp() * (self.log_probs - log_probs)).sum(-1).mean().item()
        return kl, (log_probs.argmax(-1) == self.log_probs.argmax(-1)).float().mean().item()


@torch.no_grad()
def read() -> Reading:
    folder, text = real_model.model_folder("smollm2"), real_model.text_file().read_text(encoding="utf-8")
    assert real_model.sha256(real_model.text_file()) == real_model.TEXT_SHA256
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    documents = prose.documents(AutoTokenizer.from_pretrained(folder), text, HISTORY + SCORED, DOCUMENTS, facts=4)
    ids = torch.tensor([document.ids for document in documents])
    dense, plain = DynamicCache(config=model.config), DynamicCache(config=model.config)
    model(ids[:, :HISTORY], **as_input(dense), logits_to_keep=1)
    for index, layer in enumerate(dense.layers):
        plain.update(layer.keys, layer.values, index)
    log_probs = model(ids[:, HISTORY:], **as_input(plain)).logits.log_softmax(-1)
    model.set_attn_implementation("turboquant")
    return Reading(model, dense, ids[:, HISTORY:], log_probs)


@pytest.fixture(scope="module")
def reading() -> Reading:
    try:
        return read()
    except real_model.NotAvailable as error:
        pytest.skip(str(error))


def test_every_preset_has_limits() -> None:
    assert list(LIMITS) == list(PRESETS)


QUICK = ("4bit_nc", "2bit_nc")
"""Presets of the two kinds of codes. `test_quality.py` holds the shipped model to the limits of all."""


@pytest.mark.parametrize("preset", [preset if preset in QUICK else slow(preset) for preset in PRESETS])
def test_a_preset_keeps_within_its_limits(preset: str, reading: Reading) -> None:
    kl, top1 = reading.measured(preset)
    most, least = LIMITS[preset]
    assert kl <= most and top1 >= least, (kl, top1)


def scales_off(blocks: PackedBlocks) -> None:
    """Make all scales of keys and values a tenth too large."""
    blocks.scales.view(torch.float16).mul_(1.1)


def means_off(blocks: PackedBlocks) -> None:
    """Make the mean key of each block a tenth too large."""
    blocks.key_means.mul_(1.1)


BREAKS: dict[str, dict[str, Any]] = {
    "scale": {"change": scales_off},
    "mean": {"change": means_off},
    "sink": {"sink_tokens": 0},
}


@pytest.mark.parametrize("preset", QUICK)
@pytest.mark.parametrize("part", BREAKS)
def test_a_broken_part_breaks_the_limits(preset: str, part: str, reading: Reading) -> None:
    kl, top1 = reading.measured(preset, **BREAKS[part])
    most, least = LIMITS[preset]
    assert kl > most or top1 < least, (kl, top1)
