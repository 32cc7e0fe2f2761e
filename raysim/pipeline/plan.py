"""The plan of a run: data, model, cuts, schedule, compressors and groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from torch import nn

from raysim.compressors import Compressor
from raysim.config import RunConfig
from raysim.config.boundaries import Pairs
from raysim.config.run_fields import AVERAGED
from raysim.network.memory import StageMemory
from raysim.pipeline.groups import Group
from raysim.pipeline.optimizer import learning_rate
from raysim.records import WARMUP_STEPS
from raysim.replication.method import ReplicaMethod
from raysim.schedules.actions import Row
from raysim.schedules.weights import Delays
from raysim.values import BoundaryTensors
from raysim.workloads.data import batch_ids
from raysim.workloads.partition import CutWithAlternative, Partition
from raysim.workloads.task import Task

TiedOwners = tuple[tuple[tuple[int, str], ...], ...]
"""The owners of each tied parameter: stages, with the parameter's name there."""
TiedShapes = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""The stages of each tied parameter, and its shape."""


class Origin(NamedTuple):
    """The start of a run: step 0, or the checkpoint of another run from which it branches."""

    first_step: int = 0
    rate_steps: int | None = None
    """Number of steps over which the learning rate was planned; None for the run's own."""
    rate_epochs: int | None = None
    """Number of epochs over which it was planned, instead of steps."""
    model_seed: int | None = None
    """Seed of the model's initial weights; None for the run's own."""
    memories_from: int = 0
    """Step at which the memories of compressors and replica methods started empty."""
    cuts: tuple[str, ...] | None = None
    """Cuts with which these memories go on; with others they start empty at `first_step`. None for any."""


FROM_SCRATCH = Origin()
FIRST_PROFILED = 2
"""Steps recorded after warm-up, whatever `profile_every_steps` is: a short run can be priced, with an interval."""
_batch = lru_cache(maxsize=4)(batch_ids)


@dataclass(frozen=True)
class Plan:
    """The settings and facts of a run, small enough to send to every worker."""

    config: RunConfig
    task: Task
    num_samples: int
    num_test_samples: int  # of an evaluation
    cuts: tuple[str, ...]
    cut_choices: tuple[CutWithAlternative, ...]
    boundaries: tuple[BoundaryTensors, ...]  # the tensors of a microbatch that cross each boundary
    tied: TiedOwners  # the parameters shared by several stages
    elementwise: tuple[frozenset[str], ...]  # parameters of each stage that Muon does not update
    memories: tuple[StageMemory, ...]
    flops_forward: tuple[int, ...]  # by stage, for one microbatch
    weight_shares: tuple[float, ...]  # by stage: weight gradients' share of a backward; empty if it is not split
    rows: tuple[Row, ...]  # the actions of each worker of a replica, in order
    owners: tuple[int, ...]  # the worker of each stage within a replica
    origin: Origin = FROM_SCRATCH
    answer: tuple[int, int] = (0, 0)  # the first position that evaluations generate, and the one after the last

    @property
    def num_stages(self) -> int:
        return len(self.boundaries) + 1

    @property
    def num_replicas(self) -> int:
        return self.config.num_replicas

    @cached_property
    def compressors(self) -> list[list[Pairs]]:
        """The compressors of activations and gradients, by replica, boundary and tensor."""
        return self.config.compressors([boundary.shapes for boundary in self.boundaries])

    def compressor(self, replica: int, boundary: int, direction: str, tensor: str) -> Compressor:
        """Return the compressor of a link; its tensor must not be an exact one."""
        return self.compressors[replica][boundary][tensor][0 if direction == "forward" else 1]

    @cached_property
    def methods(self) -> list[Compressor]:
        """The compressors of all links, each once."""
        pairs = [pair for links in self.compressors for boundary in links for pair in boundary.values()]
        return list(dict.fromkeys(method for pair in pairs for method in pair))

    @cached_property
    def evaluated(self) -> int:
        """The replica used for evaluations: the first that compresses activations, or else the first."""
        compress = [
            any(not forward.exact for pairs in links for forward, _ in pairs.values()) for links in self.compressors
        ]
        return compress.index(True) if True in compress else 0

    @property
    def places(self) -> list[tuple[int, int]]:
        """Every (replica, stage)."""
        return [(replica, stage) for replica in range(self.num_replicas) for stage in range(self.num_stages)]

    def worker(self, replica: int, stage: int) -> int:
        """Return the global index of the worker that owns a stage of a replica."""
        return replica * len(self.rows) + self.owners[stage]

    def peers(self, worker: int) -> list[int]:
        """Return the workers that a worker exchanges messages with, in order."""
        replica, row = divmod(worker, len(self.rows))
        stages = {stage for stage, owner in enumerate(self.owners) if owner == row}
        near = {stage + way for stage in stages for way in (-1, 1)} & set(range(self.num_stages))
        peers = {self.worker(replica, stage) for stage in near}
        if self.task.generates:  # the last stage returns each token to the first
            ends = {self.worker(replica, 0), self.worker(replica, self.num_stages - 1)}
            peers |= ends if worker in ends else set()
        if self.validates:
            rows = {row - 1, row + 1} & set(range(len(self.rows)))
            peers |= {replica * len(self.rows) + neighbour for neighbour in rows}
        for group in (group for phase in self.groups for group in phase):
            members = {self.worker(*member) for member in group.members}
            peers |= members if worker in members else set()
        return sorted(peers - {worker})

    def replica_method(self, stage: int, step: int) -> ReplicaMethod:
        """Return the replica method of a stage in a step: the uncompressed mean before `compress_from`."""
        return self.replica_methods[stage] if step >= self.config.compress_from else AVERAGED

    def tied_method(self, step: int) -> ReplicaMethod:
        """Return the method that sums gradients of tied parameters in a step, by the mean over their owners."""
        return self.config.tied_gradient if step >= self.config.compress_from else AVERAGED

    @property
    def validates(self) -> bool:
        """True if workers send each other their gradient norms, for post-validation."""
        return self.config.weights.between_steps == "validate" and self.config.optimizer.clip_norm is not None

    @cached_property
    def replica_methods(self) -> list[ReplicaMethod]:
        return self.config.replica_methods()

    @property
    def decentralized(self) -> bool:
        """True if replicas have different parameters, or train different parameters from the evaluated ones."""
        return any(method.decentralized for method in self.replica_methods if self.config.takes_part(method))

    @cached_property
    def weight_delays(self) -> Delays:
        """The delay of each stage's microbatches, in updates."""
        return self.config.weight_delays()

    @cached_property
    def groups(self) -> list[list[Group]]:
        """The groups that end a step, by phase.

        First replicas of a stage that average gradients, then the owners of tied parameters, and, after the optimisers have
        stepped, replicas of a stage that exchange parameters. With `fused_embedding`, the owners in all replicas form one group,
        and no replica method averages their parameters.
        """
        replicas = range(self.num_replicas)
        averages, exchanges = (
            [
                Group(tuple((r, stage) for r in replicas), method.num_rounds(self.num_replicas))
                for stage, method in enumerate(self.replica_methods)
                if method.after_update is after_update and self.config.takes_part(method)
            ]
            for after_update in (False, True)
        )
        fused: list[Sequence[int]] = [replicas] if self.config.fused_embedding else [[r] for r in replicas]
        sums = [
            Group(members, self.config.tied_gradient.num_rounds(len(members)), i)
            for i, owners in enumerate(self.tied)
            for together in fused
            for members in [tuple((r, stage) for r in together for stage, _ in owners)]
        ]
        return [averages, sums, exchanges]

    def rounds_in(self, step: int, group: Group) -> int:
        """Return the maximum rounds of a group in a step, 0 if its method exchanges nothing."""
        if group.tied is not None:
            return self.tied_method(step).num_rounds(len(group.members))
        method = self.replica_method(group.stage, step)
        return 0 if method.part(step) is None else method.num_rounds(self.num_replicas)

    def tied_names(self, i: int, stage: int) -> dict[str, str]:
        """Return the name of a tied parameter in a stage, by its name in messages and memories."""
        return {f"tied {self.tied[i][0][1]}": dict(self.tied[i])[stage]}

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in the training data."""
        return self.num_samples // self.config.batch_size

    @property
    def num_steps(self) -> int:
        """Steps of the run; a branch does not count its parent's steps."""
        return self.config.steps or (self.config.epochs or 0) * self.steps_per_epoch

    @property
    def first_step(self) -> int:
        """The number of the first step; greater than 0 for a branch."""
        return self.origin.first_step

    @property
    def end_step(self) -> int:
        """The number of the step after the last one."""
        return self.first_step + self.num_steps

    @property
    def rate_steps(self) -> int:
        """The number of steps over which the learning rate is planned."""
        origin = self.origin
        return origin.rate_steps or (origin.rate_epochs or 0) * self.steps_per_epoch or self.num_steps

    @property
    def memories_from(self) -> int:
        """The step at which the memories of compressors and replica methods start empty."""
        goes_on = self.origin.cuts in (None, self.cuts)
        return max(self.origin.memories_from if goes_on else self.first_step, self.config.compress_from)

    @property
    def model_seed(self) -> int:
        """The seed of the model's initial weights, and of constants that are not in checkpoints."""
        return self.config.seed if self.origin.model_seed is None else self.origin.model_seed

    def learning_rate(self, step: int) -> float:
        return learning_rate(self.config.optimizer, step, self.steps_per_epoch, self.rate_steps)

    def microbatch(self, step: int, microbatch: int, replica: int = 0) -> tuple[int, np.ndarray]:
        """Return the epoch and the sample ids of a replica's microbatch."""
        epoch, ids = _batch(self.num_samples, self.config.batch_size, self.config.seed, step)
        size, i = self.config.microbatch_size, replica * self.config.num_microbatches + microbatch
        return epoch, ids[i * size : (i + 1) * size]

    def batch(self, step: int) -> np.ndarray:
        """Return the sample ids of a step, of all replicas."""
        return _batch(self.num_samples, self.config.batch_size, self.config.seed, step)[1]

    def evaluation_ids(self, split: str, batch: int) -> np.ndarray:
        """Return the sample ids of an evaluation batch: test data in stored order, training data in the order of the first epoch.

        The last batch of the test data may be short.
        """
        if split == "train":  # shuffled, since stored data may be sorted by class
            return self.batch(batch)
        start = batch * self.config.batch_size
        return np.arange(start, min(self.num_test_samples, start + self.config.batch_size))

    @property
    def num_test_batches(self) -> int:
        return math.ceil(self.num_test_samples / self.config.batch_size)

    @property
    def trained(self) -> bool:
        """True if the first weights are of a checkpoint or a folder."""
        return self.config.start is not None or "path" in self.config.model.options

    @property
    def compresses(self) -> bool:
        return any(not method.exact for method in self.methods)

    def profiles(self, step: int) -> bool:
        """Return whether a step's actions are recorded: the first after warm-up, and one in the middle of each period."""
        every = self.config.profile_every_steps
        first = min(max(self.first_step, self.config.compress_from) + WARMUP_STEPS, self.end_step - 1)
        return every > 0 and (step % every == every // 2 or first <= step < first + FIRST_PROFILED)

    def keeps_transfers(self, step: int) -> bool:
        """Return whether a step's transfers between workers are recorded; always if replicas exchange only in some steps."""
        return self.profiles(step) or self.config.exchange_period > 1

    def measures(self, step: int) -> bool:
        """Return whether a step's fidelity is measured; this takes time, so profiled steps are avoided if possible."""
        every = self.config.profile_every_steps
        return every > 0 and step % every == 0


def tied_owners(parts: Partition) -> TiedOwners:
    """Return the owners of each tied parameter, by stage; the first owner is in all of its pairs."""
    groups: dict[tuple[int, str], list[tuple[int, str]]] = {}
    for stage, name, other_stage, other_name in parts.tied:
        groups.setdefault((stage, name), [(stage, name)]).append((other_stage, other_name))
    return tuple(tuple(sorted(group)) for group in groups.values())


def tied_shapes(parts: Partition) -> TiedShapes:
    """Return the stages of each tied parameter, and its shape."""
    return tuple(
        (tuple(stage for stage, _ in owners), tuple(parts.stages[owners[0][0]].get_parameter(owners[0][1]).shape))
        for owners in tied_owners(parts)
    )


def averaged_shapes(stage: int, module: nn.Module, config: RunConfig, tied: TiedOwners) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the gradients averaged by a stage's replicas, by parameter name, in the module's order.

    Parameters that `fused_embedding` sums over stages and replicas together are left out.
    """
    fused = {owner for owners in tied for owner in owners} if config.fused_embedding else set()
    return {
        name: tuple(parameter.shape)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and (stage, name) not in fused
    }
