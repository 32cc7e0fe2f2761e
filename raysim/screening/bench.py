"""Measures candidates against dense on the same samples."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raysim.codecs import DTYPES, NonFiniteError, warm
from raysim.compressors import Plain, parse
from raysim.config import ConfigError
from raysim.config.identity import DENSE, IDENTITY, Setting
from raysim.pipeline.groups import GroupAccount, MemberRounds
from raysim.pipeline.plan import Plan
from raysim.probing.candidates import GradientCandidate, LinkCandidate, Measured, fidelity_of, merge_measured
from raysim.probing.stopwatch import Seconds
from raysim.replication.method import Gradients, ReplicaContext
from raysim.screening.passes import Outcome, Passes, TensorFacts, TensorWatch
from raysim.screening.verdicts import Difference, changed, differences
from raysim.units import format_bytes

CHANGED = "changed"
"""The share of predictions that differ from dense, in addition to the measures of the task."""
LATE = 2**20  # a step after any warm-up of a replica method
AT_ONCE = 1 << 22  # values converted to float64 at once


class Measurements(NamedTuple):
    """Measurements of one setting; no measures and directions if a tensor or gradient overflowed."""

    measures: Mapping[str, Difference]
    """By name."""
    measured: Measured
    """Messages and links, as recorded by a probe."""
    directions: Sequence[Direction]
    """The gradient of each stage."""
    accounts: Sequence[Sequence[GroupAccount]] = ()
    """By stage, the transfers of each replica; empty without a replica method."""


class Bench:
    """Measures settings against dense, which is measured on construction.

    Before any training a memory is empty, so only a compressor's codec is measured. `by_replica`: replica methods can be measured.
    """

    num_processes = 1

    def __init__(self, passes: Passes, *, by_replica: bool, gradients: bool = True) -> None:
        self.passes = passes
        self.gradients = gradients
        self.seconds: dict[tuple[int, str], list[Seconds]] = defaultdict(list)
        """Compute time of all passes by stage and op."""
        self.num_passes = 0
        self._reference = Reference(passes, by_replica=by_replica)
        watch = TensorWatch()
        start = time.perf_counter()
        try:
            outcome = self._run(DENSE, watch, self._reference if gradients else None)
        except NonFiniteError:
            raise _overflow(passes.plan, "a tensor at a cut") from None
        self.pass_s = time.perf_counter() - start
        self._sums: NDArray[np.float64] = outcome.sums
        self._predictions = outcome.predictions
        self.facts: list[TensorFacts] = watch.facts()
        self.dense = Measurements(
            self._measures(outcome),
            outcome.measured,
            self._reference.compare(self._reference.total),
        )
        if not math.isfinite(self.dense.measures["loss"].value):
            raise _overflow(passes.plan, "the loss")
        for direction in self.dense.directions:
            if not math.isfinite(direction.error):
                raise _overflow(passes.plan, f"the gradient of stage {direction.stage}")

    def warm(self, settings: Iterable[Setting]) -> None:
        """Compile the kernels of all codecs."""
        codecs = {method.codec for each in settings for method in map(parse, (each.forward, each.backward))}
        warm(codecs, [DTYPES[self.passes.plan.config.dtype]])

    def measure_all(self, settings: Sequence[Setting]) -> Iterator[Measurements]:
        """Yield the measurements of settings, in order."""
        self.warm(settings)
        yield from map(self.measure, settings)

    def measure(self, setting: Setting) -> Measurements:
        """Return the measurements of a setting."""
        linked = (setting.forward, setting.backward) != (IDENTITY, IDENTITY)
        averages = setting.replica_gradient != IDENTITY
        measures, measured = self.dense.measures, Measured()
        own: list[Gradients] = self._reference.total
        of_replica = self._reference.of_replica
        if linked:
            collector = Reference(self.passes, by_replica=True) if averages else None
            try:
                outcome = self._run(setting, None, collector)
            except NonFiniteError:
                return Measurements({}, Measured(), ())
            measured = outcome.measured
            measures = self._measures(outcome)
            own = self.passes.gradients() if self.gradients else []
            of_replica = collector.of_replica if collector else []
        averaged: list[list[MemberRounds]] = []
        if averages:
            averaged, rows = self._average(setting.replica_gradient, of_replica)
            measured = merge_measured([measured, rows])
            own = [rounds[0].result.gradients for rounds in averaged]
        directions = self._reference.compare(own)
        if not all(math.isfinite(direction.error) for direction in directions):
            return Measurements({}, measured, ())
        accounts = [[member.account for member in rounds] for rounds in averaged]
        return Measurements(measures, measured, directions, accounts)

    def _measures(self, outcome: Outcome) -> dict[str, Difference]:
        measures = differences(self.passes.plan.task, outcome.sums, self._sums)
        if outcome.predictions is not None:
            assert self._predictions is not None
            measures[CHANGED] = changed(outcome.predictions, self._predictions, self.passes.counted)
        return measures

    def _run(self, setting: Setting, watch: TensorWatch | None, reference: Reference | None) -> Outcome:
        forward, backward = (Plain(parse(text).codec) for text in (setting.forward, setting.backward))
        candidate = LinkCandidate((forward, backward), self.passes.links)
        outcome = self.passes.run(candidate, seen=watch, after=reference.add if reference else None)
        self.num_passes += 1
        for key, spent in outcome.seconds.items():
            self.seconds[key] += spent
        return outcome

    def _average(
        self, notation: str, of_replica: Sequence[Sequence[Gradients]]
    ) -> tuple[list[list[MemberRounds]], Measured]:
        """Average the gradients of all replicas; return the rounds by stage, and the rows of the first replica."""
        candidate, config = GradientCandidate(notation), self.passes.plan.config
        count = config.num_replicas
        averaged = []
        for stage in range(len(self.passes.stages)):
            context = ReplicaContext(
                replica=0,
                num_replicas=count,
                step=LATE,
                epoch=LATE,
                steps_per_epoch=1,
                seed=config.seed,
                stage=stage,
                batch_size=config.batch_size,
            )
            own = [{name: count * x for name, x in each[stage].items()} for each in of_replica]
            with torch.no_grad():
                averaged.append(candidate.average_here(own, context))
        fidelities = {
            stage: fidelity_of(rounds[0].result.gradients, self._reference.total[stage])
            for stage, rounds in enumerate(averaged)
        }
        return averaged, candidate.measured({i: rounds[0] for i, rounds in enumerate(averaged)}, fidelities)


def _overflow(plan: Plan, what: str) -> ConfigError:
    remedy = "" if plan.config.dtype == "float32" else f" Set a smaller `loss_scale`, or `dtype`={'float32'!r}."
    return ConfigError(f"The model cannot be screened: without compression, {what} holds NaN or infinity.{remedy}")


def screen_memory(plan: Plan, num_batches: int, *, by_replica: bool, gradients: bool = True) -> int:
    """Return the peak bytes of a bench."""
    memories, replicas = plan.memories, plan.num_replicas
    microbatches = num_batches * replicas * plan.config.num_microbatches
    of_gradients = sum(memory.gradients_bytes for memory in memories)
    copies = 2  # those of a candidate, and dense
    if by_replica:  # of each replica, and packets of one stage
        copies += replicas
    needed = sum(memory.weights_bytes for memory in memories)
    needed += max(memory.workspace_bytes for memory in memories)
    if gradients:
        needed += copies * of_gradients
        needed += microbatches * memories[0].saved_bytes + sum(memory.saved_bytes for memory in memories[1:])
    return needed + (3 * replicas * max(memory.gradients_bytes for memory in memories) if by_replica else 0)


def memory_error(needed: int, limit: object) -> ConfigError:
    """Return the error of a screen of `needed` bytes beyond a limit."""
    return ConfigError(
        f"The screen needs about {format_bytes(needed)}, but {limit}. Set a smaller `batch_size`, fewer `--batches`, or "
        "`recompute`=true."
    )


# --- gradients beside the dense ones, and beside their noise between batches --------------------------------------------------


class Direction(NamedTuple):
    """The gradient of a stage's parameters, compared with the dense one."""

    stage: int
    cosine: float
    norm_ratio: float
    error: float
    """Norm of the difference over the norm of the dense gradient."""
    noise: float
    """The same for the dense gradients of single steps around their mean; NaN for a single microbatch."""


class Reference:
    """The dense gradients of all microbatches: their sum by stage, each replica's sum, and their noise.

    `by_replica`: keep the gradients of each replica, for replica methods.
    """

    def __init__(self, passes: Passes, *, by_replica: bool) -> None:
        config = passes.plan.config
        self._passes = passes
        self._per_step = config.num_replicas * config.num_microbatches
        self._squares = [0.0] * len(passes.stages)  # summed over microbatches
        self._norms2: list[float] = []
        self.total: list[Gradients] = []
        self.of_replica: list[list[Gradients]] = [[] for _ in range(config.num_replicas if by_replica else 0)]

    def add(self, i: int) -> None:
        """Add microbatch `i`'s gradients, which are in the parameters, and clear them."""
        gradients = self._passes.gradients()
        for stage, own in enumerate(gradients):
            self._squares[stage] += _product(own, own)
        _accumulate(self.total, gradients)
        if self.of_replica:
            _accumulate(self.of_replica[self._passes.microbatches[i].replica], gradients)
        self._passes.clear()

    def compare(self, gradients: Sequence[Gradients]) -> list[Direction]:
        """Return the direction of each stage's gradients."""
        self._norms2 = self._norms2 or [_product(own, own) for own in self.total]
        return [
            self._direction(stage, own, self.total[stage], self._norms2[stage]) for stage, own in enumerate(gradients)
        ]

    def _direction(self, stage: int, own: Gradients, dense: Gradients, dense2: float) -> Direction:
        own2, product = _product(own, own), _product(own, dense)
        noise = self._noise(stage, dense2)
        if not own2 or not dense2:
            return Direction(stage, float(own2 == dense2), float(own2 == dense2), float(own2 != dense2), noise)
        return Direction(
            stage,
            cosine=product / math.sqrt(own2 * dense2),
            norm_ratio=math.sqrt(own2 / dense2),
            error=math.sqrt(max(own2 + dense2 - 2 * product, 0.0) / dense2),
            noise=noise,
        )

    def _noise(self, stage: int, dense2: float) -> float:
        count = len(self._passes.microbatches)
        if count < 2 or not dense2:
            return math.nan
        # the gradient of microbatch i is g_i / count, and `total` is their mean
        variance = max(count * count * self._squares[stage] - count * dense2, 0.0) / (count - 1)
        return math.sqrt(variance / self._per_step / dense2)


def _accumulate(sums: list[Gradients], gradients: Sequence[Gradients]) -> None:
    if not sums:
        sums += [{name: x.clone() for name, x in own.items()} for own in gradients]
        return
    for total, own in zip(sums, gradients, strict=True):
        for name, x in own.items():
            total[name] += x


def _product(a: Gradients, b: Gradients) -> float:
    """Return the inner product of two gradients, in float64."""
    return sum(_dot(x, b[name]) for name, x in a.items())


def _dot(a: Tensor, b: Tensor) -> float:
    pairs = zip(torch.split(a.reshape(-1), AT_ONCE), torch.split(b.reshape(-1), AT_ONCE), strict=True)
    return sum(float(torch.dot(x.double(), y.double())) for x, y in pairs)
