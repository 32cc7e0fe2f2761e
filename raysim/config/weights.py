"""Checks of the weight policy of a run: whether schedule, replicas, links and optimiser fit it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysim.schedules import Unflushed, parse_schedule

if TYPE_CHECKING:
    from raysim.config.run import RunConfig


def check_weights(config: RunConfig) -> None:
    """Raise ValueError where the weight policy does not fit the schedule, the replicas, the links or the optimiser."""
    policy = config.weight_policy
    if policy.flush:
        return
    try:
        schedule = Unflushed(parse_schedule(config.schedule))
    except ValueError:
        raise ValueError(
            f"`schedule` must be 1F1B with {policy!r}, which runs without a flush, but got {config.schedule}."
        ) from None
    if policy.updates_each_microbatch and config.num_replicas > 1:
        raise ValueError(
            f"`num_replicas` must be 1 with {policy!r}, which updates after each microbatch, while replicas average once a "
            f"step, but got {config.num_replicas}."
        )
    for method in config.replica_methods():
        if method.after_update or method.decentralized or method.uses_previous_gradients:
            raise ValueError(
                f"`replica_gradient` must be a method that averages the gradients of a step with {policy!r}, but got {method!r}."
            )
        if policy.predicts and method.keeps_momentum:
            raise ValueError(
                f"`replica_gradient` cannot be {method!r} with {policy!r}: it keeps the momentum by which weights are predicted."
            )
    for forward, _ in (ends for links in config.compressors() for pairs in links for ends in pairs.values()):
        if forward.needs_sensitivity:
            raise ValueError(
                f"`forward` cannot be {forward!r} with {policy!r}: it measures one version of the weights."
            )
    if policy.corrects and config.dtype != "float32":
        raise ValueError(
            f"`dtype` must be float32 with {policy!r}, whose backwards do not read the weights that were rounded for the "
            f"forwards, but got {config.dtype}."
        )
    in_flight = max(schedule.in_flight(config.stages))
    policy.check(in_flight, config.num_microbatches, config.optimizer.name, config.optimizer.momentum)
