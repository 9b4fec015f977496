"""A committed file of each format version loads, to the values it was saved with.

`python tests/saving/test_old_files.py` writes the file of a new version.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tq_hf import TurboQuantCache, TurboQuantConfig
from tq_hf.compat import as_input
from tq_hf.saving.cache_file import VERSION

FILES = Path(__file__).parent / "files"
CONFIG = TurboQuantConfig.from_preset("k3v4_nc", residual_length=0, balance=False)
TOKENS = 150


def model() -> Any:
    """Two layers, one of full attention and one with a sliding window, with weights from integers alone: the same on
    every machine and with every version of torch."""
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        layer_types=["full_attention", "sliding_attention"],
        use_sliding_window=True,
        sliding_window=8,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    model = Qwen2ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        numbers = torch.arange(parameter.numel()) * 2654435761 + zlib.crc32(name.encode())
        values = (numbers % 2**32 // 2**16 * 40503 % 2**16 // 2**8) / 2**8 - 0.5
        parameter.data.copy_(values.view_as(parameter))
    model.set_attn_implementation("turboquant")
    return model


def write() -> None:
    """Save what all files hold: the cache of these tokens."""
    decoder = model()
    cache = TurboQuantCache(decoder.config, CONFIG)
    with torch.no_grad():
        decoder((torch.arange(TOKENS) ** 2 * 7 % 29 + 1)[None], **as_input(cache))
    cache.save(FILES / f"version{VERSION}.safetensors", decoder)


# Of layer 0: a sink, a token of the packed block and one of the residual; of layer 1: the last token of its window.
VERSIONS = (7,)
PINNED: dict[tuple[str, int, int], list[float]] = {
    ("keys", 0, 1): [-1.351942, -0.799784, -0.549768, 0.978798, 0.785332, -0.293733],
    ("values", 0, 1): [-0.490568, -1.137521, 0.084666, 0.617632, -0.265064, 0.628804],
    ("keys", 0, 77): [0.737228, -0.314247, -0.856621, 0.23143, -0.265327, 0.334763],
    ("values", 0, 77): [-0.379063, 0.307858, 0.073299, -0.605244, 0.374874, 0.58849],
    ("keys", 0, 145): [-1.627405, -0.161712, -0.846721, -0.604029, 0.943156, 0.048847],
    ("values", 0, 145): [-0.705517, -1.045692, 0.908987, 0.407957, 0.252481, 0.535343],
    ("keys", 1, -1): [-0.10334, 0.402806, -0.090083, 0.598176, 0.161056, -0.390635],
    ("values", 1, -1): [0.337118, -0.246325, 0.300779, 0.291026, -0.386315, 0.081097],
}

NEXT_LOGITS = [-0.0965, 0.08661, 0.02496, 0.09813, 0.36641, -0.26997]
"""After token 3, of the first six tokens of the vocabulary."""


@pytest.mark.parametrize("version", VERSIONS)
def test_a_file_of_each_version_loads_to_the_values_it_was_saved_with(version):
    loaded = TurboQuantCache.load(FILES / f"version{version}.safetensors", model())
    assert loaded.get_seq_length() == TOKENS and loaded.config == CONFIG and not loaded.config.balance
    assert all((factor == 1).all() for factor in loaded.layers[0].store.blocks.channel_scales)
    for (part, layer, token), expected in PINNED.items():
        held = getattr(loaded.layers[layer], part)[0, 0, token, : len(expected)]
        torch.testing.assert_close(held, torch.tensor(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_file_of_each_version_goes_on_where_it_ended(version):
    decoder = model()
    loaded = TurboQuantCache.load(FILES / f"version{version}.safetensors", decoder)
    with torch.no_grad():
        logits = decoder(torch.tensor([[3]]), **as_input(loaded)).logits[0, 0, :6]
    torch.testing.assert_close(logits, torch.tensor(NEXT_LOGITS), rtol=1e-3, atol=1e-3)


if __name__ == "__main__":
    write()
