"""Run a script; rank 1 of its processes is killed in the middle of a step.

python -m tests.support.dying_rank SCRIPT ARGUMENTS
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from typing import Any

from tq_hf.batching import TurboQuantBatchingManager

STEP = 5


def main() -> None:
    real, steps = TurboQuantBatchingManager._generation_step, iter(range(STEP))

    def step(manager: Any) -> None:
        if next(steps, None) is None and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        real(manager)

    TurboQuantBatchingManager._generation_step = step  # type: ignore[method-assign]
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
