"""Asynchronous copies between a GPU and the host, and asynchronous checks on the GPU.

A codec on a GPU returns as soon as its work is queued. Within a `Flight`, bytes are still being copied into the arrays
of its packet, on a separate stream, and the codec's errors are known only when the bytes have landed. Copies to the
device use another stream. Without a flight every copy and every check waits for the device.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from raysim.on_demand import torch

_state = threading.local()


class Flight:
    """Transfers in progress from one GPU to the host: bytes of packets, and error flags.

    `land` waits once for all copies begun while the flight is open. It does not wait for flags alone: they are read
    with the next bytes, or by `settle`.
    """

    def __init__(self) -> None:
        self._streams: dict[str, torch.cuda.Stream] = {}  # by direction, so that packets pass each other
        self._bytes_pending = False
        self._flags: list[tuple[torch.Tensor, Exception]] = []

    @contextlib.contextmanager
    def open(self) -> Iterator[Flight]:
        """Begin copies on this flight within the context."""
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
        """Return host memory to which the bytes of contiguous `x` are being copied."""
        self._bytes_pending = True
        return self._copied(x)

    def up(self, host: torch.Tensor, device: torch.device | str) -> torch.Tensor:
        """Return the bytes of `host` on the device, for work queued from now on; the copy may still be in progress."""
        pinned = torch.empty(host.shape, dtype=host.dtype, pin_memory=True).copy_(host)
        stream, reader = self._stream("up", torch.device(device)), torch.cuda.current_stream(device)
        with torch.cuda.stream(stream):
            x = torch.empty(host.shape, dtype=host.dtype, device=device)
            x.copy_(pinned, non_blocking=True)
        reader.wait_stream(stream)
        x.record_stream(reader)
        return x

    def check(self, bad: torch.Tensor, error: Exception) -> None:
        """Raise `error` on landing if the flag is set by then."""
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
    """Return the flight that is open on this thread, with `device` only if its copies from and to the device are asynchronous."""
    flight: Flight | None = getattr(_state, "flight", None)
    return flight if flight is not None and (device is None or flight.takes(device)) else None


def land() -> None:
    """Wait for pending copies to the host; to be called before reading an array of a packet that was just encoded."""
    if flight := _current():
        flight.land()


def to_host(x: torch.Tensor) -> torch.Tensor:
    """Return contiguous `x` in host memory: filled when the open flight lands, or at once if none is open."""
    flight = _current(x.device)
    return flight.down(x) if flight else x.cpu()


def to_device(host: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return a tensor of host memory on the device; the host waits for the copy if no flight is open."""
    flight = _current(device)
    return flight.up(host, device) if flight else host.to(device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work; no effect on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def check(bad: torch.Tensor, error: Exception) -> None:
    """Raise `error` if `bad`, a flag, is set: when the open flight lands, or at once if none is open."""
    if flight := _current(bad.device):
        flight.check(bad, error)
    elif bad.any():
        raise error
