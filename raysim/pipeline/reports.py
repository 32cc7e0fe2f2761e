"""Reports of workers on actions, steps, failures and evaluations, and the feedback from one step to the next."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from raysim.pipeline.device import DeviceClock, Moment
from raysim.pipeline.errors import DivergedError, StageError
from raysim.pipeline.groups import GroupAccount
from raysim.pipeline.link import CodedMessage, LinkAccount
from raysim.schedules.actions import Action


class ActionRecord(NamedTuple):
    """Times of one action, in seconds of the worker's clock, and the bytes that it sent."""

    stage: int
    op: str
    microbatch: int
    start_s: float
    end_s: float
    decode_s: float
    compute_wall_s: float
    compute_cpu_s: float  # NaN on a GPU, where it would be that of launching kernels
    encode_s: float
    wire_bytes: int
    dense_bytes: int
    work: str | None = None  # set if not a single forward or backward


class StepReport(NamedTuple):
    """A worker's report on a finished step."""

    replica: int
    losses: list[float]  # of each microbatch, at the last stage
    links: list[LinkAccount]
    groups: list[GroupAccount]  # of the groups that ended the step
    actions: list[ActionRecord]  # of profiled steps
    gradient_norm: float | None  # over all stages, if gradients are clipped
    update_s: float = 0.0  # of the optimiser: CPU seconds per thread, on a GPU wall-clock seconds
    sensitivities: Mapping[int, float] = {}  # measured by receiving stages, by boundary
    unreached: Mapping[int, Unreached] = {}  # by stage, in the run's first step


class Unreached(NamedTuple):
    """Parameters that no backward of a stage has reached so far, since a layer detaches its input or turns gradients off."""

    parameters: tuple[str, ...]
    """Parameters without a gradient, of those that require one."""
    input: bool
    """True if the stage has a predecessor, to which it has sent only zeros."""


class Failure(NamedTuple):
    """The error of a worker's step and the action that failed, None after the last action."""

    action: Action | None
    error: DivergedError | StageError


class Evaluated(NamedTuple):
    """The number of evaluated samples, and their sums for `raysim.workloads.task.Task.results`."""

    samples: int = 0
    sums: tuple[float, ...] = ()

    def plus(self, other: Evaluated) -> Evaluated:
        sums = tuple(a + b for a, b in zip(self.sums, other.sums, strict=True)) if self.sums else other.sums
        return Evaluated(self.samples + other.samples, sums)


class TimedAction(NamedTuple):
    """An action of a profiled step, with moments to be read after the step."""

    action: Action
    start: Moment
    decoded: Moment
    computed: Moment
    end: Moment
    cpu_s: float
    sent: CodedMessage
    work: str | None

    def record(self, clock: DeviceClock) -> ActionRecord:
        moments = (self.start, self.decoded, self.computed, self.end, self.sent.start, self.sent.end)
        start, decoded, computed, end, code, coded = map(clock.seconds, moments)
        cpu_s = self.cpu_s if isinstance(self.start, float) else math.nan
        times = (start, end, decoded - start, computed - decoded, cpu_s, coded - code)
        return ActionRecord(*self.action, *times, self.sent.wire_bytes, self.sent.dense_bytes, self.work)


class StepFeedback(NamedTuple):
    """Measurements of one step for the adaptive methods in the next; equal at all workers, and part of checkpoints."""

    step_s: float | None = None  # seconds of the step, by the clock
    sensitivities: Mapping[str, float] = {}  # measured by the receiving stages, by `link_name`


def link_name(replica: int, boundary: int, direction: str) -> str:
    """Return the name of a link in `StepFeedback`."""
    return f"{replica}/{boundary}/{direction}"
