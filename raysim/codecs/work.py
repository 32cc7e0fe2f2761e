"""A count of the work of codecs: bytes of the dense tensors that they go over, in this process.

Seconds on one machine say little of another device, and never repeat; these bytes do. Divided by the speed of a device they price
codecs that ran elsewhere. Each pass over a tensor counts, be it sent or dropped: of a codec, when it encodes and when it decodes;
of a codec nested in another, for the values that it is given; of a selection or a product with a thin matrix, likewise. Copies
(`Identity`) and sums are free.
"""

from __future__ import annotations

_counted = [0]


def count_work(num_bytes: int) -> None:
    """Count a pass over `num_bytes` bytes of dense tensors."""
    _counted[0] += num_bytes


def work_bytes() -> int:
    """Return the bytes counted since the process began: a difference is the work in between.

    >>> import torch
    >>> from raysim.codecs import TopK
    >>> before = work_bytes()
    >>> packet = TopK(0.1).encode(torch.ones(1000))
    >>> work_bytes() - before
    4000
    """
    return _counted[0]
