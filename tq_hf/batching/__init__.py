"""Many requests at once: transformers' continuous batching on packed, shareable pages.

transformers schedules (prompts in chunks, shared prefixes, forks, preemption, streaming); this package gives its engine
a cache of packed pages (`allocator`, `paged_cache`, `memory_handler`), with dense ones of sliding windows beside them
(`window_allocator`), the attention that reads them (`attention`), and a manager that puts them in place (`manager`).
Nothing of transformers is patched.

Raises:
    ImportError: transformers is older than 5.19, whose continuous batching is of another design.
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
