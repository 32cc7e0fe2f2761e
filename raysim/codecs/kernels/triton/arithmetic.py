"""Arithmetic of uniform quantisation in Triton: ranges, codes, random numbers, and the dtypes of results."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def in_order(values):
    """Return float32 as int32 in the same order."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def ends_of(least, greatest, ABSMAX: tl.constexpr, ORDERED: tl.constexpr):
    """Return the maximum, minimum, center and span of each group, and whether its ends are valid; ends are float32 patterns."""
    finite = ((greatest & 0x7FFFFFFF) < 0x7F800000) & ((least & 0x7FFFFFFF) < 0x7F800000)
    top = tl.where(finite, greatest, 0).to(tl.float32, bitcast=True)
    bottom = tl.where(finite, least, 0).to(tl.float32, bitcast=True)
    if ABSMAX:
        if ORDERED:
            top = tl.maximum(tl.abs(bottom), tl.abs(top))
        finite = finite & (top >= 0)
        middle = tl.zeros_like(top).to(tl.float64)
        span = top.to(tl.float64)
    else:
        finite = finite & (bottom <= top)
        middle = tl.where(bottom == 0, 0.0, bottom).to(tl.float64)
        span = top.to(tl.float64) - bottom.to(tl.float64)
    return top, bottom, middle, span, finite


@triton.jit
def scale_of(span, STEPS: tl.constexpr):
    """Return the codes per unit; 0 for a group with one value."""
    varied = span > 0
    return tl.where(varied, tl.zeros_like(span) + STEPS, 0.0) / tl.where(varied, span, 1.0)


@triton.jit
def _uniform(key, index):
    """Return the numbers in [0, 1) at `index` of the SplitMix64 stream of `key`, float64."""
    state = key + (index.to(tl.int64) + 1) * -7046029254386353131
    z = state.to(tl.uint64, bitcast=True)
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return (z >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2**-53


@triton.jit
def code_of(level, key, index, middle, last, STOCHASTIC: tl.constexpr):
    """Round levels to codes, int32."""
    if STOCHASTIC:
        level = tl.floor(level + _uniform(tl.load(key), index))
    else:
        level = (level + 6755399441055744.0) - 6755399441055744.0  # 1.5 * 2**52: round to nearest even
    level = tl.where(level == level, level, 0.0)  # NaN has no code; the flag of its group is set
    return tl.minimum(tl.maximum(level.to(tl.int32) + middle, 0), last)


@triton.jit
def store(out, index, value, inside, LIMIT: tl.constexpr):
    """Write float32, or 16 bits clamped to +-LIMIT."""
    if LIMIT == 0:
        tl.store(out + index, value, mask=inside)
    else:
        value = tl.minimum(tl.maximum(value, -LIMIT), LIMIT)
        if out.dtype.element_ty == tl.float16:
            tl.store(out + index, value.to(tl.float16), mask=inside)
        else:  # bfloat16 patterns, rounded to nearest even; all values are finite
            bits = value.to(tl.int32, bitcast=True)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            tl.store(out + index, rounded.to(tl.int16), mask=inside)


def start_of(key: int | None, device: torch.device) -> Tensor:
    """Return the key of the random numbers as a signed integer on the device."""
    signed = 0 if key is None else (key + 2**63) % 2**64 - 2**63
    return torch.full((1,), signed, dtype=torch.int64, device=device)
