"""Runs models at the sizes of heads that families are published in: what falls to torch there, and what is wrong.

    python -m examples.measure.quality.published_runs                     # every family, on a GPU if there is one
    python -m examples.measure.quality.published_runs gemma4_text llama   # these
    python -m examples.measure.quality.published_runs --distinct          # one family of each kind of heads and layers
    python -m examples.measure.quality.published_runs --processes 8       # a family in each

A model has one layer of each kind and the published numbers and widths of query and KV heads; hidden size (where it is
not that of the heads), vocabulary and experts are cut. It reads a prompt, decodes, reads on after a history, fills a
preallocated cache by `generate()` and by `graph_decoding`, and answers a batch. Logits are held to those of a cache
that is read dequantized by eager attention, tokens of graphs to those of `generate()`. Printed as families end, and
not kept. A GPU compiles kernels for each size of heads, and each family's step.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import logging
import multiprocessing
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers import (
    Cache,
    CompileConfig,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from examples.measure.quality.family_check import (
    NOT_TESTABLE,
    PACKED,
    Logits,
    beside_cross_attention,
    difference,
    teacher_forced,
    token_ids,
)
from examples.measure.quality.family_configs import (
    OVERRIDES,
    TINY_HEAD,
    model_class,
    model_types,
    random_model,
    tiny_config,
)
from tq_hf import TurboQuantBatching, TurboQuantCache, graph_decoding
from tq_hf.batching.options import INSTEAD
from tq_hf.compat import as_input, layer_config, takes_attention_functions
from tq_hf.ops import backend
from tq_hf.tools.traced import trace

HEADS = (
    r"(swa_|decoder_)?num_(attention|key_value|kv)_heads|n_heads?|num_heads|kv_heads|multi_query_group_num|"
    r"((encoder|decoder)_)?attention_heads|index_head_dim|"
    r"(swa_|global_)?head_dim|d_kv|kv_channels|(q|kv)_lora_rank|qk_\w*head_dim|v_head_dim|num_global_key_value_heads"
)
"""Fields that stay as they are published."""
HIDDEN = ("hidden_size", "n_embd", "d_model", "embed_dim")
HEADS_OF_HIDDEN = (
    "cwm",
    "deepseek_ocr2_text",
    "helium",
    "hrm_text",
    "iquestcoder",
    "jais2",
    "minicpm3",
    "unlimited_ocr_text",
)
"""Families with a width of heads that ask for a hidden size of all heads, too."""
PROMPT, STEPS, ROOM, NEW_TOKENS = 150, (1, 1, 40, 1), 256, 6
LARGEST = 1_500_000_000
"""Parameters of the largest model that is run."""
TOLERANCE = {torch.float32: 1e-1, torch.bfloat16: 2e-1}
"""Tolerance as a share of the largest logit. Rounding may move an entry over a codebook boundary; a wrong mask does
more."""


class Run(NamedTuple):
    """What became of a family: by operation "right", "refused" by this package, how wrong it is or what was raised; and
    what torch computed."""

    heads: str
    outcomes: dict[str, str]
    in_torch: list[str]


def published_heads(kind: type[PreTrainedConfig], given: dict[str, Any]) -> dict[str, Any]:
    """Fields of a class of configs that make its heads. `given` are values that a model of several parts has in place
    of the defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind)} | given
    kept = {name: value for name, value in defaults.items() if re.fullmatch(HEADS, name) and isinstance(value, int)}
    hidden = next((name for name in HIDDEN if name in defaults), None)
    if hidden and "head_dim" in defaults and kind.model_type not in HEADS_OF_HIDDEN:
        kept.setdefault("head_dim", defaults[hidden] // defaults["num_attention_heads"])
    elif hidden and not kept.keys() & {"d_kv", "kv_channels", "v_head_dim"} or kind.model_type in HEADS_OF_HIDDEN:
        kept[hidden] = defaults[hidden]
    rope = OVERRIDES.get(kind.model_type, {}).get("rope_parameters", {})
    if "mrope_section" in rope:
        width = kept.get("qk_rope_head_dim") or kept.get("head_dim")
        width = width or defaults[hidden or ""] // defaults["num_attention_heads"]
        sections = [channels * width // TINY_HEAD for channels in rope["mrope_section"]]
        kept["rope_parameters"] = rope | {"mrope_section": sections}
    return kept


def published_model(model_type: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A model with published heads that attends by "turboquant".

    Raises:
        ValueError: It has too many parameters for a sweep.
        Exception: Whatever the family raises where its config does not allow such sizes.
    """
    config = tiny_config(model_type, published_heads)
    return random_model(model_class(model_type), config, LARGEST, "turboquant").to(device, dtype)


class Heads(NamedTuple):
    """Heads of a kind of layers.

    Args:
        layer: The class that a `TurboQuantCache` has for the layer.
        query: Query heads.
        key_value: KV heads.
        key_dim: Width of a key.
        value_dim: Width of a value.
    """

    layer: str
    query: int
    key_value: int
    key_dim: int
    value_dim: int


def heads_of(config: PreTrainedConfig) -> frozenset[Heads]:
    """The heads of all layers that cache keys and values.

    Raises:
        ValueError: The model cannot be run without memory.
    """
    made = trace(config, torch.bfloat16)
    found = set()
    for index, (layer, calls) in enumerate(zip(TurboQuantCache(made.config).layers, made.calls, strict=True)):
        queries = getattr(layer_config(made.config, index), "num_attention_heads", 0)
        for call in calls:
            if call.method == "update":
                (keys, *_), (values, *_) = call.likes[:2]
                found.add(Heads(type(layer).__name__, queries, keys[1], keys[3], values[3]))
    return frozenset(found)


def distinct(names: Iterable[str]) -> list[str]:
    """One family, the smallest, of those that have the same heads in the same kinds of layers and attend alike: with
    sinks, a cap or a bias on logits, beside an encoder, by a registered function or their own. A family that is not
    known without running it stands for itself. Those that stand for the most come first."""
    groups: dict[Any, list[tuple[int, str]]] = defaultdict(list)
    for name in names:
        try:
            config = tiny_config(name, published_heads)
            with torch.device("meta"):
                weights = dict(model_class(name)(copy.deepcopy(config)).named_parameters())
            text = config.get_text_config(decoder=True)
            attends = {match[0] for weight in weights if (match := re.search(r"sinks|relative_attention_bias", weight))}
            attends |= {
                option for option in ("attn_logit_softcapping", "is_encoder_decoder") if getattr(text, option, 0)
            }
            layers = frozenset(type(layer).__name__ for layer in TurboQuantCache(config).layers)
            kind: Any = heads_of(config), layers, frozenset(attends), takes_attention_functions(type(text))
            size = sum(weight.numel() for weight in weights.values())
        except Exception:
            kind, size = name, 0
        if size <= LARGEST:
            groups[kind].append((size, name))
    return [min(group)[1] for group in sorted(groups.values(), key=len, reverse=True)]


def ids(model: PreTrainedModel, batch: int, tokens: int) -> torch.Tensor:
    return token_ids(batch, tokens).to(model.device)


def generated(model: PreTrainedModel, own: Cache, **options: Any) -> torch.Tensor:
    """New tokens."""
    inputs = {"input_ids": ids(model, 2, PROMPT)}
    if model.config.is_encoder_decoder:
        inputs = {"input_ids": ids(model, 2, 12), "decoder_input_ids": inputs["input_ids"]}
    options |= dict(max_new_tokens=NEW_TOKENS, do_sample=False, attention_mask=torch.ones_like(inputs["input_ids"]))
    return model.generate(**inputs, **as_input(beside_cross_attention(model, own)), **options)[:, PROMPT:]


@contextmanager
def listening() -> Iterator[list[str]]:
    """Operations that the page says torch computes."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage().partition(" is computed by torch")[0])  # type: ignore[method-assign]
    backend._warn_once.cache_clear()
    backend.logger.addHandler(handler)
    try:
        yield said
    finally:
        backend.logger.removeHandler(handler)


def outcome(check: Callable[[], str]) -> str:
    """Result of a check, "refused", or the first line of its exception."""
    try:
        return check()
    except Exception as error:
        if str(error).endswith(INSTEAD):
            return "refused"
        return f"{type(error).__name__}: {error}".split("\n")[0][:200]


def run(model_type: str, device: torch.device, dtype: torch.dtype) -> Run:
    """All operations of one family.

    Raises:
        Exception: The family cannot be built at these sizes.
    """
    model = published_model(model_type, device, dtype)
    parts = [slice(0, 1), slice(1, 3), slice(3, None)]

    def logits(own: Cache) -> Logits:
        found = teacher_forced(model, beside_cross_attention(model, own), (PROMPT, *STEPS))
        return [x.float() for x in found]

    def near(part: slice) -> str:
        away = difference(packed[part], expected[part])
        return "right" if away <= TOLERANCE[dtype] else f"{away:.2g} away"

    def graphs() -> str:
        caches = [TurboQuantCache(model.config, max_cache_len=ROOM, **PACKED) for _ in range(2)]
        step = dict(custom_generate=graph_decoding, compile_config=CompileConfig())
        own, graph = generated(model, caches[0], disable_compile=True), generated(model, caches[1], **step)
        return "right" if torch.equal(own, graph) else f"{int((own != graph).sum())} tokens differ"

    def batches() -> str:
        config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
        prompts = [row.tolist() for row in ids(model, 3, PROMPT)]
        # By itself a manager makes its buffers for the memory that is free, which other processes take, too.
        small = ContinuousBatchingConfig(max_batch_tokens=4 * PROMPT)
        answers = TurboQuantBatching(model, "4bit_nc", balance=False).generate_batch(
            prompts, generation_config=config, continuous_batching_config=small, progress_bar=False
        )
        if errors := [answer.error for answer in answers.values() if answer.error]:
            raise RuntimeError(errors[0])
        lengths = [len(answer.generated_tokens) for answer in answers.values()]
        return "right" if lengths == [NEW_TOKENS] * 3 else f"answers of {lengths} tokens"

    with listening() as said, torch.no_grad():
        # A cache is read packed by "turboquant" whatever its config names: the model itself must attend otherwise.
        model.set_attn_implementation("eager")
        expected = logits(TurboQuantCache(model.config, **PACKED))
        expected[0] = logits(DynamicCache(config=model.config))[0]
        model.set_attn_implementation("turboquant")
        packed = logits(TurboQuantCache(model.config, **PACKED))
        outcomes = dict(zip(("prompt", "decode", "continuation"), map(near, parts), strict=True))
        outcomes |= {"graph decoding": outcome(graphs), "batches": outcome(batches)}
    layers = [layer for layer in TurboQuantCache(model.config).layers if hasattr(layer, "config")]
    text = layer_config(model.config.get_text_config(decoder=True), 0)
    heads = f"{getattr(text, 'num_attention_heads', '?')} query heads, {len(layers)} layers packed"
    return Run(heads, outcomes, said)


def line(model_type: str) -> tuple[str, bool]:
    """What is printed of a family, and whether its process can go on: not after an error of the device."""
    transformers_logging.set_verbosity_error()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    start = time.perf_counter()
    torch.compiler.reset()
    try:
        found = run(model_type, device, dtype)
        wrong = {name: kind for name, kind in found.outcomes.items() if kind != "right"}
        text = f"{model_type} ({found.heads}): {wrong or 'right'}; torch: {found.in_torch or 'nothing'}"
    except Exception as error:
        text = f"{model_type}: not run, {type(error).__name__}: {error}".split("\n")[0][:200]
    text += f" ({time.perf_counter() - start:.0f} s)"
    try:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.synchronize()
    except RuntimeError:
        return text, False
    return text, True


def in_processes(work: Callable[[str], tuple[str, bool]], names: list[str], processes: int) -> Iterator[str]:
    """What `work` says of all names, as it is said, from processes that go from name to name. A new one takes the place
    of one that ends or cannot go on."""
    context = multiprocessing.get_context("spawn")
    free = [ProcessPoolExecutor(1, context) for _ in range(processes)]
    running: dict[Future[tuple[str, bool]], tuple[str, ProcessPoolExecutor]] = {}
    waiting = names[::-1]
    while waiting or running:
        while waiting and free:
            name, pool = waiting.pop(), free.pop()
            running[pool.submit(work, name)] = name, pool
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            name, pool = running.pop(future)
            try:
                text, goes_on = future.result()
            except BrokenProcessPool:
                text, goes_on = f"{name}: its process ended", False
            if not goes_on:
                pool.shutdown(wait=False)
                pool = ProcessPoolExecutor(1, context)
            free.append(pool)
            yield text
    for pool in free:
        pool.shutdown()


def main(arguments: list[str] | None = None) -> None:
    """Print a line a family."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="model types (default: all)")
    parser.add_argument("--distinct", action="store_true", help="of families with the same heads and layers only one")
    parser.add_argument("--processes", type=int, help="number of families at a time, each in a process")
    chosen = parser.parse_args(arguments)
    names = chosen.names or [name for name in model_types() if name not in NOT_TESTABLE]
    names = distinct(names) if chosen.distinct else names
    lines = in_processes(line, names, chosen.processes) if chosen.processes else (line(name)[0] for name in names)
    for text in lines:
        print(text, flush=True)


if __name__ == "__main__":
    main()
