"""The first real tokens of a padded row are its exact sinks, however they came and whatever attention reads them.

Attention masks of the user's own on preallocated caches have columns for the tokens held or for the whole room.
Everything stays dense in these caches, so that logits are those over a `DynamicCache`.
"""

import copy
from functools import lru_cache

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import DynamicCache, PreTrainedModel

from tests.support.helpers import compile_config, every_pair
from tests.support.tiny_models import VOCAB, build, token_ids
from tq_hf import TurboQuantCache, graph_decoding
from tq_hf.compat import as_input

LENGTH, ROOM = 420, 640
PADS = (150, 2, 0)
"""Two blocks are packed of 420 tokens: the first 260. Those of the first row begin with padding and sinks."""


def prompt(pads: tuple[int, ...] = PADS, length: int = LENGTH) -> dict[str, torch.Tensor]:
    ids = token_ids(len(pads), length, seed=length)
    mask = (torch.arange(length) >= torch.tensor(pads)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def run(model: PreTrainedModel, cache, inputs: dict[str, torch.Tensor], start: int = 0, *ends: int) -> torch.Tensor:
    """Logits of tokens from `start` to the last of `ends`, by default all, of one call for each."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    positions, logits = (mask.cumsum(1) - 1).clamp_min(0), []
    for end in ends or (ids.shape[1],):
        part = slice(start, end)
        options = dict(attention_mask=mask[:, :end], position_ids=positions[:, part])
        with torch.no_grad():
            logits.append(model(ids[:, part], **options, **as_input(cache)).logits)
        start = end
    return torch.cat(logits, 1)


def first_full_layer(cache) -> int:
    return next(i for i, layer in enumerate(cache.layers) if not layer.is_sliding)


def errors_of_sinks(cache: TurboQuantCache, expected: DynamicCache, mask: torch.Tensor, count: int = 4) -> list[float]:
    """Largest error of the keys of each row's first real tokens, over that of its next ones. Layers below have no
    error."""
    index = first_full_layer(cache)
    actual, exact = cache.layers[index].keys, expected.layers[index].keys
    errors = []
    for row, real in enumerate(mask.bool()):
        token = real.nonzero()[:, 0]
        error = (actual[row] - exact[row, :, : actual.shape[2]]).abs().amax((0, 2))
        errors.append(float(error[token[:count]].max() / error[token[count : count + 60]].max()))
    return errors


COMPILED = compile_config()
WAYS = {
    "growing": (None, {}),
    "preallocated": (ROOM, dict(disable_compile=True)),
    "compiled": (ROOM, dict(compile_config=COMPILED)),
    "chunked": (None, dict(prefill_chunk_size=64)),
    "chunked and preallocated": (ROOM, dict(prefill_chunk_size=140, disable_compile=True)),
    "beams": (None, dict(num_beams=2)),
    "graph_decoding": (ROOM, dict(custom_generate=graph_decoding)),
}


MODELS = [("llama", "turboquant"), ("llama", "sdpa"), ("llama", "eager"), ("gemma3", "turboquant")]


@pytest.mark.parametrize(
    ("name", "attention", "way"),
    [(*model, way) for model in MODELS for way in WAYS if way != "compiled" or model == MODELS[0]],
)
def test_first_real_tokens_are_exact_in_generate(name, attention, way):
    torch._dynamo.reset()
    model, (room, options) = build(name), WAYS[way]
    model.set_attn_implementation(attention)
    cache, inputs = TurboQuantCache(model.config, max_cache_len=room), prompt()
    tokens = model.generate(**inputs, **as_input(cache), max_new_tokens=4, do_sample=False, **options)
    beams = options.get("num_beams", 1)
    mask = torch.nn.functional.pad(inputs["attention_mask"].repeat_interleave(beams, 0), (0, 3), value=1)
    expected = DynamicCache(config=model.config)
    model.set_attn_implementation("sdpa" if attention == "turboquant" else attention)
    # Beams differ in their newest tokens only.
    run(model, expected, {"input_ids": tokens[:, :-1].repeat_interleave(beams, 0), "attention_mask": mask})
    assert cache.get_seq_length() == LENGTH + 3
    assert max(errors_of_sinks(cache, expected, mask)) < 1e-3
    torch._dynamo.reset()


@pytest.mark.cuda
@pytest.mark.parametrize("room", [None, ROOM])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_kernels_read_padded_rows_as_torch_does(name, room):
    """A prompt, a short call, single tokens, and a long call."""
    model, found = build(name), []
    model.set_attn_implementation("turboquant")
    for device in ("cpu", "cuda"):
        inputs = {key: value.to(device) for key, value in prompt().items()}
        cache = TurboQuantCache(model.config, max_cache_len=room)
        found.append(
            run(model.to(device), cache, inputs, 0, 300, 310, 311, 312, LENGTH)[prompt()["attention_mask"] > 0]
        )
    assert float((found[1].cpu() - found[0]).norm() / found[0].norm()) < 5e-3


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("options", [{}, dict(custom_generate=graph_decoding)], ids=["compiled", "graph_decoding"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_captured_steps_of_padded_rows_are_eager_ones(name, options):
    torch._dynamo.reset()
    model = build(name, attention="turboquant").cuda()
    inputs = {key: value.cuda() for key, value in prompt().items()}
    asked = dict(max_new_tokens=12, do_sample=False, return_dict_in_generate=True, output_logits=True)
    found = []
    for room, more in ((None, {}), (ROOM, options), (ROOM, options)):
        cache = TurboQuantCache(model.config, max_cache_len=room)
        found.append(model.generate(**inputs, **as_input(cache), **asked, **more))
    for other in found[1:]:
        assert torch.equal(other.sequences, found[0].sequences)
        actual, expected = (torch.stack(each.logits) for each in (other, found[0]))
        assert float((actual - expected).norm() / expected.norm()) < 5e-3
    torch._dynamo.reset()


@pytest.mark.parametrize("room", [None, ROOM])
def test_without_padding_nothing_is_exchanged(room):
    model = build("llama", attention="turboquant")
    inputs = prompt((0, 0))
    cache, plain = (TurboQuantCache(model.config, max_cache_len=room) for _ in range(2))
    logits = run(model, cache, inputs, 0, 400, LENGTH)
    with torch.no_grad():
        parts = [
            model(inputs["input_ids"][:, part], **as_input(plain)).logits for part in (slice(400), slice(400, None))
        ]
    assert torch.equal(logits, torch.cat(parts, 1))
    assert all(layer.store.tensors.order is None and not layer.store.lacks_sinks for layer in cache.layers)


CASES = {
    "fewer than four real tokens at first": ((157, 2), (160, 419, 420)),
    "a first chunk of padding only": ((200, 0), (90, 140, 420)),
    "chunks that end within the sinks": ((1, 0), (2, 3, 300, 420)),
    "short chunks": ((137, 3), (40, 80, 120, 138, 200, 280, 340, 420)),
    "a second turn that is padded": ((20, 0), (100, 420)),
}


@pytest.mark.parametrize(("case", "room", "attention"), every_pair(CASES, (None, ROOM), ("turboquant", "sdpa")))
def test_sinks_are_filled_by_later_chunks(case, room, attention):
    pads, ends = CASES[case]
    model, inputs = build("llama"), prompt(pads)
    inputs["attention_mask"][1, 100:180] = int("second turn" not in case)
    caches = TurboQuantCache(model.config, max_cache_len=room), DynamicCache(config=model.config)
    model.set_attn_implementation(attention)
    run(model, caches[0], inputs, 0, *ends)
    model.set_attn_implementation("sdpa")
    run(model, caches[1], inputs, 0, *ends)
    assert max(errors_of_sinks(*caches, inputs["attention_mask"])) < 1e-3
    dense = TurboQuantCache(model.config, max_cache_len=room, residual_length=10**6)
    model.set_attn_implementation(attention)
    logits = run(model, dense, inputs, 0, *ends)
    model.set_attn_implementation("sdpa")
    expected = run(model, DynamicCache(config=model.config), inputs, 0, *ends)
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(logits[real], expected[real], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
    ("kept", "room", "attention"), every_pair((2, 4, 100, 151, 153, 300), (None, ROOM), ("turboquant", "sdpa"))
)
def test_a_crop_removes_the_sinks_that_it_reaches(kept, room, attention):
    """What is read next is what `DynamicCache` reads, and rows have sinks again after it."""
    model, inputs = build("llama"), prompt((150, 2))
    model.set_attn_implementation(attention)
    cache = TurboQuantCache(model.config, max_cache_len=room, residual_length=10**6)
    run(model, cache, inputs, 0, 350)
    cache.crop(kept - 350)
    ends = kept + 1, kept + 30, LENGTH
    logits = run(model, cache, inputs, kept, *ends)
    model.set_attn_implementation("sdpa")
    plain = DynamicCache(config=model.config)
    run(model, plain, inputs, 0, kept)
    real = inputs["attention_mask"][:, kept:].bool()
    expected = run(model, plain, inputs, kept, *ends)
    torch.testing.assert_close(logits[real], expected[real], atol=2e-3, rtol=2e-3)
    packed = TurboQuantCache(model.config, max_cache_len=room)
    model.set_attn_implementation(attention)
    run(model, packed, inputs, 0, 350)
    packed.crop(kept - 350)
    run(model, packed, inputs, kept, LENGTH)
    assert max(errors_of_sinks(packed, plain, inputs["attention_mask"])) < 1e-3


@pytest.mark.parametrize("room", [None, ROOM])
def test_a_saved_padded_cache_reads_the_same(room, tmp_path):
    model, inputs = build("llama"), prompt()
    model.set_attn_implementation("turboquant")
    cache = TurboQuantCache(model.config, max_cache_len=room)
    run(model, cache, inputs, 0, 400)
    cache.save(tmp_path / "cache.safetensors", model)
    for loaded_room in (None, ROOM):
        loaded = TurboQuantCache.load(tmp_path / "cache.safetensors", model, max_cache_len=loaded_room)
        assert torch.equal(loaded.layers[0].keys, cache.layers[0].keys)
        copied = copy.deepcopy(cache)
        torch.testing.assert_close(*(run(model, c, inputs, 400, 401, 420) for c in (loaded, copied)))


@pytest.mark.parametrize("index", [[0, 1, 2, 2], [0, 1, 2, 420], [1, 0, 2, 3], [-1, 1, 2, 3], [9, 9, 2, 3]])
def test_a_damaged_index_of_sinks_is_refused(index, tmp_path):
    model, inputs = build("llama", num_hidden_layers=1), prompt((9,))
    cache, path = TurboQuantCache(model.config), tmp_path / "cache.safetensors"
    run(model, cache, inputs)
    cache.save(path, model)
    with safe_open(path, "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    tensors["layers.0.sink_index"] = torch.tensor([index])
    save_file(tensors, path, metadata)
    with pytest.raises(ValueError, match="damaged|changed|checksum"):
        TurboQuantCache.load(path, model)


def with_a_sink(seed: int = 3) -> PreTrainedModel:
    """A random model whose first token, 1, is an attention sink, as in real models: its key outweighs all others along
    a slowly rotating direction that every query has."""
    model = build("llama", seed, head_dim=64)
    dim, slow = model.config.head_dim, model.config.head_dim // 2 - 1
    embeddings = model.model.embed_tokens.weight.data
    embeddings[:, :2] = 0
    embeddings[:, 0] = 1  # of every token
    embeddings[1] = 0
    embeddings[1, :2] = torch.tensor([1.0, 40.0])  # of the sink alone
    for layer in model.model.layers:
        attention = layer.self_attn
        for projection, channel, size in ((attention.q_proj, 0, 3.0), (attention.k_proj, 1, 12.0)):
            weight = projection.weight.data.view(-1, dim, model.config.hidden_size)
            weight[:, :, :2] = 0
            weight[:, slow] = 0
            weight[:, slow, channel] = size
        attention.v_proj.weight.data[:, :2] = 0
        for projection in (attention.o_proj, layer.mlp.down_proj):
            projection.weight.data[:2] = 0
    return model


@pytest.mark.parametrize(
    ("pad", "room", "attention"), every_pair((1, 3, 127, 300), (None, 1024), ("turboquant", "sdpa"))
)
def test_a_padded_row_loses_no_more_than_the_row_alone(pad, room, attention):
    """KL from the full cache, of a model with an attention sink."""
    model, tokens = with_a_sink(), 600
    ids = token_ids(1, tokens)
    ids[:, 0] = 1
    losses = []
    for padding in (0, pad):
        inputs = {"input_ids": torch.nn.functional.pad(ids, (padding, 0))}
        inputs["attention_mask"] = torch.nn.functional.pad(torch.ones_like(ids), (padding, 0))
        ends = [padding + end for end in range(320, tokens + 1, 40)]
        model.set_attn_implementation("sdpa")
        exact = run(model, DynamicCache(config=model.config), inputs, 0, *ends)[:, ends[0] :].log_softmax(-1)
        model.set_attn_implementation(attention)
        cache = TurboQuantCache(model.config, max_cache_len=room)
        found = run(model, cache, inputs, 0, *ends)[:, ends[0] :].log_softmax(-1)
        losses.append(float((exact.exp() * (exact - found)).sum(-1).mean()))
    assert losses[1] < 1.3 * losses[0], losses


HELD, MASK_ROOM = 300, 512
DENSE = dict(residual_length=10**4)
model_of = lru_cache(lambda name, attention: _built(name, attention))
generator = torch.Generator().manual_seed(0)
PROMPT = torch.randint(3, VOCAB, (2, HELD), generator=generator)
MORE = torch.randint(3, VOCAB, (2, 4), generator=generator)


def _built(name, attention):
    model = build(name, num_hidden_layers=2, attention=attention)
    return model


def mask_of(kind: str, heads: int, queries: int, columns: int, held: int = HELD) -> torch.Tensor:
    """A causal mask with holes in it, of some heads more than of others."""
    mask = torch.ones(2, heads, queries, columns, dtype=torch.bool).tril(held)
    mask[..., held // 3 : held // 2] = False
    mask[:, ::2, :, 5 : 5 + 8 * (heads > 1)] = False
    if kind == "bool":
        return mask
    lowest = torch.finfo(torch.float32).min if kind == "min" else -torch.inf
    return torch.zeros(mask.shape).masked_fill(~mask, lowest)


def step(model, cache, mask, queries, held=HELD):
    model(PROMPT[:, :held], **as_input(cache))
    positions = torch.arange(held, held + queries)[None]
    inputs = dict(attention_mask=mask, position_ids=positions)
    return model(MORE[:, :queries], **as_input(cache), **inputs).logits


@pytest.mark.parametrize(
    ("heads", "kind", "queries", "whole", "skipped"),
    every_pair((1, 4), ("bool", "min", "inf"), (1, 3), (False, True), ((), (0,), (1,))),
)
def test_a_mask_has_columns_for_the_tokens_held_or_for_the_room(heads, kind, queries, whole, skipped):
    model, plain = model_of("llama", "turboquant"), model_of("llama", "sdpa")
    exact = mask_of(kind, heads, queries, HELD + queries)
    expected = step(plain, DynamicCache(config=plain.config), exact, queries)
    unmasked = step(plain, DynamicCache(config=plain.config), None, queries)
    assert (expected - unmasked).abs().max() > 0.1, "the mask changes nothing"
    cache = TurboQuantCache(model.config, max_cache_len=MASK_ROOM, skip_layers=skipped, **DENSE)
    mask = mask_of(kind, heads, queries, MASK_ROOM if whole else HELD + queries)
    torch.testing.assert_close(step(model, cache, mask, queries), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("skipped", [(), (0,)], ids=["", "first layer dense"])
@pytest.mark.parametrize("heads, kind", [(1, "bool"), (4, "bool"), (1, "inf")])
def test_a_mask_that_ends_before_the_tokens_is_refused(heads, kind, skipped):
    model = model_of("llama", "turboquant")
    cache = TurboQuantCache(model.config, max_cache_len=MASK_ROOM, skip_layers=skipped, **DENSE)
    with pytest.raises(ValueError, match=f"{HELD} columns for {HELD + 1} tokens.*a column for every token"):
        step(model, cache, mask_of(kind, heads, 1, HELD), 1)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("options", [{}, {"max_cache_len": MASK_ROOM}, {"skip_layers": (0, 1)}], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_a_mask_of_integers_is_refused_as_sdpa_refuses_it(name, options, dtype):
    model = model_of(name, "turboquant")
    cache = TurboQuantCache(model.config, **options)
    with pytest.raises(ValueError, match=r"is torch.u?int\d+; it must be bool, or floats.*`mask.bool\(\)`"):
        model(PROMPT, **as_input(cache), attention_mask=mask_of("bool", 1, HELD, HELD, 0).to(dtype))
    cache.crop(0)
    assert cache.get_seq_length() == 0
    for queries in (1, 3):
        with pytest.raises(ValueError, match=r"cache.crop\(0\)"):
            step(model, cache, mask_of("bool", 1, queries, HELD + queries).to(dtype), queries)
        cache.crop(0)
        assert cache.get_seq_length() == HELD
        cache.reset()


@pytest.mark.parametrize(
    "heads, kind", [(4, "bool"), *(pytest.param(1, kind, marks=pytest.mark.slow) for kind in ("bool", "inf"))]
)
def test_a_compiled_step_asks_for_columns_for_the_room(heads, kind):
    torch._dynamo.reset()
    model = model_of("llama", "turboquant")
    compiled = torch.compile(model, backend="eager")
    cache = TurboQuantCache(model.config, max_cache_len=MASK_ROOM, **DENSE)
    expected = step(
        model, TurboQuantCache(model.config, max_cache_len=MASK_ROOM, **DENSE), mask_of(kind, heads, 1, MASK_ROOM), 1
    )
    model(PROMPT, **as_input(cache))
    model(MORE[:, :1], **as_input(cache))
    cache.crop(-1)
    inputs = dict(**as_input(cache), position_ids=torch.tensor([[HELD]]))
    with pytest.raises(ValueError, match=f"{HELD + 1} columns for {MASK_ROOM} tokens.*in a compiled step for all"):
        compiled(MORE[:, :1], attention_mask=mask_of(kind, heads, 1, HELD + 1), **inputs)
    cache.crop(int(HELD - cache.get_seq_length()))
    actual = compiled(MORE[:, :1], attention_mask=mask_of(kind, heads, 1, MASK_ROOM), **inputs).logits
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("kind", "queries", "limit", "held"), every_pair(("bool", "inf"), (1, 3), (None, MASK_ROOM), (40, 94, 95, HELD))
)
def test_sliding_layers_take_masks_of_their_own(kind, queries, limit, held):
    """Of 96 tokens, as many as there are beside the queries' own."""
    model, plain = model_of("gemma3", "turboquant"), model_of("gemma3", "sdpa")
    past = min(held, 95)
    sliding = mask_of(kind, 1, queries, past + queries, past)
    masks = {"full_attention": mask_of(kind, 1, queries, held + queries, held), "sliding_attention": sliding}
    expected = step(plain, DynamicCache(config=plain.config), masks, queries, held)
    cache = TurboQuantCache(model.config, max_cache_len=limit, **DENSE)
    torch.testing.assert_close(step(model, cache, masks, queries, held), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("limit", [None, MASK_ROOM])
@pytest.mark.parametrize("queries", [1, 3])
def test_a_mask_of_all_tokens_is_refused_by_sliding_layers(queries, limit):
    """Its first columns would be taken for those of the window."""
    model = model_of("gemma3", "turboquant")
    cache = TurboQuantCache(model.config, max_cache_len=limit, **DENSE)
    with pytest.raises(ValueError, match=rf"{HELD + queries} columns.*sliding layer has {95 + queries} tokens.*dict"):
        step(model, cache, mask_of("bool", 1, queries, HELD + queries), queries)
