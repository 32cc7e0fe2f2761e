"""Costs of the packets of a run that was never made, by its own compressors and replica methods on seeded tensors."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from raysim.codecs import derive_key, warm
from raysim.codecs.codec import DTYPES, work_bytes
from raysim.codecs.message import wire_bytes
from raysim.compressors import Compressor, Context, State
from raysim.config import ConfigError, RunConfig
from raysim.limits import process_memory
from raysim.network.collectives import DIRECTIONS, Transfers, all_reduce, as_transfers, mean_transfers
from raysim.network.exchanges import more_than_dense
from raysim.network.profile import Profile
from raysim.pipeline.groups import CONTROL_VALUES, Group, MemberRounds, chunk_bytes, exchange_together, ring_bytes
from raysim.pipeline.plan import compressors_of
from raysim.replication.method import Memory, ReplicaContext, ReplicaMethod
from raysim.units import format_bytes
from raysim.values import UNNAMED, BoundaryTensors

T = TypeVar("T")

LATE = 2**20  # an epoch after any warm-up
VISITS = 4  # of one message: the first is not timed, the others are
AVERAGES = 3  # of replica gradients: the last two count, as methods may send one side and then the other


class LinkCost(NamedTuple):
    """Cost of a tensor in a message on one direction of one boundary, at its first visit and later."""

    replica: int | None  # None where all replicas have the same compressors
    boundary: int
    direction: str
    tensor: str  # its name, where several may cross
    codec: str
    dense_bytes: int
    first_bytes: int
    wire_bytes: int
    encode_s: float
    decode_s: float
    first_encode_s: float
    first_decode_s: float

    @classmethod
    def of_exact(cls, replica: int | None, boundary: int, tensor: str, exact_bytes: int) -> LinkCost:
        """Return the cost of a tensor that is sent as it is."""
        return cls(replica, boundary, "forward", tensor, "Identity", *[exact_bytes] * 3, *[0.0] * 4)


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
    largest = max((math.prod(shape) * dtype.itemsize for one in boundaries for shape in one.shapes.values()), default=0)
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
        warm()
        replicas = compressors_of(config, boundaries)
        alike = all(ends == replicas[0] for ends in replicas)
        for replica, ends in enumerate(replicas[:1] if alike else replicas):
            apart = None if alike else replica
            for place, (pairs, crossing) in enumerate(zip(ends, boundaries, strict=True)):
                for name, shape in crossing.shapes.items():
                    key = repr(pairs[name]), shape
                    if key not in measured:
                        measured[key] = _measure(pairs[name], shape, dtype, device, config.seed, codec_bytes_per_s)
                    links += [one._replace(replica=apart, boundary=place, tensor=name) for one in measured[key]]
                links += [LinkCost.of_exact(apart, place, name, size) for name, size in crossing.exact_bytes.items()]
    finally:
        torch.set_num_threads(before)
    notes += [
        f"{method!r} follows the gradients of a run: before a run its messages are priced uncompressed."
        for method in dict.fromkeys(
            method for ends in replicas for pairs in ends for pair in pairs.values() for method in pair
        )
        if method.needs_sensitivity
    ]
    where = torch.cuda.get_device_name() if device == "cuda" else f"{config.threads_per_stage} thread(s) of this CPU"
    seconds = f"measured on {where}" if codec_bytes_per_s is None else "of their counted work"
    notes.append(f"Packets: made by the compressors themselves of seeded normal tensors. Codec seconds: {seconds}.")
    return tuple(links)


def _measure(
    methods: Sequence[Compressor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    seed: int,
    codec_bytes_per_s: float | None,
) -> list[LinkCost]:
    """Return the costs of both directions of one boundary; shared indices let gradients follow the activations' positions."""
    costs = []
    support = None
    for direction, method in zip(("forward", "backward"), methods, strict=True):
        generator = torch.Generator().manual_seed(derive_key(seed, "forecast", direction) % 2**63)
        x = torch.randn(shape, generator=generator).to(device, dtype)
        sender: State = {}
        receiver: State = {}
        visits = []
        for visit in range(VISITS + 1):
            if visit == 1:  # that one only warmed up
                sender, receiver = {}, {}
            context = Context(
                direction=direction,
                boundary=0,
                step=visit,
                epoch=0 if visit <= 1 else LATE,
                microbatch=0,
                sample_ids=tuple(range(shape[0])),
                key=derive_key(seed, "forecast", direction, visit),
                support=support,
            )
            moved = x + 0.1 * torch.roll(x, visit)  # a later visit finds the activation changed
            encode_s, (packet, changes) = _timed(
                partial(method.encode, moved, sender, context), device, codec_bytes_per_s
            )
            method.commit(sender, changes)
            decode_s, (_, changes) = _timed(
                partial(method.decode, packet, receiver, context, device), device, codec_bytes_per_s
            )
            method.commit(receiver, changes)
            visits.append((wire_bytes(method.table.pack(packet)), encode_s, decode_s))
        if direction == "forward" and method.codec.selects:
            support = method.codec.support(packet, torch.device(device))
        (first_bytes, first_encode_s, first_decode_s), later = visits[1], visits[2:]
        if first_bytes == later[-1][0]:
            later = visits[1:]
            first_encode_s, first_decode_s = (statistics.median(visit[i] for visit in later) for i in (1, 2))
        costs.append(
            LinkCost(
                replica=None,
                boundary=0,
                direction=direction,
                tensor=UNNAMED,
                codec=repr(method),
                dense_bytes=x.numel() * dtype.itemsize,
                first_bytes=first_bytes,
                wire_bytes=later[-1][0],
                encode_s=statistics.median(visit[1] for visit in later),
                decode_s=statistics.median(visit[2] for visit in later),
                first_encode_s=first_encode_s,
                first_decode_s=first_decode_s,
            )
        )
    return costs


def _timed(run: Callable[[], T], device: str, codec_bytes_per_s: float | None) -> tuple[float, T]:
    """Return the seconds of a codec's run, and its result."""
    start, work = time.perf_counter(), work_bytes()
    result = run()
    if device == "cuda":
        torch.cuda.synchronize()
    if codec_bytes_per_s is not None:
        return (work_bytes() - work) / codec_bytes_per_s, result
    return time.perf_counter() - start, result


def packets_profile(links: Sequence[LinkCost], num_stages: int, num_ops: int, *, first: bool) -> Profile:
    """Return a profile of packets and codec seconds alone."""
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


class ReplicaCost(NamedTuple):
    """The cost of averaging the gradients of a stage; `wire_bytes` are the bytes of the replica that sends most."""

    stage: int
    method: str
    part: int
    """The part of the stage that is exchanged, see `ReplicaMethod.part`."""
    dense_bytes: int
    wire_bytes: int
    rounds: int
    method_s: float
    coded_bytes: float
    transfers: Transfers
    gradient_bytes: float = 0.0
    """Bytes averaged uncompressed, see `Profile.gradient_bytes`."""
    bucketed_bytes: float = 0.0
    """Bytes of gradients whose average may leave in buckets during backward."""


def replica_costs(
    config: RunConfig,
    shapes: Sequence[Mapping[str, tuple[int, ...]]],
    codec_bytes_per_s: float | None,
    notes: list[str],
) -> list[ReplicaCost]:
    """Return the cost of averaging at each stage, of gradients of these shapes: by an all-reduce counted, else by the method itself.

    A method that exchanges in some steps only has a cost for each of its parts. Raises ConfigError where the gradients of all
    replicas would not fit this machine, or steps are not alike.
    """
    count = config.num_replicas
    costs = []
    for stage, (method, mine) in enumerate(zip(config.replica_methods(), shapes, strict=True)):
        if method.uses_previous_gradients:
            raise ConfigError(
                f"`replica_gradient` of a run that was not made must take one pass in every step, but {method!r} takes two in "
                "some. Record a run, and `raysim replay` it."
            )
        values = sum(math.prod(shape) for shape in mine.values())
        if not method.compresses:
            members = [(replica, stage) for replica in range(count)]
            chunks = chunk_bytes("dense", values, count, method.table(mine))
            transfers = all_reduce(DIRECTIONS[0], stage, members, chunks) if values else as_transfers([])
            sent = np.bincount(transfers["source_replica"], transfers["wire_bytes"], count).max()
            rounds = method.num_rounds(count)
            costs.append(
                ReplicaCost(
                    stage,
                    repr(method),
                    0,
                    ring_bytes(values, count),
                    int(sent),
                    rounds,
                    0.0,
                    0.0,
                    transfers,
                    4.0 * values,
                    4.0 * values,
                )
            )
            continue
        memory = process_memory()
        if 6 * 4 * values * count > memory.size:
            raise ConfigError(
                f"Averaging the gradients of stage {stage} ({format_bytes(4 * values)}) on {count} replicas takes up to "
                f"{format_bytes(6 * 4 * values * count)}, but {memory}. Use fewer replicas or more stages."
            )
        method.check(mine, count, config.optimizer.momentum)
        found = (method.part(step) for step in range(method.period))
        parts = sorted({part for part in found if part is not None})
        costs += [_averaged(method, stage, part, mine, config, codec_bytes_per_s) for part in parts]
    notes += dict.fromkeys(
        sentence
        for cost in costs
        if (sentence := more_than_dense(cost.method, cost.wire_bytes, cost.dense_bytes, count))
    )
    if any(method.compresses for method in config.replica_methods()):
        notes.append(
            "Replica gradients: averaged by the methods themselves, of seeded normal tensors, on this machine."
        )
    return costs


def _averaged(
    method: ReplicaMethod,
    stage: int,
    part: int,
    shapes: Mapping[str, tuple[int, ...]],
    config: RunConfig,
    codec_bytes_per_s: float | None,
) -> ReplicaCost:
    """Return the cost of an exchange of one part of a stage, after the first: the bytes and seconds of the slowest replica."""
    count = config.num_replicas
    group = Group(tuple((replica, stage) for replica in range(count)), method.num_rounds(count))
    table = method.table(shapes)
    max_values = max(CONTROL_VALUES, sum(math.prod(shape) for shape in shapes.values()))
    memories: list[Memory] = [
        method.begin({name: torch.zeros(shape) for name, shape in shapes.items()}) for _ in range(count)
    ]
    last: list[list[MemberRounds]] = []
    exchanging = (step for step in itertools.count() if method.part(LATE + step) == part)
    for step in itertools.islice(exchanging, AVERAGES):
        generator = torch.Generator().manual_seed(derive_key(config.seed, "forecast", "replicas", stage, step) % 2**63)
        rounds = []
        for replica in range(count):
            gradients = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
            context = ReplicaContext(
                replica=replica,
                num_replicas=count,
                step=LATE + step,
                epoch=LATE,
                steps_per_epoch=1,
                seed=config.seed,
                stage=stage,
                num_stages=config.stages,
                batch_size=config.batch_size,
                learning_rate=config.optimizer.learning_rate,
                momentum=config.optimizer.momentum or 0.0,
                parameters=gradients,
            )
            rounds.append(method.average(gradients, memories[replica], context))
        exchanges = exchange_together(group, rounds, table, max_values=max_values)
        memories = [one.result.memory for one in exchanges]
        last = [*last[-1:], exchanges]
    coded_bytes = statistics.fmean(max(one.coded_bytes for one in step) for step in last)
    codec_s = statistics.fmean(max(one.codec_s for one in step) for step in last)
    num_values = sum(math.prod(shape) for shape in shapes.values())
    return ReplicaCost(
        stage=stage,
        method=repr(method),
        part=part,
        dense_bytes=ring_bytes(num_values, count),
        bucketed_bytes=4.0 * num_values if method.by_bucket else 0.0,
        wire_bytes=round(statistics.fmean(max(one.wire_bytes for one in step) for step in last)),
        rounds=max(step[0].num_rounds for step in last),
        method_s=codec_s if codec_bytes_per_s is None else coded_bytes / codec_bytes_per_s,
        coded_bytes=coded_bytes,
        transfers=mean_transfers(
            [as_transfers(transfer for one in step for transfer in one.transfers) for step in last]
        ),
    )
