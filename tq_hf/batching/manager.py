"""transformers' continuous batching manager on packed pages: sessions, threads, schedulers."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from transformers import ContinuousBatchingConfig, ContinuousBatchingManager, GenerationConfig, PreTrainedConfig
from transformers.generation.continuous_batching.cache_allocators import FULL_ATTENTION
from transformers.generation.continuous_batching.continuous_api import BackgroundThreadStatus, ContinuousBatchProcessor
from transformers.generation.continuous_batching.initialization import (
    resolve_compile_configs,
    update_cb_config_after_cache_creation,
)
from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.utils import WorkloadHints
from transformers.utils import logging

from ..compat import attention_of_parts, layer_types_known, outside_inference_mode, restore_attention
from ..config import number_of_positions
from ..ops.dispatch import check_choice
from ..prepared import join, needs_of_graphs, separate
from ..saving import fingerprint
from .allocators import TableShape, layer_kinds, paged_layers
from .batch_processor import TurboQuantBatchProcessor
from .cache import TurboQuantPagedCache
from .checks import check_model, default_requests, engine_options
from .grammars import Grammars
from .layers import NAME
from .options import RequestOptions, number, options_of, prompt_ids, shown, with_defaults
from .processors import OPTIONS, BatchOptions, answer_ids
from .requests import SHORT_STEPS, AnswerRouter, Detokenizer, StepAbandoned, WakeUp, one_line, scheduler_class

logger = logging.get_logger(__name__)

UNKNOWN_LENGTH = 32_768
"""Tokens that a block table covers if neither hints nor the model set a limit. Longer requests need lists instead."""

serving: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""The manager that serves a model, by model, from `start` until the thread ends."""
starting = threading.Lock()
"""Held while a manager looks whether another one serves its model, and starts."""
own_attention: WeakKeyDictionary[Any, list[tuple[PreTrainedConfig, str | None]]] = WeakKeyDictionary()
"""Attention of the parts of a model before a manager switched it."""


class TurboQuantBatchingManager(ContinuousBatchingManager):
    """Manager that generates answers to many requests, with cached tokens in packed pages.

    `TurboQuantBatching` and `continuous_batching` create managers. The methods are those of transformers' manager
    (`start`, `add_request`, `get_result`, `stop`, ...). Between `start` and `stop` the model takes no other calls.

    Args:
        batching: The `TurboQuantBatching`, with a model, its encoding, balance, tokenizer and folder of prefixes.
        generation_config: Generation config of all answers.
        continuous_batching_config: Options of the engine. By default, if the device supports them, decode steps and
            those with few tokens of prompts are CUDA graphs, batches asynchronous, and block tables used.
        workload_hints: Lengths and number of requests, if known.

    Raises:
        ValueError: Packed pages do not support the model, an option or the generation config.
    """

    output_router: AnswerRouter
    _wake_up_loop: WakeUp
    _processor: TurboQuantBatchProcessor | None = None
    """Processor of the steps of the thread. `stop` may let go of `batch_processor` before the thread ends."""

    def __init__(
        self,
        batching: Any,
        generation_config: GenerationConfig,
        continuous_batching_config: ContinuousBatchingConfig,
        workload_hints: WorkloadHints | None = None,
    ) -> None:
        model, config, balance, tokenizer = batching.model, batching.config, batching.balance, batching.tokenizer
        check_choice()
        dense, self.probe = check_model(model, config)
        decoder = model.config.get_text_config()
        _, _, key_dim, value_dim, _ = self.probe.specs[paged_layers(decoder)[FULL_ATTENTION][0]]
        self.layout = layout = config.of_layer(decoder).layout(key_dim, value_dim)
        """Sizes of a block in any full-attention layer."""
        self.model, self.vocabulary = model, decoder.vocab_size
        self.detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        default = self.options_of(generation_config, {}, 0)
        requested = continuous_batching_config
        options = engine_options(model, layout, requested, dense, default.do_sample or default.has_history)
        self.config, self.balance, self.prefix_cache = config, balance, batching.prefix_cache
        self.streams, self._cancelled = dict[torch.device, Any](), set[str]()
        """Ids of cancelled requests, cleared when the engine is idle."""
        self._keeps_pages = False
        self.graphs_are_requested = requested.use_cuda_graph is not None
        hints = workload_hints or WorkloadHints()
        known = requested.num_blocks is None and 0 not in (hints.max_generated_length, hints.num_requests)
        # Requests of a batch are known, and none comes later that could wait for them.
        ours = requested.max_batch_tokens is None and not hints.num_requests and model.device.type == "cpu"
        name = requested.scheduler_type
        self._scheduler = scheduler_class(SHORT_STEPS if ours and name != "prefill_first" else name)
        self._ended = threading.Event()
        self._ended.set()
        self.requests = hints if known else None
        self.pool_hints = self.requests or default_requests(model, requested)
        """Requests that are known and limit the size of the pool, and those that do; `None` if memory or the user's
        options set the size."""
        self._last_model: tuple[Any, ...] | None = None
        """Identity of the model in the last session. Pages kept from it depend on it."""
        self._is_checked = False
        """Whether `_last_model` was compared with the model for the session that begins or runs."""
        # transformers uses block tables only for attention with "flash" in its name. Otherwise it sets 0 or warns.
        options.max_blocks_per_request = options.decode_compile_config = None
        options.default_compile_level = 0  # our runner compiles layers
        with self._restoring_on_failure(), layer_types_known(layer_kinds(decoder)):
            # transformers would create processors for all requests from the generation config.
            super().__init__(model, GenerationConfig(eos_token_id=-1), options, workload_hints)
        self.generation_config = generation_config
        self.default_options, self.num_return_sequences = default, default.num_return_sequences
        self.output_router = AnswerRouter()
        self.grammars = Grammars(tokenizer, self.vocabulary, self.distributed_helper.tp_size)
        # The loop waits between its steps, with a processor.
        self._wake_up_loop = WakeUp(lambda: cast(Any, self._processor).work_ahead(self.model))
        resolved, cb_config = self.continuous_batching_config, copy(requested)
        resolve_compile_configs(cb_config, None, is_flash_attn=True, decode_fast_path_available=True)
        # Not in the options: transformers would compile its own step, which chooses by one set of options for all.
        self.compile_config = cb_config.decode_compile_config
        resolved.max_blocks_per_request = requested.max_blocks_per_request
        if resolved.max_blocks_per_request is None:
            # Size tables for the longest request, by the hints and the model's limit.
            longest = number_of_positions(decoder) or UNKNOWN_LENGTH
            longest = min(longest, (hints.max_prompt_length + hints.max_generated_length) or longest)
            resolved.max_blocks_per_request = TableShape.of(config, layout, model.dtype).width(longest)

    def suits(self, batching: Any, config: GenerationConfig, hints: WorkloadHints | None) -> bool:
        """Whether the manager has the encoding and folder of prefixes of `batching` and this generation config, the
        model is unchanged, and the pool has room for `hints`. `max_new_tokens` is set per request and may differ."""
        own, other = (each.to_dict() | {"max_new_tokens": None} for each in (self.generation_config, config))
        same = (self.config, self.prefix_cache, own) == (batching.config, batching.prefix_cache, other)
        asked = vars(hints or WorkloadHints())
        fits = self.requests is None or all(0 < x <= getattr(self.requests, name) for name, x in asked.items())
        return same and fits and self.model_is_unchanged()

    def _identity(self) -> tuple[Any, ...]:
        """State of the model that pages and graphs depend on. A fingerprint samples weights: edits are counted."""
        edits = [None if each.is_inference() else each._version for each in self.model.parameters()]
        return self.model.device, fingerprint.identify(self.model), edits, needs_of_graphs(self.model)

    def model_is_unchanged(self) -> bool:
        """Whether the model is what it was in the last session. Pages and graphs depend on its weights. Edits of single
        numbers through `.data`, which torch does not count, are not noticed."""
        if self._last_model is not None and not self._is_checked:
            self._is_checked = self.model.device == self._last_model[0] and self._identity() == self._last_model
            return self._is_checked
        return True

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Set the model's attention to `turboquant_paged`, and join projections."""
        decoder = model.config.get_text_config()
        if not model.config._attn_implementation == decoder._attn_implementation == NAME:
            # transformers' `_original_attn_impl` has room for one name only, and stays `None`.
            own_attention[self.model] = attention_of_parts(model)
            model.set_attn_implementation(NAME)
        self.probe.linear.switch()
        join(model, "cuda")

    def _serves_elsewhere(self) -> bool:
        other = serving.get(self.model, self)
        return other is not self and other.is_running()

    def check_idle(self) -> None:
        """Raise `ValueError` if a manager serves the model: two callers of one would take each other's outputs."""
        if self.is_running() or self._serves_elsewhere():
            raise ValueError(
                "A manager serves this model already. Add the requests to that manager, or stop it first: one call of "
                "`generate_batch` takes any number of prompts."
            )

    def restore_attention(self) -> None:
        """Undo `switch_to_cb_friendly_attn`, unless another manager serves the model."""
        if not self._serves_elsewhere():
            self.probe.linear.restore()
            separate(self.model)
            restore_attention(own_attention.pop(self.model, []))

    @contextmanager
    def _restoring_on_failure(self) -> Iterator[None]:
        """Restore the attention of the model on an exception: the caller then has no manager to stop."""
        try:
            yield
        except BaseException:
            self.restore_attention()
            raise

    def options_of(self, config: GenerationConfig, options: dict[str, Any], prompt: int) -> RequestOptions:
        """Options of a request with a prompt of `prompt` tokens. Raises `ValueError` if an option would change the
        answer and is not applied, or is outside its range."""
        applied = options_of(config, options, prompt=prompt, vocabulary=self.vocabulary)
        if applied.stop_strings and self.detokenizer is None:
            raise ValueError(
                f"`stop_strings` is {applied.stop_strings!r}, and there is no tokenizer to find them with. Say "
                "`TurboQuantBatching(model, tokenizer=tokenizer)`."
            )
        return applied if applied.grammar is None else self.grammars.compiled(applied)

    def add_request(
        self,
        input_ids: list[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        *,
        generation_config: GenerationConfig | None = None,
        **options: Any,
    ) -> str | None:
        """Add a request.

        An answer ends at the model's last position. A prompt that is longer than the model's positions or the pool
        fails, and `error` of its output says why.

        Args:
            input_ids: Token ids of the prompt, a list or a tensor `[T]`.
            request_id: Id of the request, by default a new one.
            max_new_tokens, streaming, record_timestamps: Arguments of transformers' method.
            eos_token_id: Tokens that end the answer; -1 for none.
            generation_config: Options of this request, by default those of the manager.
            **options: Fields of a generation config that replace those of this request, or options of
                `tq_hf.batching.options.REQUEST_FIELDS`.

        Returns:
            Id of the answer: `request_id`, with a number appended while another request has that id. `None` on GPUs
            that do not drive others. Further answers of `num_return_sequences` have the ids `{request_id}__child#{i}`
            (`tq_hf.batching.processors.answer_ids`). An id like that gets a number, too. A request that the engine does
            not take, since it stops or has failed, has an output with an `error`.

        Raises:
            ValueError: The prompt is not a list of the model's tokens, or an option would change the answer and is not
                applied, or is outside its range. `request_id` is not a text.
        """
        given = {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
        options |= {name: value for name, value in given.items() if value is not None}
        config = self.generation_config
        if generation_config is not None:
            config = with_defaults(generation_config, config)
        input_ids = prompt_ids(input_ids, self.vocabulary)
        applied = self.options_of(config, options, len(input_ids))
        if not isinstance(request_id, str | None):
            raise ValueError(f"`request_id` is {shown(request_id)}; it must be a text.")
        return self.add_checked(input_ids, applied, request_id, streaming, record_timestamps)

    def add_checked(
        self, prompt: list[int], applied: RequestOptions, request_id: str | None, streaming: bool, timed: bool = False
    ) -> str | None:
        """`add_request` of tokens and options that are checked."""
        if request_id is None:
            with self._request_lock:
                request_id = f"req_{self._request_counter}"
                self._request_counter += 1
        request_id = self.output_router.claim(request_id, applied.num_return_sequences)
        self._cancelled.difference_update(answer_ids(request_id, applied.num_return_sequences))
        ends, added = list(applied.eos_token_ids) or -1, None
        if self.is_tp_driver and self.background_thread_status.can_accept_new_requests() is not None:
            state = RequestState(request_id, prompt, logit_processor_kwargs={OPTIONS: applied})
            self.output_router.fail_and_deliver(state, self._refusal())
            return request_id
        try:
            added = super().add_request(
                prompt, request_id, applied.max_new_tokens, streaming, timed, ends, **{OPTIONS: applied}
            )
        finally:
            if added is None:  # or the queue is full
                self.output_router.forget(request_id, applied.num_return_sequences)
        if self.background_thread_status.local_status == BackgroundThreadStatus.STOPPED:
            self._fail_all_remaining_requests(self._refusal(), None)
        return added

    @property
    def error(self) -> str | None:
        """Text of the error that ended the engine; `None` without one."""
        return one_line(fatal) if (fatal := self.background_thread_status.fatal_error) is not None else None

    def _refusal(self) -> RuntimeError:
        why = "stops, and" if self.error is None else f"has ended with an error ({self.error}), and"
        return RuntimeError(f"The engine {why} answers no requests that come later.")

    def _fail_all_remaining_requests(self, error: Exception, batch_processor: ContinuousBatchProcessor | None) -> None:
        if batch_processor is not None and self.background_thread_status.tp_status == BackgroundThreadStatus.HARD_STOP:
            error = RuntimeError("The engine was stopped before this answer was complete.")
        super()._fail_all_remaining_requests(error, batch_processor)

    def register_result_handler(self, request_id: str, callback: Callable[[Any], None]) -> None:
        """Register a function that the running event loop calls with the outputs of an answer. An exception of it is
        handed to that loop, and drops its own output only."""
        loop = asyncio.get_running_loop()

        def guarded(output: Any) -> None:
            try:
                callback(output)
            except Exception as error:
                message = f"The result handler of request {request_id} failed, and its output is lost."
                loop.call_exception_handler({"message": message, "exception": error})

        super().register_result_handler(request_id, guarded)

    def fitting_requests(self, tokens: int) -> int:
        """Number of requests of `tokens` tokens, prompt and answer, that fit into the pool at once. Raise `ValueError`
        if `tokens` is not a whole number above 0, or there is no pool before `warmup` or `start`."""
        if self.batch_processor is None:
            raise ValueError("There is no pool yet. Call `warmup()` first.")
        cache: Any = self.batch_processor.cache
        return cache.num_sectors // cache._sectors_of(number("tokens", tokens, 1))

    def cancel_request(self, request_id: str) -> None:
        """Cancel an answer that is not given yet. On a CPU, a step without other requests ends at once. The id of a
        request with several answers is that of the first one: until its prompt is read, it cancels all. Raise
        `ValueError` if `request_id` is not a text."""
        if not isinstance(request_id, str):
            raise ValueError(f"`request_id` is {shown(request_id)}; it must be a text, as `add_request` returns it.")
        if self.output_router.is_open(request_id):  # otherwise a later request of this id would be cancelled
            self._cancelled.add(request_id)
            super().cancel_request(request_id)

    def _stop_abandoned_step(self) -> None:
        """Raise `StepAbandoned` before a layer if all requests of the step are cancelled: on a CPU a step with a long
        prompt takes many seconds, and all other requests would wait for its end."""
        if self.background_thread_status.local_status == BackgroundThreadStatus.HARD_STOP:
            raise StepAbandoned
        computed = self._processor.computed if self._cancelled and self._processor is not None else set()
        if computed and computed <= self._cancelled:
            raise StepAbandoned

    def metrics(self) -> str:
        """Return requests, tokens, pages and times in the text format of Prometheus."""
        return self.output_router.metrics.text(self)

    def sleep(self) -> int:
        """Free pages and graphs; see `TurboQuantBatching.sleep`."""
        if self.is_running():
            raise ValueError(
                "A session of continuous batching is running, and its requests need their pages. Stop the session "
                "first."
            )
        if self.batch_processor is None:
            return 0
        self._runner.cancel()
        pool = self.batch_processor.cache.cache_tensor
        freed, on_cuda, device = pool.nbytes, pool.is_cuda, pool.device
        before = torch.cuda.memory_allocated(device) if on_cuda else 0
        # No graph or shared prefix is left, so the model may change before the next session.
        self.batch_processor, self.warmed_up, self._last_model = None, False, None
        del pool
        gc.collect()
        if on_cuda:
            freed = before - torch.cuda.memory_allocated(device)
            torch.cuda.empty_cache()
        return freed

    def is_running(self) -> bool:
        """Whether the thread runs. Python 3.11 takes a thread for ended whose `join` was interrupted."""
        return super().is_running() or not self._ended.is_set()

    def join(self, stop_trigger_time: float, timeout: float | None = None) -> None:
        self._wake_up_loop.set()
        super().join(stop_trigger_time, timeout if self._ended.wait(timeout) else 0)

    def warmup(self, now: bool = False, behind: bool = False) -> None:
        """Allocate the pool.

        On a GPU, a graph of decode steps is captured when a step first needs the graph. Steps are compiled, if the
        options say so, at the first of them; in tensor parallelism now, since a rank must not wait in a step for
        another that compiles.

        Args:
            now: Whether to run steps of all sizes now, which compiles and captures them.
            behind: Whether to capture graphs while there is no request, too, and to compile in the background: kernels
                at first, steps once graphs of uncompiled steps are captured, or after `COMPILE_AFTER` steps. `stop`
                waits for the graph that is captured or compiled. No effect in tensor parallelism.
        """
        with self._restoring_on_failure():
            if self.batch_processor is None:
                self.batch_processor = self._create_batch_processor()
            runner, alone = self._runner, self.distributed_helper.tp_size == 1
            if behind and alone and not self.warmed_up:
                runner.warm_up_behind(self._wake_up_loop.set)
                runner.compile_kernels(self.model, 2)  # a step with a prompt, and one with a token
            if now or not (alone or runner.layers is None):
                runner.compile_kernels(self.model)
                while runner.missing:
                    runner.run_warm_up(self.model, *runner.missing.pop(0))
            self.warmed_up = True

    @property
    def to_be_done(self) -> str | None:
        """Sentence about what makes the first requests slower than later ones; `None` if nothing does."""
        return None if (runner := self._runner) is None else runner.to_be_done

    @property
    def _runner(self) -> Any:
        return getattr(self.batch_processor, "model_runner", None)

    def start(self) -> None:
        """Start the background thread. Raise `ValueError` if the model has changed since the last session, and the
        manager still has pages of it, or if a manager serves the model."""
        if not self.model_is_unchanged():
            self.restore_attention()  # transformers' own `init_continuous_batching` has switched the attention
            raise ValueError(
                "The model's weights, adapters, modules, hooks, dtype or device have changed since the last session of "
                "this manager, and the manager keeps the pages and graphs of that session. Create a new manager: "
                "`destroy_cached_continuous_batching_manager()`, then `init_continuous_batching()`."
            )
        with starting:
            self.check_idle()
            self._keeps_pages, serving[self.model] = False, self
            self.switch_to_cb_friendly_attn(self.model)
            super().start()

    def _run_generation_loop(self, *args: Any, **options: Any) -> None:  # none before transformers 5.24
        self._ended.clear()
        runner = self._runner
        with ExitStack() as at_end:  # not in `stop`, which may return before requests are answered
            at_end.callback(self._ended.set)
            at_end.callback(setattr, self, "_processor", None)
            at_end.callback(self._end_session)
            at_end.callback(lambda: runner is None or self._keeps_pages or runner.cancel(0))
            at_end.callback(lambda: self._processor and (store := self._processor.cache.prefixes) and store.flush())
            at_end.callback(lambda: self._fail_all_remaining_requests(self._refusal(), None))
            try:
                super()._run_generation_loop(*args, **options)
            except BaseException as error:  # transformers handles exceptions only
                logger.error(f"The engine ends: {one_line(error)}", exc_info=error)
                self._handle_critical_error(error, self._processor)

    def _end_session(self) -> None:
        self.restore_attention()
        if serving.get(self.model) is self:
            del serving[self.model]
        if self._keeps_pages and self.batch_processor is not None:
            self._last_model = self._last_model or self._identity()
        self._is_checked = False

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Stop the background thread, which restores the attention of the model when it ends. Arguments are those of
        transformers' `stop`. Without `keep_for_next_session`, wait for the graph that is being compiled, too. On Ctrl-C
        the stop is hard: a `with` of this manager would wait for all answers."""
        if isinstance(sys.exc_info()[1], KeyboardInterrupt) and self.is_running():
            logger.warning("Interrupted: the engine stops after its step, and requests without an answer fail.")
            hard_stop = True
        self._keeps_pages, runner = keep_for_next_session, self._runner
        super().stop(block, timeout, keep_for_next_session, hard_stop)
        if runner is not None and self.batch_processor is None and not self.is_running():
            runner.cancel(timeout if block else 0)
        self._wake_up_loop.set()
        if not self.is_running() and (self._is_checked or self._last_model is None):  # not started, or failed
            self._end_session()
        if self.batch_processor is None:
            self._last_model = None

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Pause between two steps, to change the weights or forward hooks of the model for example. Requests go on with
        their pages; pages from before a change are not shared with later requests."""
        with super().pause():
            before = self._identity()
            try:
                yield
            finally:
                # Ranks must agree.
                now = self._identity()
                changed = self.distributed_helper.tp_size > 1 or now != before
                self._last_model = None if changed else self._last_model
                if changed and isinstance(self.batch_processor, TurboQuantBatchProcessor):
                    self.batch_processor.forget_prefixes()
                if now[-1] != before[-1] and self._runner is not None:
                    separate(self.model)
                    join(self.model, "cuda")
                    self._runner.forget_graphs()

    # Copied from transformers, because the original names its classes of cache, scheduler and processor
    # (tests/batching/test_upstream.py fails when the original changes).
    @outside_inference_mode
    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        if self.batch_processor is not None:
            self.batch_processor.reset()
            return self.batch_processor
        options: Any = self.continuous_batching_config
        cache = TurboQuantPagedCache(self)
        if self.model.device.type == "cpu" and not options.use_async_batching and self.distributed_helper.tp_size == 1:
            cache.before_layer = self._stop_abandoned_step
        self._use_prefix_sharing, blocks = cache.use_prefix_sharing, options.num_blocks
        update_cb_config_after_cache_creation(
            cb_config=options, num_blocks=cache.num_blocks, max_batch_tokens=cache.max_batch_tokens
        )
        if cache.states is not None:
            options.num_blocks = blocks  # states are not counted; the next pool adds theirs again
            # A captured step has room for this many requests, and each of them has a sector.
            options.max_requests_per_batch = min(options.max_requests_per_batch, cache.num_sectors)
        most, device = options.max_requests_per_batch, self.model.device
        compiled = self.compile_config is not None and device.type == "cuda"
        self.logit_processor = BatchOptions(self.default_options, most, self.vocabulary, device, compiled)
        scheduler: Any = self._scheduler(cache=cache, safety_margin=options.safety_margin, max_requests_per_batch=most)
        scheduler.detokenizer, scheduler.forget = self.detokenizer, self.output_router.forget
        return TurboQuantBatchProcessor(
            self,
            cache=cache,
            config=cache.config,
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
        assert self._processor is not None
        self._processor._generation_step(self.model)

    def _generation_loop_body(self, batch_processor: ContinuousBatchProcessor, bootstrapping: bool) -> bool:
        """Run a step. If the step fails, its requests fail, and the loop continues with the others."""
        assert isinstance(batch_processor, TurboQuantBatchProcessor)
        self._processor = batch_processor
        alone = self.distributed_helper.tp_size == 1  # ranks of a group poll each other
        self._wake_up_loop.idle = alone and not batch_processor.has_pending_requests()
        if self._wake_up_loop.idle:
            self._cancelled.clear()
        try:
            return super()._generation_loop_body(batch_processor, bootstrapping)
        except StepAbandoned:
            batch_processor.forget_step(batch_processor.computed)
            return True
        except Exception as error:
            # The loop must end if other ranks wait for this rank, or if the device is broken.
            if not alone:
                raise RuntimeError(
                    f"Rank {self.distributed_helper.tp_local_rank} of the {self.distributed_helper.tp_size} that share "
                    f"this model cannot continue, and all other ranks end too: {error}\nIf a connection was lost, "
                    "another rank has died: see the output of that rank, and start all ranks again."
                ) from error
            if isinstance(error, torch.AcceleratorError):
                raise
            batch_processor.fail_step(error)
            return True

    def _handle_critical_error(self, error: Any, batch_processor: ContinuousBatchProcessor | None) -> None:
        """Fail all requests and tell the other ranks, if they can be reached."""
        try:
            super()._handle_critical_error(error, batch_processor)
        except RuntimeError as unreachable:
            logger.error(f"Some ranks could not be told to end: {unreachable}")
