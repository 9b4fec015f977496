"""Compiled decoding with a preallocated cache, through plain generate(), on a CPU."""

from itertools import product

import pytest
import torch
import transformers
from packaging.version import Version
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from tests.support.helpers import CPU, compile_config, quick_of, slow
from tests.support.tiny_models import VOCAB, build, token_ids
from tq_hf import PRESETS, TurboQuantCache, graph_decoding
from tq_hf.codec import codebook, rotation
from tq_hf.compat import as_input
from tq_hf.ops import dispatch
from tq_hf.ops.cpu import packed

OPTIONS = dict(residual_length=0, sink_tokens=2)
MAX_LENGTH = 300
COMPILES_FOR_EACH_CACHE = torch.__version__.startswith("2.9.")
"""torch 2.9 guards tensors of a static address by their identity."""
OLD_TRANSFORMERS = Version(transformers.__version__) < Version("5.21")
"""Reads chunks of a second turn from its first token on, over any cache, and breaks the graph of a prompt once more."""


def inputs(batch: int = 2, length: int = 240, padding: int = 0) -> dict[str, torch.Tensor]:
    ids = token_ids(batch, length, seed=length)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(
    model: PreTrainedModel, cache: TurboQuantCache, prompt: dict[str, torch.Tensor], **options
) -> torch.Tensor:
    return model.generate(**prompt, **as_input(cache), do_sample=False, max_new_tokens=24, **options)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("preset", [name if name == "4bit_nc" else slow(name) for name in PRESETS])
def test_compiled_decoding_gives_the_tokens_of_eager_decoding_in_one_graph(preset):
    model = build("llama", num_hidden_layers=2, attention="turboquant")
    backend = "aot_eager" if preset == "4bit_nc" else "eager"
    for padding in (0, 50):
        prompt = inputs(padding=padding)
        expected = generate(model, TurboQuantCache(model.config, preset, **OPTIONS), prompt)
        for _ in range(2):  # a second cache of the same size must not compile again
            cache = TurboQuantCache(model.config, preset, max_cache_len=MAX_LENGTH, **OPTIONS)
            actual = generate(model, cache, prompt, compile_config=compile_config(backend))
            assert torch.equal(actual, expected)
            assert cache.get_seq_length() == prompt["input_ids"].shape[1] + 23
            assert cache.layers[0].store.settle().blocks == 2, "a block was encoded while decoding"
    # One without padding, and one that puts columns of masks in the order of padded rows.
    assert counters["stats"]["unique_graphs"] == (4 if COMPILES_FOR_EACH_CACHE else 2)
    assert not counters["graph_break"]


@pytest.mark.parametrize("name", [slow("qwen3"), slow("gemma3"), slow("gemma3n"), slow("gpt_oss"), "deepseek_v3"])
def test_other_families_compile(name):
    model = build(name, attention="turboquant")
    expected = generate(model, TurboQuantCache(model.config, **OPTIONS), inputs())
    cache = TurboQuantCache(model.config, max_cache_len=MAX_LENGTH, **OPTIONS)
    actual = generate(model, cache, inputs(), compile_config=compile_config("aot_eager"))
    assert torch.equal(actual, expected)
    assert counters["stats"]["unique_graphs"] <= 2
    assert not counters["graph_break"]


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (rotation.signs, (16, 0, CPU)),
        (rotation.rotation_matrix, (16, 0, CPU, torch.float32)),
        (codebook.levels, (4, CPU)),
        (codebook.boundaries, (4, CPU)),
        (codebook.codes_of_ceilings, (4, CPU)),
        (packed.table, (3, torch.bfloat16, CPU)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_tables_are_constants_of_a_graph(make, arguments):
    """Dynamo warns of `functools.lru_cache`, which is an error here, and traces what it wraps."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return make(*arguments) * x

    x = torch.full((), 3.0)
    assert torch.equal(torch.compile(function, backend="eager", fullgraph=True)(x), function(x))
    assert counters["stats"]["calls_captured"] == 1
    assert make(*arguments) is make(*arguments)


def two_steps(model: PreTrainedModel, call, room: int | None) -> torch.Tensor:
    """Logits of two steps by `call` after a prompt that the model has read."""
    cache, ids = TurboQuantCache(model.config, max_cache_len=room, **OPTIONS), inputs(1, 40)["input_ids"]
    model(ids, **as_input(cache))
    return torch.stack([call(ids[:, i : i + 1], **as_input(cache)).logits for i in range(2)])


@pytest.mark.slow
def test_a_growing_cache_is_right_under_compilation_and_breaks_graphs_at_updates_and_attention_alone():
    """Both stay out of graphs, which would be compiled anew as the cache grows."""
    model = build("llama", num_hidden_layers=2, attention="turboquant")
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(two_steps(model, compiled, None), two_steps(model, model, None))
    assert len(counters["graph_break"]) == 2
    for function in ("TurboQuantCache._update_outside_of_graphs", "turboquant_attention"):
        assert any(f"<function {function} at" in reason for reason in counters["graph_break"])


@pytest.mark.slow
def test_inductor_gives_the_tokens_of_eager_decoding():
    model = build("llama", num_hidden_layers=2, attention="turboquant")
    expected = generate(model, TurboQuantCache(model.config, **OPTIONS), inputs())
    cache = TurboQuantCache(model.config, max_cache_len=MAX_LENGTH, **OPTIONS)
    assert torch.equal(generate(model, cache, inputs(), compile_config=compile_config("inductor")), expected)


@pytest.mark.parametrize("backend", ["recorded", slow("inductor")])
def test_positions_are_those_before_the_step_where_a_model_takes_them_from_the_cache(backend):
    """Without positions of the caller's they follow from the cache's length, which the first layer's step changes. What
    inductor computes from a tensor comes late, unless an operator has read the tensor before."""
    model, operators = build("llama", num_hidden_layers=2, attention="turboquant"), []

    def record(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        operators.extend(name for node in graph.graph.nodes if (name := str(node.target)).startswith("tq_hf."))
        return graph.forward

    compiled = torch.compile(model, backend=record if backend == "recorded" else backend, fullgraph=True)
    found, expected = (two_steps(model, call, MAX_LENGTH) for call in (compiled, model))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert backend == "inductor" or operators[0] == "tq_hf.tokens_held.default"


def test_a_preallocated_cache_is_used_in_turns_and_after_a_reset():
    model = build("llama", num_hidden_layers=2, attention="turboquant")
    cache = TurboQuantCache(model.config, max_cache_len=2 * MAX_LENGTH, **OPTIONS)
    growing = TurboQuantCache(model.config, **OPTIONS)
    heads = model.config.num_key_value_heads, model.config.head_dim
    cache.early_initialization(2, *heads, torch.float32, torch.device("cpu"))
    addresses = addresses_of(cache)
    for _ in range(2):
        ids = inputs(length=200)["input_ids"]
        for turn in (30, 150):
            ids = torch.cat([ids, inputs(length=turn)["input_ids"]], dim=1)
            prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            expected = generate(model, growing, prompt)
            ids = generate(model, cache, prompt, compile_config=compile_config())
            assert torch.equal(ids, expected)
        cache.crop(-40)
        growing.crop(-40)
        ids = ids[:, : int(cache.get_seq_length()) + 1]
        prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        ids = generate(model, cache, prompt, compile_config=compile_config())
        assert torch.equal(ids, generate(model, growing, prompt))
        order = torch.tensor([1, 0])
        cache.reorder_cache(order)
        growing.reorder_cache(order)
        prompt = {"input_ids": ids[order], "attention_mask": torch.ones_like(ids)}
        assert torch.equal(
            generate(model, cache, prompt, compile_config=compile_config()), generate(model, growing, prompt)
        )
        cache.reset()
        growing.reset()
        assert cache.get_seq_length() == 0
    assert addresses_of(cache) == addresses, "tensors moved: captured graphs would read freed memory"


def addresses_of(cache: TurboQuantCache) -> list[int]:
    tensors = (group for layer in cache.layers for group in layer.store.by_kind().values())
    return [tensor.data_ptr() for group in tensors for tensor in group]


@pytest.mark.parametrize("tokens", [150, 1])
def test_compiled_steps_of_every_turn_read_packed_blocks(tokens, monkeypatch):
    """Also of the third turn, whose prompt comes in a kind of call that is no longer watched, and after a prompt of one
    token, as decoders beside an encoder have."""
    model = build("llama", num_hidden_layers=2, attention="turboquant")
    cache = TurboQuantCache(model.config, max_cache_len=256)
    monkeypatch.setattr(dispatch, "dense_tokens", lambda *arguments: pytest.fail("a compiled step reads dense states"))
    ids = torch.randint(2, VOCAB, (1, tokens), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        ids = model.generate(ids, **as_input(cache), max_new_tokens=4, do_sample=False, compile_config=compile_config())
        ids = torch.cat([ids, ids[:, :7]], dim=1)


def two_turns(model: PreTrainedModel, cache: TurboQuantCache, chunk: int | None, **options) -> list[torch.Tensor]:
    """Tokens of a prompt of 600 and of a second turn of 37 more, both read in chunks where transformers can."""
    ids = token_ids(1, 637, seed=7).to(model.device)
    options |= dict(**as_input(cache), do_sample=False, max_new_tokens=9, prefill_chunk_size=chunk)
    first = model.generate(ids[:, :600], **options)
    if OLD_TRANSFORMERS:
        options["prefill_chunk_size"] = None
    return [first, model.generate(torch.cat([first, ids[:, 600:]], dim=1), **options)]


MODELS = (("llama", "turboquant"), ("llama", "sdpa"), ("gemma3", "turboquant"))


@pytest.mark.parametrize(
    ("made", "loop", "chunk"),
    quick_of(
        product(MODELS, ("generate", "graph_decoding"), (None, 256, 77)),
        *[(MODELS[0], "generate", 256), (MODELS[0], "graph_decoding", 77), (MODELS[1], "generate", 77)],
        *[(MODELS[1], "graph_decoding", None), (MODELS[2], "generate", None), (MODELS[2], "graph_decoding", 256)],
    ),
)
def test_prompts_are_read_in_chunks_without_a_graph_each(made, loop, chunk):
    """transformers would compile chunks as it compiles steps. Tokens are those of a growing cache, in one graph."""
    name, attention = made
    model = build(name, attention=attention)
    expected = two_turns(model, TurboQuantCache(model.config, **OPTIONS), chunk)
    own_loop = dict(custom_generate=graph_decoding) if loop == "graph_decoding" else {}
    cache = TurboQuantCache(model.config, max_cache_len=700, **OPTIONS)
    actual = two_turns(model, cache, chunk, compile_config=compile_config(), **own_loop)
    assert all(map(torch.equal, actual, expected))
    # A window that slides is a graph of its own.
    assert counters["stats"]["unique_graphs"] == (2 if name == "gemma3" else 1) and not counters["graph_break"]


@pytest.mark.parametrize(
    ("attention", "preallocated"), [("turboquant", None), ("turboquant", 900), slow("sdpa", 900), slow("sdpa", None)]
)
def test_a_model_that_its_user_compiled_reads_any_cache(attention, preallocated):
    """What no graph can hold leaves it: prompts, growing caches. In the end the same calls compile nothing."""
    layers = 1 if attention == "turboquant" else 2
    model = build("llama", num_hidden_layers=layers, attention=attention)
    compiled = torch.compile(model, backend="eager")
    graphs = []
    for _ in range(3):
        caches = [TurboQuantCache(model.config, max_cache_len=room, **OPTIONS) for room in (preallocated, None)]
        for seed, tokens in enumerate((300, 150, 150, 20, 1, 1, 1)):
            ids = token_ids(1, tokens, seed=seed)
            actual, expected = (m(ids, **as_input(c)).logits for m, c in zip((compiled, model), caches, strict=True))
            torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)
            graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] <= 6 + layers + OLD_TRANSFORMERS and graphs[13] <= 40 and graphs[20] == graphs[13]


@pytest.mark.skipif(not OLD_TRANSFORMERS, reason="counted by the test before")
def test_the_first_call_of_a_growing_cache_is_not_traced_into_the_store():
    model = build("llama", num_hidden_layers=1, attention="turboquant")
    torch.compile(model, backend="eager")(inputs(1, 300)["input_ids"], **as_input(TurboQuantCache(model.config)))
    # Before, between and after what leaves the graph: the embedding, norms and products of a layer, the head.
    assert counters["stats"]["unique_graphs"] <= 7 + OLD_TRANSFORMERS


@pytest.mark.parametrize("preallocated", [None, 900])
def test_a_model_answers_while_another_thread_compiles(monkeypatch, preallocated):
    """As an engine's does behind its first answers. torch 2.13 then says of every thread that it compiles."""
    model = build("llama", num_hidden_layers=2, attention="turboquant")
    found = []
    for compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "_is_compiling_flag", compiling)
        cache = TurboQuantCache(model.config, max_cache_len=preallocated, **OPTIONS)
        ids = [inputs(1, tokens)["input_ids"] for tokens in (300, 20, 1, 1)]
        found.append([model(part, **as_input(cache)).logits for part in ids])
    assert all(map(torch.equal, *found))
