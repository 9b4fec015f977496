"""Models at published sizes of heads run, and the sweep sees what is wrong. What `families.md` says of these sizes is
what the functions that choose answer."""

import json
import os
from importlib.util import find_spec

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, Gemma4TextConfig, GPT2Config, LlamaConfig

from examples.measure.quality import published_runs, published_sizes
from examples.measure.quality.family_check import NOT_TESTABLE
from examples.measure.quality.family_configs import model_types, tiny_config
from examples.provenance import RESULTS
from tests.support.helpers import slow
from tq_hf import TurboQuantCache
from tq_hf.compat import as_input
from tq_hf.ops import dispatch

CPU = torch.device("cpu")
ALL = ("prompt", "decode", "continuation", "graph decoding", "batches")


def test_heads_stay_as_they_are_published() -> None:
    heads = published_runs.published_heads(Gemma4TextConfig, {})
    assert heads == {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}  # and 512 by its `__init__`
    assert published_runs.published_heads(GPT2Config, {}) == {"n_head": 12, "n_embd": 768}
    # Where no width of a head is said, it is that of the hidden size over the heads.
    assert published_runs.published_heads(LlamaConfig, {})["head_dim"] == 128
    assert published_runs.published_heads(LlamaConfig, {"hidden_size": 2048})["head_dim"] == 64


def has_published_heads(model_type: str) -> None:
    """All heads of the model that is run are heads of the family's own config."""
    try:
        published = published_runs.heads_of(CONFIG_MAPPING[model_type.partition("/")[0]]())
    except Exception:
        pytest.skip("does not run from its defaults alone")
    found = published_runs.heads_of(tiny_config(model_type, published_runs.published_heads))
    assert {heads[1:] for heads in found} <= {heads[1:] for heads in published}


KINDS_OF_CONFIGS = (
    "bart",  # heads by other names, the hidden size not over these heads
    "llava",  # text decoder of another family
    "paligemma",  # the same, with sizes of its own
    "qwen2_vl",  # parts of the rotary embedding, as wide as a head together
    "internlm3",  # sizes of its own for another family's model
    "cwm",  # a hidden size that has to be that of the heads
    "mistral_large4",  # a width of the indexer that has to be more than another
)


@pytest.mark.parametrize(
    "model_type", [slow(name) if name in ("paligemma", "cwm") else name for name in KINDS_OF_CONFIGS]
)
def test_models_have_published_heads(model_type: str) -> None:
    has_published_heads(model_type)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(model_types().keys() - NOT_TESTABLE.keys() - set(KINDS_OF_CONFIGS)))
def test_all_models_have_published_heads(model_type: str) -> None:
    if model_type in ("granite_docling", "glm4v_moe", "mllama"):
        pytest.skip("its text decoder does not run alone, or not at these sizes")
    has_published_heads(model_type)


def test_families_with_the_same_heads_are_run_once() -> None:
    """Of two or more the smaller: Bamba has other layers beside, Gemma 2 caps its logits, and JetMoE is not known
    without running it."""
    names = ["granite", "mixtral", "llama", "ministral3", "bamba", "gemma2", "gemma3_text", "t5", "jetmoe"]
    assert published_runs.distinct(names) == ["llama", "ministral3", "bamba", "gemma2", "gemma3_text", "t5", "jetmoe"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "width"), [("gemma4_text", 512), ("deepseek_v3", 512), ("gpt_oss", 64), ("phi", 64)]
)
def test_families_run_at_published_sizes(model_type: str, width: int) -> None:
    found = published_runs.run(model_type, CPU, torch.float32)
    assert found.outcomes == dict.fromkeys(ALL, "right")
    assert found.in_torch == []  # on a CPU nothing is missed
    model = published_runs.published_model(model_type, CPU, torch.float32)
    cache = TurboQuantCache(model.config)
    with torch.no_grad():
        model(input_ids=published_runs.ids(model, 1, 3), **as_input(cache))
    assert max(layer.keys.shape[-1] for layer in cache.layers) == width


@pytest.mark.slow
def test_attention_that_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = dispatch.attend
    monkeypatch.setattr(dispatch, "attend", lambda *args: 2 * right(*args))
    outcomes = published_runs.run("gpt_oss", CPU, torch.float32).outcomes
    assert outcomes["prompt"] == "right"
    assert outcomes["decode"].endswith("away") and outcomes["continuation"].endswith("away")


def test_processes_go_on_after_one_that_ends() -> None:
    own = "(str(__import__('os').getpid()), True)"
    said = ["('first', True)", "__import__('os')._exit(1)", "('broken', False)", own]
    first, ended, broken, last = published_runs.in_processes(eval, said, 1)
    assert (first, ended, broken) == ("first", f"{said[1]}: its process ended", "broken")
    assert last != str(os.getpid())
    assert sorted(published_runs.in_processes(eval, said[:1] * 5, 2)) == ["first"] * 5


def test_a_line_says_what_could_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise ValueError("no such attention")

    monkeypatch.setattr(published_runs, "run", fail)
    text, goes_on = published_runs.line("gptj")
    assert text.startswith("gptj: not run, ") and goes_on


SAID = published_sizes.read()
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="kernels choose by what Triton says of a card")


@needs_triton
@pytest.mark.parametrize(
    "model_type", ["gemma4_text", "deepseek_v3", *map(slow, ("gemma3_text", "gpt_oss", "mistral"))]
)
def test_a_family_is_served_as_the_page_says(model_type: str) -> None:
    if transformers.__version__ != json.loads(published_sizes.FILE.read_text())["transformers"]:
        pytest.skip("of another transformers")
    assert published_sizes.sizes_of(model_type) == SAID[model_type]


def test_the_page_has_the_section_of_the_last_run() -> None:
    page = (RESULTS / "families.md").read_text(encoding="utf-8")
    lines = published_sizes.section(SAID)[4:]
    assert SAID["gemma4_text"].torch == {"512": ["prompts in batches"]}
    assert any(line.startswith("| 512 | prompts in batches | start") and "gemma4_text" in line for line in lines)
    assert page.endswith("\n".join(lines[1:]) + "\n")


@needs_triton
@pytest.mark.parametrize(
    ("width", "falls"),
    [
        (128, []),
        (256, ["prompts (8.x)", "prompts in batches (8.x)"]),
        (42, ["steps in batches", "prompts in batches"]),
        (576, ["steps", "prompts", "steps in batches", "prompts in batches"]),
        (512, ["prompts in batches"]),
    ],
)
def test_what_falls_to_torch_is_asked_of_each_card(width: int, falls: list[str]) -> None:
    assert published_sizes.in_torch(width, width, batches=True) == falls


@needs_triton
def test_a_card_that_was_asked_about_is_forgotten() -> None:
    from tq_kernels.common.device import target

    with published_sizes.card((8, 0)) as states:
        assert target(states.device).capability == (8, 0)
    assert target.cache_info().currsize == 0
