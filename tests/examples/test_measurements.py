"""Scripts of measurements, as a CPU runs them in small, and their rows in tables."""

from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.generation.continuous_batching import offloading_manager

from examples.measure.quality import latents, quantized, train_needle
from examples.measure.quality.drafts import DRAFTS, WAYS, compare
from examples.measure.report import tables
from examples.measure.report.tables import start
from examples.measure.speed import bench_offload, soak
from examples.measure.speed.bench_start import measure
from examples.measure.speed.soak import small_model
from examples.provenance import BASELINE, provenance
from tests.support.tiny_models import VOCAB, build
from tq_hf import TurboQuantCache
from tq_hf.compat import as_input


def test_seconds_count_from_the_weights_and_waits_from_each_request() -> None:
    device = torch.device("cpu")
    row = measure(small_model(device), seconds=0)
    assert 0 < row["balance_s"] < row["pool_s"] < row["first_token_s"] < row["first_answer_s"] < row["seconds"]
    assert 0 < row["next_token_s"] < row["seconds"] - row["first_answer_s"]
    assert row["rounds"] == 0 and row["worst_first_token_s"] is None
    text = start(provenance(device, "a small model") | {"rows": [{"caches": "empty", **row}]})
    assert f"| {row['first_token_s']:.1f} s | {row['first_answer_s']:.1f} s |" in text and "| – | – |" in text


@pytest.mark.slow
def test_pages_come_back_and_everything_is_measured_and_shown() -> None:
    real = offloading_manager.OffloadingManager._offload_to_cpu
    record = bench_offload.run(tiny=True)
    assert offloading_manager.OffloadingManager._offload_to_cpu is real
    assert record["pages_checked"] == record["pages_equal"] > 0
    assert {way: one["copies"] for way, one in record["copies"].items()} == {"out": 1, "back": 1}
    assert list(record["next_token"]) == ["pages from the CPU", "prompt read again"]
    assert all(row["ms"] > 0 and row["tokens_left"][0] > 2 for row in record["next_token"].values())
    assert f"{record['pages_checked']} of {record['pages_checked']} pages" in tables.RENDERERS["offload"](record)


def test_bits_of_both_parts_are_those_of_the_row(tmp_path: Path) -> None:
    train_needle.build_model("needle-latents").save_pretrained(tmp_path)
    train_needle.build_tokenizer().save_pretrained(tmp_path)
    rows = latents.rows(str(tmp_path), ((8, 8), (4, 8)), Namespace(tokens=1024, seeds=1, chunk=512))
    assert [(row["model"], row["key_bits"], row["value_bits"]) for row in rows] == [
        ("deepseek_v3", 8, 8),
        ("deepseek_v3", 4, 8),
    ]
    assert 0 < 5 * rows[0]["kl"] < rows[1]["kl"]
    assert [round(row["ratio"], 2) for row in rows] == [1.93, 3.14]


@pytest.mark.slow
def test_pages_come_back_and_answers_are_those_to_their_prompts() -> None:
    found = soak.Soak(soak.small_model(torch.device("cpu")), requests=8, longest=150, answer=10).run(0, bursts=10)
    assert found["bursts"] == 10 and found["sleeps"] == 1 and found["refused"] == 20
    assert found["pages_after_bursts"] == 0
    assert found.get("of another", 0) == 0
    assert found["compared"] + found["long and compared"] == 40
    assert found["equal"] >= 0.98 * found["compared"] > 0


def test_an_answer_of_another_prompt_is_counted() -> None:
    work = soak.Soak(soak.small_model(torch.device("cpu")), requests=8, longest=60, answer=10)
    work.expected = work.expected[1:] + work.expected[:1]
    found = work.run(0, bursts=1)
    assert found["of another"] == found["compared"] == 4 and found.get("equal", 0) == 0


NEW = 24


@pytest.fixture(scope="module")
def ids(model):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, model.config.vocab_size, (1, tokens), generator=generator) for tokens in (150, 260)]


@pytest.mark.parametrize("way", WAYS)
def test_drafts_that_change_nothing_have_all_tokens_equal(model, ids, way):
    found = compare(model, ids, NEW, {"prompt_lookup_num_tokens": DRAFTS}, way)
    assert found["equal"] == 2 * NEW and found["gaps"] == [] and found["tokens_per_call"] >= 1


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_is_compared_up_to_the_first_token_that_differs(model, ids, way):
    plain = model.generate(ids[0], max_new_tokens=NEW, do_sample=False, eos_token_id=None)[
        0, ids[0].shape[1] :
    ].tolist()
    banned = plain[NEW // 2]
    drafts = {"prompt_lookup_num_tokens": DRAFTS, "suppress_tokens": [banned]}
    found = compare(model, ids[:1], NEW, drafts, way)
    assert found["equal"] == plain.index(banned) and len(found["gaps"]) == 1 and found["gaps"][0] > 0


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
