"""Prepare a run: load the data, build and cut the model, and check the plan before anything starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from raysim.codecs.codec import DTYPES
from raysim.config import ConfigError, RunConfig
from raysim.config.boundaries import OTHERS, entries
from raysim.pipeline.optimizer import find_elementwise
from raysim.pipeline.plan import FROM_SCRATCH, Origin, Plan, averaged_shapes, tied_owners
from raysim.pipeline.stage import Constrained
from raysim.pipeline.stage_memory import stage_memories
from raysim.replication.method import ReplicaMethod
from raysim.values import UNNAMED, BoundaryTensors
from raysim.workloads.data import Data, DataShape, load_data
from raysim.workloads.metrics import check_metrics
from raysim.workloads.models import BUILT_ALONE, build_model
from raysim.workloads.options import reason_of
from raysim.workloads.partition import Partition, partition
from raysim.workloads.splits import Split, are_sorted
from raysim.workloads.stage_costs import Shadow
from raysim.workloads.task import Task, answer_span, make_task

_SHADOWS: dict[str, Shadow] = {}
"""Counted costs of models by model, data shape, microbatch and loss: the runs of a process often share one model."""


@dataclass
class Workload:
    """A plan with its large parts: the stages' modules at the first step, and the data."""

    plan: Plan
    modules: list[nn.Sequential]
    data: Data

    @property
    def num_parameters(self) -> int:
        """Parameters of the model; a shared parameter counts once."""
        copies = {owner for owners in self.plan.tied for owner in owners[1:]}
        return sum(
            parameter.numel()
            for stage, module in enumerate(self.modules)
            for name, parameter in module.named_parameters()
            if (stage, name) not in copies
        )


def prepare(config: RunConfig, data: Data | None = None, origin: Origin = FROM_SCRATCH) -> Workload:
    """Return the workload for an engine; `data` if loaded already, `origin` for a branch.

    Raises ConfigError if configuration, data and model do not fit together.
    """
    try:
        return _prepare(config, data, origin)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _prepare(config: RunConfig, data: Data | None, origin: Origin) -> Workload:
    if data is None:
        data = load_data(config.data.name, config.data.options, config.seed)
    if len(data.train) < config.batch_size:
        raise ConfigError(
            f"`batch_size` must be at most the number of training samples ({len(data.train)}), but got {config.batch_size}."
        )
    if config.evaluate_samples is not None and config.evaluate_samples > len(data.test):
        raise ConfigError(
            f"`evaluate_samples` must be at most the number of test samples ({len(data.test)}), but got {config.evaluate_samples}."
        )
    _check_evaluated(config, data)
    task = task_of(config, data.shape)
    cut = {"cuts": config.cuts} if config.cuts is not None else {"num_stages": config.stages}
    seed = config.seed if origin.model_seed is None else origin.model_seed
    model = build_model(config.model.name, config.model.options, data.shape, seed, **cut)
    counted = repr((config.model, data.shape, config.microbatch_size, config.loss))
    parts = partition(
        model,
        data.shape,
        batch=config.microbatch_size,
        shadow=_SHADOWS.get(counted),
        bottleneck=config.bottleneck,
        bottleneck_form=config.bottleneck_form,
        seed=seed,
        loss=task.loss,
        **cut,
    )
    if config.model.name in BUILT_ALONE and config.loss is None and config.bottleneck is None:
        if len(_SHADOWS) >= 8:
            _SHADOWS.clear()
        _SHADOWS[counted] = parts.shadow
    check_names(config, parts.boundaries)
    check_metrics(task.metrics, parts.shadow.layers[-1].output.shape, data.test)
    answer = answer_span(data.test, data.shape.given) if task.generates else (0, 0)
    if task.generates:
        check_generation(parts.stages, data.test, answer[0], data.shape.num_classes)
    schedule = config.executed_schedule
    rows = tuple(schedule.rows(config.stages, config.num_microbatches))
    two_parts = any(action.op == "W" for row in rows for action in row)  # separate backwards for inputs and weights
    plan = Plan(
        config=config,
        task=task,
        num_samples=len(data.train),
        num_test_samples=config.evaluate_samples or len(data.test),
        cuts=parts.cuts,
        cut_choices=parts.cut_choices,
        boundaries=parts.boundaries,
        tied=tied_owners(parts),
        elementwise=find_elementwise(parts.stages, tied_owners(parts)),
        memories=stage_memories(config, parts, len(data.train)),
        flops_forward=tuple(parts.flops_forward),
        weight_shares=parts.weight_shares(DTYPES[config.dtype]) if two_parts else (),
        rows=rows,
        owners=tuple(schedule.workers(config.stages)),
        origin=origin,
        answer=answer,
    )
    check_plan(plan, parts)
    return Workload(plan, parts.stages, data)


def _check_evaluated(config: RunConfig, data: Data) -> None:
    """Raise ConfigError if the evaluated test samples lack classes by which the test samples are sorted."""
    count = config.evaluate_samples
    if count is None or not data.shape.classifies or data.shape.target_shape:
        return
    classes = data.test.targets(np.arange(len(data.test))).numpy()
    known = len(np.unique(classes[:count]))
    if are_sorted(classes) and known < len(np.unique(classes)):
        raise ConfigError(
            f"`evaluate_samples` = {count} takes test samples of the first {known} of {len(np.unique(classes))} classes, by which they "
            "are sorted. Take some of all by `data.test_samples` instead."
        )


def task_of(config: RunConfig, shape: DataShape) -> Task:
    """Return the loss and the metrics of a run; raises ValueError if they do not fit the data."""
    name, options = (None, {}) if config.loss is None else (config.loss.name, config.loss.options)
    return make_task(name, options, config.metrics, shape)


def check_names(config: RunConfig, boundaries: Sequence[BoundaryTensors]) -> None:
    """Raise ConfigError if a table names an unknown tensor, or compresses integers or booleans.

    Each tensor named in a table for all boundaries must cross at least one boundary. Each tensor named in the table of one boundary
    must cross that boundary.
    """
    for field in ("forward", "backward"):
        for i, name, compressor in entries(getattr(config, field)):
            if name == OTHERS:
                continue
            here = list(boundaries) if i is None else [boundaries[i]]
            where = "a boundary" if i is None else f"boundary {i}"
            crossing = dict.fromkeys(
                known for tensors in here for known in (*tensors.shapes, *tensors.exact_bytes) if known != UNNAMED
            )
            if name not in crossing:
                held = ", ".join(crossing) or "one without a name"
                raise ConfigError(f"`{field}` must name tensors that cross {where} ({held}), but got {name!r}.")
            if any(name in tensors.exact_bytes for tensors in here) and not compressor.exact:
                raise ConfigError(
                    f"`{field}.{name}` must be Identity or be left out, since `{name}` holds integers or booleans, which are sent "
                    f"as they are, but got {compressor!r}."
                )


def check_generation(stages: Sequence[nn.Module], test: Split, start: int, num_tokens: int) -> None:
    """Raise ConfigError if a model cannot take a text truncated at `start`, the first position to generate."""
    ids = torch.zeros(1, dtype=torch.int64).numpy()
    value = test.inputs(ids, 0, 0, False)[:, : start + 1]
    wanted = (1, start + 1)
    try:
        with torch.no_grad():
            for stage in stages:
                value = stage.eval()(value)
        shape = tuple(value.shape)
    except Exception as error:
        raise ConfigError(
            f"`metrics` = 'exact_match' needs a model for texts of any length, but `model` failed on {start + 1} of "
            f"{test.inputs(ids, 0, 0, False).shape[1]} tokens: {reason_of(error)}."
        ) from error
    finally:
        for stage in stages:
            stage.train()
    if shape[:2] != wanted or shape[2:] < (num_tokens,):
        raise ConfigError(
            f"`metrics` = 'exact_match' needs scores of the shape {(*wanted, num_tokens)} for {start + 1} tokens, but `model` returned "
            f"{shape}."
        )


def check_plan(plan: Plan, parts: Partition) -> None:
    """Raise ConfigError if the parts of a plan do not fit together."""
    _check_trained(plan, parts)
    _check_muon(plan, parts)
    _check_groups(plan, parts)
    _check_tied_gradient(plan, parts)
    _check_boundaries(plan)
    _check_tied_weights(plan)
    plan.config.weights.check_plan(plan, parts.stages)
    for method in dict.fromkeys(plan.replica_methods):
        method.check_plan(plan, parts.stages)
    _check_constraints(plan, parts)
    _check_steps(plan)


def _check_steps(plan: Plan) -> None:
    """Raise ConfigError if a checkpoint or the start of compression is set to a step outside of the run."""
    if plan.config.compress_from >= plan.end_step:
        raise ConfigError(
            f"`compress_from` must be below {plan.end_step}, where the run ends, but got {plan.config.compress_from}."
        )
    for step in plan.config.checkpoint_at_steps or ():
        if not plan.first_step <= step <= plan.end_step:
            raise ConfigError(
                f"`checkpoint_at_steps` must be steps from {plan.first_step} to {plan.end_step}, but got {step}."
            )


def _check_trained(plan: Plan, parts: Partition) -> None:
    parameters = [parameter for module in parts.stages for parameter in module.parameters()]
    if not any(parameter.requires_grad for parameter in parameters):
        raise ConfigError(
            f"`model` = {plan.config.model.name!r} must have parameters to train, but none of its {len(parameters)} has "
            "`requires_grad` = True. Unfreeze some."
        )


def _check_muon(plan: Plan, parts: Partition) -> None:
    names = [(stage, name) for stage, module in enumerate(parts.stages) for name, _ in module.named_parameters()]
    if plan.config.optimizer.name == "muon" and all(name in plan.elementwise[stage] for stage, name in names):
        raise ConfigError(
            "`optimizer.name` = 'muon' needs matrices other than embeddings and the last layer, "
            "and this model has none. Use 'adamw'."
        )


def _check_groups(plan: Plan, parts: Partition) -> None:
    """Raise ConfigError if gradients cannot be averaged as configured."""
    if not any(plan.config.takes_part(method) for method in plan.replica_methods):
        return
    if plan.config.fused_embedding and not plan.tied:
        raise ConfigError("`fused_embedding` needs parameters that are tied between stages, and this model has none.")
    if plan.decentralized and plan.tied:
        method = next(method for method in plan.replica_methods if method.decentralized)
        raise ConfigError(
            f"`replica_gradient` cannot be {method!r} with parameters that are tied between stages: their copies would diverge."
        )
    kinds = {method.decentralized for method in plan.replica_methods}
    if plan.config.optimizer.clip_norm is not None and len(kinds) > 1 and plan.num_replicas > 1:
        raise ConfigError(
            "`optimizer.clip_norm` must be left out if replicas diverge at some stages only: clipped by their own norms, they "
            "would diverge at all stages."
        )
    for owners in plan.tied if plan.num_replicas > 1 and not plan.config.fused_embedding else ():
        methods = list(dict.fromkeys(plan.replica_methods[stage] for stage, _ in owners))
        if len(methods) > 1 and any(method.keeps_momentum for method in methods):
            raise ConfigError(
                f"`replica_gradient` must be the same at stages {' and '.join(str(stage) for stage, _ in owners)}, which share a "
                f"parameter, but got {' and '.join(map(repr, methods))}: one keeps momentum, and the copies would diverge."
            )
    for stage, (method, module) in enumerate(zip(plan.replica_methods, parts.stages, strict=True)):
        shapes = averaged_shapes(stage, module, plan.config, plan.tied)
        _check_average(plan, f"`replica_gradient` at stage {stage}", method, shapes, plan.num_replicas)


def _check_average(
    plan: Plan, where: str, method: ReplicaMethod, shapes: Mapping[str, tuple[int, ...]], num_members: int
) -> None:
    """Raise ConfigError if a method, configured `where` the error says, cannot average gradients of these shapes."""
    optimizer = plan.config.optimizer
    if method.optimizers is not None and optimizer.name not in method.optimizers:
        raise ConfigError(
            f"`optimizer.name` must be {' or '.join(sorted(method.optimizers))} with {method!r}, but got {optimizer.name!r}."
        )
    try:
        method.check(shapes, num_members, optimizer.momentum if optimizer.name == "sgd" else None)
        method.check_steps(plan.end_step)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def _check_tied_gradient(plan: Plan, parts: Partition) -> None:
    """Raise ConfigError if the gradients of tied parameters cannot be summed as configured."""
    config, method = plan.config, plan.config.tied_gradient
    if not method.compresses:
        return
    if not plan.tied:
        raise ConfigError("`tied_gradient` needs parameters that are tied between stages, and this model has none.")
    together = not config.fused_embedding and all(
        len({plan.owners[stage] for stage, _ in owners}) == 1 for owners in plan.tied
    )
    if together:
        raise ConfigError(
            f"`tied_gradient` has no effect with `schedule` = {config.schedule!r}, which keeps the stages that share a parameter on "
            "one worker. Leave it out."
        )
    for group in plan.groups[1]:
        owner, name = plan.tied[group.tied or 0][0]
        shape = tuple(parts.stages[owner].get_parameter(name).shape)
        _check_average(plan, "`tied_gradient`", method, {name: shape}, len(group.members))


def _check_boundaries(plan: Plan) -> None:
    """Raise ValueError if a compressor does not fit its boundary."""
    for links in plan.compressors:
        for i, pairs in enumerate(links):
            for method in (method for ends in pairs.values() for method in ends):
                method.check_boundary(i, plan.boundaries[i])


def _check_tied_weights(plan: Plan) -> None:
    """Raise ConfigError if the copies of tied parameters would diverge."""
    policy = plan.config.weights
    if policy.between_steps != "continue" or not plan.tied:
        return
    if policy.updates_each_microbatch:
        raise ConfigError(
            f"`weights` cannot be {policy!r} with parameters that are tied between stages: their copies would diverge. Use "
            "'DoubleBuffered'."
        )
    if plan.config.optimizer.clip_norm is not None:
        raise ConfigError(
            f"`optimizer.clip_norm` must be left out with {policy!r} and parameters that are tied between stages: without a flush "
            "each stage is clipped by its own norm, and the copies would diverge."
        )


def _check_constraints(plan: Plan, parts: Partition) -> None:
    """Raise ConfigError if exchanged parameters would violate the constraints of modules."""
    for stage, (method, module) in enumerate(zip(plan.replica_methods, parts.stages, strict=True)):
        if not any(isinstance(part, Constrained) for part in module.modules()):
            continue
        if plan.config.takes_part(method) and (method.after_update or method.decentralized):
            raise ConfigError(
                f"`replica_gradient` cannot be {method!r} at stage {stage}, whose weights are constrained after each update: "
                "exchanged parameters would violate the constraint."
            )
