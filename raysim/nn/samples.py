"""The samples that a model is called with, for methods that keep a memory for each sample."""

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
    """Stands for sample ids that were not given: raises an error that explains how to give them."""

    def __iter__(self) -> Iterator[int]:
        raise ValueError(
            "A memory for each sample needs the ids of the samples: call the model in `with raysim.nn.samples(ids):`."
        )


UNKNOWN = Samples(_Unknown(), 0)
_CURRENT: ContextVar[Samples] = ContextVar("samples", default=UNKNOWN)


@contextmanager
def samples(ids: Iterable[int] | Tensor, *, epoch: int = 0) -> Iterator[None]:
    """Name the samples with which models are called inside the block, one id for each row of a microbatch or of a whole step.

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


def of_microbatch(found: Samples, num_rows: int, microbatch: int, num_microbatches: int) -> Samples:
    """Return the samples of a microbatch of `num_rows`; `found` names them, or the samples of all microbatches of its step.

    Raises ValueError where it names another number.
    """
    if found is UNKNOWN or len(found.ids) == num_rows:
        return found
    if len(found.ids) == num_rows * num_microbatches:
        return found._replace(ids=found.ids[microbatch * num_rows : (microbatch + 1) * num_rows])
    raise ValueError(f"`samples` must name each row of a microbatch ({num_rows}), but names {len(found.ids)}.")
