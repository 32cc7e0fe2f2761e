"""Forecast costs of averaging replicas, counted or from the replica methods on seeded tensors."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from raysim.codecs import derive_key
from raysim.config import ConfigError, RunConfig
from raysim.limits import process_memory
from raysim.network.collectives import (
    EXCHANGES,
    Transfers,
    all_reduce,
    as_transfers,
    mean_transfers,
    of_each_replica,
)
from raysim.network.exchanges import more_than_dense
from raysim.network.profile import END_COSTS, Profile
from raysim.network.simulate import Mixture
from raysim.pipeline.groups import (
    TIED_TABLE,
    Group,
    GroupAccount,
    chunk_bytes,
    exchange_together,
    ring_bytes,
)
from raysim.pipeline.plan import TiedShapes
from raysim.replication.method import Memory, ReplicaContext, ReplicaMethod
from raysim.units import format_bytes

LATE = 2**20  # an epoch after any warm-up
AVERAGES = 3  # exchanges made: the last two count, since methods may alternate between two sides


class ReplicaCost(NamedTuple):
    """The cost of averaging the gradients of a stage; `wire_bytes` are the busiest sender's."""

    stage: int
    method: str
    part: int
    """The exchanged part of the stage, see `ReplicaMethod.part`."""
    dense_bytes: int
    wire_bytes: int
    rounds: int
    method_s: float
    coded_bytes: float
    transfers: Transfers
    gradient_bytes: float = 0.0
    """Bytes averaged uncompressed, see `Profile.gradient_bytes`."""
    bucketed_bytes: float = 0.0
    """Bytes of gradients that may be averaged in buckets during backward."""


def replica_costs(
    config: RunConfig,
    shapes: Sequence[Mapping[str, tuple[int, ...]]],
    codec_bytes_per_s: float | None,
    notes: list[str],
) -> list[ReplicaCost]:
    """Return the cost of averaging gradients of these shapes at each stage.

    All-reduces are counted, other methods run on this machine. A method that exchanges only in some steps has a cost for each
    of its parts. Raises ConfigError if all replicas' gradients would not fit this machine, or some steps take two passes.
    """
    count = config.num_replicas
    costs = []
    for stage, (method, own) in enumerate(zip(config.replica_methods(), shapes, strict=True)):
        if "stage" in method.needs:
            raise ConfigError(
                f"`replica_gradient` in a forecast must need only gradients, but {method!r} needs stages of its own. "
                "Record a run, and `raysim replay` it."
            )
        if not method.compresses:
            costs.append(_all_reduced(method, stage, own, count))
            continue
        values = sum(math.prod(shape) for shape in own.values())
        memory = process_memory()
        if 6 * 4 * values * count > memory.size:
            raise ConfigError(
                f"Averaging the gradients of stage {stage} ({format_bytes(4 * values)}) on {count} replicas takes up to "
                f"{format_bytes(6 * 4 * values * count)}, but {memory}. Use fewer replicas or more stages."
            )
        method.check(own, count, config.optimizer.momentum)
        parts = sorted({part for part in map(method.part, range(method.period)) if part is not None})
        group = Group(tuple((replica, stage) for replica in range(count)), method.num_rounds(count))
        costs += [_averaged(method, group, part, own, config, codec_bytes_per_s) for part in parts]
    warnings = (more_than_dense(cost.method, cost.wire_bytes, cost.dense_bytes, count) for cost in costs)
    notes += dict.fromkeys(filter(None, warnings))
    if any(method.compresses for method in config.replica_methods()):
        notes.append(
            "Replica gradients: averaged by the methods themselves, of seeded normal tensors, on this machine."
        )
    return costs


def _all_reduced(method: ReplicaMethod, stage: int, shapes: Mapping[str, tuple[int, ...]], count: int) -> ReplicaCost:
    """Return the cost of averaging a stage uncompressed, in buckets that may be sent during backward."""
    values = sum(math.prod(shape) for shape in shapes.values())
    members = [(replica, stage) for replica in range(count)]
    chunks = chunk_bytes("dense", values, count, method.table(shapes))
    transfers = all_reduce(EXCHANGES[0], stage, members, chunks, whole=True) if values else as_transfers([])
    sent = sum(chunks) + (count - 2) * max(chunks) if values else 0
    return ReplicaCost(
        stage=stage,
        method=repr(method),
        part=0,
        dense_bytes=ring_bytes(values, count),
        wire_bytes=int(sent),
        rounds=method.num_rounds(count),
        method_s=0.0,
        coded_bytes=0.0,
        transfers=transfers,
        gradient_bytes=4.0 * values,
        bucketed_bytes=4.0 * values,
    )


def _averaged(
    method: ReplicaMethod,
    group: Group,
    part: int,
    shapes: Mapping[str, tuple[int, ...]],
    config: RunConfig,
    codec_bytes_per_s: float | None,
) -> ReplicaCost:
    """Return the slowest member's bytes and seconds in an exchange of one part of a stage, after the first."""
    count, stage = len(group.members), group.stage
    table = method.table(shapes)
    num_values = sum(math.prod(shape) for shape in shapes.values())
    memories: list[Memory] = [
        method.begin({name: torch.zeros(shape) for name, shape in shapes.items()}) for _ in range(count)
    ]
    last: deque[list[GroupAccount]] = deque(maxlen=2)
    exchanging = (step for step in itertools.count() if method.part(LATE + step) == part)
    counted = method.fixed_size and codec_bytes_per_s is not None  # neither values nor time matter
    for step in itertools.islice(exchanging, 1 if counted else AVERAGES):
        generator = torch.Generator().manual_seed(derive_key(config.seed, "forecast", "replicas", stage, step) % 2**63)
        rounds = []
        for replica in range(count):
            draw = torch.zeros if counted else partial(torch.randn, generator=generator)
            gradients = {name: draw(shape) for name, shape in shapes.items()}
            context = ReplicaContext(
                replica=replica,
                num_replicas=count,
                step=LATE + step,
                epoch=LATE,
                steps_per_epoch=1,
                seed=config.seed,
                stage=stage,
                batch_size=config.batch_size,
                learning_rate=config.optimizer.learning_rate,
                momentum=config.optimizer.momentum or 0.0,
                parameters=gradients,
            )
            rounds.append(method.average(gradients, memories[replica], context))
        exchanges = exchange_together(group, rounds, table, num_values=num_values)
        memories = [member.result.memory for member in exchanges]
        last.append([member.account for member in exchanges])

    def slowest(figure: str) -> float:
        return statistics.fmean(max(getattr(member, figure) for member in exchange) for exchange in last)

    coded_bytes = slowest("coded_bytes")
    return ReplicaCost(
        stage=stage,
        method=repr(method),
        part=part,
        dense_bytes=ring_bytes(num_values, count),
        bucketed_bytes=4.0 * num_values if method.by_bucket else 0.0,
        wire_bytes=round(slowest("wire_bytes")),
        rounds=max(exchange[0].num_rounds for exchange in last),
        method_s=slowest("codec_s") if codec_bytes_per_s is None else coded_bytes / codec_bytes_per_s,
        coded_bytes=coded_bytes,
        transfers=mean_transfers(
            [as_transfers(transfer for member in exchange for transfer in member.transfers) for exchange in last]
        ),
    )


def endings_of(config: RunConfig, averages: Sequence[ReplicaCost], tied: Transfers) -> Mixture:
    """Return the kinds of step end in a period, most bytes first: exchange costs only, each including the `tied` transfers."""
    methods = config.replica_methods()
    period = config.exchange_period
    counts = Counter(tuple(method.part(step) for method in methods) for step in range(period))
    endings = []
    for parts, count in counts.items():
        exchanged = [cost for cost in averages if parts[cost.stage] == cost.part]
        by_stage: dict[str, Any] = {name: np.zeros(config.stages) for name in END_COSTS[1:]}
        for cost in exchanged:
            for name, values in by_stage.items():
                values[cost.stage] = getattr(cost, name)
        transfers = np.concatenate([as_transfers([]), *(cost.transfers for cost in exchanged), tied])
        exchange = Profile(compute_s=np.zeros((1, config.stages, 2, 1)), transfers=transfers, **by_stage)
        endings.append((count / period, exchange))
    return sorted(endings, key=lambda ending: -ending[1].transfers["wire_bytes"].sum())


def tied_costs(
    config: RunConfig, tied: TiedShapes, codec_bytes_per_s: float | None
) -> tuple[Transfers, NDArray[np.float64]]:
    """Return the transfers that sum tied parameters' gradients, and the seconds of codecs by stage.

    Uncompressed sums are counted, others run on this machine for one replica.
    """
    method, replicas = config.tied_gradient, range(config.num_replicas)
    seconds = np.zeros(config.stages)
    if not method.compresses:
        sizes = [(stages, math.prod(shape)) for stages, shape in tied]
        return tied_transfers(sizes, len(replicas), fused=config.fused_embedding), seconds
    transfers = [as_transfers([])]
    for i, (stages, shape) in enumerate(tied):
        together = replicas if config.fused_embedding else range(1)
        members = tuple((replica, owner) for replica in together for owner in stages)
        group = Group(members, method.num_rounds(len(members)), i)
        cost = _averaged(method, group, 0, {f"tied {i}": shape}, config, codec_bytes_per_s)
        for owner in stages:
            seconds[owner] += cost.method_s
        for replica in range(1) if config.fused_embedding else replicas:
            own = cost.transfers.copy()
            for end in ("source_replica", "target_replica"):
                own[end] += replica
            transfers.append(own)
    return np.concatenate(transfers), seconds


def tied_transfers(tied: Sequence[tuple[tuple[int, ...], int]], num_replicas: int, *, fused: bool = False) -> Transfers:
    """Return the transfers that sum tied parameters' gradients over their owners, per replica or, if `fused`, over all.

    `tied`: the stages and the number of values of each tied parameter. A run's own packets have the same bytes.
    """
    transfers = [as_transfers([])]
    for stages, size in tied:
        replicas = range(num_replicas if fused else 1)
        members = [(replica, stage) for replica in replicas for stage in stages]
        chunks = chunk_bytes("sum", size, len(members), TIED_TABLE)
        summed = all_reduce(EXCHANGES[1], stages[0], members, chunks, whole=fused)
        transfers.append(summed if fused else of_each_replica(summed, num_replicas))
    return np.concatenate(transfers)
