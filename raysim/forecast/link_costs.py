"""Forecast costs of packets between stages, from the run's compressors on seeded tensors."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from raysim.codecs import derive_key, warm
from raysim.codecs.codec import DTYPES, Packet, work_bytes
from raysim.codecs.message import wire_bytes
from raysim.compressors import Compressor, Context, Plain, State
from raysim.config import ConfigError, RunConfig
from raysim.limits import process_memory
from raysim.network.profile import Profile
from raysim.units import format_bytes
from raysim.values import UNNAMED, BoundaryTensors

T = TypeVar("T")

SEEDED = "made by the compressors themselves of seeded normal tensors"
LATE = 2**20  # an epoch after any warm-up
VISITS = 4  # timed visits of one message, after one that warms up


class LinkCost(NamedTuple):
    """Cost of one tensor on one link, at its first visit and later."""

    replica: int | None  # None if all replicas have the same compressors
    boundary: int
    direction: str
    tensor: str  # its name, if several may cross
    codec: str
    dense_bytes: float
    first_bytes: float
    wire_bytes: float
    encode_s: float
    decode_s: float
    first_encode_s: float
    first_decode_s: float


FIGURES = LinkCost._fields[LinkCost._fields.index("dense_bytes") :]
"""Fields that grow with the tensor."""


class Visit(NamedTuple):
    """The bytes and codec seconds of a message."""

    wire_bytes: int
    encode_s: float
    decode_s: float

    @classmethod
    def median(cls, visits: Sequence[Visit]) -> Visit:
        """Return the last visit, with the median seconds of all."""
        seconds = (statistics.median(each) for each in list(zip(*visits, strict=True))[1:])
        return cls(visits[-1].wire_bytes, *seconds)


def link_costs(
    config: RunConfig,
    boundaries: Sequence[BoundaryTensors],
    codec_bytes_per_s: float | None,
    notes: list[str],
) -> tuple[LinkCost, ...]:
    """Return the cost of every tensor on every link, encoded and decoded by the real compressors on this machine.

    Seconds are measured, or, with `codec_bytes_per_s`, computed from the codecs' counted work at that speed.
    """
    dtype = DTYPES[config.dtype]
    shapes = [shape for boundary in boundaries for shape in boundary.shapes.values()]
    largest = dtype.itemsize * max(map(math.prod, shapes), default=0)
    memory = process_memory()
    if 8 * largest > memory.size:
        raise ConfigError(
            f"Encoding a message of {format_bytes(largest)} takes up to {format_bytes(8 * largest)}, but {memory}. "
            "Use more microbatches."
        )
    device = "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"
    before = torch.get_num_threads()
    torch.set_num_threads(config.threads_per_stage)
    measured: dict[tuple[str, tuple[int, ...]], list[LinkCost]] = {}
    links: list[LinkCost] = []
    try:
        replicas = config.compressors([crossing.shapes for crossing in boundaries])
        methods = dict.fromkeys(
            method for ends in replicas for pairs in ends for pair in pairs.values() for method in pair
        )
        if codec_bytes_per_s is None:
            warm({method.codec for method in methods}, [dtype])
        alike = all(ends == replicas[0] for ends in replicas)
        for replica, ends in enumerate(replicas[:1] if alike else replicas):
            own = None if alike else replica
            for boundary, (pairs, crossing) in enumerate(zip(ends, boundaries, strict=True)):
                for name, shape in crossing.shapes.items():
                    key = repr(pairs[name]), shape
                    if key not in measured:
                        measured[key] = _measure(pairs[name], shape, dtype, device, config.seed, codec_bytes_per_s)
                    links += [cost._replace(replica=own, boundary=boundary, tensor=name) for cost in measured[key]]
                links += [
                    LinkCost(own, boundary, "forward", name, "Identity", size, size, size, 0.0, 0.0, 0.0, 0.0)
                    for name, size in crossing.exact_bytes.items()
                ]
    finally:
        torch.set_num_threads(before)
    notes += [
        f"{method!r} follows the gradients of a run: before a run its messages are priced uncompressed."
        for method in methods
        if "stage" in method.needs
    ]
    where = torch.cuda.get_device_name() if device == "cuda" else f"{config.threads_per_stage} thread(s) of this CPU"
    seconds = f"measured on {where}" if codec_bytes_per_s is None else "of their counted work"
    notes.append(f"Packets: {SEEDED}. Codec seconds: {seconds}.")
    return tuple(links)


def _measure(
    methods: Sequence[Compressor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    seed: int,
    codec_bytes_per_s: float | None,
) -> list[LinkCost]:
    """Return the costs of both directions of one boundary; with shared indices, gradients keep the activations' positions."""
    costs = []
    support = None
    for direction, method in zip(("forward", "backward"), methods, strict=True):
        # neither values nor time matter
        counted = codec_bytes_per_s is not None and isinstance(method, Plain) and method.codec.fixed_size
        generator = torch.Generator().manual_seed(derive_key(seed, "forecast", direction) % 2**63)
        draw = torch.zeros if counted else partial(torch.randn, generator=generator)
        x = draw(shape).to(device, dtype)
        contexts = [
            Context(
                direction=direction,
                step=visit,
                epoch=0 if visit <= 1 else LATE,
                microbatch=0,
                sample_ids=tuple(range(shape[0])),
                key=derive_key(seed, "forecast", direction, visit),
                support=support,
            )
            for visit in (range(1, 2) if counted else range(VISITS + 1))
        ]
        visits, packet = _visit(method, x, contexts, codec_bytes_per_s)
        if direction == "forward" and method.codec.selects:
            support = method.codec.support(packet, torch.device(device))
        first, later = visits[0], Visit.median(visits[1:] or visits)
        if first.wire_bytes == later.wire_bytes:  # all visits are alike
            first = later = Visit.median(visits)
        size = x.numel() * dtype.itemsize
        costs.append(LinkCost(None, 0, direction, UNNAMED, repr(method), size, first.wire_bytes, *later, *first[1:]))
    return costs


def _visit(
    method: Compressor, x: Tensor, contexts: Sequence[Context], codec_bytes_per_s: float | None
) -> tuple[list[Visit], Packet]:
    """Return the visits of `x` after the warm-up, visit 0, and the last packet."""
    sender: State = {}
    receiver: State = {}
    visits = []
    for context in contexts:
        if context.step == 1:  # forget the warm-up
            sender, receiver = {}, {}
        moved = x + 0.1 * torch.roll(x, context.step)  # activations change between visits
        encode = partial(method.encode, moved, sender, context)
        encode_s, (packet, changes) = _timed(encode, x.device, codec_bytes_per_s)
        method.commit(sender, changes)
        decode = partial(method.decode, packet, receiver, context, x.device)
        decode_s, (_, changes) = _timed(decode, x.device, codec_bytes_per_s)
        method.commit(receiver, changes)
        if context.step:
            visits.append(Visit(wire_bytes(method.table.pack(packet)), encode_s, decode_s))
    return visits, packet


def _timed(run: Callable[[], T], device: torch.device, codec_bytes_per_s: float | None) -> tuple[float, T]:
    """Run a codec; return its seconds and its result."""
    start, work = time.perf_counter(), work_bytes()
    result = run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    if codec_bytes_per_s is not None:
        return (work_bytes() - work) / codec_bytes_per_s, result
    return time.perf_counter() - start, result


def packets_profile(links: Sequence[LinkCost], num_stages: int, num_ops: int, *, first: bool) -> Profile:
    """Return a profile with packets and codec seconds only."""
    num_replicas = max((link.replica or 0 for link in links), default=0) + 1
    shape = (num_replicas, num_stages, num_ops, 1)
    wire_bytes, dense_bytes, encode_s, decode_s = (np.zeros(shape) for _ in range(4))
    for link in links:
        op = 0 if link.direction == "forward" else 1
        source, target = (link.boundary, link.boundary + 1) if op == 0 else (link.boundary + 1, link.boundary)
        replica = link.replica or 0
        wire_bytes[replica, source, op] += link.first_bytes if first else link.wire_bytes
        dense_bytes[replica, source, op] += link.dense_bytes
        encode_s[replica, source, op] += link.first_encode_s if first else link.encode_s
        decode_s[replica, target, op] += link.first_decode_s if first else link.decode_s
    return Profile(
        compute_s=np.zeros(shape),
        wire_bytes=wire_bytes,
        dense_bytes=dense_bytes,
        encode_s=encode_s,
        decode_s=decode_s,
    )
