"""transformers' continuous batching manager, on packed pages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import ceil
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, ContinuousBatchingManager, GenerationConfig, PreTrainedConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor, OutputRouter
from transformers.generation.continuous_batching.initialization import update_cb_config_after_cache_creation
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler, Scheduler
from transformers.generation.continuous_batching.utils import WorkloadHints, find_head_dim
from transformers.utils import logging

from ..balance import Balance
from ..compat import attention_of_parts, give_attention_back, outside_inference_mode
from ..config import TurboQuantConfig
from ..ops.backend import check_choice
from ..ops.triton.pages import supports_paged_decode
from ..saving import fingerprint
from ..tensors.blocks import BLOCK
from ..tensors.pages import rows_per_page
from .attention import NAME
from .checks import check_generation, check_graphs, check_model, paged_options
from .paged_cache import TurboQuantPagedCache


def scheduler_class(name: str) -> Callable[..., Scheduler]:
    """transformers' scheduler of that name, which refuses requests longer than the cache when they come."""
    kind: Any = SCHEDULER_MAPPING.get(name, FIFOScheduler)

    class CheckedScheduler(kind):
        def add_waiting_request(self, state: RequestState) -> None:
            self.cache.check_room(state)
            super().add_waiting_request(state)

    return CheckedScheduler


class TurboQuantBatchProcessor(ContinuousBatchProcessor):
    """transformers' processor, whose requests can fail without it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._wait_for_the_device()

    def reset(self) -> None:
        """Begin a session as if there had been none."""
        super().reset()
        self._wait_for_the_device()

    def _wait_for_the_device(self) -> None:
        """Wait for what is queued: the engine's streams do not.

        Inputs are reset on the current stream, and those of a step are copied to them on another: where that came
        first, a step was computed with zeros for its inputs. Pool and channel scales are on the current stream, too.
        """
        if self.cache.cache_tensor.is_cuda:
            torch.cuda.synchronize(self.cache.cache_tensor.device)

    def warmup(self, model: torch.nn.Module) -> None:
        """Capture graphs, one after the other.

        transformers copies the inputs of a warm-up to where the one before may still be reading its own. That is
        harmless to attention that takes any page for its, and leads ours out of the pool.
        """
        runner: Any = self.model_runner
        stream = self.inputs_and_outputs.compute_stream
        warm_up = runner.run_one_warmup

        def waited_for(*args: Any, **kwargs: Any) -> float:
            seconds = warm_up(*args, **kwargs)
            if stream is not None:
                stream.synchronize()
            return seconds

        runner.run_one_warmup = waited_for
        try:
            super().warmup(model)
        finally:
            del runner.run_one_warmup

    @property
    def _inputs(self) -> ContinuousBatchingIOs:
        """What the next step is written to."""
        io = self.inputs_and_outputs
        return io if isinstance(io, ContinuousBatchingIOs) else io.io_pairs[io.current_pair].host_io

    # A request of which only the last token is left is in a step without tokens before it is forked. transformers does
    # not reckon with that: it forgets as many indices of the step before as there are tokens and reads as many as there
    # are requests, and models cannot compute nothing.

    def prepare_next_batch(self) -> bool:
        """Choose the requests of the next step and write its inputs."""
        self._inputs.logits_indices.zero_()
        return super().prepare_next_batch()

    def _generation_step(self, model: torch.nn.Module) -> None:
        if self._inputs.num_q_tokens:
            super()._generation_step(model)
        else:
            self.inputs_and_outputs.retrieve_device_outputs()

    def _handle_request_error(self, error: Exception, state: RequestState) -> None:
        if isinstance(error, ValueError):
            router: Any = self.output_router
            router.refused[state.request_id] = str(error)
        super()._handle_request_error(error, state)
        # Somebody waits for its forks, too, which are not made yet.
        for i in range(state.num_children):
            child = RequestState(f"{state.request_id}__child#{i}", initial_tokens=state.initial_tokens)
            self.output_router.fail_and_deliver(child, error)

    def fail_step(self, error: Exception, in_step: bool) -> None:
        """Fail the requests of a step that raised `error` and forget the step.

        Args:
            error: What they are told.
            in_step: Whether the model was computing. If not, or if another step is under way, all active requests fail.
        """
        scheduler, io = self.scheduler, self.inputs_and_outputs
        failed: dict[str, RequestState] = dict(scheduler.active_requests)
        if in_step and isinstance(io, ContinuousBatchingIOs):
            computed = {future.state.request_id for future in io.requests_in_batch}
            failed = {name: state for name, state in failed.items() if name in computed}
        for name, state in failed.items():
            self._handle_request_error(error, state)
            self.offloading_manager.free_request_cpu_cache(state)
            scheduler.finish_request(name)
        scheduler._requests_to_fork = [s for s in scheduler._requests_to_fork if s.request_id not in failed]
        scheduler.block_new_requests = False
        io.reset()
        self._wait_for_the_device()


logger = logging.get_logger(__name__)

UNKNOWN_LENGTH = 32_768
"""Tokens that block tables have room for where nobody says how long requests are. Longer ones are served by lists."""


class AnswerRouter(OutputRouter):
    """transformers' router, which knows the ids that are still to be answered.

    Two requests of one id would share their pages, their tokens and their answer.
    """

    def __init__(self) -> None:
        super().__init__()
        self._open: set[str] = set()
        self.refused: dict[str, str] = {}
        """Requests that were not taken, and why, until `reason` is asked."""

    def claim(self, request_id: str) -> str:
        """`request_id`, with a number behind it if a request of that id is being answered."""
        with self._lock:
            claimed, number = request_id, 1
            while claimed in self._open:
                number += 1
                claimed = f"{request_id}#{number}"
            self._open.add(claimed)
        return claimed

    def release(self, request_id: str) -> None:
        """The request of this id is answered, or was dropped."""
        with self._lock:
            self._open.discard(request_id)

    def _note(self, output: GenerationOutput) -> None:
        if output.status in (RequestStatus.FINISHED, RequestStatus.FAILED):
            self.release(output.request_id)

    def deliver(self, output: GenerationOutput) -> None:
        """Hand a result to whoever waits for it."""
        super().deliver(output)
        self._note(output)

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        """Hand results to whoever waits for them."""
        super().deliver_batch(outputs)
        for output in outputs:
            self._note(output)


class WakeUp(threading.Event):
    """What wakes the loop: a request, a cancellation, a pause or a stop.

    transformers' own looks every tenth of a second, with or without requests.
    """

    idle = False
    """Whether nothing can happen before it is set."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set; for so many seconds at most, unless idle."""
        return super().wait(None if self.idle else timeout)


class TurboQuantBatchingManager(ContinuousBatchingManager):
    """Generates for many requests, whose tokens it holds in packed pages.

    It is used as transformers' (`start`, `add_request`, `get_result`, `stop`, ...), and made by `TurboQuantBatching` or
    `continuous_batching`. While it holds the model, that takes no other calls.

    Args:
        model: A decoder whose layers are full attention, or some of them sliding windows.
        generation_config: How answers are generated.
        continuous_batching_config: The engine's options. CUDA graphs of decode steps, asynchronous batching and the
            decode path by block tables are on where they are not set and the device has them.
        workload_hints: What is known of the requests.
        config: What pages are encoded with (see `tq_hf.batching.checks.pages_config`).
        balance: Channel scales of the model's channels; without, channels are not balanced.

    Raises:
        ValueError: The model, the options or the way of generating are none that packed pages serve.
    """

    output_router: AnswerRouter
    _wake_up_loop: WakeUp

    def __init__(
        self,
        model: Any,
        generation_config: GenerationConfig,
        continuous_batching_config: ContinuousBatchingConfig,
        workload_hints: WorkloadHints | None = None,
        *,
        config: TurboQuantConfig,
        balance: Balance | None = None,
    ) -> None:
        check_choice()
        check_model(model, config)
        check_generation(generation_config)
        check_graphs(model, continuous_batching_config)
        self.config = config
        self.balance = balance
        self._computing = False
        self._left: tuple[torch.device, dict[str, Any]] | None = None
        """Where the model was at the end of the last session, whose pages are kept, and its fingerprint."""
        # transformers' `_original_attn_impl` is one name, that of the whole, and stays `None`.
        self._own_attention: list[tuple[PreTrainedConfig, str | None]] = []
        given = continuous_batching_config
        on_cuda = model.device.type == "cuda"
        options = paged_options(given)
        states = torch.empty(0, dtype=model.dtype, device=model.device)
        layout = config.layout(find_head_dim(model.config.get_text_config()))
        kernels = on_cuda and supports_paged_decode(states, config, layout)
        if on_cuda and given.use_cuda_graph is None:
            # Steps with prompts come in all sizes, and each would be a graph of its own. Without kernels lengths are
            # read on the host, which no graph can hold.
            options.use_cuda_graph = (False, kernels)
        if on_cuda and given.use_async_batching is None:
            options.use_async_batching = True
        # What transformers knows of block tables is said of names like "flash": it would set 0, and warn if one asks.
        options.max_blocks_per_request = options.decode_compile_config = None
        with self._giving_back_on_failure():
            super().__init__(model, generation_config, options, workload_hints)
        self.output_router = AnswerRouter()
        self._wake_up_loop = WakeUp()
        resolved = self.continuous_batching_config
        resolved.decode_compile_config = given.decode_compile_config
        resolved.max_blocks_per_request = given.max_blocks_per_request
        if resolved.max_blocks_per_request is None:
            resolved.max_blocks_per_request = self._table_width(workload_hints)

    def generates_as(self, generation_config: GenerationConfig) -> bool:
        """Whether this manager answers as asked for. New tokens, which come with each request, may be fewer or more."""
        mine, asked = self.generation_config.to_dict(), generation_config.to_dict()
        return mine | {"max_new_tokens": None} == asked | {"max_new_tokens": None}

    def can_go_on(self) -> bool:
        """Whether the model is as it was at the end of the last session. Of other weights or adapters are other keys
        and values, and other graphs."""
        if self._left is not None:
            device, identity = self._left
            if self.model.device != device or fingerprint.identify(self.model) != identity:
                return False
            self._left = None  # read once a session
        return True

    def _table_width(self, hints: WorkloadHints | None) -> int:
        """Pages of the longest request: as the hints say, at most what the model was made for."""
        decoder = self.model.config.get_text_config()
        longest = getattr(decoder, "max_position_embeddings", None) or UNKNOWN_LENGTH
        hinted = hints.max_prompt_length + hints.max_generated_length if hints is not None else 0
        if hinted:
            longest = min(longest, hinted)
        ring = BLOCK // rows_per_page(self.config.layout(find_head_dim(decoder)), self.model.dtype)
        return ring + min(1, self.config.sink_tokens) + ceil(longest / BLOCK)

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Let the model attend to packed pages, whatever it uses elsewhere."""
        decoder = model.config.get_text_config()
        if not model.config._attn_implementation == decoder._attn_implementation == NAME:
            self._own_attention = attention_of_parts(model)
            model.set_attn_implementation(NAME)

    def _give_attention_back(self) -> None:
        """Let every part of the model attend as before, where this manager has changed that."""
        give_attention_back(self._own_attention)
        self._own_attention = []

    @contextmanager
    def _giving_back_on_failure(self) -> Iterator[None]:
        """Give the model its own attention back on an exception: nobody has a manager then to do it."""
        try:
            yield
        except BaseException:
            self._give_attention_back()
            raise

    def add_request(
        self, input_ids: list[int], request_id: str | None = None, *args: Any, **options: Any
    ) -> str | None:
        """Add a request, as transformers' method does.

        Returns:
            The id of its answer: `request_id`, or that with a number behind it while another request has it; `None` if
            the request was dropped.
        """
        if request_id is None:
            with self._request_lock:
                request_id = f"req_{self._request_counter}"
                self._request_counter += 1
        request_id = self.output_router.claim(request_id)
        added = super().add_request(input_ids, request_id, *args, **options)
        if added is None:
            self.output_router.release(request_id)
        return added

    def join(self, *args: Any, **options: Any) -> None:
        """Wait for the thread that generates to end."""
        self._wake_up_loop.set()
        super().join(*args, **options)

    def warmup(self) -> None:
        """Make the pool, and on a GPU capture the graphs of decode steps."""
        with self._giving_back_on_failure():
            super().warmup()

    def start(self) -> None:
        """Start the background thread that generates.

        Raises:
            ValueError: The model has changed since the last session, whose pages are kept.
        """
        if not self.can_go_on():
            self._give_attention_back()  # which transformers' own `init_continuous_batching` has switched
            raise ValueError(
                "The model's weights, adapters, dtype or device have changed since this manager's last session, whose "
                "pages and graphs it keeps. Make a new one: `destroy_cached_continuous_batching_manager()`, then "
                "`init_continuous_batching()`."
            )
        # `stop` gave the model its own attention back, and a kept manager may be started again.
        self.switch_to_cb_friendly_attn(self.model)
        super().start()

    def stop(self, *args: Any, **kwargs: Any) -> None:
        """Stop the background thread, as transformers' `stop`, and give the model its own attention back."""
        super().stop(*args, **kwargs)
        self._wake_up_loop.set()
        self._give_attention_back()
        if self.batch_processor is not None:
            self._left = self.model.device, fingerprint.identify(self.model)

    # transformers' own, with the classes of cache, scheduler and processor replaced, which it names outright
    # (tests/batching/test_upstream.py tells when it changes).
    @outside_inference_mode
    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        if self.batch_processor is not None:
            self.batch_processor.reset()
            return self.batch_processor
        options, keeps = self.continuous_batching_config, getattr(self.model, "_supports_logits_to_keep", None)
        decoder = self.model.config.get_text_config()
        cache = TurboQuantPagedCache(
            self.config,
            {} if self.balance is None else self.balance.layers,
            config=decoder,
            continuous_batching_config=options,
            device=self.model.device,
            distributed_helper=self.distributed_helper,
            dtype=self.model.dtype,
            model_supports_logits_to_keep=callable(keeps) and keeps(),
        )
        self._use_prefix_sharing = cache.use_prefix_sharing
        update_cb_config_after_cache_creation(
            cb_config=options, num_blocks=cache.num_blocks, max_batch_tokens=cache.max_batch_tokens
        )
        scheduler = scheduler_class(options.scheduler_type)(
            cache=cache, safety_margin=options.safety_margin, max_requests_per_batch=options.max_requests_per_batch
        )
        return TurboQuantBatchProcessor(
            cache=cache,
            config=decoder,
            generation_config=self.generation_config,
            continuous_batching_config=options,
            logit_processor=self.logit_processor,
            input_queue=self.input_queue if self.is_tp_driver else None,
            cancel_queue=self.cancel_queue if self.is_tp_driver else None,
            output_router=self.output_router,
            background_thread_status=self.background_thread_status,
            model_device=self.model.device,
            model_dtype=self.model.dtype,
            scheduler=scheduler,
            distributed_helper=self.distributed_helper,
        )

    def _generation_step(self) -> None:
        self._computing = True
        super()._generation_step()
        self._computing = False

    def _generation_loop_body(self, batch_processor: ContinuousBatchProcessor, bootstrapping: bool) -> bool:
        """One step. If it fails, so do its requests, and the loop goes on with the others."""
        # Ranks of a group look at one another again and again.
        alone = self.distributed_helper.tp_size == 1
        self._wake_up_loop.idle = alone and not batch_processor.has_pending_requests()
        try:
            return super()._generation_loop_body(batch_processor, bootstrapping)
        except Exception as error:
            # A broken device computes nothing any more, and other ranks wait for this one: the loop must end.
            if isinstance(error, torch.AcceleratorError) or self.distributed_helper.tp_size > 1:
                raise
            logger.error(f"A step of continuous batching failed, and its requests with it: {error}", exc_info=True)
            assert isinstance(batch_processor, TurboQuantBatchProcessor)
            batch_processor.fail_step(error, self._computing)
            self._computing = False
            return True
