"""Continuous batching of transformers on packed, shareable pages.

transformers schedules requests: prompts in chunks, prefix sharing, forks, preemption, streaming. This package adds a
KV cache of packed pages (`cache`, `allocators`), layers over the pages (`layers`), and a manager of both
(`manager`). Nothing in transformers is patched.

Raises:
    ImportError: transformers is older than 5.19. Its continuous batching has another design.
"""

import transformers
from packaging.version import Version

from ..compat import naming_versions

if Version(transformers.__version__) < Version("5.19"):
    raise ImportError(
        f"Continuous batching on packed pages needs transformers 5.19 or newer, and {transformers.__version__} is "
        "installed: `pip install -U transformers`. `TurboQuantCache` works with both."
    )

with naming_versions():
    from .entry import TurboQuantBatching, continuous_batching
    from .manager import TurboQuantBatchingManager
    from .prefixes import PrefixFolder

__all__ = ["PrefixFolder", "TurboQuantBatching", "TurboQuantBatchingManager", "continuous_batching"]
