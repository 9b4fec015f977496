"""Continuation prefill on a GPU: every way against fp64, and assisted decoding on a trained model."""

from pathlib import Path

import pytest
import torch
from tq_kernels.types import AttentionOptions
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import needle_data as needle
from tq_hf import PRESETS, TurboQuantCache, TurboQuantConfig
from tq_hf.compat import as_input
from tq_hf.ops import dispatch
from tq_hf.ops.triton import blocks as triton_blocks
from tq_hf.ops.workspace import current_workspace, release_workspaces
from tq_hf.stores.store import LayerStore

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = pytest.mark.cuda
HQ, HKV, DIM = 8, 2, 128


def states(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    keys, values = (
        torch.randn(2, tokens, HKV, DIM, generator=generator, device="cuda", dtype=torch.float16).transpose(1, 2)
        for _ in range(2)
    )
    return keys + 1, values


def oracle(query: torch.Tensor, view, mask: torch.Tensor | None) -> torch.Tensor:
    keys, values = (part.double().repeat_interleave(HQ // HKV, 1) for part in dispatch.dense(view))
    queries, length = query.shape[2], keys.shape[2]
    if mask is None:
        mask = torch.ones(queries, length, dtype=torch.bool, device="cuda").tril(length - queries)
    logits = (query.double() @ keys.transpose(-1, -2) * DIM**-0.5).masked_fill(~mask, -torch.inf)
    return (logits.softmax(-1).nan_to_num(0.0) @ values).transpose(1, 2)


@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "padded"])
@pytest.mark.parametrize(
    ("queries", "past"), [(2, 1021), (17, 1999), (100, 4001), (129, 3001), (777, 2003), (2048, 4099)]
)
@pytest.mark.parametrize("preset", PRESETS)
def test_fused_and_buffered_agree_with_fp64(preset, queries, past, padded):
    """T = past + S, odd and prime among them."""
    store = LayerStore.allocate(TurboQuantConfig.from_preset(preset), *states(1, 0))
    store.append(*states(past, 1))
    view = store.append(*states(queries, 2))
    generator = torch.Generator("cuda").manual_seed(3)
    query = torch.randn(2, queries, HQ, DIM, generator=generator, device="cuda", dtype=torch.float16).transpose(1, 2)
    mask = None
    if padded:
        mask = torch.ones(2, 1, queries, view.length, dtype=torch.bool, device="cuda").tril(view.length - queries)
        mask[0, :, :, :333] = False
    expected = oracle(query, view, mask)
    for attend in (triton_blocks.attend_many, dispatch.buffered_attend):
        out = attend(query, view, mask, AttentionOptions(DIM**-0.5))
        assert ((out.double() - expected).norm() / expected.norm()).item() <= 1e-3, attend.__name__


def test_scratch_is_of_the_size_of_the_queries():
    sizes = []
    for past in (4000, 40000):
        release_workspaces()
        store = LayerStore.allocate(TurboQuantConfig(), *states(1, 0))
        store.append(*states(past, 1))
        view = store.append(*states(1500, 2))
        query = torch.randn(2, HQ, 1500, DIM, device="cuda", dtype=torch.float16)
        triton_blocks.attend_many(query, view, None, AttentionOptions(DIM**-0.5))
        sizes.append(current_workspace(query.device).nbytes)
    assert sizes[1] <= 2 * sizes[0] <= 24 * query.numel()


@pytest.mark.parametrize("preset", PRESETS)
def test_assisted_greedy_is_greedy_on_a_trained_model(preset):
    """Over 512 tokens, the two runs may part only at a token for which the logits nearly tie: verification rounds
    several queries in one kernel and decoding one in another, and blocks are encoded at other steps."""
    model = AutoModelForCausalLM.from_pretrained(EXAMPLES / "needle", dtype=torch.float16, device_map="cuda").eval()
    model.set_attn_implementation("turboquant")
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "needle")
    prompt, _ = needle.passkey_prompt(2000, depth=0.5, seed=0)
    ids = tokenizer(prompt, return_tensors="pt").to("cuda")
    options = dict(do_sample=False, min_new_tokens=512, max_new_tokens=512)
    outputs = [
        model.generate(
            **ids, **as_input(TurboQuantCache(model.config, preset)), prompt_lookup_num_tokens=lookup, **options
        )[0, ids.input_ids.shape[1] :]
        for lookup in (None, 24)
    ]
    same = outputs[0] == outputs[1]
    if same.all():
        return
    first = int((~same).nonzero()[0])
    print(f"{preset}: first difference at token {first} of 512")
    cache = TurboQuantCache(model.config, preset)
    with torch.inference_mode():
        before = torch.cat([ids.input_ids, outputs[0][None, :first]], 1)
        logits = model(before, **as_input(cache)).logits[0, -1].float()
    best = logits.topk(2).values
    chosen = logits[torch.stack([outputs[0][first], outputs[1][first]])]
    assert (best[0] - chosen.min()) <= 0.02 * logits.std(), "the runs part where there is no tie"
