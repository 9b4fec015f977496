"""The life of shared scratch memory, clause by clause.

The clauses are those of vLLM's workspace manager (pull requests 40706, 40941, 37805 and the review of the last).
"""

import threading
import weakref

import pytest
import torch
from tq_kernels.types import AttentionOptions

from tests.support.helpers import CPU, filled, states
from tq_hf import TurboQuantConfig
from tq_hf.ops import dispatch, workspace
from tq_hf.ops.workspace import Workspace, allocator, current_workspace, release_workspaces


def take(space: Workspace, *shape: int, name: str = "mid_o", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return space.take(name, shape, dtype)


@pytest.fixture
def space() -> Workspace:
    return Workspace(CPU)


@pytest.fixture(autouse=True)
def nothing_held():
    release_workspaces()
    yield
    release_workspaces()


@pytest.fixture
def allocations(monkeypatch):
    """The shapes `torch.zeros` was asked for by the workspace module."""
    made = []
    zeros = torch.zeros

    def spy(*args, **kwargs):
        made.append(args)
        return zeros(*args, **kwargs)

    monkeypatch.setattr(workspace.torch, "zeros", spy)
    return made


# Sizes


def test_requests_take_the_maximum_over_heterogeneous_heads_and_not_the_sum(space):
    for heads, dim in [(8, 64), (2, 256), (32, 128), (16, 80)]:
        take(space, 4, heads, dim + 1)
    assert space.nbytes == 4 * 32 * 129 * 4


@pytest.mark.parametrize(("shape", "dtype"), [((2, 3, 5), torch.float32), ((7,), torch.bfloat16)])
def test_a_view_is_contiguous_and_of_the_shape_and_dtype_asked_for(space, shape, dtype):
    take(space, 8, 8, 8)
    view = take(space, *shape, dtype=dtype)
    assert (view.shape, view.dtype) == (shape, dtype)
    assert view.is_contiguous() and view.device == CPU


def test_names_do_not_alias(space):
    views = [take(space, 64, name=name) for name in ("mid_o", "output", "lse")]
    for i, view in enumerate(views):
        view.fill_(i)
    assert [view.unique().tolist() for view in views] == [[0], [1], [2]]


@pytest.mark.parametrize("shape", [(4, 8, 16), (1, 8, 16), (4, 1, 16), (4, 8, 1), (1, 1, 1), (4, 8, 0)])
def test_the_same_or_a_smaller_request_returns_the_same_pointer(space, allocations, shape):
    buffer = take(space, 4, 8, 16)
    view = take(space, *shape)
    assert view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    assert view.storage_offset() == 0 and len(allocations) == 1


def test_it_only_grows(space):
    sizes = []
    for shape in [(2, 2), (8, 8), (1, 1), (4, 4), (8, 9), (2, 2)]:
        take(space, *shape)
        sizes.append(space.nbytes)
    assert sizes == sorted(sizes) == [16, 256, 256, 256, 288, 288]


def test_two_alternating_shapes_do_not_reallocate(space, allocations):
    """(many heads, small batch) and (few heads, large batch) take the bytes of the larger one, not of a product."""
    many_heads, large_batch = (1, 64, 32), (32, 4, 32)
    take(space, *many_heads)
    take(space, *large_batch)
    assert space.nbytes == 32 * 4 * 32 * 4
    made, addresses = len(allocations), set()
    for shape in [many_heads, large_batch] * 5:
        addresses.add(take(space, *shape).data_ptr())
    assert len(allocations) == made and len(addresses) == 1


def test_a_long_sequence_after_a_large_batch_takes_no_more_than_it_needs():
    """Nothing is allocated here: 64 sequences of 4k tokens, then one of 256k, are half a GiB each."""
    meta = Workspace(torch.device("meta"))
    for shape in [(64, 8, 4096, 128), (1, 8, 262144, 128)]:
        take(meta, *shape, dtype=torch.bfloat16)
        assert meta.nbytes == 2**29


@pytest.mark.parametrize("other", [torch.bfloat16, torch.int32, torch.float64])
def test_a_change_of_dtype_or_rank_keeps_the_bytes(space, allocations, other):
    take(space, 64, 64)
    take(space, 2, 2)
    for shape in [(2, 2), (3, 5, 7), (11,)]:
        view = take(space, *shape, dtype=other)
        assert (view.dtype, view.shape) == (other, shape)
    assert len(allocations) == 1 and space.nbytes == 64 * 64 * 4


def test_growing_frees_the_old_buffer_before_it_makes_the_new_one(space, monkeypatch):
    take(space, 64)
    old = weakref.ref(space._buffers["mid_o"])
    held_during = []
    zeros = torch.zeros

    def spy(*args, **kwargs):
        held_during.append((space.nbytes, old()))
        return zeros(*args, **kwargs)

    monkeypatch.setattr(workspace.torch, "zeros", spy)
    take(space, 128)
    assert held_during == [(0, None)]


# A locked workspace


def test_what_was_taken_before_is_taken_without_allocating(space, allocations):
    take(space, 4, 8, 64)
    space.lock()
    made, held = len(allocations), space.nbytes
    for shape in [(4, 8, 64), (1, 2, 3), (2, 8, 64), (4, 8, 64)]:
        assert take(space, *shape).shape == shape
    assert len(allocations) == made and space.nbytes == held == 4 * 8 * 64 * 4


def test_more_than_was_reserved_is_refused_with_the_name_of_the_caller_and_changes_nothing(space):
    take(space, 64, name="attention over pages")
    space.lock()
    with pytest.raises(RuntimeError, match="Attention over pages needs 260 bytes of scratch .* and 256 were reserved"):
        space.floats("attention over pages", 65)
    with pytest.raises(RuntimeError, match="Another needs 4 bytes of scratch .* and 0 were"):
        space.floats("another", 1)
    assert space.floats("attention over pages", 64).nbytes == space.nbytes == 256


# No workspace, devices, streams, threads


@pytest.mark.parametrize("held", [True, False], ids=["workspace", "per call"])
def test_kernels_ask_for_float32_of_a_size(space, held):
    """Of one buffer or, without a workspace, of one per call."""
    allocate = allocator(space if held else None, "decode attention", CPU)
    first, second = allocate(128), allocate(96)
    assert first.dtype == second.dtype == torch.float32 and (len(first), len(second)) == (128, 96)
    assert (first.data_ptr() == second.data_ptr()) == held
    assert space.nbytes == 512 * held and current_workspace(CPU).nbytes == 0


def test_there_is_one_workspace_per_device():
    assert current_workspace(CPU) is current_workspace(torch.device("cpu"))
    meta = current_workspace(torch.device("meta"))
    assert meta is not current_workspace(CPU)
    assert take(meta, 4).device.type == "meta"


def test_streams_of_one_device_have_workspaces_of_their_own(monkeypatch):
    streams = iter((0, 7, 0, 7, 0))
    # PyTorch for the CPU has no such function.
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: next(streams), raising=False)
    device = torch.device("cuda", 0)
    spaces = [current_workspace(device) for _ in range(4)]
    assert spaces[0] is spaces[2] and spaces[1] is spaces[3]
    assert spaces[0] is not spaces[1]
    assert current_workspace(torch.device("cuda", 1)) is not spaces[1]


def test_threads_never_share_scratch():
    """Two models generating in two threads: each fills its scratch while the other holds its own."""
    barrier, failures, addresses = threading.Barrier(2), [], []

    def work(value: int) -> None:
        for _ in range(20):
            view = take(current_workspace(CPU), 256)
            barrier.wait()
            view.fill_(value)
            barrier.wait()
            if not (view == value).all():
                failures.append(value)
            addresses.append((view.data_ptr(), value))
            barrier.wait()

    threads = [threading.Thread(target=work, args=(value,)) for value in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and len(addresses) == 40
    assert len({address for address, _ in set(addresses)}) == 2


def test_a_finished_threads_scratch_is_released():
    def work() -> None:
        take(current_workspace(CPU), 1024)
        held.append((current_workspace(CPU).nbytes, weakref.ref(current_workspace(CPU))))

    held: list[tuple[int, weakref.ref[Workspace]]] = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    del thread
    ((nbytes, space),) = held
    assert nbytes == 4096 and space() is None


def test_held_bytes_are_gone_after_release():
    take(current_workspace(CPU), 4, name="a")
    take(current_workspace(CPU), 3, name="b", dtype=torch.float16)
    take(current_workspace(torch.device("meta")), 2)
    assert [current_workspace(torch.device(each)).nbytes for each in ("cpu", "meta")] == [22, 8]
    held = [weakref.ref(current_workspace(torch.device(each))) for each in ("cpu", "meta")]
    release_workspaces()
    assert [each() for each in held] == [None, None]
    assert current_workspace(CPU).nbytes == 0


# What uses it


def test_attention_of_all_layers_takes_its_tiles_from_one_workspace(allocations):
    config = TurboQuantConfig(residual_length=0, sink_tokens=0)
    layers = [(states(i, heads=heads, tokens=1024, dim=dim), dim) for i, (heads, dim) in enumerate([(4, 8), (1, 16)])]
    views = [(filled(config, pair).view(), dim) for pair, dim in layers]
    held = []
    for _ in range(3):
        for view, dim in views:
            dispatch.attend(states(9, heads=4, tokens=1, dim=dim)[0], view, None, AttentionOptions(1.0))
            held.append(current_workspace(CPU).nbytes)
    # Keys and values of the layer with the most heads times channels, 4 bits: levels in float32, and what they are
    # looked up with, an int32 index for four channels and the words themselves.
    numbers = 2 * 4 * 1024 * 8
    assert held == [numbers * 4 + numbers // 4 * 4 + numbers // 2] * 6


def test_neither_layers_nor_stores_hold_scratch():
    store = filled(TurboQuantConfig(), states(1, tokens=1024))
    before = sum(t.nbytes for group in store.by_kind().values() for t in group)
    dispatch.attend(states(2, tokens=1)[0], store.view(), None, AttentionOptions(1.0))
    assert current_workspace(CPU).nbytes > 0
    assert sum(t.nbytes for group in store.by_kind().values() for t in group) == before
    assert not any(isinstance(value, Workspace) for value in vars(store).values())
