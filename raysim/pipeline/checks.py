"""Checks of a plan: combinations of model, optimiser, links and replica methods that cannot be trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysim.config import ConfigError
from raysim.pipeline.exchanges import takes_part
from raysim.pipeline.parameters import Constrained, averaged_shapes
from raysim.workloads.partition import Partition

if TYPE_CHECKING:
    from raysim.pipeline.plan import Plan


def check_plan(plan: Plan, parts: Partition) -> None:
    """Raise ConfigError where the parts of a plan do not fit together."""
    _check_trained(plan, parts)
    _check_muon(plan, parts)
    _check_groups(plan, parts)
    _check_twins(plan)
    _check_tied_weights(plan)
    _check_constraints(plan, parts)


def _check_trained(plan: Plan, parts: Partition) -> None:
    """Raise ConfigError if no parameter would be trained."""
    parameters = [parameter for module in parts.stages for parameter in module.parameters()]
    if not any(parameter.requires_grad for parameter in parameters):
        raise ConfigError(
            f"`model` = {plan.config.model.name!r} must have parameters to train, but none of its {len(parameters)} has "
            "`requires_grad` = True. Unfreeze some."
        )


def _check_muon(plan: Plan, parts: Partition) -> None:
    """Raise ConfigError where Muon has nothing to do."""
    names = [(stage, name) for stage, module in enumerate(parts.stages) for name, _ in module.named_parameters()]
    if plan.config.optimizer.name == "muon" and all(name in plan.elementwise[stage] for stage, name in names):
        raise ConfigError(
            "`optimizer.name` = 'muon' needs weights that are matrices, beside those of embeddings and of the last layer, "
            "and this model has none. Use 'adamw'."
        )


def _check_groups(plan: Plan, parts: Partition) -> None:
    """Raise ConfigError where gradients cannot be averaged as configured."""
    if not any(takes_part(method, plan.num_replicas) for method in plan.replica_methods):
        return
    if plan.config.fused_embedding and not plan.tied:
        raise ConfigError("`fused_embedding` needs parameters that are tied between stages, and this model has none.")
    if plan.decentralized and plan.tied:
        method = next(method for method in plan.replica_methods if method.decentralized)
        raise ConfigError(
            f"`replica_gradient` cannot be {method!r} with parameters that are tied between stages: their copies would part."
        )
    kinds = {method.decentralized for method in plan.replica_methods}
    if plan.config.optimizer.clip_norm is not None and len(kinds) > 1 and plan.num_replicas > 1:
        raise ConfigError(
            "`optimizer.clip_norm` must be left out where replicas of some stages part and those of others do not: replicas are "
            "clipped by norms of their own, and would part everywhere."
        )
    optimizer = plan.config.optimizer.name
    momentum = plan.config.optimizer.momentum if optimizer == "sgd" else None
    for stage, (method, module) in enumerate(zip(plan.replica_methods, parts.stages, strict=True)):
        if method.optimizers is not None and optimizer not in method.optimizers:
            raise ConfigError(
                f"`optimizer.name` must be {' or '.join(sorted(method.optimizers))} with {method!r}, but got {optimizer!r}."
            )
        try:
            method.check(averaged_shapes(stage, module, plan.config, plan.tied), plan.num_replicas, momentum)
            method.check_steps(plan.num_steps)
        except ValueError as error:
            raise ConfigError(f"`replica_gradient` at stage {stage}: {error}") from None


def _check_twins(plan: Plan) -> None:
    """Raise ConfigError where messages that double in some steps would meet a memory of their shape, or other tensors."""
    twins = [method for method in plan.replica_methods if method.uses_previous_gradients and plan.num_replicas > 1]
    if twins and any(boundary.several for boundary in plan.boundaries):
        raise ConfigError(f"`replica_gradient` cannot be {twins[0]!r} where several tensors cross a boundary.")
    ends = ((place, pair) for links in plan.compressors for place, pairs in enumerate(links) for pair in pairs.values())
    for boundary, (forward, _) in ends:
        if forward.needs_sensitivity and plan.boundaries[boundary].several:
            raise ConfigError(f"`forward` cannot be {forward!r} at boundary {boundary}, where several tensors cross.")
    for compressor in plan.methods:
        if twins and not compressor.any_shape:
            raise ConfigError(
                f"`forward` and `backward` must be codecs without a memory with {twins[0]!r}, which sends twice as much between "
                f"stages in some steps, but got {compressor!r}."
            )


def _check_tied_weights(plan: Plan) -> None:
    """Raise ConfigError where the copies of parameters that are tied between stages would part."""
    policy = plan.config.weights
    if policy.flush or not plan.tied:
        return
    if policy.updates_each_microbatch or policy.rate_by_stage:
        raise ConfigError(
            f"`weights` cannot be {policy!r} with parameters that are tied between stages: their copies would part. Use "
            "'DoubleBuffered'."
        )
    if plan.config.optimizer.clip_norm is not None:
        raise ConfigError(
            f"`optimizer.clip_norm` must be left out with {policy!r} and parameters that are tied between stages: without a flush "
            "stages are clipped by norms of their own, and their copies would part."
        )


def _check_constraints(plan: Plan, parts: Partition) -> None:
    """Raise ConfigError where passes or replicas would use parameters that have left the set in which an update keeps them."""
    for stage, (method, module) in enumerate(zip(plan.replica_methods, parts.stages, strict=True)):
        if not any(isinstance(part, Constrained) for part in module.modules()):
            continue
        if takes_part(method, plan.num_replicas) and (method.after_update or method.decentralized):
            raise ConfigError(
                f"`replica_gradient` cannot be {method!r} at stage {stage}, whose weights are constrained after each update: "
                "the parameters that replicas exchange would not be."
            )
        if plan.config.weights.predicts:
            raise ConfigError(
                f"`weights` cannot be {plan.config.weights!r} at stage {stage}, whose weights are constrained after each update: "
                "predicted ones would not be."
            )
