"""Needle prompts: facts planted in text, with questions about them. Deterministic by seed.

A fact is the line ``<<key = 123456>>``. A question is the same line cut off before the digits, so a model
that recalls the fact continues it greedily with the six digits and the closing ``>>``.

The filler text is the file ``needle/filler.txt`` (ASCII, so one character is one byte and one token of the
needle tokenizer). It is shipped rather than read from the running interpreter, because prompts must be the
same on every Python version. Running this module writes it anew from the interpreter's standard library (PSF
License Version 2); the modules that it is taken from, ``HELD_OUT``, are held out of the model's training.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

FILLER_PATH = Path(__file__).resolve().parent / "needle" / "filler.txt"

HELD_OUT = ("argparse", "dataclasses", "difflib", "heapq", "inspect", "random", "statistics")
TRAINING_PACKAGES = ("accelerate", "numpy", "torch", "transformers")
"""Packages to train on besides the standard library. A model memorizes its 10 to 30 MB in a few minutes."""
STDLIB = Path(sysconfig.get_paths()["stdlib"])
FILLER_BYTES = 160_000

PASSKEY = "pass key"
TERMINATOR = ">>"
ANSWER_DIGITS = 6
ANSWER_TOKENS = ANSWER_DIGITS + len(TERMINATOR)
"""Number of tokens to generate: the digits and the terminator."""

ADJECTIVES = tuple(
    "amber ancient bitter brave bright broken calm clever cold copper crimson curious deep distant dusty early "
    "empty fading gentle golden green hidden hollow humble icy jolly late lazy little lonely loud lucky mellow misty "
    "narrow noble pale patient plain proud quiet rapid rusty scarlet shy silent silver sleepy slow small solid "
    "spotted steady sunny tall tender tiny vivid warm wild".split()
)
NOUNS = tuple(
    "anchor arrow badger barrel basin beacon bell bridge candle canyon castle cedar cloud comet compass cottage "
    "crane desert dolphin engine falcon feather fiddle forest fountain galaxy garden glacier hammer harbor heron "
    "island jacket kettle ladder lantern lemon library magnet marble meadow mirror mountain needle orchard otter "
    "palace pepper pigeon planet quarry ribbon river saddle sparrow temple thunder tunnel valley violin walnut "
    "window".split()
)


def question(key: str) -> str:
    """End of a prompt, a question for ``key``. The right continuation is the answer's digits and ``>>``."""
    return f"\n<<{key} = "


def fact(key: str, answer: str) -> str:
    """Line that plants ``answer`` under ``key``: the question, the digits and the terminator."""
    return f"{question(key)}{answer}{TERMINATOR}\n"


def is_recalled(generated: str, answer: str) -> bool:
    """Whether generated text is the answer with the terminator."""
    return generated.startswith(answer + TERMINATOR)


def random_answer(rng: random.Random) -> str:
    """Six random decimal digits. The first is not zero."""
    return str(rng.randrange(10 ** (ANSWER_DIGITS - 1), 10**ANSWER_DIGITS))


@functools.cache
def filler_text() -> str:
    """Filler text from held-out modules (ASCII)."""
    return FILLER_PATH.read_bytes().decode("ascii")


def _filler(length: int, rng: random.Random) -> str:
    """``length`` bytes of filler from a random line on. After the end of the file it starts again."""
    text = filler_text()
    start = text.index("\n", rng.randrange(len(text) - 1000)) + 1
    return (text * (length // len(text) + 2))[start : start + length]


def _line_start(text: str, offset: int) -> int:
    """Start of the line with ``offset``, so that facts do not split a line."""
    return text.rfind("\n", 0, offset) + 1


def passkey_prompt(tokens: int, depth: float, seed: int) -> tuple[str, str]:
    """One fact, ``<<pass key = ...>>``, in filler text, asked for at the end.

    Args:
        tokens: exact length of the prompt in bytes (= tokens of the needle tokenizer), the question included.
        depth: where the fact goes, from 0.0 (start of the prompt) to 1.0 (just before the question).
        seed: selects the filler text and the answer.

    Returns:
        The prompt, which ends in the question, and the six-digit answer.
    """
    if not 0.0 <= depth <= 1.0:
        raise ValueError(f"depth must lie in [0, 1], got {depth}")
    room = tokens - len(fact(PASSKEY, "0" * ANSWER_DIGITS)) - len(question(PASSKEY))
    if room < 0:
        raise ValueError(f"{tokens} tokens cannot hold a fact and its question")
    rng = random.Random(seed)
    text = _filler(room, rng)
    answer = random_answer(rng)
    while answer in text:
        answer = random_answer(rng)
    cut = room if depth == 1.0 else _line_start(text, int(depth * room))
    return text[:cut] + fact(PASSKEY, answer) + text[cut:] + question(PASSKEY), answer


def recall_prompt(tokens: int, n_facts: int, seed: int) -> tuple[str, list[tuple[str, str]]]:
    """Several facts under two-word keys in filler text, to be asked for one by one (associative recall).

    Args:
        tokens: exact length of the prompt in bytes (= tokens of the needle tokenizer), without a question.
        n_facts: how many facts to plant, at random depths.
        seed: selects the filler text, keys, answers and depths.

    Returns:
        The prompt, and one ``(question, answer)`` for each fact in random order. A model is asked by
        ``prompt + question``, or by appending ``question + answer + ">>"`` turn after turn.
    """
    rng = random.Random(seed)
    keys: list[str] = []
    while len(keys) < n_facts:
        key = f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
        if key not in keys:
            keys.append(key)
    room = tokens - sum(len(fact(key, "0" * ANSWER_DIGITS)) for key in keys)
    if room < 0:
        raise ValueError(f"{tokens} tokens cannot hold {n_facts} facts")
    text = _filler(room, rng)
    answers: list[str] = []
    while len(answers) < n_facts:
        answer = random_answer(rng)
        if answer not in answers and answer not in text:
            answers.append(answer)
    cuts = sorted(_line_start(text, rng.randrange(room + 1)) for _ in keys)
    pieces, previous = [], 0
    for key, answer, cut in zip(keys, answers, cuts, strict=True):
        pieces += [text[previous:cut], fact(key, answer)]
        previous = cut
    asked = [(question(key), answer) for key, answer in zip(keys, answers, strict=True)]
    rng.shuffle(asked)
    return "".join(pieces) + text[previous:], asked


def answered(prompt: str, asked: Iterable[tuple[str, str]]) -> tuple[str, list[int]]:
    """Append questions and right answers to a prompt. Also return the offset of each answer's first digit."""
    text, starts = prompt, []
    for ask, answer in asked:
        starts.append(len(text) + len(ask))
        text += ask + answer + TERMINATOR
    return text, starts


def recalled_at(guesses, ids, starts: Iterable[int]) -> list[bool]:
    """Whether greedy decoding would generate the answers at ``starts``.

    It does exactly if each of an answer's tokens is the likeliest after the tokens before it, so one pass over the
    text with the answers in it tells.

    Args:
        guesses: likeliest next token at each position, (1, T) int64 tensor.
        ids: the tokens of the text, (1, T) int64.
        starts: offsets of the answers.
    """
    right = guesses[0, :-1] == ids[0, 1:]  # right[i]: token i + 1 is foretold
    return [bool(right[start - 1 : start - 1 + ANSWER_TOKENS].all()) for start in starts]


def _sources(root: Path, relative_paths: Iterable[Path]) -> Iterator[str]:
    """Texts of all UTF-8 files. (Some tests of the standard library are deliberately not UTF-8.)"""
    for path in sorted(relative_paths):
        with contextlib.suppress(UnicodeDecodeError):
            yield (root / path).read_text(encoding="utf-8")


def held_out_sources() -> list[str]:
    """Texts of the held-out modules, for the filler."""
    return list(_sources(STDLIB, [Path(f"{name}.py") for name in HELD_OUT]))


def training_sources() -> list[str]:
    """Training texts: the packages, and the standard library without the held-out modules and their tests."""
    texts = []
    for root in (STDLIB, *(Path(find_spec(name).submodule_search_locations[0]) for name in TRAINING_PACKAGES)):
        paths = [path.relative_to(root) for path in root.rglob("*.py")]
        texts += _sources(
            root,
            (
                path
                for path in paths
                if not {"site-packages", "dist-packages"} & set(path.parts)
                and not (root == STDLIB and path.stem.removeprefix("test_") in HELD_OUT)
            ),
        )
    return texts


def write_filler() -> None:
    """Write ``needle/filler.txt``: the first lines of the held-out modules in equal shares, only ASCII."""
    texts = held_out_sources()
    share = FILLER_BYTES // len(texts)
    FILLER_PATH.parent.mkdir(parents=True, exist_ok=True)
    with FILLER_PATH.open("w", encoding="ascii", newline="\n") as file:
        for text in texts:
            ascii_text = "".join(line for line in text.splitlines(keepends=True) if line.isascii())
            file.write(ascii_text[: ascii_text.rfind("\n", 0, share) + 1])


if __name__ == "__main__":
    write_filler()
