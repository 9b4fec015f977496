"""What holds of every kind of layer in pages: packed and dense ones, sliding windows, linear layers with states, packed
latents. Tokens are those of `generate()` with the same config."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedModel

from examples.measure.quality.family_configs import tiny_model
from tests.support.batching_cases import (
    Session,
    Steps,
    Tokens,
    check_one_graph,
    gemma4,
    gemma4_sharing,
    greedy,
    hybrid,
    mixed,
    model_of,
    options,
    prompts,
)
from tests.support.helpers import quick_of, slow
from tq_hf import TurboQuantBatching

Made = Callable[[], PreTrainedModel]

KINDS: dict[str, tuple[Made, dict[str, Any]]] = {
    "packed": (model_of, {}),
    "dense": (partial(model_of, num_hidden_layers=3), {"skip_layers": (0,), "balance": False}),
    "windows": (partial(mixed, "gemma3"), {}),
    "linear": (hybrid, {}),
    "latents": (partial(model_of, "deepseek_v3"), {"balance": False}),
}
"""A model with layers of each kind, and options of its cache."""

every_kind = pytest.mark.parametrize("kind", KINDS)


PACKED_ONLY = dict(sink_tokens=0, residual_length=0)
DENSE: list[dict[str, Any]] = [dict(skip_layers=(0,)), dict(layers={-1: None}), dict(skip_layers=(1,)) | PACKED_ONLY]
LATENTS: list[dict[str, Any]] = [{}, PACKED_ONLY, dict(skip_layers=(0,))]
ALL_KINDS = ["sliding_attention", "full_attention", "full_attention"]
DENSE_OR_LATENTS = [
    *((KINDS["dense"][0], overrides) for overrides in DENSE),
    *((partial(model_of, "deepseek_v3"), overrides) for overrides in LATENTS),
    (partial(mixed, "gemma3", num_hidden_layers=3, layer_types=ALL_KINDS), dict(skip_layers=(1,))),
]
"""Models with dense layers (the last one beside a window, too) and with latents, and options of their caches."""


def session_of(kind: str, **changes: Any) -> Session:
    make, overrides = KINDS[kind]
    return Session(make(), overrides=overrides, **changes)


def answer_as_generate(session: Session, inputs: list[list[int]], new: int = 10) -> None:
    assert session.run(inputs, greedy(new)) == [session.oracle.generate(prompt, new) for prompt in inputs]
    assert session.pages_in_use() == 0


def nothing_in_the_page_of_nobody(session: Session) -> bool:
    """Windows and states have a page that padding is sent to, which nothing is written to."""
    return session.cache.cache_tensor[: session.cache.bytes_per_sector].count_nonzero() == 0


def forks(number: int = 3) -> GenerationConfig:
    """Several answers of eight tokens, which are greedy ones though they are sampled."""
    return GenerationConfig(max_new_tokens=8, do_sample=True, top_k=1, num_return_sequences=number, eos_token_id=-1)


WIDE = dict(head_dim=128, num_attention_heads=2, num_key_value_heads=1)
ROUND_BLOCKS = [5, 120, 128, 129, 300]
ROUND_WINDOWS = [5, 95, 96, 97, 128, 300, 700]
ANSWERS: dict[str, tuple[Made, str, list[int]]] = {
    "4bit_nc": (model_of, "4bit_nc", ROUND_BLOCKS),
    "k8v4": (partial(model_of, head_dim=64), "k8v4", ROUND_BLOCKS),
    "3.5bit_nc": (partial(model_of, **WIDE), "3.5bit_nc", ROUND_BLOCKS),
    "2bit_nc": (partial(model_of, head_dim=64, num_attention_heads=8, num_key_value_heads=1), "2bit_nc", ROUND_BLOCKS),
    **{name: (partial(mixed, name), "4bit_nc", ROUND_WINDOWS) for name in ("gemma3", "gpt_oss", "gemma2", "qwen2")},
    "linear": (hybrid, "4bit_nc", [1, *ROUND_BLOCKS, 5]),
    "gemma4": (gemma4, "4bit_nc", [5, 129]),
    "gemma4 sharing": (gemma4_sharing, "4bit_nc", [5, 120, 300]),
}
"""A model, a preset, and lengths of prompts: around the ends of blocks and of windows."""


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_are_those_of_generate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, preset, lengths = ANSWERS[name]
    model, inputs, steps = make(), prompts(lengths), Steps(monkeypatch)
    attention, own = model.config._attn_implementation, [vars(module).get("forward") for module in model.modules()]
    with Session(model, preset, num_blocks=400) as session:
        session.prepare()
        pool = session.cache.cache_tensor
        # No request reads what pages held before it.
        pool[session.cache.bytes_per_sector :].fill_(255)
        answer_as_generate(session, inputs)
        assert nothing_in_the_page_of_nobody(session) and session.cache.cache_tensor is pool
        assert [vars(module).get("forward") for module in model.modules()] == own, "the model is free between sessions"
    assert steps.kinds() == {"table", "lists"}
    assert model.config._attn_implementation == attention


FAMILIES = {
    **dict.fromkeys(("qwen3", "phi3", "gpt2"), "packed"),
    "jetmoe": "repeated heads",
    **dict.fromkeys(("stablelm", "nemotron"), "nothing else"),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "lfm2_moe", "bamba"), "states"),
    **dict.fromkeys(("granitemoehybrid", "nemotron_h", "jamba"), "states"),
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), "states and latents"),
    **dict.fromkeys(("deepseek_v2", "glm4_moe_lite", "minicpm3", "youtu", "mistral4"), "latents"),
    **dict.fromkeys(("longcat_flash", "sarvam_mla"), "latents"),
}
"""What their pages hold besides packed keys and values, or in their place."""


ALIKE = ("phi3", "qwen3_5_text", "olmo_hybrid", "granitemoehybrid", "bailing_hybrid")
ALIKE += ("glm4_moe_lite", "youtu", "mistral4", "sarvam_mla")
"""Those whose layers another one has."""


@pytest.mark.parametrize("family", [slow(name) if name in ALIKE else name for name in FAMILIES])
def test_other_families_answer_as_generate(family: str) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip("transformers does not have it yet")
    model = model_of(family) if FAMILIES[family] == "packed" else tiny_model(family)
    with Session(model, num_blocks=800) as session:
        answer_as_generate(session, prompts([1, 20, 300]), 8)
        assert (session.cache.states is not None) == ("states" in FAMILIES[family])
        assert session.cache.holds_latents == ("latents" in FAMILIES[family])


@pytest.mark.parametrize("kind", ["packed", "windows", "linear"])
def test_without_block_tables_answers_are_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    with session_of(kind, max_blocks_per_request=0) as session:
        answer_as_generate(session, prompts([5, 120, 300]))
    assert steps.kinds() == {"lists"}


@pytest.mark.parametrize("length", [96, 129, 257, 300])
@pytest.mark.parametrize("kind", ["packed", "windows", "linear"])
def test_a_prompt_in_chunks_reads_as_one_that_generate_is_given_in_chunks(kind: str, length: int) -> None:
    (prompt,) = prompts([length])
    with session_of(kind, max_batch_tokens=95) as session:
        assert session.run([prompt], greedy(6)) == [session.oracle.chunked(prompt, 6, [95] * ((length - 1) // 95))]


@pytest.mark.parametrize(
    ("make", "preset"),
    [
        (partial(gemma4, num_attention_heads=4, num_key_value_heads=2, head_dim=64, global_head_dim=128), "k8v4"),
        (gemma4_sharing, "4bit_nc"),
        (partial(model_of, "gemma3n", num_hidden_layers=4), "4bit_nc"),
    ],
)
def test_layers_that_share_keys_all_read_what_was_there_before_a_chunk(make: Made, preset: str) -> None:
    (prompt,) = prompts([333])
    with Session(make(), preset, max_batch_tokens=150, num_blocks=400) as session:
        assert session.run([prompt], greedy(12)) == [session.oracle.chunked(prompt, 12, [150, 150])]


@pytest.mark.parametrize(("make", "overrides"), quick_of(DENSE_OR_LATENTS, *DENSE_OR_LATENTS[::2], DENSE_OR_LATENTS[3]))
def test_whole_and_chunked_prompts_answer_as_generate(make: Made, overrides: dict[str, Any]) -> None:
    model, inputs = make(), prompts([3, 120, 250, 380, 765])  # all but the first come to the end of a block
    changes: dict[str, Any] = dict(overrides=dict(balance=False) | overrides, allow_block_sharing=False)
    with Session(model, **changes) as session:
        found = session.run(inputs, greedy(14))
        assert found == [session.oracle.generate(prompt, 14) for prompt in inputs]
        assert all(len(set(answer)) > 4 for answer in found)
    with Session(model, **changes, max_batch_tokens=200) as session:
        found = session.run([inputs[4]], greedy(8))
        assert found == [session.oracle.chunked(inputs[4], 8, (200, 200, 200))]


@pytest.mark.parametrize(("make", "overrides"), [DENSE_OR_LATENTS[0], DENSE_OR_LATENTS[3]], ids=["dense", "latents"])
def test_a_shared_prefix_is_read_from_the_pages_of_another(make: Made, overrides: dict[str, Any]) -> None:
    prefix, (first, second) = prompts([300])[0], prompts([20, 31], seed=2)
    with Session(make(), overrides=dict(balance=False) | overrides) as session:
        session.run([prefix + first], greedy(4))
        found = session.run([prefix + second], greedy(30))
        assert session.cache.number_shared == 4 + 2 * 128
        assert found == [session.oracle.after_prefix(prefix + second, 30, 4 + 2 * 128)]


@pytest.mark.parametrize("kind", ["windows", "linear"])
def test_chunks_and_answers_in_the_same_steps(kind: str) -> None:
    """While a prompt is read in chunks, other requests have one new token in a step."""
    inputs = prompts([30, 60, 700])
    with session_of(kind, max_batch_tokens=100) as session:
        found = session.run(inputs, greedy(30))
        assert found[0] == session.oracle.generate(inputs[0], 30)
        # The long prompt has what the others leave: 10 of the first 100 tokens, then 98 a step.
        assert found[2] == session.oracle.chunked(inputs[2], 30, [10, *[98] * 7])


FORKED = [(300, True), (300, False), (129, True), (40, False), (1, True)]
"""Lengths of prompts, and whether blocks are shared."""


@pytest.mark.parametrize(
    ("kind", "length", "sharing"),
    [
        *((kind, *each) for kind in KINDS if kind != "latents" for each in FORKED[::2]),
        *((kind, *each) for kind in ("packed", "linear", "latents") for each in FORKED[1:2]),
        *((kind, *each) for kind in ("dense", "windows") for each in FORKED[3:4]),
        ("latents", *FORKED[0]),
    ],
)
def test_forks_go_on_where_their_parent_was(kind: str, length: int, sharing: bool) -> None:
    (prompt,) = prompts([length])
    with session_of(kind, allow_block_sharing=sharing) as session:
        session.run(prompts([60] * 4), greedy(2))  # pages hold what is of others
        assert session.run([prompt], forks()) == [session.oracle.chunked(prompt, 8, [length - 1])] * 3
        assert session.pages_in_use() == 0


@pytest.mark.parametrize(("kind", "length"), [("packed", 300), ("linear", 129)])
def test_asynchronous_forks_and_shared_prefixes(kind: str, length: int, asynchronous: dict[str, Any]) -> None:
    (prompt,) = prompts([length])
    with session_of(kind, **asynchronous) as session:
        assert session.run([prompt], forks()) == [session.oracle.chunked(prompt, 8, [length - 1])] * 3
        if kind == "packed":
            assert session.run([prompt], forks()) == [session.oracle.after_prefix(prompt, 8, 260)] * 3
        assert session.pages_in_use() == 0


@pytest.mark.parametrize("kind", ["windows", "linear"])
def test_a_prompt_that_was_answered_before_is_read_again_whole(kind: str) -> None:
    """As transformers does: a prefix in packed pages is of use only with the windows or states at its end."""
    (prompt,) = prompts([300])
    with session_of(kind) as session:
        assert session.run([prompt], greedy(6)) == session.run([prompt], greedy(6))
        answer_as_generate(session, [prompt], 6)
        assert session.cache.number_shared == 0


SMALL = dict(max_batch_tokens=700, safety_margin=0.0)
SMALL_POOLS = {"packed": (88, 100, 36), "dense": (88, 100, 36), "windows": (16, 60, 60), "linear": (86, 100, 40)}
SMALL_POOLS["latents"] = (104, 100, 60)
"""Pages, tokens of each of six prompts, and of an answer.

Five requests take 85 pages for rings and sinks (in windows two more each, a sector more for states), and a block when
they have 132 tokens, or a third page of a window at 73.
"""


@lru_cache
def of_small_pools(kind: str) -> tuple[list[Tokens], list[Tokens]]:
    """Six prompts that have no room together, and the answers of `generate()`."""
    _, length, new = SMALL_POOLS[kind]
    inputs, oracle = prompts([length] * 6, seed=3), session_of(kind).oracle
    return inputs, [oracle.generate(prompt, new) for prompt in inputs]


@every_kind
def test_requests_that_outgrow_the_pool_together_are_preempted_and_all_finish(kind: str) -> None:
    """A soft reset reads generated tokens again, as prompt and so exactly; what was not reset is undisturbed."""
    (pages, _, new), (inputs, expected) = SMALL_POOLS[kind], of_small_pools(kind)
    with session_of(kind, num_blocks=pages, allow_block_sharing=False, **SMALL) as session:
        session.run(inputs[:1], greedy(1))
        resets = session.recorded_waiting()
        found = session.run(inputs, greedy(new))
        assert session.pages_in_use() == 0
        counts = {name: resets.count(name) - 1 for name in resets}
        assert 0 < sum(count > 0 for count in counts.values()) < len(inputs)
        for name, out, answer in zip(sorted(counts), found, expected, strict=True):
            assert len(out) == new
            assert out == answer or counts[name] > 0


@pytest.mark.parametrize(("kind", "ahead"), [*((kind, False) for kind in KINDS), ("packed", True)])
def test_pages_offloaded_to_the_cpu_come_back_as_they_were(
    kind: str, ahead: bool, offloaded: list[set[str]], request: pytest.FixtureRequest
) -> None:
    """All answers are those of undisturbed requests, since nothing is read again. An asynchronous engine, as GPUs have,
    may offload a request whose next token is being computed, and computes it again."""
    (pages, _, new), (inputs, expected) = SMALL_POOLS[kind], of_small_pools(kind)
    more = request.getfixturevalue("asynchronous") if ahead else {}
    with session_of(kind, num_blocks=pages, cpu_offload_space=0.05, **SMALL, **more) as session:
        assert session.run(inputs, greedy(new)) == expected
        assert session.pages_in_use() == 0 and any(offloaded)


@pytest.mark.usefixtures("padded")
@pytest.mark.parametrize("kind", ["packed", "windows", "linear"])
def test_padding_changes_no_answer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    with session_of(kind, max_requests_per_batch=8, q_padding_interval_size=64) as session:
        answer_as_generate(session, prompts([5, 95, 128, 300, 1]))
        assert kind == "packed" or nothing_in_the_page_of_nobody(session)
    assert all(len(new) == 8 for kind, _, new in steps.seen if kind == "lists")
    assert any(0 in new for kind, _, new in steps.seen if kind == "table")


@pytest.mark.parametrize("kind", ["packed", "windows", "linear"])
def test_asynchronous_batches_change_no_answer(kind: str, asynchronous: dict[str, Any]) -> None:
    with session_of(kind, **asynchronous) as session:
        answer_as_generate(session, prompts([5, 95, 128, 300, 1]))
        assert session.manager.batch_processor.use_async_batching


def test_padding_changes_no_answer_of_asynchronous_batches_over_latents(
    padded: None, asynchronous: dict[str, Any]
) -> None:
    with session_of("latents", **asynchronous) as session:
        answer_as_generate(session, prompts([3, 130, 300]), 20)


@pytest.mark.parametrize(
    ("kind", "blocks"), [("packed", 200), ("linear", 86), ("linear", None), ("latents", 200)], ids=str
)
def test_a_manager_that_slept_answers_as_before(kind: str, blocks: int | None) -> None:
    inputs = prompts([40, 300])
    with session_of(kind, num_blocks=blocks) as session:
        expected, size = session.run(inputs, greedy(6)), session.cache.cache_tensor.nbytes
        assert session.batching.sleep() == size
        session.batching.wake()
        assert session.cache.cache_tensor.nbytes == size
        assert session.model.config._attn_implementation == "sdpa", "the model is free until the session"
        pool = session.cache.cache_tensor
        pool[session.cache.bytes_per_sector :].fill_(255)
        assert session.run(inputs, greedy(6)) == expected and session.cache.cache_tensor is pool


@pytest.mark.parametrize("kind", ["packed", "latents"])
def test_a_cancelled_request_gives_its_pages_back(kind: str) -> None:
    first, other = prompts([300, 40])
    with session_of(kind) as session:
        session.run(prompts([5]), greedy(1))
        manager = session.manager
        manager.start()
        name = manager.add_request(first, max_new_tokens=600, streaming=True)
        seen = 0
        for _ in manager.request_id_iter(name):
            seen += 1
            if seen == 3:
                manager.cancel_request(name)
                break
        name = manager.add_request(other, max_new_tokens=6)
        # `None` while the next result is one of the cancelled request.
        while (result := manager.get_result(name, timeout=60)) is None:
            assert manager.is_running()
        manager.stop(block=True, keep_for_next_session=True)
        assert result.generated_tokens == session.oracle.generate(other, 6)
        assert session.pages_in_use() == 0


two_linear = partial(hybrid, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
COMPILED: dict[str, tuple[Made, dict[str, Any], list[int], dict[str, Any]]] = {
    "llama": (model_of, {}, [5, 120, 300], {}),
    "gemma3": (partial(mixed, "gemma3"), {}, [5, 120, 300], {}),
    "gpt_oss": (partial(mixed, "gpt_oss"), {}, [5, 120, 300], {}),
    "linear": (two_linear, {"num_blocks": 400, "max_requests_per_batch": 2}, [5, 120], {"captures": False}),
    "latents": (KINDS["latents"][0], {"overrides": {"balance": False}}, [5, 120, 300], {"sessions": 1}),
}
"""A model, options of its session, lengths of prompts, and what of `check_one_graph` differs."""


@pytest.mark.parametrize("name", [slow("llama"), slow("gemma3"), "gpt_oss", "linear", "latents"])
def test_a_compiled_step_is_one_graph_and_answers_alike(name: str) -> None:
    """Attention over pages and windows is an operator in it, and so is reading and writing states. A second cache takes
    the number of the first, so nothing is compiled again."""
    make, changes, lengths, more = COMPILED[name]
    check_one_graph(partial(Session, make(), **changes), prompts(lengths), **more)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss", "linear", "latents"])
def test_a_step_that_inductor_compiled_answers_alike(name: str) -> None:
    """Its code checks the strides of what operators return."""
    make, changes, lengths, _ = COMPILED[name]
    model = mixed("gpt_oss", head_dim=128, num_attention_heads=8) if name == "gpt_oss" else make()
    found = []
    for level in (0, 1):
        with Session(model, default_compile_level=level, **changes) as session:
            found.append(session.run(prompts(lengths), greedy(20)))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (partial(model_of, "gpt_oss"), r"`use_cuda_graph` is .*\(False, True\)"),
        (hybrid, "steps with prompts .* cannot be captured"),
        (KINDS["latents"][0], r"steps with prompts .* cannot be captured.*\(False, True\)"),
    ],
    ids=["windows", "linear", "latents"],
)
@pytest.mark.parametrize("graphs", [True, (True, False)])
def test_graphs_of_steps_with_prompts_are_refused(make: Made, words: str, graphs: bool | tuple[bool, bool]) -> None:
    batching = TurboQuantBatching(make(), balance=False)
    with pytest.raises(ValueError, match=words):
        batching.init_continuous_batching(greedy(2), options(use_cuda_graph=graphs))
    assert batching.model.config._attn_implementation != "turboquant_paged"


@pytest.mark.parametrize(
    ("make", "full", "others", "kind"),
    [(partial(mixed, "qwen2"), [0], [1], "second"), (hybrid, [1], [0, 2], "states")],
    ids=["windows", "linear"],
)
def test_the_kinds_of_layers_are_those_of_the_model(make: Made, full: list[int], others: list[int], kind: str) -> None:
    with Session(make()) as session:
        session.run(prompts([5]), greedy(1))
        cache = session.cache
        assert cache.allocator.layer_indices == full and getattr(cache, kind).layer_indices == others
        assert not cache.use_prefix_sharing


def test_tables_have_room_for_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model with long windows they are more pages than those of the longest request that tables serve."""
    (prompt,), steps = prompts([1200]), Steps(monkeypatch)
    model = mixed("gemma3", sliding_window=1100)
    with Session(model, max_blocks_per_request=28) as session:
        assert session.run([prompt], greedy(6)) == [session.oracle.generate(prompt, 6)]
        assert session.cache.second.pages_of(1100) > 28
    assert steps.kinds() == {"table", "lists"}


def test_a_request_is_refused_if_its_pages_and_its_window_are_more_than_the_pool() -> None:
    with Session(mixed("gemma3"), num_blocks=4, max_batch_tokens=2048) as session:
        session.run(prompts([5]), greedy(1))
        cache = session.cache
        longest = cache.max_request_tokens
        assert cache._sectors_of(longest) <= cache.num_sectors < cache._sectors_of(longest + 1)
        (prompt,) = prompts([longest - 3])
        assert [len(out) for out in session.run([prompt], greedy(4))] == [4]
        results = session.batching.generate_batch([prompt], greedy(5), session.options, persistent_manager=True)
        assert f"which has room for {longest:,}" in next(iter(results.values())).error
