"""Sums over groups in numba, in the order of `raysim.codecs.groups.group_sums`."""

# mypy: ignore-errors
# What numba compiles has the types that it infers, which mypy cannot follow.

from __future__ import annotations

import numpy as np
import torch
from numba import njit

_BLOCK = 4096


@njit(cache=True, nogil=True)
def _fold(low, high):
    for i in range(len(low)):
        low[i] += high[i]


@njit(cache=True, nogil=True)
def _load(x, term, center, block):
    if term == 0:
        for i in range(len(x)):
            block[i] = np.float64(np.float32(np.float64(x[i]) - center))
    elif term == 1:
        for i in range(len(x)):
            block[i] = abs(np.float64(np.float32(np.float64(x[i]) - center)))
    elif term == 2:
        for i in range(len(x)):
            value = np.float64(np.float32(np.float64(x[i]) - center))
            block[i] = value * value
    elif term == 3:
        for i in range(len(x)):
            block[i] = x[i] if x[i] > 0 else 0.0
    elif term == 4:
        for i in range(len(x)):
            block[i] = x[i] if x[i] < 0 else 0.0
    else:
        for i in range(len(x)):
            block[i] = 1.0 if x[i] >= 0 else 0.0


def group_sums(x, layout, term, center):
    """Return the sums over the groups of `layout` of the term of that index in `raysim.codecs.groups`, a float64 tensor."""
    sums = np.zeros(layout.groups)
    _add_up(x.contiguous().float().view(-1).numpy(), layout.groups, layout.inner, term, center, sums)
    return torch.from_numpy(sums)


@njit(cache=True, nogil=True)
def _add_up(x, groups, inner, term, center, sums):
    """Add to `sums` over each group the term of that number in `raysim.codecs.groups`."""
    block = np.empty(_BLOCK, np.float64)
    width = 1
    while width < min(inner, _BLOCK):
        width *= 2
    for segment in range((len(x) + inner - 1) // inner):
        run = x[segment * inner : (segment + 1) * inner]
        for start in range(0, inner, width):
            part = run[start : start + width]
            _load(part, term, center, block)
            block[len(part) : width] = 0
            half = width
            while half > 1:
                half //= 2
                _fold(block[:half], block[half : 2 * half])
            sums[segment % groups] += block[0]
