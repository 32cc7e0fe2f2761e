"""Memory of each stage at its peak, counted before anything starts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from raysim.codecs.base import DTYPES
from raysim.config import RunConfig
from raysim.config.links import Pairs
from raysim.network.memory import StageMemory, held_at_worst, packets_in_flight
from raysim.pipeline.crossing import compressors_of
from raysim.pipeline.exchanges import takes_part
from raysim.pipeline.optimizer import find_elementwise, slot_values
from raysim.pipeline.parameters import averaged_shapes, tied_owners
from raysim.schedules import Unflushed
from raysim.schedules.actions import peak_in_flight
from raysim.workloads.partition import Partition


def stage_memories(config: RunConfig, parts: Partition, num_samples: int) -> tuple[StageMemory, ...]:
    """Count the bytes that each stage holds at its peak, from the model's tensors, the schedule and the compressors."""
    num_stages = len(parts.stages)
    twin = config.num_replicas > 1 and any(method.uses_previous_gradients for method in config.replica_methods())
    copies = 2 if twin else 1  # twin steps also hold the parameters of the step before, and the tensors made with them
    residuals, references = _method_memories(config, parts, num_samples)
    schedule = config.parsed_schedule
    count = config.num_microbatches
    if isinstance(schedule, Unflushed):  # those of further steps are in flight beside them
        count = max(count, *schedule.in_flight(num_stages))
    rows, owners = schedule.rows(num_stages, count), schedule.workers(num_stages)
    messages = _message_bytes(config, parts, copies)
    saved_bytes, kept_bytes = ([copies * each for each in one] for one in (parts.saved_bytes, parts.kept_bytes))
    if config.recompute:  # inputs, and from B to W all tensors that were computed again
        saved = [0, *(sizes[0] for sizes in messages[1:])]
        waits = [here + caught for here, caught in zip(saved_bytes, kept_bytes, strict=True)]
    else:
        saved, waits = saved_bytes, kept_bytes
    waits[0] = sum(messages[0])  # the first stage computes nothing before W, and keeps the tensors that it received
    held = held_at_worst(rows, saved, waits)
    until_b = [[a for a in rows[owners[s]] if a.stage == s and a.op != "W"] for s in range(num_stages)]
    packets = packets_in_flight([peak_in_flight(row) for row in until_b])
    elementwise = find_elementwise(parts.stages, tied_owners(parts))
    policy, delays = config.weight_policy, config.weight_delays()
    memories = []
    for stage, module in enumerate(parts.stages):
        in_flight, waiting = held[stage]
        computes_again = config.recompute and (stage == 0 or not waiting)  # where it waits for W it is counted as kept
        weights = copies * sum(parameter.nbytes for parameter in module.parameters())
        trained = copies * sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
        buffers = sum(buffer.nbytes for buffer in module.buffers())
        memories.append(
            StageMemory(
                stage,
                weights_bytes=weights + buffers,
                versions_bytes=trained * policy.num_copies(delays[stage]),
                gradients_bytes=trained,
                optimizer_bytes=_optimizer_bytes(config, module, elementwise[stage]),
                saved_bytes=saved[stage],
                in_flight=in_flight,
                kept_bytes=waits[stage] if waiting else 0,
                waiting=waiting,
                packet_bytes=max(messages[stage], default=0),
                packets=packets[stage],
                residuals_bytes=residuals[stage],
                references_bytes=references[stage],
                workspace_bytes=saved_bytes[stage] if computes_again else 0,
            )
        )
    return tuple(memories)


def _method_memories(config: RunConfig, parts: Partition, num_samples: int) -> tuple[list[int], list[int]]:
    """Return the bytes by stage that methods remember: residuals at one end, and references, which both ends of a link hold.

    Where replicas have other compressors, a stage counts with those of the replica in which it remembers most.
    """
    num_stages = len(parts.stages)
    settings = {id(links): links for links in compressors_of(config, parts.boundaries)}
    kinds = [_link_memories(links, config, parts, num_samples) for links in settings.values()]
    most = [max((each[stage] for each in kinds), key=sum) for stage in range(num_stages)]
    residuals, references = ([each[place] for each in most] for place in (0, 1))
    tied = tied_owners(parts)
    for stage, (averaging, module) in enumerate(zip(config.replica_methods(), parts.stages, strict=True)):
        if takes_part(averaging, config.num_replicas):
            residuals[stage] += averaging.memory_bytes(averaged_shapes(stage, module, config, tied))
    return residuals, references


def _link_memories(
    links: Sequence[Pairs], config: RunConfig, parts: Partition, num_samples: int
) -> list[tuple[int, int]]:
    """Return the bytes by stage that the compressors of a replica remember: residuals and references."""
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
    """Return the uncompressed bytes of a message at each boundary of each stage, the one before it first."""
    itemsize = DTYPES[config.dtype].itemsize
    sizes = [
        copies * sum(map(math.prod, boundary.shapes.values())) * itemsize + sum(boundary.exact_bytes.values())
        for boundary in parts.boundaries
    ]
    return [sizes[max(stage - 1, 0) : stage + 1] for stage in range(len(parts.stages))]


def _optimizer_bytes(config: RunConfig, module: nn.Module, elementwise: frozenset[str]) -> int:
    """Return the bytes of the optimiser's float32 slots for a stage."""
    return 4 * sum(
        slot_values(config.optimizer, parameter.shape, elementwise=name in elementwise)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    )
