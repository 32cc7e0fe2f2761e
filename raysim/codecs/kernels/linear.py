"""Sums over groups, the Walsh-Hadamard transform, and products with thin matrices in numba, all in float64.

Sums are in the order of the references: `raysim.codecs.groups.group_sums`, `raysim.codecs.hadamard.hadamard` and
`raysim.codecs.lowrank`. Inner loops of products are unrolled over several terms, still added in order: results are the same, and
partial sums are loaded and stored less often.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit

from raysim.codecs.kernels import empty, opened

_BLOCK = 4096  # block size of pairwise summation
_LANES = 16  # partial sums of a dot product; tiles transformed together, so the first butterfly already fills vector registers
_COLUMNS = 1024  # columns per pass, so that a row's working set stays in the L1 cache
_GREATEST = 3.4028234663852886e38


@njit(cache=True, nogil=True)
def _fold(low, high):
    for i in range(len(low)):
        low[i] += high[i]


@njit(cache=True, nogil=True)
def _load_terms(x, term, center, block):
    if term == 0:
        for i in range(len(x)):
            block[i] = np.float64(np.float32(np.float64(x[i]) - center))
    elif term == 1:
        for i in range(len(x)):
            block[i] = abs(np.float64(np.float32(np.float64(x[i]) - center)))
    else:
        for i in range(len(x)):
            value = np.float64(np.float32(np.float64(x[i]) - center))
            block[i] = value * value


def group_sums(x, layout, term, center):
    """Return the group sums of the term with index `term` in `raysim.codecs.groups`, a float64 tensor."""
    sums = np.zeros(layout.groups)
    _add_up(x.contiguous().float().view(-1).numpy(), layout.groups, layout.inner, term, center, sums)
    return torch.from_numpy(sums)


@njit(cache=True, nogil=True)
def _add_up(x, groups, inner, term, center, sums):
    """Add the group sums of the term with index `term` in `raysim.codecs.groups` to `sums`."""
    block = np.empty(_BLOCK, np.float64)
    width = 1
    while width < min(inner, _BLOCK):
        width *= 2
    for segment in range((len(x) + inner - 1) // inner):
        run = x[segment * inner : (segment + 1) * inner]
        for start in range(0, inner, width):
            part = run[start : start + width]
            _load_terms(part, term, center, block)
            block[len(part) : width] = 0
            half = width
            while half > 1:
                half //= 2
                _fold(block[:half], block[half : 2 * half])
            sums[segment % groups] += block[0]


def turn(x, tile, factor, limit, count):
    """Transform the tiles of flat `x`, zero-padded; return `count` float32, scaled by `factor` and clamped to +-`limit`."""
    out = empty(count, np.float32)
    _turn(opened(x.float().numpy()), tile, factor, limit, out)
    return torch.from_numpy(out)


@njit(cache=True, nogil=True)
def _cross(left, right):
    for i in range(len(left)):
        total, difference = left[i] + right[i], left[i] - right[i]
        left[i] = total
        right[i] = difference


@njit(cache=True, nogil=True)
def _load_tiles(x, tile, part):
    """Interleave tiles: write value i of tile j to i * _LANES + j, zeros beyond the end of x."""
    part[:] = 0
    for lane in range((len(x) + tile - 1) // tile):
        values, lanes = x[lane * tile : (lane + 1) * tile], part[lane:]
        for i in range(len(values)):
            lanes[i * _LANES] = values[i]


@njit(cache=True, nogil=True)
def _store_tiles(part, tile, factor, limit, out):
    for lane in range((len(out) + tile - 1) // tile):
        values, lanes = out[lane * tile : (lane + 1) * tile], part[lane:]
        for i in range(len(values)):
            values[i] = np.float32(min(max(lanes[i * _LANES] * factor, -limit), limit))


@njit(cache=True, nogil=True)
def _turn(x, tile, factor, limit, out):
    """Write the product of each `tile` values, Sylvester's matrix and `factor`, in float64 and clamped to +-`limit`.

    x is padded with zeros.
    """
    part = np.empty(tile * _LANES, np.float64)
    for start in range(0, len(out), tile * _LANES):
        _load_tiles(x[start : start + tile * _LANES], tile, part)
        half = 1
        while half < tile:
            for pair in range(0, tile, 2 * half):
                first, middle, last = pair * _LANES, (pair + half) * _LANES, (pair + 2 * half) * _LANES
                _cross(part[first:middle], part[middle:last])
            half *= 2
        _store_tiles(part, tile, factor, limit, out[start : start + tile * _LANES])


@njit(cache=True, nogil=True)
def _dot(a, b, sums):
    """Return the sum of a[i] * b[i]: in order within lane i % _LANES, then pairwise over lanes; `sums` is scratch of _LANES.

    Indices are unsigned: numba vectorises only if it can prove that they are not negative.
    """
    sums[:] = 0
    n, count = np.uint64(_LANES), np.uint64(len(a))
    i = np.uint64(0)
    while i + n + n + n + n <= count:
        for lane in range(n):
            j = i + lane
            total = sums[lane] + np.float64(a[j]) * b[j]
            total += np.float64(a[j + n]) * b[j + n]
            total += np.float64(a[j + n + n]) * b[j + n + n]
            sums[lane] = total + np.float64(a[j + n + n + n]) * b[j + n + n + n]
        i += n + n + n + n
    while i < count:
        for lane in range(min(n, count - i)):
            sums[lane] += np.float64(a[i + lane]) * b[i + lane]
        i += n
    half = n
    while half > np.uint64(1):
        half >>= np.uint64(1)
        for lane in range(half):
            sums[lane] += sums[lane + half]
    return sums[0] + 0.0


@njit(cache=True, nogil=True)
def times(matrices, starts, out):
    """Write M Q for matrices M (number, rows, columns) and Q (number or 1, rank, columns) to `out` (number, rank, rows)."""
    sums = np.empty(_LANES)
    for number in range(len(matrices)):
        start = starts[number % len(starts)]
        for row in range(matrices.shape[1]):
            for k in range(len(start)):
                out[number, k, row] = _dot(matrices[number, row], start[k], sums)


@njit(cache=True, nogil=True)
def _add_row(factor, row, out):
    for i in range(len(out)):
        out[i] += factor * np.float64(row[i])


@njit(cache=True, nogil=True)
def _add_four_rows(f0, f1, f2, f3, r0, r1, r2, r3, out):
    for i in range(len(out)):
        total = out[i] + f0 * np.float64(r0[i])
        total += f1 * np.float64(r1[i])
        total += f2 * np.float64(r2[i])
        out[i] = total + f3 * np.float64(r3[i])


@njit(cache=True, nogil=True)
def _add_rows(factors, rows, first, last, out):
    """Add factors[i] * rows[i, first:last] to `out`, in order of i."""
    whole = len(factors) & ~3
    for i in range(0, whole, 4):
        four = (factors[i], factors[i + 1], factors[i + 2], factors[i + 3])
        these = (rows[i, first:last], rows[i + 1, first:last], rows[i + 2, first:last], rows[i + 3, first:last])
        _add_four_rows(*four, *these, out)
    for i in range(whole, len(factors)):
        _add_row(factors[i], rows[i, first:last], out)


@njit(cache=True, nogil=True)
def transposed_times(matrices, lefts, out):
    """Write M^T P for matrices M (number, rows, columns) and P (number, rank, rows) to `out` (number, rank, columns)."""
    out[:] = 0
    for number in range(len(matrices)):
        for first in range(0, matrices.shape[2], _COLUMNS):
            last = min(first + _COLUMNS, matrices.shape[2])
            for start in range(0, matrices.shape[1], 32):  # rows that stay in the cache for the whole rank
                part = matrices[number, start : start + 32]
                for k in range(lefts.shape[1]):
                    _add_rows(lefts[number, k, start : start + 32], part, first, last, out[number, k, first:last])


@njit(cache=True, nogil=True)
def _store(total, out):
    for i in range(len(out)):
        out[i] = np.float32(min(max(total[i], -_GREATEST), _GREATEST))


@njit(cache=True, nogil=True)
def product(lefts, rights, out):
    """Write the product of P (number, rows, rank) and R (number, rank, columns) to (number, rows, columns), float32."""
    total = np.empty(_COLUMNS)
    columns = out.shape[2]
    for number in range(len(out)):
        for first in range(0, columns, _COLUMNS):
            last = min(first + _COLUMNS, columns)
            for row in range(out.shape[1]):
                part = total[: last - first]
                part[:] = 0
                _add_rows(lefts[number, row], rights[number], first, last, part)
                _store(part, out[number, row, first:last])


@njit(cache=True, nogil=True)
def orthonormalise(columns, least):
    """Orthonormalise the columns of (number, rank, rows) in place, each against those before it.

    A column whose remainder is at most `least` of its norm becomes zero.
    """
    sums = np.empty(_LANES)
    for number in range(len(columns)):
        for k in range(columns.shape[1]):
            column = columns[number, k]
            before = math.sqrt(_dot(column, column, sums))
            for _ in range(2):  # one pass is inaccurate for nearly parallel columns
                for j in range(k):
                    _add_row(-_dot(columns[number, j], column, sums), columns[number, j], column)
            norm = math.sqrt(_dot(column, column, sums))
            scale = 1.0 / norm if norm > least * before else 0.0
            for i in range(len(column)):
                column[i] *= scale
