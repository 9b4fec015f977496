"""Effect of compression on a model's answers: documents to read, and measures of the difference.

Everything is teacher-forced in chunks through the cache under test, so that each token is foretold from what that
cache gives back of the tokens before its chunk. A document ends in questions about it with their right answers; greedy
decoding would give an answer exactly if each of its tokens is the likeliest one after those before it, so the same
pass measures recall.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from examples import needle_data as needle
from tq_hf.compat import as_input

FACTS = 16
PASSKEY_DEPTHS = 9
BOOTSTRAPS = 2000
PARTS = 4
"""Number of equal parts of the scored positions for which KL is also given: whether it drifts with depth."""


@dataclass(frozen=True)
class Document:
    """Tokens that end in questions and answers.

    Args:
        ids: Its tokens.
        answers: `(first token of the answer, the token after its last, depth of its fact from 0 to 1)`.
        single: Whether it hides one pass key rather than many facts.
        seed: What it was made from.
    """

    ids: list[int]
    answers: list[tuple[int, int, float]]
    single: bool
    seed: int


def documents(tokens: int, seeds: int, recalls: int, depths: int = PASSKEY_DEPTHS) -> list[Document]:
    """For each seed, `depths` documents with a pass key and `recalls` with `FACTS` facts, all of `tokens` bytes."""
    made = []

    def add(text: str, starts: Iterable[int], places: Iterable[float], single: bool) -> None:
        pairs = zip(starts, places, strict=True)
        answers = [(start, start + needle.ANSWER_TOKENS, depth) for start, depth in pairs]
        made.append(Document(list(text.encode()), answers, single, seed))

    for seed in range(seeds):
        for index in range(depths):
            depth = index / max(1, depths - 1)
            question, answer = needle.passkey_prompt(tokens - needle.ANSWER_TOKENS, depth, 1000 * seed + index)
            add(question + answer + needle.TERMINATOR, [len(question)], [depth], single=True)
        for index in range(recalls):
            draw = 1000 * seed + 500 + index
            _, asked = needle.recall_prompt(tokens, FACTS, draw)
            # Keys and answers have the same lengths whatever the length of the text.
            room = tokens - sum(len(ask) + needle.ANSWER_TOKENS for ask, _ in asked)
            prompt, asked = needle.recall_prompt(room, FACTS, draw)
            text, starts = needle.answered(prompt, asked)
            add(text, starts, [prompt.index(ask + answer) / room for ask, answer in asked], single=False)
    assert all(len(document.ids) == tokens for document in made)
    return made


def token_ids(read: Sequence[Document], device: torch.device) -> torch.Tensor:
    """Ids `[N, T]` of documents of equal length."""
    return torch.tensor([document.ids for document in read], device=device)


@torch.no_grad()
def forced_logits(
    model: Any, ids: torch.Tensor, cache: Cache, attention: str, chunk: int, padding: int = 0
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Positions, and the float32 logits `[N, <= chunk, V]` there, chunk by chunk through `cache`; so many tokens of
    padding come first and are masked."""
    model.set_attn_implementation(attention)
    for start in range(0, ids.shape[1], chunk):
        place = slice(start, min(start + chunk, ids.shape[1]))
        fed, options = ids[:, place], {}
        if padding:
            mask = torch.nn.functional.pad(torch.ones_like(ids[:, : place.stop]), (padding, 0))
            positions = torch.arange(-padding if start == 0 else start, place.stop, device=ids.device).clamp_min(0)
            options = {"attention_mask": mask, "position_ids": positions[None]}
            fed = torch.nn.functional.pad(fed, (padding, 0)) if start == 0 else fed
        logits = model(fed, **as_input(cache), **options).logits[:, start - place.stop :]
        yield place, logits.float()


@dataclass(frozen=True)
class Reference:
    """Answers of the uncompressed float32 model.

    Args:
        log_probs: `[N, T, V]`.
        keys: Its cached keys, `[N, Hkv, T, D]` of each layer.
        queries: Queries `[n, Hq, chunk, D]` of each layer in the last chunk of the first documents.
    """

    log_probs: torch.Tensor
    keys: list[torch.Tensor]
    queries: list[torch.Tensor]


PROBED = 4
"""Number of documents for comparing attention logits."""


def reference(model: Any, ids: torch.Tensor, chunk: int) -> Reference:
    """Read `ids` `[N, T]` with a plain cache in the model's dtype."""
    seen: dict[int, torch.Tensor] = {}

    def probe(module: torch.nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen[module.layer_idx] = query[:PROBED]  # type: ignore[index]
        return sdpa_attention_forward(module, query, *args, **kwargs)

    AttentionInterface.register("quality probe", probe)
    AttentionMaskInterface.register("quality probe", sdpa_mask)
    cache = DynamicCache(config=model.config)
    parts = [logits.log_softmax(-1) for _, logits in forced_logits(model, ids, cache, "quality probe", chunk)]
    keys = [layer.keys for layer in cache.layers]  # type: ignore[attr-defined]
    return Reference(torch.cat(parts, dim=1), keys, [seen[index] for index in sorted(seen)])


def injection(keys: Sequence[torch.Tensor], read: Sequence[Document], strength: float) -> list[torch.Tensor]:
    """For each layer, vectors `[N, Hkv, 1, D]` of `strength` times the mean length of that head's keys.

    Directions are random, one for each seed of a document, layer and head. Added to every key of a head they change no
    attention weight in exact arithmetic, as the key bias of Qwen2 would if there were no rotary embedding.
    """
    added = []
    for layer, states in enumerate(keys):
        _, heads, _, dim = states.shape
        length = states.norm(dim=-1).mean(dim=(0, 2))  # [Hkv]
        directions = {}
        for seed in {document.seed for document in read}:
            generator = torch.Generator().manual_seed(1000 * seed + layer)
            direction = torch.randn(heads, dim, generator=generator)
            directions[seed] = direction / direction.norm(dim=-1, keepdim=True)
        unit = torch.stack([directions[document.seed] for document in read]).to(states)
        added.append((strength * length[:, None] * unit)[:, :, None])
    return added


def injected(cache: Cache, vectors: Sequence[torch.Tensor]) -> Cache:
    """`cache`, which from now on stores each layer's keys with `vectors` added."""
    update = cache.update

    def with_vectors(keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        return update(keys + vectors[layer].to(keys), values, layer, *args, **kwargs)

    cache.update = with_vectors  # type: ignore[method-assign]
    return cache


@dataclass
class Outcome:
    """How one cache read all documents.

    Args:
        kl: KL divergence from the reference at each scored position, nats, `[N, positions]`.
        agree: Whether the likeliest token is the reference's, bool, the same shape.
        distance: Total variation distance from the reference, the same shape.
        loss: Mean cross-entropy of the true tokens there, nats, `[N]`.
        recalled: For each document, whether each of its answers is recalled.
    """

    kl: torch.Tensor
    agree: torch.Tensor
    distance: torch.Tensor
    loss: torch.Tensor
    recalled: list[list[bool]]

    @classmethod
    def joined(cls, parts: Sequence[Outcome]) -> Outcome:
        """How several groups of documents were read, as one."""
        tensors = (torch.cat([getattr(part, n) for part in parts]) for n in ("kl", "agree", "distance", "loss"))
        return cls(*tensors, [rights for part in parts for rights in part.recalled])


@torch.no_grad()
def read_documents(
    model: Any,
    read: Sequence[Document],
    ids: torch.Tensor,
    known: Reference,
    cache: Cache,
    attention: str,
    *,
    chunk: int,
    first: int,
    padding: int = 0,
) -> Outcome:
    """Read all documents, after `padding` tokens of padding, through `cache` and compare with the reference from
    position `first` on."""
    kls, agrees, distances, losses, guesses = [], [], [], [], []
    for place, logits in forced_logits(model, ids, cache, attention, chunk, padding):
        log_probs, exact = logits.log_softmax(-1), known.log_probs[:, place]
        guess = logits.argmax(-1)
        probs = exact.exp()
        kls.append((probs * (exact - log_probs)).sum(-1))
        distances.append((probs - log_probs.exp()).abs().sum(-1) / 2)
        agrees.append(guess == exact.argmax(-1))
        guesses.append(guess)
        targets = ids[:, place.start + 1 : place.stop + 1]
        losses.append(-log_probs[:, : targets.shape[1]].gather(-1, targets[..., None])[..., 0])
    foretold = (torch.cat(guesses, dim=1)[:, :-1] == ids[:, 1:]).cpu()  # [N, T - 1]: whether token t + 1 is
    right = [
        [bool(foretold[i, start - 1 : stop - 1].all()) for start, stop, _ in document.answers]
        for i, document in enumerate(read)
    ]
    return Outcome(
        torch.cat(kls, dim=1)[:, first:].clamp_min(0),
        torch.cat(agrees, dim=1)[:, first:],
        torch.cat(distances, dim=1)[:, first:],
        torch.cat(losses, dim=1)[:, first:].mean(1),
        right,
    )


def worst_logit_correlation(known: Reference, cache: Cache) -> float:
    """Lowest mean correlation of attention logits among layers, over the history before the last chunk."""
    correlations = []
    for query, exact, layer in zip(known.queries, known.keys, cache.layers, strict=True):
        history = exact.shape[2] - query.shape[2]
        grouped = query.unflatten(1, (exact.shape[1], -1)).flatten(2, 3)  # [n, Hkv, G * chunk, D]
        both = []
        for keys in (exact, layer.keys):  # type: ignore[attr-defined]
            logits = grouped @ keys[: len(query), :, :history].to(query).transpose(-1, -2)
            centred = logits - logits.mean(-1, keepdim=True)
            both.append(centred / centred.norm(dim=-1, keepdim=True))
        correlations.append((both[0] * both[1]).sum(-1).mean().item())
    return min(correlations)


def summary(outcome: Outcome, exact: Outcome, read: Sequence[Document]) -> dict[str, Any]:
    """The figures of one cache; `exact` is how the uncompressed cache read the same documents."""

    def share(single: bool, low: float = 0.0, high: float = 1.0) -> float | None:
        found = [
            right
            for document, rights in zip(read, outcome.recalled, strict=True)
            if document.single == single
            for (_, _, depth), right in zip(document.answers, rights, strict=True)
            if low <= depth <= high
        ]
        return sum(found) / len(found) if found else None

    quarters = [(0.0, 0.2), (0.2, 0.4), (0.4, 0.6), (0.6, 0.8), (0.8, 1.0)]
    by_document = outcome.kl.mean(1).double()
    low, high = mean_interval(by_document)
    return {
        "kl": outcome.kl.mean().item(),
        "kl_95": [low, high],
        "kl_standard_error": (by_document.std() / len(by_document) ** 0.5).item() if len(by_document) > 1 else None,
        "kl_by_position": [part.mean().item() for part in outcome.kl.tensor_split(PARTS, dim=1)],
        "kl_p99": outcome.kl.flatten().float().kthvalue(int(0.99 * outcome.kl.numel())).values.item(),
        "delta_ppl": (outcome.loss.mean() - exact.loss.mean()).exp().item() - 1,
        "perplexity": outcome.loss.mean().exp().item(),
        "top1": outcome.agree.float().mean().item(),
        "overlap": 1 - outcome.distance.mean().item(),
        "first_divergence": first_divergence(outcome.agree),
        "passkey_recall": share(True),
        "recall": share(False),
        "passkey_recall_by_depth": [share(True, *quarter) for quarter in quarters],
        "recall_by_depth": [share(False, *quarter) for quarter in quarters],
    }


def first_divergence(agree: torch.Tensor) -> float:
    """Mean number of tokens before the likeliest one first differs, `agree` `[N, T]`; T if it never does."""
    never = torch.ones_like(agree[:, :1])
    return (~torch.cat([agree, ~never], dim=1)).int().argmax(1).float().mean().item()


def _resampled(count: int) -> torch.Tensor:
    return torch.randint(count, (BOOTSTRAPS, count), generator=torch.Generator().manual_seed(0))


def mean_interval(values: torch.Tensor) -> tuple[float, float]:
    """95% bootstrap interval of the mean of `values` `[N]`, one for each document."""
    means = values.double().cpu()[_resampled(len(values))].mean(1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def ratio_interval(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[float, float]:
    """95% paired bootstrap interval of the ratio of the means of two `[N]`, over the same documents."""
    draws = _resampled(len(ours))
    ratios = ours.double().cpu()[draws].mean(1) / theirs.double().cpu()[draws].mean(1)
    low, high = ratios.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


@torch.no_grad()
def continued(model: Any, prompts: torch.Tensor, cache: Cache, attention: str, tokens: int) -> torch.Tensor:
    """`tokens` more ids by free greedy generation, `[N, tokens]`; nothing ends it early."""
    model.set_attn_implementation(attention)
    model.generation_config.eos_token_id = None
    output = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), **as_input(cache), max_new_tokens=tokens, do_sample=False
    )
    return output[:, prompts.shape[1] :]
