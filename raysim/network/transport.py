"""Transports of messages between hosts: the bytes and trips added to messages, and the seconds of overhead on hosts."""

from __future__ import annotations

import json
import math
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from raysim.notation import check_choice, check_real
from raysim.storage.files import cache_folder, read_text, write_whole
from raysim.storage.texts import parse_json

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class HostCosts:
    """Seconds of overhead of a transport on idle hosts: a property of the machine, independent of the recorded run."""

    call_s: float = 0.0
    """On the sender's clock, to hand a message over."""
    message_s: float = 0.0
    """From there to the receiver, besides the wire."""
    byte_s: float = 0.0
    """The same per byte."""
    step_s: float = 0.0
    """On the driver, per step."""
    worker_s: float = 0.0
    """On the driver, per worker and step."""
    source: str = "no seconds of a host"
    """Origin of these figures, in words."""

    def overheads(self, num_workers: int) -> dict[str, float]:
        """Return the overheads of a `Profile` for a step of `num_workers` workers."""
        driver_s = self.step_s + num_workers * self.worker_s
        return {"call_s": self.call_s, "message_s": self.message_s, "byte_s": self.byte_s, "step_s": driver_s}


class Band(NamedTuple):
    """Costs of messages of at least `from_bytes`."""

    from_bytes: float
    beside_bytes: float
    """Bytes added to a message, in its direction."""
    trips: float
    """Mean number of one-way trips from when a message is ready to its arrival."""
    messages: int = 1
    """The message and the short requests for it, alternating in direction. All wait for their wires."""


ALL_REDUCES = ("direct", "ring", "tree", "sites", "server", "chain")
"""Algorithms of an all-reduce, see `raysim.network.exchanges`."""


@dataclass(frozen=True)
class Averaging:
    """Averaging of gradients over replicas: the algorithm of the uncompressed all-reduce, and its overlap with backward.

    >>> Averaging(), Averaging("ring", bucket_mib=25)
    (direct, ring/25MiB)
    """

    algorithm: str = "direct"
    """One of `ALL_REDUCES`."""
    bucket_mib: float | None = None
    """Size of the buckets averaged during the last backward of a step (DDP's `bucket_cap_mb`); if None, gradients are averaged
    once all pipelines are done."""

    def __post_init__(self) -> None:
        check_choice("averaging", self.algorithm, ALL_REDUCES)
        if self.bucket_mib is not None:
            object.__setattr__(
                self, "bucket_mib", check_real("bucket_mib", self.bucket_mib, 0, math.inf, open_low=True)
            )

    def __repr__(self) -> str:
        return self.algorithm if self.bucket_mib is None else f"{self.algorithm}/{self.bucket_mib:g}MiB"

    def words(self, *, dense: bool = True, in_buckets: bool = True) -> str:
        """Describe how gradients are averaged, for use in sentences: `dense` if uncompressed, `in_buckets` if the method allows it.

        >>> Averaging().words()
        'once all pipelines are done'
        >>> Averaging("ring", 25).words()
        'by a ring all-reduce, in buckets of 25 MiB during the last backward'
        """
        when = "once all pipelines are done"
        if in_buckets and self.bucket_mib is not None:
            when = f"in buckets of {self.bucket_mib:g} MiB during the last backward"
        return f"by a {self.algorithm} all-reduce, {when}" if dense and self.algorithm != "direct" else when

    def num_buckets(self, size: float) -> int:
        """Return the number of buckets for gradients of `size` bytes; 0 if they do not overlap backward."""
        return 0 if self.bucket_mib is None else math.ceil(size / (self.bucket_mib * 2**20))


def parse_averaging(text: str) -> Averaging:
    """Parse an averaging: "ring", or with buckets "ring/25MiB".

    >>> parse_averaging("ring/25MiB"), parse_averaging("direct")
    (ring/25MiB, direct)
    """
    match = re.fullmatch(r"(\w+)(?:/(\d+(?:\.\d+)?)MiB)?", text.strip())
    if match is None:
        raise ValueError(
            f"`averaging` must be {', '.join(ALL_REDUCES)}, or one of them with buckets such as 'ring/25MiB', but got {text!r}."
        )
    return Averaging(match[1], float(match[2]) if match[2] else None)


@dataclass(frozen=True)
class Transport:
    """The costs of messages by size, and of a step."""

    name: str
    bands: tuple[Band, ...]
    """In increasing order of message size; the first starts at 0."""
    step_trips: float = 0
    """One-way trips between the driver and the workers at a step's end."""
    host: HostCosts = HostCosts()
    averaging: Averaging = Averaging()
    """How replicas average gradients over this transport by default."""

    def __str__(self) -> str:
        """Return the costs in words, for reports.

        >>> print(BARE)
        bare: 0 bytes of overhead per message, 1 one-way trip; no seconds of a host
        """
        bands = []
        for start, beside, trips, _ in self.bands:
            sizes = f"from {start:,.0f} bytes on " if start else ""
            bands.append(
                f"{sizes}{beside:,.0f} bytes of overhead per message, {trips:g} one-way trip{'' if trips == 1 else 's'}"
            )
        if self.step_trips:
            bands.append(f"{self.step_trips:g} trips at the end of a step")
        return f"{self.name}: {'; '.join(bands)}; {self.host.source}"

    def beside(self, wire_bytes: ArrayLike) -> Floats:
        """Return the bytes added to messages of these sizes; 0 for size 0, which is not sent.

        >>> RAY.beside([0, 1_000])
        array([   0., 1000.])
        """
        return np.where(np.asarray(wire_bytes) > 0, self._of_band("beside_bytes", wire_bytes), 0.0)

    def trips(self, wire_bytes: ArrayLike) -> Floats:
        """Return the one-way trips of messages of these sizes.

        >>> GLOO.trips([100, 10_000_000])  # whatever the size
        array([1., 1.])
        """
        return self._of_band("trips", wire_bytes)

    def messages(self, wire_bytes: ArrayLike) -> Floats:
        """Return the number of messages, alternating in direction, needed to deliver one of each of these sizes.

        >>> RAY.messages([1_000, 10_000_000])
        array([1., 5.])
        """
        return self._of_band("messages", wire_bytes)

    def _of_band(self, name: str, wire_bytes: ArrayLike) -> Floats:
        values = np.array([getattr(band, name) for band in self.bands], np.float64)
        starts = [band.from_bytes for band in self.bands]
        costs: Floats = values[np.searchsorted(starts, np.asarray(wire_bytes, np.float64), side="right") - 1]
        return costs


BARE = Transport("bare", (Band(0, 0, 1),))
"""Messages without overhead, for closed forms and for the time of wires and compute only."""

RAY = Transport(
    "ray",
    (Band(0, 1_000, 1), Band(384 * 2**10, 1_500, 2), Band(3 * 2**20, 1_500, 3), Band(4 * 2**20, 4_500, 6, 5)),
    step_trips=2,
    host=HostCosts(
        call_s=0.135e-3,
        message_s=0.405e-3,
        byte_s=0.3e-9,
        step_s=0.8e-3,
        worker_s=0.5e-3,
        source="seconds of Ray 2.60 between idle actors of a virtual machine with two cores, 2026-11-25",
    ),
)
"""Ray 2.60 between actors. A packet is an argument of the sender's call to the receiver (`raysim.engine.delivery`), and takes one
trip. From 384 KiB on it may wait for gRPC and TCP windows, which adds a round trip: medians are 1.00 to 1.03 trips at 131 kB, 1.0 or
3.0 about equally often at 524 kB, 1 MB and 2 MB, and 3.0 at 4 MB, at 20 and 80 ms, measured on 2026-11-25 (`raysim validate
--trips`). From 4 MiB on a packet stays in its host's object store: the call is followed by a query for its location, the answer, a
request and the packet. Each of these five messages queues behind packets on its way. The end of a step takes two trips, the driver's
update call and its reply. Hosts are assumed to have `net.ipv4.tcp_slow_start_after_idle = 0`: with Linux's default of 1, packets take
3 to 20 trips. TCP, IP and Ethernet headers and acknowledgements are not in the added bytes: networks count them by `framing`.
"""

DDP = Averaging("ring", bucket_mib=25)
"""torch's DistributedDataParallel by default, over NCCL or gloo."""

GLOO = Transport(
    "gloo",
    (Band(0, 96, 1),),
    host=HostCosts(
        call_s=20e-6,
        message_s=25e-6,
        byte_s=0.25e-9,
        source="seconds of gloo between two idle processes of a virtual machine with two cores, 2026-11-25",
    ),
    averaging=DDP,
)
"""gloo over TCP. A notification and the preamble of the message itself take 48 bytes each (`gloo/transport/tcp/pair.h`, `Op`). The
message is sent at once if its receive is already posted, which is assumed; otherwise it waits for the receiver's notification and
takes three trips.
"""

NCCL = Transport(
    "nccl",
    (Band(0, 4, 1),),
    host=HostCosts(
        message_s=22.4e-6, source="NCCL's own model of a hop over a network: 8.4 + 14.0 us (tuning.cc, Simple)"
    ),
    averaging=DDP,
)
"""NCCL over sockets: four bytes of length before each piece of up to 512 KiB (`src/transport/net_socket.cc`), of which one is counted.
Pieces are sent at once while the receiver's 4 MiB of buffers are free; the wait for buffers on links with a larger bandwidth-delay
product is not modelled.
"""

TRANSPORTS = {transport.name: transport for transport in (RAY, GLOO, NCCL, BARE)}


def parse_transport(name: str) -> Transport:
    """Return the transport with this name; raises ValueError listing the known ones."""
    return TRANSPORTS[check_choice("transport", name, TRANSPORTS)]


def calibration_file() -> Path:
    """Return the path of this machine's calibration file."""
    return cache_folder() / "transports.json"


def calibrated_transport(name: str, averaging: str | None = None) -> Transport:
    """Return a transport with this machine's measured seconds (`raysim calibrate`), or the defaults if there are none.

    `averaging` replaces the transport's default averaging. Raises ValueError for an unknown transport or averaging, or if the
    calibration file is malformed.
    """
    transport = parse_transport(name)
    if averaging is not None:
        transport = replace(transport, averaging=parse_averaging(averaging))
    costs = _read().get(transport.name)
    return transport if costs is None else replace(transport, host=costs)


def save_calibration(name: str, costs: HostCosts) -> Path:
    """Save the seconds of a transport on this machine, and return the file; a damaged one is replaced. Raises OSError."""
    path, known = calibration_file(), dict[str, HostCosts]()
    with suppress(ValueError):
        known = _read()
    known[parse_transport(name).name] = costs
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({key: asdict(value) for key, value in known.items()}, indent=1).encode())
    return path


def _read() -> dict[str, HostCosts]:
    path = calibration_file()
    if not path.is_file():
        return {}
    try:
        costs = {}
        for name, values in parse_json(read_text(path)).items():
            source = str(values.pop("source"))
            costs[name] = HostCosts(**{k: check_real(k, v, 0, math.inf) for k, v in values.items()}, source=source)
        return costs
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(
            f"The calibration {path} cannot be read ({error}). Run `raysim calibrate`, or delete it."
        ) from None
