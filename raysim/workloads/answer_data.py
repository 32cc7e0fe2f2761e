"""Synthetic tasks with one right answer: a prompt of tokens, and the tokens to generate after it.

The loss covers the answer only (targets within the prompt are -100), or with `whole` the whole text. The metric
`exact_match` judges generated answers. Samples are drawn by counter-based random numbers from the options alone. Prompts are
unique, so no test sample occurs in training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from raysim.notation import check_integer
from raysim.on_demand import torch
from raysim.random import derive_key
from raysim.workloads.losses import IGNORED
from raysim.workloads.options import check_boolean
from raysim.workloads.splits import Data, DataShape

if TYPE_CHECKING:
    from torch import Tensor

_MOST_DIGITS = 9  # of an operand: sums and pairs are computed in 64 bits
_MOST_LENGTH = 4096

_MOST_SAMPLES = 10**7
_AT_ONCE = 16_384  # samples drawn at once

Tokens = NDArray[np.uint8]
Draw = Callable[[int, int], NDArray[np.int64]]  # random integers of shape (sample, given width), below a given bound


@dataclass(frozen=True, eq=False)
class AnswerSplit:
    """Prompts with their answers, one sample per row of tokens; short answers are filled up with the token `padding`.

    >>> split = AnswerSplit(np.array([[7, 3, 9, 4, 0]], np.uint8), start=3, padding=0)
    >>> split.inputs(np.array([0]), 0, 0, True), split.targets(np.array([0]))
    (tensor([[7, 3, 9, 4]]), tensor([[-100, -100,    4, -100]]))
    """

    tokens: Tokens  # (sample, length + 1)
    start: int  # the position of the answer's first token
    padding: int | None = None
    whole: bool = False  # whether targets within the prompt count too

    def __len__(self) -> int:
        return len(self.tokens)

    def inputs(self, ids: NDArray[np.int64], epoch: int, key: int, training: bool) -> Tensor:
        return torch.from_numpy(self.tokens[ids, :-1].astype(np.int64))

    def targets(self, ids: NDArray[np.int64]) -> Tensor:
        targets = self.tokens[ids, 1:].astype(np.int64)
        if not self.whole:
            targets[:, : self.start - 1] = IGNORED
        if self.padding is not None:
            targets[targets == self.padding] = IGNORED
        return torch.from_numpy(targets)


def addition(
    *, digits: int = 2, reverse: bool = True, whole: bool = False, train_samples: int = 8000, test_samples: int = 500
) -> Data:
    """Return sums of two numbers of `digits` digits, such as `27+15=240`.

    `reverse`: the answer begins with its last digit. Numbers have leading zeros, and answers one more digit. The 12 tokens
    are the digits, `+` and `=`.
    """
    digits = check_integer("data.digits", digits, 1, _MOST_DIGITS)
    check_boolean("data.reverse", reverse)
    powers = 10 ** np.arange(digits, -1, -1)

    def make(draw: Draw) -> Tokens:
        first, second = draw(2, 10**digits).T[:, :, None]
        answer = (first + second) // powers % 10
        numbers = (each // powers[1:] % 10 for each in (first, second))
        plus, equals = np.array([[10]]), np.array([[11]])
        return _rows(next(numbers), plus, next(numbers), equals, answer[:, ::-1] if reverse else answer)

    return _data(("addition", digits), make, 12, 2 * digits + 2, None, whole, train_samples, test_samples)


def copying(
    *, length: int = 8, symbols: int = 16, whole: bool = False, train_samples: int = 8000, test_samples: int = 500
) -> Data:
    """Return words of `length` random symbols, each followed by a separator and its copy."""
    length = check_integer("data.length", length, 1, _MOST_LENGTH)
    symbols = check_integer("data.symbols", symbols, 2, 255)

    def make(draw: Draw) -> Tokens:
        words = draw(length, symbols)
        return _rows(words, np.array([[symbols]]), words)

    return _data(("copying", length, symbols), make, symbols + 1, length + 1, None, whole, train_samples, test_samples)


def brackets(
    *, length: int = 12, kinds: int = 3, whole: bool = False, train_samples: int = 8000, test_samples: int = 500
) -> Data:
    """Return prefixes of balanced bracket sequences, each followed by its closing brackets and an end token.

    A prompt has `length` brackets of `kinds` kinds, each opening or closing with equal probability (the Dyck language). The answer
    closes the open brackets, the last one first; if none is open, it is the end token alone.
    """
    length = check_integer("data.length", length, 2, _MOST_LENGTH)
    kinds = check_integer("data.kinds", kinds, 1, 100)
    end, padding = 2 * kinds, 2 * kinds + 1

    def make(draw: Draw) -> Tokens:
        bracket, opens = draw(length, kinds).tolist(), draw(length, 2).tolist()
        rows = np.full((len(bracket), 2 * length + 1), padding, np.uint8)
        for row in range(len(rows)):
            unclosed: list[int] = []
            for i in range(length):
                if opens[row][i] or not unclosed:
                    unclosed.append(bracket[row][i])
                    rows[row, i] = unclosed[-1]
                else:
                    rows[row, i] = kinds + unclosed.pop()
            answer = [*(kinds + kind for kind in reversed(unclosed)), end]
            rows[row, length : length + len(answer)] = answer
        return rows

    return _data(("brackets", length, kinds), make, padding + 1, length, padding, whole, train_samples, test_samples)


def _data(
    name: tuple[str | int, ...],
    make: Callable[[Draw], Tokens],
    num_tokens: int,
    start: int,
    padding: int | None,
    whole: bool,
    train_samples: int,
    test_samples: int,
) -> Data:
    """Return unique samples drawn by `make`. Test samples come first, so they do not depend on `train_samples`."""
    check_boolean("data.whole", whole)
    test, train = (
        check_integer(f"data.{split}_samples", number, 1, _MOST_SAMPLES)
        for split, number in (("test", test_samples), ("train", train_samples))
    )
    tokens = _different(name, make, start, test + train)
    length = tokens.shape[1] - 1
    has_ignored = not whole or padding is not None
    shape = DataShape((length,), "int64", num_tokens, target_shape=(length,), has_ignored=has_ignored, given=start - 1)
    train_split, test_split = (AnswerSplit(rows, start, padding, whole) for rows in (tokens[test:], tokens[:test]))
    return Data(train_split, test_split, shape)


def _different(name: tuple[str | int, ...], make: Callable[[Draw], Tokens], start: int, wanted: int) -> Tokens:
    """Return `wanted` samples with unique prompts; raises ValueError if there seem to be fewer."""
    random = np.random.Philox(key=derive_key(*name, "samples"))

    def draw(width: int, below: int) -> NDArray[np.int64]:
        numbers = random.random_raw(_AT_ONCE * width) % np.uint64(below)
        return numbers.astype(np.int64).reshape(_AT_ONCE, width)

    samples = make(draw)[:0]
    before = -1
    while before < len(samples) < wanted:
        before = len(samples)
        samples = np.concatenate([samples, make(draw)])
        _, first = np.unique(samples[:, :start], axis=0, return_index=True)
        samples = samples[np.sort(first)]
    if len(samples) < wanted:
        raise ValueError(
            f"`data.train_samples` and `data.test_samples` of `{name[0]}` may be {len(samples)} together with these options, but got "
            f"{wanted}."
        )
    return samples[:wanted]


def _rows(*columns: Tokens | NDArray[np.int64]) -> Tokens:
    """Join columns of tokens; a column of one row is repeated."""
    height = max(map(len, columns))
    return np.concatenate([np.broadcast_to(each, (height, each.shape[1])) for each in columns], axis=1).astype(np.uint8)
