"""Tables that a process makes once do not depend on the modes of their first caller."""

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tq_kernels.types import PackedBlocks

from tests.support.helpers import llama_config, states
from tests.support.tiny_models import VOCAB, build
from tq_hf import TurboQuantCache
from tq_hf.codec import codebook, rotation, trellis
from tq_hf.compat import as_input, cached_table
from tq_hf.ops.cpu import packed
from tq_hf.stores import sizes

CPU = torch.device("cpu")
IDS = torch.randint(3, VOCAB, (1, 310), generator=torch.Generator().manual_seed(0))
TABLES = {
    "levels": (codebook.levels, lambda bits: (bits, CPU)),
    "boundaries": (codebook.boundaries, lambda bits: (4, CPU)),
    "codes": (codebook.codes_of_ceilings, lambda bits: (4, CPU)),
    "signs": (rotation.signs, lambda bits: (64, bits, CPU)),
    "no signs": (rotation.signs, lambda bits: (64, None, CPU)),
    "rotation": (rotation.rotation_matrix, lambda bits: (96, bits, CPU, torch.float32)),
    "errors": (trellis._errors, lambda bits: (min(bits, 3), CPU)),
    "words": (packed.table, lambda bits: (min(bits, 4), torch.float32, CPU)),
    "planes": (packed._planes, lambda bits: (CPU,)),
    "no blocks": (sizes._no_blocks, lambda bits: (config_of(bits), (1, 2, 16, 16), CPU)),
}


def config_of(bits: int):
    return TurboQuantCache(llama_config(1), {2: "2bit_nc", 3: "3bit_nc", 4: "4bit_nc", 8: "k8v4"}[bits]).config


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


MODES = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "meta": lambda: torch.device("meta"),
    "fake": FakeTensorMode,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def tensors_of(table) -> list[torch.Tensor]:
    if isinstance(table, PackedBlocks):
        return [*table.tensors().values(), *table.channel_scales]
    table = table if isinstance(table, tuple) else (table,)
    return [torch.view_as_real(x) if x.is_complex() else x for x in table]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_the_same_in_every_mode(name, bits, mode):
    make, arguments = TABLES[name][0].__wrapped__, TABLES[name][1](bits)
    expected = tensors_of(cached_table(make)(*arguments))
    with MODES[mode]():
        found = cached_table(make)(*arguments)
    for table, like in zip(tensors_of(found), expected, strict=True):
        assert type(table) is torch.Tensor and not table.is_inference()
        torch.testing.assert_close(table, like, rtol=0, atol=0, equal_nan=True)


@torch.no_grad()
@pytest.mark.parametrize("mode", ["float64", "bfloat16", "meta"])
@pytest.mark.parametrize("options", [{}, {"max_cache_len": 400}, {"preset": "3bit_nc"}], ids=str)
def test_a_whole_model_runs_in_a_mode_as_outside_of_it(mode, options):
    model = build("llama")
    model.set_attn_implementation("turboquant")

    def logits() -> torch.Tensor:
        cache = TurboQuantCache(model.config, **options)
        return torch.cat([model(part, **as_input(cache)).logits[:, -1] for part in IDS.split([300, 1, 9], dim=1)])

    expected = logits()
    with MODES[mode]():
        found = logits()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_fake_tensors_are_refused():
    cache = TurboQuantCache(llama_config(1))
    with FakeTensorMode(), pytest.raises(ValueError, match="Keys are fake tensors.*Leave `FakeTensorMode`"):
        cache.update(*(x.clone() for x in (torch.empty(1, 2, 9, 16), torch.empty(1, 2, 9, 16))), 0)
    cache.update(*states(0, tokens=9), 0)
    assert cache.get_seq_length() == 9
