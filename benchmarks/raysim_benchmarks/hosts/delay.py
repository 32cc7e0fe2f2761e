"""Latency for cables between hosts: packets leave a cable in order, a fixed time after entering it.

A cable is a pair of TUN devices, one on each of two hosts. One process, this file run as a program, reads packets from either end
and writes them to the other. It needs few system calls, since TCP hands packets to the device in pieces of up to 64 KiB. The
kernel's `tc netem` would do the same, but many kernels are built without it.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

DEVICE = "/dev/net/tun"
READ_BYTES = 2**17  # more than any packet with its header
PRIORITY = 1  # of the real-time scheduler: the process must wake when a packet is due, under any load

# From linux/if_tun.h.
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02


def open_device(name: str) -> int:
    """Create a TUN device that lives until its descriptor is closed; return that. Raises OSError."""
    device = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    return device


class Delay:
    """The process that carries packets over cables, each given by the descriptors of its two ends."""

    def __init__(self, cables: Sequence[tuple[int, int]]) -> None:
        ends = [end for cable in cables for end in cable]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *map(str, ends)],
            stdin=subprocess.PIPE,
            text=True,
            pass_fds=ends,
            start_new_session=True,
        )
        for end in ends:
            os.close(end)

    def set(self, latency_s: float) -> None:
        """Set the one-way latency of packets that enter a cable from now on."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{latency_s}\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End the process, which removes the devices."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()  # the process ends when its input closes
        self._process.wait()

    @property
    def cpu_s(self) -> float:
        """CPU seconds used by the process."""
        stat = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="ascii")
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def forward(cables: Sequence[tuple[int, int]], control: int) -> None:
    """Carry packets between the ends of each cable until `control` ends; its lines are latencies in seconds."""
    across = {here: there for a, b in cables for here, there in ((a, b), (b, a))}
    waiting: deque[tuple[float, int, bytes]] = deque()  # due time, target end and packet
    latency_s = 0.0
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, end, packet = waiting.popleft()
            with suppress(OSError):  # packets are lost if the queue is full or the device down
                os.write(end, packet)
        timeout = max(waiting[0][0] - time.monotonic(), 0.0) if waiting else None
        for source in select.select([control, *across], [], [], timeout)[0]:
            if source == control:
                words = os.read(control, READ_BYTES).split()
                if not words:
                    return
                latency_s = float(words[-1])
                continue
            with suppress(BlockingIOError):
                while True:
                    packet = os.read(source, READ_BYTES)
                    waiting.append((time.monotonic() + latency_s, across[source], packet))


def main() -> None:
    """Carry packets over the cables given as arguments, two descriptors each."""
    with suppress(OSError):  # without the right to set a priority, timing is less exact
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    ends = [int(word) for word in sys.argv[1:]]
    forward(list(zip(ends[::2], ends[1::2], strict=True)), sys.stdin.fileno())


if __name__ == "__main__":
    main()
