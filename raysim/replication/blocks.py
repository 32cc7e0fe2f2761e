"""Square blocks of matrices, within which methods select values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysim.replication.powersgd import matrix_of

if TYPE_CHECKING:
    from torch import Tensor


def block_of(shape: tuple[int, ...], side: int) -> tuple[int, int]:
    """Return the rows and columns of the blocks of a tensor, as a matrix: the greatest divisors of its own up to `side`.

    >>> block_of((128, 64, 3, 3), 64), block_of((151, 96), 64), block_of((10,), 64)
    ((64, 64), (1, 48), (10, 1))
    """
    rows, columns = matrix_of(shape)
    return divisor(rows, side), divisor(columns, side)


def divisor(count: int, limit: int) -> int:
    """Return the greatest divisor of `count` up to `limit`."""
    return next(size for size in range(min(count, limit), 0, -1) if count % size == 0)


def to_blocks(x: Tensor, side: int) -> Tensor:
    """Return the blocks of a tensor, one after the other: (blocks, rows, columns)."""
    rows, columns = matrix_of(tuple(x.shape))
    height, width = block_of(tuple(x.shape), side)
    cut = x.reshape(rows // height, height, columns // width, width)
    return cut.transpose(1, 2).reshape(-1, height, width)


def from_blocks(blocks: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor of a shape that `to_blocks` cut."""
    rows, columns = matrix_of(shape)
    _, height, width = blocks.shape
    cut = blocks.reshape(rows // height, columns // width, height, width)
    return cut.transpose(1, 2).reshape(shape)
