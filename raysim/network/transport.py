"""Transports of messages between hosts: each adds bytes to a message, and multiplies its latency by a number of trips."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from raysim.notation import check_choice

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Transport:
    """The bytes beside a message and its one-way trips, for small messages and for messages of at least `large_from` bytes."""

    name: str
    large_from: float
    """Bytes from which on a message is a large one."""
    small_bytes: float
    """Bytes beside a small message, in its direction."""
    large_bytes: float
    small_trips: float
    """One-way trips from the moment at which a small message is ready to its arrival."""
    large_trips: float
    large_messages: int = 1
    """The large message itself and the short ones by which the receiver asks for it, there and back in turn. All wait for their
    wires."""
    step_trips: float = 0
    """One-way trips between the driver and the workers at a step's end."""

    def __str__(self) -> str:
        """Return the costs of a message over this transport, as reports name them.

        >>> print(GLOO)
        gloo: 96 bytes beside a message, which makes 1 one-way trip
        """
        trip = "trip" if self.small_trips == 1 else "trips"
        if self.large_from == np.inf:
            return f"{self.name}: {self.small_bytes:g} bytes beside a message, which makes {self.small_trips:g} one-way {trip}"
        return (
            f"{self.name}: {self.small_bytes:g} bytes beside a message, which makes {self.small_trips:g} one-way {trip}; from "
            f"{self.large_from:g} bytes on {self.large_bytes:g} bytes and {self.large_trips:g} trips; the end of a step makes "
            f"{self.step_trips:g} trips"
        )

    def beside(self, wire_bytes: ArrayLike) -> Floats:
        """Return the bytes that go beside messages of these sizes; 0 for size 0, where nothing is sent.

        >>> RAY.beside([0, 1_000]) == [0, RAY.small_bytes]
        array([ True,  True])
        """
        sizes = np.asarray(wire_bytes, np.float64)
        return np.where(sizes > 0, np.where(self.is_small(sizes), self.small_bytes, self.large_bytes), 0.0)

    def trips(self, wire_bytes: ArrayLike) -> Floats:
        """Return the one-way trips of messages of these sizes.

        >>> GLOO.trips([100, 10_000_000])  # its trips do not depend on the size
        array([1, 1])
        """
        return np.where(self.is_small(wire_bytes), self.small_trips, self.large_trips)

    def messages(self, wire_bytes: ArrayLike) -> Floats:
        """Return how many messages go there and back in turn until one of each of these sizes has arrived.

        >>> RAY.messages([1_000, 1_000_000])
        array([1., 5.])
        """
        return np.where(self.is_small(wire_bytes), 1.0, float(self.large_messages))

    def is_small(self, wire_bytes: ArrayLike) -> NDArray[np.bool_]:
        """Return whether messages of these sizes are small ones."""
        return np.asarray(wire_bytes) < self.large_from


BARE = Transport(name="bare", large_from=np.inf, small_bytes=0, large_bytes=0, small_trips=1, large_trips=1)
"""Messages as they are: for closed forms."""

RAY = Transport(
    name="ray",
    large_from=100 * 1024,
    small_bytes=1_000,
    large_bytes=4_500,
    small_trips=1,
    large_trips=6,
    large_messages=5,
    step_trips=2,
)
"""Ray 2.60 between actors. A packet is an argument of a call that its sender makes to its receiver. Small ones
(`max_direct_call_object_size`) travel in the call and make one trip. Large ones stay in the object store of their host: after the
call come a question where the packet is, its answer, a request and the packet, which is five messages. Each of them waits behind
packets on its way, so that large packets which cross one another delay one another. Flow control of gRPC and TCP adds trips: steps of
2 and 3 hosts with large packets at 20 and 80 ms, measured on 2026-11-22 (`raysim validate`), take as long as with 5.7 to 6.4 trips a
packet.
The medians of single packets are 5.0 to 9.0, those of small ones 1.00 to 1.04 (`raysim validate --trips`). The end of a step takes two
trips, the driver's call to update and its reply. Hosts are assumed to have `net.ipv4.tcp_slow_start_after_idle = 0`: with Linux's
default of 1, packets take 3 to 20 trips.
Bytes counted on 2026-11-22 on the cables of three hosts (`raysim validate --count`): 1,130 to 1,300 beside packets of 2 to 66 kB,
5,200 to 5,600 beside packets of 262 kB. Headers of TCP, IP and Ethernet, and acknowledgements, are in these counts, but not in the
figures above, since networks count them by `framing`.
"""

GLOO = Transport(name="gloo", large_from=np.inf, small_bytes=96, large_bytes=96, small_trips=1, large_trips=1)
"""gloo over TCP. A notification and the preamble of the message itself take 48 bytes each (`gloo/transport/tcp/pair.h`, `Op`). The
message leaves at once where its receive was posted before, which is assumed; otherwise it waits for the receiver's notification, and
takes three trips.
"""

NCCL = Transport(name="nccl", large_from=np.inf, small_bytes=4, large_bytes=4, small_trips=1, large_trips=1)
"""NCCL over sockets: four bytes of length before each piece of up to 512 KiB (`src/transport/net_socket.cc`), of which one is counted.
Pieces leave at once while the receiver's 4 MiB of buffers are free; the wait for buffers on links of more delay times bandwidth than
that is not modelled.
"""

TRANSPORTS = {transport.name: transport for transport in (RAY, GLOO, NCCL)}


def parse_transport(name: str) -> Transport:
    """Return the transport of a name; raises ValueError with the known ones."""
    return TRANSPORTS[check_choice("transport", name, TRANSPORTS)]
