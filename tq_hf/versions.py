"""The versions of others that this package was run with."""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, version

from transformers.utils import logging

logger = logging.get_logger(__name__)

Number = tuple[int, int]

TESTED: dict[str, tuple[Number, Number]] = {
    "torch": ((2, 9), (2, 15)),
    "transformers": ((5, 17), (5, 23)),
    "triton": ((3, 5), (3, 9)),
}
"""The oldest and the newest of each that tests have run with. What `pyproject.toml` allows is wider: each torch asks
for a Triton of its own, and a newer one may well work."""


def untested(installed: dict[str, str]) -> list[str]:
    """Of these versions by package, a clause for each that lies outside of what was tested."""
    clauses = []
    for name, (oldest, newest) in TESTED.items():
        number = re.match(r"(\d+)\.(\d+)", installed.get(name, ""))
        if number is not None and not oldest <= (int(number[1]), int(number[2])) <= newest:
            tested = " to ".join(".".join(map(str, bound)) for bound in (oldest, newest))
            clauses.append(f"{name} {installed[name]} (tested: {tested})")
    return clauses


def report_untested() -> None:
    """Log one sentence if a package is older or newer than what was tested."""
    installed = {}
    for name in TESTED:
        try:
            # Of a module that is there already, what it says itself: several installations may be on the path.
            installed[name] = getattr(sys.modules.get(name), "__version__", None) or version(name)
        except PackageNotFoundError:
            continue
    if clauses := untested(installed):
        logger.warning(
            f"tq_hf has not been run with {' and '.join(clauses)}. Compare an answer with that of transformers' own "
            "cache before you rely on it."
        )
