"""Hosts with shaped links on one machine: connected network namespaces. Needs Linux, root and iproute2.

There are three wirings:

- "pairs": each pair of hosts has its own cable, a veth pair. A token bucket (`tc tbf`) at each end shapes the traffic that
  leaves that end, so the cable is full duplex. The simulator calls this sharing "pair".
- "switch": each host has one cable, to a bridge in a separate namespace. The token bucket at the host shapes all that the host
  sends, and the bucket at the bridge all that it receives. The simulator calls this sharing "port".
- "distant": like "pairs", with a second cable of adjustable latency for each pair (see `delay`), used if a latency is set.
  All other cables have the latency of the machine, some tens of microseconds.

TCP is set up as on Linux hosts tuned for training: cubic, Linux's default, regardless of this machine's setting, and no slow start
after idle. With slow start, also Linux's default, each large packet over a distant link takes many more trips (see `trips`).
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import combinations, permutations

from raysim.config import ConfigError
from raysim.network.topology import Network, read_notation
from raysim_benchmarks.hosts.delay import DEVICE, Delay, open_device

WIRINGS = ("pairs", "switch", "distant")
SEGMENT_BYTES = 1448  # TCP payload of an Ethernet frame, with timestamps
PACKET_HEADERS_BYTES = 52  # IP, and TCP with timestamps
ETHERNET_HEADER_BYTES = 14
PIECE_S = 4e-3  # length, at a cable's rate, of a piece that TCP hands to a port at once
GSO_BYTES = 65_536  # the largest piece that TCP hands to a port at once
QUEUE_S = 0.1  # length, at a cable's rate, of a port's queue
CONGESTION = "cubic"  # an all-to-all of four hosts at a switch takes 1.01 times the ideal time, with BBR 1.27
SUBNET = "10.201.47"
LOOPBACK = ("127.0.0.1/8", "dev", "lo")


class Hosts:
    """Namespaces `<name>-0`, `<name>-1`, ... with their own addresses: `with Hosts.made(2) as hosts`."""

    def __init__(self, count: int, wiring: str = "pairs") -> None:
        check_machine()
        self.count = count
        self.wiring = wiring
        self.name = f"rsv{os.getpid()}"
        self.delay: Delay | None = None
        self._namespaces = [self.namespace(host) for host in range(count)]
        self._bridge = f"{self.name}-switch"
        self._far = False  # True if packets between hosts take the cables with a latency

    @classmethod
    @contextmanager
    def made(cls, count: int, wiring: str = "pairs") -> Iterator[Hosts]:
        """Make `count` hosts, and finally remove them. Raises ConfigError if this machine cannot make hosts."""
        hosts = cls(count, wiring)
        try:
            hosts._make()
            yield hosts
        finally:
            hosts.close()

    def _make(self) -> None:
        for host in range(self.count):
            _run("ip", "netns", "add", self.namespace(host))
            self._at(host, "ip", "link", "set", "lo", "up")
            _run(*self.inside(host, "sysctl", "-qw", "net.ipv4.tcp_slow_start_after_idle=0"))
            self._at(host, "ip", "address", "add", f"{self.address(host)}/32", "dev", "lo")
        if self.wiring == "switch":
            self._wire_to_switch()
        else:
            self._wire_pairs()
        if self.wiring == "distant":
            self._wire_far()
        self._route()
        for host in range(self.count):  # Ray finds a host's address by its default route
            way_out = ("dev", self.port(host, 1 if host == 0 else 0), "src", self.address(host))
            self._at(host, "ip", "route", "add", "default", *way_out)

    @contextmanager
    def without_loopback(self) -> Iterator[None]:
        """Leave only a host's own address on `lo`, since gloo takes the first address of a device."""
        for host in range(self.count):
            self._at(host, "ip", "address", "delete", *LOOPBACK)
        try:
            yield
        finally:
            for host in range(self.count):
                self._at(host, "ip", "address", "add", *LOOPBACK)

    def _wire_pairs(self) -> None:
        for a, b in combinations(range(self.count), 2):
            ends = ("netns", self.namespace(a)), ("netns", self.namespace(b))
            _run("ip", "link", "add", f"to{b}", *ends[0], "type", "veth", "peer", "name", f"to{a}", *ends[1])
            for here, there in ((a, b), (b, a)):
                self._at(here, "ip", "link", "set", f"to{there}", "up")

    def _wire_to_switch(self) -> None:
        _run("ip", "netns", "add", self._bridge)
        inside = ("ip", "-netns", self._bridge)
        _run(*inside, "link", "add", "bridge", "type", "bridge")
        _run(*inside, "link", "set", "bridge", "up")
        for host in range(self.count):
            ends = ("netns", self.namespace(host)), ("netns", self._bridge)
            _run("ip", "link", "add", "out", *ends[0], "type", "veth", "peer", "name", f"host{host}", *ends[1])
            _run(*inside, "link", "set", f"host{host}", "master", "bridge", "up")
            self._at(host, "ip", "link", "set", "out", "up")

    def _wire_far(self) -> None:
        cables = []
        for a, b in combinations(range(self.count), 2):
            ends = []
            for here, there in ((a, b), (b, a)):
                name = f"{self.name}.{here}{there}"
                try:
                    ends.append(open_device(name))
                except OSError as error:
                    raise ConfigError(f"Hosts with latency need TUN devices: {DEVICE}: {error.strerror}.") from None
                _run("ip", "link", "set", name, "netns", self.namespace(here), "name", f"far{there}")
                self._at(here, "ip", "link", "set", f"far{there}", "up")
            cables.append((ends[0], ends[1]))
        self.delay = Delay(cables)

    def _route(self) -> None:
        """Route packets between hosts over the cables in use."""
        for here, there in permutations(range(self.count), 2):
            route = ("dev", self.port(here, there), "src", self.address(here), "congctl", CONGESTION)
            self._at(here, "ip", "route", "replace", f"{self.address(there)}/32", *route)

    def close(self) -> None:
        """Remove the namespaces, and their cables with them."""
        if self.delay is not None:
            self.delay.close()
            self.delay = None
        for namespace in [*self._namespaces, self._bridge]:
            with suppress(ConfigError):
                _run("ip", "netns", "delete", namespace)

    def namespace(self, host: int) -> str:
        """Return the name of a host's namespace."""
        return f"{self.name}-{host}"

    def address(self, host: int) -> str:
        """Return a host's address."""
        return f"{SUBNET}.{host + 1}"

    def port(self, here: int, there: int) -> str:
        """Return the device on host `here` for packets to host `there`."""
        if self.wiring == "switch":
            return "out"
        return f"far{there}" if self._far else f"to{there}"

    def inside(self, host: int, *words: str) -> list[str]:
        """Return the command that runs `words` on a host."""
        return ["ip", "netns", "exec", self.namespace(host), *words]

    def shape(self, bandwidth_bps: float | None, latency_s: float = 0.0) -> None:
        """Set every cable's bandwidth in both directions (None: as fast as the machine) and latency."""
        if self.delay is not None:
            self.delay.set(latency_s)
        if (latency_s > 0) != self._far:
            assert self.wiring == "distant", "only distant hosts have a latency"
            self._far = latency_s > 0
            self._route()
        for namespace, port in self._ports():
            inside = ("ip", "netns", "exec", namespace)
            with suppress(ConfigError):  # no shaping yet
                _run(*inside, "tc", "qdisc", "delete", "dev", port, "root")
            size = GSO_BYTES if bandwidth_bps is None else piece_bytes(bandwidth_bps)
            _run(*inside, "ip", "link", "set", "dev", port, "gso_max_size", str(size))
            if bandwidth_bps is not None:
                bucket = ("rate", f"{bandwidth_bps:.0f}bit", "burst", f"{burst_bytes(bandwidth_bps)}b")
                queue = ("latency", f"{QUEUE_S * 1000:.0f}ms")
                _run(*inside, "tc", "qdisc", "add", "dev", port, "root", "tbf", *bucket, *queue)

    def _ports(self) -> list[tuple[str, str]]:
        """Return the namespace and the device of every end of the cables in use."""
        if self.wiring == "switch":
            hosts = range(self.count)
            return [(self.namespace(host), "out") for host in hosts] + [(self._bridge, f"host{host}") for host in hosts]
        return [(self.namespace(a), self.port(a, b)) for a, b in permutations(range(self.count), 2)]

    def sent_bytes(self) -> dict[tuple[int, int], int]:
        """Return the bytes sent over each cable since it was made, by (source, target); headers count once per piece.

        At a switch each host has one cable, whose other end is -1.
        """
        sent: dict[tuple[int, int], int] = {}
        for host in range(self.count):
            for device, count in _transmitted(self._at(host, "cat", "/proc/net/dev")):
                number = device.removeprefix("far").removeprefix("to")
                cable = host, int(number) if number.isdigit() else -1
                sent[cable] = sent.get(cable, 0) + count
        return sent

    def _at(self, host: int, *words: str) -> str:
        return _run(*self.inside(host, *words))


def network(wiring: str, bandwidth_bps: float | None, latency_s: float = 0.0) -> Network:
    """Return the simulated network that corresponds to cables of this bandwidth and latency."""
    sharing = "port" if wiring == "switch" else "pair"
    if bandwidth_bps is None:
        return Network(math.inf, latency_s, sharing=sharing)
    link_header_bytes = 0 if latency_s else ETHERNET_HEADER_BYTES  # cables with latency have no Ethernet headers
    return Network(
        bandwidth_bps,
        latency_s,
        sharing=sharing,
        burst_bytes=burst_bytes(bandwidth_bps),
        framing=framing(link_header_bytes),
    )


def parse_link(text: str | None) -> tuple[float | None, float]:
    """Return the bandwidth in bit/s and the latency in seconds of a link such as "50mbps+20ms".

    The bandwidth is None for an unshaped link: None or "free+20ms". Raises ConfigError if cables cannot be such a link.
    """
    parsed = read_notation(text or "free")
    if parsed is None or parsed.jitter_s or parsed.sharing != "pair":
        raise ConfigError(
            f"A link must be a rate, with or without a latency, such as 20mbps or 50mbps+20ms, but got {text!r}."
        )
    assert isinstance(parsed.bandwidth_bps, float)
    assert isinstance(parsed.latency_s, float)
    return None if math.isinf(parsed.bandwidth_bps) else parsed.bandwidth_bps, parsed.latency_s


def framing(link_header_bytes: int) -> float:
    """Return the bytes counted by a token bucket per byte of payload, with equal traffic in the other direction.

    They include headers of segments, and an acknowledgement for every two segments of the other direction.
    """
    headers = PACKET_HEADERS_BYTES + link_header_bytes
    return (SEGMENT_BYTES + headers + headers / 2) / SEGMENT_BYTES


def piece_bytes(bandwidth_bps: float) -> int:
    """Return the bytes that TCP hands to a port at once: few, as on a real slow link (TSO autosizing).

    With pieces of 64 KiB, small messages would wait 26 ms for one piece at 20 Mbit/s.
    """
    return min(round(bandwidth_bps / 8 * PIECE_S), GSO_BYTES)


def burst_bytes(bandwidth_bps: float) -> int:
    """Return the size of a port's token bucket: two pieces, so that pieces pass undivided.

    With smaller buckets the kernel cuts pieces into frames and sets a timer for each, which took half of two cores at
    100 Mbit/s in both directions; with this size it takes a tenth.
    """
    return 2 * piece_bytes(bandwidth_bps)


def check_machine() -> None:
    """Raise ConfigError if hosts cannot be made: they need Linux, root and iproute2."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise ConfigError(
            "Hosts on one machine need Linux and root: network namespaces are made with `ip`, and their links shaped with `tc`. "
            "Run this command as root."
        )
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise ConfigError(f"Hosts on one machine need `{tool}`, which is not installed: it comes with iproute2.")


def _transmitted(table: str) -> Iterator[tuple[str, int]]:
    """Yield each device except the loopback, and the bytes sent through it, from the text of `/proc/net/dev`."""
    for row in table.splitlines()[2:]:
        device, _, counts = row.partition(":")
        if device.strip() != "lo":
            yield device.strip(), int(counts.split()[8])


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise ConfigError(
            f"Hosts on one machine: `{' '.join(words)}` failed: {lines[-1] if lines else done.returncode}."
        )
    return done.stdout
