"""What of transformers' continuous batching is copied, replaced or relied upon, as it was read in 5.19.0 to 5.24.0.

A failure says that transformers has changed a method. Read the change (`git log -p` of its file), do what it asks for
in the file named beside it, and put the new hash here, after the old one if both releases are supported.

transformers' own tests of continuous batching (`tests/generation/test_continuous_batching.py`) are in none of its
packages, and want a GPU and models of the hub. Their cases, as they were in the repository between 5.18 and 5.23, were
run by hand in 5.23.0 with our manager, on a CPU and tiny random models of the same families. Answers are compared with
those of `generate()` on a cache that encodes as pages do; a page of 32 tokens is one of 128 here, and texts grow alike.

| cases | |
|---|---|
| `config_combinations_{no,with}_compile`, `fast`, `long_generate`, `tuple_cuda_graph`, `diverse_models` | pass |
| `hybrid_sliding_window_crossing_parity`, `block_sharing_with_hybrid_model` | pass |
| `log_probs`, `per_request_logits_processors`, `num_return_sequences`, `streaming`, `register_result_handler` | pass |
| `few_blocks`, `cpu_offloading_{parity,parity_async,disabled_when_zero}` (memory not pinned) | pass |
| `async` (streams acted out), `pause_during_generation`, `pause_with_several_holders` | pass |
| `flash_attn_with_kvcache_parity`, `decode_fast_path_wide_batch_parity` (tables against lists) | pass |
| `switch_to_cb_friendly_attn` | passes for the name `turboquant_paged`, which is the only one |
| `prefix_sharing` | blocks match; the second answer is of a prefix read packed, as of a prompt in two chunks |
| `history_dependent_logits_processor` | those of `APPLIED` are applied (`test_options.py`), others refused |
| `memory_prediction` (attention masks and keys read back, which there are none of) | `test_pool_size.py` instead |
| `memory_footprint_respects_max_memory_percent`, `cuda_graph_capture_on_non_default_device` | need GPUs |
| `ContinuousBatchingTensorParallelTest` | need two GPUs; `test_ranks.py` has parity over two processes |
| allocators, pools, schedulers, ledgers, masks without a model | of transformers' own classes, nothing of ours |
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from transformers.generation.continuous_batching.cache import PagedAttentionCache, PagedAttentionMemoryHandler
from transformers.generation.continuous_batching.cache_allocators import (
    FullAttentionCacheAllocator,
    SlidingAttentionCacheAllocator,
)
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
    ContinuousMixin,
    OutputRouter,
)
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager
from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.scheduler import Scheduler

READ: dict[Any, dict[str, tuple[str, str]]] = {
    PagedAttentionCache: {
        "__init__": ("7846b73eca22 c64951fe6abb", "copied: batching/cache.py"),
        "search_prefix_match": ("cc74bff7058f", "extended: batching/cache.py"),
        "count_new_complete_blocks": ("17dfa11a642a", "relied upon: batching/allocators.py"),
        "mark_complete_blocks": ("f6255bb6c6a6", "relied upon: batching/batch_processor.py"),
    },
    PagedAttentionMemoryHandler: {
        "__init__": ("26595d2cfbe5 61c50474b2ea", "extended: batching/cache.py"),
        "bytes_per_cache_token": ("94a5f81fd8af", "replaced: batching/cache.py"),
        "_check_footprint": ("bfbf376d8b5b", "replaced: batching/cache.py"),
    },
    FullAttentionCacheAllocator: {
        "__init__": ("06ce8c87d7e0", "extended: batching/allocators.py"),
        "_after_cache_tensor_init": ("2bf4cdb6888b", "relied upon: TurboQuantAllocator.register_cache_tensor"),
        "register_cache_tensor": ("0c9818c5ca3c", "replaced: batching/allocators.py"),
        "_compute_blocks_needed": ("71fbbf2203c4", "replaced: batching/allocators.py"),
        "count_shareable_blocks": ("46700d88d003", "replaced: batching/allocators.py"),
        "fork_blocks": ("c73f27cabd47", "replaced: batching/allocators.py"),
        "acquire_prefix_blocks": ("3cb199bffc4b", "extended: batching/allocators.py"),
        "mark_complete_blocks": ("dc3b753e0caa", "replaced: batching/allocators.py"),
        "get_read_indices": ("90349db7f5f4", "replaced: batching/allocators.py"),
        "get_write_indices": ("f58a441a571c", "replaced: batching/allocators.py"),
        "fill_block_table": ("0d3765b80b69", "replaced: batching/allocators.py"),
    },
    SlidingAttentionCacheAllocator: {
        "__init__": ("3506e6cb878e", "extended: batching/allocators.py"),
        "_compute_blocks_needed": ("758d33181383", "relied upon: batching/allocators.py"),
        "get_read_indices": ("2ff31c15957c", "replaced: batching/allocators.py"),
        "get_write_indices": ("d952868d7219", "replaced: batching/allocators.py"),
        "fill_block_table": ("464bc1309ce8", "replaced: batching/allocators.py"),
    },
    ContinuousBatchingManager: {
        "_create_batch_processor": ("cc0fca82818d", "copied: batching/manager.py"),
        "switch_to_cb_friendly_attn": ("dbb1a528a718", "replaced: batching/manager.py"),
        "add_request": ("614fe428df5a", "extended: batching/manager.py"),
        "_generation_loop_body": ("b138833254b2", "wrapped: batching/manager.py"),
        "_handle_critical_error": ("84bd1f89da0d", "wrapped: batching/manager.py"),
        "_run_generation_loop": ("56c9cdba165c", "wrapped: batching/manager.py"),
        "_generation_step": ("33491329c3ae", "replaced: batching/manager.py"),
        "_fail_all_remaining_requests": ("f0d58d1d4c08", "extended: batching/manager.py"),
    },
    ContinuousBatchProcessor: {
        "__init__": ("589aafcfc508", "relied upon: makes the runner that batching/manager.py extends"),
        "_handle_request_error": ("61bcda761e41", "extended: batching/manager.py"),
        "update_batch": ("cbad955852af", "relied upon: batching/manager.py, allocators.py"),
    },
    OutputRouter: {
        "deliver_batch": ("837fee22f767", "extended: batching/requests.py"),
        "fail_and_deliver": ("aeb3ffdafba8", "replaced: batching/requests.py"),
    },
    Scheduler: {
        "_process_candidates": ("095deb6081af", "extended: batching/requests.py"),
        "_schedule_request": ("647344a9b5a0", "extended: batching/requests.py"),
        "clear_cancelled_requests": ("c3c5dd503929", "extended: batching/requests.py"),
    },
    OffloadingManager: {
        "offload_requests": ("750d6cb99a3a", "relied upon: which requests batching/manager.py starts anew"),
        "_offload_to_cpu": ("18c95c351539", "extended: batching/manager.py"),
    },
    ModelRunner: {
        "__init__": ("a9d4b9ef2f00", "relied upon: pads, and compiles no step without options for that"),
        "_capture_graph": ("cb51ab2309b2", "wrapped: batching/runner.py"),
        "compute_batch": ("7d4ae3f3ba63", "wrapped: batching/runner.py"),
        "run_one_warmup": ("8dc178e45660 10d2388427eb", "relied upon: batching/runner.py"),
        "_forward_process_and_sample": ("e326cff07072", "copied: batching/runner.py"),
        "_get_forward_fn": ("abc0848e4c59", "wrapped: batching/runner.py"),
        "_sample": ("e366edcd1b7c", "relied upon: BatchOptions.choose writes the same rows"),
    },
    RequestState: {
        "update_and_check_completion": ("db53d0d16360", "wrapped: batching/requests.py"),
        "to_generation_output": ("675cfc05c761", "extended: batching/requests.py"),
        "create_equivalent_initial_request": ("da32ec325450", "extended: batching/requests.py"),
        "fork": ("811b3294a921", "relied upon: copies what batching/requests.py adds"),
    },
    ContinuousMixin: {"init_continuous_batching": ("864a244a2534", "replaced: batching/entry.py")},
    ContinuousBatchingIOs: {
        "get_model_kwargs": ("ad765ba1a8e0", "relied upon: batching/allocators.py"),
        "prepare_batch_tensors": ("2d979073bbd4", "relied upon: batching/allocators.py"),
    },
}


def source_hash(method: Callable | property) -> str:
    function = method.fget if isinstance(method, property) else method
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:12]


@pytest.mark.parametrize(
    ("owner", "name"),
    [(owner, name) for owner, names in READ.items() for name in names],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_methods_of_transformers_are_as_they_were_read(owner: Any, name: str) -> None:
    known, ours = READ[owner][name]
    assert source_hash(inspect.getattr_static(owner, name)) in known.split(), (
        f"transformers has changed {owner.__name__}.{name}, which is {ours}."
    )
