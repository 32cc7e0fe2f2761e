"""A training job on a fleet of hosts: the memory and step costs of its layouts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from raysim.config.identity import IDENTITY
from raysim.forecast.compute import check_split, counted_profile
from raysim.forecast.fleet import Fleet, HostLayout, Proposal
from raysim.forecast.link_costs import LinkCost, packets_profile
from raysim.forecast.packets import exchange_of, link_messages, method_of, sum_exchanges
from raysim.forecast.replica_costs import tied_transfers
from raysim.forecast.shapes import ModelShape, StageCost
from raysim.forecast.structure import RecipeModel
from raysim.network.collectives import Transfers
from raysim.network.profile import Profile
from raysim.network.sharding import Sharded, Units
from raysim.network.timed_step import TimedStep
from raysim.network.transport import DDP, Averaging, Transport
from raysim.notation import InputError
from raysim.schedules import Schedule
from raysim.schedules.arrays import OPS, make_table

STATE_BYTES = 16
"""For each parameter: weights and gradients in 16 bits; master weights and two Adam moments in 32."""
GRADIENT_BYTES = 4.0
"""For each parameter averaged between replicas: float32, as in raysim."""
UPDATE_BYTES = 28
"""GPU memory traffic of the optimiser for each parameter: it reads 16 and writes 12 or more."""
RECOMPUTED_SHARE = 2 / 34
"""Share of a block's saved tensors that is kept with recomputation: its input."""
ROW_VALUES = 1024
"""Values of a row when a shard, one flat tensor, is counted as a matrix."""


Model = ModelShape | RecipeModel


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
    """The dtype of activations and their gradients on links."""

    def num_microbatches(self, layout: HostLayout) -> int:
        """Return the number of microbatches of each replica; raises InputError unless they fill the batch."""
        count, rest = divmod(self.batch, layout.replicas * self.microbatch)
        if rest or not count:
            raise InputError(
                f"`--batch` must be a multiple of {layout.replicas * self.microbatch} ({layout.replicas} replicas, microbatches of "
                f"{self.microbatch}), but got {self.batch}."
            )
        return count

    def num_stages(self, layout: HostLayout) -> int:
        """Return the least number of stages that occupies every worker of a pipeline; raises InputError."""
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
    def stages(self, layout: HostLayout) -> tuple[StageCost, ...]:
        """Return the costs of a microbatch at each stage."""
        return tuple(self.model.stages(self.num_stages(layout), self.microbatch))

    @lru_cache(maxsize=256)  # noqa: B019
    def profile(self, way: Proposal) -> Profile:
        """Return the costs of a step without the exchange of replicas, but with the sums of tied parameters.

        Raises InputError if the schedule does not accept the number of microbatches.
        """
        stages = self.stages(way.layout)
        try:
            table = make_table(self.schedule, len(stages), self.num_microbatches(way.layout))
        except ValueError as error:
            raise InputError(f"{error} Choose another `--batch` or `--schedule`.") from None
        shares = [stage.weight_share for stage in stages] if table.splits_backward else []
        check_split(self.schedule, shares)
        memory = self.fleet.gpus * self.fleet.device.memory_bytes_per_s
        compute = counted_profile(
            [stage.forward_flops for stage in stages],
            shares,
            self.fleet.flops * self.efficiency,
            recompute=self.recompute,
            update_s=UPDATE_BYTES * np.array([stage.num_parameters for stage in stages]) / memory,
            source=f"{self.fleet!r} at {self.efficiency:g} of its datasheet's dense 16-bit peak",
        )
        links = [
            message._replace(boundary=boundary)
            for boundary, stage in enumerate(stages[:-1])
            for message in self._messages(way.forward, way.backward, stage.output, self.dtype)
        ]
        packets = packets_profile(links, len(stages), compute.compute_s.shape[2], first=False)
        profile = replace(compute.with_packets_of(packets), transfers=self.tied_transfers(way.layout))
        transport = replace(self.transport, averaging=DDP if way.overlap else Averaging())
        return profile.over(transport, way.layout.workers * way.layout.replicas)

    def _messages(self, *message: Any) -> tuple[LinkCost, LinkCost]:
        return link_messages(*message, self.fleet.codec_bytes_per_s)

    def tied_transfers(self, layout: HostLayout) -> Transfers:
        """Return the transfers that sum tied parameters' gradients over their stages; sharded replicas sum a shard each."""
        tied = self.model.tied_sizes(self.num_stages(layout))
        shards = layout.replicas // layout.groups
        return tied_transfers([(stages, size // shards) for stages, size in tied], layout.replicas)

    @lru_cache(maxsize=64)  # noqa: B019
    def sharded(self, way: Proposal) -> Sharded:
        """Return the units of a sharded layout: parameters gathered in the activations' dtype, gradients scattered in float32."""
        sharding, coded = way.layout.sharding, way.layout.groups == 1 and way.method != IDENTITY
        assert sharding is not None
        stages = []
        for stage in self.stages(way.layout):
            counts = np.array([unit.num_parameters for unit in stage.units], np.float64)
            scatter_bytes, codec_s = GRADIENT_BYTES * counts, np.zeros(len(counts))
            if coded:  # packets from a replica to each owner of a shard
                parts = {count: self._scattered(way.method, int(count), sharding.shards) for count in set(counts)}
                scatter_bytes, codec_s = np.array([parts[count] for count in counts]).T
            flops = sum(unit.forward_flops for unit in stage.units) or 1.0
            stages.append(
                Units(
                    share=tuple(unit.forward_flops / flops for unit in stage.units),
                    gather_bytes=tuple((self._value_bytes * counts).tolist()),
                    scatter_bytes=tuple(scatter_bytes.tolist()),
                    codec_s=tuple(codec_s.tolist()),
                )
            )
        return Sharded(sharding, tuple(stages), coded, sums_groups=way.method == IDENTITY)

    def _scattered(self, method: str, num_parameters: int, shards: int) -> tuple[float, float]:
        """Return a unit's coded gradient bytes over all shards, and the codec seconds of packets for other owners."""
        rows = num_parameters // shards // ROW_VALUES or 1
        packet, _ = self._messages(method, IDENTITY, (1, rows, ROW_VALUES), "float32")
        share = num_parameters / shards / (rows * ROW_VALUES)
        codec_s = (shards - 1) * share * (packet.encode_s + packet.decode_s)
        return shards * share * packet.wire_bytes, codec_s

    @property
    def _value_bytes(self) -> int:
        """Bytes of a gathered parameter."""
        return 4 if self.dtype == "float32" else 2

    @lru_cache(maxsize=256)  # noqa: B019
    def step(self, way: Proposal) -> TimedStep:
        """Return a way's step, ready to be simulated on any network."""
        kinds, lag, quiet = self._kinds(way), 0, len(self.profile(way).transfers)
        exchanging = sum(share for share, each in kinds if len(each.transfers) > quiet)
        if way.layout.groups > 1 and way.method != IDENTITY:
            lag = method_of(way.method).steps_under_way
        return TimedStep(
            kinds,
            self.schedule,
            self.num_microbatches(way.layout),
            way.layout.replicas,
            None if way.layout.sharding is None else self.sharded(way),
            averaging_delay=lag,
            interval=1 / exchanging if exchanging else 1.0,
        )

    def _kinds(self, way: Proposal) -> list[tuple[float, Profile]]:
        """Return a way's kinds of step by exchange of replicas, each with its share of all steps."""
        profile, replicas = self.profile(way), way.layout.groups
        shards = way.layout.replicas // replicas
        if replicas == 1 or (shards > 1 and way.method == IDENTITY):
            return [(1.0, profile)]
        stages = [
            sum_exchanges(
                [(count, exchange_of(way.method, shape, replicas)) for shape, count in stage.parameters.items()]
            )
            for stage in self.stages(way.layout)
        ]
        kinds = []
        for exchanges in zip(*stages, strict=True):  # of the same kind of step at all stages
            transfers = [each.transfers(stage, replicas, shards) for stage, each in enumerate(exchanges)]
            work_s = [each.work / self.fleet.codec_bytes_per_s for each in exchanges]
            costs: dict[str, Any] = {
                "transfers": np.concatenate([*transfers, profile.transfers]),
                "method_s": np.array(work_s),
            }
            if way.overlap:  # a ring replaces the listed messages
                sizes = GRADIENT_BYTES * np.array([stage.num_parameters for stage in self.stages(way.layout)])
                costs |= {"gradient_bytes": sizes, "bucketed_bytes": sizes}
            kinds.append((exchanges[0].share, replace(profile, **costs)))
        rest = 1.0 - sum(share for share, _ in kinds)
        return [*kinds, (rest, profile)] if rest > 1e-9 else kinds

    def memory_bytes(self, way: Proposal) -> float:
        """Return the memory of the fullest host."""
        stages = self.stages(way.layout)
        workers = self.schedule.workers(len(stages))
        totals = [0.0] * way.layout.workers
        for stage, held, worker in zip(stages, self.in_flight(way.layout), workers, strict=True):
            saved = held * stage.saved_bytes
            if self.recompute:  # the inputs, and the block being recomputed
                saved = RECOMPUTED_SHARE * saved + stage.saved_bytes / max(self.model.layers // len(stages), 1)
            state = self._state_bytes(way.layout, stage) + self._method_bytes(way, stage)
            totals[worker] += state + saved + stage.workspace_bytes
        return max(totals)

    def _state_bytes(self, layout: HostLayout, stage: StageCost) -> float:
        """Return the bytes of a stage's weights, gradients and moments; if sharded, of its shard and the gathered units."""
        if layout.sharding is None:
            return STATE_BYTES * stage.num_parameters
        sizes = [unit.num_parameters for unit in stage.units]
        ahead = layout.sharding.prefetch + 1
        gathered, made = max(sum(sizes[i : i + ahead]) for i in range(len(sizes))), max(sizes)
        if layout.sharding.reshard_after != "forward":
            gathered = sum(sizes)
        if layout.sharding.reshard_after == "step":
            made = sum(sizes)
        shard = STATE_BYTES * stage.num_parameters / layout.sharding.shards
        return shard + self._value_bytes * gathered + GRADIENT_BYTES * made

    @lru_cache(maxsize=8)  # noqa: B019
    def scheduled(self, schedule: Schedule | None) -> Job:
        """Return the job with another schedule; None keeps its own."""
        return self if schedule is None else replace(self, schedule=schedule)

    @lru_cache(maxsize=64)  # noqa: B019
    def in_flight(self, layout: HostLayout) -> tuple[int, ...]:
        """Return the largest number of microbatches in flight at each stage."""
        num_stages, count = self.num_stages(layout), self.num_microbatches(layout)
        table = make_table(self.schedule, num_stages, count)
        weights = table.op == OPS.index("W")
        split = np.zeros((num_stages, count), np.bool_)
        split[table.stage[weights], table.microbatch[weights]] = True
        ends = weights | ((table.op == OPS.index("B")) & ~split[table.stage, table.microbatch])
        change = (table.op == OPS.index("F")).astype(np.int64) - ends
        return tuple(int(np.cumsum(change[table.stage == stage]).max()) for stage in range(num_stages))

    def _method_bytes(self, way: Proposal, stage: StageCost) -> int:
        """Return the bytes of the replica method's memory for a stage."""
        if way.layout.replicas == 1 or way.method == IDENTITY:
            return 0
        method, shards = method_of(way.method), way.layout.replicas // way.layout.groups
        whole = sum(count * method.memory_bytes({"weight": shape}) for shape, count in stage.parameters.items())
        return int(whole) // shards
