"""What is said of versions that nobody has tried."""

import re

import pytest

from tests.test_packaging import ROOT
from tq_hf import compat


def test_what_is_installed_here_is_known(monkeypatch):
    said = []
    monkeypatch.setattr(compat.logger, "warning", said.append)
    compat.report_untested()
    assert said == []


@pytest.mark.parametrize(
    ("installed", "clauses"),
    [
        ({"torch": "2.9.0+cu128", "transformers": "5.17.0", "triton": "3.5.0"}, []),
        ({"torch": "2.15.1", "transformers": "5.24.0", "triton": "3.9.0"}, []),
        ({"torch": "2.8.0"}, ["torch 2.8.0 (tested: 2.9 to 2.15)"]),
        ({"torch": "2.16.0a0", "triton": "3.10.0"}, ["torch 2.16.0a0 (tested: 2.9 to 2.15)", "triton 3.10.0 (tested"]),
        ({"transformers": "6.0.0"}, ["transformers 6.0.0 (tested: 5.17 to 5.24)"]),
        ({"torch": "main"}, []),
    ],
    ids=str,
)
def test_a_version_outside_of_what_was_tested_is_named(installed, clauses):
    found = compat.untested(installed)
    assert len(found) == len(clauses) and all(map(str.startswith, found, clauses))


def test_one_sentence_is_logged(monkeypatch):
    said = []
    monkeypatch.setattr(compat.logger, "warning", said.append)
    monkeypatch.setattr(compat, "version", lambda name: pytest.fail("torch is imported, and says it itself"))
    monkeypatch.setattr(compat, "TESTED", {"torch": ((1, 0), (1, 13)), "transformers": ((4, 0), (4, 9))})
    compat.report_untested()
    torch, transformers = r"torch \S+ \(tested: 1.0 to 1.13\)", r"transformers \S+ \(tested: 4.0 to 4.9\)"
    assert re.match(rf"tq_hf has not been run with {torch} and {transformers}\. Compare", said[0])


def test_lower_bounds_are_the_oldest_that_were_tested():
    text = (ROOT / "pyproject.toml").read_text()
    for name, (oldest, _) in compat.TESTED.items():
        assert re.search(rf'"{name}>={oldest[0]}\.{oldest[1]}\b', text), name


def test_the_oldest_triton_is_what_the_oldest_tests_install():
    oldest, _ = compat.TESTED["triton"]
    assert f'"triton=={oldest[0]}.{oldest[1]}.0;' in (ROOT / "Makefile").read_text()
