"""The hot loops of codecs as Triton kernels, for tensors on GPUs.

Packets equal the CPU's byte for byte: the arithmetic follows the torch reference, in float64 if the reference uses it, without
fused multiply-add. With `TRITON_INTERPRET=1` set before this package is imported, Triton runs the kernels on the CPU, so they
can be tested without a GPU; see `raysim.codecs.kernels.interpreted`.

Only `count_at_least` and `select_at_least` of `select` wait for the device. Errors detected on the device are raised when the open
flight lands, see `raysim.codecs.transfers`. Triton evaluates the annotations of kernels, so their modules cannot use
`from __future__ import annotations`.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Launch `programs` programs of a kernel on the first argument's device, without waiting.

    Fused multiply-add is disabled, so that results equal the CPU's.
    """
    first: torch.Tensor = arguments[0]
    here = torch.cuda.device(first.device) if first.is_cuda else contextlib.nullcontext()
    with here:
        kernel[(programs,)](*arguments, **constants, enable_fp_fusion=False)


def blocks(count: int, size: int) -> int:
    """Return the number of blocks of `size` for `count` values."""
    return -(-count // size)


def next_power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << max(0, count - 1).bit_length()


def flag(device: torch.device) -> torch.Tensor:
    """Return an unset flag."""
    return torch.zeros(1, dtype=torch.int32, device=device)
