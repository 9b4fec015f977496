"""generate() with the kernels, eager and compiled, on a GPU."""

import gc
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig

from examples import needle_data as needle
from tq_hf import PRESETS, TurboQuantCache, graph_decoding
from tq_hf.compat import as_input
from tq_hf.ops.workspace import release_workspaces

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = [
    pytest.mark.cuda,
    # PyTorch itself captures an empty graph when it sets up its graph trees.
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),
]


@pytest.fixture(scope="module")
def model():
    model = AutoModelForCausalLM.from_pretrained(EXAMPLES / "needle", dtype=torch.float16, device_map="cuda")
    model.set_attn_implementation("turboquant")
    return model.eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(EXAMPLES / "needle")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_passkey_is_recalled_from_packed_blocks(model, tokenizer, preset, compiled):
    right = 0
    for seed in range(5):
        prompt, answer = needle.passkey_prompt(3000, depth=0.1 + 0.2 * seed, seed=seed)
        ids = tokenizer(prompt, return_tensors="pt").to("cuda")
        cache = TurboQuantCache(model.config, preset, max_cache_len=3072 if compiled else None)
        # The document first, the question in a second call: the answer is read from the compressed history.
        with torch.inference_mode():
            model(ids.input_ids[:, :-30], **as_input(cache))
        out = model.generate(**ids, **as_input(cache), max_new_tokens=needle.ANSWER_TOKENS)
        right += needle.is_recalled(tokenizer.decode(out[0, ids.input_ids.shape[1] :]), answer)
    assert right >= (5 if preset != "2bit_nc" else 3)


@pytest.mark.parametrize("loop", ["generate", "graph_decoding"])
@pytest.mark.parametrize("attention", ["turboquant", "sdpa"])
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_a_prompt_is_read_in_chunks_into_a_preallocated_cache(tokenizer, attention, loop):
    """With `generate()`'s own settings: a passkey is recalled, in a second turn too, and chunks take no graph each."""
    model = AutoModelForCausalLM.from_pretrained(EXAMPLES / "needle", dtype=torch.float32, device_map="cuda").eval()
    model.set_attn_implementation(attention)
    own_loop = dict(custom_generate=graph_decoding) if loop == "graph_decoding" else {}
    torch._dynamo.reset()
    counters.clear()
    prompt, answer = needle.passkey_prompt(3000, depth=0.5, seed=0)
    ids = tokenizer(prompt, return_tensors="pt").input_ids.to("cuda")
    for chunk in (256, 1000):
        cache = TurboQuantCache(model.config, max_cache_len=3200)
        options = dict(**as_input(cache), do_sample=False, max_new_tokens=needle.ANSWER_TOKENS, **own_loop)
        out = model.generate(ids, prefill_chunk_size=chunk, **options)
        assert needle.is_recalled(tokenizer.decode(out[0, ids.shape[1] :]), answer)
        again = torch.cat([out, ids[:, -40:]], dim=1)
        out = model.generate(again, prefill_chunk_size=17, **options)
        assert needle.is_recalled(tokenizer.decode(out[0, again.shape[1] :]), answer)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_compiled_decoding_gives_the_tokens_of_eager_decoding_for_2000_steps(tokenizer):
    # In float32: in float16 PyTorch's fused kernels round elsewhere than its single ones, and among so many tokens some
    # tie nearly (seen: two logits apart by a thousandth of their standard deviation).
    model = AutoModelForCausalLM.from_pretrained(EXAMPLES / "needle", dtype=torch.float32, device_map="cuda").eval()
    model.set_attn_implementation("turboquant")
    torch._dynamo.reset()
    counters.clear()
    prompt, _ = needle.passkey_prompt(700, depth=0.5, seed=0)
    ids = tokenizer([prompt, prompt[200:]], return_tensors="pt", padding=True).to("cuda")
    options = dict(do_sample=False, min_new_tokens=2000, max_new_tokens=2000)
    cache = TurboQuantCache(model.config, max_cache_len=4096)
    compiled = model.generate(**ids, **as_input(cache), **options)
    graphs = counters["stats"]["unique_graphs"]
    eager = model.generate(
        **ids, **as_input(TurboQuantCache(model.config, max_cache_len=4096)), disable_compile=True, **options
    )
    same = (compiled == eager).all(0)
    assert same.all(), f"first difference at token {int((~same).nonzero()[0])}"
    assert graphs == 1 and not counters["graph_break"]
    assert int(cache.get_seq_length()) == ids.input_ids.shape[1] + 1999


@pytest.mark.parametrize("attention", ["turboquant", "sdpa"])
def test_kernels_and_reads_agree_in_logits(model, tokenizer, attention):
    prompt, _ = needle.passkey_prompt(2000, depth=0.5, seed=0)
    ids = tokenizer(prompt, return_tensors="pt").to("cuda").input_ids
    reference = AutoModelForCausalLM.from_pretrained(
        EXAMPLES / "needle", dtype=torch.float32, attn_implementation="sdpa"
    )
    model.set_attn_implementation(attention)
    try:
        logits = []
        for each in (model, reference):
            cache = TurboQuantCache(each.config, residual_length=0)
            with torch.inference_mode():
                each(ids[:, :1900].to(each.device), **as_input(cache))
                steps = [each(ids[:, t : t + 1].to(each.device), **as_input(cache)).logits for t in range(1900, 1940)]
            logits.append(torch.cat(steps, 1).float().cpu())
    finally:
        model.set_attn_implementation("turboquant")
    assert ((logits[0] - logits[1]).norm() / logits[1].norm()).item() < 2e-2


def test_memory_footprint_is_what_the_allocator_says(model):
    config = LlamaConfig(num_hidden_layers=8, num_attention_heads=32, num_key_value_heads=8, hidden_size=4096)
    keys = torch.randn(1, 8, 8192, 128, dtype=torch.float16, device="cuda")
    for _ in range(2):  # once to make the tables and scratch every cache shares
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        cache = TurboQuantCache(config)
        for layer in range(8):
            cache.update(keys, keys, layer)
        held = torch.cuda.memory_stats()["requested_bytes.all.current"] - before
        footprint = cache.memory_footprint().total
        del cache
    assert held == footprint


def test_decoding_allocates_nothing_after_the_first_step(model, tokenizer):
    release_workspaces()
    prompt, _ = needle.passkey_prompt(3000, depth=0.5, seed=0)
    ids = tokenizer(prompt, return_tensors="pt").to("cuda").input_ids
    allocated = {}
    for name, make in (("ours", TurboQuantCache), ("dynamic", lambda config: DynamicCache(config=config))):
        cache = make(model.config)
        with torch.inference_mode():
            model(ids[:, :-40], **as_input(cache))
            for t in range(40, 38, -1):
                model(ids[:, -t : -t + 1], **as_input(cache))
            reserved = torch.cuda.memory_reserved()
            for t in range(38, 8, -1):
                model(ids[:, -t : -t + 1], **as_input(cache))
        allocated[name] = torch.cuda.memory_reserved() - reserved
    assert allocated["ours"] == 0


def test_offloaded_layers_give_the_same_tokens_from_less_device_memory(model, tokenizer):
    prompt, _ = needle.passkey_prompt(3000, depth=0.5, seed=0)
    ids = tokenizer(prompt, return_tensors="pt").to("cuda")
    plain, offloaded = (TurboQuantCache(model.config, offloading=offloading) for offloading in (False, True))
    expected, actual = (
        model.generate(**ids, **as_input(cache), do_sample=False, max_new_tokens=40) for cache in (plain, offloaded)
    )
    assert torch.equal(actual, expected)
    devices = [layer.store.tensors.rows.device.type for layer in offloaded.layers]
    assert devices.count("cuda") <= 2 and devices.count("cpu") >= 1


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_compiled_steps_that_read_dense_states_give_the_tokens_of_eager_ones(tokenizer):
    """Under "sdpa" every step dequantizes: within a captured graph, from counts that the host never sees."""
    model = AutoModelForCausalLM.from_pretrained(EXAMPLES / "needle", dtype=torch.float32, device_map="cuda").eval()
    model.set_attn_implementation("sdpa")
    prompt, _ = needle.passkey_prompt(700, depth=0.5, seed=0)
    ids = tokenizer([prompt, prompt[200:]], return_tensors="pt", padding=True).to("cuda")
    options = dict(do_sample=False, min_new_tokens=400, max_new_tokens=400)
    tokens = []
    for disabled in (False, True):
        torch._dynamo.reset()
        counters.clear()
        cache = TurboQuantCache(model.config, max_cache_len=2048)
        tokens.append(model.generate(**ids, **as_input(cache), disable_compile=disabled, **options))
        assert not counters["inductor"]["cudagraph_skips"]
    assert torch.equal(*tokens)
