"""Collectives that end a step: the replicas of a stage average its gradients, the owners of a tied parameter sum theirs.

A collective is data: rounds of transfers between members, where `EVERY` stands for all replicas. A round ends when its slowest host
is done, and then the next one starts. Each host sends through one port and receives through another, regardless of the network's
`sharing` for packets between stages, since a machine has one network card. Each ordered pair of hosts is also limited by its own
wire. Transfers within a host are free. Jitter and bursts are not modelled.

>>> from raysim.network.presets import parse_network
>>> transfers = all_reduce("replica_gradient", 0, [(replica, 0) for replica in range(4)], [250_000.0] * 4)
>>> (collective,) = collectives(transfers, np.arange(4)[:, None])
>>> [float(round_seconds(each, [parse_network("8mbps+10ms")])[0]) for _, each in collective.rounds]
[0.76, 0.76]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from raysim.network.rounds import Classes, Floats, Ints, Round, Rounds, Sends, classes_of, round_of, round_seconds
from raysim.network.topology import Network
from raysim.network.transport import BARE, Transport

Transfers = NDArray[np.void]
"""An array of `TRANSFER`, whose fields are those of `Transfer`."""

EXCHANGES = ("replica_gradient", "tied")
"""Phases of a step's end, in order: replicas average, then owners of tied parameters sum."""

EVERY = -1
"""As a replica of a transfer: every one, except that no member sends to itself."""


class Transfer(NamedTuple):
    """Bytes sent by one member of a group to another in one round."""

    direction: str
    """One of `EXCHANGES`."""
    stage: int
    """Identifies the group: the stage whose replicas average, or the first owner of a tied parameter."""
    round: int
    source_replica: int
    source_stage: int
    target_replica: int
    target_stage: int
    wire_bytes: float


KEY = Transfer._fields[:-1]
TRANSFER = np.dtype([("direction", "U16"), *((name, np.int32) for name in KEY[1:]), ("wire_bytes", np.float64)])


def as_transfers(transfers: Iterable[Sequence[Any]]) -> Transfers:
    """Return transfers as one array."""
    return np.array([tuple(transfer) for transfer in transfers], TRANSFER)


def transfers_from_columns(columns: Mapping[str, ArrayLike]) -> Transfers:
    """Return the transfers of one step from the columns of `collectives.parquet`."""
    transfers = np.empty(len(np.asarray(columns["round"])), TRANSFER)
    for name in Transfer._fields:
        transfers[name] = np.asarray(columns[name])
    return transfers


def mean_transfers(steps: Sequence[Transfers]) -> Transfers:
    """Return the mean of several steps; a transfer missing in some of them counts as zero bytes there, in the same round."""
    together = np.concatenate([np.empty(0, TRANSFER), *steps])
    keys, index = np.unique(together[list(KEY)], return_inverse=True)
    mean = np.empty(len(keys), TRANSFER)
    for name in KEY:
        mean[name] = keys[name]
    mean["wire_bytes"] = np.bincount(index.reshape(-1), together["wire_bytes"], len(keys)) / max(len(steps), 1)
    return mean


def all_reduce(
    direction: str, stage: int, members: Sequence[tuple[int, int]], chunks: Sequence[float], *, whole: bool = False
) -> Transfers:
    """Return the transfers of a sum over `members` (replica, stage): a direct reduce-scatter, then a direct all-gather.

    Member i receives its chunk of `chunks[i]` bytes from all others, sums it, and returns the sum. Each member sends
    2 (D - 1) / D of the bytes, as in a ring, but in two rounds. `whole`: the members are all replicas of their stages.
    """
    if whole:
        others = [(EVERY, own) for own in dict.fromkeys(own for _, own in members)]
        scatter = [
            (direction, stage, 0, *other, *member, chunk)
            for member, chunk in zip(members, chunks, strict=True)
            for other in others
        ]
        return as_transfers([*scatter, *((direction, stage, 1, *row[5:7], *row[3:5], row[7]) for row in scatter)])
    return as_transfers(
        (direction, stage, turn, *source, *target, chunks[i if turn else j])
        for turn in (0, 1)
        for i, source in enumerate(members)
        for j, target in enumerate(members)
        if i != j
    )


def of_each_replica(transfers: Transfers, num_replicas: int) -> Transfers:
    """Return the transfers of one replica, repeated by every replica."""
    repeated, replicas = np.tile(transfers, num_replicas), np.repeat(np.arange(num_replicas), len(transfers))
    repeated["source_replica"] = repeated["target_replica"] = replicas
    return repeated


def whole_bytes(ring_bytes: float, num_members: int) -> float:
    """Return the summed bytes, given the bytes sent by each member in a ring: 2 (D - 1) / D of them."""
    return ring_bytes * num_members / (2 * (num_members - 1)) if num_members > 1 else 0.0


def spread_evenly(
    direction: str, stage: int, members: Sequence[tuple[int, int]], sent_bytes: float, num_rounds: int
) -> Transfers:
    """Spread each member's total `sent_bytes` evenly over rounds and peers, and return the transfers."""
    each = sent_bytes / max(num_rounds * (len(members) - 1), 1)
    return as_transfers(
        (direction, stage, turn, *source, *target, each)
        for turn in range(num_rounds)
        for source in members
        for target in members
        if source != target
    )


@dataclass(frozen=True, eq=False)
class Collective:
    """Groups that run their rounds in lockstep because they share hosts, or one group that sends gradients in buckets."""

    direction: str
    stages: tuple[int, ...]
    """The stages whose replicas average, or the first owners of tied parameters."""
    hosts: Ints
    """In ascending order."""
    classes: Classes
    """Of the hosts that send or receive."""
    rounds: tuple[tuple[int, Round], ...]
    """Rounds of one bucket, each with the number of its consecutive repetitions."""
    num_buckets: int = 0
    """Buckets that overlap the stage's last backward; 0 if gradients are averaged after all pipelines are done."""

    @property
    def repeats(self) -> int:
        return max(self.num_buckets, 1)


class TimedCollective(NamedTuple):
    """Start and end of a collective."""

    collective: Collective
    start_s: float
    """Its codec comes first, then its rounds."""
    end_s: float
    codec_s: float
    """Seconds of the slowest worker to compress, decompress and add, over all buckets."""
    round_s: tuple[float, ...]
    """Seconds of each round, of all buckets together."""
    latency_s: tuple[float, ...]
    """Seconds that each round would save on a network without latency."""

    @property
    def critical_s(self) -> float:
        """Start of the collective's last part without waits: its own start, or its last bucket's."""
        seconds = self.codec_s + sum(self.round_s)
        waited = self.end_s - self.start_s > seconds * (1 + 1e-9)
        return self.end_s - seconds / self.collective.repeats if waited else self.start_s

    def spans(self) -> list[tuple[int, float, float]]:
        """Return the number, start and end of every round."""
        edges = [*np.cumsum([self.start_s + self.codec_s, *self.round_s[:-1]]).tolist(), self.end_s]
        return [(turn, *edges[turn : turn + 2]) for turn in range(len(self.round_s))]

    def transfers(self) -> list[tuple[str, float, float]]:
        """Return kind, start and end of each part of the critical path from `critical_s` on; in a round, latency follows bytes."""
        if self.critical_s > self.start_s:
            latency_s = sum(self.latency_s) / self.collective.repeats
            spans = [(self.critical_s, self.end_s - latency_s, self.end_s)]
        else:
            spans = [
                (low, high - latency_s, high)
                for (_, low, high), latency_s in zip(self.spans(), self.latency_s, strict=True)
            ]
        parts = ((("collective_bytes", low, sent), ("collective_latency", sent, high)) for low, sent, high in spans)
        return [part for pair in parts for part in pair]


def collectives(
    transfers: Transfers,
    hosts: NDArray[np.int64],
    num_buckets: Sequence[int] = (),
    *,
    averages: Mapping[int, Sequence[Rounds]] | None = None,
    coded: Iterable[int] = (),
    labels: Ints | None = None,
    transport: Transport = BARE,
) -> tuple[Collective, ...]:
    """Return the collectives of a step's end, in order of direction and stage.

    `hosts`: host of each (replica, stage); `num_buckets`: buckets of each stage's average that overlap backward, by default none;
    `averages`: by stage, rounds between its replicas, before those in `transfers`; `coded`: stages that average in any case, since
    that takes codec seconds; `labels`: see `equal_hosts`, by default all links are equal. Other groups of one direction that share
    hosts are joined: their n-th rounds become one.
    """
    labels = np.zeros(int(hosts.max()) + 1, np.int64) if labels is None else labels
    joined = []
    for direction in EXCHANGES:
        of_direction = transfers[transfers["direction"] == direction]
        is_average = direction == EXCHANGES[0]
        given = dict(averages or {}) if is_average else {}
        stages = {*of_direction["stage"].tolist(), *given}
        if is_average and len(hosts) > 1:
            stages |= {*coded}
        buckets = {stage: int(num_buckets[stage]) for stage in stages if is_average and len(num_buckets)}
        sent = {}
        for stage in sorted(stages):
            rounds = [(each.times, [one.on(hosts[:, stage]) for one in each.sends]) for each in given.get(stage, ())]
            sent[stage] = rounds + _listed_rounds(of_direction[of_direction["stage"] == stage], hosts)
        used = {
            stage: np.unique(
                np.concatenate([hosts[:0, 0], *([hosts[:, stage]] if is_average else []), *_ends(sent[stage])])
            )
            for stage in sent
        }
        groups = _join({stage: each for stage, each in used.items() if not buckets.get(stage)})
        for members in sorted(groups + [[stage] for stage in used if buckets.get(stage)]):
            count = buckets.get(members[0], 0)
            turns = [
                (times, [each._replace(wire_bytes=each.wire_bytes / max(count, 1)) for each in sends])
                for times, sends in _abreast([sent[m] for m in members])
            ]
            classes = classes_of((each for _, sends in turns for each in sends), labels)
            joined.append(
                Collective(
                    direction=direction,
                    stages=tuple(members),
                    hosts=np.unique(np.concatenate([used[stage] for stage in members])),
                    classes=classes,
                    rounds=tuple((times, round_of(sends, classes, transport)) for times, sends in turns),
                    num_buckets=count,
                )
            )
    return tuple(joined)


def codec_seconds(exchanges: Sequence[Collective], owner: NDArray[Any], method_s: Floats) -> Floats:
    """Return the seconds of each collective's slowest worker to compress, decompress and add, over all buckets.

    `method_s`: codec seconds of each stage's average, which add up over the stages of a worker; `owner`: worker of each stage.
    """
    seconds = np.zeros(len(exchanges))
    for i, each in enumerate(exchanges if method_s.any() else ()):
        if each.direction == EXCHANGES[0]:
            stages = list(each.stages)
            seconds[i] = np.bincount(owner[stages], method_s[stages]).max()
    return seconds


def total_seconds(exchanges: Sequence[Collective], networks: Sequence[Network]) -> Floats:
    """Return the seconds of all rounds, without codecs, shape (collective, network)."""
    priced: dict[bytes, Floats] = {}  # many stages average the same bytes, and a round is sent back as it came
    alike = all(network.num_hosts is None for network in networks)

    def seconds(traffic: Round) -> Floats:
        key = b"".join(column.tobytes() for column in (traffic.unnamed() if alike else traffic))
        if key not in priced:
            priced[key] = round_seconds(traffic, networks)
        return priced[key]

    rounds_s = [each.repeats * sum(times * seconds(traffic) for times, traffic in each.rounds) for each in exchanges]
    return np.array([np.broadcast_to(each, len(networks)) for each in rounds_s]).reshape(-1, len(networks))


Turns = list[tuple[int, list[Sends]]]
"""The messages of consecutive rounds between hosts, each with the number of its repetitions."""


def _listed_rounds(transfers: Transfers, hosts: NDArray[np.int64]) -> Turns:
    """Return the rounds of one group's transfers."""
    transfers = transfers[np.argsort(transfers["round"], kind="stable")]
    bounds = np.searchsorted(transfers["round"], range(int(transfers["round"].max(initial=-1)) + 2))
    return [(1, _sends(transfers[low:high], hosts)) for low, high in pairwise(bounds)]


def _sends(transfers: Transfers, hosts: NDArray[np.int64]) -> list[Sends]:
    """Return the messages of one round between hosts."""
    every = {end: transfers[f"{end}_replica"] == EVERY for end in ("source", "target")}
    one_to_one = transfers[~(every["source"] | every["target"])]
    sources, targets = (hosts[one_to_one[f"{end}_replica"], one_to_one[f"{end}_stage"]] for end in every)
    sends = [Sends(sources, targets, one_to_one["wire_bytes"])] if len(one_to_one) else []
    if len(one_to_one) == len(transfers):
        return sends
    kinds = np.stack(
        [*every.values(), transfers["source_stage"], transfers["target_stage"], transfers["wire_bytes"]], axis=1
    )
    for kind in np.unique(kinds[every["source"] | every["target"]], axis=0):
        own = transfers[(kinds == kind).all(axis=1)]
        sources, targets = (
            hosts[:, int(kind[2 + i])] if kind[i] else hosts[own[f"{end}_replica"], int(kind[2 + i])]
            for i, end in enumerate(every)
        )
        sends.append(Sends(sources, targets, float(kind[4]), crossed=True))
    return sends


def _ends(turns: Turns) -> list[Ints]:
    return [ends for _, sends in turns for each in sends for ends in each[:2]]


def _abreast(groups: Sequence[Turns]) -> Turns:
    """Return the rounds of groups that run in lockstep: their n-th rounds become one."""
    ends = [np.cumsum([times for times, _ in turns], dtype=np.int64) for turns in groups]
    edges = np.unique(np.concatenate([[0], *ends])).tolist()
    together = []
    for low, high in pairwise(edges):
        now = [int(np.searchsorted(each, low, side="right")) for each in ends]
        parts = [turns[i][1] for turns, i in zip(groups, now, strict=True) if i < len(turns)]
        together.append((high - low, [each for sends in parts for each in sends]))
    return together


def _join(hosts: Mapping[int, Ints]) -> list[list[int]]:
    """Return the stages in groups that share hosts, directly or through other stages."""
    groups: list[tuple[set[int], list[int]]] = []
    for stage, used in hosts.items():
        members, stages = set(used.tolist()), [stage]
        for group in [group for group in groups if group[0] & members]:
            groups.remove(group)
            members |= group[0]
            stages = group[1] + stages
        groups.append((members, stages))
    return [sorted(stages) for _, stages in groups]
