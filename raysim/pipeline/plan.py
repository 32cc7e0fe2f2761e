"""What a run will do, worked out and checked before anything starts: data, model, cuts, rows, memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from torch import nn

from raysim.codecs import Codec, Identity
from raysim.codecs.packet import DTYPES
from raysim.compressors import Compressor, Plain
from raysim.config import ConfigError, RunConfig
from raysim.network.memory import StageMemory, in_flight, packets_in_flight
from raysim.network.schedule import Row
from raysim.pipeline.optimizer import slots_per_parameter
from raysim.workloads.data import Data, batch_ids, load_data
from raysim.workloads.models import build_model
from raysim.workloads.partition import Partition, partition


@dataclass(frozen=True)
class Plan:
    """What every worker needs to know of a run; small enough to send to each."""

    config: RunConfig
    num_samples: int
    num_test_samples: int
    cuts: tuple[str, ...]
    boundary_shapes: tuple[tuple[int, ...], ...]  # of a microbatch's activation
    tied: tuple[tuple[tuple[int, str], ...], ...]  # owners (stage, parameter) of parameters in several stages, in order
    memories: tuple[StageMemory, ...]

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.boundary_shapes) + 1

    @cached_property
    def rows(self) -> list[Row]:
        """What each worker runs, in order."""
        return self.config.parsed_schedule.rows(self.num_stages, self.config.num_microbatches)

    @cached_property
    def compressors(self) -> list[tuple[Compressor, Compressor]]:
        """The compressors of each boundary: of its activations and of its gradients."""
        return self.config.compressors()

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in the training data."""
        return self.num_samples // self.config.batch_size

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self.config.steps or (self.config.epochs or 0) * self.steps_per_epoch

    def microbatch(self, step: int, microbatch: int) -> tuple[int, np.ndarray]:
        """Return the epoch and the sample ids of a microbatch."""
        epoch, ids = _batch(self.num_samples, self.config.batch_size, self.config.seed, step)
        size = self.config.batch_size // self.config.num_microbatches
        return epoch, ids[microbatch * size : (microbatch + 1) * size]

    def evaluation_ids(self, split: str, batch: int) -> np.ndarray:
        """Return the sample ids of an evaluation batch: test data in its order, training data in that of its first epoch.

        The last batch of the test data may be short.
        """
        if split == "train":  # data may be sorted by class
            return _batch(self.num_samples, self.config.batch_size, self.config.seed, batch)[1]
        start = batch * self.config.batch_size
        return np.arange(start, min(self.num_test_samples, start + self.config.batch_size))

    @property
    def num_test_batches(self) -> int:
        """Batches of an evaluation."""
        return math.ceil(self.num_test_samples / self.config.batch_size)

    @property
    def compresses(self) -> bool:
        """Whether any link has more to do than to send its tensors as they are."""
        return any(method != Plain(Identity()) for methods in self.compressors for method in methods)

    @property
    def codecs(self) -> list[Codec]:
        """The codecs of all links, each once."""
        return list(dict.fromkeys(method.codec for methods in self.compressors for method in methods))

    def profiles(self, step: int) -> bool:
        """Return whether a step's actions are recorded; the middle one of each period, away from evaluations."""
        every = self.config.profile_every_steps
        return every > 0 and step % every == every // 2

    def measures(self, step: int) -> bool:
        """Return whether a step's fidelity is measured: not a profiled one where there is a choice, since it takes time."""
        every = self.config.profile_every_steps
        return every > 0 and step % every == 0


@dataclass
class Workload:
    """A plan, and what is large: the stages' modules at their first step, and the data."""

    plan: Plan
    modules: list[nn.Sequential]
    data: Data


def prepare(config: RunConfig) -> Workload:
    """Return all that an engine needs to start a run; raises ConfigError where configuration, data and model do not fit."""
    try:
        return _prepare(config)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _prepare(config: RunConfig) -> Workload:
    data = load_data(config.data.name, config.data.options, config.seed)
    if len(data.train) < config.batch_size:
        raise ConfigError(
            f"`batch_size` must be at most the number of training samples ({len(data.train)}), but got {config.batch_size}."
        )
    model = build_model(config.model.name, config.model.options, data.shape, config.seed)
    microbatch_size = config.batch_size // config.num_microbatches
    cut = {"cuts": config.cuts} if config.cuts is not None else {"num_stages": config.stages}
    parts = partition(model, data.shape, batch=microbatch_size, bottleneck=config.bottleneck, seed=config.seed, **cut)
    plan = Plan(
        config=config,
        num_samples=len(data.train),
        num_test_samples=len(data.test),
        cuts=parts.cuts,
        boundary_shapes=parts.boundary_shapes,
        tied=_owners(parts),
        memories=stage_memories(config, parts, len(data.train)),
    )
    return Workload(plan, parts.stages, data)


def _owners(parts: Partition) -> tuple[tuple[tuple[int, str], ...], ...]:
    """Return the owners of each tied parameter, by stage: pairs that share an owner belong together."""
    groups: list[list[tuple[int, str]]] = []
    for stage, name, other_stage, other_name in parts.tied:
        pair = [(stage, name), (other_stage, other_name)]
        group = next((group for group in groups if set(group) & set(pair)), None)
        if group is None:
            groups.append(pair)
        else:
            group.extend(owner for owner in pair if owner not in group)
    return tuple(tuple(sorted(group)) for group in groups)


def stage_memories(config: RunConfig, parts: Partition, num_samples: int) -> tuple[StageMemory, ...]:
    """Count what each stage holds at its peak, from the model's tensors, the schedule and the compressors."""
    num_stages, num_microbatches = len(parts.stages), config.num_microbatches
    counts = in_flight(config.parsed_schedule, num_stages, num_microbatches)
    packets = packets_in_flight(counts)
    itemsize = DTYPES[config.dtype].itemsize
    residuals, references = [0] * num_stages, [0] * num_stages
    for boundary, methods in enumerate(config.compressors()):
        message = parts.boundary_shapes[boundary]
        ends = ((boundary, boundary + 1), (boundary + 1, boundary))
        for method, (source, target) in zip(methods, ends, strict=True):
            kept = method.memory_bytes(message, num_microbatches, num_samples)
            if method.two_ended:
                references[source] += kept
                references[target] += kept
            else:
                residuals[source] += kept
    memories = []
    for stage, module in enumerate(parts.stages):
        weights = 4 * sum(parameter.numel() for parameter in module.parameters())
        buffers = sum(buffer.nbytes for buffer in module.buffers())
        messages = [
            math.prod(parts.boundary_shapes[b]) * itemsize for b in (stage - 1, stage) if 0 <= b < num_stages - 1
        ]
        saved = parts.saved_bytes[stage]
        inputs = messages[0] if stage > 0 else 0
        memories.append(
            StageMemory(
                stage,
                weights_bytes=weights + buffers,
                gradients_bytes=weights,
                optimizer_bytes=weights * slots_per_parameter(config.optimizer),
                saved_bytes=inputs if config.recompute else saved,
                in_flight=counts[stage],
                packet_bytes=max(messages, default=0),
                packets=packets[stage],
                residuals_bytes=residuals[stage],
                references_bytes=references[stage],
                workspace_bytes=saved if config.recompute else 0,
            )
        )
    return tuple(memories)


@lru_cache(maxsize=4)
def _batch(num_samples: int, batch_size: int, seed: int, step: int) -> tuple[int, np.ndarray]:
    return batch_ids(num_samples, batch_size, seed, step)
