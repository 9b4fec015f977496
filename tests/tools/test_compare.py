"""`tq-hf compare`: one prompt on a `DynamicCache` and on packed caches."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from test_cli import fails, run, saved_model
from transformers import AutoTokenizer, DynamicCache

from tests.support.tiny_models import VOCAB, build
from tq_hf import TurboQuantCache
from tq_hf.compat import as_input
from tq_hf.tools.compare import BASELINE, Answer, Comparison, print_answers, prompt_ids

NEW = 12


def prompt(tokens: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (1, tokens), generator=torch.Generator().manual_seed(2))


def never_ending(name: str) -> Any:
    model = build(name)
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_answers_are_those_of_generate_and_bytes_those_of_its_cache(name: str) -> None:
    model, ids = never_ending(name), prompt(700)
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
    short = Comparison(model, prompt(100), NEW).answer("2bit_nc")
    assert short.kl < 1e-6 and short.top1 == 1
    ids = prompt(700)
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
    free = Comparison(model, prompt(300), NEW).baseline
    model.generation_config.eos_token_id = [VOCAB + 1, free.ids[3]]
    assert Comparison(model, prompt(300), NEW).baseline.ids == free.ids[: free.ids.index(free.ids[3]) + 1]
    model.generation_config.eos_token_id = free.ids[0]
    one = Comparison(model, prompt(300), NEW)
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


def test_a_prompt_that_is_longer_than_the_model_allows_is_refused(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("x" * 5000, encoding="utf-8")
    said = fails("compare", folder, "--text", text, "--tokens", 5000)
    assert "and with 64 new ones that is more than the" in said and "Pass fewer `--tokens`" in said
    assert "4bit_nc" in fails("compare", folder, "--preset", "5bit")
