"""The clock of a worker's compute: the host's clock, or events of a GPU, which are read when a step has ended."""

from __future__ import annotations

import time
from typing import TypeAlias

import torch

Moment: TypeAlias = float | torch.cuda.Event
"""A moment that was marked: seconds of the host's clock, or an event among the work of a GPU."""


class Stopwatch:
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
