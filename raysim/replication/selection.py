"""Selection of the values of a row to send, separate from their packet, so that selections can be nested."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from raysim.codecs import Codec, EstimatedTopK, Packet, TopK
from raysim.codecs.base import dtype_name, nest
from raysim.codecs.layout import layout_of
from raysim.codecs.positions import encode_positions, smallest_form
from raysim.codecs.selection import kept_of, select_with_values
from raysim.codecs.sums import group_sums
from raysim.codecs.work import count_work

if TYPE_CHECKING:
    from torch import Tensor

EXACT = "exact"
ESTIMATED = ("sampled", "bisect")  # DGC's and RedSync's


class Kept(NamedTuple):
    """Values that a selection keeps of a flat row, and their positions there, increasing."""

    positions: Tensor
    values: Tensor


def select(row: Tensor, count: int, how: str, key: int) -> Kept:
    """Return about `count` greatest magnitudes of a flat row: "exact" just as many, or estimated as `EstimatedTopK` does.

    Raises NonFiniteError on NaN or infinity.
    """
    count_work(row.nbytes)
    if how == EXACT:
        return Kept(*select_with_values(row.view(1, -1), count))
    return Kept(*EstimatedTopK(min(1.0, count / len(row)), how).select(row.contiguous(), key))


def select_within(kept: Kept, count: int, how: str, key: int) -> Kept:
    """Return about `count` of the values that are kept already: multi-level compression; "exact" gives the result of `select`."""
    if len(kept.values) <= count:
        return kept
    positions, values = select(kept.values, count, how, key)
    return Kept(kept.positions[positions], values)


def count_of(factor: float, row: Tensor) -> int:
    """Return the number of values of a row that a compression factor leaves."""
    return kept_of(1 / factor, row.numel())


def codec_of(factor: float, how: str, values: Codec) -> TopK | EstimatedTopK:
    """Return the codec of the packets that `pack` makes."""
    return TopK(1 / factor, values=values) if how == EXACT else EstimatedTopK(1 / factor, how, values=values)


def pack(kept: Kept, row: Tensor, factor: float, how: str, values: Codec, key: int) -> Packet:
    """Return the packet of the kept values of `row`, (1, n), encoded by the codec `values`."""
    shape, total = tuple(row.shape), row.numel()
    codec = codec_of(factor, how, values)
    if isinstance(codec, EstimatedTopK):
        return Packet(codec, codec.arrays_of(kept.positions, kept.values, total, key), shape, dtype_name(row))
    arrays = dict(nest("values", values.encode(kept.values.view(1, -1), key)))
    if len(kept.positions) < total:
        arrays |= encode_positions(kept.positions, total, smallest_form(len(kept.positions), total))
    return Packet(codec, arrays, shape, dtype_name(row))


def energy(x: Tensor) -> float:
    """Return the squared norm, the same on any number of threads."""
    return float(group_sums(x, layout_of((math.prod(x.shape),), "tensor", 0), "squares"))
