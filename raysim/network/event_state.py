"""Records of the event loop: arrays whose elements have named fields, one array for each kind of object.

Numba reads and writes the fields in place. (Arrays in a tuple are slower: numba counts references at every access.)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Record = Any  # one element of `Records`, a view into it
Records = NDArray[Any]

ACTION = np.dtype(
    [
        ("replica", np.int64),
        ("number", np.int64),  # within its replica
        ("part", np.int64),  # (replica * stages + stage) * steps + step
        ("needs", np.int64),  # the action whose packet it needs, -1 where it needs none
        ("queue", np.int64),  # of `posted` for the packet that it sends, -1 where it sends none
        ("there", np.int64),  # channel to the receiver of its packet, -1 within a host
        ("back", np.int64),  # channel from that receiver
    ],
    align=True,
)
"""An action and its packet, numbered by (replica, stage, op, microbatch): fixed by schedule and placement."""

COST = np.dtype(
    [
        ("decode_s", np.float64),
        ("compute_s", np.float64),  # alone on its cores
        ("encode_s", np.float64),  # with handing the packet over
        ("wire_bytes", np.float64),
        ("messages", np.int64),  # there and back in turn; the last is the packet itself, the others are short
        ("trips", np.float64),  # how often each of them pays the latency
    ],
    align=True,
)
"""Seconds and bytes of an action: fixed by the profile."""

PROGRESS = np.dtype(
    [
        ("start_s", np.float64),  # results, in seconds from the start of the step; NaN where there is no such time
        ("end_s", np.float64),
        ("begin_s", np.float64),  # of the packet's transfer
        ("arrive_s", np.float64),
        ("due", np.float64),  # when the packet's message comes to the wire, or off it to the host
        ("to_come", np.int64),  # messages of the packet that have not arrived
        ("after", np.int64),  # the next packet of the same queue
        ("delivered", np.bool_),
    ],
    align=True,
)
"""State of an action and of its packet."""

WORKER = np.dtype(
    [
        ("machine", np.int64),
        ("threads", np.int64),  # at work while it computes
        ("head", np.int64),  # index of its next action in `rows`
        ("stop", np.int64),  # end of its row there
        ("phase", np.int64),  # 0 while it waits
        ("action", np.int64),  # the action it works on
        ("left", np.float64),  # seconds of the phase at full speed that were left at `since`
        ("speed", np.float64),
        ("since", np.float64),
        ("finish", np.float64),  # when the phase will end, infinite while it waits
        ("free_s", np.float64),  # the result: when its last action ended
    ],
    align=True,
)
"""A worker of a replica and its state."""

MACHINE = np.dtype([("cores", np.float64), ("threads", np.float64)], align=True)
"""The cores of a machine, infinite where workers never slow one another down, and the threads at work on them."""

QUEUE = np.dtype([("first", np.int64), ("last", np.int64)], align=True)
"""First and last packet of a queue, -1 where it is empty; `PROGRESS` links them by `after`."""

CHANNEL = np.dtype(
    [
        ("rate", np.float64),  # payload bytes/s
        ("latency_s", np.float64),
        ("jitter_s", np.float64),
        ("out", np.int64),  # the sending port, where ports are shared
        ("into", np.int64),  # the receiving port
        ("bucket", np.int64),
        ("wired", QUEUE),  # packets with a message at the wire, of which the first is on it: the flow
        ("flying", QUEUE),  # packets with a message that arrives after the latency
        ("share", np.float64),  # the rate that a flow would get now
        ("fresh", np.bool_),  # the flow has not begun
        ("left", np.float64),  # bytes of the flow that were left at `since`
        ("speed", np.float64),  # its rate
        ("since", np.float64),
        ("finish", np.float64),  # when it will be through, infinite where there is none
        ("last_due", np.float64),  # arrival of the latest message: none overtakes another
    ],
    align=True,
)
"""One direction between two hosts, and its state."""

BUCKET = np.dtype(
    [
        ("burst_bytes", np.float64),  # its size
        ("refill", np.float64),  # bytes/s
        ("tokens", np.float64),
        ("idle_since", np.float64),
        ("sending", np.int64),  # number of flows
    ],
    align=True,
)
"""A token bucket: one at every outgoing port, or at every channel where ports are not shared."""

PORT = np.dtype([("rate", np.float64), ("left", np.float64), ("users", np.int64)], align=True)
"""A port of a host and its rate in payload bytes/s. While rates are shared out: the rate left, and the flows that wait for theirs."""
