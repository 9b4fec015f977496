"""Names of transformers and torch that this package stands on, derived from its own source.

`python -m tests.support.fence` writes them to `tq_hf/required_names.json`, which every way checks at its start.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch._dynamo.eval_frame import OptimizedModule
from transformers import AutoModel, GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer, EncoderDecoderCache, LinearAttentionLayer
from transformers.generation.stopping_criteria import EosTokenCriteria
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import tq_hf
from tq_hf import compat

attributes_of = lru_cache(compat.attributes_of)

CACHE, GRAPHS, BATCHES, SERVER = "TurboQuantCache", "graph_decoding", "continuous batching", "tq-hf serve"
"""The ways, each with a check at its start."""


def by_name(owners: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {name: kinds for names, kinds in owners.items() for name in names.split()}


OWNERS = by_name(
    {
        "model": [PreTrainedModel, GenerationMixin],
        "config generation_config decoder": [PreTrainedConfig, GenerationConfig, GenerationMixin, PreTrainedModel],
        "cache": [Cache, EncoderDecoderCache],
        "AutoConfig AutoModelForCausalLM AutoTokenizer ContinuousBatchingConfig": [AutoModel],
        "layer module": [DynamicSlidingWindowLayer, LinearAttentionLayer, torch.nn.Module],
        "inner": [OptimizedModule],
        "kind": [AutoModel],
        "type": [GenerationMixin],
        "c criterion": [EosTokenCriteria],
    }
)
"""Classes that may own what is read from a variable or an attribute of this name."""
ENGINE: dict[str, list[Any]] = {}
"""As `OWNERS`, for batches and the server."""
FRAMES = {
    "asked_by": [
        (transformers.masking_utils, "create_causal_mask"),
        (GenerationMixin, "_prefill(._valid_auto_compile_criteria)"),
        (GenerationMixin, "_valid_auto_compile_criteria(.is_compileable)"),
    ],
    "model_about_to_switch": [(GenerationMixin, "prepare_inputs_for_generation")],
    "cache_of_caller": [(transformers.masking_utils, f"_preprocess_mask_arguments({compat.CACHE_NAME})")],
    "length_of_generation": [
        (GenerationMixin, "_prefill(generation_config)"),
        (GenerationMixin, "_assisted_decoding(generation_config)"),
    ],
    "padding_mask_of_caller": [
        (transformers.masking_utils, "_preprocess_mask_arguments(attention_mask,.get_mask_sizes)")
    ],
    "arguments_of_generate": [(GenerationMixin, "generate(assistant_model,streamer,synced_gpus)")],
}
"""What functions of `tq_hf.compat` read from the frames of their callers."""
REGISTERED: dict[str, Any] = {
    "turboquant_attention": sdpa_attention_forward,
    "turboquant_paged_attention": sdpa_attention_forward,
    "turboquant_mask": sdpa_mask,
}
"""Functions of ours that transformers calls in place of its own."""
OF_MODELS = {
    *("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim", "hidden_size", "num_hidden_layers"),
    *("vocab_size", "to_dict", "device_mesh", "eos_token_id", "pad_token_id"),
}
"""Names that configs and modules of some models have, and no class of transformers for all models."""
DUCKS: dict[str, list[Any]] = {"RequestStates": [Cache]}
"""What a class of ours stands in for, by its name."""
NESTED: list[type] = []
"""Classes that functions of ours make."""
STEP: Any = object
"""Type of the arguments of a step of the engine."""
NEWER = (
    "StaticLayer.crop",
    "StaticSlidingWindowLayer.crop",
    "Cache.get_conv_state",
    "Cache.get_recurrent_state",
    "Cache.is_recording_past",
    "utils.drain_queue",
    "masking_utils._preprocess_mask_arguments",
)
"""Names, or their parameters, that the oldest supported version lacks."""
OTHERS = {
    *("_fields", "_replace", "_getframe", "_states", "_abc_impl", "_backward_cls", "acquire", "release", "close"),
    "submit",
    *("_C", "_dynamo", "_inductor"),  # modules of torch, whose names are noted
    "_cuda_getCurrentRawStream",  # only in builds with CUDA
}
"""Names of Python's own, and of our classes."""


if Version(transformers.__version__) >= Version("5.19"):
    from transformers import ContinuousBatchingConfig
    from transformers.generation.continuous_batching import cache, cache_allocators, input_outputs, utils
    from transformers.generation.continuous_batching import continuous_api as api
    from transformers.generation.continuous_batching import requests as states
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator
    from transformers.generation.continuous_batching.distributed import DistributedHelper
    from transformers.generation.continuous_batching.model_runner import ModelRunner
    from transformers.generation.continuous_batching.offloading_manager import OffloadingManager
    from transformers.generation.continuous_batching.scheduler import FIFOScheduler

    from tq_hf.batching import requests as our_requests

    DUCKS["_WithOptions"] = [api.ContinuousBatchingManager]
    NESTED.append(our_requests.scheduler_class("fifo"))  # type: ignore[arg-type]
    ALLOCATORS = [cache_allocators.FullAttentionCacheAllocator, cache_allocators.SlidingAttentionCacheAllocator]
    STEP = input_outputs.PagedAttentionArgs
    IOS = [input_outputs.ContinuousBatchingIOs, input_outputs.ContinuousBatchingAsyncIOs]
    ENGINE = by_name(
        {
            "model": [api.ContinuousMixin, api.ContinuousBatchingManager],
            "state child s made failed": [states.RequestState],
            "request future": [states.FutureRequestState],
            "output newest": [states.GenerationOutput],
            "scheduler": [FIFOScheduler],
            "continuous_batching_config options requested resolved cb_config": [ContinuousBatchingConfig],
            "hints requests": [utils.WorkloadHints],
            "distributed_helper helper": [DistributedHelper],
            "memory": [cache.PagedAttentionMemoryHandler],
            "cache": [cache.PagedAttentionCache],
            "pool": [cache_allocators.CachePool],
            "ledger": [cache_allocator.BlockLedger],
            "allocator own windows each": ALLOCATORS,
            "states": [*ALLOCATORS, states.RequestState],
            "output_router": [api.OutputRouter],
            "runner": [ModelRunner],
            "batch_processor": [api.ContinuousBatchProcessor],
            "background_thread_status": [api.BackgroundThreadStatus],
            "offloading_manager offloading": [OffloadingManager],
            "manager other": [api.ContinuousBatchingManager],
            "io pairs host device inputs_and_outputs _inputs": IOS,
            "pair io_pairs": [input_outputs.HostDeviceIOPair],
        }
    )


def is_foreign(kind: Any) -> bool:
    """Whether a class, function or module is torch's or transformers'."""
    name = kind.__name__ if isinstance(kind, ModuleType) else str(getattr(kind, "__module__", ""))
    return name.partition(".")[0] in ("torch", "transformers")


def place(owner: Any) -> str:
    """Address of a class or a module, for `pkgutil.resolve_name`."""
    return owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}:{owner.__qualname__}"


def is_documented(owner: Any) -> bool:
    """Whether the public names of a class or a module are documented, and change with a warning only."""
    address = place(owner)
    if address.startswith("torch"):
        return not address.startswith("torch._")
    if "cache_utils" in address or "continuous_batching" in address or "ContinuousBatching" in address:
        return False
    return hasattr(transformers, owner.__name__) or address == "transformers.utils.logging"


def parameters(function: Any) -> list[str]:
    """Names by which a function takes arguments, in their order."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    named = [each.name for each in found if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    return [name for name in named if name not in ("self", "cls")]


KINDS = (dict, list, str, set, int, type, torch.Tensor, torch.nn.Module, OrderedDict, ThreadPoolExecutor)
PLAIN = {name for kind in KINDS for name in dir(kind)}


class Source:
    """A module of ours, its tree, and the ways that stand on it."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.known = module, vars(module)
        self.tree = ast.parse(Path(module.__file__ or "").read_text())
        self.classes = {node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)}
        self.arguments: dict[int, list[int | str]] = {}
        """Positions and names of the arguments of each call, by the id of its function's node."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                named = [each.arg for each in node.keywords if each.arg]
                starred = [isinstance(each, ast.Starred) for each in node.args] + [True]
                self.arguments[id(node.func)] = [*range(starred.index(True)), *named]
        others = {str(getattr(kind, "__module__", "")) for kind in self.known.values()}
        serves = any(each.startswith("transformers.cli") for each in others)
        rooms = {"batching": BATCHES, "graph_decoding": GRAPHS, "tools": SERVER if serves else CACHE}
        self.way = rooms.get(module.__name__.split(".")[1], CACHE)

    def defined(self) -> Iterator[str]:
        """Names of functions, classes, variables, and attributes of `self`."""
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield node.name
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if ast.unparse(node.value) == "self":
                    yield node.attr


class Fence:
    """What our modules need of others, by way, owner and name: the parameters that are used."""

    def __init__(self) -> None:
        self.found: Any = defaultdict(lambda: defaultdict(lambda: defaultdict(set)))
        self.unknown: set[str] = set()
        """Reads whose owner is in no table."""
        walked = pkgutil.walk_packages(tq_hf.__path__, "tq_hf.")
        self.sources = [Source(importlib.import_module(each.name)) for each in walked]
        self.nodes = {name: (source, node) for source in self.sources for name, node in source.classes.items()}
        self.ours = {name for source in self.sources for name in source.defined()}
        engine = [
            kind
            for name, module in list(sys.modules.items())
            if name.startswith(("transformers.generation", "transformers.cache_utils", "transformers.cli"))
            for kind in vars(module).values()
            if isinstance(kind, type) and getattr(kind, "__module__", "") == name
        ]
        self.theirs = {name for kind in engine for name in {*dir(kind), *attributes_of(kind)}} - PLAIN
        kinds = {kind for source in self.sources for kind in source.known.values() if isinstance(kind, type)}
        for kind in sorted(kinds | {*NESTED}, key=lambda kind: kind.__name__):
            if kind.__module__.startswith("tq_hf") and kind.__name__ in self.nodes:
                self._overridden(kind)
        for source in self.sources:
            self._read(source)

    def need(self, ways: Iterator[str] | list[str], owner: Any, name: str, parts: Any = ()) -> bool:
        """Note a name of a class or a module, if there is one. Returns whether there is."""
        if hasattr(owner, name):
            known = parameters(getattr(owner, name)) if place(owner).startswith("transformers") else []
            parts = {known[part] if part in range(len(known)) else part for part in parts}
            parts = {part for part in parts if part in known or str(part).startswith(".")}
        elif isinstance(owner, type) and name in attributes_of(owner):
            name, parts = f".{name}", set()
        else:
            return False
        for way in ways if parts or name != "__init__" else ():
            way = SERVER if ".cli." in place(owner) else BATCHES if "continuous_batching" in place(owner) else way
            self.found[way][owner][name] |= parts
        return True

    def _overridden(self, kind: type) -> None:
        """Note what a class of ours overrides of others, and what its methods read of `self` and `super()`."""
        bases = [each for each in kind.__mro__ if is_foreign(each)] + DUCKS.get(kind.__name__, [])
        ours = [each for each in kind.__mro__ if each.__module__.startswith("tq_hf")]
        ways = [self.nodes[kind.__name__][0].way]
        if not bases:
            return

        def need(name: str, parts: Any = ()) -> bool:
            own = getattr(object, name, None)
            having = (base for base in bases if getattr(base, name, own) is not own or name in attributes_of(base))
            return any(self.need(ways, base, name, parts) for base in having)

        for name, value in vars(kind).items():
            if (name not in OTHERS and not name.startswith("__")) or name == "__init__":
                need(name, parameters(value) if name != "__init__" and inspect.isroutine(value) else ())
        for each in ours:
            source, tree = self.nodes[each.__name__]
            for node in ast.walk(tree):
                if not isinstance(node, ast.Attribute):
                    continue
                parts = source.arguments.get(id(node), ())
                if ast.unparse(node.value) == "super()":
                    need(node.attr, parts)
                elif ast.unparse(node.value) in ("self", "cls") and not any(node.attr in vars(one) for one in ours):
                    if not need(node.attr, parts) and node.attr not in self.ours and node.attr[:2] != "__":
                        self.unknown.add(f"{kind.__name__}.{node.attr}")

    def _read(self, source: Source) -> None:
        """Note what a module reads of others, besides `self`."""
        functions = {node.name: node for node in source.tree.body if isinstance(node, ast.FunctionDef)}
        for node in source.tree.body:
            ways = [source.way]
            if source.module.__name__ == "tq_hf.compat" and isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                ways = sorted(self._users(node.name, functions))
                for owner, item in FRAMES.get(node.name, ()):
                    name, _, parts = item.rstrip(")").partition("(")
                    assert self.need(ways, owner, name, parts.split(","))
                if "_getframe" in ast.unparse(node) and node.name not in FRAMES:
                    self.unknown.add(f"{node.name} reads frames")
            self._walk(source, node, ways, {})

    def _users(self, name: str, functions: dict[str, Any]) -> set[str]:
        """Ways that use a function of `tq_hf.compat`."""
        used = {each.way for each in self.sources if name in each.known and each.module.__name__ != "tq_hf.compat"}
        for other, node in functions.items():
            if other != name and any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(node)):
                used |= self._users(other, functions)
        return used or {CACHE}

    def _walk(self, source: Source, node: ast.AST, ways: list[str], types: dict[str, Any]) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            types = types | {each.arg: self._class(source, each.annotation, {}) for each in arguments}
        if isinstance(node, ast.ImportFrom) and node.col_offset and "continuous" in str(node.module) and not node.level:
            for each in node.names:
                self.need(ways, importlib.import_module(str(node.module)), each.name)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls", "super()"):
            self._attribute(source, node.value, node.attr, ways, types, source.arguments.get(id(node), ()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("getattr", "hasattr") and len(node.args) > 1:
                said = node.args[1]
                name = said.value if isinstance(said, ast.Constant) else source.known.get(ast.unparse(said))
                if isinstance(name, str):
                    self._attribute(source, node.args[0], name, ways, types, ())
            called = source.known.get(node.func.id)
            given = source.arguments[id(node.func)]
            if called is not None and is_foreign(called) and given and called.__module__.startswith("transformers"):
                if any(isinstance(each, str) for each in given) or not is_documented(called):
                    self.need(ways, sys.modules[called.__module__], called.__name__, given)
            if isinstance(called, type) and called.__module__.startswith("tq_hf"):
                for base in [each for each in called.__mro__ if is_foreign(each)][:1]:
                    if forwarded := {each for each in given if isinstance(each, str)}.difference(parameters(called)):
                        self.need(ways, base, "__init__", forwarded)
        if isinstance(node, ast.FunctionDef) and node.name in REGISTERED:
            function, read = REGISTERED[node.name], parameters(source.known[node.name])
            read += [each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and each.value]
            self.need(ways, sys.modules[function.__module__], function.__name__, read)
        if isinstance(node, ast.Constant) and source.way == BATCHES and node.value in inspect.get_annotations(STEP):
            self.need(ways, STEP, node.value)
        for child in ast.iter_child_nodes(node):
            self._walk(source, child, ways, types)

    def _class(self, source: Source, node: ast.AST | None, types: dict[str, Any]) -> Any:
        """Class or module of others that an expression or an annotation stands for, or `None`."""
        if isinstance(node, ast.BinOp):  # `X | None`
            return self._class(source, node.left, types)
        if isinstance(node, ast.Name):
            found = types.get(node.id) or source.known.get(node.id)
        elif isinstance(node, ast.Attribute):
            found = getattr(self._class(source, node.value, types), node.attr, None)
        else:
            return None
        if isinstance(found, type) and found.__module__.startswith("tq_hf"):
            found = next((each for each in found.__mro__ if is_foreign(each)), None)
        return found if isinstance(found, (type, ModuleType)) and is_foreign(found) else None

    def _attribute(self, source: Source, value: ast.AST, name: str, ways: Any, types: Any, parts: Any) -> None:
        if name in OTHERS or (name.startswith("__") and name.endswith("__")):
            return
        private, owner = name.startswith("_"), self._class(source, value, types)
        while isinstance(value, (ast.Subscript, ast.Call)):
            value = value.value if isinstance(value, ast.Subscript) else value.func
        receiver = ast.unparse(value).split(".")[-1]
        tables = [ENGINE, OWNERS] if source.way in (BATCHES, SERVER) else [OWNERS]
        owners = [owner] if owner is not None else [kind for table in tables for kind in table.get(receiver, ())]
        for each in owners:
            if not private and is_documented(each):
                return
            if self.need(ways, each, name, parts):
                return
        if (private or name in self.theirs) and name not in self.ours | PLAIN | OF_MODELS:
            self.unknown.add(f"{source.module.__name__}: {ast.unparse(value)}.{name}")


def record(fence: Fence) -> dict[str, dict[str, str]]:
    """The names as `tq_hf/required_names.json` has them."""
    return {
        way: {
            place(owner): " ".join(
                "+" * (f"{owner.__name__}.{name}".endswith(NEWER)) + name + f"({','.join(sorted(parts))})" * bool(parts)
                for name, parts in sorted(names.items())
            )
            for owner, names in sorted(owners.items(), key=lambda pair: place(pair[0]))
        }
        for way, owners in sorted(fence.found.items())
    }


if __name__ == "__main__":
    fence = Fence()
    assert not fence.unknown, f"Say in this file whose these are: {sorted(fence.unknown)}"
    Path(tq_hf.__file__).with_name("required_names.json").write_text(json.dumps(record(fence), indent=1) + "\n")
