"""Prompts with checkable answers for a language model, as data of a run: `data=answer_prompts:prompts`.

Copies, sums, facts stated in the text, and closing brackets, after as many worked examples as fit, the first of them cut. The loss and
`exact_match` cover the answer alone, which ends a prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from raysim.workloads.losses import IGNORED

LEAST = 4
"""Tokens that every worked example has."""
WORDS = [
    "apple",
    "river",
    "stone",
    "green",
    "music",
    "table",
    "horse",
    "paper",
    "cloud",
    "light",
    "glass",
    "house",
    "bread",
    "water",
]
NAMES = ["Anna", "Tom", "Maria", "Peter", "Lucy", "David", "Sarah", "John", "Emma", "Paul"]
COLOURS = ["red", "blue", "green", "black", "white", "yellow", "brown", "pink"]
THINGS = ["car", "hat", "dog", "house", "cup", "bike", "coat", "bag"]
BRACKETS = {"(": ")", "[": "]", "{": "}"}


def _copy(draw: Random) -> tuple[str, str]:
    words = " ".join(draw.sample(WORDS, 3))
    return f"Say: {words}. Answer:", f" {words}"


def _add(draw: Random) -> tuple[str, str]:
    first, second = draw.randint(1, 9), draw.randint(1, 9)
    return f"{first} + {second} = ", str(first + second)


def _recall(draw: Random) -> tuple[str, str]:
    names, colours, thing = draw.sample(NAMES, 2), draw.sample(COLOURS, 2), draw.choice(THINGS)
    facts = " ".join(f"{name} has a {colour} {thing}." for name, colour in zip(names, colours, strict=True))
    asked = draw.randrange(2)
    return f"{facts} The {thing} of {names[asked]} is", f" {colours[asked]}"


def _close(draw: Random) -> tuple[str, str]:
    opened = [draw.choice([*BRACKETS]) for _ in range(draw.randint(2, 3))]
    return f"{' '.join(opened)} closes with", "".join(f" {BRACKETS[each]}" for each in reversed(opened))


KINDS: dict[str, Callable[[Random], tuple[str, str]]] = {"copy": _copy, "add": _add, "recall": _recall, "close": _close}


class Samples(list[tuple[Tensor, Tensor]]):
    """Pairs of inputs and targets, whose targets are tokens."""

    def __init__(self, pairs: list[tuple[Tensor, Tensor]], num_tokens: int) -> None:
        super().__init__(pairs)
        self.classes = range(num_tokens)


def prompts(
    *, path: str, length: int = 64, kind: str = "all", each: int = 80, seed: int = 0
) -> tuple[Samples, Samples]:
    """Return training and test samples of `length` tokens: `each` test prompts of a kind, or of all kinds in turn.

    `path`: a folder with the model's tokenizer. Training samples are other prompts, `each` in all.
    """
    tokenizer = Tokenizer.from_file(str(Path(path) / "tokenizer.json"))
    chosen = list(KINDS) if kind == "all" else [kind]
    draw, seen, pairs = Random(seed), set[str](), list[tuple[Tensor, Tensor]]()
    while len(pairs) < (len(chosen) + 1) * each:
        make = KINDS[chosen[len(pairs) % len(chosen)]]
        question, answer = make(draw)
        shots = [shot for _ in range(length // LEAST + 1) if (shot := make(draw))[0] != question]
        text = "".join(f"{asked}{told}\n" for asked, told in shots) + question
        if text in seen:
            continue
        seen.add(text)
        before, after = (tokenizer.encode(part, add_special_tokens=False).ids for part in (text, answer))
        ids = torch.tensor((before + after)[-length - 1 :])
        targets = ids[1:].clone()
        targets[: length - len(after)] = IGNORED
        pairs.append((ids[:-1], targets))
    num_tokens, count = tokenizer.get_vocab_size(), len(chosen) * each
    return Samples(pairs[count:], num_tokens), Samples(pairs[:count], num_tokens)
