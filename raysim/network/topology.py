"""Networks as data: bandwidth, latency and jitter between hosts, the sharing of wires, and the costs of messages and collectives.

Bandwidth is in decimal bit/s (1 Gbit/s is 10^9 bit/s); latency is in seconds, one way, once per message (`a + 8 S / W`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from raysim.network.notation import bandwidth_text, read_wires, time_text, window_text
from raysim.notation import check_choice, check_integer, check_real, shown

Matrix = tuple[tuple[float, ...], ...]
Floats = NDArray[np.float64]

SHARING = ("pair", "port", "half", "inbound")
TINY = 1e-9  # of a latency that stands for none


@dataclass(frozen=True)
class Network:
    """Wires between hosts; messages within a host cost nothing here.

    `sharing` says which packets between stages wait for each other (for collectives see `raysim.network.collectives`):

    - "pair": every ordered pair of hosts has its own wire, with messages in the order sent (full duplex);
    - "port": a host's outgoing messages fairly share one port, and its incoming ones another, each of `port_bps` (full duplex);
    - "half": outgoing and incoming messages share one port;
    - "inbound": one wire into each host, in the order of the receiver's requests; the next message starts when the
      previous one has arrived, latency included (Protocol NanoGPT's simulated links).

    >>> network = Network(bandwidth_bps=100e6, latency_s=0.02)
    >>> network, network.p2p_s(0, 1, 1_000_000)
    (100mbps+20ms, 0.1)
    """

    bandwidth_bps: float | Matrix
    """Between two hosts, one direction: a number, or a matrix by source and target."""
    latency_s: float | Matrix = 0.0
    """One way, once per message: a number, or a matrix by source and target."""
    jitter_s: float = 0.0
    """Latency varies uniformly by up to this much up or down; messages keep their order."""
    sharing: str = "pair"
    """Sharing of wires between messages, see above."""
    port_bps: float | None = None
    """Bandwidth of a host's port, for "port" and "half"; by default that of its fastest link, out and in."""
    burst_bytes: float = 0.0
    """Bytes passed at once by a token bucket after a pause (the burst of `tc tbf`)."""
    framing: float = 1.0
    """Bytes on the wire per byte of payload, headers included: 1514/1448 for TCP over Ethernet."""
    window_bytes: float | None = None
    """TCP's window (RFC 9293), the most unacknowledged bytes of a connection: it sends at most one a round trip; None: no cap."""
    streams: int = 1
    """Parallel connections between two hosts, each with a window."""
    host_names: tuple[str, ...] | None = field(default=None, compare=False)
    """Names of the hosts, if matrices are given and hosts have names."""
    host_sites: tuple[str, ...] | None = None
    """The site of each host, if the matrices come from a file of sites."""
    name: str = field(default="", compare=False)
    """Name of the preset or file, ignored in comparisons."""

    def __hash__(self) -> int:
        """Return the hash of the compared fields, cached because matrices are large."""
        if "_hash" not in self.__dict__:
            values = tuple(getattr(self, attribute.name) for attribute in fields(self) if attribute.compare)
            self.__dict__["_hash"] = hash(values)
        return int(self.__dict__["_hash"])

    def __getstate__(self) -> dict[str, object]:
        """Return the fields without the hash, since hashes of strings differ between processes, and without other cached values."""
        return {attribute.name: getattr(self, attribute.name) for attribute in fields(self)}

    def __post_init__(self) -> None:
        for item, low_open in (("bandwidth_bps", True), ("latency_s", False)):
            object.__setattr__(self, item, _matrix(item, getattr(self, item), open_low=low_open))
        lowest = np.min(_off_diagonal(self.latency_s)) if isinstance(self.latency_s, tuple) else self.latency_s
        check_choice("sharing", self.sharing, SHARING)
        checked = {
            "jitter_s": check_real("jitter_s", self.jitter_s, 0, math.inf),
            "burst_bytes": check_real("burst_bytes", self.burst_bytes, 0, math.inf),
            "framing": check_real("framing", self.framing, 1, math.inf),
            "streams": check_integer("streams", self.streams, 1),
        }
        if self.window_bytes is not None:
            checked["window_bytes"] = check_real("window_bytes", self.window_bytes, 0, math.inf, open_low=True)
        elif checked["streams"] > 1:
            raise ValueError(
                f"`streams` share a link by their windows: give `window_bytes` with {self.streams} streams."
            )
        if self.port_bps is not None:
            checked["port_bps"] = check_real("port_bps", self.port_bps, 0, math.inf, open_low=True)
            if not self.shares_ports:
                raise ValueError(f'`port_bps` needs `sharing` "port" or "half", but got {self.sharing!r}.')
        if checked["jitter_s"] > lowest:
            raise ValueError(
                f"`jitter_s` must be at most the lowest latency ({lowest:g} s), but got {self.jitter_s!r}."
            )
        if checked["burst_bytes"] and self.sharing == "inbound":
            raise ValueError(f'`burst_bytes` must be 0 with `sharing` "inbound", but got {self.burst_bytes!r}.')
        sizes = {len(value) for value in (self.bandwidth_bps, self.latency_s) if isinstance(value, tuple)}
        if len(sizes) > 1:
            raise ValueError(f"`latency_s` must have the size of `bandwidth_bps`, but got sizes {sorted(sizes)}.")
        if self.host_names is not None:
            object.__setattr__(self, "host_names", tuple(str(name) for name in self.host_names))
            if len(self.host_names) != self.num_hosts:
                raise ValueError(f"`host_names` must be {self.num_hosts} names, but got {len(self.host_names)}.")
        for item, value in checked.items():
            object.__setattr__(self, item, value)

    def __repr__(self) -> str:
        return self.name or self.notation()

    def notation(self) -> str:
        """Return the network as text for `parse_network`, or a summary if it has matrices."""
        if self.num_hosts is not None:
            return f"<{self.num_hosts} hosts, {_span(self.bandwidth_bps, bandwidth_text)}, {_span(self.latency_s, time_text)}>"
        assert isinstance(self.bandwidth_bps, float)
        assert isinstance(self.latency_s, float)
        text = bandwidth_text(self.bandwidth_bps)
        text += f"+{time_text(self.latency_s)}" if self.latency_s else ""
        text += f"~{time_text(self.jitter_s)}" if self.jitter_s else ""
        text += f"/{self.sharing}" if self.sharing != "pair" else ""
        return text if self.window_bytes is None else f"{text}/{window_text(self.window_bytes, self.streams)}"

    @property
    def num_hosts(self) -> int | None:
        """Return the number of hosts in the matrices; None means any number."""
        for value in (self.bandwidth_bps, self.latency_s):
            if isinstance(value, tuple):
                return len(value)
        return None

    @cached_property
    def _arrays(self) -> dict[str, Floats]:
        values = {"bandwidth_bps": self.bandwidth_bps, "latency_s": self.latency_s}
        return {name: np.array(value) for name, value in values.items() if isinstance(value, tuple)}

    @property
    def matrices(self) -> tuple[Floats, ...]:
        """The given matrices of bandwidths and latencies, with zeros on the diagonal."""
        return tuple(self._arrays.values())

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites in file order; empty for networks without sites."""
        return tuple(dict.fromkeys(self.host_sites or ()))

    def between_sites(self, source: str, target: str) -> tuple[float, float]:
        """Return bandwidth in bit/s and latency in seconds between hosts of two sites, or two hosts of one site."""
        hosts = self.host_sites or ()
        i = hosts.index(source)
        j = next((j for j, site in enumerate(hosts) if site == target and j != i), i)
        return float(self.bandwidths_bps(i, j)), float(self.latencies_s(i, j))

    @property
    def slowest_bps(self) -> float:
        """The bandwidth of the slowest link between two hosts."""
        return float(_off_diagonal(self.bandwidth_bps).min())

    def bandwidths_bps(self, source: ArrayLike, target: ArrayLike) -> Floats:
        """Return the bandwidth from `source` to `target`, elementwise, capped by windows; infinite within a host."""
        bandwidth = self._look_up("bandwidth_bps", source, target, within=math.inf)
        if self.window_bytes is None:
            return bandwidth
        return self.within_windows(bandwidth, self.latencies_s(source, target) + self.latencies_s(target, source))

    def within_windows(self, bandwidth_bps: float | Floats, trip_s: float | Floats) -> Floats:
        """Return a bandwidth, headers included, but at most a window of each stream per round trip."""
        if self.window_bytes is None:
            return np.asarray(bandwidth_bps)
        with np.errstate(divide="ignore", over="ignore"):
            capped: Floats = 8 * self.framing * self.streams * self.window_bytes / np.asarray(trip_s, np.float64)
        return np.minimum(bandwidth_bps, capped)

    def latencies_s(self, source: ArrayLike, target: ArrayLike) -> Floats:
        """Return the latency from `source` to `target`, elementwise; zero within a host."""
        return self._look_up("latency_s", source, target, within=0.0)

    def _look_up(self, name: str, source: ArrayLike, target: ArrayLike, *, within: float) -> Floats:
        sources, targets = np.asarray(source), np.asarray(target)
        if name in self._arrays:
            matrix = self._arrays[name]
            check_hosts(max(sources.max(initial=0), targets.max(initial=0)), len(matrix))
            values = matrix[sources, targets]
        else:
            values = np.full(np.broadcast(sources, targets).shape, getattr(self, name))
        return np.where(sources == targets, within, values)

    @property
    def shares_ports(self) -> bool:
        """True if packets between stages share their hosts' ports, as collectives always do."""
        return self.sharing in ("port", "half")

    def ports_bps(self, num_hosts: int) -> Floats:
        """Return the bandwidth of every host's outgoing and incoming port, (2, num_hosts): `port_bps`, or its fastest link's."""
        if self.port_bps is not None or "bandwidth_bps" not in self._arrays:
            return np.full((2, num_hosts), self.bandwidth_bps if self.port_bps is None else self.port_bps)
        matrix = self._arrays["bandwidth_bps"]
        ports: Floats = np.stack([matrix.max(axis=1), matrix.max(axis=0)])[:, :num_hosts]
        return np.broadcast_to(ports.max(axis=0), ports.shape) if self.sharing == "half" else ports

    @cached_property
    def without_latency(self) -> Network:
        """The same wires without latency and jitter, still capped by their windows."""
        if self.window_bytes is None:
            return replace(self, latency_s=0.0, jitter_s=0.0)
        latency = self.latency_s
        tiny = tuple(tuple(TINY * x for x in row) for row in latency) if isinstance(latency, tuple) else TINY * latency
        return replace(self, latency_s=tiny, jitter_s=0.0, window_bytes=TINY * self.window_bytes)  # the same cap

    def p2p_s(self, source: int, target: int, wire_bytes: float) -> float:
        """Return the seconds of one message on an idle wire: latency and transfer, without burst or jitter."""
        bandwidth, latency = self.bandwidths_bps(source, target), self.latencies_s(source, target)
        return float(latency + 8 * self.framing * wire_bytes / bandwidth)


def links(networks: Sequence[Network], source: NDArray[Any], target: NDArray[Any]) -> tuple[Floats, Floats]:
    """Return the bandwidth and the latency from `source` to `target`, elementwise, with a last axis of networks."""
    if all(network.num_hosts is None for network in networks):
        across = (source != target)[..., None]
        widths = [network.within_windows(network.bandwidth_bps, 2 * network.latency_s) for network in networks]  # type: ignore[arg-type]
        bandwidth = np.where(across, np.array(widths), math.inf)
        return bandwidth, np.where(across, np.array([network.latency_s for network in networks]), 0.0)
    bandwidths = [network.bandwidths_bps(source, target) for network in networks]
    return np.stack(bandwidths, axis=-1), np.stack(
        [network.latencies_s(source, target) for network in networks], axis=-1
    )


def _matrix(item: str, value: object, *, open_low: bool) -> float | Matrix:
    """Check a number or square matrix of numbers and return it; the unused diagonal may hold anything."""
    if isinstance(value, (int, float)):
        return check_real(item, value, 0, math.inf, open_low=open_low)
    try:
        rows = [list(row) for row in value]  # type: ignore[attr-defined]
    except TypeError:
        raise ValueError(f"`{item}` must be a number or a square matrix, but got {value!r}.") from None
    if not rows or any(len(row) != len(rows) for row in rows):
        raise ValueError(f"`{item}` must be a square matrix, but got rows of {[len(row) for row in rows]} numbers.")
    least = math.ulp(0.0) if open_low else 0.0
    for i, row in enumerate(rows):
        row[i] = 0.0
        for j, entry in enumerate(row):
            if i != j and (type(entry) is not float or not entry >= least):  # a name for each would take longest
                number = float(entry) if isinstance(entry, (np.floating, np.integer)) else entry
                row[j] = check_real(f"{item}[{i}][{j}]", number, 0, math.inf, open_low=open_low)
    return tuple(tuple(row) for row in rows)


def _off_diagonal(value: float | Matrix) -> Floats:
    if not isinstance(value, tuple):
        return np.array([value])
    matrix = np.array(value)
    outside = matrix[~np.eye(len(matrix), dtype=bool)]
    return outside if outside.size else np.zeros(1)


def check_hosts(highest: int, num_hosts: int) -> None:
    """Raise ValueError if a network of `num_hosts` lacks the `highest` host."""
    if highest >= num_hosts:
        raise ValueError(f"`hosts` must be below {num_hosts}, the size of the network, but got {highest}.")


def _span(value: float | Matrix, write: Callable[[float], str]) -> str:
    outside = _off_diagonal(value)
    low, high = write(float(outside.min())), write(float(outside.max()))
    return low if low == high else f"{low} to {high}"


def read_notation(text: str) -> Network | None:
    """Parse a network such as "100mbps+20ms" or "100 Mbit/s + 20 ms"; None if the text is not a network.

    >>> read_notation("1gbps+0.5ms"), read_notation("200 Mbit/s"), read_notation("fast")
    (1gbps+500us, 200mbps, None)
    """
    fields = read_wires(text)
    return None if fields is None else Network(**fields)


FREE = Network(math.inf)
"""Infinite bandwidth and no latency: only compute, codecs and the schedule take time."""


@dataclass(frozen=True)
class Placement:
    """The host of every worker, by replica, and the cores of the hosts.

    >>> Placement.spread(num_workers=4, num_hosts=8)
    Placement(hosts=(0, 2, 4, 6), cores=None, machines=None, threads=1)
    """

    hosts: tuple[int, ...]
    """Hosts of workers 0, 1, ... of replica 0, then of replica 1, and so on."""
    cores: tuple[float, ...] | None = None
    """Cores of every machine, shared by its workers; None if workers never slow each other down."""
    machines: tuple[int, ...] | None = None
    """Machine of every host, if namespaces or virtual machines share its cores; None if each host is a machine."""
    threads: int = 1
    """Cores usable by one worker's compute; only used if `cores` is given."""

    def __post_init__(self) -> None:
        hosts = tuple(check_integer("hosts", host, 0) for host in self.hosts)
        object.__setattr__(self, "hosts", hosts)
        object.__setattr__(self, "threads", check_integer("threads", self.threads, 1))
        highest = max(hosts, default=-1)
        if self.machines is not None:
            machines = tuple(check_integer("machines", machine, 0) for machine in self.machines)
            object.__setattr__(self, "machines", machines)
            if len(machines) <= highest:
                raise ValueError(f"`machines` must be given for {highest + 1} hosts, but got {len(machines)} numbers.")
            highest = max(machines)
        if self.cores is not None:
            cores = tuple(check_real("cores", count, 0, math.inf, open_low=True) for count in self.cores)
            object.__setattr__(self, "cores", cores)
            if len(cores) <= highest:
                unit = "hosts" if self.machines is None else "machines"
                raise ValueError(f"`cores` must be given for {highest + 1} {unit}, but got {len(cores)} numbers.")

    @classmethod
    def spread(cls, num_workers: int, num_hosts: int | None = None) -> Placement:
        """Spread workers evenly over the hosts in order, or one per host if `num_hosts` is None."""
        hosts = num_workers if num_hosts is None else num_hosts
        return cls(tuple(worker * hosts // num_workers for worker in range(num_workers)))

    @classmethod
    def parse(cls, text: str, num_workers: int) -> Placement:
        """Parse the hosts of all workers, such as "0,3,1,2"; raises ValueError unless there is one for each.

        >>> Placement.parse("0,3,1,2", 4).hosts
        (0, 3, 1, 2)
        """
        hosts = [part.strip() for part in text.split(",")]
        if not all(host.isdecimal() for host in hosts) or len(hosts) != num_workers:
            raise ValueError(
                f"`placement` must be a host for each of {num_workers} workers, such as {','.join(map(str, range(num_workers)))} "
                f"(the workers of replica 0 first), but got {shown(text)}."
            )
        return cls(tuple(map(int, hosts)))

    @property
    def num_hosts(self) -> int:
        return max(self.hosts, default=0) + 1

    def by_replica(self, num_workers: int) -> NDArray[np.int64]:
        """Return the host of each (replica, worker); raises ValueError if hosts do not divide evenly into replicas."""
        if not self.hosts or len(self.hosts) % num_workers:
            raise ValueError(
                f"`hosts` must name a host for each of {num_workers} workers of every replica, but got {len(self.hosts)} hosts."
            )
        return np.array(self.hosts, np.int64).reshape(-1, num_workers)
