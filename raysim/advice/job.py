"""A training job on a fleet of hosts: its layouts, the memory of each, and what one step costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from raysim.advice.fleet import Fleet
from raysim.advice.packets import exchange_of, link_messages, sum_exchanges
from raysim.advice.stage_cost import StageCost
from raysim.config import read_config
from raysim.network.profile import Profile
from raysim.network.sharding import FSDP, Sharded, Units
from raysim.network.topology import Network, Placement, replica_hosts
from raysim.network.transport import DDP, Averaging, Transport
from raysim.notation import InputError
from raysim.schedules import Schedule
from raysim.schedules.actions import peak_in_flight
from raysim.schedules.arrays import OPS, make_table

STATE_BYTES = 16
"""Of each parameter: weights and gradients in 16 bits; a copy of the weights and two moments of Adam in 32."""
GRADIENT_BYTES = 4.0
"""Of each parameter, averaged between replicas: float32, as raysim averages."""
UPDATE_BYTES = 28
"""That the optimiser moves through the memory of a GPU for each parameter: it reads 16 and writes 12 or more."""
RECOMPUTED_SHARE = 2 / 34
"""Of the tensors that a block saves, with recomputation: its input alone."""
ROW_VALUES = 1024
"""Values of a row by which the packet of a shard, one flat tensor, is counted."""
SAME = "Identity"
FEW_MICROBATCHES = 4
"""Of each worker, from which on no more are in flight at once, unless all are."""


class Model(Protocol):
    """The costs of a model, and its names in tables."""

    @property
    def name(self) -> str:
        """Its name in tables."""

    @property
    def samples_name(self) -> str:
        """Its samples' name in tables."""

    @property
    def num_parameters(self) -> int:
        """Number of values that it learns."""

    @property
    def num_layers(self) -> int:
        """Most stages that it can be cut into."""

    def stages(self, num_stages: int, samples: int) -> list[StageCost]:
        """Return the costs of a microbatch of so many samples at each stage."""


class Layout(NamedTuple):
    """Hosts arranged as `replicas` pipelines of `workers` hosts."""

    workers: int
    replicas: int
    sharding: FSDP | None = None
    """Division of a replica's parameters among replicas."""

    def __str__(self) -> str:
        """Return the layout in words."""
        if self.replicas == 1:
            return f"1 pipeline of {self.workers}"
        words = f"{self.replicas} replicas" if self.workers == 1 else f"{self.replicas} pipelines of {self.workers}"
        return words if self.sharding is None else f"{words}, {self.sharding!r}"

    @property
    def groups(self) -> int:
        """Copies of the model."""
        return self.replicas if self.sharding is None else self.sharding.groups(self.replicas)


@dataclass(frozen=True)
class Way:
    """A way to train in a layout: codecs of the links, and the method of the replicas."""

    layout: Layout
    forward: str = SAME
    backward: str = SAME
    method: str = SAME
    overlap: bool = False
    """Whether uncompressed gradients are averaged in buckets during the last backward, as DDP does."""

    @property
    def dense(self) -> bool:
        """True if nothing is compressed, and replicas average in every step."""
        return (self.forward, self.backward, self.method) == (SAME, SAME, SAME)

    def __str__(self) -> str:
        """Return the codecs of activations and gradients, and the method of replicas."""
        links = [f"{self.forward} / {self.backward}"] if (self.forward, self.backward) != (SAME, SAME) else []
        words = [*links, *([self.method] if self.method != SAME else [])] or ["dense"]
        return ", ".join(words) + (", overlapped" if self.overlap else "")


@dataclass(frozen=True, eq=False)
class Job:
    """A model, its hosts, and how it is trained on them."""

    model: Model
    fleet: Fleet
    schedule: Schedule
    batch: int
    """Samples of a step over all replicas."""
    microbatch: int
    """Samples of a microbatch."""
    efficiency: float
    """Share of the datasheet's 16-bit peak that training reaches."""
    transport: Transport
    recompute: bool = False
    dtype: str = "bfloat16"
    """Of activations and their gradients on links."""

    def num_microbatches(self, layout: Layout) -> int:
        """Return the number of microbatches of each replica; raises InputError unless they fill the batch."""
        count, rest = divmod(self.batch, layout.replicas * self.microbatch)
        if rest or not count:
            raise InputError(
                f"`--batch` must be a multiple of {layout.replicas * self.microbatch} ({layout.replicas} replicas, microbatches of "
                f"{self.microbatch}), but got {self.batch}."
            )
        return count

    def num_stages(self, layout: Layout) -> int:
        """Return the number of stages that gives each worker of a pipeline one or more; raises InputError."""
        for count in range(layout.workers, 9 * layout.workers, layout.workers):
            try:
                if max(self.schedule.workers(count)) + 1 == layout.workers:
                    return count
            except ValueError:
                continue
        raise InputError(
            f"{self.schedule!r} cannot give each of {layout.workers} workers a stage. Choose another schedule or number of stages."
        )

    @lru_cache(maxsize=64)  # noqa: B019  a job lives as long as its command
    def stages(self, layout: Layout) -> tuple[StageCost, ...]:
        """Return the costs of each stage's microbatch."""
        return tuple(self.model.stages(self.num_stages(layout), self.microbatch))

    @lru_cache(maxsize=256)  # noqa: B019
    def profile(self, way: Way) -> Profile:
        """Return the costs of a step without the exchange of replicas."""
        stages = self.stages(way.layout)
        count = len(stages)
        rows = make_table(self.schedule, count, self.num_microbatches(way.layout))
        split = int(rows.op.max()) == OPS.index("W")
        speed = self.fleet.flops * self.efficiency
        forward = np.array([stage.forward_flops for stage in stages]) / speed
        weight = np.array([stage.weight_flops for stage in stages]) / speed
        backward = (3 if self.recompute else 2) * forward
        times = [forward, backward]
        if split:
            weight[0] = backward[0]
            times = [forward, backward - weight, weight]
        costs: dict[str, Any] = {
            name: np.zeros((1, count, len(times), 1)) for name in ("wire_bytes", "encode_s", "decode_s")
        }
        for stage, cost in enumerate(stages[:-1]):
            messages = link_messages(way.forward, way.backward, cost.output, self.dtype)
            for op, (message, source, target) in enumerate(
                zip(messages, (stage, stage + 1), (stage + 1, stage), strict=True)
            ):
                costs["wire_bytes"][0, source, op] = message.wire_bytes
                costs["encode_s"][0, source, op] = message.encode_work / self.fleet.codec_bytes_per_s
                costs["decode_s"][0, target, op] = message.decode_work / self.fleet.codec_bytes_per_s
        memory = self.fleet.gpus * self.fleet.device.memory_bytes_per_s
        profile = Profile(
            compute_s=np.stack(times, axis=1)[None, :, :, None],
            update_s=UPDATE_BYTES * np.array([stage.num_parameters for stage in stages]) / memory,
            source=f"{self.fleet!r} at {self.efficiency:g} of its datasheet's dense 16-bit peak",
            **costs,
        )
        transport = replace(self.transport, averaging=DDP if way.overlap else Averaging())
        return profile.over(transport, way.layout.workers * way.layout.replicas)

    @lru_cache(maxsize=64)  # noqa: B019
    def sharded(self, way: Way) -> Sharded:
        """Return the units of a sharded layout: parameters gathered in the type of activations, gradients scattered in float32."""
        sharding, coded = way.layout.sharding, way.layout.groups == 1 and way.method != SAME
        assert sharding is not None
        stages = []
        for stage in self.stages(way.layout):
            counts = np.array([unit.num_parameters for unit in stage.units], np.float64)
            scatter_bytes, work = GRADIENT_BYTES * counts, np.zeros(len(counts))
            if coded:  # the codes that a replica sends to each owner
                parts = {count: self._scattered(way.method, int(count), sharding.shards) for count in set(counts)}
                scatter_bytes, work = np.array([parts[count] for count in counts]).T
            flops = sum(unit.forward_flops for unit in stage.units) or 1.0
            stages.append(
                Units(
                    share=tuple(unit.forward_flops / flops for unit in stage.units),
                    gather_bytes=tuple((self._value_bytes * counts).tolist()),
                    scatter_bytes=tuple(scatter_bytes.tolist()),
                    codec_s=tuple((work / self.fleet.codec_bytes_per_s).tolist()),
                )
            )
        return Sharded(sharding, tuple(stages), coded, sums_groups=way.method == SAME)

    def _scattered(self, method: str, num_parameters: int, shards: int) -> tuple[float, float]:
        """Return the bytes of a unit's coded gradients over all shards, and the work of its codecs on the packets for other owners."""
        rows = num_parameters // shards // ROW_VALUES or 1
        packet, _ = link_messages(method, SAME, (1, rows, ROW_VALUES), "float32")
        share = num_parameters / shards / (rows * ROW_VALUES)
        work = (shards - 1) * share * (packet.encode_work + packet.decode_work)
        return shards * share * packet.wire_bytes, work

    @property
    def _value_bytes(self) -> int:
        """Bytes of a parameter as it is gathered."""
        return 4 if self.dtype == "float32" else 2

    def on_networks(self, way: Way, profile: Profile, networks: Sequence[Network], count: int) -> list[Profile]:
        """Return the costs of a step of `count` microbatches on each network, the gathers and scatters of shards in its actions."""
        sharded, layout = self.sharded(way), way.layout
        table = make_table(self.schedule, len(sharded.stages), count)
        hosts = Placement.spread(layout.workers * layout.replicas, networks[0].num_hosts)
        by_stage = np.array(replica_hosts(hosts, layout.workers), np.int64)[:, table.owner]
        return sharded.profiles(profile, table, by_stage, networks)

    @lru_cache(maxsize=256)  # noqa: B019
    def mixture(self, way: Way) -> list[tuple[float, Profile]]:
        """Return the kinds of step of a way, each with its share of all steps: with one exchange of replicas or another, or none."""
        profile, replicas = self.profile(way), way.layout.groups
        shards = way.layout.replicas // replicas
        if replicas == 1 or (shards > 1 and way.method == SAME):
            return [(1.0, profile)]
        stages = [
            sum_exchanges(
                [(count, exchange_of(way.method, shape, replicas)) for shape, count in stage.parameters.items()]
            )
            for stage in self.stages(way.layout)
        ]
        kinds = max(map(len, stages))
        found = []
        for kind in range(kinds):
            transfers = [stage[kind].transfers(number, replicas, shards) for number, stage in enumerate(stages)]
            work_s = [stage[kind].work / self.fleet.codec_bytes_per_s for stage in stages]
            costs: dict[str, Any] = {"transfers": np.concatenate(transfers), "method_s": np.array(work_s)}
            if way.overlap:  # a ring in place of the messages that are listed
                sizes = GRADIENT_BYTES * np.array([stage.num_parameters for stage in self.stages(way.layout)])
                costs |= {"gradient_bytes": sizes, "bucketed_bytes": sizes}
            found.append((stages[0][kind].share, replace(profile, **costs)))
        rest = 1.0 - sum(share for share, _ in found)
        return [*found, (rest, profile)] if rest > 1e-9 else found

    def compute_s(self, layout: Layout) -> float:
        """Return the seconds of a step in which a host computes, in the mean over hosts."""
        stages = self.stages(layout)
        flops = (4 if self.recompute else 3) * sum(stage.forward_flops for stage in stages)
        return self.num_microbatches(layout) * flops / (self.fleet.flops * self.efficiency) / layout.workers

    def memory_bytes(self, way: Way) -> float:
        """Return the memory of the fullest host."""
        stages, held = self.stages(way.layout), self._in_flight(way.layout)
        owner = self.schedule.workers(len(stages))
        totals = [0.0] * way.layout.workers
        for number, stage in enumerate(stages):
            saved = held[number] * stage.saved_bytes
            if self.recompute:  # inputs alone, and the block that is computed again
                saved = RECOMPUTED_SHARE * saved + stage.saved_bytes / max(self.model.num_layers // len(stages), 1)
            state = self._state_bytes(way.layout, stage) + self._method_bytes(way, stage)
            totals[owner[number]] += state + saved + stage.workspace_bytes
        return max(totals)

    def _state_bytes(self, layout: Layout, stage: StageCost) -> float:
        """Return the bytes of a stage's weights, gradients and moments; if sharded, of its shard and the units gathered at once."""
        if layout.sharding is None:
            return STATE_BYTES * stage.num_parameters
        sizes = [unit.num_parameters for unit in stage.units]
        ahead = layout.sharding.prefetch + 1
        gathered = max(sum(sizes[i : i + ahead]) for i in range(len(sizes)))
        made = max(sizes)
        if layout.sharding.reshard_after != "forward":
            gathered = sum(sizes)
        if layout.sharding.reshard_after == "step":
            made = sum(sizes)
        shard = STATE_BYTES * stage.num_parameters / layout.sharding.shards
        return shard + self._value_bytes * gathered + GRADIENT_BYTES * made

    @lru_cache(maxsize=64)  # noqa: B019
    def _in_flight(self, layout: Layout) -> tuple[int, ...]:
        """Return the most microbatches between forward and backward at each stage, found with `FEW_MICROBATCHES` a worker."""
        num_stages, count = self.num_stages(layout), self.num_microbatches(layout)
        few = min(count, FEW_MICROBATCHES * layout.workers)
        rows, owner = self.schedule.rows(num_stages, few), self.schedule.workers(num_stages)
        peaks = [
            peak_in_flight([each for each in rows[owner[stage]] if each.stage == stage]) for stage in range(num_stages)
        ]
        return tuple(count if peak == few else peak for peak in peaks)  # all of them, as GPipe has it

    def _method_bytes(self, way: Way, stage: StageCost) -> int:
        """Return the bytes that the method of replicas remembers for a stage."""
        if way.layout.replicas == 1 or way.method == SAME:
            return 0
        method, shards = _method(way.method), way.layout.replicas // way.layout.groups
        whole = sum(count * method.memory_bytes({"weight": shape}) for shape, count in stage.parameters.items())
        return int(whole) // shards

    def fits(self, way: Way) -> bool:
        """Return whether every host holds its part."""
        return self.memory_bytes(way) <= self.fleet.memory_bytes


@lru_cache(maxsize=256)
def _method(text: str) -> Any:
    return read_config("topics-gpt", ["num_replicas=2", f"replica_gradient={text}"]).replica_methods()[0]
