"""Continuous batching of transformers on packed, shareable pages.

transformers schedules requests: prompts in chunks, prefix sharing, forks, preemption, streaming. This package gives its
engine a KV cache of packed pages (`cache`, `allocators`), the attention over them (`attention`), and a manager of both
(`manager`). Nothing of transformers is patched.

Raises:
    ImportError: transformers is older than 5.19, whose continuous batching has another design.
"""

import transformers
from packaging.version import Version

OLDEST = "5.19.0"
"""The first transformers whose cache can hold packed pages."""

if Version(transformers.__version__) < Version(OLDEST):
    raise ImportError(
        f"Continuous batching on packed pages needs transformers {OLDEST} or newer, and {transformers.__version__} is "
        "installed: `pip install -U transformers`. `TurboQuantCache` works with both."
    )

from .entry import TurboQuantBatching, continuous_batching  # noqa: E402
from .manager import TurboQuantBatchingManager  # noqa: E402

__all__ = ["TurboQuantBatching", "TurboQuantBatchingManager", "continuous_batching"]
