"""Encoders, dequantizers and kernels of many queries are launched as decode's are: by the variant that was compiled for
such arguments."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from tq_kernels.codec import launch as codec
from tq_kernels.common.device import target
from tq_kernels.common.launcher import Kernel, States, Strides, compile_in_threads
from tq_kernels.common.schedule import Mask
from tq_kernels.decode import append as appends
from tq_kernels.decode import launch as decode
from tq_kernels.decode.plan import plan_decode
from tq_kernels.prefix import launch as prefix
from tq_kernels.types import AttentionOptions, PackedBlocks
from triton.runtime._async_compile import active_mode

from tests.support.helpers import all_packed, states
from tests.support.kernel_cases import INTERPRETED
from tests.support.launch_recorder import Recorder, recorded
from tests.support.paged_cases import Step, make
from tq_hf.ops.triton import blocks as triton_blocks
from tq_hf.ops.triton import pages as triton_pages
from tq_hf.tensors.layer import Counts, LayerTensors, View

pytestmark = pytest.mark.skipif(INTERPRETED, reason="nothing is compiled")

CONFIG = all_packed()
KERNELS = {
    codec: ("ENCODE", "ENCODE_PAGES", "DEQUANTIZE"),
    prefix: ("ATTEND", "MERGE"),
    decode: ("APPEND_AND_ROTATE", "APPEND_TO_PAGES", "SPLIT", "REDUCE"),
    appends: ("APPEND_TAILS",),
}

POINTERS = set("states packed rotation channel_scales s_aux out partial lse tokens".split())


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Any:
    with recorded(monkeypatch, KERNELS) as log:
        yield log


def half(tokens: int, heads: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return states(0, heads=heads, tokens=tokens, dim=64, dtype=torch.float16)


def room(blocks: int) -> PackedBlocks:
    return PackedBlocks.allocate(CONFIG.layout(64, 64), 1, 2, blocks, torch.device("cpu"))


def how(log: list[tuple[Any, ...]]) -> list[str]:
    kinds = [kind for _, kind, *_ in log]
    log.clear()
    return kinds


def test_other_lengths_are_launched_by_what_was_compiled(log) -> None:
    """1, 16 and others: Triton would compile each in a way of its own."""
    blocks = room(40)
    for count, kind in ((3, "compiled"), (1, "launched"), (16, "launched"), (17, "launched")):
        keys, values = half(128 * count)
        triton_blocks.encode(CONFIG, (keys.transpose(1, 2).contiguous().transpose(1, 2), values), blocks, count)
        # Keys whose tokens follow each other by 2 heads, values by one: strides over tokens are 128 and 64 throughout.
        assert how(log) == [kind, kind], count
        keys, values = (torch.empty(1, 2, 40 * 128, 64, dtype=torch.float16) for _ in range(2))
        part = blocks.slice(0, count)
        triton_blocks.dequantize(CONFIG, part, keys[:, :, : 128 * count], values[:, :, : 128 * count])
        assert how(log) == [kind, kind], count


def test_a_launch_passes_what_the_compiling_one_did(log) -> None:
    blocks, (keys, values) = room(4), half(256)
    for _ in range(2):
        triton_blocks.encode(CONFIG, (keys, values), blocks, 1)
    assert [(name, kind) for name, kind, *_ in log] == [("ENCODE", "compiled")] * 2 + [("ENCODE", "launched")] * 2
    assert [entry[3] for entry in log[:2]] == [entry[3] for entry in log[2:]]
    assert [by_address for _, _, by_address, _ in log] == [False] * 2 + [True] * 2


def test_tokens_within_a_prompt_are_encoded_where_a_slice_of_them_begins(log) -> None:
    blocks, (keys, values) = room(4), half(300)
    keys = keys.transpose(1, 2).contiguous().transpose(1, 2)
    triton_blocks.encode(CONFIG, (keys[:, :, 4:260], values[:, :, 4:260]), blocks, 1)
    for _ in range(2):
        triton_blocks.encode(CONFIG, (keys, values), blocks, 1, (4, 260))
    passed = [entry[3] for entry in log]
    assert passed[:2] == passed[2:4] == passed[4:] and passed[0] != passed[1]
    assert [by_address for _, _, by_address, _ in log] == [False] * 2 + [True] * 4


def test_nothing_is_launched_where_kernels_are_only_compiled(log) -> None:
    blocks, (keys, values) = room(4), half(256)
    rows = [torch.empty(1, 2, 256, 64, dtype=torch.float16) for _ in range(2)]

    def call() -> list[str]:
        triton_blocks.encode(CONFIG, (keys, values), blocks, 1)
        triton_blocks.dequantize(CONFIG, blocks.slice(0, 1), rows[0][:, :, :128], rows[1][:, :, :128])
        return how(log)

    called: list[list[str]] = []
    wait = compile_in_threads(lambda: called.append(call()))
    assert called == [["only compiled"] * 4]
    assert call() == ["compiled"] * 4 and call() == ["launched"] * 4
    wait()


def test_threads_compile_kernels_and_build_their_launchers(monkeypatch) -> None:
    """Under Triton 3.5 and 3.9, too. A kernel that does not compile is left to its next launch."""
    built: list[Any] = []
    driver = SimpleNamespace(active=SimpleNamespace(launcher_cls=lambda src, metadata: built.append(src.signature)))
    monkeypatch.setattr(triton.runtime, "driver", driver)
    source = SimpleNamespace(signature={"states": ("*fp16", ("i32", "i64")), "count": "i32"})
    kernel, finished = SimpleNamespace(src=source, metadata=None), list[Any]()

    def code() -> None:
        submit: Any = active_mode.get().submit
        cleanup = [lambda kernel: None] * (len(signature(submit).parameters) - 3)  # from Triton 3.9 on
        submit("one", lambda: kernel, finished.append, *cleanup)
        submit("another", lambda: 1 / 0, finished.append, *cleanup)

    compile_in_threads(code)()
    assert finished == [kernel] and built == [dict(enumerate(("*fp16", "i32", "i64", "i32")))]


def test_steps_of_few_sequences_over_pages_have_the_same_kernels() -> None:
    def kernel(batch: int) -> Any:
        shape = (batch, 32, 8, 1, CONFIG.layout(128), 256, 128)
        return plan_decode(*shape, False, 0, False, False, target(torch.device("cpu")), 1, (4, 256, 32)).split

    assert {kernel(batch) for batch in (2, 9, 32)} == {kernel(1)}
    assert len({kernel(batch) for batch in (32, 33, 64, 65)}) == 3


def test_triton_is_asked_about_a_tensor_on_another_device() -> None:
    """It says what is wrong with it; a kernel would read memory of the host by its address."""

    def at(address: int, is_cuda: bool) -> Any:
        return SimpleNamespace(data_ptr=lambda: address, is_cuda=is_cuda, device=torch.device("cuda", 0))

    entries: list[tuple[Any, ...]] = []
    kernel, on_gpu = Kernel(Recorder("kernel", entries)), at(16, True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
        for other in (on_gpu, None, on_gpu, None, at(32, False)):
            kernel((1, 1, 1), (on_gpu, other), (), (), ())
    assert how(entries) == ["compiled", "compiled", "launched", "launched", "compiled"]


def test_strides_that_are_compiled_in_their_own_way_are_another_variant(log) -> None:
    blocks = room(4)
    keys, values = half(256)
    triton_blocks.encode(CONFIG, (keys, values), blocks, 0)
    assert how(log) == ["compiled"] * 2
    odd = torch.empty(1, 2, 256, 65, dtype=torch.float16)[..., :64]  # rows are 65 apart: no multiple of 16
    triton_blocks.encode(CONFIG, (odd, odd), blocks, 0)
    assert how(log) == ["compiled"] * 2
    apart = torch.empty(2 * 256 * 64 + 1, dtype=torch.float16)[1:].view(1, 2, 256, 64)  # not aligned
    triton_blocks.encode(CONFIG, (apart, apart), blocks, 0)
    assert how(log) == ["compiled"] * 2
    for given in ((keys, values), (odd, odd), (apart, apart)):
        triton_blocks.encode(CONFIG, given, blocks, 0)
    assert how(log) == ["launched"] * 6


def test_attention_of_many_queries_compiles_once_while_lengths_change(log) -> None:
    tensors = LayerTensors(CONFIG, room(40), torch.zeros(1, 2, 512, 128, dtype=torch.float16))
    kinds = []
    for num_blocks, num_residual, queries in ((3, 1, 64), (16, 100, 64), (17, 16, 64), (1, 256, 64)):
        query = torch.zeros(1, 4, queries, 64, dtype=torch.float16)
        past = num_blocks * 128 + num_residual
        view = View(tensors, Counts(0, num_blocks, num_residual), past + queries, new=half(queries))
        out = triton_blocks.attend_many(query, view, None, AttentionOptions(0.3))
        assert out.shape == (1, queries, 4, 64)
        kinds.append(how(log))
    assert {kind for kind in kinds[0]} == {"compiled"}
    assert all(kind == "launched" for later in kinds[1:] for kind in later), kinds


def paged_step(step: Step) -> None:
    inputs = make(step)
    triton_pages.paged_step(inputs.tokens, inputs.pages, inputs.sequences, inputs.options)


def test_prompts_over_pages_compile_once_while_requests_change(log) -> None:
    """As many requests: their number is a size of tiles."""
    kinds = []
    for past, new in (((0, 300, 5), (20, 1, 3)), ((200, 0, 0), (2, 14, 8)), ((500, 16, 128), (16, 1, 2))):
        paged_step(Step(past=past, new=new, Hq=1))
        decoding = ["APPEND_TO_PAGES", "SPLIT", "REDUCE"] * (1 in new)
        assert [name for name, *_ in log] == ["ATTEND", "MERGE", *decoding, "ENCODE_PAGES", "APPEND_TAILS"]
        kinds.append(how(log))
    assert kinds == [["compiled"] * 7, ["launched"] * 4, ["launched"] * 7]


def test_prompts_over_pages_compile_once_for_any_number_of_requests(log) -> None:
    """A prompt is padded to as many requests as tokens: 64, 320, ..."""
    for count, kind in ((7, "compiled"), (9, "launched"), (19, "launched"), (120, "launched")):
        paged_step(Step(past=(300,) * count, new=(2,) * count, Hq=1))
        assert how(log) == [kind] * 3, count


def test_a_decode_step_over_pages_is_launched_by_address_once_compiled(log) -> None:
    """By what is kept of the layer: another layer's pages are launched the same way, on their own addresses."""
    inputs = [make(Step(past=(140, 300), new=(1, 1), sinks=4, spare=spare)) for spare in (2, 2)]
    layers = [each.pages for each in inputs]
    for layer in (0, 0, 1, 0):
        triton_pages.paged_step(inputs[layer].tokens, layers[layer], inputs[layer].sequences, inputs[layer].options)
    steps = [log[at : at + 3] for at in range(0, 12, 3)]
    assert len(log) == 12  # three launches a step: the first one encodes
    assert [entry[1:3] for entry in steps[0]] == [("compiled", False)] * 3
    assert all(entry[1:3] == ("launched", True) for step in steps[1:] for entry in step)
    for step, layer in zip(steps, (0, 0, 1, 0), strict=True):
        pages, (query, key, value) = layers[layer].tensors, inputs[layer].tokens
        given = {value for entry in step for value in entry[3][1] if isinstance(value, int)}
        shown = (pages.blocks, pages.rows, query, key, value, *inputs[layer].sequences[:4])
        assert {tensor.data_ptr() for tensor in shown} <= given
    assert all([entry[3][0] for entry in step] == [entry[3][0] for entry in steps[0]] for step in steps)


def test_dtypes_of_prompts_over_pages_are_variants(log) -> None:
    step = Step(past=(0, 300), new=(130, 2))
    for changed in ({}, dict(dtype=torch.bfloat16), dict(s_aux=True), dict(sinks=4)):
        for kind in ("compiled", "launched"):
            paged_step(replace(step, **changed))
            assert how(log)[0] == kind, changed


def test_a_merge_over_pages_is_not_that_of_one_batch(log) -> None:
    """It reads on the device how many tokens there are."""
    partial, lse, aux, out = torch.zeros(2, 8, 64), torch.zeros(2, 8), torch.zeros(4), torch.zeros(1, 2, 4, 64)
    for tokens in (None, torch.zeros(1, dtype=torch.int32)):
        for kind in ("compiled", "launched"):
            prefix.merge(partial, lse, aux, out, 4, 2, 2, 8, 2, tokens)
            given = log[0][3][1][4]
            assert given == (None if tokens is None else tokens.data_ptr()) and how(log) == [kind]


def test_rows_are_read_16_bytes_at_a_time_only_where_all_begin_at_multiples() -> None:
    base = torch.zeros(2 * 3 * 64 + 1, dtype=torch.float16)
    even, shifted = base[:-1].view(2, 3, 64), base[1:].view(2, 3, 64)
    odd = torch.zeros(2, 3, 65, dtype=torch.float16)[..., :64]
    for part, is_aligned in ((even, True), (shifted, False), (odd, False)):
        assert prefix._is_aligned(part[None]) == is_aligned
        rows = triton_pages._rows(part)
        assert (rows is part) == is_aligned and rows.data_ptr() % 16 == 0 and torch.equal(rows, part)


def test_strides_alone_decide_what_is_compiled_of_numbers_in_tuples(monkeypatch: pytest.MonkeyPatch) -> None:
    """They, and whether a number fits 32 bits."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    log: list[tuple[Any, ...]] = []
    recorder, tensor = Recorder("kernel", log), torch.zeros(8)
    kernel = Kernel(recorder)
    for number, stride, kind in (
        *((2, 64, "compiled"), (1, 128, "launched"), (16, 64, "launched"), (None, 64, "compiled")),
        *((2, 65, "compiled"), (1, 1, "compiled"), (2**31, 64, "compiled"), (2**32, 64, "launched")),
    ):
        kernel((1, 1, 1), (States(tensor, Strides(stride, 64, 64)),), (Mask(None, number, 7, 0.5),), (), ())
        assert how(log) == [kind], (number, stride)
        if kind == "compiled":
            stand_in = {None: None, 2**31: 2**31 + 3}.get(number, 3)
            assert recorder.given == ((None, (stride, 64, 64)), (None, stand_in, 3, 0.5))


@pytest.mark.parametrize("name", ["ENCODE", "DEQUANTIZE", "MERGE"])
def test_no_number_outside_of_tuples_is_specialised(name: str) -> None:
    parameters = (prefix.MERGE if name == "MERGE" else getattr(codec, name)).function.params
    numbers = [p for p in parameters if not p.is_constexpr and not p.do_not_specialize]
    assert {p.name for p in numbers} <= POINTERS | {"strides"}
