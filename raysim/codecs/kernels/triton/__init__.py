"""The hot loops of codecs as Triton kernels, for tensors on GPUs.

Packets are those of the CPU, byte for byte: the arithmetic is that of the torch reference, in float64 if the reference computes
in float64, and no product is fused with a sum. If `TRITON_INTERPRET=1` is set before this package is imported, Triton runs the
kernels on the CPU, which is how a machine without a GPU tests them; see `raysim.codecs.kernels.interpreted`.

No function waits for the device, but for `count_at_least` and `select_at_least` of `select`. Errors that are found on the device are
raised when the open flight lands, see `raysim.codecs.transfers`. Triton evaluates the annotations of kernels, so their modules do
without `from __future__ import annotations`.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Run `programs` programs of a kernel on the device of the first argument; returns at once.

    Products are not fused with sums, so that numbers are those of the CPU.
    """
    first: torch.Tensor = arguments[0]
    here = torch.cuda.device(first.device) if first.is_cuda else contextlib.nullcontext()
    with here:
        kernel[(programs,)](*arguments, **constants, enable_fp_fusion=False)


def blocks(count: int, size: int) -> int:
    """Return how many blocks of `size` hold `count` values."""
    return -(-count // size)


def power_of_two(count: int) -> int:
    """Return the least power of two that is no less than `count`, at least 1."""
    return 1 << max(0, count - 1).bit_length()


def flag(device: torch.device) -> torch.Tensor:
    """Return a flag that is not set."""
    return torch.zeros(1, dtype=torch.int32, device=device)
