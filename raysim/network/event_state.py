"""Inputs, results and state of the event loop, as named tuples of arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]
Bools = NDArray[np.bool_]


class Rows(NamedTuple):
    """The actions of each worker in their order, the same in every replica."""

    offsets: I64  # (worker + 1,): where the row of each worker begins
    stages: I32
    ops: U8
    microbatches: I32
    owner: I32  # (stage,): its worker
    num_microbatches: int
    num_replicas: int


class Costs(NamedTuple):
    """Seconds and bytes of every action; arrays are (replica or 1, stage, op, microbatch or 1)."""

    decode_s: F64
    compute_s: F64  # alone on its cores
    encode_s: F64
    wire_bytes: F64
    messages: F64  # of a packet, which go there and back in turn; all but the last, the packet itself, are short
    trips: F64  # how often all of them together pay the latency
    call_s: float  # to hand a packet over
    message_s: float
    byte_s: float


class Hosts(NamedTuple):
    """The place of every worker, and the cores there."""

    host: I64  # (replica * worker,)
    machine: I64  # (replica * worker,)
    cores: F64  # (machine,): infinite where workers never slow one another down
    threads: int  # of a worker that computes


class Wires(NamedTuple):
    """Channels between pairs of hosts, and the ports that channels share."""

    channel: I32  # (host, host): number of the channel, -1 within a host
    source: I64  # (channel,): host
    target: I64
    rate: F64  # (channel,): payload bytes/s
    latency_s: F64  # (channel,)
    port_rate: F64  # (host,): payload bytes/s, infinite where ports are not shared
    half: bool  # a port sends or receives at its rate, not both
    burst_bytes: float
    jitter_s: float
    seed: int


class Times(NamedTuple):
    """The results, in seconds from the start of the step."""

    start_s: F64  # by (replica, stage, op, microbatch), flat, as the next three
    end_s: F64
    begin_s: F64
    arrive_s: F64
    free_s: F64  # (replica * worker,)
    done_s: F64  # (replica * stage,)


class Inputs(NamedTuple):
    """All inputs, with sizes that follow from them."""

    rows: Rows
    costs: Costs
    hosts: Hosts
    wires: Wires
    num_workers: int
    num_stages: int
    num_ops: int
    ported: bool  # channels share ports


class Workers(NamedTuple):
    """State of each worker of each replica."""

    head: I64  # its next action
    phase: I64
    left: F64  # seconds of the phase at full speed that were left at `since`
    speed: F64
    since: F64
    finish: F64  # when the phase will end


class Queue(NamedTuple):
    """First and last packet of each queue, -1 where it is empty; `Packets.after` links them."""

    head: I64
    tail: I64


class Packets(NamedTuple):
    """State of each packet; its number is that of the action that sends it."""

    delivered: Bools
    to_come: I64  # its messages that have not arrived
    due: F64  # when its message comes to the wire, or off it to the host
    after: I64  # the next packet of the same queue


class Flows(NamedTuple):
    """State of the message at the head of each channel."""

    left: F64  # bytes that were left at `since`
    rate: F64
    since: F64
    finish: F64  # when it will be through
    fresh: Bools  # it has no rate yet
    last_due: F64  # arrival of the latest message: none overtakes another


class Buckets(NamedTuple):
    """Token buckets: one at every outgoing port, or at every channel where ports are not shared."""

    tokens: F64
    idle_since: F64
    sending: I64  # number of flows


class State(NamedTuple):
    """The state of the simulation at one time."""

    workers: Workers
    posted: Queue  # (replica * worker * op,): packets on their way to the wire
    wired: Queue  # (channel,): packets with a message at the wire, of which the first is on it
    flying: Queue  # (channel,): packets with a message that arrives after the latency
    packets: Packets
    flows: Flows
    buckets: Buckets
