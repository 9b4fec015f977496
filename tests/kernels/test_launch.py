"""A decode step is launched with addresses and kept numbers: what the kernels get is what Triton was given."""

from __future__ import annotations

import weakref
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from tq_kernels.common import device as device_module
from tq_kernels.common import launcher
from tq_kernels.decode import launch
from tq_kernels.decode import reorder as reorderer
from tq_kernels.types import AttentionOptions

from tests.support.helpers import assert_same, filled, rows, states
from tests.support.kernel_cases import INTERPRETED
from tests.support.launch_recorder import Recorder, recorded
from tq_hf import TurboQuantConfig
from tq_hf.ops import dispatch
from tq_hf.ops.triton import blocks as triton_blocks
from tq_hf.ops.workspace import Workspace, release_workspaces
from tq_hf.stores import graph_ops
from tq_hf.stores.store import LayerStore

pytestmark = pytest.mark.skipif(INTERPRETED, reason="nothing is compiled")

KERNELS = ("APPEND_AND_ROTATE", "SPLIT", "REDUCE")
FUNCTIONS = {name: getattr(launch, name).function for name in KERNELS}


@pytest.fixture
def log(monkeypatch) -> list[tuple[Any, ...]]:
    monkeypatch.setattr(triton_blocks, "encode", lambda *arguments: None)
    with recorded(monkeypatch, {launch: KERNELS}) as log:
        yield log


def token(seed: int, batch: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    return states(seed, batch=batch, tokens=1, dim=64, value_dim=32, dtype=torch.float16)


def query(batch: int = 1) -> torch.Tensor:
    return torch.zeros(batch, 4, 1, 64, dtype=torch.float16)


@pytest.fixture
def store(log) -> LayerStore:
    """A store that is decoding, with room in its residual."""
    config = TurboQuantConfig(sink_tokens=4, residual_length=128)
    store = filled(config, states(0, tokens=270, dim=64, value_dim=32, dtype=torch.float16))
    dispatch.attend(query(), store.append(*token(1)), None, AttentionOptions(0.3))
    log.clear()
    return store


@pytest.mark.parametrize("late", [True, False], ids=["row", "no-row"])
@pytest.mark.parametrize(
    "options",
    [{}, dict(softcap=20.0), dict(s_aux=torch.ones(4)), dict(mask=True)],
    ids=["plain", "softcap", "s_aux", "mask"],
)
def test_a_settled_launch_passes_what_the_first_one_did(store, log, options, late):
    options = dict(options)
    view = store.append(*token(2))
    mask = torch.ones(1, 1, 1, view.length, dtype=torch.bool) if options.pop("mask", False) else None
    states, q = view.pending.states, query()
    outs = []  # kept alive, and so apart
    for _ in range(3):
        view.pending.states = states if late else None
        outs.append(dispatch.attend(q, view, mask, AttentionOptions(0.3, causal=True, **options)))
    assert [entry[0] for entry in log] == 3 * [*KERNELS]
    first, *others = log[:3], log[3:6], log[6:]
    assert all(entry[1:3] == ("launched", True) for launches in others for entry in launches)
    for launches, out in zip(others, outs[1:], strict=True):
        for before, after in zip(first, launches, strict=True):
            grid, values = before[3]
            moved = tuple(out.data_ptr() if value == outs[0].data_ptr() else value for value in values)
            assert after[3] == (grid, moved)


@pytest.fixture
def preallocated(log, monkeypatch) -> LayerStore:
    """A preallocated store with sinks and rows, whose counts no kernel changes here."""
    pair = states(0, tokens=100, dim=64, value_dim=32, dtype=torch.float16)
    store = LayerStore.allocate(TurboQuantConfig(sink_tokens=4), *pair, 1000)
    store.append(*pair)
    return store


def test_a_token_of_a_preallocated_store_is_appended_in_the_first_of_three_launches(preallocated, log):
    store, q = preallocated, query()
    for seed in range(2, 6):
        new = token(seed)
        view = store.append(*new)
        assert not log
        kept = graph_ops.attend_token(q, view, None, AttentionOptions(0.3))
        assert [entry[:3] for entry in log] == SETTLED or seed == 2
        assert view.pending.states is None and kept.shape == (1, 1, 4, 32)
        first = log[0][3][1]
        given = (store.tensors.rows, *new, *store.device_counts)
        assert first[: len(given)] == tuple(tensor.data_ptr() for tensor in given)
        log.clear()
        graph_ops.attend_token(q, view, None, AttentionOptions(0.3))
        assert [entry[0] for entry in log] == [*KERNELS]
        log.clear()


def test_only_the_merge_is_launched_early(preallocated, log, monkeypatch):
    """Programs of the split that begin beside those of the rotation are not shared out evenly."""
    on = launch.target(torch.device("cpu"))
    monkeypatch.setattr(launch, "target", lambda device: replace(on, capability=(9, 0)))
    for seed in (2, 3):
        view = preallocated.append(*token(seed))
        for _ in range(2):  # the second has nothing to append
            graph_ops.attend_token(query(), view, None, AttentionOptions(0.3))
    assert all(values[1][-1].PDL for name, *_, values in log if name == "SPLIT")
    assert all(options["launch_pdl"] for options in launch.REDUCE.function.options)
    for kernel in (launch.SPLIT, launch.APPEND_AND_ROTATE):
        assert not any(options.get("launch_pdl", False) for options in kernel.function.options)


def test_a_step_is_three_launches_and_writes_the_row_in_the_first(store, log):
    for seed in range(2, 6):
        new = token(seed)
        slot = (store.counts.blocks * 128 + store.counts.residual) % store.tensors.ring_rows
        view = store.append(*new)
        dispatch.attend(query(), view, None, AttentionOptions(0.3))
        assert view.pending.states is None  # written, and the model's tensors are let go
        assert [entry[0] for entry in log] == [*KERNELS]
        assert log[0][3][1][:3] == tuple(part.data_ptr() for part in (store.tensors.rows, *new))
        assert slot in log[0][3][1]
        log.clear()


def test_a_short_mask_launches_nothing(store, log):
    view = store.append(*token(2))
    with pytest.raises(ValueError, match="columns"):
        dispatch.attend(query(), view, torch.ones(1, 1, 1, view.length - 1, dtype=torch.bool), AttentionOptions(0.3))
    assert log == []


def test_a_tensor_of_other_alignment_is_launched_by_its_own_variant(store, log):
    dispatch.attend(query(), store.append(*token(2)), None, AttentionOptions(0.3))
    log.clear()
    odd = torch.zeros(4 * 64 + 1, dtype=torch.float16)[1:].view(1, 4, 1, 64)
    for how in ("compiled", "launched"):
        dispatch.attend(odd, store.append(*token(3)), None, AttentionOptions(0.3))
        assert log[0][1] == how and log[0][3][1][9] == odd.data_ptr()
        log.clear()


def test_rows_that_are_not_contiguous_are_copied_for_kernels(store, log):
    for _ in range(2):
        spread = [torch.stack([states, states], -1)[..., 0] for states in (query(), *token(3))]
        assert all(states.stride()[-1] == 2 for states in spread)
        view = store.append(*spread[1:])
        pending = view.pending
        dispatch.attend(spread[0], view, None, AttentionOptions(0.3))
        assert pending.states is None and not {states.data_ptr() for states in spread} & addresses(log)
        assert [entry[0] for entry in log] == [*KERNELS]
        log.clear()


def test_steps_share_scratch_unless_a_graph_keeps_it(preallocated, log, monkeypatch):
    asked: list[Workspace | None] = []
    allocator = triton_blocks.allocator
    monkeypatch.setattr(triton_blocks, "allocator", lambda space, *rest: asked.append(space) or allocator(space, *rest))
    shared = triton_blocks.current_workspace(torch.device("cpu"))
    for capturing in (True, False):
        monkeypatch.setattr(triton_blocks, "is_capturing", lambda capturing=capturing: capturing)
        graph_ops.attend_token(query(), preallocated.append(*token(2)), None, AttentionOptions(0.3))
    # What a compiled step calls does not count tokens.
    compiled = preallocated.append(*token(3))._replace(past_length=None)
    graph_ops.attend_token(query(), compiled, None, AttentionOptions(0.3))
    assert [space is shared for space in asked] == [False, True, False] and asked[::2] == [None, None]


def test_a_step_of_a_graph_makes_no_table(preallocated, log, monkeypatch):
    """Memory that is allocated while a graph is captured is the graph's, and nobody may keep it."""

    def makes_a_table(size: int, device: torch.device) -> torch.Tensor:
        raise AssertionError("a table was made")

    preallocated.tensors.launches.clear()
    launch.held_counts.cache_clear()
    monkeypatch.setattr(launch, "_integers", makes_a_table)
    view = preallocated.append(*token(2))._replace(past_length=None)
    assert graph_ops.attend_token(query(), view, None, AttentionOptions(0.3)).shape == (1, 1, 4, 32)


@pytest.mark.parametrize("residual", [128, 1024])
def test_nothing_is_compiled_while_a_residual_grows(log, residual):
    """A sequence decoded from 20 tokens to 1,420: every kernel has one variant, whatever the residual's capacity."""
    keys, values = states(0, batch=1, heads=1, tokens=20, dim=64, dtype=torch.float16)
    store = filled(TurboQuantConfig(residual_length=residual), (keys, values))
    new, capacities = (keys[:, :, :1].contiguous(), values[:, :, :1].contiguous()), set()
    for _ in range(1400):
        dispatch.attend(query(), store.append(*new), None, AttentionOptions(0.1))
        capacities.add(store.tensors.ring_rows)
    assert len(capacities) > (3 if residual == 1024 else 0)
    # By constants: the addresses of these tensors have whatever alignment the host gives them.
    for name in KERNELS:
        variants = getattr(launch, name).variants
        assert len({key[0][0] for key in variants}) == 1, name


def test_a_triton_of_unknown_launch_launches_by_itself(log, monkeypatch, caplog):
    device_module.knows_launch_of.cache_clear()
    monkeypatch.setattr(device_module.triton, "__version__", "4.0.0")
    for name in KERNELS:
        monkeypatch.setattr(launch, name, launcher.Kernel(Recorder(name, log)))
    store = filled(TurboQuantConfig(), states(0, tokens=270, dim=64, value_dim=32, dtype=torch.float16))
    for seed in (2, 3, 4):
        dispatch.attend(query(), store.append(*token(seed)), None, AttentionOptions(0.3))
    assert len(log) == 9 and {how for _, how, *_ in log} == {"compiled"}  # through `kernel[grid]`, each time
    assert len([record for record in caplog.records if "4.0.0" in record.getMessage()]) == 1


@pytest.mark.parametrize(
    ("version", "known"),
    [("3.4.0", False), ("3.5.1", True), ("3.9.0", True), ("3.7.1+git1234", True), ("3.10.0", False), ("main", False)],
)
def test_only_versions_that_were_read_are_launched_directly(version, known):
    assert device_module.knows_launch_of(version) == known


def addresses(log: list[tuple[Any, ...]]) -> set[int]:
    """Everything the kernels were given."""
    return {value for entry in log for value in entry[3][1] if isinstance(value, int)}


def packed_residual_and_sinks(store: LayerStore) -> set[int]:
    tensors = [tensor for group in store.by_kind().values() for tensor in group]
    cut = {tensor.data_ptr() for states in store._cuts.values() for tensor in states}  # kernels do not read these
    return {tensor.data_ptr() for tensor in tensors} - cut


def moved(store: LayerStore) -> LayerStore:
    """As layers that are offloaded come back: in tensors of other addresses."""
    return store.map(torch.clone)


def prefilled(store: LayerStore) -> LayerStore:
    store.append(*states(7, tokens=300, dim=64, value_dim=32, dtype=torch.float16))
    return store


def grown(store: LayerStore) -> LayerStore:
    """Decoded on until a block is encoded into larger buffers."""
    blocks = store.blocks
    while store.blocks is blocks:
        dispatch.attend(query(), store.append(*token(8)), None, AttentionOptions(0.3))
    return store


def cropped(store: LayerStore) -> LayerStore:
    store.crop(150)
    return store


def copied(store: LayerStore) -> LayerStore:
    store.tensors = store.tensors.with_ring(store.tensors.ring_rows, 0, store.tensors.ring_rows)
    return store


@pytest.mark.parametrize("change", [moved, prefilled, grown, cropped, copied, deepcopy])
def test_launches_follow_the_buffers(store, log, change, monkeypatch):
    from tq_hf.codec import reference

    monkeypatch.setattr(triton_blocks, "dequantize", reference.dequantize)
    view = store.append(*token(2))
    dispatch.attend(query(), view, None, AttentionOptions(0.3))  # launches are kept for these buffers
    changed = change(store)
    for seed in (3, 4, 5):
        log.clear()
        dispatch.attend(query(), changed.append(*token(seed)), None, AttentionOptions(0.3))
        assert packed_residual_and_sinks(changed) <= addresses(log)


def test_buffers_that_were_replaced_are_let_go(store):
    dispatch.attend(query(), store.append(*token(2)), None, AttentionOptions(0.3))
    old = [weakref.ref(store.blocks.data)]
    grown(store)
    assert all(tensor() is None for tensor in old)


def test_a_copied_view_is_read_where_the_copy_is(store, log):
    view = store.append(*token(2))
    dispatch.attend(query(), view, None, AttentionOptions(0.3))
    twin = deepcopy(view)
    for _ in range(2):
        log.clear()
        dispatch.attend(query(), twin, None, AttentionOptions(0.3))
        assert twin.tensors.rows.data_ptr() in addresses(log)


def test_what_was_worked_out_is_kept_between_steps(store):
    views = [store.append(*token(seed)) for seed in (2, 3)]
    assert views[0].tensors is views[1].tensors
    assert triton_blocks.decode_launch(views[0].tensors) is triton_blocks.decode_launch(views[1].tensors)


def test_a_launch_dies_with_the_tensors_it_was_made_for(store):
    tensors = store.view().tensors.map(torch.clone)
    decoder = weakref.ref(triton_blocks.decode_launch(tensors))
    assert decoder() is triton_blocks.decode_launch(tensors)
    del tensors
    assert decoder() is None


def test_what_launches_of_a_layer_need_is_not_compiled_anew_for_each_layer(store):
    counter = CompileCounter()
    launch_of = triton_blocks.once_per_layer(lambda tensors: tensors.batch_size)
    step = torch.compile(lambda x, tensors: x + launch_of(tensors), backend=counter)
    layers = [store.view().tensors.map(torch.clone) for _ in range(4)]
    for tensors in layers:
        assert step(torch.zeros(2), tensors)[0] == tensors.batch_size
    assert counter.frame_count == 1


# The late row


def test_a_row_is_not_lost_when_attention_fails(store, monkeypatch):
    def without_room(self, name, request):
        raise torch.OutOfMemoryError("no room")

    view = store.append(*token(2))
    release_workspaces()
    monkeypatch.setattr(Workspace, "_fit", without_room)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        dispatch.attend(query(), view, None, AttentionOptions(0.3))
    *_, (_, part) = store.view().dense_parts()
    assert_same(rows(part, part[0].shape[2] - 1), token(2))


# Triton's launchers


class Asked:
    """A launcher of Triton's: `launch` is its function in C."""

    launch_pdl = True

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.launch = lambda *arguments: self.calls.append(arguments)


class PassesOn(Asked):
    def __call__(self, x, y, z, stream, function, *arguments):
        self.launch(x, y, z, stream, function, self.launch_pdl, None, *arguments)


class Allocates(Asked):
    def __call__(self, x, y, z, stream, function, *arguments):
        self.launch(x, y, z, stream, function, torch.empty(8), *arguments)


class OtherOrder(Asked):
    def __call__(self, x, y, z, stream, function, *arguments):
        self.launch(True, x, y, z, stream, function, *arguments)


class OneTuple(Asked):
    def __call__(self, x, y, z, stream, function, *arguments):
        self.launch(x, y, z, stream, function, arguments)


class Elsewhere(Asked):
    def __call__(self, *arguments):
        self.calls.append(arguments)


@pytest.mark.parametrize("kind", [PassesOn, Allocates, OtherOrder, OneTuple])
def test_the_c_function_is_called_directly_only_where_it_gets_the_same(kind):
    run = kind()
    direct = launcher.direct(launcher.Launcher(run, (7, (4, 1), None)))
    assert (direct.call is run.launch) == (kind is PassesOn)
    assert not run.calls  # asking launches nothing
    direct.call(3, 2, 1, 99, *direct.fixed, 5, "end")
    run(3, 2, 1, 99, 7, (4, 1), None, 5, "end")
    by_launcher, by_triton = run.calls
    assert kind is Allocates or by_launcher == by_triton


def test_a_launcher_that_calls_something_else_is_kept():
    run = Elsewhere()
    kept = launcher.Launcher(run, (7, (4, 1), None))
    assert launcher.direct(kept) is kept


@pytest.mark.parametrize("name", ["APPEND_AND_ROTATE", "SPLIT", "REDUCE"])
def test_no_number_decides_what_is_compiled(store, log, monkeypatch, name):
    """What is kept compiled is launched with other strides and slots."""
    parameters = FUNCTIONS[name].params
    recorder = Recorder(name, log)
    monkeypatch.setattr(launch, name, launcher.Kernel(recorder))
    launch.steps_of.cache_clear()
    store = filled(TurboQuantConfig(), states(0, tokens=270, dim=64, value_dim=32, dtype=torch.float16))
    dispatch.attend(query(), store.append(*token(2)), None, AttentionOptions(0.3))
    numbers = 0
    for parameter, given in zip(parameters, recorder.given, strict=True):
        if not parameter.is_constexpr and isinstance(given, tuple | int):
            found = [x for x in device_module.members([given]) if isinstance(x, int)]
            assert parameter.do_not_specialize or set(found) <= {3}, parameter.name  # in tuples, whatever they are
            numbers += len(found)
    assert numbers > 5


def test_members_of_tuples_are_passed_one_by_one():
    source = SimpleNamespace(signature={"x": ("*fp32", ("i32", "constexpr")), "n": "i32"})
    compiled = SimpleNamespace(src=source, run=None, function=None, packed_metadata=None)
    for _ in range(2):
        device_module.compiled_launch(compiled)
        assert list(source.signature.values()) == ["*fp32", "i32", "constexpr", "i32"]


def test_this_tritons_launcher_gets_the_same_either_way(monkeypatch):
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.runtime import driver

    monkeypatch.setattr(driver, "_active", SimpleNamespace())  # Triton 3.9 asks for one at each launch
    calls: list[tuple[Any, ...]] = []
    run = CudaLauncher.__new__(CudaLauncher)
    sizes = dict.fromkeys(
        ("global_scratch_size", "global_scratch_align", "profile_scratch_size", "profile_scratch_align"), 0
    )
    others = dict(launch_cooperative_grid=False, launch_pdl=True, num_ctas=1, arg_annotations=(), kernel_signature=b"")
    run.__dict__.update(sizes, **others, gsan_enabled=False, launch=lambda *arguments: calls.append(arguments))
    direct = launcher.direct(launcher.Launcher(run, (7, (4, 1), None, None, None)))
    direct.call(3, 2, 1, 99, *direct.fixed, 5, 6)
    run(3, 2, 1, 99, 7, (4, 1), None, None, None, 5, 6)
    assert len(calls) == 2 and calls[0] == calls[1]


def worked_out(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many decoders, and steps of decoders, are made from now on."""
    made = {"decoders": 0, "steps": 0}
    for name, counted in (("__init__", "decoders"), ("_step", "steps")):
        function = getattr(launch.DecodeLaunch, name)

        def count(self, *arguments, function=function, counted=counted, **options):
            made[counted] += 1
            return function(self, *arguments, **options)

        monkeypatch.setattr(launch.DecodeLaunch, name, count)
    return made


SETTLED = [(name, "launched", True) for name in KERNELS]


def test_beams_that_change_places_leave_everything_worked_out(log, monkeypatch):
    """A step of a beam search: one launch to reorder, and the three of any step, by address."""
    store = filled(TurboQuantConfig(), states(0, tokens=200, dim=64, value_dim=32, dtype=torch.float16))
    reorder = launcher.Kernel(Recorder("REORDER", log))
    monkeypatch.setattr(reorderer, "REORDER", reorder)
    for seed in (2, 3):
        dispatch.attend(query(), store.append(*token(seed)), None, AttentionOptions(0.3))
        store.reorder(torch.tensor([0]))
    made = worked_out(monkeypatch)
    log.clear()
    for seed in (4, 5, 6):
        dispatch.attend(query(), store.append(*token(seed)), None, AttentionOptions(0.3))
        assert [entry[:3] for entry in log] == SETTLED
        log.clear()
        store.reorder(torch.tensor([0]))
        assert [entry[:2] for entry in log] == [("REORDER", "launched")]
        assert packed_residual_and_sinks(store) <= addresses(log)
        log.clear()
    assert made == {"decoders": 0, "steps": 0}


@pytest.mark.parametrize("room", [None, 1000], ids=["growing", "preallocated"])
def test_a_layer_that_comes_back_from_elsewhere_is_launched_as_before(log, monkeypatch, room):
    """Offloading: tensors have other addresses in every step, and the numbers and compiled kernels are the same."""
    pair = states(0, tokens=270, dim=64, value_dim=32, dtype=torch.float16)
    config = TurboQuantConfig(sink_tokens=4)
    store = filled(config, pair) if room is None else LayerStore.allocate(config, *pair, room)

    def step(store, seed):
        view = store.append(*token(seed))
        if room is None:
            return dispatch.attend(query(), view, None, AttentionOptions(0.3))
        return graph_ops.attend_token(query(), view, None, AttentionOptions(0.3))

    step(store, 2), step(store, 3)
    made = worked_out(monkeypatch)
    kept = [store]
    for seed in (4, 5):
        store = store.map(torch.clone)
        log.clear()
        step(store, seed)
        assert [entry[1:3] for entry in log] == [("launched", True)] * 3
        assert {tensor.data_ptr() for tensor in (store.tensors.rows, store.blocks.key_words)} <= addresses(log)
        kept.append(store)  # alive, and so apart
    assert made == {"decoders": 2, "steps": 0}


def test_layers_of_a_model_share_what_is_worked_out(log, monkeypatch):
    made = worked_out(monkeypatch)
    for layer in range(3):
        store = filled(TurboQuantConfig(), states(layer, tokens=270, dim=64, value_dim=32, dtype=torch.float16))
        for seed in (2, 3):
            dispatch.attend(query(), store.append(*token(seed)), None, AttentionOptions(0.3))
    assert made == {"decoders": 3, "steps": 1}


OTHERS = [dict(dtype=torch.bfloat16), dict(batch=2), dict(tokens=600), dict(value_dim=64), dict(heads=4)]
RECIPES = [dict(key_bits=3), dict(sink_tokens=8), dict(residual_length=512)]


@pytest.mark.parametrize("other", [*OTHERS, *(dict(config=TurboQuantConfig(**recipe)) for recipe in RECIPES)], ids=str)
def test_layers_unlike_another_share_nothing(log, monkeypatch, other):
    made = worked_out(monkeypatch)
    for changed in ({}, other):
        shape = dict(batch=1, heads=2, tokens=270, dim=64, value_dim=32, dtype=torch.float16) | changed
        config = shape.pop("config", TurboQuantConfig())
        store = filled(config, states(0, **shape))
        new = states(1, **shape | dict(tokens=1))
        dispatch.attend(query(shape["batch"]).to(shape["dtype"]), store.append(*new), None, AttentionOptions(0.3))
    assert made == {"decoders": 2, "steps": 2}
