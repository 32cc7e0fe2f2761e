"""Columns of a matrix, as bit patterns, in numba: the greatest magnitude of each, taking some apart, and putting them back."""

# mypy: ignore-errors
# What numba compiles has the types that it infers, which mypy cannot follow.

from __future__ import annotations

from numba import njit


@njit(cache=True, nogil=True)
def _widen(bits, mask, found):
    for i in range(len(bits)):
        found[i] = max(found[i], bits[i] & mask)


@njit(cache=True, nogil=True)
def greatest(bits, mask, found):
    """Write the greatest magnitude of each column, rows following one another; `mask` is all bits but the sign."""
    found[:] = 0
    columns = len(found)
    for start in range(0, len(bits), columns):
        _widen(bits[start : start + columns], mask, found)


@njit(cache=True, nogil=True)
def _copy(source, target):
    for i in range(len(target)):
        target[i] = source[i]


@njit(cache=True, nogil=True)
def part(bits, columns, chosen, kept, others):
    """Write the `chosen` columns, increasing, to `kept` and all others to `others`."""
    to_kept = to_others = 0
    for start in range(0, len(bits), columns):
        first = 0
        for column in chosen:
            kept[to_kept] = bits[start + column]
            to_kept += 1
            _copy(bits[start + first : start + column], others[to_others : to_others + column - first])
            to_others += column - first
            first = column + 1
        _copy(bits[start + first : start + columns], others[to_others : to_others + columns - first])
        to_others += columns - first


@njit(cache=True, nogil=True)
def join(kept, others, columns, chosen, bits):
    """Write columns taken apart by `part` to where they were."""
    from_kept = from_others = 0
    for start in range(0, len(bits), columns):
        first = 0
        for column in chosen:
            bits[start + column] = kept[from_kept]
            from_kept += 1
            _copy(others[from_others : from_others + column - first], bits[start + first : start + column])
            from_others += column - first
            first = column + 1
        _copy(others[from_others : from_others + columns - first], bits[start + first : start + columns])
        from_others += columns - first
