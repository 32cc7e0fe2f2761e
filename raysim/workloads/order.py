"""The order of samples: a pure function of the seed and the step, so that a resumed run sees the same samples.

Keys come from `raysim.random.derive_key`, numbers from Philox, whose bits are fixed for every version of numpy.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from raysim.random import derive_key


def permutation(count: int, key: int) -> NDArray[np.int64]:
    """Return 0..count-1 in the order of `count` random 64-bit numbers drawn with `key`.

    >>> permutation(5, 0)
    array([0, 2, 1, 4, 3])
    """
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")


def steps_per_epoch(num_samples: int, batch_size: int) -> int:
    """Return how many whole batches an epoch has; raises ValueError where it has none.

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
