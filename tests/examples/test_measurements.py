"""Scripts of measurements, as a CPU runs them in small, and their rows in tables.

Predictions for other cards say what they say of the card they were fitted to; a card is recognised by its name. The
bound on codes reads a text in one pass as a cache is read in chunks.
"""

from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.generation.continuous_batching import offloading_manager

from examples.measure.compile.cards import CARDS, card_of, load, prediction
from examples.measure.quality import latents, quality, quantized, train_needle
from examples.measure.quality.bound import (
    BLOCK,
    CHUNK,
    Codes,
    alike,
    error_of,
    hidden,
    keys_in_parts,
    read_with,
    round_trip,
    twice,
)
from examples.measure.quality.drafts import DRAFTS, WAYS, compare
from examples.measure.report import tables
from examples.measure.report.tables import RENDERERS, start
from examples.measure.speed import bench_offload, soak
from examples.measure.speed.bench_start import measure
from examples.measure.speed.soak import small_model
from examples.provenance import BASELINE, provenance
from tests.support.tiny_models import build, token_ids
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


def test_bits_of_both_parts_are_those_of_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = quality.documents
    monkeypatch.setattr(quality, "documents", lambda *args, **options: documents(*args, **options)[:1])
    train_needle.build_model("needle-latents").save_pretrained(tmp_path)
    train_needle.build_tokenizer().save_pretrained(tmp_path)
    rows = latents.rows(str(tmp_path), ((8, 8), (4, 8)), Namespace(tokens=1024, seeds=1, chunk=512))
    assert [(row["model"], row["key_bits"], row["value_bits"]) for row in rows] == [
        ("deepseek_v3", bits, 8) for bits in (8, 4)
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


def test_steps_with_and_without_a_grammar_are_timed() -> None:
    """Such requests take turns in an engine."""
    pytest.importorskip("xgrammar", reason="answers in a form need tq-hf[grammar]")
    from examples.measure.speed.bench_grammars import measure, tokenizer_of

    given = Namespace(requests=2, context=20, steps=4, rounds=1, seed=0, letters=2)
    with torch.no_grad():
        rows = measure(small_model(torch.device("cpu")), given)
    assert [row["sampled"] for row in rows] == [False, True]
    assert all(row["over"] == row["ms_with"] / row["ms_without"] > 0 for row in rows)
    assert len(tokenizer_of(5000).get_vocab()) == 5000


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
    answer = model.generate(ids[0], max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    plain = answer[0, ids[0].shape[1] :].tolist()
    banned = plain[NEW // 2]
    drafts = {"prompt_lookup_num_tokens": DRAFTS, "suppress_tokens": [banned]}
    found = compare(model, ids[:1], NEW, drafts, way)
    assert found["equal"] == plain.index(banned) and len(found["gaps"]) == 1 and found["gaps"][0] > 0


def test_caches_are_compared_on_the_same_tokens() -> None:
    model, config = build("llama"), build("llama").config
    presets: dict[str, Any] = {name: partial(TurboQuantCache, config, name) for name in ("4bit_nc", "2bit_nc")}
    run = quantized.Run(model, {BASELINE: partial(DynamicCache, config=config)} | presets)
    for seed in range(2):
        run.read(token_ids(1, 520, seed=seed), prompt=512)
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


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("Tesla T4", "T4"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_a_card_is_known_by_its_name(name: str, card: str | None) -> None:
    assert card_of(name) == card
    assert ("predicted for" in prediction(name)) == (card is not None)


def test_predictions_are_within_their_bounds_where_they_were_measured() -> None:
    record = load()
    assert record["error"]["worst"] <= 0.25 and record["error"]["median"] <= 0.1
    assert {cell["card"] for cell in record["predictions"]} == {*CARDS}
    assert "T4" in RENDERERS["cards"](record)


def test_a_t4_decodes_faster_than_it_reads_fp16() -> None:
    cells = [c for c in load()["predictions"] if c["card"] == "T4" and c["preset"] == "4bit_nc" and c["length"] == 8192]
    assert cells and all(cell["speedup"] >= 1.5 for cell in cells)


TOKENS = 4 * CHUNK + 60


@pytest.fixture(scope="module")
def ids_of_bound(model):
    return torch.randint(0, model.config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(0))


def error(states: torch.Tensor, exact: torch.Tensor) -> float:
    return ((states - exact).square().sum() / exact.square().sum()).item()


@torch.no_grad()
@pytest.mark.parametrize("preset, bits", [("2bit_nc", (2, 2)), ("2.5bit_nc", (3, 2))])
def test_one_pass_is_what_a_cache_read_in_chunks_gives(model, ids_of_bound, preset, bits):
    """Of a cache without loud channels: those of a row are a simulation."""
    cache = TurboQuantCache(model.config, preset, loud=False)
    chunks = [
        model.get_decoder()(ids_of_bound[:, start : start + CHUNK], **as_input(cache)).last_hidden_state[0]
        for start in range(0, TOKENS, CHUNK)
    ]
    read = torch.cat(chunks)[CHUNK + BLOCK :]
    exact = hidden(model, ids_of_bound, None, CHUNK + BLOCK)
    states = hidden(model, ids_of_bound, alike(key_bits=bits[0], value_bits=bits[1]), CHUNK + BLOCK)
    assert error(read, exact) > 1e-5
    # A code may be rounded the other way.
    assert error(states, read) < 0.01 * error(read, exact)
    assert error(states, exact) == pytest.approx(error(read, exact), rel=0.02)


def test_exact_codes_are_exact(model, ids_of_bound):
    exact = hidden(model, ids_of_bound, None, CHUNK)
    assert error(hidden(model, ids_of_bound, alike(key_bits=None, value_bits=None), CHUNK), exact) < 1e-10


def test_the_attention_of_the_model_comes_back(model):
    with read_with(model, None):
        assert model.config._attn_implementation == "bound"
    assert model.config._attn_implementation == "turboquant"


@pytest.mark.parametrize("wanted", [4.0**-2, 0.338])
def test_noise_of_an_ideal_coder_has_its_error_after_shrinking(wanted):
    z = torch.randn(4, 128, 64, generator=torch.Generator().manual_seed(1))
    y = round_trip(z, 2, wanted, 1.0, is_value=False)
    assert (y * z).sum() / z.square().sum() == pytest.approx(1, rel=0.02)
    assert (y * (1 - wanted) - z).square().mean() / z.square().mean() == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize(
    ("codes", "sizes", "expected"),
    [
        (Codes(loud=2), (2, 62), (6.5e-4, error_of((2,)))),
        (Codes(parts=twice(2, 1 / 8)), (8, 48, 8), (error_of((2, 2)), error_of((2,)), 1)),
        (Codes(key_bits=3, parts=twice(3)), (4, 56, 4), (error_of((3, 3)), error_of((3,)), 1)),
    ],
)
def test_loud_channels_have_the_bits_that_quiet_ones_lack(codes, sizes, expected):
    """Channels are 1, 1/4 and 1/16 loud, and stand in any order. Few channels with a scale of their own have less error
    than Gaussian ones."""
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(64, generator=generator)
    loudness = torch.cat([torch.full((n,), 4.0**-i) for i, n in enumerate(sizes)])[order]
    keys = loudness * torch.randn(1, 1, 8, BLOCK, 64, generator=generator) + 3 * loudness
    queries = torch.randn(1, 2, 8 * BLOCK, 64, generator=generator)
    read = keys_in_parts(codes._replace(pairs=False), queries, keys.flatten(2, 3), keys)
    spread = (keys - keys.mean(3, keepdim=True)).square().mean((0, 1, 2, 3))
    found = (read - keys).square().mean((0, 1, 2, 3)) / spread
    for i, each in enumerate(expected):
        assert each / 4 < found[loudness == 4.0**-i].mean() < 1.15 * each
