"""Reports of a worker: of an action, a step, a failure, an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from raysim.pipeline.errors import DivergedError, StageError
from raysim.pipeline.link import LinkAccount
from raysim.pipeline.replicas import GroupAccount
from raysim.schedules.actions import Action


class ActionRecord(NamedTuple):
    """Times of one action, in seconds of this worker's clock, and the bytes that it sent."""

    stage: int
    op: str
    microbatch: int
    start_s: float
    end_s: float
    decode_s: float
    compute_wall_s: float
    compute_cpu_s: float
    encode_s: float
    wire_bytes: int
    dense_bytes: int
    work: str | None = None  # that it did beside one forward or backward


class StepReport(NamedTuple):
    """Report of a worker on a finished step."""

    replica: int
    losses: list[float]  # one a microbatch, of the last stage
    links: list[LinkAccount]
    groups: list[GroupAccount]  # of the groups that ended the step
    actions: list[ActionRecord]  # of profiled steps
    gradient_norm: float | None  # over all stages, where it is clipped
    update_s: float = 0.0  # of the optimiser: CPU seconds a thread, on a GPU seconds as they passed
    sensitivities: Mapping[
        int, float
    ] = {}  # by boundary, where its compressor needs the sensitivity of the stage behind


class Failure(NamedTuple):
    """The action at which a worker's step broke off, None after the last action, and the error."""

    action: Action | None
    error: DivergedError | StageError


class Evaluated(NamedTuple):
    """Number of samples evaluated, and the sums over them that `raysim.workloads.task.Task` makes figures of."""

    samples: int = 0
    sums: tuple[float, ...] = ()

    def plus(self, other: Evaluated) -> Evaluated:
        """Return the sums over the samples of both."""
        sums = tuple(a + b for a, b in zip(self.sums, other.sums, strict=True)) if self.sums else other.sums
        return Evaluated(self.samples + other.samples, sums)
