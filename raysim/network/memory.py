"""Peak memory of each stage, computed from known counts before a run starts, and the check that it fits.

All figures are bytes. At its peak a stage holds its weights and older versions still in use, their gradients, the optimiser's
slots, the saved tensors of every microbatch in flight, gradients kept for the weight part of a split backward, packets not yet
consumed, residuals of error feedback, reference copies of delta feedback, and the temporary tensors of one action: a forward, a
backward, an update, or an exchange between replicas. The interpreter, libraries and allocator slack are not counted: leave
capacity for them.

>>> stage = StageMemory(2, weights_bytes=33_600_000, gradients_bytes=33_600_000, saved_bytes=4_200_000, in_flight=2)
>>> print(stage.explain())
stage 2: 33.6 MB weights + 33.6 MB gradients + 2 x 4.2 MB activations in flight = 75.6 MB
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from raysim.notation import check_integer
from raysim.schedules.actions import Row, split_backwards
from raysim.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Peak memory of one stage of one replica.

    Fields are bytes, or counts of items of `saved_bytes`, `kept_bytes` or `packet_bytes`.
    """

    stage: int = dataclasses.field(kw_only=False)
    weights_bytes: int = 0
    """Parameters, buffers, and constants such as causal masks."""
    versions_bytes: int = 0
    """Older copies of the weights that are still read."""
    gradients_bytes: int = 0
    """Gradients of the parameters, accumulated over microbatches."""
    optimizer_bytes: int = 0
    """Slots of the optimiser: momentum is one copy of the weights, Adam two."""
    saved_bytes: int = 0
    """Bytes kept per microbatch from forward to backward; with recomputation, the stage's input only."""
    in_flight: int = 0
    """Microbatches between forward and backward (including W) at the worker's peak, from the schedule.

    A microbatch in its backward may count as workspace instead.
    """
    kept_bytes: int = 0
    """Bytes kept per microbatch from B to W, besides `saved_bytes`: the gradients at the outputs of layers with weights."""
    waiting: int = 0
    """Microbatches between B and W at the worker's peak."""
    packet_bytes: int = 0
    """Bytes of the stage's largest packet."""
    packets: int = 0
    """Most packets of the stage not yet consumed by a neighbour."""
    residuals_bytes: int = 0
    """Residuals of error feedback, in both directions."""
    references_bytes: int = 0
    """Reference copies of delta feedback (EF21, AQ-SGD) at this stage's end of each link."""
    exchange_bytes: int = 0
    """Results and temporary tensors of an exchange between replicas, if that is the worker's peak."""
    workspace_bytes: int = 0
    """Bytes needed while an action runs, besides the other fields: temporary tensors, recomputed activations."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_integer(field.name, getattr(self, field.name), 0)

    @property
    def activations_bytes(self) -> int:
        return self.saved_bytes * self.in_flight

    @property
    def waiting_bytes(self) -> int:
        return self.kept_bytes * self.waiting

    @property
    def messages_bytes(self) -> int:
        return self.packet_bytes * self.packets

    @property
    def total_bytes(self) -> int:
        return sum(self._parts().values())

    @property
    def checkpoint_bytes(self) -> int:
        """Maximum bytes in a checkpoint, which keeps one copy of a memory that is equal at both ends."""
        memories = self.residuals_bytes + self.references_bytes
        return self.weights_bytes + self.versions_bytes + self.optimizer_bytes + memories

    def _parts(self) -> dict[str, int]:
        return {
            "weights": self.weights_bytes,
            "their older versions": self.versions_bytes,
            "gradients": self.gradients_bytes,
            "optimiser": self.optimizer_bytes,
            "activations in flight": self.activations_bytes,
            "kept for W": self.waiting_bytes,
            "packets in flight": self.messages_bytes,
            "residuals": self.residuals_bytes,
            "reference copies": self.references_bytes,
            "exchange between replicas": self.exchange_bytes,
            "workspace": self.workspace_bytes,
        }

    def explain(self) -> str:
        """Return the sum in one line, without zero parts."""
        counts = {
            "activations in flight": (self.in_flight, self.saved_bytes),
            "kept for W": (self.waiting, self.kept_bytes),
            "packets in flight": (self.packets, self.packet_bytes),
        }
        terms = []
        for name, size in self._parts().items():
            if size:
                count, each = counts.get(name, (1, size))
                terms.append(f"{count} x {format_bytes(each)} {name}" if count > 1 else f"{format_bytes(each)} {name}")
        return f"stage {self.stage}: {' + '.join(terms) or 'nothing'} = {format_bytes(self.total_bytes)}"


class Needs(NamedTuple):
    """Bytes of one microbatch at a stage, besides weights and accumulated gradients."""

    saved: int
    """Kept from forward to backward."""
    kept: int = 0
    """Kept from B to W, besides `saved`."""
    forward: int = 0
    """Peak of a forward."""
    backward: int = 0
    """Peak of a backward, or of B; it starts with `saved`."""
    weights: int = 0
    """Peak of W; it starts with `saved` and `kept`."""
    first: int = 0
    """Peak of a step's first backward, or first W, including the weight gradients it creates."""
    gradients: int = 0
    """Weight gradients, held from the first backward, or W, to the end of the step."""
    update: int = 0
    """Peak of temporary tensors in the update."""
    exchange: int = 0
    """Peak of results and temporary tensors while replicas exchange, all stages of a worker at once."""


class Worst(NamedTuple):
    """A stage at its worker's peak: microbatches in flight, microbatches between B and W, and bytes of an action or an exchange."""

    in_flight: int
    waiting: int
    workspace: int
    exchange: int = 0


def worst_moment(rows: Sequence[Row], needs: Sequence[Needs]) -> list[Worst]:
    """Return each stage's microbatches and workspace at its worker's memory peak.

    `needs` are by stage. A worker's stages seldom peak at the same time, so this is less than the sum of their peaks. A step starts
    without gradients.

    >>> from raysim.schedules import ZBH1
    >>> [tuple(each) for each in worst_moment(ZBH1().rows(3, 6), [Needs(4, 1, 4, 4, 5)] * 3)]
    [(3, 1, 0, 0), (3, 2, 0, 0), (3, 3, 0, 0)]
    """
    worst = [Worst(0, 0, 0)] * len(needs)
    for row in rows:
        apart = split_backwards(row)
        held = {action.stage: (0, 0) for action in row}
        missing = set(held)  # stages that have no gradients yet
        most = (-1, 0)  # bytes, and number of microbatches to break ties at zero bytes
        for action in row:
            stage, need, (flying, waiting) = action.stage, needs[action.stage], held[action.stage]
            ends = action.op == "W" or (action.op == "B" and action not in apart)
            own = Needs(need.saved, need.kept if action.op == "W" else 0)  # the microbatch of the running action
            makes = ends and stage in missing
            peak = need.first if makes else {"F": need.forward, "B": need.backward, "W": need.weights}[action.op]
            peak = max(peak, own.saved + own.kept)
            others = flying - (action.op != "F"), waiting - (action.op == "W")
            held[stage] = others
            lacking = sum(needs[other].gradients for other in missing)
            total = sum(n * needs[s].saved + w * needs[s].kept for s, (n, w) in held.items()) + peak - lacking
            now = (total, sum(n + w for n, w in held.values()) + 1)
            if now > most:
                most = now
                for other, counts in held.items():
                    worst[other] = Worst(*counts, 0)
                space = peak - lacking
                if space >= own.saved + own.kept:
                    worst[stage] = Worst(others[0] + 1, waiting, space - own.saved - own.kept)
                else:
                    worst[stage] = Worst(*others, max(space, 0))
            if not ends:
                held[stage] = (others[0] + 1, waiting + (action.op == "B"))
            elif makes:
                missing.remove(stage)
        update = max(held, key=lambda stage: needs[stage].update)
        if needs[update].update > most[0]:
            for stage in held:
                worst[stage] = Worst(0, 0, needs[stage].update if stage == update else 0)
        if sum(needs[stage].exchange for stage in held) > max(most[0], needs[update].update):
            for stage in held:
                worst[stage] = Worst(0, 0, 0, needs[stage].exchange)
    return worst


def packets_in_flight(counts: Sequence[int]) -> list[int]:
    """Return the maximum packets of each stage waiting for a neighbour, given each stage's microbatches between forward and B.

    A forward packet waits only while its microbatch is in flight at the sender, a backward packet only while it is at the receiver,
    and a microbatch is never sent in both directions at once: so the bound is the larger of the two counts, on any network.

    >>> packets_in_flight([3, 2, 1])
    [3, 3, 2]
    """
    bounds = []
    for stage, own in enumerate(counts):
        forward = own if stage < len(counts) - 1 else 0
        backward = counts[stage - 1] if stage > 0 else 0
        bounds.append(max(forward, backward))
    return bounds


REMEDIES = {
    "weights": "Use more stages or a smaller model",
    "their older versions": "Use weights with fewer versions, such as DoubleBuffered, or fewer stages",
    "gradients": "Use more stages or a smaller model",
    "optimiser": "Use an optimiser with fewer slots or more stages",
    "activations in flight": "Use more microbatches, `recompute`, or a schedule with fewer in flight",
    "kept for W": "Use more microbatches, or a schedule whose W follow sooner",
    "packets in flight": "Use more microbatches or a stronger codec",
    "residuals": "Key the residuals by link instead of by sample or slot",
    "reference copies": "Bound the samples kept with AQSGD's `capacity`, or keep them in bfloat16",
    "exchange between replicas": "Use more stages, or a replica method with fewer memories",
    "workspace": "Use more microbatches",
}


def check_memory(
    memories: Sequence[StageMemory],
    capacity_bytes: int | Mapping[Any, int],
    nodes: Sequence[Hashable] | None = None,
    *,
    kind: str = "node",
) -> None:
    """Raise ValueError with the arithmetic if the stages on a node (or another `kind` of location) exceed its memory.

    `memories[i]` is on `nodes[i]`, by default all on one node; `capacity_bytes` is for every node, or a mapping from node to bytes.
    List replicas as additional stages.
    """
    node_of = [0] * len(memories) if nodes is None else list(nodes)
    if len(node_of) != len(memories):
        raise ValueError(f"`nodes` must name one node for each of {len(memories)} stages, but got {len(node_of)}.")
    for node in dict.fromkeys(node_of):
        here = [memory for memory, other in zip(memories, node_of, strict=True) if other == node]
        limit = capacity_bytes[node] if isinstance(capacity_bytes, Mapping) else capacity_bytes
        total = sum(memory.total_bytes for memory in here)
        if total <= limit:
            continue
        parts = {name: sum(memory._parts()[name] for memory in here) for name in REMEDIES}
        largest = max(parts, key=lambda name: parts[name])
        arithmetic = "; ".join(memory.explain() for memory in here)
        where = f" of {kind} {node}" if nodes is not None else ""
        raise ValueError(
            f"The stages{where} must fit in {format_bytes(limit)}, but need {format_bytes(total)}: {arithmetic}. {REMEDIES[largest]}."
        )
