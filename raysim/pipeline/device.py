"""A worker's device: its properties, its settings for arithmetic, and its clock."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

if TYPE_CHECKING:
    from raysim.config import RunConfig


class DeviceFacts(NamedTuple):
    """The properties of a GPU."""

    name: str
    capability: str
    driver: str
    cuda: str
    memory_bytes: int
    bfloat16: bool
    """True if the GPU supports bfloat16 without emulation."""
    uuid: str
    """The identity of the GPU, unique over all nodes."""


def facts_of(device: torch.device) -> DeviceFacts | None:
    """Return the properties of a GPU, None for a CPU."""
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
    """Set the precision and determinism of GPU arithmetic for this process; CPUs have no TF32 and are deterministic."""
    if device.type != "cuda":
        return
    precision = "tf32" if config.tf32 else "ieee"
    torch.backends.cuda.matmul.fp32_precision = precision
    torch.backends.cudnn.conv.fp32_precision = precision  # type: ignore[attr-defined]
    torch.backends.cudnn.rnn.fp32_precision = precision  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False  # it may choose different kernels from run to run
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.use_deterministic_algorithms(True)


def _driver() -> str:
    """Return the version of the driver's kernel module, or an empty string."""
    try:
        with open("/sys/module/nvidia/version", encoding="ascii") as file:  # noqa: PTH123
            return file.read().strip()
    except OSError:
        return ""


def cpu_seconds(num_threads: int) -> float:
    """Return the CPU seconds of this thread, or of the whole process if it computes with several threads."""
    return time.thread_time() if num_threads == 1 else time.process_time()


Moment: TypeAlias = float | torch.cuda.Event
"""A marked moment: seconds of the host's clock, or an event in a GPU's stream."""


class DeviceClock:
    """Marks moments without waiting for the device, to be read in seconds later."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_gpu = device.type == "cuda"
        self.begin()

    def begin(self) -> None:
        """Begin a step on an idle device, and synchronise its clock with the host's."""
        if self._on_gpu:
            self._start = self._event()
            self._start_s = time.perf_counter()

    def mark(self) -> Moment:
        """Return the moment at which the device finishes its queued work."""
        return self._event() if self._on_gpu else time.perf_counter()

    def seconds(self, moment: Moment) -> float:
        """Return a moment in seconds of `time.perf_counter`; the GPU must have passed it."""
        if isinstance(moment, float):
            return moment
        return self._start_s + float(self._start.elapsed_time(moment)) / 1e3

    @staticmethod
    def between(start: Moment, end: Moment) -> float:
        """Return the seconds between two moments of one clock; waits until the GPU has passed them."""
        if isinstance(start, float) or isinstance(end, float):
            return float(end) - float(start)  # type: ignore[arg-type]
        if not end.query():  # type: ignore[no-untyped-call]
            end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event
