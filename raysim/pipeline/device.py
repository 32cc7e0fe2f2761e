"""The device of a worker: its facts, its settings for arithmetic, and its clock."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

if TYPE_CHECKING:
    from raysim.config import RunConfig


class DeviceFacts(NamedTuple):
    """A GPU, as it describes itself."""

    name: str
    capability: str
    driver: str
    cuda: str
    memory_bytes: int
    bfloat16: bool
    """True if it computes in bfloat16 without emulation."""
    uuid: str
    """The identity of the GPU, unique over all nodes."""


def facts_of(device: torch.device) -> DeviceFacts | None:
    """Return the facts of a GPU, None of a CPU."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return DeviceFacts(
        name=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        driver=_driver(),
        cuda=torch.version.cuda or "",
        memory_bytes=properties.total_memory,
        bfloat16=torch.cuda.is_bf16_supported(including_emulation=False),
        uuid=str(properties.uuid),
    )


def set_up(config: RunConfig, device: torch.device) -> None:
    """Tell a GPU how to compute, for this whole process.

    Nothing is changed for a CPU, which has no TF32 and whose kernels give the same bits each time.
    """
    if device.type != "cuda":
        return
    precision = "tf32" if config.tf32 else "ieee"
    torch.backends.cuda.matmul.fp32_precision = precision
    torch.backends.cudnn.conv.fp32_precision = precision  # type: ignore[attr-defined]
    torch.backends.cudnn.rnn.fp32_precision = precision  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False  # the quickest kernel of a moment is another one the next time
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.use_deterministic_algorithms(True)


def _driver() -> str:
    """Return the version of the driver, as its kernel module states it; nothing where it does not."""
    try:
        with open("/sys/module/nvidia/version", encoding="ascii") as file:  # noqa: PTH123
            return file.read().strip()
    except OSError:
        return ""


Moment: TypeAlias = float | torch.cuda.Event
"""A moment that was marked: seconds of the host's clock, or an event among the work of a GPU."""


class DeviceClock:
    """Marks moments without waiting for the device, and tells their seconds when it has come past them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_gpu = device.type == "cuda"
        self.begin()

    def begin(self) -> None:
        """Begin a step, while the device has nothing to do: its clock is set by the host's."""
        if self._on_gpu:
            self._start = self._event()
            self._start_s = time.perf_counter()

    def mark(self) -> Moment:
        """Return the moment at which the device has done all that was asked of it so far."""
        return self._event() if self._on_gpu else time.perf_counter()

    def seconds(self, moment: Moment) -> float:
        """Return a moment in seconds of `time.perf_counter`; a GPU must have come past it."""
        if isinstance(moment, float):
            return moment
        return self._start_s + float(self._start.elapsed_time(moment)) / 1e3

    @staticmethod
    def between(start: Moment, end: Moment) -> float:
        """Return the seconds from one moment to another of the same clock; waits for a GPU that has not come past them."""
        if isinstance(start, float) or isinstance(end, float):
            return float(end) - float(start)  # type: ignore[arg-type]
        if not end.query():  # type: ignore[no-untyped-call]
            end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event
