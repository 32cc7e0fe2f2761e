"""The sample ids of a model's calls, for methods with a memory for each sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from torch import Tensor


class Samples(NamedTuple):
    """The ids of a batch's samples, and the epoch in which they are visited."""

    ids: tuple[int, ...]
    epoch: int


class _Unknown(tuple[int, ...]):
    """Unknown sample ids; reading them raises an error that says how to give them."""

    def __iter__(self) -> Iterator[int]:
        raise ValueError(
            "A memory for each sample needs the ids of the samples: call the model in `with raysim.nn.samples(ids):`."
        )


UNKNOWN = Samples(_Unknown(), 0)
_CURRENT: ContextVar[Samples] = ContextVar("samples", default=UNKNOWN)


@contextmanager
def samples(ids: Iterable[int] | Tensor, *, epoch: int = 0) -> Iterator[None]:
    """Give the sample ids of model calls inside the block, one for each row of a microbatch or of a whole step.

    `AQSGD` and every method with `key='sample'` keep their memory under these ids. `epoch` counts from 0; `AQSGD` sends its
    first epochs dense.

    >>> with samples([4, 7], epoch=1):
    ...     current()
    Samples(ids=(4, 7), epoch=1)
    """
    values = ids.tolist() if isinstance(ids, Tensor) else ids
    token = _CURRENT.set(Samples(tuple(int(value) for value in values), epoch))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current() -> Samples:
    """Return the samples of the enclosing `samples` block, or `UNKNOWN` outside of any."""
    return _CURRENT.get()


def of_microbatch(samples_of_call: Samples, num_rows: int, microbatch: int, num_microbatches: int) -> Samples:
    """Return the samples of a microbatch of `num_rows`, from the samples of one call or of the whole step.

    Raises ValueError if the numbers do not match.
    """
    if samples_of_call is UNKNOWN or len(samples_of_call.ids) == num_rows:
        return samples_of_call
    if len(samples_of_call.ids) == num_rows * num_microbatches:
        return samples_of_call._replace(ids=samples_of_call.ids[microbatch * num_rows : (microbatch + 1) * num_rows])
    raise ValueError(
        f"`samples` must name each row of a microbatch ({num_rows}), but names {len(samples_of_call.ids)}."
    )
