"""Hosts with shaped links on one machine: network namespaces, each pair of which has a cable of its own.

Needs Linux, root and iproute2. A cable is a veth pair with a token bucket (`tc tbf`) at each end, through which goes what that end
sends: full duplex. Latency is that of the machine: some tens of microseconds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import combinations, permutations

from raysim.config import ConfigError
from raysim.network.network import Network

FRAMING = 1514 / 1448 + 66 / (2 * 1448)
"""Bytes that tbf counts for a byte of payload, where as much flows the other way: segments of 1448 bytes, in headers of Ethernet,
IP and TCP with timestamps, and the other way's acknowledgements, one for two segments."""
PIECE_S = 4e-3  # at a cable's rate, of what TCP hands to a port in one piece
GSO_BYTES = 65_536  # that TCP hands to a port in one piece, at most
QUEUE_S = 0.1  # of bytes that may wait at a port before frames are lost
SUBNET = "10.201.47"


class Hosts:
    """Namespaces `<name>-0`, `<name>-1`, ... with addresses of their own: `with Hosts.made(2) as hosts`."""

    def __init__(self, count: int) -> None:
        check_machine()
        self.count = count
        self.name = f"rsv{os.getpid()}"

    @classmethod
    @contextmanager
    def made(cls, count: int) -> Iterator[Hosts]:
        """Make so many hosts, and remove them at the end. Raises ConfigError where this machine cannot."""
        hosts = cls(count)
        try:
            hosts._make()
            yield hosts
        finally:
            hosts.close()

    def _make(self) -> None:
        for host in range(self.count):
            _run("ip", "netns", "add", self.namespace(host))
            self._at(host, "ip", "link", "set", "lo", "up")
            self._at(host, "ip", "address", "add", f"{self.address(host)}/32", "dev", "lo")
        for one, other in combinations(range(self.count), 2):
            ends = ("netns", self.namespace(one)), ("netns", self.namespace(other))
            _run("ip", "link", "add", f"to{other}", *ends[0], "type", "veth", "peer", "name", f"to{one}", *ends[1])
            for here, there in ((one, other), (other, one)):
                self._at(here, "ip", "link", "set", f"to{there}", "up")
                road = ("dev", f"to{there}", "src", self.address(here))
                self._at(here, "ip", "route", "add", f"{self.address(there)}/32", *road)
        for host in range(self.count):  # Ray finds a host's address by its way out
            way_out = ("dev", f"to{1 if host == 0 else 0}", "src", self.address(host))
            self._at(host, "ip", "route", "add", "default", *way_out)

    def close(self) -> None:
        """Remove the namespaces, and their cables with them."""
        for host in range(self.count):
            with suppress(ConfigError):
                _run("ip", "netns", "delete", self.namespace(host))

    def namespace(self, host: int) -> str:
        """Return the name of a host's namespace."""
        return f"{self.name}-{host}"

    def address(self, host: int) -> str:
        """Return a host's address."""
        return f"{SUBNET}.{host + 1}"

    def inside(self, host: int, *words: str) -> list[str]:
        """Return the command that runs `words` on a host."""
        return ["ip", "netns", "exec", self.namespace(host), *words]

    def shape(self, bandwidth_bps: float | None) -> None:
        """Give every cable this rate in both directions, or all that the machine can move (None)."""
        for here, there in permutations(range(self.count), 2):
            port = f"to{there}"
            with suppress(ConfigError):  # none there yet
                self._at(here, "tc", "qdisc", "delete", "dev", port, "root")
            size = GSO_BYTES if bandwidth_bps is None else piece_bytes(bandwidth_bps)
            self._at(here, "ip", "link", "set", "dev", port, "gso_max_size", str(size))
            if bandwidth_bps is not None:
                bucket = ("rate", f"{bandwidth_bps:.0f}bit", "burst", f"{burst_bytes(bandwidth_bps)}b")
                queue = ("latency", f"{QUEUE_S * 1000:.0f}ms")
                self._at(here, "tc", "qdisc", "add", "dev", port, "root", "tbf", *bucket, *queue)

    @staticmethod
    def network(bandwidth_bps: float) -> Network:
        """Return the network that hosts make whose cables have this rate, as Ray uses it."""
        return Network(bandwidth_bps, sharing="fair", burst_bytes=burst_bytes(bandwidth_bps), framing=FRAMING)

    def _at(self, host: int, *words: str) -> None:
        _run(*self.inside(host, *words))


def piece_bytes(bandwidth_bps: float) -> int:
    """Return what TCP hands to a port in one piece: small, as it makes them by itself over a real slow link (TSO autosizing).

    In pieces of 64 KiB, small messages would wait 26 ms for one piece at 20 Mbit/s.
    """
    return min(round(bandwidth_bps / 8 * PIECE_S), GSO_BYTES)


def burst_bytes(bandwidth_bps: float) -> int:
    """Return the size of a port's token bucket: two pieces, which pass whole.

    With smaller buckets the kernel cuts pieces into frames and sets a timer for each, which took half of two cores at
    100 Mbit/s both ways; with these it takes a tenth.
    """
    return 2 * piece_bytes(bandwidth_bps)


def check_machine() -> None:
    """Raise ConfigError where hosts cannot be made: they need Linux, root, and iproute2 with namespaces that may be added."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise ConfigError(
            "Hosts on one machine need Linux and root: network namespaces are made with `ip`, and their links shaped with `tc`. "
            "Run this command as root."
        )
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise ConfigError(f"Hosts on one machine need `{tool}`, which is not installed: it comes with iproute2.")


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise ConfigError(f"Hosts on one machine: `{' '.join(words)}` failed: {said[-1] if said else done.returncode}.")
