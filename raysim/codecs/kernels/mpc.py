"""MPC's stages in numba, over words of any width (`raysim.codecs.contrib.mpc` has the plain reference)."""

# mypy: ignore-errors
# What numba compiles has the types that it infers, which mypy cannot follow.

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True, nogil=True, boundscheck=False)
def _transpose(a, masks):
    """Transpose a square matrix of bits, a row a word, the first column its most significant bit (Warren, Hacker's Delight)."""
    width = len(a)
    half = width >> 1
    for mask in masks:
        for start in range(0, width, 2 * half):
            for k in range(start, start + half):
                t = (a[k] ^ (a[k + half] >> half)) & mask
                a[k] ^= t
                a[k + half] ^= t << half
        half >>= 1


@njit(cache=True, nogil=True)
def encode(words, stride, masks, bitmap, out):
    """Write the bitmap of the words that are not zero after all stages, and these words; return their number."""
    width = 8 * words.itemsize
    a = np.empty(width, words.dtype)
    previous, at = words.dtype.type(0), 0
    for group in range(len(bitmap) * 8 // width):
        start = group * width
        for i in range(width):
            place = start + i
            if place >= len(words):
                a[i] = 0
            elif place >= stride:
                a[i] = words[place] - words[place - stride]
            else:
                a[i] = words[place]
        _transpose(a, masks)
        for i in range(0, width, 8):
            flags = 0
            for j in range(8):
                word = a[i + j]
                difference = words.dtype.type(word - previous)
                previous = word
                out[at] = difference
                kept = difference != 0
                flags = 2 * flags + kept
                at += kept
            bitmap[(start + i) >> 3] = flags
    return at


@njit(cache=True, nogil=True)
def decode(bitmap, kept, stride, masks, out):
    """Write the words of a bitmap and what it keeps; return whether there are as many."""
    width = 8 * out.itemsize
    a = np.empty(width, out.dtype)
    previous, at = out.dtype.type(0), 0
    for group in range(len(bitmap) * 8 // width):
        start = group * width
        for i in range(width):
            if (bitmap[(start + i) >> 3] >> (7 - (i & 7))) & 1:
                if at == len(kept):
                    return False
                previous = out.dtype.type(previous + kept[at])
                at += 1
            a[i] = previous
        _transpose(a, masks)
        for i in range(min(width, len(out) - start)):
            place = start + i
            out[place] = a[i] + out[place - stride] if place >= stride else a[i]
    return at == len(kept)
