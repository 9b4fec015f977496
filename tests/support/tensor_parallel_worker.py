"""One of the processes of tests/cache/test_tensor_parallel.py, which writes what it found.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.support.tensor_parallel_worker FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.distributed import DistributedConfig

from examples.measure.speed.bench_multi_gpu import keep_local_shards, without_module_guards
from tests.support.batching_cases import Session, greedy, prompts
from tests.support.helpers import compile_config, states
from tests.support.tiny_models import token_ids
from tq_hf import PRESETS, TurboQuantCache, graph_decoding
from tq_hf.compat import as_input
from tq_hf.ops import dispatch

PROMPT_TOKENS, NEW_TOKENS = 246, 16
"""A block ends at 258 tokens."""
ANSWERED = ("k8v4", "4bit_nc")
"""Presets that a step reads each in its way: keys of 8 bits and codes. Of all presets the packed bits are compared."""
OPTIONS = dict(residual_length=0, sink_tokens=2)
LATENTS = {"deepseek_v2": 2, "deepseek_v3": 1}
"""Families with latents, and the number of processes that divide their heads: the plan of the second divides MLPs."""
WAYS = {"deepseek_v2": ("growing", "preallocated", "compiled", "graph_decoding", "batches")}
WAYS["deepseek_v3"] = ("growing", "preallocated", "batches")
"""How each family answers: what compiles is compiled once."""
REQUESTS = [5, 130, 300]


def load(path: Path, **options: Any) -> PreTrainedModel:
    """The model in `path`, with attention on packed blocks; a `distributed_config` shards it."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="turboquant", **options)
    model.generation_config.eos_token_id = None
    return model.eval()


def prompt() -> dict[str, torch.Tensor]:
    """Two prompts of `PROMPT_TOKENS` tokens, one of them left-padded."""
    ids = token_ids(2, PROMPT_TOKENS)
    mask = torch.ones_like(ids)
    mask[0, :20] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: PreTrainedModel, cache: Cache, new_tokens: int = NEW_TOKENS, **options: Any) -> list[list[int]]:
    out = model.generate(**prompt(), **as_input(cache), do_sample=False, max_new_tokens=new_tokens, **options)
    return out[:, PROMPT_TOKENS:].tolist()


def bytes_held(cache: TurboQuantCache) -> dict[str, int]:
    """Bytes of what has heads, by kind."""
    footprint = cache.memory_footprint()
    return {kind: getattr(footprint, kind) for kind in ("packed", "residual", "bf16_equivalent")}


def shares_are_the_whole(model: PreTrainedModel, rank: int) -> dict[str, bool]:
    """Whether what the ranks pack of some states, each of its own heads, is together what this process packs of all
    heads, bit for bit."""
    ranks, heads = dist.get_world_size(), model.config.num_key_value_heads
    states_of_all = states(7, heads=heads, tokens=700)
    equal = {}
    for preset in PRESETS:
        mine, whole = TurboQuantCache(model.config, preset), TurboQuantCache(model.config, preset)
        mine.update(*(part.chunk(ranks, dim=1)[rank] for part in states_of_all), 0)
        whole.update(*states_of_all, 0)
        shares: list[Any] = [None] * ranks
        dist.all_gather_object(shares, mine.layers[0].store.export()[1])
        equal[preset] = all(
            torch.equal(torch.cat([share[name] for share in shares], dim=1), expected)
            for name, expected in whole.layers[0].store.export()[1].items()
        )
    return equal


@torch.no_grad()
def collectives_of_a_step(model: PreTrainedModel, cache: Cache) -> int:
    """Collectives that one decoding step runs."""
    model(**prompt(), **as_input(cache))
    with CommDebugMode() as counted:
        model(torch.full((2, 1), 5), **as_input(cache))
    return counted.get_total_counts()


def channel_scales_of_shares(sharded: PreTrainedModel, alone: PreTrainedModel, rank: int) -> tuple[float, int]:
    """How far, relatively, the channel scales of this rank's heads are from those of one process, and how many are not
    one."""
    caches = TurboQuantCache(sharded.config), TurboQuantCache(alone.config)
    with torch.no_grad():
        for model, cache in zip((sharded, alone), caches, strict=True):
            model(**prompt(), **as_input(cache))
    furthest, touched = 0.0, 0
    for mine, whole in zip(*(cache.layers for cache in caches), strict=True):
        for factor, everything in zip(mine.store.blocks.channel_scales, whole.store.blocks.channel_scales, strict=True):
            expected = everything.chunk(dist.get_world_size(), dim=1)[rank].float()
            furthest = max(furthest, (factor / expected - 1).abs().max().item())
            touched += int((factor != 1).sum())
    return furthest, touched


def answers_on_latents(folder: Path, name: str) -> dict[str, Any]:
    """Tokens of a model with latents by each way, those of one process, and the rows of each up-projection that queries
    absorbed; of batches also the KV heads of pages and the bytes of a token that is expanded."""
    sharded, alone = load(folder / name, distributed_config=DistributedConfig(tp_plan="auto")), load(folder / name)
    rows: list[int] = []
    loop = {"custom_generate": graph_decoding}
    attend = dispatch.attend_absorbed

    def noting(query: torch.Tensor, weight: torch.Tensor, *arguments: Any) -> torch.Tensor:
        rows.append(weight.shape[0])
        return attend(query, weight, *arguments)

    def generated(model: PreTrainedModel, room: int | None = None, **options: Any) -> dict[str, Any]:
        rows.clear()
        tokens = generate(model, TurboQuantCache(model.config, max_cache_len=room, **OPTIONS), **options)
        return {"tokens": tokens, "rows": list(rows)}

    def batched(model: PreTrainedModel) -> dict[str, Any]:
        rows.clear()
        with Session(model, overrides=OPTIONS) as session:
            tokens = session.run(prompts(REQUESTS), greedy(NEW_TOKENS))
            heads, expanded = session.cache.allocator.num_key_value_heads, session.cache.memory.token_bytes
        return {"tokens": tokens, "rows": list(rows), "heads": heads, "expanded": expanded}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "attend_absorbed", noting)
        expected = generated(alone)
        counters.clear()
        ways: dict[str, Callable[[], list[Any]]] = {
            "growing": lambda: [generated(sharded), expected],
            "preallocated": lambda: [generated(sharded, 300), expected],
            "compiled": lambda: [generated(sharded, 300, compile_config=compile_config()), expected],
            "graph_decoding": lambda: [generated(sharded, 300, compile_config=compile_config(), **loop), expected],
            "batches": lambda: [batched(model) for model in (sharded, alone)],
        }
        return {way: ways[way]() for way in WAYS[name]} | {"graphs": counters["stats"]["unique_graphs"]}


def answers_on_local_shards(model: PreTrainedModel) -> dict[str, Any]:
    keep_local_shards(model)
    counters.clear()
    config = compile_config()
    config.options = {"guard_filter_fn": without_module_guards().options["guard_filter_fn"]}
    caches = [TurboQuantCache(model.config, max_cache_len=room, **OPTIONS) for room in (300, 400)]
    return {
        "tokens": [generate(model, cache, compile_config=config) for cache in caches],
        "graphs": counters["stats"]["unique_graphs"],
        "sharded": sum(isinstance(parameter, DTensor) for parameter in model.parameters()),
    }


def error_of_loading(path: Path, model: PreTrainedModel) -> str:
    try:
        TurboQuantCache.load(path, model)
    except ValueError as error:
        return str(error)
    return ""


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    sharded = load(folder / "model", distributed_config=DistributedConfig(tp_plan="auto"))
    alone = load(folder / "model")
    rank, size = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {"tokens": {}, "bytes": {}, "heads": []}

    # Each rank does a share of the one-process runs.
    expected = {}
    for preset in ANSWERED[rank::size]:
        cache = TurboQuantCache(alone.config, preset, **OPTIONS)
        expected[preset] = (generate(alone, cache), bytes_held(cache))
    parts: list[Any] = [None] * size
    dist.all_gather_object(parts, expected)
    expected = {preset: result for part in parts for preset, result in part.items()}

    for preset in ANSWERED:
        cache = TurboQuantCache(sharded.config, preset, **OPTIONS)
        tokens = generate(sharded, cache)
        found["tokens"][preset] = [tokens, expected[preset][0]]
        found["bytes"][preset] = [bytes_held(cache), expected[preset][1]]
        found["heads"] += [layer.store.blocks.scales.shape[1] for layer in cache.layers]
    found["same_packed"] = shares_are_the_whole(alone, rank)
    loud = load(folder / "loud", distributed_config=DistributedConfig(tp_plan="auto"))
    found["channel_scales"] = channel_scales_of_shares(loud, load(folder / "loud"), rank)

    counters.clear()
    cache = TurboQuantCache(sharded.config, max_cache_len=300, **OPTIONS)
    tokens = generate(sharded, cache, compile_config=compile_config())
    found["compiled"] = {
        "tokens": [tokens, expected["4bit_nc"][0]],
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": dict(counters["graph_break"]),
    }

    caches = {"ours": TurboQuantCache(sharded.config), "dynamic": DynamicCache(config=sharded.config)}
    found["collectives"] = {name: collectives_of_a_step(sharded, cache) for name, cache in caches.items()}

    cache = TurboQuantCache(sharded.config, **OPTIONS)
    generate(sharded, cache, 8)
    cache.save(folder / f"rank-{rank}.safetensors", sharded)
    dist.barrier()
    again = TurboQuantCache.load(folder / f"rank-{rank}.safetensors", sharded)
    step = torch.full((2, 1), 5)
    with torch.no_grad():
        logits = [sharded(step, **as_input(each)).logits for each in (cache, again)]
    found["loaded_logits_equal"] = torch.equal(*logits)
    found["other_rank"] = error_of_loading(folder / f"rank-{1 - rank}.safetensors", sharded)
    found["one_process_file"] = error_of_loading(folder / "alone.safetensors", sharded)

    if sys.argv[2:] == ["local"]:
        found["local_shards"] = answers_on_local_shards(sharded) | {"expected": expected["4bit_nc"][0]}
    found["latents"] = {name: answers_on_latents(folder, name) for name in LATENTS}
    (folder / f"found-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
