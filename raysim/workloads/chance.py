"""The quality that a model reaches by chance: what the frequencies of the classes alone predict."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from raysim.workloads.splits import Data, Split


class Chance(NamedTuple):
    """Loss and accuracy on the test split of a model that knows nothing but how often each class occurs in training."""

    loss: float
    accuracy: float


def chance(data: Data) -> Chance:
    """Return what predicting the class frequencies of the training split reaches on the test split.

    A class that does not occur in training counts as seen once, so that the loss stays finite. The classes of text are its
    tokens.
    """
    trained, tested = (_counts(split, data.shape.num_classes) for split in (data.train, data.test))
    seen = np.maximum(trained, 1)
    logs = np.log(seen / seen.sum())
    return Chance(float(-(tested @ logs) / tested.sum()), float(tested[trained.argmax()] / tested.sum()))


def _counts(split: Split, num_classes: int) -> np.ndarray:
    targets = split.targets(np.arange(len(split), dtype=np.int64)).numpy().ravel()
    return np.bincount(targets, minlength=num_classes)
