"""The GPU of the tests: a CUDA device where there is one, else host memory, on which Triton interprets the kernels."""

import contextlib

import torch
from torch import Tensor

from raysim.codecs import kernels
from raysim.codecs.transfers import Flight

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_gpu():
    """Within this context the kernels of GPUs serve tensors on `DEVICE`."""
    return contextlib.nullcontext() if DEVICE == "cuda" else kernels.interpreted()


class SlowFlight(Flight):
    """A flight whose bytes arrive when it is waited for, and not before: until then they are wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0
        self._held: list[tuple[Tensor, Tensor]] = []

    def takes(self, device: torch.device | str) -> bool:
        return True

    def up(self, host: Tensor, device: torch.device | str) -> Tensor:
        return host.to(device)

    def _copied(self, x: Tensor) -> Tensor:
        host = (
            torch.full(x.shape, 1, dtype=x.dtype) if x.dtype == torch.bool else torch.full(x.shape, 0x5A, dtype=x.dtype)
        )
        self._held.append((host, x.clone().cpu()))
        return host

    def _wait(self) -> None:
        self.waits += 1
        for host, x in self._held:
            host.copy_(x)
        self._held.clear()
