"""Documents for models with a tokenizer: passages of real text with planted facts, which questions at the end ask for.

Each document is a passage from a random place of the text. Facts ("The secret code of copper is 481516.") stand behind
random line breaks. The same sentences follow the passage in another order: whether the model would have said the digits
is recall. Real models do not recall all of them, so the full cache's share stands beside every other.
"""

from __future__ import annotations

import random
from typing import Any

from examples.measure.quality.quality import Document

THINGS = (
    *("copper", "amber", "cedar", "granite", "velvet", "saffron", "marble", "indigo", "walnut", "silver"),
    *("coral", "maple", "onyx", "linen", "ginger", "cobalt", "willow", "pepper", "ivory", "bronze"),
)
FACTS = 12
"""Number of facts of a document."""


def documents(tokenizer: Any, text: str, tokens: int, count: int, facts: int = FACTS) -> list[Document]:
    """Cut `count` documents of `tokens` tokens, with the seeds 0, 1, ...

    Raises:
        ValueError: The text or the documents are too short.
    """
    return [document(tokenizer, text, tokens, facts, seed) for seed in range(count)]


def document(tokenizer: Any, text: str, tokens: int, facts: int, seed: int) -> Document:
    """Cut the document of a seed."""
    rng = random.Random(seed)

    def ids_of(part: str) -> list[int]:
        return tokenizer(part, add_special_tokens=False)["input_ids"]

    planted = []
    for thing in rng.sample(THINGS, facts):
        answer = ids_of(f" {rng.randrange(10**5, 10**6)}")
        planted.append((ids_of(f"\nThe secret code of {thing} is"), answer, ids_of(".\n")))
    length = sum(len(part) for fact in planted for part in fact)
    room = tokens - 2 * length
    characters = 10 * tokens  # more than the passage needs: a token of prose has four
    if room < length or len(text) <= characters:
        raise ValueError(
            f"A document of {tokens:,} tokens with {facts} facts needs {3 * length:,} tokens and a text of more than "
            f"{characters:,} characters; the text has {len(text):,}."
        )
    start = text.find("\n", rng.randrange(len(text) - characters)) + 1
    passage = tokenizer(text[start : start + characters])["input_ids"][:room]
    if len(passage) < room:
        raise ValueError(f"The text has too few tokens at character {start:,} for a document of {tokens:,} tokens.")
    breaks = [place for place, token in enumerate(passage, 1) if "\n" in tokenizer.decode([token])]
    if len(breaks) < facts:
        raise ValueError(
            f"The text at character {start:,} has {len(breaks)} lines for {facts} facts; allow fewer facts."
        )
    places = sorted(rng.sample(breaks, facts))
    ids: list[int] = []
    for place, after, fact in zip(places, [0, *places], planted, strict=False):
        ids += passage[after:place] + [token for part in fact for token in part]
    ids += passage[places[-1] :]
    answers = []
    for place, (ask, answer, end) in rng.sample(list(zip(places, planted, strict=True)), facts):
        begin = len(ids) + len(ask)
        answers.append((begin, begin + len(answer), place / room))
        ids += ask + answer + end
    return Document(ids, answers, single=False, seed=seed)
