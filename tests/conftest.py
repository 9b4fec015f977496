"""Settings of every test."""

import gc
import os
from functools import partial
from importlib.util import find_spec
from types import BuiltinFunctionType

import pytest
import torch
from hypothesis import HealthCheck, settings

# These import kernels when they are collected, and Triton has no wheels for some systems.
NEED_TRITON = ["kernels/*", "ops/test_failing_kernels.py", "cache/test_hot_path.py", "examples/test_compile_matrix.py"]
collect_ignore_glob = [] if find_spec("triton") else NEED_TRITON

# Tests are small and run side by side; threads that wait for each other made them fifty times slower.
torch.set_num_threads(1)

# Nothing depends on the clock or on chance: no example has a deadline, none is refused for taking long to draw, and
# they are the same each time. (Fixtures of hypothesis' tests are read, never changed.)
checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=checks)
settings.load_profile("tests")

if os.environ.get("TQ_HF_TARGET"):
    from tests.support.target_override import install

    install()


LONGEST = tuple(
    f"tests/{name}.py"
    for name in ("cache/test_compiled", "cache/test_tensor_parallel", "batching/test_kinds_of_layers")
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first, so that no worker is left with one at the end."""
    items.sort(key=lambda item: not item.nodeid.partition("::")[0].endswith(LONGEST))


def pytest_collection_finish() -> None:
    """Leave what imports made out of every later search for garbage: engines search at each end of theirs, and went
    through it for a third of their tests' time. What is frozen is counted once: a count visits all of it, at each
    call of an engine."""
    gc.collect()
    gc.freeze()
    if isinstance(gc.get_freeze_count, BuiltinFunctionType):
        gc.get_freeze_count = partial(int, gc.get_freeze_count())


@pytest.fixture(autouse=True, scope="module")
def left_out_of_later_searches():
    """Likewise what a file leaves: after one that compiles, tests of engines took twice their time."""
    yield
    pytest_collection_finish()


@pytest.fixture(autouse=True)
def no_gradients():
    """Generation records none, and steps then take other paths; a test that means gradients turns them on."""
    with torch.no_grad():
        yield
