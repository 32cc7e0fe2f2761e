"""Launching of Triton kernels."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Run `programs` programs of a kernel on the device of the first argument; returns at once.

    Products are not fused with sums, so that numbers are those of the CPU.
    """
    first: Tensor = arguments[0]
    here = torch.cuda.device(first.device) if first.is_cuda else contextlib.nullcontext()
    with here:
        kernel[(programs,)](*arguments, **constants, enable_fp_fusion=False)


def blocks(count: int, size: int) -> int:
    """Return how many blocks of `size` hold `count` values."""
    return -(-count // size)


def power_of_two(count: int) -> int:
    """Return the least power of two that is no less than `count`, at least 1."""
    return 1 << max(0, count - 1).bit_length()


def flag(device: torch.device) -> Tensor:
    """Return a flag that is not set."""
    return torch.zeros(1, dtype=torch.int32, device=device)
