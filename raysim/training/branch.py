"""Branches: runs that continue from another run's checkpoint with different settings.

A branch inherits parameters, buffers, the optimiser's state, step numbers, and the planned learning rate. The order of
data, dropout and random codecs follow its own seed. Memories of compressors and replica methods start empty, unless parent and
branch use the same ones, and the same cuts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

from raysim.config import ConfigError, RunConfig, as_row, keys_of, run_keys
from raysim.config.run import default_loss_scale
from raysim.config.run_fields import Start
from raysim.pipeline.plan import Origin, Plan
from raysim.pipeline.reports import StepFeedback
from raysim.pipeline.state import CheckpointError, pack_tensors, unpack_tensors
from raysim.records import RecordsError, Run, recorded_value
from raysim.replication import parse_replica_method
from raysim.storage.places import in_bucket, local_path
from raysim.storage.texts import parse_toml
from raysim.training.checkpoint import Checkpoint, checkpoints

SAME = ("model", "data", "loss", "bottleneck", "bottleneck_form", "batch_size", "optimizer")
"""Keys, with their options, that must be the same in a branch and its parent."""
SHAPES = ("num_microbatches", "dtype", "shared_indices")
"""Keys that determine the contents of memories, besides the layout of stages and replicas."""
OWNERS = {
    "link": ("forward", "backward", "compress_from", "loss_scale", *SHAPES),
    "replicas": ("replica_gradient", "compress_from"),
    "tied": ("tied_gradient", "compress_from", "fused_embedding"),
    "versions": ("weights", "schedule", *SHAPES),
    "previous": ("replica_gradient", "seed"),  # by which a method chooses the steps that need it
}
"""Keys that must be unchanged for a branch to keep a memory, by the memory's kind."""


@dataclass(frozen=True)
class Parent:
    """A branch's parent run and starting checkpoint; `row` is the parent's recorded row of `runs`."""

    row: Mapping[str, Any]
    checkpoint: Checkpoint

    def origin(self, config: RunConfig) -> Origin:
        """Return the start of a branch."""
        origin, step = recorded_origin(self.row), self.checkpoint.step
        memories_from = origin.memories_from if self._goes_on(config) else step
        return origin._replace(first_step=step, memories_from=memories_from, cuts=_cuts(self.row))

    def parts(self, plan: Plan, modules: Sequence[nn.Module]) -> list[np.ndarray]:
        """Return the initial state of the branch, one part for each worker of `plan`.

        `modules`: the modules of the stages. Raises ConfigError if the state does not fit them, if the checkpoint is damaged, if the
        branch has a different number of replicas or outlasts the parent's learning rate, or if its cuts differ and the optimiser's
        state cannot be cut in the same way.
        """
        recut = _check_branch(self.row, plan)
        try:
            held = [unpack_tensors(part) for part in self.checkpoint.parts()]
        except CheckpointError as error:
            raise ConfigError(f"`start`: {error}") from None
        memories = () if recut else [kind for kind, keys in OWNERS.items() if self._same(keys, plan.config)]
        going_on = {"model", "optimizer", *memories}
        per, parts = len(held) // plan.num_replicas, list[Mapping[str, torch.Tensor]]()
        for replica in range(plan.num_replicas):
            of_replica = chain.from_iterable(part.items() for part in held[replica * per :][:per])
            tensors = {name: x for name, x in of_replica if _parse(name)[0] in going_on}
            _check_shapes(tensors, modules)
            tensors = _recut(tensors, modules) if recut else tensors
            for worker in range(len(plan.rows)):
                parts.append({name: x for name, x in tensors.items() if plan.owners[_parse(name)[1]] == worker})
        return [pack_tensors(dict(part)) for part in parts]

    def signals(self, plan: Plan) -> StepFeedback:
        """Return the signals of the parent's last step; only its time if the branch uses other methods or cuts."""
        signals = self.checkpoint.signals()
        goes_on = self._goes_on(plan.config) and _cuts(self.row) == plan.cuts
        return signals if goes_on else StepFeedback(step_s=signals.step_s)

    def _goes_on(self, config: RunConfig) -> bool:
        """Return whether a branch keeps the parent's compressors, replica methods and weight policy, and so their memories."""
        needs_previous = any("stage" in method.needs for method in config.replica_methods())
        return self._same((*keys_of("compression"), *SHAPES, *(["seed"] if needs_previous else [])), config)

    def _same(self, keys: Iterable[str], config: RunConfig) -> bool:
        step, row = self.checkpoint.step, as_row(config)
        row |= {"loss_scale": config.gradient_scale, "compress_from": max(config.compress_from, step)}
        scale = recorded_value(self.row, "loss_scale") or default_loss_scale(recorded_value(self.row, "dtype"))
        compressed = max(recorded_value(self.row, "compress_from"), step)  # no matter when before the checkpoint
        before = {**self.row, "loss_scale": scale, "compress_from": compressed}
        return all(recorded_value(before, key) == row[key] for key in keys)


def recorded_origin(row: Mapping[str, Any]) -> Origin:
    """Return the origin of a recorded run, with its learning-rate plan and model seed."""
    seed = row.get("model_seed")
    return Origin(
        int(row.get("first_step") or 0),
        row.get("rate_steps") or row.get("steps"),
        row.get("epochs"),
        int(row["seed"] if seed is None else seed),
        int(row.get("memories_from") or 0),
    )


def find_parent(config: RunConfig, begun: Mapping[str, Any] | None = None) -> Parent | None:
    """Return the run and checkpoint named by `start`, or None without a `start`.

    `begun`: the recorded row of the branch, if it resumes before its first checkpoint. Raises ConfigError if there is no such run or
    checkpoint, or if model, data or optimiser differ.
    """
    start = config.start
    if start is None:
        return None
    if in_bucket(start.folder):
        raise ConfigError(f"`start` must name a folder of this machine, but got {start!r}: copy the run here first.")
    folder = local_path(start.folder)
    if (folder / "config.json").is_file() and not (folder / "run.parquet").is_file():
        raise ConfigError(
            f"`start` must be the folder of a run, but {start.folder} holds a model of transformers, without an optimiser's state: "
            f"leave out `start`, and give `model=hf model.path={start.folder}` to dense and all settings, which then begin there."
        )
    try:
        row = Run(folder).row
    except RecordsError as error:
        raise ConfigError(f"`start` must be the folder of a run, but got {start!r}. {error}") from None
    step = start.step
    if begun is not None:
        step = int(begun["first_step"])
        if row["run_id"] != begun["parent"]:
            raise ConfigError(
                f"`start` must name the run {begun['parent']}, from which this one began, but got {row['run_id']}."
            )
    checkpoint = _checkpoint(start, checkpoints(folder / "checkpoints"), step)
    _check_same(row, config)
    return Parent(row, checkpoint)


def _checkpoint(start: Start, known: Sequence[Checkpoint], step: int | None) -> Checkpoint:
    if not known:
        raise ConfigError(f"`start` must name a run with a checkpoint, but {start.folder} has none.")
    if step is None:
        return known[-1]
    checkpoint = next((held for held in known if held.step == step), None)
    if checkpoint is None:
        steps = ", ".join(str(held.step) for held in known)
        raise ConfigError(
            f"`start` must name a step with a checkpoint ({steps}), but got {step}. To keep one there, train {start.folder} "
            f"with checkpoint_at_steps=[{step}]."
        )
    return checkpoint


def _check_same(row: Mapping[str, Any], config: RunConfig) -> None:
    """Raise ConfigError if a branch differs from its parent in a key that determines its state."""
    new = as_row(config)
    known = {key.name for key in run_keys()}
    for key in sorted(row.keys() | new.keys()):
        if key.partition(".")[0] in SAME and (key in row or key not in known) and row.get(key) != new.get(key):
            wanted = "left out" if row.get(key) is None else repr(row[key])
            raise ConfigError(f"`{key}` must be {wanted}, as in the run of `start`, but got {new.get(key)!r}.")
    method = recorded_value(row, "replica_gradient")
    if method != new["replica_gradient"] and (row["num_replicas"] or 1) > 1 and _parts_replicas(str(method)):
        raise ConfigError(
            f"`replica_gradient` must be {method}, as in the run of `start`, whose replicas differ, but got "
            f"{new['replica_gradient']}."
        )


def _check_branch(row: Mapping[str, Any], plan: Plan) -> bool:
    """Return whether a branch has different cuts from its parent; raises ConfigError if it cannot, see `Parent.parts`."""
    cuts, replicas = _cuts(row), row["num_replicas"] or 1
    if replicas != plan.num_replicas:
        raise ConfigError(f"`num_replicas` must be {replicas}, as in the run of `start`, but got {plan.num_replicas}.")
    recut = cuts != plan.cuts
    whole = {
        "tied parameters": bool(plan.tied),
        "the optimiser muon": plan.config.optimizer.name == "muon",
        "replicas that differ": replicas > 1 and _parts_replicas(str(recorded_value(row, "replica_gradient"))),
    }
    if recut and (reason := next((reason for reason, holds in whole.items() if holds), None)):
        raise ConfigError(
            f"`cuts` must be {list(cuts)}, as in the run of `start`, but got {list(plan.cuts)}. With {reason}, the "
            "state cannot be cut elsewhere."
        )
    optimizer = plan.config.optimizer
    endless = optimizer.decay in ("constant", "steps") or optimizer.decay_epochs is not None
    if not endless and plan.end_step > plan.rate_steps:
        raise ConfigError(
            f"`steps` must be at most {plan.rate_steps - plan.first_step} from step {plan.first_step} on, since the learning rate of "
            f"the run of `start` was planned for {plan.rate_steps} steps, but got {plan.num_steps}."
        )
    return recut


def _cuts(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(row["cuts"] or ())


def _parts_replicas(written: str) -> bool:
    """Return whether a recorded replica method lets the parameters of replicas differ."""
    notations = parse_toml(f"value = {written}")["value"] if written.startswith("[") else [written]
    return any(parse_replica_method(notation).decentralized for notation in notations)


def _parse(name: str) -> tuple[str, int, str]:
    """Split the name of a checkpoint's tensor into its kind, its stage, and the rest.

    The kind is "model", "optimizer", or a memory of `OWNERS`; a link's memory belongs to the sending stage.
    """
    kind, number, rest = name.split(".", 2)
    if kind == "stage":
        kind, rest = rest.split(".", 1)
    return kind, int(number) + (kind == "link" and rest.startswith("backward.")), rest


def _recut(tensors: Mapping[str, torch.Tensor], modules: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Distribute the state over other stages, `modules`, and renumber the optimiser's slots by parameter."""
    learned = [[name for name, x in module.named_parameters() if x.requires_grad] for module in modules]
    owners = {name: stage for stage, module in enumerate(modules) for name in module.state_dict()}
    parsed = dict.fromkeys(map(_parse, tensors))
    moved = {}
    for (kind, stage, rest), x in zip(parsed, tensors.values(), strict=True):
        if kind == "model":
            moved[f"stage.{owners[rest]}.model.{rest}"] = x
        else:
            index, slot = rest.split(".", 1)
            held = [name for names in learned for name in names if ("model", stage, name) in parsed]
            owner = owners[held[int(index)]]
            moved[f"stage.{owner}.optimizer.{learned[owner].index(held[int(index)])}.{slot}"] = x
    return moved


def _check_shapes(tensors: Mapping[str, torch.Tensor], modules: Sequence[nn.Module]) -> None:
    """Raise ConfigError if the model's tensors differ from the stages' in name or shape."""
    parsed = ((_parse(name), x) for name, x in tensors.items())
    held = {name: tuple(x.shape) for (kind, _, name), x in parsed if kind == "model"}
    needed = {name: tuple(x.shape) for module in modules for name, x in module.state_dict().items()}
    for name in (*needed, *held):
        if held.get(name) != needed.get(name):
            is_held, is_needed = (
                f"has the shape {shapes[name]}" if name in shapes else "is missing" for shapes in (held, needed)
            )
            raise ConfigError(
                f"`start` must name a run of the same model, but `{name}` {is_held} in its checkpoint and {is_needed} in the model."
            )
