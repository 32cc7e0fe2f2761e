"""Asynchronous copies between a GPU and the host, and asynchronous checks on the GPU.

A codec on a GPU returns as soon as its work is queued. Within a `Flight`, bytes may still be in transfer to the packet's
arrays, on a separate stream, and errors are raised only when the bytes have landed. Copies to the device use another
stream. Without a flight, every copy and every check waits for the device.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from raysim.on_demand import torch

_state = threading.local()


class Flight:
    """Transfers of packet bytes and error flags in progress from one GPU to the host.

    `land` waits once for all copies started while the flight is open. It does not wait if only flags are pending: they are read
    with the next bytes or by `settle`.
    """

    def __init__(self) -> None:
        self._streams: dict[str, torch.cuda.Stream] = {}  # one per direction, so that both directions overlap
        self._bytes_pending = False
        self._flags: list[tuple[torch.Tensor, Exception]] = []

    @contextlib.contextmanager
    def open(self) -> Iterator[Flight]:
        """Start copies on this flight within the context."""
        before = _current()
        _state.flight = self
        try:
            yield self
        finally:
            _state.flight = before

    def takes(self, device: torch.device | str) -> bool:
        """Return whether copies from and to the device are asynchronous."""
        return torch.device(device).type == "cuda"

    def down(self, x: torch.Tensor) -> torch.Tensor:
        """Start copying the bytes of contiguous `x` to the host, and return their host memory."""
        self._bytes_pending = True
        return self._copied(x)

    def up(self, host: torch.Tensor, device: torch.device | str) -> torch.Tensor:
        """Start copying `host` to the device; work queued from now on may use the returned tensor."""
        pinned = torch.empty(host.shape, dtype=host.dtype, pin_memory=True).copy_(host)
        stream, reader = self._stream("up", torch.device(device)), torch.cuda.current_stream(device)
        with torch.cuda.stream(stream):
            x = torch.empty(host.shape, dtype=host.dtype, device=device)
            x.copy_(pinned, non_blocking=True)
        reader.wait_stream(stream)
        x.record_stream(reader)
        return x

    def check(self, bad: torch.Tensor, error: Exception) -> None:
        """Raise `error` on landing if the flag `bad` is set by then."""
        self._flags.append((self._copied(bad), error))

    def land(self) -> None:
        """Wait for all pending bytes; raises the first error whose flag is set."""
        if self._bytes_pending:
            self.settle()

    def settle(self) -> None:
        """Wait until all bytes and flags have arrived; raises the first error whose flag is set."""
        if not self._bytes_pending and not self._flags:
            return
        self._bytes_pending, flags, self._flags = False, self._flags, []
        self._wait()
        for flag, error in flags:
            if flag.any():
                raise error

    def _copied(self, x: torch.Tensor) -> torch.Tensor:
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        stream = self._stream("down", x.device)
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            host.copy_(x, non_blocking=True)
        x.record_stream(stream)
        return host

    def _wait(self) -> None:
        if "down" in self._streams:
            self._streams["down"].synchronize()

    def _stream(self, direction: str, device: torch.device) -> torch.cuda.Stream:
        if direction not in self._streams:
            self._streams[direction] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[direction]


def _current(device: torch.device | str | None = None) -> Flight | None:
    """Return this thread's open flight; if `device` is given, only if copies from and to it are asynchronous."""
    flight: Flight | None = getattr(_state, "flight", None)
    return flight if flight is not None and (device is None or flight.takes(device)) else None


def land() -> None:
    """Wait for pending copies to the host; call this before reading the arrays of a newly encoded packet."""
    if flight := _current():
        flight.land()


def to_host(x: torch.Tensor) -> torch.Tensor:
    """Copy contiguous `x` to host memory; it is valid when the pending transfers complete, or at once if there are none."""
    flight = _current(x.device)
    return flight.down(x) if flight else x.cpu()


def to_device(host: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a host tensor to the device; the host waits for the copy if no flight is open."""
    flight = _current(device)
    return flight.up(host, device) if flight else host.to(device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work; no effect on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def check(bad: torch.Tensor, error: Exception) -> None:
    """Raise `error` if the flag `bad` is set: when the pending transfers complete, or at once if there are none."""
    if flight := _current(bad.device):
        flight.check(bad, error)
    elif bad.any():
        raise error
