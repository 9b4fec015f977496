"""`quantized`: memory, time of a step and KL of caches that read the same tokens in turn."""

from functools import partial
from typing import Any

import torch
from transformers import DynamicCache

from examples.measure.quality import quantized
from examples.provenance import BASELINE
from tests.support.tiny_models import VOCAB, build
from tq_hf import TurboQuantCache
from tq_hf.compat import as_input


def test_caches_are_compared_on_the_same_tokens() -> None:
    model, config = build("llama"), build("llama").config
    presets: dict[str, Any] = {name: partial(TurboQuantCache, config, name) for name in ("4bit_nc", "2bit_nc")}
    run = quantized.Run(model, {BASELINE: partial(DynamicCache, config=config)} | presets)
    for seed in range(2):
        run.read(torch.randint(3, VOCAB, (1, 520), generator=torch.Generator().manual_seed(seed)), prompt=512)
    base, four, two = run.rows()
    assert base["kl"] == 0 < four["kl"] < two["kl"] and base["top1"] == 1
    assert two["bytes_held"] < four["bytes_held"] < base["bytes_held"] and four["ms_per_step"] > 0
    assert len(run.times[BASELINE]) == 16
    cache = DynamicCache(config=config)
    model(torch.zeros(1, 100, dtype=torch.long), **as_input(cache))
    assert quantized.bytes_held(cache) == sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def test_tensors_of_several_parts_are_counted_by_their_parts() -> None:
    class Parts:
        scale, codes = torch.zeros(2), torch.zeros(3, dtype=torch.uint8)

        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["scale", "codes"], None

    found = list(quantized.storages({"keys": (Parts(), {"zero": torch.zeros(4)}), "bits": 4}))
    assert sorted(one.nbytes() for one in found) == [3, 8, 16]
