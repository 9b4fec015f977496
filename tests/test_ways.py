"""The ways that users use, each once. `make test-next` runs them on the newest transformers, torch and Triton.

A recipe that keeps every token exact answers as transformers' own cache does. A packed recipe answers the same in every
way. A name of transformers that has gone is named by `tests/test_fence.py`.
"""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import CompileConfig, DynamicCache, PreTrainedModel

import tq_hf
from tests.support.helpers import slow
from tests.support.tiny_models import build, dense_attention, token_ids
from tq_hf import TurboQuantCache, attention
from tq_hf.compat import CACHE_NAME, as_input
from tq_hf.layers import advice

FAMILIES = ["llama", "gemma3", "gpt_oss"]
ROOM = 512
GREEDY = dict(max_new_tokens=12, do_sample=False)
model_of = partial(build, attention="turboquant")
compiling = CompileConfig(backend="eager")
compiling._compile_all_devices = True
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "preallocated": {},
    "compiled": dict(compile_config=compiling),
    "graph_decoding": dict(custom_generate=tq_hf.graph_decoding),
    "prompt_lookup": dict(prompt_lookup_num_tokens=3),
    "beams": dict(num_beams=2),
}
"""Of `generate()`, by way."""

batches = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.19"), reason="continuous batching is of another design"
)


def prompt(rows: int = 1) -> dict[str, torch.Tensor]:
    """Tokens `[rows, 300]`; the second row has 40 pads on its left."""
    ids = token_ids(rows, 300, seed=3)
    mask = torch.ones_like(ids)
    mask[1:, :40] = 0
    return dict(input_ids=ids, attention_mask=mask)


def packed(model: PreTrainedModel, **options: Any) -> TurboQuantCache:
    return TurboQuantCache(model.config, residual_length=0, **options)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("room", "chunk"), [(None, None), (None, 130), (ROOM, None)], ids=["", "chunks", "room"])
def test_an_exact_recipe_answers_as_transformers_cache(family: str, room: int | None, chunk: int | None) -> None:
    dense = build(family, attention=dense_attention(family))
    expected = dense.generate(**prompt(2), **GREEDY, **as_input(DynamicCache(config=dense.config)))
    model = model_of(family)
    cache = TurboQuantCache(model.config, residual_length=ROOM, max_cache_len=room)
    found = model.generate(**prompt(2), **GREEDY, **as_input(cache), prefill_chunk_size=chunk)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("family", "way"),
    [
        slow(family, way) if family != "llama" and way == "compiled" else (family, way)
        for family in FAMILIES
        for way in ("preallocated", "compiled", "graph_decoding", "prompt_lookup")
    ],
)
def test_every_way_answers_as_a_cache_that_grows(family: str, way: str) -> None:
    model = model_of(family)
    rows = 1 if way == "prompt_lookup" else 2  # transformers looks up one sequence
    room = None if way == "prompt_lookup" else ROOM
    expected = model.generate(**prompt(rows), **GREEDY, **as_input(packed(model)))
    cache = packed(model, max_cache_len=room)
    assert torch.equal(model.generate(**prompt(rows), **GREEDY, **as_input(cache), **OPTIONS[way]), expected)
    assert cache.memory_footprint().packed > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_cache_answers_as_the_one_that_was_cropped(family: str, tmp_path: Path) -> None:
    if family != "llama" and Version(transformers.__version__) < Version("5.20"):
        pytest.skip("a window that was recorded and cropped has masks of another size, in a DynamicCache, too")
    model, ids = model_of(family), prompt()["input_ids"]
    cache = packed(model)
    model(ids[:, :290], **as_input(cache))
    cache.activate_past_recording()  # of sliding windows
    model(ids[:, 290:291], **as_input(cache))
    cache.crop(-1)
    cache.save(tmp_path / "cache.safetensors", model)
    loaded = TurboQuantCache.load(tmp_path / "cache.safetensors", model)
    answers = [model.generate(ids, **GREEDY, **as_input(each)) for each in (cache, loaded)]
    assert torch.equal(*answers)


@pytest.mark.parametrize("name", sorted({"past_key_values", CACHE_NAME}))
def test_both_names_of_a_cache_are_taken(name: str) -> None:
    model, ids = model_of("llama"), prompt()["input_ids"]
    expected = model.generate(ids, **GREEDY, **as_input(packed(model)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers', of the older name
        for way in ("", "graph_decoding", "prompt_lookup"):
            cache = packed(model, max_cache_len=ROOM if way == "graph_decoding" else None)
            assert torch.equal(model.generate(ids, **GREEDY, **{name: cache}, **OPTIONS[way]), expected)
        cache = packed(model)
        assert model(ids, **{name: cache})[CACHE_NAME] is cache and cache.get_seq_length() == 300


@pytest.mark.parametrize("way", ["", "graph_decoding", "prompt_lookup", "beams"])
@pytest.mark.parametrize("tokens, held", [(300, 0), (1, 0), (300, 290)])
def test_room_for_the_whole_answer_is_asked_for_before_the_prompt_is_read(way: str, tokens: int, held: int) -> None:
    model, ids = model_of("llama"), prompt()["input_ids"][:, :tokens]
    cache, enough = (packed(model, max_cache_len=tokens + room) for room in (3, 15))
    if held:
        model(ids[:, :held], **as_input(cache))
    with pytest.raises(ValueError, match=f"{tokens + 11} tokens: .*{tokens + 3}. .*`max_new_tokens=4`"):
        model.generate(ids, max_new_tokens=12, **as_input(cache), **OPTIONS[way])
    assert int(cache.get_seq_length()) == held
    model.generate(ids, max_new_tokens=12, **as_input(enough), **OPTIONS[way])


def test_a_cache_or_an_attention_that_gains_nothing_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    for module in (advice, attention):
        module.logger.warning_once.cache_clear()
        monkeypatch.setattr(module.logger, "warning", lambda message, *_, **__: said.append(message))
    model, ids = build("llama"), prompt()["input_ids"]
    wrong = {"turboquant": DynamicCache(config=model.config), "sdpa": packed(model)}
    for name, cache in wrong.items():
        model.set_attn_implementation(name)
        for _ in range(2):
            model.generate(ids, max_new_tokens=3, **as_input(cache))
    dynamic, dense = said
    assert "this DynamicCache has none" in dynamic and f"`{CACHE_NAME}=tq_hf.TurboQuantCache(" in dynamic
    assert "dequantizes the whole cache" in dense and 'attn_implementation="turboquant"' in dense
    model.set_attn_implementation("turboquant")
    model.generate(ids, max_new_tokens=3, **as_input(packed(model, skip_layers=(0,))))
    assert len(said) == 2


@pytest.mark.parametrize("room", [None, ROOM])
def test_a_repository_of_the_hub_brings_the_cache(
    room: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`hub/`, from its folder. The model has its own attention afterwards."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    model, ids = model_of("llama"), prompt()["input_ids"]
    cache = TurboQuantCache(model.config, "3bit_nc", max_cache_len=room)
    expected = model.generate(ids, **GREEDY, **as_input(cache))
    model.set_attn_implementation("sdpa")
    way = dict(custom_generate=str(Path(__file__).resolve().parents[1] / "hub"), trust_remote_code=True)
    found = model.generate(ids, **GREEDY, **way, preset="3bit_nc", max_cache_len=room)
    assert torch.equal(found, expected) and model.config._attn_implementation == "sdpa"
    held = packed(model)
    model.generate(ids, **GREEDY, **way, **as_input(held))
    assert held.memory_footprint().packed > 0


def test_the_code_at_the_top_of_readme_runs_without_a_warning(tmp_path: Path) -> None:
    """On a tiny model and a CPU. An older transformers gets the name that the comment in the code says."""
    from tests.tools.test_cli import saved_model

    text = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
    code = text.partition("```python\n")[2].partition("```")[0]
    assert code.count("cache=cache") == 1 and "`past_key_values=` before transformers 5.24" in code
    folder = saved_model("qwen3", tmp_path)
    changes = {'"Qwen/Qwen3-4B"': repr(str(folder)), ".cuda()": "", '.to("cuda")': "", "32768": "512"}
    for old, new in (changes | {"cache=cache": f"{CACHE_NAME}=cache"}).items():
        code = code.replace(old, new)
    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        exec(code, names)
    assert names["output"].shape[1] > names["inputs"]["input_ids"].shape[1]
    assert int(names["cache"].get_seq_length()) == names["output"].shape[1] - 1


@batches
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("inference", [False, True])
def test_batches_answer_as_generate(family: str, inference: bool) -> None:
    """The pool is made in the caller's thread, and written to in another."""
    from tests.support.batching_cases import Session, greedy, prompts

    model, inputs = build(family), prompts([20, 290])
    with Session(model) as session:
        assert repr(session.batching) == f"TurboQuantBatching({type(model).__name__}, 4bit_nc)"
        with torch.inference_mode(inference):
            session.prepare()
            found = session.run(inputs, greedy(8))
        assert found == [session.oracle.generate(ids, 8) for ids in inputs]


@batches
def test_the_server_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uvicorn = pytest.importorskip("uvicorn", reason="the server's parts are an extra")
    client = pytest.importorskip("fastapi.testclient", reason="the server's parts are an extra").TestClient
    from tests.tools.test_cli import run, saved_model

    answered: dict[str, Any] = {}

    def ask(server: Any) -> None:
        body = {"messages": [{"role": "user", "content": "What does it hold?"}], "max_tokens": 8, "temperature": 0.0}
        with client(server.config.app) as connected:
            answered.update(connected.post("/v1/chat/completions", json=body).json())

    monkeypatch.setattr(uvicorn.Server, "run", ask)
    run("serve", saved_model("llama", tmp_path), "--device", "cpu", "--cache-tokens", 8192)
    assert answered["usage"]["completion_tokens"] == 8
