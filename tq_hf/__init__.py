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
    from tq_kernels.layout import BlockLayout as BlockLayout

    from .balance import Balance as Balance
    from .batching import TurboQuantBatching as TurboQuantBatching
    from .batching import continuous_batching as continuous_batching
    from .cache import TurboQuantCache as TurboQuantCache
    from .config import PRESETS as PRESETS
    from .config import TurboQuantConfig as TurboQuantConfig
    from .graph_decoding import graph_decoding as graph_decoding
    from .layers.compressed import TurboQuantLayer as TurboQuantLayer
    from .memory import MemoryFootprint as MemoryFootprint

__version__ = "0.1.0"

_PLACES = {
    "tq_hf.balance": "Balance",
    "tq_hf.batching": "TurboQuantBatching continuous_batching",
    "tq_hf.cache": "TurboQuantCache",
    "tq_hf.config": "PRESETS TurboQuantConfig",
    "tq_hf.graph_decoding": "graph_decoding",
    "tq_hf.layers.compressed": "TurboQuantLayer",
    "tq_hf.memory": "MemoryFootprint",
    "tq_kernels.layout": "BlockLayout",
}
_PLACE_OF = {name: place for place, names in _PLACES.items() for name in names.split()}
__all__ = list(_PLACE_OF)


def __getattr__(name: str) -> Any:
    # Import lazily: batching needs a newer transformers than the rest of the package.
    if name not in _PLACE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .compat import naming_versions

    with naming_versions():
        return getattr(import_module(_PLACE_OF[name]), name)


def set_up() -> None:
    """Register attention and mask, and log a line about untested versions."""
    global graph_decoding  # also a room: importing a module of that room would bind the name to the room
    from .compat import naming_versions, report_untested

    with naming_versions():
        from .attention import register
        from .graph_decoding import graph_decoding
    register()
    report_untested()


# The command prints its help before it imports torch, and calls `set_up` by itself.
if Path((getattr(sys, "argv", None) or [""])[0]).name not in ("tq-hf", "tq-hf.exe"):
    set_up()
