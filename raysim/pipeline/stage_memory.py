"""Peak memory of each stage, estimated before anything starts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from raysim.codecs.codec import DTYPES
from raysim.config import ConfigError, RunConfig
from raysim.config.boundaries import Pairs
from raysim.network.memory import Needs, StageMemory, check_memory, packets_in_flight, worst_moment
from raysim.pipeline.device import DeviceFacts
from raysim.pipeline.optimizer import find_elementwise, slot_values
from raysim.pipeline.plan import TiedOwners, averaged_shapes, tied_owners
from raysim.pipeline.stage import stage_class
from raysim.schedules import Unflushed
from raysim.schedules.actions import peak_in_flight
from raysim.workloads.partition import Partition
from raysim.workloads.stage_costs import Footprint

_SQUARED_BYTES = 16  # per gradient value while a norm is computed: the value and its square in float64


def stage_memories(config: RunConfig, parts: Partition, num_samples: int) -> tuple[StageMemory, ...]:
    """Return the peak bytes of each stage, from the model's tensors, the schedule and the compressors."""
    num_stages = len(parts.stages)
    copies = stage_class(config).copies
    residuals, references = _method_memories(config, parts, num_samples)
    schedule = config.executed_schedule
    count = config.num_microbatches
    if isinstance(schedule, Unflushed):  # microbatches of later steps are in flight too
        count = max(count, *schedule.in_flight(num_stages))
    rows, owners = schedule.rows(num_stages, count), schedule.workers(num_stages)
    messages = _message_bytes(config, parts, copies)
    two_parts = any(action.op == "W" for row in rows for action in row)
    footprints = parts.footprints(two_parts=two_parts, dtype=DTYPES[config.dtype])
    tied = tied_owners(parts)
    needs = [
        _needs(config, stage, module, footprint, copies)._replace(exchange=_exchange_bytes(config, stage, module, tied))
        for stage, (module, footprint) in enumerate(zip(parts.stages, footprints, strict=True))
    ]
    worst = worst_moment(rows, needs)
    until_b = [[a for a in rows[owners[s]] if a.stage == s and a.op != "W"] for s in range(num_stages)]
    packets = packets_in_flight([peak_in_flight(row) for row in until_b])
    elementwise = find_elementwise(parts.stages, tied)
    policy, delays = config.weights, config.weight_delays()
    memories = []
    for stage, module in enumerate(parts.stages):
        in_flight, waiting, workspace, exchange = worst[stage]
        weights = copies * sum(parameter.nbytes for parameter in module.parameters())
        trained = needs[stage].gradients
        slots = 4 * sum(  # of float32
            slot_values(config.optimizer, parameter.shape, elementwise=name in elementwise[stage])
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        )
        validates = policy.between_steps == "validate" and config.optimizer.clip_norm is not None
        snapshot = trained + slots if validates else 0  # kept by post-validation until an update is validated
        buffers = sum(buffer.nbytes for buffer in module.buffers())
        memories.append(
            StageMemory(
                stage,
                weights_bytes=weights + buffers + footprints[stage].constants,
                versions_bytes=trained * policy.num_copies(delays[stage]) + snapshot,
                gradients_bytes=trained,
                optimizer_bytes=slots,
                saved_bytes=needs[stage].saved,
                in_flight=in_flight,
                kept_bytes=needs[stage].kept if waiting else 0,
                waiting=waiting,
                packet_bytes=max(messages[stage], default=0),
                packets=packets[stage],
                residuals_bytes=residuals[stage],
                references_bytes=references[stage],
                exchange_bytes=exchange,
                workspace_bytes=workspace,
            )
        )
    return tuple(memories)


def _needs(config: RunConfig, stage: int, module: nn.Module, footprint: Footprint, copies: int) -> Needs:
    """Return the bytes of a microbatch at a stage; with two `copies` everything is computed twice."""
    saved, kept = footprint.saved, max(footprint.waiting - footprint.saved, 0)
    backward, weights, first = footprint.backward, footprint.weights, footprint.first
    if config.recompute:
        # the forward runs again in the backward, while the received gradient is held
        again = footprint.forward + footprint.gradient
        state = module.state_dict()
        saved = footprint.received + sum(x.nbytes for name, x in module.named_buffers() if name in state)
        if not weights:
            backward, first = max(backward, again), max(first, again)
        elif stage == 0:  # computes nothing before W
            kept = footprint.gradient
            backward, weights, first = saved + kept, max(weights, again), max(first, again)
        else:
            kept, backward = max(footprint.waiting - saved, 0), max(backward, again)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    gradients = sum(parameter.nbytes for parameter in trained)
    clips = config.optimizer.clip_norm is not None
    update = _SQUARED_BYTES * max((parameter.numel() for parameter in trained), default=0) if clips else 0
    needs = Needs(saved, kept, footprint.forward, backward, weights, first, gradients)
    return Needs(*(copies * each for each in needs))._replace(update=update)


def _exchange_bytes(config: RunConfig, stage: int, module: nn.Module, tied: TiedOwners) -> int:
    method = config.replica_methods()[stage]
    return method.exchange_bytes(averaged_shapes(stage, module, config, tied)) if config.takes_part(method) else 0


def _method_memories(config: RunConfig, parts: Partition, num_samples: int) -> tuple[list[int], list[int]]:
    """Return the bytes of the methods' memories by stage: residuals at one end of a link, and references at both ends.

    If replicas have different compressors, the largest memory of each stage counts.
    """
    num_stages = len(parts.stages)
    compressors = config.compressors([boundary.shapes for boundary in parts.boundaries])
    settings = {id(links): links for links in compressors}
    kinds = [_link_memories(links, config, parts, num_samples) for links in settings.values()]
    most = [max((each[stage] for each in kinds), key=sum) for stage in range(num_stages)]
    residuals, references = ([each[i] for each in most] for i in (0, 1))
    tied = tied_owners(parts)
    for stage, (averaging, module) in enumerate(zip(config.replica_methods(), parts.stages, strict=True)):
        if config.takes_part(averaging):
            residuals[stage] += averaging.memory_bytes(averaged_shapes(stage, module, config, tied))
    for owners in tied:
        for stage, name in owners:
            shape = tuple(parts.stages[stage].get_parameter(name).shape)
            residuals[stage] += config.tied_gradient.memory_bytes({name: shape})
    return residuals, references


def _link_memories(
    links: Sequence[Pairs], config: RunConfig, parts: Partition, num_samples: int
) -> list[tuple[int, int]]:
    """Return the bytes of a replica's compressor memories by stage: residuals and references."""
    residuals, references = ([0] * len(parts.stages) for _ in range(2))
    for boundary, pairs in enumerate(links):
        ends = ((boundary, boundary + 1), (boundary + 1, boundary))
        for name, methods in pairs.items():
            message = parts.boundaries[boundary].shapes[name]
            for method, (source, target) in zip(methods, ends, strict=True):
                kept = method.memory_bytes(message, config.num_microbatches, num_samples)
                if method.two_ended:
                    references[source] += kept
                    references[target] += kept
                else:
                    residuals[source] += kept
    return list(zip(residuals, references, strict=True))


def _message_bytes(config: RunConfig, parts: Partition, copies: int) -> list[list[int]]:
    """Return the uncompressed bytes of a message at each boundary of each stage, the earlier boundary first."""
    itemsize = DTYPES[config.dtype].itemsize
    sizes = [
        copies * sum(map(math.prod, boundary.shapes.values())) * itemsize + sum(boundary.exact_bytes.values())
        for boundary in parts.boundaries
    ]
    return [sizes[max(stage - 1, 0) : stage + 1] for stage in range(len(parts.stages))]


def check_devices(
    config: RunConfig,
    memories: Sequence[StageMemory],
    owners: Sequence[int],
    facts: Sequence[DeviceFacts | None],
    share: float,
) -> None:
    """Raise ConfigError if a GPU does not support the dtype, or lacks the memory for its stages.

    `memories` and `owners`: the memory and the worker of each stage. `facts`: properties of each worker's GPU. `share`: the
    usable share of a GPU's memory.
    """
    for gpu in facts:
        if gpu is not None and config.dtype == "bfloat16" and not gpu.bfloat16:
            raise ConfigError(
                f"`dtype` = 'bfloat16' needs a GPU of compute capability 8.0, but {gpu.name} has {gpu.capability}. "
                "Set `dtype` to 'float16' or 'float32'."
            )
    placed = [(memory, owner, gpu) for memory, owner in zip(memories, owners, strict=True) if (gpu := facts[owner])]
    stages = [memory for memory, _, _ in placed]
    try:
        whole = {gpu.uuid: gpu.memory_bytes for _, _, gpu in placed}
        check_memory(stages, whole, [gpu.uuid for _, _, gpu in placed], kind="GPU")
        each = {owner: int(share * gpu.memory_bytes) for _, owner, gpu in placed}
        check_memory(stages, each, [owner for _, owner, _ in placed], kind=f"the {share:g} GPU of worker")
    except ValueError as error:
        raise ConfigError(str(error)) from None
