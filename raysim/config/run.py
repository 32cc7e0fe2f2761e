"""The configuration of a run: its keys, their valid combinations, and derived values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from pydantic import BaseModel, model_validator

from raysim.compressors import Compressor
from raysim.config.boundaries import UNCOMPRESSED, Pairs, check_numbers, of_replica, pairs_of
from raysim.config.run_fields import AVERAGED, RunFields
from raysim.notation import shown
from raysim.replication.method import ReplicaMethod
from raysim.schedules.arrays import Unflushed
from raysim.schedules.families import Schedule
from raysim.schedules.weights import Delays


def default_loss_scale(dtype: str) -> float:
    """Return the loss scale of a run that states none."""
    return 4096.0 if dtype == "float16" else 1.0


class RunConfig(RunFields):
    """Everything that determines a run's result, and where it runs.

    >>> config = RunConfig(forward="TopK(density=0.1)", steps=100)
    >>> config.forward, config.optimizer.learning_rate
    (TopK(0.1), 0.1)
    """

    @model_validator(mode="after")
    def _check_together(self) -> RunConfig:
        for rule in RULES:
            for sentence in rule(self):
                raise ValueError(sentence)
        return self

    def changed(self, **values: Any) -> RunConfig:
        """Return a copy with some keys changed, checked like a new configuration."""
        return type(self).model_validate({**dict(self), **values})

    @property
    def gradient_scale(self) -> float:
        """The loss scale: as configured, or the default of `dtype`."""
        return self.loss_scale if self.loss_scale is not None else default_loss_scale(self.dtype)

    @property
    def stages(self) -> int:
        """Number of stages, from `num_stages` or `cuts`."""
        return len(self.cuts) + 1 if self.cuts is not None else self.num_stages or 4

    @property
    def microbatch_size(self) -> int:
        """Samples of a microbatch."""
        return self.batch_size // (self.num_replicas * self.num_microbatches)

    @property
    def executed_schedule(self) -> Schedule:
        """The schedule, without flushes if the weight policy needs none."""
        return self.weights.order(self.schedule)

    def weight_delays(self) -> Delays:
        """Return the delays of each stage's microbatches: updates between a forward and the update with its gradient."""
        policy, schedule = self.weights, self.executed_schedule
        if not isinstance(schedule, Unflushed):
            return [[0] * self.num_microbatches] * self.stages
        per = 1 if policy.updates_each_microbatch else self.num_microbatches
        return policy.delays(schedule.delays(self.stages, self.num_microbatches, per))

    def compressors(self, tensors: Sequence[Iterable[str]] | None = None) -> list[list[Pairs]]:
        """Return the compressors for each replica and boundary, by tensor; replicas with the same setting share a list.

        `tensors`: the names of the tensors at each boundary, see `pairs_of`.
        """
        known: dict[str, list[Pairs]] = {}
        of_replicas = []
        for replica in range(self.num_replicas):
            ends = of_replica(self.forward, replica), of_replica(self.backward, replica)
            if repr(ends) not in known:
                known[repr(ends)] = [
                    pairs_of(*ends, i, tensors[i] if tensors else None, shared_indices=self.shared_indices)
                    for i in range(self.stages - 1)
                ]
            of_replicas.append(known[repr(ends)])
        return of_replicas

    def replica_methods(self) -> list[ReplicaMethod]:
        """Return the replica method of each stage."""
        methods = self.replica_gradient
        return list(methods) if isinstance(methods, tuple) else [methods] * self.stages

    def takes_part(self, method: ReplicaMethod) -> bool:
        """Return whether a method does anything with this number of replicas."""
        return self.num_replicas > 1 or method.works_alone

    @property
    def exchange_period(self) -> int:
        """The period of the exchanges of all stages, in steps."""
        return math.lcm(*(method.period for method in filter(self.takes_part, self.replica_methods())))

    @property
    def exchange_interval(self) -> float:
        """The mean number of steps between two exchanges of replicas."""
        methods, period = [*filter(self.takes_part, self.replica_methods())], self.exchange_period
        count = sum(any(method.part(step) is not None for method in methods) for step in range(period))
        return period / max(count, 1)

    @property
    def exchange_delay(self) -> int:
        """The number of steps that the exchanges of all stages may lag before a step waits for them.

        If no forward reads the newest weights, later steps run while an update waits for its exchange.
        """
        methods = [*filter(self.takes_part, self.replica_methods())]
        if not methods:
            return 0
        unread = 0 if self.weights.updates_each_microbatch else min(map(min, self.weight_delays()))
        return unread + min(method.steps_under_way for method in methods)

    def flat(self) -> dict[str, Any]:
        """Return every key in written form (`optimizer.momentum`), with its value."""
        flat: dict[str, Any] = {}
        for key, value in self.model_dump().items():
            if isinstance(getattr(self, key), BaseModel):
                name = value.pop("name")
                flat[key if key in ("model", "data", "loss") else f"{key}.name"] = name
                flat |= {f"{key}.{option}": option_value for option, option_value in value.items()}
            else:
                flat[key] = value
        return flat


Rule = Callable[[RunConfig], Iterator[str]]


def _sizes(run: RunConfig) -> Iterator[str]:
    if (run.steps is None) == (run.epochs is None):
        given = f"{run.steps} and {run.epochs}" if run.steps is not None else "neither"
        yield f"Exactly one of `steps` and `epochs` must be given, but got {given}."
    if run.cuts is not None and run.num_stages is not None:
        yield "Only one of `num_stages` and `cuts` may be given, but got both."
    if run.batch_size % (run.num_microbatches * run.num_replicas):
        each = f" on each of {run.num_replicas} replicas" if run.num_replicas > 1 else ""
        yield f"`num_microbatches` must divide `batch_size` ({run.batch_size}), but got {run.num_microbatches}{each}."
    if run.device == "cuda" and run.gpus_per_stage == 0:
        yield "`gpus_per_stage` must be more than 0 with `device` = 'cuda', but got 0."
    if run.device == "cpu" and run.gpus_per_stage:
        yield f"`gpus_per_stage` must be 0 with `device` = 'cpu', but got {run.gpus_per_stage:g}."


def _boundaries(run: RunConfig) -> Iterator[str]:
    count = run.stages - 1
    for field in ("forward", "backward"):
        check_numbers(field, getattr(run, field), count, run.num_replicas)
    if isinstance(run.bottleneck, tuple) and (len(run.bottleneck) != count or not any(run.bottleneck)):
        yield (
            f"`bottleneck` must be one number or a list with one per boundary ({count}), not all 0, "
            f"but got {shown(list(run.bottleneck))}."
        )
    if run.bottleneck is None and run.bottleneck_form != "linear":
        yield f"`bottleneck_form` = {run.bottleneck_form!r} has no effect without `bottleneck`. Leave it out."
    if count == 0:
        for field in ("forward", "backward", "shared_indices", "bottleneck"):
            if getattr(run, field) not in (UNCOMPRESSED, (), False, None):
                yield f"`{field}` has no effect with one stage, which has no boundaries. Leave it out."


def _ends(run: RunConfig) -> Iterator[tuple[Compressor, Compressor]]:
    """Yield the compressors of activations and gradients of every boundary."""
    return (ends for links in run.compressors() for pairs in links for ends in pairs.values())


def _compressors(run: RunConfig) -> Iterator[str]:
    for ends in dict.fromkeys(_ends(run)):
        for field, method in zip(("forward", "backward"), ends, strict=True):
            method.check(run)
            if field not in method.directions:
                yield f"`{field}` cannot be {method!r}, which is for {' and '.join(method.directions)} messages."


def _replicas(run: RunConfig) -> Iterator[str]:
    methods = run.replica_gradient
    if isinstance(methods, tuple) and len(methods) != run.stages:
        yield f"`replica_gradient` must be one method or a list with one per stage ({run.stages}), but got {len(methods)}."
    if run.num_replicas == 1:
        alone = any(method.works_alone for method in run.replica_methods())
        idle = {"replica_gradient": methods != AVERAGED and not alone, "fused_embedding": run.fused_embedding}
        for field in (field for field, given in idle.items() if given):
            yield f"`{field}` has no effect with one replica. Leave it out, or set `num_replicas`."
    keeping = next((method for method in run.replica_methods() if method.keeps_momentum), None)
    if keeping is not None and run.optimizer.clip_norm is not None:
        instead = f"{type(keeping).__name__}(..., clip_norm={run.optimizer.clip_norm:g})"
        yield (
            f"`optimizer.clip_norm` must be left out with {keeping!r}, whose averages hold the momentum: sums of gradients would "
            f"be clipped as one gradient is. Write {instead}, which clips gradients first, in a file without the key."
        )
    for option in ("nesterov", "dampening"):
        if keeping is not None and (value := run.optimizer.options.get(option)):
            yield f"`optimizer.{option}` must be left out with {keeping!r}, which keeps its own momentum, but got {value}."


def _tied(run: RunConfig) -> Iterator[str]:
    method = run.tied_gradient
    if method.after_update or method.decentralized or method.keeps_momentum or method.needs or method.period > 1:
        yield (
            "`tied_gradient` must be a method that averages the gradients of every step by themselves, such as "
            f"'ErrorFeedback(TopK(0.01))' or 'PowerSGD(8)', but got {method!r}."
        )


def _compress_from(run: RunConfig) -> Iterator[str]:
    if not run.compress_from:
        return
    methods = run.replica_methods()
    compresses = run.tied_gradient.compresses or (run.num_replicas > 1 and any(method.compresses for method in methods))
    if not compresses and all(method.exact for ends in _ends(run) for method in ends):
        yield "`compress_from` has no effect without compression. Leave it out."
    for method in methods:
        if method.after_update or method.decentralized:
            yield (
                f"`compress_from` must be left out with {method!r}, whose replicas exchange parameters from the first step "
                "on. To train densely before, let a run `start` from a dense one."
            )


def _weights(run: RunConfig) -> Iterator[str]:
    """Check the weight policy against the schedule, replicas, compressors and optimiser."""
    policy = run.weights
    try:
        schedule = run.executed_schedule
    except ValueError:
        yield f"`schedule` must be 1F1B with {policy!r}, which runs without a flush, but got {run.schedule!r}."
        return
    if not isinstance(schedule, Unflushed):
        return
    if policy.updates_each_microbatch and run.num_replicas > 1:
        yield (
            f"`num_replicas` must be 1 with {policy!r}, which updates after each microbatch, while replicas average once a "
            f"step, but got {run.num_replicas}."
        )
    for method in run.replica_methods():
        if method.after_update or method.decentralized or "stage" in method.needs:
            yield (
                f"`replica_gradient` must be a method that averages the gradients of a step with {policy!r}, but got {method!r}."
            )
    policy.check(run)


def _clock(run: RunConfig) -> Iterator[str]:
    if run.clock == "measured":
        given = {"profile": run.profile is not None, "transport": run.transport != "ray"}
        given["codec_speed"] = run.codec_speed is not None
        for field in (field for field, is_given in given.items() if is_given):
            yield f"`{field}` has no effect with `clock` = 'measured'. Leave it out, or name a network."


RULES: tuple[Rule, ...] = (_sizes, _boundaries, _compressors, _replicas, _tied, _compress_from, _weights, _clock)
"""Each yields sentences on errors; the first one is reported."""
