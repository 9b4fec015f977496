"""A model sharded over two processes by transformers' tensor parallelism, on CPUs: the tokens of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from transformers import PreTrainedModel

from examples.measure.quality.family_configs import tiny_model
from examples.measure.quality.stress import rescaled
from tests.support.tensor_parallel_worker import ANSWERED, LATENTS, NEW_TOKENS
from tests.support.tiny_models import build
from tq_hf import PRESETS, TurboQuantCache
from tq_hf.compat import as_input

ROOT = Path(__file__).resolve().parents[2]
RANKS = (0, 1)
WAYS = ("growing", "preallocated", "compiled", "graph_decoding", "batches")


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


def leave_results(folder: Path, model: PreTrainedModel) -> Path:
    """Run the worker processes."""
    model.save_pretrained(folder / "model")
    rescaled(model, 1, 20.0, 2).save_pretrained(folder / "loud")
    for name in LATENTS:
        tiny_model(name).save_pretrained(folder / name)
    cache = TurboQuantCache(model.config)
    with torch.no_grad():
        model(torch.full((2, 150), 5), **as_input(cache))
    cache.save(folder / "alone.safetensors", model)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(len(RANKS))]
    worker = ["-m", "tests.support.tensor_parallel_worker", str(folder)]
    # Without GPUs, whatever the machine has: these are the tests of the path over gloo.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    hidden = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    run = subprocess.run(
        [sys.executable, *command, *worker], env=os.environ | hidden, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr[-8000:]
    return folder


@pytest.fixture(scope="module")
def found(folder) -> list[dict[str, Any]]:
    return [json.loads((folder / f"found-{rank}.json").read_text(encoding="utf-8")) for rank in RANKS]


@pytest.mark.parametrize("preset", ANSWERED)
def test_tokens_are_those_of_one_process_on_every_rank(found, preset):
    for rank in RANKS:
        tokens, expected = found[rank]["tokens"][preset]
        assert len(tokens[0]) == NEW_TOKENS and len({*tokens[0], *tokens[1]}) > 14, "too uniform to tell a wrong cache"
        assert tokens == expected


def test_a_rank_holds_its_own_kv_heads_whole_and_half_of_the_bytes(found):
    for rank in RANKS:
        assert set(found[rank]["heads"]) == {2}
        for mine, whole in found[rank]["bytes"].values():
            assert {kind: 2 * size for kind, size in mine.items()} == whole
            assert mine["packed"] > 0


def test_ranks_rotate_and_quantize_alike(found):
    """The packed bits of all ranks together are those of one process: no seed depends on the rank."""
    for rank in RANKS:
        assert found[rank]["same_packed"] == dict.fromkeys(PRESETS, True)


def test_a_rank_balances_its_own_heads_as_one_process_does(found):
    for rank in RANKS:
        furthest, touched = found[rank]["channel_scales"]
        # In each of two layers, rows and heads two channels of keys and two of values.
        assert furthest < 0.02 and touched >= 32


def test_compiled_decoding_is_one_graph(found):
    for rank in RANKS:
        tokens, expected = found[rank]["compiled"]["tokens"]
        assert tokens == expected
        assert found[rank]["compiled"]["graphs"] == 1 and not found[rank]["compiled"]["breaks"]


def test_local_shards_without_module_guards_give_the_same_tokens_for_caches_of_any_size(found):
    """As in bench_multi_gpu.py: guards on the cache stay, so that a larger one is compiled anew."""
    for rank in RANKS:
        local = found[rank]["local_shards"]
        assert local["tokens"] == [local["expected"]] * 2
        assert local["graphs"] == 2
        assert local["sharded"] == 1, "the embedding alone: it counts on DTensor to find its rows"


def test_no_collective_is_added(found):
    for rank in RANKS:
        counts = found[rank]["collectives"]
        assert counts["ours"] == counts["dynamic"] > 0


def test_each_rank_saves_and_loads_its_own_heads(found):
    assert all(found[rank]["loaded_logits_equal"] for rank in RANKS)


def test_a_file_of_another_rank_or_number_of_processes_is_refused_clearly(found, folder, model):
    for rank in RANKS:
        assert f"rank {1 - rank} of 2" in found[rank]["other_rank"]
        assert f"rank {rank} of 2" in found[rank]["other_rank"]
        assert f"rank {rank} of 2" in found[rank]["one_process_file"]
        with pytest.raises(ValueError, match=f"rank {rank} of 2.*this model is whole"):
            TurboQuantCache.load(folder / f"rank-{rank}.safetensors", model)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LATENTS)
def test_tokens_of_latents_are_those_of_one_process(found, name, way):
    for rank in RANKS:
        sharded, alone = found[rank]["latents"][name][way]
        assert len(set(sharded["tokens"][-1])) > 7, "too uniform to tell a wrong cache"
        assert sharded["tokens"] == alone["tokens"]
        assert found[rank]["latents"][name]["graphs"] == 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LATENTS)
def test_queries_absorb_the_up_projection_of_the_heads_of_their_rank(found, name, way):
    """No step expands latents: each layer absorbs in each step."""
    for rank in RANKS:
        sharded, alone = found[rank]["latents"][name][way]
        assert len(sharded["rows"]) == len(alone["rows"]) >= 2 * (NEW_TOKENS - 1)
        assert {LATENTS[name] * rows for rows in sharded["rows"]} == set(alone["rows"])


@pytest.mark.parametrize("name", LATENTS)
def test_pages_of_latents_are_whole_and_steps_are_those_of_the_heads_of_a_rank(found, name):
    for rank in RANKS:
        sharded, alone = found[rank]["latents"][name]["batches"]
        assert sharded["heads"] == alone["heads"] == 1
        assert LATENTS[name] * sharded["expanded"] == alone["expanded"]
