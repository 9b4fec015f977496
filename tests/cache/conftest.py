"""What tests of caches share."""

import pytest

from tests.support.recorded_graph import record_graphs


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A GPU, or the CPU with recorded graphs."""
    if request.param == "cpu":
        record_graphs(monkeypatch)
    return request.param
