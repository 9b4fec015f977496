"""`tq-hf sweep`: what each layer loses at each preset, and the presets by layer that fit; `tq-hf compare`."""

import io
import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from test_cli import fails, run, saved_model
from transformers import AutoConfig, AutoTokenizer, DynamicCache

from examples.measure.quality import quality
from tests.support.helpers import slow
from tests.support.tiny_models import VOCAB, build, token_ids
from tq_hf import TurboQuantCache, TurboQuantConfig
from tq_hf.compat import as_input
from tq_hf.tools import cli, display
from tq_hf.tools import sweep as module
from tq_hf.tools.compare import BASELINE, Answer, Comparison, print_answers, prompt_ids
from tq_hf.tools.display import with_progress
from tq_hf.tools.estimate import Estimator
from tq_hf.tools.sweep import CHUNK, DENSE, FIRST, Reader, fit, spelled, sweep

KL = {
    0: {"four": 2.0, "two": 10.0, DENSE: 0.0},
    1: {"four": 0.1, "two": 0.2, DENSE: 0.0},
    5: {"four": 4.0, "two": 6.0, DENSE: 0.0},
}
SIZES: dict[int, dict[str, float]] = {layer: {"four": 40, "two": 20, DENSE: 160} for layer in KL}


@pytest.mark.parametrize(
    "most, names",
    [
        (60, ("two", "two", "two")),
        (79, ("two", "two", "two")),
        (80, ("four", "two", "two")),  # 8 for 20 bytes
        (100, ("four", "two", "four")),  # 2 for 20, as 2 for 120 is less
        (120, ("four", "four", "four")),
        (220, ("four", "two", DENSE)),  # 4 for 120, before 2 for 120 and 0.1 for 20
        (239, ("four", "two", DENSE)),
        (480, (DENSE, DENSE, DENSE)),
        (10**9, (DENSE, DENSE, DENSE)),
    ],
)
def test_layers_are_raised_where_that_takes_most_away_for_a_byte(most, names):
    assert fit(KL, SIZES, most) == dict(zip(KL, names, strict=True))


def test_what_fits_never_takes_more_and_more_bytes_never_serve_worse_in_sum():
    generator = torch.Generator().manual_seed(0)
    names = ["a", "b", "c", "d"]
    for _ in range(20):
        kl = {i: dict(zip(names, torch.rand(4, generator=generator).tolist(), strict=True)) for i in range(3)}
        sizes = {i: dict(zip(names, torch.randint(1, 50, (4,), generator=generator).tolist(), strict=True)) for i in kl}
        least = sum(min(row.values()) for row in sizes.values())
        start = sum(min((sizes[i][name], kl[i][name]) for name in names)[1] for i in kl)
        for most in range(least, 160, 7):
            chosen = fit(kl, sizes, most)
            assert sum(sizes[i][name] for i, name in chosen.items()) <= most
            assert sum(kl[i][name] for i, name in chosen.items()) <= start
        best = min(sum(kl[i][n] for i, n in enumerate(every)) for every in itertools.product(names, repeat=3))
        assert sum(kl[i][name] for i, name in fit(kl, sizes, 10**6).items()) == pytest.approx(best)


def test_of_presets_of_one_size_the_better_one_is_taken():
    assert fit({0: {"a": 2.0, "b": 1.0}}, {0: {"a": 5, "b": 5}}, 5) == {0: "b"}


def test_the_line_names_the_commonest_preset_and_the_layers_that_differ():
    config, line = spelled({0: "k8v4", 2: "2bit_nc", 3: DENSE, 4: "2bit_nc"})
    assert line == 'TurboQuantConfig.from_preset("2bit_nc", layers={0: "k8v4", 3: None})'
    assert eval(line) == config == TurboQuantConfig.from_preset("2bit_nc", layers={0: "k8v4"}, skip_layers=(3,))
    assert spelled({0: "3bit_nc", 1: "3bit_nc"})[1] == 'TurboQuantConfig.from_preset("3bit_nc")'
    assert eval(spelled({0: DENSE})[1]) == TurboQuantConfig.from_preset("4bit_nc", skip_layers=(0,))


def reader_of(name: str, tokens: int = FIRST + 2 * CHUNK + 9, layers: int = 2) -> Reader:
    model = build(name, num_hidden_layers=layers, attention="turboquant")
    return Reader(model, token_ids(1, tokens, seed=1))


def test_kl_is_that_of_the_quality_measurements():
    """One document, a mean over the positions from `FIRST` on; nothing packed loses nothing."""
    reader = reader_of("llama")
    model, config = reader.model, TurboQuantConfig.from_preset("2bit_nc")
    known = quality.reference(model, reader.ids, CHUNK)
    cache = TurboQuantCache(model.config, config)
    parts = [logits for _, logits in quality.forced_logits(model, reader.ids, cache, "turboquant", CHUNK)]
    log_probs = torch.cat(parts, dim=1).log_softmax(-1)
    expected = (known.log_probs.exp() * (known.log_probs - log_probs)).sum(-1)[:, FIRST:].clamp_min(0).mean()
    assert reader.kl(config) == pytest.approx(expected.item(), rel=1e-3) and expected > 1e-3
    assert reader.kl(TurboQuantConfig(residual_length=10**6)) < 1e-6


@pytest.mark.parametrize("name", [slow("llama"), "gemma3"])
def test_a_layer_is_measured_alone_and_bytes_add_up_to_those_of_a_cache(name):
    reader, presets = reader_of(name, layers=4), ["k8v4", "2bit_nc"]
    estimator = Estimator(reader.model.config, torch.float32)
    result = sweep(reader, estimator, presets, 1000)
    sliding = [kind == "sliding_attention" for kind in getattr(reader.model.config, "layer_types", None) or [""] * 4]
    assert list(result.kl) == reader.layers == [i for i, slides in enumerate(sliding) if not slides]
    dense = [layer for layer in reader.layers if layer != reader.layers[0]]
    alone = reader.kl(TurboQuantConfig.from_preset("2bit_nc", skip_layers=dense))
    assert result.kl[reader.layers[0]] == {"k8v4": pytest.approx(0, abs=alone / 5), "2bit_nc": alone, DENSE: 0}
    assert alone < result.whole_kl["2bit_nc"] or len(reader.layers) == 1
    for names in itertools.product((*presets, DENSE), repeat=min(2, len(reader.layers))):
        chosen = dict.fromkeys(reader.layers, "2bit_nc") | dict(zip(reader.layers, names, strict=False))
        cache = TurboQuantCache(reader.model.config, spelled(chosen)[0])
        with torch.no_grad():
            reader.model(torch.ones(1, 1000, dtype=torch.long), **as_input(cache))
        more = sum(result.more_bytes[layer][preset] for layer, preset in chosen.items())
        assert result.whole_bytes["2bit_nc"] + more == cache.memory_footprint().total
    least = result.whole_bytes["2bit_nc"]
    assert fit(result.kl, result.more_bytes, 0) == dict.fromkeys(reader.layers, "2bit_nc")
    with pytest.raises(ValueError, match=f"smallest presets in all layers take {least:,} bytes with 1,000 tokens, and"):
        sweep(reader, estimator, presets, 1000, least - 1)


def test_a_text_of_which_nothing_is_scored_is_refused():
    with pytest.raises(ValueError, match="512 tokens of the text are read, and the first 512 are not scored"):
        reader_of("llama", FIRST)


def test_what_all_readings_take_is_said_after_the_first_and_how_far_they_are_on_a_line_each(capfd, monkeypatch):
    """Where there is no terminal for a bar. A reading takes three seconds of a clock that is acted out."""
    clock = itertools.count(0, 3)
    monkeypatch.setattr(display, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    assert list(with_progress(range(200), "readings", console)) == list(range(200))
    written = capfd.readouterr()
    assert written.out == ""
    first, *lines = written.err.splitlines()
    assert first == "All readings take about 10 min: the first took 3.0 s."
    assert lines[0] == "10 of 200 readings, about 10 min left." and lines[-1].startswith("200 of 200 readings")
    assert lines[-2] == "190 of 200 readings, about 30 s left." and len(lines) == display.REPORTS


def test_a_reading_is_announced_before_it_is_made_and_results_go_elsewhere(monkeypatch, capfd):
    """A model that takes minutes a reading must not be silent; a table that is piped has nothing else in it."""
    reader, said = reader_of("gemma3"), []
    read = reader._log_probs

    def noted(cache):
        said.append(capfd.readouterr().err)
        return read(cache)

    monkeypatch.setattr(reader, "_log_probs", noted)
    estimator = Estimator(reader.model.config, torch.float32)
    sweep(reader, estimator, ["4bit_nc", "2bit_nc"], 1000)
    number = 2 * (len(reader.layers) + 1)
    assert said[0] == f"777 tokens are read {number} times, after once with all layers dense.\n"
    assert len(said) == 1 + 1 + number and not any(said[1:3])
    assert said[3].startswith("All readings take about ") and capfd.readouterr().out == ""


needs_shipped_model = pytest.mark.skipif(
    not (cli.EXAMPLES / "needle" / "config.json").exists(), reason="the shipped model is not there"
)


@needs_shipped_model
def test_the_command_finds_presets_for_the_shipped_model_that_serve_better_than_one(tmp_path):
    options = ["--tokens", 700, "--context", 2048, "--preset", "k8v4", "--preset", "4bit_nc", "--preset", "2bit_nc"]
    output = run("sweep", *options, "--bytes", "32%", "--output", tmp_path / "s.json")
    numbers = json.loads((tmp_path / "s.json").read_text())
    found = numbers["fit"]
    assert found["config"] in output and numbers["tokens"] == 700
    config = eval(found["config"])
    estimator = Estimator(AutoConfig.from_pretrained(cli.EXAMPLES / "needle"))
    footprint = estimator.footprint(config, 2048)
    assert footprint.total == found["bytes"] <= found["bytes_allowed"] == int(0.32 * footprint.bf16_equivalent)
    fitting = {
        name: numbers["whole_kl"][name] for name, size in numbers["whole_bytes"].items() if size <= found["bytes"]
    }
    assert fitting and found["kl"] < min(fitting.values())
    for layer in range(4):
        row = numbers["kl"][str(layer)]
        assert row[DENSE] == 0 < row["k8v4"] < row["4bit_nc"] < row["2bit_nc"]
        assert f"{row['2bit_nc']:.1e}" in output


@needs_shipped_model
def test_what_is_wrong_is_said_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "sweep", None)
    text = tmp_path / "short.txt"
    text.write_text("too short", encoding="utf-8")
    for options, says in (
        (["--bytes", "much"], "not an amount of memory"),
        (["--preset", "x"], "Unknown preset"),
        (["--bytes", "24 %"], "not an amount of memory"),
        (["--output", tmp_path / "no" / "s.json"], "There is no folder"),
        (["--text", tmp_path / "no.txt"], "No such file"),
        (["--text", text], "9 tokens of the text are read"),
    ):
        assert says in fails("sweep", *options)
    monkeypatch.setattr(cli, "EXAMPLES", Path(tmp_path))
    assert "Pass a text: `--text FILE`" in fails("sweep", "some/model")


NEW = 12


def never_ending(name: str) -> Any:
    model = build(name)
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_answers_are_those_of_generate_and_bytes_those_of_its_cache(name: str) -> None:
    model, ids = never_ending(name), token_ids(1, 700, seed=2)
    comparison = Comparison(model, ids, NEW)
    packed = comparison.answer("2bit_nc")
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0}
    caches = (DynamicCache(config=model.config), TurboQuantCache(model.config, "2bit_nc"))
    dense = "eager" if name == "gpt_oss" else "sdpa"
    for answer, cache, attention in zip((comparison.baseline, packed), caches, (dense, "turboquant"), strict=True):
        model.set_attn_implementation(attention)
        output = model.generate(ids, attention_mask=torch.ones_like(ids), **as_input(cache), **options)
        assert output[0, 700:].tolist() == answer.ids and len(answer.ids) == NEW
    assert packed.bytes_held == cache.memory_footprint().total < comparison.baseline.bytes_held
    assert packed.first_token > 0 and packed.ms_a_token > 0


def test_kl_is_that_of_the_baselines_answer_and_nothing_packed_costs_nothing() -> None:
    model = never_ending("llama")
    short = Comparison(model, token_ids(1, 100, seed=2), NEW).answer("2bit_nc")
    assert short.kl < 1e-6 and short.top1 == 1
    ids = token_ids(1, 700, seed=2)
    comparison = Comparison(model, ids, NEW)
    packed = comparison.answer("2bit_nc")
    whole = torch.cat([ids, torch.tensor([comparison.baseline.ids[:-1]])], dim=1)
    log_probs = []
    caches = (DynamicCache(config=model.config), TurboQuantCache(model.config, "2bit_nc"))
    for attention, cache in zip(("sdpa", "turboquant"), caches, strict=True):
        model.set_attn_implementation(attention)
        parts = [model(part, **as_input(cache)).logits[0] for part in (whole[:, :700], whole[:, 700:])]
        log_probs.append(torch.cat(parts)[699:].log_softmax(-1))
    exact, other = log_probs
    assert len(exact) == NEW
    expected = (exact.exp() * (exact - other)).sum(-1).mean().item()
    assert packed.kl == pytest.approx(expected, rel=1e-3) and expected > 1e-4
    assert packed.top1 == (exact.argmax(-1) == other.argmax(-1)).float().mean().item()


def test_an_answer_ends_with_an_end_token() -> None:
    model = never_ending("llama")
    free = Comparison(model, token_ids(1, 300, seed=2), NEW).baseline
    model.generation_config.eos_token_id = [VOCAB + 1, free.ids[3]]
    assert Comparison(model, token_ids(1, 300, seed=2), NEW).baseline.ids == free.ids[: free.ids.index(free.ids[3]) + 1]
    model.generation_config.eos_token_id = free.ids[0]
    one = Comparison(model, token_ids(1, 300, seed=2), NEW)
    assert one.baseline.ids == free.ids[:1] and one.baseline.ms_a_token is None
    assert one.answer("4bit_nc").kl < 1e-6


def of(ids: list[int], name: str = "4bit_nc") -> Answer:
    return Answer(name, ids, 10, 1.0, 2.0)


def test_answers_part_at_the_first_token_that_differs_or_where_one_ends() -> None:
    assert of([1, 2, 3]).parts_at(of([1, 2, 3])) is None
    assert of([1, 2, 3]).parts_at(of([1, 4, 3])) == 1
    assert of([1, 2]).parts_at(of([1, 2, 3])) == of([1, 2, 3]).parts_at(of([1, 2])) == 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model("llama", tmp_path_factory.mktemp("llama"))


def test_a_row_for_each_cache_and_the_answers_side_by_side(folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    text = tmp_path / "text.txt"
    text.write_text("A stitch in time saves nine. " * 40, encoding="utf-8")
    asked = ("compare", folder, "--text", text, "--tokens", 400, "--max-new-tokens", 8, "--question", "Why?")
    output = run(*asked, "--preset", "4bit_nc", "--preset", "2bit_nc")
    length = len("<user>" + "\n\n" + "Why?" + "<assistant>") + 400
    assert f"a prompt of {length} tokens on cpu" in output
    rows = [
        line.split() for line in output.splitlines() if re.match(r" ?(DynamicCache|4bit_nc|2bit_nc) +\d+\.\d ", line)
    ]
    assert [row[0] for row in rows] == [BASELINE, "4bit_nc", "2bit_nc"]
    assert rows[0][2] == "1.00x" and all(float(row[2].removesuffix("x")) > 1 for row in rows[1:])


def test_answers_that_agree_are_printed_once_and_others_beside_the_baselines(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    console = Console(record=True, width=60, file=io.StringIO())
    ids = tokenizer("[b] same")["input_ids"]
    print_answers([of(ids, BASELINE), of(ids), of([*ids[:-1], ids[0]], "2bit_nc")], tokenizer, console)
    written = console.export_text()
    assert "The answer of DynamicCache, 4bit_nc:" in written and written.count("[b] same") == 2
    assert re.search(r"DynamicCache +2bit_nc", written) and "[b] sam[" in written


def test_without_a_chat_template_the_text_is_continued(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    assert tokenizer.decode(prompt_ids(tokenizer, "A long text", "Why?", 6)[0]) == "A long"


def test_a_prompt_that_is_longer_than_the_model_allows_is_refused(tmp_path: Path) -> None:
    rope, text = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, tmp_path / "text.txt"
    folder = saved_model("llama", tmp_path / "model", rope_parameters=rope)
    text.write_text("x" * 5000, encoding="utf-8")
    said = fails("compare", folder, "--text", text, "--tokens", 5000)
    assert "and with 64 new ones that is more than the 4,096 positions" in said and "Pass fewer `--tokens`" in said
    assert "4bit_nc" in fails("compare", folder, "--preset", "5bit")
