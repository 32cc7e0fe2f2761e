"""Candidates of a probe, tried on the tensors of a training, with their measurements by step and as recorded runs."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raysim.compressors import Compressor, Context
from raysim.distributed.exchange import Channel, run_rounds
from raysim.pipeline.groups import Group, MemberRounds, exchange_together
from raysim.pipeline.link import DIRECTIONS, Link
from raysim.probing.stopwatch import Seconds
from raysim.records import SCHEMA_VERSION, Recorder
from raysim.replication import parse_replica_method
from raysim.replication.method import Gradients, Memory, ReplicaContext, ReplicaMethod
from raysim.values import UNNAMED

IDENTITY = "Identity"


class Sent(NamedTuple):
    """Measurements of one message of a candidate, summed over its tensors."""

    encode_s: float = 0.0
    decode_s: float = 0.0
    wire_bytes: int = 0
    dense_bytes: int = 0

    def plus(self, other: Sent) -> Sent:
        return Sent(
            self.encode_s + other.encode_s,
            self.decode_s + other.decode_s,
            self.wire_bytes + other.wire_bytes,
            self.dense_bytes + other.dense_bytes,
        )


class Measured(NamedTuple):
    """Measurements of one candidate in one step."""

    messages: Mapping[tuple[int, str, int, int], Sent] = {}
    """By replica, direction, boundary and microbatch."""
    links: Sequence[Mapping[str, Any]] = ()
    """Rows of `links`, without the step."""
    transfers: Sequence[Mapping[str, Any]] = ()
    """Rows of `collectives`, without the step."""


class Sample(NamedTuple):
    """Measurements of one step."""

    seconds: Mapping[tuple[int, int, str, int], Seconds]
    """Compute time by replica, stage, "F", "B" or "W", and microbatch."""
    measured: Sequence[Measured]
    """Measurements of every candidate."""


def merge_samples(parts: Sequence[Mapping[int, Sample]]) -> list[Sample]:
    """Merge the samples of all parts (stations and ranks) by step; steps missing in any part are dropped."""
    steps = set.intersection(*(set(part) for part in parts))
    return [_merged([part[step] for part in parts]) for step in sorted(steps)]


def merge_measured(parts: Sequence[Measured]) -> Measured:
    """Merge the measurements of one candidate from several parts."""
    return Measured(
        {key: sent for part in parts for key, sent in part.messages.items()},
        [row for part in parts for row in part.links],
        [row for part in parts for row in part.transfers],
    )


def with_whole_backwards(sample: Sample, halves: Container[tuple[int, int]]) -> Sample:
    """Return a sample with the two parts of each backward added up, except for the (stage, microbatch) pairs in `halves`."""
    seconds: dict[tuple[int, int, str, int], Seconds] = {}
    for (replica, stage, op, microbatch), spent in sample.seconds.items():
        whole = op == "W" and (stage, microbatch) not in halves
        key = (replica, stage, "B" if whole else op, microbatch)
        seconds[key] = seconds.get(key, Seconds()).plus(spent)
    return sample._replace(seconds=seconds)


def _merged(parts: Sequence[Sample]) -> Sample:
    seconds = {key: spent for part in parts for key, spent in part.seconds.items()}
    return Sample(seconds, [merge_measured(each) for each in zip(*(part.measured for part in parts), strict=True)])


class LinkCandidate:
    """Candidate compressors of activations and gradients at one replica's boundaries, with both ends of every link.

    `methods`: compressors of activations and of their gradients. `links`: direction, boundary and tensor of each link.
    """

    def __init__(
        self, methods: tuple[Compressor, Compressor], links: Iterable[tuple[str, int, str]], replica: int = 0
    ) -> None:
        self.methods = dict(zip(DIRECTIONS, methods, strict=True))
        self.replica = replica
        self._ends = {
            key: [Link(self.methods[key[0]], key[1], key[0], sender=sender, tensor=key[2]) for sender in (True, False)]
            for key in links
        }
        self._messages: dict[tuple[int, str, int, int], Sent] = {}

    def send(self, x: Tensor, boundary: int, context: Context, tensor: str = UNNAMED) -> Tensor:
        """Encode one message and return the decoded tensor; raises NonFiniteError if `x` holds NaN or infinity."""
        here, there = self._ends[context.direction, boundary, tensor]
        with torch.no_grad(), here.on(x.device) as sender, there.on(x.device) as receiver:
            received = receiver.receive(sender.send(x, context, measure=True), context)
        key = (self.replica, context.direction, boundary, context.microbatch)
        coded, decoded = sender.messages[-1], receiver.messages[-1]
        sent = Sent(coded.codec_s, decoded.codec_s, coded.wire_bytes, coded.dense_bytes)
        self._messages[key] = sent.plus(self._messages.get(key, Sent()))
        return received

    def end_step(self) -> Measured:
        """Commit the memories, and return the measurements of the step."""
        accounts = [[end.end_step() for end in ends] for ends in self._ends.values()]
        rows = [
            {
                "replica": self.replica,
                "boundary": sender.boundary,
                "direction": sender.direction,
                "tensor": sender.tensor or None,
                "codec": repr(self.methods[sender.direction]),
                "packets": sender.packets,
                "wire_bytes": sender.wire_bytes,
                "dense_bytes": sender.dense_bytes,
                "fidelity": 1.0 if self.methods[sender.direction].exact else sender.fidelity,
                "encode_s": sender.codec_s,
                "decode_s": receiver.codec_s,
            }
            for sender, receiver in accounts
        ]
        messages, self._messages = self._messages, {}
        return Measured(messages, rows)


class GradientCandidate:
    """A candidate replica method: averages the gradients of a group's ranks, by stage, and discards the result."""

    def __init__(self, notation: str) -> None:
        self.method = parse_replica_method(notation)
        self._memories: dict[int, Memory] = {}  # by stage

    def average(
        self, gradients: Mapping[int, Gradients], channel: Channel, context: ReplicaContext
    ) -> dict[int, MemberRounds]:
        """Average the gradients of each stage and return the finished rounds; raises ReplicaError on all ranks if one fails."""
        averaged = {}
        for stage in sorted(gradients):
            rounds = self.method.average(gradients[stage], self._memories.get(stage, {}), context._replace(stage=stage))
            count = sum(gradient.numel() for gradient in gradients[stage].values())
            table, name = self.method.table(gradients[stage]), (repr(self.method), stage)
            averaged[stage] = run_rounds(rounds, channel, table, name, stage=stage, num_values=count)
            self._memories[stage] = averaged[stage].result.memory
        return averaged

    def average_here(self, gradients: Sequence[Gradients], context: ReplicaContext) -> list[MemberRounds]:
        """Average one stage's gradients of all replicas in this process, without a memory, and return the finished rounds."""
        contexts = [context._replace(replica=replica) for replica in range(len(gradients))]
        rounds = [self.method.average(own, {}, each) for own, each in zip(gradients, contexts, strict=True)]
        group = Group(tuple((replica, context.stage) for replica in range(len(gradients))))
        count = sum(gradient.numel() for gradient in gradients[0].values())
        return exchange_together(group, rounds, self.method.table(gradients[0]), num_values=count)

    def measured(self, averaged: Mapping[int, MemberRounds], fidelities: Mapping[int, float]) -> Measured:
        """Return the measurements of `average`; `fidelities` compare each stage's average with the dense mean."""
        rows = [
            {
                "replica": exchange.member,
                "stage": stage,
                "direction": "replica_gradient",
                "codec": repr(self.method),
                "rounds": exchange.account.num_rounds,
                "packets": exchange.account.packets,
                "wire_bytes": exchange.account.wire_bytes,
                "dense_bytes": exchange.account.dense_bytes,
                "encode_s": exchange.account.codec_s,
                "fidelity": fidelities[stage],
            }
            for stage, exchange in averaged.items()
        ]
        transfers = [transfer._asdict() for each in averaged.values() for transfer in each.account.transfers]
        return Measured(links=rows, transfers=transfers)


def fidelity_of(values: Gradients, mean: Gradients) -> float:
    """Return 1 - (squared norm of an average's error) / (squared norm of the dense `mean`)."""
    error2 = sum(float((values[name].double() - x.double()).square().sum()) for name, x in mean.items())
    norm2 = sum(float(x.double().square().sum()) for x in mean.values())
    return 1 - error2 / norm2 if norm2 else 1.0


def check_gradients(method: ReplicaMethod, shapes: dict[str, tuple[int, ...]], num_replicas: int) -> None:
    """Raise ValueError if a method needs more than the gradients of a step, since a probe sees nothing else."""
    if method.decentralized or method.after_update or method.needs:
        raise ValueError(f"`gradients` cannot be {method!r} in a probe, which sees only gradients. Use `raysim.train`.")
    try:
        method.check(shapes, num_replicas, None)
    except ValueError as refused:
        raise ValueError(f"`gradients`: {refused}") from None


def write_candidate(folder: Path, facts: Mapping[str, Any], samples: Sequence[Sample], i: int) -> None:
    """Write the samples of candidate `i` in the format of a recorded run; `facts` go into `run.parquet`."""
    recorder = Recorder(folder)
    recorder.open()
    wire = dense = 0
    for step, sample in enumerate(samples):
        measured = sample.measured[i]
        actions = _actions(sample, measured)
        sent = [sum(int(row[name]) for row in measured.links) for name in ("wire_bytes", "dense_bytes")]
        tables = {"actions": actions, "links": measured.links, "collectives": measured.transfers}
        for table, rows in tables.items():
            for row in rows:
                recorder.add(table, {"step": step, **row})
        seconds = actions[-1]["end_s"]
        recorder.add(
            "steps", {"step": step, "epoch": 0, "seconds": seconds, "wire_bytes": sent[0], "dense_bytes": sent[1]}
        )
        wire, dense = wire + sent[0], dense + sent[1]
    run = {
        "schema_version": SCHEMA_VERSION,
        "run_id": f"probe-{folder.name}",
        "name": "probe",
        "probe": True,
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **facts,
        "steps": len(samples),
        "steps_done": len(samples),
        "wire_bytes": wire,
        "dense_bytes": dense,
        **{name: version(name) for name in ("raysim", "torch")},
        "status": "finished",
        "start_s": 0.0,
    }
    recorder.write_run(run)
    recorder.compact()
    recorder.drop_parts()
    recorder.close()


def _actions(sample: Sample, measured: Measured) -> list[dict[str, Any]]:
    """Return the rows of `actions`, in sequence as in a single process."""
    rows, now = [], 0.0
    for (replica, stage, op, microbatch), spent in sample.seconds.items():
        here, before = (
            (("forward", stage), ("forward", stage - 1))
            if op == "F"
            else (("backward", stage - 1), ("backward", stage))
        )
        alone = op == "W"  # no messages
        sent = None if alone else measured.messages.get((replica, *here, microbatch))
        received = None if alone else measured.messages.get((replica, *before, microbatch))
        encode_s, decode_s = sent.encode_s if sent else 0.0, received.decode_s if received else 0.0
        end = now + decode_s + spent.wall + encode_s
        rows.append(
            {
                "replica": replica,
                "stage": stage,
                "op": op,
                "microbatch": microbatch,
                "start_s": now,
                "end_s": end,
                "decode_s": decode_s,
                "compute_wall_s": spent.wall,
                "compute_cpu_s": spent.cpu,
                "encode_s": encode_s,
                "wire_bytes": sent.wire_bytes if sent else 0,
                "dense_bytes": sent.dense_bytes if sent else 0,
            }
        )
        now = end
    return rows
