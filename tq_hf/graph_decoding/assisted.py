"""Assisted decoding with one CUDA graph per step, for prompt lookup and for an assistant model.

A step runs the model on the newest token and on k drafts after it. The model chooses a token after each of these S =
k + 1 tokens. Drafts that agree with the model are accepted, and so is the model's own token after them: 1 to S tokens a
step. The other tokens are taken back from the cache, by its counts on the device. Drafting and acceptance are part of
the graph, too, so the host never waits for a step that it has just launched: it reads the number of accepted tokens one
step late. Rings of sliding layers are open meanwhile: their masks follow from the number of tokens, too (`StepInputs`).

Greedy search and drafts of a lookup accept a draft that is the model's choice. Sampling with an assistant accepts and
replaces drafts as speculative sampling does (Leviathan et al. 2023, algorithm 1). Both leave the distribution of the
model's tokens as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput

from ..cache import TurboQuantCache
from ..compat import as_input, longer_inputs, optimized_for_decode, outside_inference_mode, prefill
from ..layers.base import FullAttentionLayer
from ..layers.rollback import take_back
from ..prepared import joined, needs_of_graphs
from ..saving.fingerprint import adapters
from ..stores.sizes import STEP_TOKENS
from .loop import Loop, check_layers, latest_steps, tensors_of
from .step import CapturedStep, LateFlags, StepInputs, layers_with_states, sliding_layers

MOST_DRAFTS = STEP_TOKENS - 1
"""Most drafts of a step: with the token before them, as many tokens as the decode kernel takes."""
ASSISTANT_DRAFTS = 5
"""Drafts of a step where `num_assistant_tokens` has transformers' default, 20, which stops at unlikely drafts."""


class PromptLookup:
    """`number` (k) drafts a step from the text so far: what followed the longest n-gram that ends like the text, at its
    first place. The n-gram has up to `longest` tokens."""

    layers: tuple[Any, ...] = ()

    def __init__(self, number: int, longest: int) -> None:
        self.number, self.longest = number, longest
        self.key: tuple[Any, ...] = ("prompt lookup", number, longest)

    def begin(self, prompt: torch.Tensor, mask: torch.Tensor | None, config: GenerationConfig) -> None:
        """Nothing to prepare."""

    def draft(self, loop: AssistedLoop, history: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Drafts `[k]` int64 after the `at` first tokens of `history` `[1, W]`. Any tokens where nothing matches."""
        tokens, width = history[0], history.shape[1]
        place = torch.arange(width, device=history.device)
        alike = torch.zeros_like(place)
        matches = place < at
        for back in range(1, self.longest + 1):
            # Whether the token `back` places before each place is the one `back` places before the end.
            earlier = tokens.roll(back)
            matches = matches & (place >= back) & (earlier == tokens.index_select(0, (at - back).clamp(min=0)))
            alike += matches
        best = torch.argmax(alike * width - place)
        followers = (best + torch.arange(self.number, device=history.device)).clamp(max=width - 1)
        return tokens.index_select(0, followers), None


class Assistant:
    """`number` (k) drafts a step, of a smaller model with a preallocated cache of its own.

    The cache lacks the two newest tokens when a step begins, and the first call of the step reads both. After a step
    that accepted every draft, the assistant has not read the last one: so that step is followed by one like any other.
    """

    def __init__(self, model: Any, cache: TurboQuantCache, number: int) -> None:
        self.model, self.cache, self.number = model, cache, number
        self.layers: tuple[Any, ...] = tuple(layers_with_states(cache))
        self.steps: list[StepInputs] = []
        """Inputs of a call of two tokens, and of one."""

    @property
    def key(self) -> tuple[Any, ...]:
        """Values that a captured graph depends on."""
        of_model = id(self.model), str(adapters(self.model)), needs_of_graphs(self.model)
        return "assistant", *of_model, self.number, [inputs.shapes for inputs in self.steps]

    def begin(self, prompt: torch.Tensor, mask: torch.Tensor | None, config: GenerationConfig) -> None:
        """Read the prompt `[1, T]` but for its last token, in chunks if `config` says so; `mask` `[1, T]` pads it."""
        read, held = prompt[:, :-1], prompt.shape[1] - 1
        self.cache.reset()
        expect_drafts(self.cache)
        padding = torch.ones_like(read) if mask is None else mask[:, :held]
        _, inputs = prefill(
            self.model, read, config, {**as_input(self.cache), "use_cache": True, "attention_mask": padding}
        )
        for ring in sliding_layers(self.layers):
            ring.open_ring(self.number + 1)
        steps = [StepInputs(self.model, self.cache, read, held, n, longer_inputs(inputs, n - 1)) for n in (2, 1)]
        if [own.shapes for own in self.steps] != [new.shapes for new in steps]:
            self.steps = steps
        for own, new in zip(self.steps, steps, strict=True):
            own.copy_(new)

    def draft(self, loop: AssistedLoop, history: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Drafts `[k]` int64 after the `at` first tokens of `history` `[1, W]`, and the scores `[k, vocabulary]` by
        which they were chosen."""
        column, drafts, every = at - 2, [], []
        tokens = history.index_select(1, column + torch.arange(2, device=at.device))
        for i in range(self.number):
            inputs = self.steps[0 if i == 0 else 1].at(column)
            scores = loop.call(self.model, tokens, inputs, self.cache)[:, -1]
            if loop.selects_in_graph:
                scores = loop.processors(history, scores)
            every.append(scores)
            drafts.append(loop._choice(scores))
            column, tokens = at + i, drafts[-1][:, None]
        return torch.cat(drafts), torch.cat(every)


Drafts = PromptLookup | Assistant


def drafts_of(
    model: Any, cache: TurboQuantCache, prompt: torch.Tensor, config: GenerationConfig, arguments: dict[str, Any]
) -> Drafts:
    """Source of the drafts that a call of `generate()` asks for. Raises `ValueError` if drafts of this kind, for
    several sequences or for this model are not supported."""
    assistant, lookup = arguments.get("assistant_model"), config.prompt_lookup_num_tokens
    asked = {
        "assistant_early_exit": config.assistant_early_exit is not None,
        "use_mtp": getattr(config, "use_mtp", False),
        "speculation_type": getattr(config, "speculation_type", None) is not None,
        "assistant_ensemble_weight": getattr(config, "assistant_ensemble_weight", None) is not None,
        "assistant_tokenizer": arguments.get("assistant_tokenizer") is not None,
        "two sources of drafts": lookup is not None and assistant is not None,
    }
    if other := [name for name, is_set in asked.items() if is_set]:
        raise ValueError(
            f"`graph_decoding` takes drafts of `prompt_lookup_num_tokens` or of an `assistant_model` with the same "
            f"vocabulary; this call has {', '.join(other)}. Leave out `custom_generate`: `generate()` decodes so with "
            "the same cache."
        )
    if prompt.shape[0] > 1:
        raise ValueError(f"Drafts are for one sequence, and this call has {prompt.shape[0]}. Leave the drafts out.")
    if assistant is None:
        return PromptLookup(min(lookup, MOST_DRAFTS), config.max_matching_ngram_size or 2)
    if prompt.shape[1] < 2:
        raise ValueError(
            f"An assistant reads all of the prompt but its last token, and this prompt has {prompt.shape[1]} tokens. "
            "Pass `input_ids` of two tokens or more."
        )
    sizes = [one.config.get_text_config(decoder=True).vocab_size for one in (model, assistant)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"The model has a vocabulary of {sizes[0]} tokens, and its assistant of {sizes[1]}. Leave out "
            "`custom_generate`, and pass `tokenizer` and `assistant_tokenizer`."
        )
    number = assistant.generation_config.num_assistant_tokens
    number = ASSISTANT_DRAFTS if number in (None, 20) else min(number, MOST_DRAFTS)
    held = getattr(latest_steps.get(cache), "drafts", None)
    if isinstance(held, Assistant) and held.model is assistant and held.number == number:
        return held
    own = TurboQuantCache(assistant.config, max_cache_len=cache.preallocated_for)
    check_layers(assistant, own, drafts=True)
    return Assistant(assistant, own, number)


def expect_drafts(cache: TurboQuantCache) -> None:
    """Let steps of full-attention layers have several tokens. Sliding layers open their rings instead: to record what
    left their windows would keep a whole prompt."""
    for layer in cache.layers:
        if isinstance(layer, FullAttentionLayer):
            layer.activate_past_recording()


def check_room_for_drafts(tokens: int, drafts: Drafts, cache: TurboQuantCache) -> None:
    """Raise a `ValueError` if a cache that may reach `tokens` tokens has no room for the drafts of its last step."""
    assert cache.preallocated_for is not None
    if tokens + drafts.number > cache.preallocated_for:
        raise ValueError(
            f"This call may reach {tokens} tokens in the cache, and the last step appends up to {drafts.number} drafts "
            f"that do not stay, but `max_cache_len` is {cache.preallocated_for}. Make the cache with "
            f"`max_cache_len={tokens + drafts.number}`."
        )


def speculative_sample(
    drafts: torch.Tensor, draft_probabilities: torch.Tensor, probabilities: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept or replace drafts so that tokens have the model's distribution (Leviathan et al. 2023, algorithm 1).

    Args:
        drafts: `[k]` int64.
        draft_probabilities: `[k, vocabulary]` that the drafts were sampled from.
        probabilities: `[k + 1, vocabulary]` of the model.

    Returns:
        Tokens `[k + 1]` int64, and n, `[]` int64, the number of accepted drafts. The first n + 1 tokens count.
    """
    at = drafts[:, None]
    ratio = probabilities[:-1].gather(1, at) / draft_probabilities.gather(1, at)
    accepted = (torch.rand_like(ratio) <= ratio).squeeze(1)
    number = accepted.long().cumprod(0).sum()
    rest = torch.cat([draft_probabilities, torch.zeros_like(probabilities[:1])])
    own = probabilities.index_select(0, number[None])
    left = (own - rest.index_select(0, number[None])).clamp(min=0)
    # Equal distributions reject by rounding only, and leave nothing.
    left = torch.where(left.sum(-1, keepdim=True) > 0, left, own)
    token = torch.multinomial(left, num_samples=1)[0]
    place = torch.arange(probabilities.shape[0], device=drafts.device)
    return torch.where(place == number, token, torch.cat([drafts, token])), number


@dataclass(kw_only=True)
class AssistedTensors(CapturedStep):
    """Tensors of an assisted step of one sequence.

    Args:
        drafts: Source of the drafts.
        accepted: `[S + 1]` int64: the tokens of the last step, and the number of them that count.
        draft_scores: `[k, vocabulary]` float32 that drafts were chosen by, or `None`.
    """

    drafts: Drafts
    accepted: torch.Tensor
    draft_scores: torch.Tensor | None = None


class AssistedLoop(Loop):
    """One call of `graph_decoding` with drafts.

    Raises:
        ValueError: The cache has no room for the drafts of the last step.
    """

    def __init__(self, drafts: Drafts, *arguments: Any) -> None:
        super().__init__(*arguments)
        assert self.max_length is not None
        self.drafts, self.tokens, self.longest = drafts, drafts.number + 1, self.max_length
        self.width = self.longest + self.tokens
        self.counts: list[int] = []
        """Number of accepted tokens of each step that was read."""
        # After the prompt, because only then the length of a pruned cache, or of embeddings, is known.
        check_room_for_drafts(self.max_length - self.length + self.cached, drafts, self.cache)
        self.flags = LateFlags(self.prompt.device, self.tokens + 1, self._receive)
        if not self.selects_in_graph or self.other_criteria:
            self.flags.lag = 0  # both read the tokens so far on the host

    def run(self, logits: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Decode from the logits `[1, vocabulary]` of the prompt until the sequence has ended."""
        step = None
        try:
            with optimized_for_decode(self.model), joined(self.model):
                step = self._begin(inputs)
                self._accept(step, logits, None)
                # The assistant reads its prompt before, with the experts for many tokens.
                with optimized_for_decode(getattr(self.drafts, "model", self.model)):
                    while not self._ended(step):
                        self._advance(step)
        finally:  # a call that an exception ended is left to `crop`
            for ring in sliding_layers((*self.layers, *self.drafts.layers)):
                ring.close_ring(None if step is None else int(step.at - step.shift) - 1)
        self.cache.last_update = None  # no call is left half done
        for name in ("logits", "scores"):
            if (every := getattr(self, name)) is not None:
                rows = zip(every, self.counts, strict=False)
                setattr(self, name, [row for part, count in rows for row in part[:count, None]])
        return self._result(step.history)

    @outside_inference_mode
    def _begin(self, inputs: dict[str, Any]) -> AssistedTensors:
        """Let drafts and sliding layers begin. Returns tensors set for the first step."""
        mask = inputs.get("attention_mask")
        self.drafts.begin(self.prompt, None if mask is None else mask[:, : self.length], self.config)
        for ring in sliding_layers(self.layers):
            ring.open_ring(self.tokens)
        addresses = [tensor.data_ptr() for layer in self.drafts.layers for tensor in tensors_of(layer)]
        own = {"drafts": self.drafts, "accepted": self.prompt.new_zeros(self.tokens + 1)}
        inputs = longer_inputs(inputs, self.tokens - 1)
        return self._step(inputs, self._first_step(AssistedTensors, **own), (self.drafts.key, addresses))

    def _advance(self, step: Any) -> None:
        self._run_or_replay(step)
        if not self.selects_in_graph:
            self._verify(step)

    def _run(self, step: Any) -> None:
        """Run the operations of the graph."""
        drafts, step.draft_scores = step.drafts.draft(self, step.history, step.at)
        place = torch.arange(self.drafts.number, device=step.at.device)
        step.history.index_copy_(1, step.at + place, drafts[None])
        step.logits = self._forward(step)[0]
        if self.selects_in_graph:
            self._verify(step)

    def _verify(self, step: AssistedTensors) -> None:
        """Accept tokens of the step, and take the others back from the caches."""
        assert step.logits is not None
        self._accept(step, step.logits, step.draft_scores)
        take_back((*self.layers, *step.drafts.layers), self.tokens - step.accepted[-1])

    def _accept(self, step: AssistedTensors, logits: torch.Tensor, draft_scores: torch.Tensor | None) -> None:
        """Choose tokens by the logits `[S, vocabulary]` float32 of a step, accept the drafts that agree, and write the
        tokens. Drafts are the S - 1 tokens of the history from `at` on, sampled by `draft_scores`, if any."""
        place, history = torch.arange(logits.shape[0], device=logits.device), step.history
        if self.selects_in_graph:
            scores = self.processors(history, logits.clone())
        else:  # a processor reads the tokens before the position
            before = [history[:, : self.length + i] for i in range(logits.shape[0])]
            scores = torch.cat([self.processors(x, row[None].clone()) for x, row in zip(before, logits, strict=True)])
        step.logits, step.scores = logits, scores
        drafts = history.index_select(1, step.at + place)[0, :-1]
        if self.sample and draft_scores is not None:
            chosen, matches = speculative_sample(drafts, draft_scores.softmax(-1), scores.softmax(-1))
        else:
            chosen = self._choice(scores)
            matches = (chosen[:-1] == drafts).long().cumprod(0).sum()
        count = torch.minimum(matches + 1, self.longest - step.at)
        is_end = torch.zeros_like(chosen, dtype=torch.bool)
        for end in self.ends:
            is_end |= torch.isin(chosen, end)
        count = torch.minimum(count, torch.where(is_end, place + 1, self.tokens).amin())
        count = torch.where(step.unfinished, count, 0)
        history.index_copy_(1, step.at + place, chosen[None])
        step.accepted[: logits.shape[0]] = chosen
        step.accepted[-1:] = count
        step.at.add_(count)
        step.unfinished.logical_and_(~(is_end & (place < count)).any() & (step.at < self.longest))

    def _ended(self, step: AssistedTensors) -> bool:
        """Record the step that has run. Returns whether the sequence is known to have ended."""
        self._keep_scores(step)
        try:
            ended = self.flags.record(step.unfinished, step.accepted)
        except BaseException:  # a streamer's, which has not had the tokens of a later step
            if self.flags.lag:
                take_back((*self.layers, *step.drafts.layers), step.accepted[-1])
            raise
        return self._stops(step) or ended

    def _receive(self, accepted: torch.Tensor) -> None:
        """Count and stream the tokens of a step, `[S + 1]` with their number at the end."""
        count = int(accepted[-1])
        self.length += count
        self.counts.append(count)
        if self.streamer is not None and count:
            self.streamer.put(accepted[:count])

    def _stops(self, step: AssistedTensors) -> bool:
        """Ask criteria other than the end-of-sequence token and the length, token by token; the step must be read."""
        if not self.other_criteria:
            return False
        for length in range(self.length - self.counts[-1] + 1, self.length + 1):
            if bool(self.other_criteria(step.history[:, :length], None).any()):
                take_back((*self.layers, *step.drafts.layers), step.at - length)
                step.at.fill_(length)
                self.counts[-1] -= self.length - length
                self.length = length
                return True
        return False
