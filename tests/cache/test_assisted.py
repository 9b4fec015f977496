"""Assisted decoding in `graph_decoding`: the tokens are those of plain decoding, and the cache never saw a draft."""

import copy
from functools import lru_cache
from itertools import cycle

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor

from examples.measure.quality.family_configs import tiny_model
from tests.support.recorded_graph import RecordedGraph, Streamed
from tests.support.tiny_models import CONFIGS, VOCAB, build, dense_attention, noisy, token_ids
from tq_hf import TurboQuantCache, graph_decoding
from tq_hf.compat import as_input
from tq_hf.graph_decoding.assisted import PromptLookup, speculative_sample
from tq_hf.graph_decoding.loop import latest_steps

pytestmark = pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")

ROOM = 320
NEW = 24
GREEDY = dict(max_new_tokens=NEW, do_sample=False)


@lru_cache
def models(name: str, device: str = "cpu"):
    """A model and an assistant for it."""
    model = build(name, attention="turboquant").to(device)
    assistant = noisy(model)
    assistant.set_attn_implementation("turboquant")
    assistant.generation_config.num_assistant_tokens = 4
    return model, assistant


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def pair(request):
    """Models that decode eagerly, and by CUDA graphs."""
    return models("llama", request.param)


@pytest.fixture
def captured(device):
    """Models that decode by recorded graphs, and by CUDA graphs."""
    return models("llama", device)


def repeating(model, tokens: int = 150) -> torch.Tensor:
    """A prompt `[1, tokens + 40]` that ends with a part of itself."""
    ids = token_ids(1, tokens, seed=tokens)
    return torch.cat([ids, ids[:, 20:60]], dim=1).to(model.device)


def drafts(pair, way: str) -> dict:
    return dict(prompt_lookup_num_tokens=4) if way == "lookup" else dict(assistant_model=pair[1])


def decode(model, ids, cache=None, **options):
    """Tokens of a greedy search, unless `options` say otherwise, and the cache."""
    cache = cache or TurboQuantCache(model.config, residual_length=10**4, max_cache_len=ROOM)
    torch.manual_seed(7)
    return model.generate(ids, **as_input(cache), **(GREEDY | options), custom_generate=graph_decoding), cache


def check(pair, way: str, ids: torch.Tensor, **options) -> None:
    """Tokens, and their number in the cache, are those of plain decoding."""
    expected, plain = decode(pair[0], ids, **options)
    tokens, cache = decode(pair[0], ids, **options, **drafts(pair, way))
    assert torch.equal(tokens, expected) and int(cache.get_seq_length()) == int(plain.get_seq_length())


WAYS = pytest.mark.parametrize("way", ["lookup", "assistant"])


@WAYS
@pytest.mark.parametrize("residual", [0, 32, 10**4])
def test_greedy_tokens_are_those_of_plain_decoding(captured, way, residual) -> None:
    """While a call reads the tokens that it packs dense, a step of several tokens packs a little later than several of
    one: tokens of a tiny random model may part there, once."""
    model, ids = captured[0], repeating(captured[0])

    def cache():
        return TurboQuantCache(model.config, "4bit_nc", residual_length=residual, max_cache_len=ROOM)

    expected, plain = decode(model, ids, cache())
    tokens, held = decode(model, ids, cache(), **drafts(captured, way))
    agree = int((tokens == expected).long().cumprod(1).sum())
    assert agree == tokens.shape[1] if residual == 10**4 else agree > ids.shape[1] + 4
    assert int(held.get_seq_length()) == int(plain.get_seq_length())
    state, other = (x.layers[-1].store.device_counts.read() for x in (held, plain))
    assert state == other
    if residual == 10**4:
        assert torch.allclose(held.layers[-1].keys, plain.layers[-1].keys, atol=1e-2)


@WAYS
def test_drafts_are_accepted_in_fewer_steps_than_tokens(captured, way) -> None:
    model, assistant = captured
    ids = repeating(model)
    if way == "assistant":
        assistant = model
    _, cache = decode(model, ids, **drafts((model, assistant), way))
    step = latest_steps[cache]
    steps = step.graph.replays if isinstance(step.graph, RecordedGraph) else step.warm
    if model.device.type == "cpu" and way == "assistant":
        # The model drafts for itself: all 5 drafts are right. The last step of a recorded graph ran in vain.
        assert steps <= NEW // 5 + 2


@WAYS
@pytest.mark.parametrize(
    "options",
    [
        dict(repetition_penalty=1.3),
        dict(min_new_tokens=NEW - 1),
        dict(do_sample=False, return_dict_in_generate=True, output_logits=True, output_scores=True),
        dict(prefill_chunk_size=40),
    ],
    ids=lambda options: list(options)[-1],
)
def test_options_of_generate_are_heeded(pair, way, options) -> None:
    model, ids = pair[0], repeating(pair[0])
    expected, _ = decode(model, ids, **options)
    tokens, _ = decode(model, ids, **options, **drafts(pair, way))
    if isinstance(tokens, torch.Tensor):
        assert torch.equal(tokens, expected)
        return
    assert torch.equal(tokens.sequences, expected.sequences)
    for name in ("logits", "scores"):
        assert len(getattr(tokens, name)) == len(getattr(expected, name)) == NEW
        for one, other in zip(getattr(tokens, name), getattr(expected, name), strict=True):
            torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


@WAYS
@pytest.mark.parametrize("place", [1, 2, 7, 11])
def test_it_ends_at_an_end_of_sequence_within_a_step(captured, way, place) -> None:
    model, ids = captured[0], repeating(captured[0])
    free, _ = decode(model, ids)
    end = int(free[0, ids.shape[1] + place])
    check(captured, way, ids, eos_token_id=end, pad_token_id=0)


@WAYS
def test_criteria_of_ones_own_end_it_at_their_token(pair, way) -> None:
    ids = repeating(pair[0])

    def stops(input_ids, scores, **kwargs):
        return torch.full((1,), input_ids.shape[1] >= ids.shape[1] + 14, device=input_ids.device)

    check(pair, way, ids, stopping_criteria=[stops])


@WAYS
def test_a_streamer_gets_every_token_once(pair, way) -> None:
    model, ids, streamed = pair[0], repeating(pair[0]), Streamed()
    tokens, _ = decode(model, ids, streamer=streamed, **drafts(pair, way))
    assert sum(streamed, []) == [*tokens[0].tolist(), "end"]


@WAYS
def test_several_calls_use_one_cache_and_one_graph(captured, way) -> None:
    """Padding gives rows another order in both caches, and a captured step reads that order."""
    model, ids = captured[0], repeating(captured[0])
    cache = TurboQuantCache(model.config, residual_length=10**4, max_cache_len=ROOM)
    kept = []
    for pads in (0, 0, 13, 2, 0, 1):
        mask = torch.ones_like(ids)
        mask[:, :pads] = 0
        expected, _ = decode(model, ids, attention_mask=mask)
        tokens, _ = decode(model, ids, cache, attention_mask=mask, **drafts(captured, way))
        assert torch.equal(tokens, expected), pads
        kept.append(latest_steps[cache])
        assert not isinstance(kept[-1].graph, RecordedGraph) or kept[-1].graph.replays
        cache.reset()
    assert kept[0] is kept[1]
    tokens, _ = decode(model, ids, cache, attention_mask=mask)  # without drafts, on the same cache
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize("way", ["plain", "lookup", "assistant"])
@pytest.mark.parametrize(
    "options",
    [dict(repetition_penalty=1.3), dict(return_dict_in_generate=True, output_logits=True, output_scores=True)],
    ids=["processor", "scores"],
)
def test_a_graph_that_is_used_again_gives_the_logits_of_its_step(captured, way, options) -> None:
    """Not those of the prompt, which the host had before it replayed the graph."""
    model, ids = captured[0], repeating(captured[0])
    options = options | (drafts(captured, way) if way != "plain" else {})
    cache = TurboQuantCache(model.config, residual_length=10**4, max_cache_len=ROOM)
    calls, steps = [], []
    for _ in range(2):
        calls.append(decode(model, ids, cache, **options)[0])
        steps.append(latest_steps[cache])
        cache.reset()
    assert steps[0] is steps[1] and steps[0].graph is not None
    if isinstance(calls[0], torch.Tensor):
        assert torch.equal(*calls)
        return
    for name in ("logits", "scores"):
        first, second = (torch.cat(getattr(call, name)) for call in calls)
        torch.testing.assert_close(first, second, atol=1e-3, rtol=1e-3)


@pytest.mark.slow
def test_sampling_with_drafts_has_the_distribution_of_the_model(pair) -> None:
    """Counts of the third token over many short answers, and of plain sampling: they differ by chance only."""
    model, assistant = pair
    counts = []
    for options in ({}, dict(prompt_lookup_num_tokens=3), dict(assistant_model=assistant)):
        cache = TurboQuantCache(model.config, residual_length=10**4, max_cache_len=ROOM)
        found = torch.zeros(VOCAB)
        for seed in range(300):
            torch.manual_seed(seed)
            cache.reset()
            arguments = dict(max_new_tokens=3, do_sample=True, top_k=3, **options)
            out = model.generate(
                repeating(model)[:, -30:], **as_input(cache), **arguments, custom_generate=graph_decoding
            )
            found[out[0, -2]] += 1
        counts.append(found)
    for found in counts[1:]:
        both = torch.stack([counts[0], found])
        seen = both[:, both.sum(0) >= 10]
        expected = seen.mean(0, keepdim=True)
        chi = ((seen - expected) ** 2 / expected).sum()
        assert chi < 3 * seen.shape[1] + 12, (chi, seen)


def test_speculative_sampling_has_the_distribution_of_the_model() -> None:
    generator = torch.Generator().manual_seed(0)
    model, draft = (torch.randn(n, 6, generator=generator).mul(1.5).softmax(-1) for n in (3, 2))
    torch.manual_seed(0)
    rounds = 5_000
    counts, accepted = torch.zeros(6), 0
    for _ in range(rounds):
        tokens, number = speculative_sample(torch.multinomial(draft, 1)[:, 0], draft, model)
        counts[tokens[0]] += 1
        accepted += int(number > 0)
    assert torch.allclose(counts / rounds, model[0], atol=0.025)
    # A first draft is accepted with probability sum(min(p, q)).
    assert accepted / rounds == pytest.approx(float(torch.minimum(model[0], draft[0]).sum()), abs=0.025)


def test_equal_distributions_accept_every_draft() -> None:
    probabilities = torch.randn(5, 50, generator=torch.Generator().manual_seed(1)).softmax(-1)
    tokens, number = speculative_sample(torch.multinomial(probabilities[:4], 1)[:, 0], probabilities[:4], probabilities)
    assert number == 4 and tokens.shape == (5,)


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        ([1, 2, 3, 9, 9, 1, 2], [3, 9, 9]),  # after the two tokens it ends with
        ([5, 2, 7, 1, 2, 4, 1, 2], [4, 1, 2]),  # two tokens before one
        ([1, 2, 3, 1, 2, 4, 1, 2], [3, 1, 2]),  # the first of equal places
        ([8, 2, 6, 6, 2], [6, 6, 2]),  # one token
    ],
)
def test_a_lookup_drafts_what_followed_the_longest_match(text, drafts) -> None:
    history = torch.tensor([[*text, 2, 2, 2, 2, 2]])
    found, _ = PromptLookup(3, 2).draft(None, history, torch.tensor([len(text)]))
    assert found.tolist() == drafts


def test_a_lookup_without_a_match_drafts_any_tokens() -> None:
    found, _ = PromptLookup(3, 2).draft(None, torch.arange(12)[None], torch.tensor([5]))
    assert found.shape == (3,)


class Reads(LogitsProcessor):
    """Keeps the tokens it was given."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids[0].tolist())
        return scores


@WAYS
def test_a_processor_reads_the_tokens_before_its_position(pair, way) -> None:
    model, ids, reads = pair[0], repeating(pair[0]), Reads()
    tokens, _ = decode(model, ids, logits_processor=[reads], **drafts(pair, way))
    text = tokens[0].tolist()
    for length in range(ids.shape[1], len(text)):
        assert text[:length] in reads.seen


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (dict(room=ROOM - 105, prompt_lookup_num_tokens=4), "max_cache_len=218"),
        (dict(prompt_lookup_num_tokens=2, assistant_ensemble_weight=0.5), "assistant_ensemble_weight"),
        (dict(config=dict(vocab_size=64)), "vocabulary of 128 tokens, and its assistant of 64"),
        (dict(tokens=1, assistant=True), "has 1 tokens"),
        (dict(config=dict(attention_chunk_size=16)), "LlamaForCausalLM also has layers of attention within chunks"),
    ],
)
def test_what_it_cannot_do_is_a_sentence(change, sentence) -> None:
    model, assistant = models("llama")
    if other := change.pop("config", None):
        config = copy.deepcopy(model.config)
        config.update(other)
        change["assistant_model"] = type(model)(config)
    if change.pop("assistant", False):
        change["assistant_model"] = assistant
    cache = TurboQuantCache(model.config, max_cache_len=change.pop("room", ROOM))
    ids = repeating(model)[:, -change.pop("tokens", 190) :]
    with pytest.raises(ValueError, match=sentence):
        model.generate(ids, **GREEDY, **change, **as_input(cache), custom_generate=graph_decoding)
    assert int(cache.get_seq_length()) == 0


@pytest.mark.parametrize(("name", "way"), zip(CONFIGS, cycle(("lookup", "assistant")), strict=False))
def test_every_family_gives_the_tokens_of_plain_decoding(name, way) -> None:
    model, assistant = models(name)
    ids = token_ids(1, 20, seed=5).repeat(1, 3)
    options = dict(do_sample=False, max_new_tokens=12, eos_token_id=None)
    model.set_attn_implementation(dense_attention(name))
    expected = model.generate(ids, **as_input(DynamicCache(config=model.config)), **options)
    model.set_attn_implementation("turboquant")
    try:
        cache = TurboQuantCache(model.config, residual_length=10**4, max_cache_len=96)
        tokens = model.generate(
            ids, **as_input(cache), **options, **drafts((model, assistant), way), custom_generate=graph_decoding
        )
    except ValueError as error:
        # Linear layers, and models of which transformers refuses drafts.
        assert any(word in str(error) for word in ("takes models whose layers", "stateful", "no preallocated")), error
        assert name not in ("llama", "qwen3", "mla", "gemma2", "gemma3", "gemma3n", "gemma4", "gpt_oss")
        return
    assert torch.equal(tokens, expected)


@WAYS
def test_drafts_of_modules_that_are_not_causal_do_not_see_their_future(way) -> None:
    """PaliGemma's and BigBird-Pegasus' modules leave causality to masks, and a step of drafts has none of columns."""
    both = copy.deepcopy(models("llama"))
    for module in (*both[0].modules(), *both[1].modules()):
        if hasattr(module, "is_causal"):
            module.is_causal = False
    ids = repeating(both[0])
    expected, _ = decode(both[0], ids)
    tokens, _ = decode(both[0], ids, **drafts(both, way))
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize("padded", [0, 15])
@pytest.mark.parametrize("name", ["opt", "gpt2", "qwen3_vl"])
def test_an_assistant_gets_the_positions_of_its_prompt(name, padded) -> None:
    """As from `generate()`: OPT's masks and M-RoPE's positions followed no step, and padding was counted (GPT-2)."""
    model = tiny_model(name, "turboquant")
    assistant, runs = copy.deepcopy(model), []
    assistant.generation_config.num_assistant_tokens = 3
    ids = token_ids(1, 40, seed=5)
    mask = (torch.arange(40) >= padded).long()[None]
    options = dict(attention_mask=mask, do_sample=False, max_new_tokens=16, pad_token_id=0, eos_token_id=None)
    options |= dict(disable_compile=True)
    assistant.generate(ids, **options)
    expected = model.generate(ids, **as_input(DynamicCache(config=model.config)), **options)
    model.register_forward_hook(lambda *_: runs.append(1))
    assert torch.equal(decode(model, ids, assistant_model=assistant, **options)[0], expected)
    assert len(runs) == 5  # the prompt, and four steps whose drafts are the model's own tokens


def test_mllama_is_refused_in_a_sentence() -> None:
    model = tiny_model("mllama/images")
    sizes, ids = model.config.vision_config, torch.arange(3, 12)[None]
    pixels = torch.zeros(1, 1, sizes.max_num_tiles, sizes.num_channels, sizes.image_size, sizes.image_size)
    tiles = dict(aspect_ratio_mask=torch.ones(1, 1, sizes.max_num_tiles, dtype=torch.long), pixel_values=pixels)
    tiles |= dict(cross_attention_mask=torch.ones(1, 9, 1, sizes.max_num_tiles, dtype=torch.long))
    with pytest.raises(ValueError, match="takes cross_attention_mask at each step"):
        decode(model, ids, aspect_ratio_ids=torch.ones(1, 1, dtype=torch.long), **tiles)


def test_other_tensors_of_the_assistants_cache_make_another_step(captured) -> None:
    """An order of padded rows is made by call: a graph that reads that of the last call would read freed memory."""
    model, ids = captured[0], repeating(captured[0])
    expected, cache = decode(model, ids, **drafts(captured, "assistant"))
    step = latest_steps[cache]
    for layer in step.drafts.layers:
        layer.store = layer.store.map(torch.clone)
    cache.reset()
    tokens, _ = decode(model, ids, cache, **drafts(captured, "assistant"))
    assert torch.equal(tokens, expected) and latest_steps[cache] is not step
