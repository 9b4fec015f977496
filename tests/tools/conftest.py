import pytest

from tq_hf.tools import display


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine no line about progress comes into what a test reads."""
    monkeypatch.setattr(display, "PATIENCE", 1e6)
