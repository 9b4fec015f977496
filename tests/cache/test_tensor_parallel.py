"""Models in several places: sharded over two processes by transformers' tensor parallelism, on CPUs, offloaded by
accelerate, or on two GPUs by `device_map`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from examples import needle_data as needle
from examples.measure.quality.family_configs import tiny_model
from examples.measure.quality.stress import rescaled
from examples.measure.speed.bench_multi_gpu import by_group
from examples.provenance import ROOT, SHIPPED_MODEL
from tests.support.ranks import run_ranks
from tests.support.tensor_parallel_worker import ANSWERED, LATENTS, NEW_TOKENS, WAYS
from tests.support.tiny_models import build, token_ids
from tq_hf import PRESETS, TurboQuantCache, TurboQuantLayer
from tq_hf.compat import as_input
from tq_hf.ops import workspace

RANKS = (0, 1)


@pytest.fixture(scope="module")
def model():
    """Two layers; four KV heads of two query heads each, so that every rank has two whole groups."""
    model = build("llama", num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, head_dim=16)
    model.set_attn_implementation("turboquant")
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model, request) -> Path:
    """What the worker processes are given, and where they leave what they found: once, whoever of pytest's own workers
    comes first."""
    if not hasattr(request.config, "workerinput"):
        return leave_results(tmp_path_factory.mktemp("tensor_parallel"), model)
    shared = tmp_path_factory.getbasetemp().parent / "tensor_parallel"
    with FileLock(f"{shared}.lock"):
        if not (shared / "done").exists():
            shared.mkdir(exist_ok=True)
            leave_results(shared, model)
            (shared / "done").touch()
    return shared


def leave_results(folder: Path, model: PreTrainedModel, *more: str) -> Path:
    """Run the worker processes."""
    model.save_pretrained(folder / "model")
    rescaled(model, 1, 20.0, 2).save_pretrained(folder / "loud")
    for name in LATENTS:
        tiny_model(name).save_pretrained(folder / name)
    cache = TurboQuantCache(model.config)
    with torch.no_grad():
        model(torch.full((2, 150), 5), **as_input(cache))
    cache.save(folder / "alone.safetensors", model)
    run_ranks("-m", "tests.support.tensor_parallel_worker", str(folder), *more)
    return folder


def read_results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"found-{rank}.json").read_text(encoding="utf-8")) for rank in RANKS]


@pytest.fixture(params=RANKS)
def rank(request) -> int:
    return request.param


@pytest.fixture
def found(folder, rank) -> dict[str, Any]:
    """What one of the ranks found."""
    return read_results(folder)[rank]


@pytest.mark.parametrize("preset", ANSWERED)
def test_tokens_are_those_of_one_process_on_every_rank(found, preset):
    tokens, expected = found["tokens"][preset]
    assert len(tokens[0]) == NEW_TOKENS and len({*tokens[0], *tokens[1]}) > 14, "too uniform to tell a wrong cache"
    assert tokens == expected


def test_a_rank_holds_its_own_kv_heads_whole_and_half_of_the_bytes(found):
    assert set(found["heads"]) == {2}
    for mine, whole in found["bytes"].values():
        assert {kind: 2 * size for kind, size in mine.items()} == whole
        assert mine["packed"] > 0


def test_ranks_rotate_and_quantize_alike(found):
    """The packed bits of all ranks together are those of one process: no seed depends on the rank."""
    assert found["same_packed"] == dict.fromkeys(PRESETS, True)


def test_a_rank_balances_its_own_heads_as_one_process_does(found):
    furthest, touched = found["channel_scales"]
    # In each of two layers, rows and heads two channels of keys and two of values.
    assert furthest < 0.02 and touched >= 32


def test_compiled_decoding_is_one_graph(found):
    tokens, expected = found["compiled"]["tokens"]
    assert tokens == expected
    assert found["compiled"]["graphs"] == 1 and not found["compiled"]["breaks"]


@pytest.mark.slow
def test_local_shards_without_module_guards_give_the_same_tokens_for_caches_of_any_size(tmp_path, model):
    """As in bench_multi_gpu.py: guards on the cache stay, so that a larger one is compiled anew."""
    for found in read_results(leave_results(tmp_path, model, "local")):
        local = found["local_shards"]
        assert local["tokens"] == [local["expected"]] * 2
        assert local["graphs"] == 2
        assert local["sharded"] == 1, "the embedding alone: it counts on DTensor to find its rows"


def test_no_collective_is_added(found):
    counts = found["collectives"]
    assert counts["ours"] == counts["dynamic"] > 0


def test_each_rank_saves_and_loads_its_own_heads(found):
    assert found["loaded_logits_equal"]


def test_a_file_of_another_rank_or_number_of_processes_is_refused_clearly(found, rank, folder, model):
    assert f"rank {1 - rank} of 2" in found["other_rank"]
    assert f"rank {rank} of 2" in found["other_rank"]
    assert f"rank {rank} of 2" in found["one_process_file"]
    with pytest.raises(ValueError, match=f"rank {rank} of 2.*this model is whole"):
        TurboQuantCache.load(folder / f"rank-{rank}.safetensors", model)


of_latents = pytest.mark.parametrize(("name", "way"), [(name, way) for name in LATENTS for way in WAYS[name]])


@of_latents
def test_tokens_of_latents_are_those_of_one_process(found, name, way):
    sharded, alone = found["latents"][name][way]
    assert len(set(sharded["tokens"][-1])) > 7, "too uniform to tell a wrong cache"
    assert sharded["tokens"] == alone["tokens"]
    assert way != "compiled" or found["latents"][name]["graphs"] == 1


@of_latents
def test_queries_absorb_the_up_projection_of_the_heads_of_their_rank(found, name, way):
    """No step expands latents: each layer absorbs in each step."""
    sharded, alone = found["latents"][name][way]
    assert len(sharded["rows"]) == len(alone["rows"]) >= 2 * (NEW_TOKENS - 1)
    assert {LATENTS[name] * rows for rows in sharded["rows"]} == set(alone["rows"])


@pytest.mark.parametrize("name", LATENTS)
def test_pages_of_latents_are_whole_and_steps_are_those_of_the_heads_of_a_rank(found, name):
    sharded, alone = found["latents"][name]["batches"]
    assert sharded["heads"] == alone["heads"] == 1
    assert LATENTS[name] * sharded["expanded"] == alone["expanded"]


TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
OPTIONS = dict(residual_length=0, sink_tokens=2)


def prompt(batch: int = 2, length: int = 280, padding: int = 30) -> dict[str, torch.Tensor]:
    ids = token_ids(batch, length)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


def everything(model: PreTrainedModel, **options: Any) -> dict[str, list]:
    """What generate() and the operations of a cache give: greedy, beam search, a crop and a second turn."""
    device = "cpu" if model.device.type == "meta" else model.device
    inputs = {name: tensor.to(device) for name, tensor in prompt().items()}
    cache = TurboQuantCache(model.config, **OPTIONS, **options)
    settings = dict(do_sample=False, disable_compile=True)
    first = model.generate(**inputs, **as_input(cache), max_new_tokens=20, **settings)
    cache.crop(-30)
    kept = first[:, : int(cache.get_seq_length())]
    again = torch.cat([kept, kept[:, 100:150]], dim=1)
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(again[:, 280:])], 1)[:, : again.shape[1]]
    second = model.generate(again, attention_mask=mask, **as_input(cache), max_new_tokens=20, **settings)
    results = {"greedy": first, "cropped": second}
    if not options:
        beams = TurboQuantCache(model.config, **OPTIONS)
        results["beams"] = model.generate(**inputs, **as_input(beams), max_new_tokens=20, num_beams=3, **settings)
    return {name: tokens.tolist() for name, tokens in results.items()}


@pytest.mark.parametrize("options", [{}, {"max_cache_len": 400}], ids=["growing", "preallocated"])
def test_layers_offloaded_to_disk_give_the_same_tokens_and_files(tmp_path, options):
    plain, offloaded = (build("llama", num_hidden_layers=4) for _ in range(2))
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk"}
    places |= dict.fromkeys(("model.layers.3", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    dispatch_model(offloaded, places, main_device="cpu", offload_dir=str(tmp_path / "weights"), force_hooks=True)
    assert offloaded.model.layers[1].self_attn.k_proj.weight.is_meta
    for model in (plain, offloaded):
        model.set_attn_implementation("turboquant")
    assert everything(offloaded, **options) == everything(plain, **options)

    cache = TurboQuantCache(plain.config, **OPTIONS, **options)
    with torch.no_grad():
        plain(**prompt(), **as_input(cache))
    cache.save(tmp_path / "cache.safetensors", plain)
    loaded = TurboQuantCache.load(tmp_path / "cache.safetensors", offloaded)
    assert loaded.memory_footprint().by_device == cache.memory_footprint().by_device
    step = torch.full((2, 1), 5)
    with torch.no_grad():
        expected, actual = (m(step, **as_input(c)).logits for m, c in ((plain, cache), (offloaded, loaded)))
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", ["llama", "gemma3n", "doge"])
def test_hooks_of_an_offloaded_model_leave_states_to_the_model(name, tmp_path, monkeypatch):
    """accelerate's hooks move what layers are given: of Gemma 3n also the keys that layers share, which are read by
    that. Doge computes with its values. Nobody reads the states of Llama."""
    plain, offloaded = (tiny_model(name) if name == "doge" else build(name) for _ in range(2))
    layers = [f"model.layers.{index}" for index in range(len(offloaded.model.layers))]
    others = [f"model.{part}" for part, _ in offloaded.model.named_children() if part != "layers"]
    places = dict.fromkeys((*layers, *others, "lm_head"), "cpu") | {"model.layers.1": "disk"}
    dispatch_model(offloaded, places, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
    assert offloaded.model.layers[1].self_attn.k_proj.weight.is_meta
    given, update = [], TurboQuantLayer.update
    monkeypatch.setattr(TurboQuantLayer, "update", lambda *args, **more: given.append(update(*args)) or given[-1])
    found = []
    for model, attention in ((plain, "sdpa"), (plain, "turboquant"), (offloaded, "turboquant")):
        model.set_attn_implementation(attention)
        cache = TurboQuantCache(model.config, residual_length=10**6)
        given.clear()
        ids = prompt(batch=1, length=40)["input_ids"]
        found.append([model(part, **as_input(cache)).logits for part in (ids, *ids[:, :3].split(1, dim=1))])
        assert all(layer.reads_packed == (attention == "turboquant") for layer in cache.layers[1:2])
    for dense, expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(expected, dense, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(actual, dense, atol=1e-4, rtol=1e-4)
    assert given[-1][0]._handle.touched == (name != "llama")


@pytest.mark.slow
def test_the_measurement_runs_without_gpus(tmp_path):
    check_measurement(run_example(tmp_path))


def check_measurement(record: dict[str, Any], furthest: float = 0.0) -> None:
    """Every step was timed, with the tokens of eager ones and half of the bytes on each rank.

    Where compiled steps round otherwise than eager ones, a token is at most `furthest` standard deviations of its
    logits behind the likeliest, and at most one in five is another.
    """
    one, split = record["one_gpu"], record["tensor_parallel"]
    for shape in ("2 x 300", "1 x 200"):
        alone, ranks = one[f"graph_decoding, {shape}"], split[f"graph_decoding, {shape}"]
        for each in (alone, *ranks):
            found = each["against_eager"]
            assert each["ms_per_step"] > 0 and found["tokens"] > 0 and found["furthest_behind"] <= furthest
            assert found["equal"] >= 0.8 * found["tokens"]
        assert [2 * each["bytes_with_heads"] for each in ranks] == [alone["bytes_with_heads"]] * 2
    pages, generate = ("pages", "pages, compiled"), ("generate, compiled", "generate, without guards")
    for name in (*(f"{way}, 3 x 200" for way in pages), *(f"{way}, 2 x 300" for way in generate)):
        assert all(each["ms_per_step"] > 0 for each in (one[name], *split[name]))
    assert all(each["local_shards_give_equal_logits"] for each in split["generate, without guards, 2 x 300"])
    assert split["logits"][0]["relative_rms"] < 2e-2
    assert all(each["one_shot_is_right"] for each in split["all_reduce"][0].values())
    assert record["device_map"]["greedy"]["equal"] == record["device_map"]["greedy"]["tokens"] > 0


def test_time_of_a_step_by_kernels():
    """Overlapping kernels are busy once; the first replay, which may wait for another process, does not count."""
    step = [(0, 2, "decode_split"), (1, 4, "ncclDevKernel_AllReduce"), (6, 7, "triton_red_fused_all_reduce_0")]
    waits = [(0, 1, "decode_split"), (1, 90, "ncclDevKernel_AllReduce"), (91, 92, "triton_red_fused_all_reduce_0")]
    spans = waits + [(t + begin, t + end, name) for t in (100, 110) for begin, end, name in step]
    found = by_group(spans, 3)
    assert (found["wall_us"], found["busy_us"], found["gaps_us"]) == (8.5, 5.0, 3.5)
    busy = {group: us for group, us in found["groups"].items() if us}
    assert busy == {"decode_split": 2, "all-reduce": 3, "fused": 1}
    assert found["launches"] == 3
    layers = [(t + begin, t + end, name) for t in range(0, 60, 10) for begin, end, name in step]
    assert by_group(layers, 2)["layer"] == [[name, begin, end] for begin, end, name in step]


def run_example(folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "examples.measure.speed.bench_multi_gpu", "--tiny", "--layers", "2"]
    command += ["--output", str(folder / "out.json")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-8000:]
    return json.loads((folder / "out.json").read_text(encoding="utf-8"))


# On GPUs


def needle_model(device_map: Any) -> PreTrainedModel:
    how = dict(dtype=torch.float16, attn_implementation="turboquant", device_map=device_map)
    return AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL, **how).eval()


def halves(second: Any) -> dict[str, Any]:
    """A device map with the last two of four layers on `second`."""
    first = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1")
    places = dict.fromkeys(first, 0) | dict.fromkeys(("model.layers.2", "model.layers.3"), second)
    return places | dict.fromkeys(("model.norm", "lm_head"), 0 if second == "cpu" else second)


@pytest.fixture(scope="module")
def one_gpu():
    return needle_model({"": 0})


@pytest.fixture(scope="module")
def two_gpus():
    return needle_model(halves(1))


@pytest.mark.cuda
@pytest.mark.parametrize("options", [{}, {"max_cache_len": 400}], ids=["growing", "preallocated"])
def test_layers_offloaded_to_the_cpu_give_the_same_tokens(one_gpu, options):
    model = needle_model(halves("cpu"))
    assert everything(model, **options) == everything(one_gpu, **options)
    cache = TurboQuantCache(model.config)
    with torch.no_grad():
        model(prompt()["input_ids"].cuda(), **as_input(cache))
    assert set(cache.memory_footprint().by_device) == {"cuda:0"}, "states live where their layer runs"


@pytest.mark.cuda
@TWO_GPUS
@pytest.mark.parametrize("options", [{}, {"max_cache_len": 400}], ids=["growing", "preallocated"])
def test_two_gpus_give_the_tokens_of_one(one_gpu, two_gpus, options):
    assert everything(two_gpus, **options) == everything(one_gpu, **options)
    if not options:  # a preallocated store takes scratch for each call
        used = {device for device, _ in workspace._local.workspaces}
        assert {torch.device("cuda", 0), torch.device("cuda", 1)} <= used


@pytest.mark.cuda
@TWO_GPUS
def test_each_layer_is_stored_where_it_runs_and_counted_there(two_gpus):
    cache = TurboQuantCache(two_gpus.config)
    with torch.no_grad():
        two_gpus(prompt(length=1000)["input_ids"].to("cuda:0"), **as_input(cache))
    footprint = cache.memory_footprint()
    assert footprint.by_device == {"cuda:0": footprint.total // 2, "cuda:1": footprint.total // 2}
    places = [{str(t.device) for kind in layer.store.by_kind().values() for t in kind} for layer in cache.layers]
    assert places == [{"cuda:0"}] * 2 + [{"cuda:1"}] * 2


@pytest.mark.cuda
@TWO_GPUS
@pytest.mark.parametrize("offloading", [False, True], ids=["kept", "offloaded"])
def test_a_file_is_loaded_onto_the_gpus_of_the_model(one_gpu, two_gpus, tmp_path, offloading):
    ids, step = prompt(length=1000)["input_ids"].to("cuda:0"), torch.full((2, 1), 5, device="cuda:0")
    for saver, loader in ((one_gpu, two_gpus), (two_gpus, one_gpu)):
        cache = TurboQuantCache(saver.config, offloading=offloading)
        with torch.no_grad():
            saver(ids, **as_input(cache))
        cache.save(tmp_path / "cache.safetensors", saver)
        loaded = TurboQuantCache.load(tmp_path / "cache.safetensors", loader)
        with torch.no_grad():
            expected, actual = (m(step, **as_input(c)).logits.cpu() for m, c in ((saver, cache), (loader, loaded)))
        assert torch.equal(actual, expected)


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")  # what the compiler says of graphs over two devices
@TWO_GPUS
def test_compiled_decoding_over_two_gpus_recalls_a_passkey(two_gpus):
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    text, answer = needle.passkey_prompt(3000, depth=0.4, seed=0)
    ids = tokenizer(text, return_tensors="pt").to("cuda:0")
    cache = TurboQuantCache(two_gpus.config, max_cache_len=3072)
    with torch.inference_mode():
        two_gpus(ids.input_ids[:, :-30], **as_input(cache))
    out = two_gpus.generate(**ids, **as_input(cache), max_new_tokens=needle.ANSWER_TOKENS)
    assert needle.is_recalled(tokenizer.decode(out[0, ids.input_ids.shape[1] :]), answer)


@pytest.mark.cuda
@TWO_GPUS
def test_the_measurement_shows_what_it_should_on_a_tiny_model(tmp_path):
    record = run_example(tmp_path)
    # 8B models were 0.2 behind at most; a token at random is 3 behind.
    check_measurement(record, furthest=0.5)
    assert len(record["device_map"]["bytes_by_device"]) == 2
    kernels = record["tensor_parallel"]["graph_decoding, 2 x 300"][0]["kernels"]
    assert kernels["groups"]["all-reduce"] > 0 and kernels["groups"]["decode_split"] > 0
