"""`custom_generate=graph_decoding` gives the tokens of `generate()`'s own loop, and leaves the cache as that does."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import CompileConfig, DynamicCache, GenerationConfig, LogitsProcessor, WatermarkingConfig

from examples.measure.quality.family_configs import tiny_model
from tests.support.helpers import compile_config
from tests.support.recorded_graph import Streamed, record_graphs
from tests.support.tiny_models import VOCAB, build, letters
from tq_hf import TurboQuantCache, attention, graph_decoding
from tq_hf.compat import CACHE_NAME, as_input, prefill
from tq_hf.graph_decoding import entry as graph_entry
from tq_hf.graph_decoding import loop as graph_loop
from tq_hf.graph_decoding import prompts as graph_prompts
from tq_hf.graph_decoding.prompts import CapturedPrompt, PromptReader

# Of a tiny model compiled by transformers alone.
pytestmark = pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")

ROOM = 256
GREEDY = dict(max_new_tokens=20, do_sample=False)
COMPILED = compile_config(fullgraph=False)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def model(request):
    return build("llama", attention="turboquant").to(request.param)


def prompt(model, batch: int = 2, tokens: int = 150, padded: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(tokens))
    mask = torch.ones_like(ids)
    ids[0, :padded], mask[0, :padded] = 0, 0
    return {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}


def both(model, inputs, **options):
    """What the loop and `generate()` alone return, and their caches."""
    results = []
    for loop in ({}, {"custom_generate": graph_decoding}):
        cache = TurboQuantCache(model.config, "4bit_nc", residual_length=32, max_cache_len=ROOM)
        torch.manual_seed(7)
        results.append((model.generate(**inputs, **as_input(cache), **options, **loop), cache))
    return results


def rounding(device: torch.device, alone: float) -> float:
    """Tolerance of values behind several attentions, which is `alone` where these compute in float32."""
    return 5e-3 if device.type == "cuda" else alone


def same_caches(one: TurboQuantCache, other: TurboQuantCache, second_keys: float = 1e-5) -> bool:
    """Whether caches hold the same tokens. The second layer's keys depend on one attention and differ by 3e-6 at most.

    Beyond it, on a GPU, a last bit decides to which fp16 number a probability is rounded: 1.3e-3 was seen in the fourth
    layer, of keys up to 9.6. One token less in attention moves the second layer by 2e-3 or more, the last by 7e-2.
    """
    lengths = [int(cache.get_seq_length()) for cache in (one, other)]
    second, last = (torch.stack([cache.layers[i].keys for cache in (one, other)]) for i in (1, -1))
    return (
        lengths[0] == lengths[1]
        and torch.allclose(second[0], second[1], atol=second_keys)
        and torch.allclose(last[0], last[1], atol=rounding(last.device, 1e-5))
    )


class Upper(LogitsProcessor):
    """Prefers the upper half of the vocabulary."""

    def __call__(self, input_ids, scores):
        return scores + 3 * (torch.arange(scores.shape[-1], device=scores.device) >= scores.shape[-1] // 2)


AS_GREEDY = ("padded", "inputs_embeds", "prefill_chunk_size")


@pytest.mark.parametrize(
    "options",
    [
        dict(padded=0),
        dict(padded=9),
        dict(inputs_embeds=True),
        dict(do_sample=True, temperature=0.8, top_k=20, top_p=0.9),  # in the graph
        dict(do_sample=True, min_new_tokens=5, repetition_penalty=1.3),  # which look at the tokens so far
        dict(do_sample=True, num_return_sequences=3),
        dict(do_sample=True, watermarking_config=WatermarkingConfig(bias=2.5)),
        dict(logits_processor=[Upper()]),
        dict(prefix_allowed_tokens_fn=lambda batch, ids: list(range(10 + ids.shape[0] % 7, 40))),
        dict(guidance_scale=1.5),
        dict(prefill_chunk_size=40),
    ],
    ids=lambda options: list(options)[-1],
)
def test_tokens_are_those_of_generate(model, options) -> None:
    inputs, generates = prompt(model, padded=options.get("padded", 0)), {**GREEDY, **options}
    generates.pop("padded", None)
    if generates.pop("inputs_embeds", False):
        inputs = {"inputs_embeds": model.get_input_embeddings()(inputs["input_ids"])}
    (expected, plain), (tokens, cache) = both(model, inputs, **generates)
    assert torch.equal(tokens, expected) and same_caches(cache, plain)
    (free, _), _ = both(model, prompt(model), **GREEDY)
    assert list(options)[-1] in AS_GREEDY or not torch.equal(tokens, free)


@pytest.mark.parametrize("ends", [True, False])
def test_an_answer_may_fill_the_cache(model, ends, monkeypatch) -> None:
    """The step after the end, which a captured graph takes before the host has read of the end, has no room."""
    if model.device.type == "cpu":
        record_graphs(monkeypatch)
    inputs = prompt(model, batch=1, tokens=20)
    options = dict(max_new_tokens=12, do_sample=False)
    free = model.generate(**inputs, **options, **as_input(DynamicCache(config=model.config)))[0, 20:].tolist()
    last = next(i for i in range(6, 12) if free.index(free[i]) == i)
    # A step that transformers compiles on a GPU does not count: there the assertion in the kernel fails (test_overrun).
    for loop in ({"disable_compile": True}, {"custom_generate": graph_decoding}):
        cache = TurboQuantCache(model.config, max_cache_len=20 + last)
        end = free[last] if ends else None
        call = partial(model.generate, **inputs, **as_input(cache), do_sample=False, eos_token_id=end, **loop)
        if ends:
            assert call(max_length=120)[0, 20:].tolist() == free[: last + 1]
        else:
            with pytest.raises(ValueError, match=f"to the {20 + last} in this cache exceeds its `max_cache_len`"):
                call(max_length=120)
        assert int(cache.get_seq_length()) == 20 + last


def test_it_stops_where_generate_stops(model) -> None:
    inputs = prompt(model)
    free = model.generate(**inputs, **GREEDY, **as_input(DynamicCache(config=model.config)))[:, 150:]
    ends = [int(free[0, 4]), int(free[1, 9])]
    (expected, plain), (tokens, cache) = both(model, inputs, **GREEDY, eos_token_id=ends, pad_token_id=0)
    assert torch.equal(tokens, expected) and expected.shape[1] < 150 + 20
    assert same_caches(cache, plain)


def test_criteria_of_ones_own_stop_it(model) -> None:
    def stops(input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 157, device=input_ids.device)

    (expected, plain), (tokens, cache) = both(model, prompt(model), **GREEDY, stopping_criteria=[stops])
    assert torch.equal(tokens, expected) and tokens.shape[1] == 157
    assert same_caches(cache, plain)


def test_a_dictionary_holds_what_generate_returns(model) -> None:
    options = dict(return_dict_in_generate=True, output_logits=True, output_scores=True)
    (expected, _), (got, cache) = both(model, prompt(model), **GREEDY, **options, repetition_penalty=1.2)
    assert torch.equal(got.sequences, expected.sequences) and got[CACHE_NAME] is cache
    for name in ("logits", "scores"):
        assert len(getattr(got, name)) == len(getattr(expected, name))
        for one, other in zip(getattr(got, name), getattr(expected, name), strict=True):
            close = rounding(model.device, 1e-4)
            torch.testing.assert_close(one, other, atol=close, rtol=close)


def test_a_streamer_gets_every_token_once(model) -> None:
    plain, streamed = Streamed(), Streamed()
    inputs = prompt(model, batch=1)
    options = dict(**GREEDY, pad_token_id=0)
    ids = model.generate(**inputs, **options, **as_input(DynamicCache(config=model.config)))
    end = int(ids[0, 150 + 6])
    for streamer, loop in ((plain, {}), (streamed, {"custom_generate": graph_decoding})):
        cache = TurboQuantCache(model.config, max_cache_len=ROOM)
        model.generate(**inputs, **as_input(cache), eos_token_id=end, streamer=streamer, **options, **loop)
    assert streamed == plain


@pytest.mark.parametrize("several", [False, True])
def test_stop_strings_end_an_answer_beside_their_tokenizer(model, several) -> None:
    (free, _), _ = both(model, prompt(model, batch=1), **GREEDY)
    string = "".join(map(chr, free[0, 150 + 7 : 150 + 9]))
    options = dict(stop_strings=["never there", string] if several else string, tokenizer=letters(pad_token="\0"))
    (expected, plain), (tokens, cache) = both(model, prompt(model, batch=1), **GREEDY, **options)
    assert torch.equal(tokens, expected) and tokens.shape[1] <= 150 + 9
    assert same_caches(cache, plain)


@pytest.mark.parametrize(
    "change, sentence",
    [
        (dict(cache="growing"), "max_cache_len"),
        (dict(cache="dynamic"), "DynamicCache"),
        (dict(num_beams=2), "beam search"),
        (dict(num_beams=2, do_sample=True), "beam sample"),
        (dict(num_beams=4, num_beam_groups=2, diversity_penalty=1.0), "group beam search"),
        (dict(force_words_ids=[[3]]), "constrained beam search"),
        (dict(constraints=[object()]), "constrained beam search"),
        (dict(penalty_alpha=0.6, top_k=4), "contrastive search"),
        (dict(dola_layers="low"), "dola generation"),
        (dict(prompt_lookup_num_tokens=2), "for one sequence, and this call has 2"),
        (dict(assistant_early_exit=2), "assistant_early_exit"),
        (dict(assistant_model=build("llama")), "for one sequence"),
        (dict(use_mtp=True), "use_mtp"),
        (dict(use_cache=False), "use_cache"),
        (dict(synced_gpus=True), "synced_gpus"),
        (dict(stop_strings=["ab"]), "`stop_strings` .'ab'. came without a tokenizer"),
        (dict(return_dict_in_generate=True, output_attentions=True), "output_attentions"),
        (dict(attention_chunk_size=16), "also has layers of attention within chunks"),  # which do not slide
    ],
)
def test_what_it_cannot_do_is_a_sentence(model, change, sentence, monkeypatch) -> None:
    caches = {
        "growing": lambda: TurboQuantCache(model.config),
        "dynamic": lambda: DynamicCache(config=model.config),
        None: lambda: TurboQuantCache(model.config, max_cache_len=ROOM),
    }
    cache = caches[change.pop("cache", None)]()
    if chunk := change.pop("attention_chunk_size", None):
        monkeypatch.setattr(model.config, "attention_chunk_size", chunk, raising=False)
    with pytest.raises(ValueError, match=sentence):
        model.generate(**prompt(model), **(GREEDY | change), **as_input(cache), custom_generate=graph_decoding)
    assert int(cache.get_seq_length()) == 0


def test_another_adapter_or_hook_makes_another_step(model, monkeypatch) -> None:
    """Adapters are switched without a change of any parameter, and a captured step would not notice."""
    cache = TurboQuantCache(model.config, max_cache_len=ROOM)
    steps = []
    for active in ("one", "one", "other", "other"):
        monkeypatch.setattr(graph_loop, "adapters", lambda model, active=active: {"active": [active]})
        if len(steps) == 3:
            model.model.norm.register_forward_hook(steer)
        model.generate(**prompt(model, tokens=20), **as_input(cache), **GREEDY, custom_generate=graph_decoding)
        steps.append(graph_loop.latest_steps[cache])
        cache.reset()
    assert steps[0] is steps[1] is not steps[2] is not steps[3]


def keys(model, monkeypatch, *calls: dict) -> list:
    """What the step of each of these calls depends on, all on one cache."""
    found, real = [], graph_loop.Loop._key
    monkeypatch.setattr(graph_loop.Loop, "_key", lambda self, *args: found.append(real(self, *args)) or found[-1])
    cache = TurboQuantCache(model.config, max_cache_len=ROOM)
    options = dict(max_new_tokens=3, do_sample=False, **as_input(cache), custom_generate=graph_decoding)
    for call in calls:
        model.generate(**prompt(model, tokens=20), **(options | call))
        cache.reset()
    return found


@pytest.mark.parametrize(
    ("calls", "steps"),
    [
        # A tensor that is printed is rounded to four digits.
        ([dict(do_sample=True, eta_cutoff=cutoff) for cutoff in (3.1e-4, 3.4e-4, 3.1e-4)], [0, 1, 0]),
        ([dict(repetition_penalty=penalty) for penalty in (1.1, 1.3)], [0, 0]),  # outside of the step
        ([dict(compile_config=COMPILED, disable_compile=disabled) for disabled in (False, True)], [0, 1]),
    ],
    ids=["cutoffs", "penalties", "compiled"],
)
def test_a_step_is_another_if_what_it_computes_is(model, calls, steps, monkeypatch) -> None:
    found = keys(model, monkeypatch, *calls)
    assert [found.index(key) for key in found] == steps


def test_a_step_that_is_compiled_otherwise_is_another(model, monkeypatch) -> None:
    monkeypatch.setattr(model, "get_compiled_call", lambda config: model.__call__)
    monkeypatch.setattr(PromptReader, "of", lambda *_: SimpleNamespace(read=prefill))
    calls = [dict(compile_config=CompileConfig(options={"tuning": on})) for on in (True, False, True)]
    for call in calls:
        call["compile_config"]._compile_all_devices = True
    one, other, again = keys(model, monkeypatch, *calls)
    assert one == again != other


@pytest.mark.parametrize(
    ("mode", "taken"),
    [
        ("reduce-overhead", None),
        ("max-autotune", "max-autotune-no-cudagraphs"),
        ("max-autotune-no-cudagraphs", "max-autotune-no-cudagraphs"),
        (None, None),
    ],
)
def test_how_to_compile_is_heeded_but_for_graphs_of_the_compiler(model, mode, taken, monkeypatch) -> None:
    given = CompileConfig(backend="eager", mode=mode, options={"epilogue": 1, "triton.cudagraphs": True})
    given._compile_all_devices = True
    compiled = []
    monkeypatch.setattr(model, "get_compiled_call", lambda config: compiled.append(config) or model.__call__)
    monkeypatch.setattr(
        graph_prompts, "CompiledLayers", lambda model, config: compiled.append(config) or SimpleNamespace(layers=[])
    )
    cache = TurboQuantCache(model.config, max_cache_len=ROOM)
    options = dict(**as_input(cache), custom_generate=graph_decoding, compile_config=given)
    model.generate(**prompt(model), **GREEDY, **options)
    wanted = "eager", taken, {"epilogue": 1}
    assert compiled and all((config.backend, config.mode, config.options) == wanted for config in compiled)
    assert "triton.cudagraphs" in given.options, "the caller's own"


def read(model, inputs, reader: PromptReader | None, room: int = 1024):
    """Logits of a prompt as `graph_decoding` reads it, and the cache."""
    cache, config = TurboQuantCache(model.config, residual_length=32, max_cache_len=room), model.generation_config
    with torch.no_grad():
        options = {"attention_mask": inputs["attention_mask"], **as_input(cache)}
        call = model, inputs["input_ids"], config, options
        outputs, steps = prefill(*call) if reader is None else reader.read(*call)
    assert steps[CACHE_NAME] is cache and steps["attention_mask"].shape[1] == inputs["input_ids"].shape[1] + 1
    return outputs.logits[:, -1], cache


def compare(model, inputs, reader: PromptReader) -> None:
    """A prompt is read as without a reader."""
    (expected, plain), (found, cache) = read(model, inputs, None), read(model, inputs, reader)
    atol = rounding(found.device, 1e-5)
    # A graph's products and attention are those of more tokens.
    assert torch.allclose(found, expected, atol=atol) and same_caches(cache, plain, min(atol, 1e-4))


@pytest.mark.parametrize("padded", [0, 9])
def test_compiled_layers_read_prompts_of_any_length(model, padded, monkeypatch) -> None:
    calls, call = [], graph_prompts._call
    monkeypatch.setattr(graph_prompts, "_call", lambda *x, **named: (calls.append(x), call(*x, **named))[1])
    reader = PromptReader(model, CompileConfig(backend="eager", mode=None, dynamic=True))
    for tokens in (150, 40, 300):
        compare(model, prompt(model, 2, tokens, padded), reader)
    assert len(calls) == (0 if padded else 3 * len(model.model.layers))
    assert not [name for name in vars(model.model.layers[0]) if name == "forward"]


def test_prompts_are_compiled_from_where_asked_on_or_after_many_tokens(model) -> None:
    asked, unasked = GenerationConfig(compile_config=CompileConfig()), GenerationConfig()
    found = [PromptReader.of(model, config, 40) for config in (unasked, asked, unasked, asked)]
    assert [reader.layers.config is not None for reader in found] == [False, True, True, True]
    assert found[1] is found[2] is found[3]
    other = build("llama")
    many = [PromptReader.of(other, unasked, graph_prompts.MANY_TOKENS) for _ in range(2)]
    assert [reader.layers.config is not None for reader in many] == [False, True]


@pytest.fixture
def captured(model, monkeypatch) -> PromptReader:
    """A reader that captures the first prompt of each size, on a CPU, too."""
    if model.device.type == "cpu":
        record_graphs(monkeypatch)
        init = CapturedPrompt.__init__

        def captured(self, *call) -> None:
            init(self, *call)
            self.graph.replays = 1  # its inputs come after the capture

        monkeypatch.setattr(CapturedPrompt, "__init__", captured)
        monkeypatch.setattr(torch.cuda, "Event", Mock)
    monkeypatch.setattr(graph_prompts, "CALLS", 1)
    return PromptReader(model, None)


def test_short_prompts_are_graphs_of_few_sizes(model, captured) -> None:
    for batch, tokens in ((1, 40), (1, 64), (2, 70), (2, 3), (1, 50), (2, 128), (1, 300)):
        compare(model, prompt(model, batch, tokens), captured)
    graphs = {(1, 64, 0), (2, 128, 0), (2, 64, 0), (1, 512, 0)}
    assert set(captured.graphs) == graphs
    for inputs in (prompt(model, 1, 513), prompt(model, 2, 257), prompt(model, 2, 40, padded=9)):
        compare(model, inputs, captured)
    assert set(captured.graphs) == graphs
    shared = {x.untyped_storage().data_ptr() for each in captured.graphs.values() for *_, s in each.found for x in s}
    assert len(shared) == 3 * len(model.model.layers)


def test_a_short_prompt_is_captured_once_it_has_come_often(model, captured, monkeypatch) -> None:
    monkeypatch.setattr(graph_prompts, "CALLS", 3)
    for expected in (0, 0, 1, 1):
        compare(model, prompt(model, 1, 40), captured)
        assert len(captured.graphs) == expected


def test_a_graph_of_prompts_follows_weights(model, captured) -> None:
    first, mlp = prompt(model, 1, 40), model.model.layers[0].mlp
    before, _ = read(model, first, captured)
    with torch.no_grad():
        mlp.up_proj.weight.mul_(2)  # in place
        compare(model, first, captured)
        graph = captured.graphs[1, 64, 0]
        mlp.up_proj.weight = torch.nn.Parameter(mlp.up_proj.weight / 3)
        compare(model, first, captured)
    assert captured.graphs[1, 64, 0] is not graph and not torch.allclose(before, read(model, first, captured)[0])
    _, cache = read(model.bfloat16(), first, captured)
    assert cache.layers[0].keys.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["deepseek_v3", "kimi_k25"])  # the second beside a vision tower
def test_prompts_of_latents_are_read_as_by_generate(name) -> None:
    (model := tiny_model(name).eval()).set_attn_implementation("turboquant")
    compare(model, prompt(model, 1, 40), PromptReader(model, CompileConfig(backend="eager", mode=None, dynamic=True)))


def steer(module, args, out) -> torch.Tensor:
    """Forward hook that changes every answer."""
    return 1.5 * out + 1


CHANGES = {
    "a hook": lambda model: model.model.layers[0].mlp.register_forward_hook(steer),
    "a buffer": lambda model: setattr(model.model.rotary_emb, "inv_freq", model.model.rotary_emb.inv_freq / 2),
    "a module": lambda model: setattr(model.model.layers[0].mlp, "act_fn", torch.nn.Tanh()),
}


@pytest.mark.parametrize("way", ["captured", "compiled"])
@pytest.mark.parametrize("change", CHANGES)
def test_prompts_follow_a_change(model, captured, change, way) -> None:
    how = GenerationConfig(compile_config=CompileConfig(backend="eager", mode=None))
    torch.compiler.reset()
    for prepare in (lambda model: None, CHANGES[change]):
        prepare(model)
        reader = PromptReader.of(model, how, 40)
        reader.ways = {way: reader.ways[way]}
        compare(model, prompt(model, 1, 40), reader)
    assert reader.ways and bool(reader.graphs) == (way == "captured")


def test_threads_read_prompts_of_a_model_in_turn(model) -> None:
    """Layers are replaced meanwhile, and a graph's states are one thread's."""
    reader = PromptReader(model, CompileConfig(backend="eager", mode=None, dynamic=True))
    (way, say), alone, lengths = reader.ways["compiled"], threading.Lock(), range(100, 104)

    def noted(*call: Any) -> Any:
        assert alone.acquire(blocking=False)
        threading.Event().wait(0.1)  # time for another thread to come
        found = way(*call)
        alone.release()
        return found

    reader.ways = {"compiled": (noted, say)}
    with ThreadPoolExecutor(4) as threads:
        found = threads.map(lambda length: read(model, prompt(model, 1, length), reader), lengths)
    for (logits, cache), length in zip(found, lengths, strict=True):
        expected, plain = read(model, prompt(model, 1, length), None)
        assert torch.allclose(logits, expected, atol=rounding(model.device, 1e-5)) and same_caches(cache, plain, 1e-4)


def test_a_model_whose_prompts_are_captured_is_freed(model, captured) -> None:
    model = build("llama", attention="turboquant").to(model.device)
    reader = PromptReader.of(model, GenerationConfig(), 40)
    compare(model, prompt(model, 1, 40), reader)
    assert reader.graphs
    found = weakref.ref(model)
    del model, reader
    gc.collect()
    assert found() is None


@pytest.mark.parametrize("own", ["position_ids", "inputs_embeds"])
def test_inputs_of_a_captured_prompt_are_applied(model, captured, own) -> None:
    (ids, mask), found = prompt(model, 1, 40).values(), []
    values = {
        "position_ids": torch.arange(7, 47, device=model.device)[None],
        "inputs_embeds": model.model.embed_tokens(ids + 1),
    }
    for read in (prefill, captured.read):
        cache = TurboQuantCache(model.config, residual_length=32, max_cache_len=64)
        options = {"attention_mask": mask, own: values[own].detach(), **as_input(cache)}
        with torch.no_grad():
            read(model, ids, model.generation_config, options)
        found.append(cache)
    assert list(captured.graphs) == ([(1, 64, 1)] if own == "position_ids" else []) and same_caches(*found)


def test_generate_reads_short_prompts_by_a_graph(model, captured, monkeypatch) -> None:
    if model.device.type == "cpu":
        monkeypatch.setattr(graph_entry, "prefill", captured.read)
    else:
        monkeypatch.setattr(PromptReader, "of", lambda *_: captured)
    for inputs in (prompt(model, 2, 150), prompt(model, 2, 140), prompt(model, 2, 150)):
        (expected, plain), (found, cache) = both(model, inputs, **GREEDY)
        keys = [each.layers[-1].keys[:, :, :140] for each in (cache, plain)]  # of the prompt: 1.3e-5 apart on a GPU
        assert torch.equal(found, expected) and torch.allclose(*keys, atol=1e-4)
    assert len(captured.graphs) == 1


def test_prompts_that_cannot_be_captured_are_read(model, captured, monkeypatch, caplog) -> None:
    forward = model.model.norm.forward
    monkeypatch.setattr(model.model.norm, "forward", lambda x: (x.cpu().sum().item(), forward(x))[1])
    if model.device.type == "cpu":  # where a recorded graph says so otherwise
        monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("not permitted")))
    with caplog.at_level("INFO"):
        for _ in range(2):
            compare(model, prompt(model, 1, 40), captured)
    assert not captured.graphs and not captured.states
    assert "not captured: A prompt of LlamaForCausalLM cannot be captured" in caplog.text


def test_a_prompt_without_room_leaves_the_cache_as_it_was(model, captured) -> None:
    cache, inputs = TurboQuantCache(model.config, residual_length=32, max_cache_len=16), prompt(model, 1, 40)
    with torch.no_grad(), pytest.raises(ValueError, match="16"):
        options = {"attention_mask": inputs["attention_mask"], **as_input(cache)}
        captured.read(model, inputs["input_ids"], model.generation_config, options)
    assert int(cache.get_seq_length()) == 0


def test_layers_that_attend_otherwise_are_not_compiled(model, monkeypatch, caplog) -> None:
    monkeypatch.setattr(attention, "_attend_prompt", lambda module, *_, **__: attention._refuse_prompt(module))
    reader, inputs = PromptReader(model, CompileConfig(backend="eager", mode=None, dynamic=True)), prompt(model)
    torch.compiler.reset()
    for _ in range(2):
        (expected, plain), (found, cache) = read(model, inputs, None), read(model, inputs, reader)
        assert torch.equal(found, expected) and same_caches(cache, plain)
    assert "are not compiled: LlamaAttention attends with a mask or other options." in caplog.text


def test_layers_on_several_devices_are_refused_where_a_step_would_be_captured(monkeypatch) -> None:
    """With layers on the CPU, `generate()` compiles nothing and the loop captures nothing."""
    model = build("llama")

    def answer(devices, cache):
        monkeypatch.setattr(model, "hf_device_map", devices, raising=False)
        options = dict(**as_input(cache), custom_generate=graph_decoding, compile_config=COMPILED)
        return model.generate(**prompt(model), **GREEDY, **options).tolist()

    caches = [TurboQuantCache(model.config, max_cache_len=ROOM) for _ in range(3)]
    expected = answer({"": 0}, caches[0])
    with pytest.raises(ValueError, match="spread over the devices 0, 1, and a CUDA graph is captured on one"):
        answer({"model": 0, "lm_head": 1}, caches[1])
    assert int(caches[1].get_seq_length()) == 0
    assert answer({"model": 0, "lm_head": "cpu"}, caches[2]) == expected


@pytest.mark.parametrize("drafts", ["none", "lookup", "assistant"])
@pytest.mark.parametrize("first", [True, False], ids=["inference mode first", "inference mode last"])
def test_a_step_is_used_again_in_and_out_of_inference_mode(model, first, drafts) -> None:
    cache, found = TurboQuantCache(model.config, max_cache_len=ROOM), []
    options: dict = {"lookup": {"prompt_lookup_num_tokens": 3}, "assistant": {"assistant_model": model}}.get(drafts, {})
    options |= dict(**prompt(model, 1 if options else 2, padded=9), **GREEDY, custom_generate=graph_decoding)
    for inference in (first, not first):
        with torch.inference_mode(inference):
            found.append(model.generate(**as_input(cache), **options))
            cache.reset()
    assert torch.equal(*found)
