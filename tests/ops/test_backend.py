"""The whole cache on the kernels: what the torch path stores and reads, stored and read by Triton.

On a machine without a GPU the file runs again in a child process under Triton's interpreter.
"""

import pytest
import torch
from tq_kernels.types import AttentionOptions

from tests.support.helpers import assert_unchanged, relative_error, slow, snapshot
from tests.support.kernel_cases import INTERPRETED, child
from tq_hf import TurboQuantConfig
from tq_hf.ops import reference
from tq_hf.stores.graph_ops import attend_token
from tq_hf.stores.store import LayerStore

DEVICES = [pytest.param("cuda", marks=pytest.mark.cuda)] + (["cpu"] if INTERPRETED else [])

HEADS, GROUP, DIM = 2, 3, 32


test_under_the_interpreter = child(__file__)


def states(tokens: int, device: str, seed: int = 0, dim: int = DIM) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(2, HEADS, tokens, dim, generator=generator).half() for _ in range(2))
    return keys.to(device), values.to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("preset", "prompt", "steps", "dim"),
    [
        # Blocks end at 132 and at 260 tokens.
        *[("4bit_nc", prompt, steps, DIM) for prompt, steps in ((1, 3), (3, 2), (125, 9), (255, 7))],
        ("k8v4", 125, 9, DIM),
        *[slow("k8v4", prompt, steps, DIM) for prompt, steps in ((1, 3), (3, 2), (255, 7))],
        slow("2.5bit_nc", 125, 9, DIM),
        *[slow(preset, 130, 4, dim) for preset, dim in (("4bit_nc", 512), ("2.5bit_nc", 384), ("k8v4", 320))],
    ],
)
def test_a_preallocated_store_steps_on_the_device_as_the_growing_one_does(preset, prompt, steps, dim, device):
    config = TurboQuantConfig.from_preset(preset, residual_length=0, sink_tokens=4)
    total = prompt + steps
    keys, values = states(total, device, dim=dim)
    preallocated = LayerStore.allocate(config, keys, values, total)
    growing = LayerStore.allocate(config, keys, values)
    growing.append(keys[:, :, :prompt], values[:, :, :prompt])
    preallocated.append(keys[:, :, :prompt], values[:, :, :prompt])
    query = torch.randn(2, HEADS * GROUP, 1, dim, generator=torch.Generator().manual_seed(1)).half().to(device)
    # Every step matters near an event; the rest are appended only.
    for token in range(prompt, total):
        new = keys[:, :, token : token + 1], values[:, :, token : token + 1]
        step = preallocated.append(*new)
        view = growing.append(*new)
        # Attention appends the token in passing, once, and anybody may be next to read it.
        for _ in range(2 if token in (prompt, total - 1) or growing.counts.pending else 0):
            actual = attend_token(query, step, None, AttentionOptions(dim**-0.5))
            expected = reference.attend(query, view, None, AttentionOptions(dim**-0.5))
            assert relative_error(actual, expected) < 2e-3
        assert preallocated.length.item() == token + 1
        assert preallocated.settle() == growing.counts
    dense, expected = (s.view() for s in (preallocated, growing))
    for (start, part), (other_start, other) in zip(dense.dense_parts(), expected.dense_parts(), strict=True):
        assert start == other_start
        assert torch.equal(part[0], other[0]) and torch.equal(part[1], other[1])
    for name, tensor in preallocated.blocks.tensors().items():
        held = slice(growing.counts.blocks)
        assert torch.equal(tensor[:, :, held], growing.blocks.tensors()[name][:, :, held])


@pytest.mark.parametrize("device", DEVICES)
def test_a_full_store_is_left_as_it_is(device):
    config = TurboQuantConfig(residual_length=0, sink_tokens=4)
    keys, values = states(50, device)
    store = LayerStore.allocate(config, keys, values, 50)
    store.append(keys[:, :, :49], values[:, :, :49])
    store.append(keys[:, :, 49:], values[:, :, 49:])
    before = snapshot(store)
    for num_tokens in (50, None):  # what the host knows after an eager step, and after a compiled one
        store.num_tokens = num_tokens
        with pytest.raises(ValueError, match="1 tokens to the 50.*`max_cache_len` of 50"):
            store.append(*states(1, device, seed=1))
        assert store.length.item() == 50
        assert_unchanged(store, before)
