"""Data sets: two splits of samples that live in numpy arrays, read by id.

Splits pickle without copies of their arrays, which may come back read-only. Randomness is counter-based
(`raysim.random.derive_key`), so a sample does not depend on the batch it is in. The order of samples is a function of the seed and
the step, so that a resumed run sees the same samples; its numbers are from Philox, whose bits are fixed for every version of numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from raysim.notation import check_integer
from raysim.on_demand import torch
from raysim.random import derive_key
from raysim.workloads.mapped_arrays import Rows

if TYPE_CHECKING:
    from torch import Tensor

MOST_LAYERS = 1024  # of a model whose depth is an option
PADDING = 4  # pixels by which a random crop moves at most
TEST_SHARE = 10  # one in this many samples is a test sample, if the data have no test split


class DataShape(NamedTuple):
    """Shapes and types of one sample, and the number of classes: what models, losses and metrics depend on."""

    input_shape: tuple[int, ...]  # (channel, height, width), (length,) or (features,)
    input_dtype: str  # "float32" or "int64"
    num_classes: int  # to distinguish; if targets are numbers, how many numbers a sample or position has
    target_shape: tuple[int, ...] = ()  # () for one class, (length,) for a class a token, (..., k) for k numbers
    target_dtype: str = "int64"  # "int64" for classes, "float32" for numbers
    target_scale: tuple[float, ...] = ()  # factors that give targets, which are numbers, their original units back
    num_tokens: int = 0  # tokens that inputs are made of; if 0, inputs are the classes themselves, or not tokens
    padding: int | None = None  # the token that fills up short inputs
    has_ignored: bool = False  # whether targets of -100 may occur, which do not count
    given: int = 0  # first targets of a sample that belong to its prompt, and are never generated

    @property
    def classifies(self) -> bool:
        """True if targets are classes, not numbers."""
        return self.target_dtype == "int64"


class Split(Protocol):
    """Samples 0..len-1, read in batches."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def inputs(self, ids: NDArray[np.int64], epoch: int, key: int, training: bool) -> Tensor:
        """Return the inputs of the samples `ids`; `epoch` and `key` decide on augmentation, which only training has."""

    def targets(self, ids: NDArray[np.int64]) -> Tensor:
        """Return the targets of the samples `ids`, of the shape and type that `DataShape` gives."""


class Data(NamedTuple):
    """A data set: the samples to train on, the samples to test on, and the shape of both."""

    train: Split
    test: Split
    shape: DataShape


@dataclass(frozen=True, eq=False)
class ImageSplit:
    """Images kept as uint8 and normalised on access, as (x / scale - mean) / std.

    `augment` moves each image by up to 4 pixels (the border becomes black) and mirrors every other image: `random` draws again
    in each epoch, `fixed` draws once for each sample, `none` does neither.

    >>> split = ImageSplit(np.full((1, 1, 2, 2), 51, np.uint8), np.array([7]), mean=(0.1,), std=(0.5,))
    >>> split.inputs(np.array([0]), epoch=0, key=0, training=True)
    tensor([[[[0.2000, 0.2000],
              [0.2000, 0.2000]]]])
    """

    images: NDArray[np.uint8]  # (sample, channel, height, width)
    labels: NDArray[np.int64]  # (sample,)
    mean: tuple[float, ...]  # per channel, of x / scale
    std: tuple[float, ...]
    scale: float = 255.0
    augment: str = "none"

    def __len__(self) -> int:
        return len(self.labels)

    def inputs(self, ids: NDArray[np.int64], epoch: int, key: int, training: bool) -> Tensor:
        """Return (batch, channel, height, width) in float32."""
        images = augmented(self.images[ids], ids, epoch, key, self.augment if training else "none")
        return normalise(images, self.mean, self.std, self.scale)

    def targets(self, ids: NDArray[np.int64]) -> Tensor:
        """Return the labels, (batch,)."""
        return torch.from_numpy(self.labels[ids])


@dataclass(frozen=True, eq=False)
class TextSplit:
    """One flat row of tokens; sample i reads the `length` tokens from i x length on, its targets are one token further.

    >>> split = TextSplit(np.arange(10, dtype=np.uint8), length=4)
    >>> len(split), split.inputs(np.array([1]), epoch=0, key=0, training=True), split.targets(np.array([1]))
    (2, tensor([[4, 5, 6, 7]]), tensor([[5, 6, 7, 8]]))
    """

    tokens: Rows
    length: int

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def inputs(self, ids: NDArray[np.int64], epoch: int, key: int, training: bool) -> Tensor:
        """Return (batch, length) in int64."""
        return self._read(ids, 0)

    def targets(self, ids: NDArray[np.int64]) -> Tensor:
        """Return the next tokens, (batch, length)."""
        return self._read(ids, 1)

    def _read(self, ids: NDArray[np.int64], shift: int) -> Tensor:
        positions = ids[:, None] * self.length + np.arange(shift, shift + self.length)
        return torch.from_numpy(self.tokens[positions].astype(np.int64))


def limit(field: str, wanted: int | None, available: int) -> int:
    """Return the number of samples to take from a split: all, or the first `wanted`; raises ValueError by field."""
    if wanted is None:
        return available
    if check_integer(field, wanted, 1) > available:
        raise ValueError(f"`{field}` must be at most the number of samples ({available}), but got {wanted}.")
    return int(wanted)


def split_rows(
    kind: str, counts: Sequence[int], train_samples: int | None, test_samples: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows to train and to test on, at most the wanted first of each.

    `counts`: numbers of rows in the training and the test part, indexed consecutively. From a single part, a tenth
    becomes the test split, drawn from `kind` alone and so the same in every run. Raises ValueError if there are too few
    rows.
    """
    if len(counts) == 2:
        train, test = np.arange(counts[0]), np.arange(counts[0], sum(counts))
    else:
        count = counts[0]
        if count < 2:
            raise ValueError(f"`data.path` must hold 2 samples or more, to train and to test on, but holds {count}.")
        order, num_test = permutation(count, derive_key(kind, "split")), max(1, count // TEST_SHARE)
        train, test = np.sort(order[num_test:]), np.sort(order[:num_test])
    return (
        train[: limit("data.train_samples", train_samples, len(train))],
        test[: limit("data.test_samples", test_samples, len(test))],
    )


def draws(ids: NDArray[np.int64], key: int) -> NDArray[np.uint64]:
    """Return one random 64-bit number a sample, a function of `key` and its id: SplitMix64 at counter id + 1.

    >>> draws(np.array([3, 5]), key=1) == draws(np.array([5, 3]), key=1)[::-1]
    array([ True,  True])
    """
    z = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def normalise(
    images: NDArray[np.uint8], mean: tuple[float, ...], std: tuple[float, ...], scale: float = 255.0
) -> Tensor:
    """Return (x / scale - mean) / std in float32, of (batch, channel, height, width)."""
    means, stds = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
    return torch.from_numpy(images).float().div_(scale).sub_(means).div_(stds)


def augmented(images: NDArray[np.uint8], ids: NDArray[np.int64], epoch: int, key: int, style: str) -> NDArray[np.uint8]:
    """Return images moved and mirrored: anew in each epoch (`random`), once for each sample (`fixed`), or not (`none`)."""
    if style == "none":
        return images
    return _crop_and_flip(images, ids, derive_key(key, "augment", epoch if style == "random" else "fixed"))


def _crop_and_flip(images: NDArray[np.uint8], ids: NDArray[np.int64], key: int) -> NDArray[np.uint8]:
    """Return each of (batch, channel, height, width) at a place and in a direction drawn for its id."""
    places = 2 * PADDING + 1
    chosen = draws(ids, key) % np.uint64(2 * places * places)
    place, mirrored = np.divmod(chosen.astype(np.int64), 2)
    top, left = np.divmod(place, places)
    padded = np.pad(images, ((0, 0), (0, 0), (PADDING, PADDING), (PADDING, PADDING)))
    windows = sliding_window_view(padded, images.shape[2:], axis=(2, 3))  # (batch, channel, top, left, height, width)
    moved = windows[np.arange(len(ids)), :, top, left]
    flips = np.flatnonzero(mirrored)
    moved[flips] = moved[flips][..., ::-1]
    return moved


def permutation(count: int, key: int) -> NDArray[np.int64]:
    """Return 0..count-1 in the order of `count` random 64-bit numbers drawn with `key`.

    >>> permutation(5, 0)
    array([0, 2, 1, 4, 3])
    """
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")


def steps_per_epoch(num_samples: int, batch_size: int) -> int:
    """Return the number of whole batches in an epoch; raises ValueError if there is none.

    >>> steps_per_epoch(50_000, 128)
    390
    """
    if not 1 <= batch_size <= num_samples:
        raise ValueError(
            f"`batch_size` must be from 1 to the number of training samples ({num_samples}), but got {batch_size}."
        )
    return num_samples // batch_size


def batch_ids(num_samples: int, batch_size: int, seed: int, step: int) -> tuple[int, NDArray[np.int64]]:
    """Return the epoch of `step` (from 0) and the ids of its samples; an incomplete last batch of an epoch is dropped.

    >>> epoch, ids = batch_ids(10, 4, seed=0, step=2)
    >>> epoch, ids.tolist()
    (1, [1, 0, 5, 3])
    """
    epoch, batch = divmod(step, steps_per_epoch(num_samples, batch_size))
    return epoch, _epoch_order(num_samples, seed, epoch)[batch * batch_size : (batch + 1) * batch_size].copy()


@lru_cache(maxsize=2)
def _epoch_order(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return permutation(num_samples, derive_key(seed, "order", epoch))
