"""TurboQuant KV-cache compression for Hugging Face transformers.

```python
from tq_hf import TurboQuantCache

model.generate(**inputs, past_key_values=TurboQuantCache(model.config))
```

Importing this package registers the attention function "turboquant" and its mask with transformers, and changes nothing
else. A line is logged if torch, transformers or Triton are older or newer than the tested versions.
"""

from typing import TYPE_CHECKING, Any

from tq_kernels.layout import BlockLayout

from .compat import naming_versions, report_untested

with naming_versions():
    from .attention import register
    from .balance import Balance
    from .cache import TurboQuantCache
    from .config import PRESETS, TurboQuantConfig
    from .graph_decoding import graph_decoding
    from .layers.compressed import TurboQuantLayer
    from .memory import MemoryFootprint

if TYPE_CHECKING:
    from .batching import TurboQuantBatching, continuous_batching

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "Balance",
    "BlockLayout",
    "MemoryFootprint",
    "TurboQuantBatching",
    "TurboQuantCache",
    "TurboQuantConfig",
    "TurboQuantLayer",
    "continuous_batching",
    "graph_decoding",
]

register()
report_untested()


def __getattr__(name: str) -> Any:
    # Import lazily: batching needs a newer transformers than the rest of the package.
    if name in ("TurboQuantBatching", "continuous_batching"):
        from . import batching

        return getattr(batching, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
