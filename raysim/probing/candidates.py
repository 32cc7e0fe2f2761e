"""Candidates of a probe: compression that is tried on tensors of a training, beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from raysim.compressors import Context
from raysim.distributed.exchange import Channel, replica_group, run_rounds
from raysim.nn.boundary import DIRECTIONS
from raysim.nn.link import parse_methods
from raysim.pipeline.groups import CONTROL_VALUES, MemberRounds, ring_bytes
from raysim.pipeline.link import Link, LinkAccount
from raysim.probing.sample import Measured, Sent
from raysim.replication import parse_replica_method
from raysim.replication.method import Averaged, Gradients, Memory, ReplicaContext, ReplicaMethod

DENSE = "Identity"


class LinkCandidate:
    """A compressor of activations and gradients at boundaries of one replica, with both ends of every link."""

    def __init__(self, notation: str, links: Iterable[tuple[str, int]], replica: int = 0) -> None:
        self.methods = dict(zip(DIRECTIONS, parse_methods(notation, notation), strict=True))
        self.replica = replica
        self._ends = {
            (direction, boundary): tuple(
                Link(self.methods[direction], boundary, direction, sender=sender, device=torch.device("cpu"))
                for sender in (True, False)
            )
            for direction, boundary in links
        }
        self._messages: dict[tuple[int, str, int, int], Sent] = {}

    def send(self, x: Tensor, context: Context) -> None:
        """Encode and decode one message; raises NonFiniteError if the tensor holds NaN or infinity."""
        sender, receiver = self._ends[context.direction, context.boundary]
        sender.device = receiver.device = x.device
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            message = sender.send(x, context, measure=True)
            receiver.receive(message, context)
        times = sender.last_codec_s, receiver.last_codec_s
        key = (self.replica, context.direction, context.boundary, context.microbatch)
        self._messages[key] = Sent(*times, sender.last_wire_bytes, sender.last_dense_bytes)

    def end_step(self) -> Measured:
        """Move the memories on, and return the figures of the step."""
        accounts = [(ends[0].end_step(measure=True), ends[1].end_step()) for ends in self._ends.values()]
        messages, self._messages = self._messages, {}
        return Measured(messages, [self._row(*pair) for pair in accounts])

    def _row(self, sender: LinkAccount, receiver: LinkAccount) -> dict[str, Any]:
        method = self.methods[sender.direction]
        known = sender.sent_norm2 and sender.error_norm2 is not None
        fidelity = 1 - (sender.error_norm2 or 0.0) / sender.sent_norm2 if known and sender.sent_norm2 else None
        return {
            "replica": self.replica,
            "boundary": sender.boundary,
            "direction": sender.direction,
            "codec": repr(method),
            "packets": sender.packets,
            "wire_bytes": sender.wire_bytes,
            "dense_bytes": sender.dense_bytes,
            "fidelity": 1.0 if method.exact else fidelity,
            "encode_s": sender.codec_s,
            "decode_s": receiver.codec_s,
        }


class GradientCandidate:
    """A replica method that averages the gradients of all ranks of a group, stage by stage, into nothing."""

    def __init__(self, notation: str) -> None:
        self.method = parse_replica_method(notation)
        self._memories: dict[int, Memory] = {}  # by stage
        self._links: list[dict[str, Any]] = []
        self._transfers: list[dict[str, Any]] = []

    def begin_step(self) -> None:
        """Forget the figures of a step that broke off."""
        self._links, self._transfers = [], []

    def average(self, gradients: Gradients, channel: Channel, context: ReplicaContext) -> Gradients:
        """Return the average of a stage's gradients, and keep its figures.

        Raises ReplicaError on all ranks if it fails on one.
        """
        stage = context.stage
        count = sum(gradient.numel() for gradient in gradients.values())
        group = replica_group(channel.size, self.method.num_rounds(channel.size), stage)
        rounds = self.method.average(gradients, self._memories.get(stage, {}), context)
        table = self.method.table(gradients)
        exchange = MemberRounds(group, channel.rank, rounds, table, max_values=max(CONTROL_VALUES, count))
        averaged: Averaged = run_rounds(exchange, channel, (repr(self.method), stage))
        self._memories[stage] = averaged.memory
        self._links.append(
            {
                "replica": channel.rank,
                "stage": stage,
                "direction": "replica_gradient",
                "codec": repr(self.method),
                "rounds": exchange.num_rounds,
                "packets": exchange.packets,
                "wire_bytes": exchange.wire_bytes,
                "dense_bytes": ring_bytes(count, channel.size),
                "encode_s": exchange.codec_s,
            }
        )
        self._transfers += [transfer._asdict() for transfer in exchange.transfers]
        return averaged.gradients

    def end_step(self, fidelities: Mapping[int, float]) -> Measured:
        """Return the figures of the step; `fidelities` are of each stage's average beside the dense mean."""
        return Measured(
            links=[{**row, "fidelity": fidelities[row["stage"]]} for row in self._links], transfers=self._transfers
        )


def check_gradients(method: ReplicaMethod, shapes: dict[str, tuple[int, ...]], num_replicas: int) -> None:
    """Raise ValueError if a method needs more than the gradients of a step, which are all that a probe sees."""
    if method.decentralized or method.uses_previous_gradients or method.after_update or method.needs:
        raise ValueError(
            f"`gradients` cannot be {method!r}: a probe sees gradients alone, and this method needs more. Use `raysim.train`."
        )
    try:
        method.check(shapes, num_replicas, None)
    except ValueError as refused:
        raise ValueError(f"`gradients`: {refused}") from None
