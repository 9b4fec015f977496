"""TurboQuant KV-cache compression for Hugging Face transformers.

```python
from tq_hf import TurboQuantCache

model.generate(**inputs, cache=TurboQuantCache(model.config))  # `past_key_values=` before transformers 5.24
```

Importing this package registers the attention function "turboquant" and its mask with transformers, and changes nothing
else. A line is logged if torch, transformers or Triton are older or newer than the tested versions.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tq_kernels.layout import BlockLayout

    from .balance import Balance
    from .batching import TurboQuantBatching, continuous_batching
    from .cache import TurboQuantCache
    from .config import PRESETS, TurboQuantConfig
    from .graph_decoding import graph_decoding
    from .layers.compressed import TurboQuantLayer
    from .memory import MemoryFootprint

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

_PLACES = {
    "BlockLayout": "tq_kernels.layout",
    "Balance": "tq_hf.balance",
    "TurboQuantBatching": "tq_hf.batching",
    "continuous_batching": "tq_hf.batching",
    "TurboQuantCache": "tq_hf.cache",
    "PRESETS": "tq_hf.config",
    "TurboQuantConfig": "tq_hf.config",
    "graph_decoding": "tq_hf.graph_decoding",
    "TurboQuantLayer": "tq_hf.layers.compressed",
    "MemoryFootprint": "tq_hf.memory",
}


def __getattr__(name: str) -> Any:
    # Import lazily: batching needs a newer transformers than the rest of the package.
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_PLACES[name]), name)
    return value


def set_up() -> None:
    """Register attention and mask, and log a line about untested versions."""
    from .attention import register
    from .compat import report_untested

    register()
    report_untested()


# The command prints its help before it imports torch, and calls `set_up` by itself.
if Path((getattr(sys, "argv", None) or [""])[0]).name not in ("tq-hf", "tq-hf.exe"):
    set_up()
