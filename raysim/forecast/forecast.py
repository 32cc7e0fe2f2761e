"""Forecast a run without training, from counted operations, real codecs, and a datasheet or recorded profile.

Operations, shapes and memory are counted on the model's structure, so the model may be larger than this machine. The run's own
compressors make packets from seeded tensors of the boundaries' shapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from raysim.codecs.codec import DTYPES
from raysim.config import ConfigError, RunConfig, read_config
from raysim.forecast.compute import EFFICIENCY, cuts_backward, datasheet_profile, recorded_profile
from raysim.forecast.link_costs import LinkCost, link_costs, packets_profile
from raysim.forecast.replica_costs import ReplicaCost, endings_of, replica_costs, tied_costs
from raysim.forecast.structure import data_of, structure_of
from raysim.network.costs import Expected, FleetCosts
from raysim.network.memory import StageMemory
from raysim.network.presets import CODEC_PASSES, DEVICES
from raysim.network.prices import averaging_words, bounds_with_model_error, mean_bounds
from raysim.network.profile import Profile
from raysim.network.simulate import Mixture
from raysim.network.timed_step import TimedStep
from raysim.network.timeline import Timeline
from raysim.network.topology import FREE, Network, Placement
from raysim.network.transport import Transport, calibrated_transport
from raysim.notation import check_choice, check_real
from raysim.pipeline.plan import TiedShapes, averaged_shapes, tied_owners, tied_shapes
from raysim.pipeline.prepare import check_names, task_of
from raysim.pipeline.stage_memory import stage_memories
from raysim.schedules.families import Schedule
from raysim.units import format_bytes
from raysim.values import BoundaryTensors
from raysim.workloads.partition import CutWithAlternative, Partition, partition
from raysim.workloads.splits import DataShape
from raysim.workloads.stage_costs import Shadow


@dataclass(frozen=True, eq=False)
class Forecast:
    """The predicted costs of a run, ready to be simulated on any network."""

    config: RunConfig
    schedule: Schedule
    steady: Profile
    first: Profile
    """Steps that visit samples for the first time; equal to `steady` unless a compressor treats first visits differently."""
    first_steps: int
    num_steps: int
    memories: tuple[StageMemory, ...]
    """By stage, of one replica: equal to the memories in the plan of a real run."""
    capacity_bytes: int | None
    """The device's memory, if one is named."""
    links: tuple[LinkCost, ...]
    averages: tuple[ReplicaCost, ...]
    """By stage and part, of one replica; empty with one replica."""
    endings: Mixture
    """Costs of the exchanges that end a step, with their shares of all steps; the first, with most bytes, is that of `steady`."""
    exchange_delay: int
    """Steps by which an exchange of replicas may lag before a step waits for it."""
    cut_choices: tuple[CutWithAlternative, ...]
    flops_forward: tuple[int, ...]
    """By stage, of one microbatch's forward."""
    tied: TiedShapes
    """Parameters shared by several stages: the stages and number of values of each."""
    boundaries: tuple[BoundaryTensors, ...]
    averaged: tuple[Mapping[str, tuple[int, ...]], ...]
    """By stage, the shapes of the gradients that replicas average."""
    codec_bytes_per_s: float | None
    """Dense bytes a second that codecs go over; None if they are timed on this machine."""
    notes: tuple[str, ...]
    """The assumptions behind the figures, as sentences."""
    placement: Placement | None = None
    """The host of every worker; by default see `raysim.network.simulate.simulate`."""

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.memories)

    @cached_property
    def owner(self) -> list[int]:
        """The worker of each stage."""
        return self.schedule.workers(self.num_stages)

    @property
    def num_workers(self) -> int:
        """Workers of one replica."""
        return max(self.owner) + 1

    def worker_bytes(self) -> list[int]:
        """Return the peak memory of every worker, summed over its stages."""
        totals = [0] * self.num_workers
        for memory, worker in zip(self.memories, self.owner, strict=True):
            totals[worker] += memory.total_bytes
        return totals

    def simulate(self, network: Network, *, ending: int = 0) -> Timeline:
        """Return the timeline of a steady step that waits for the exchange of one of `endings`."""
        return replace(self.timed(), averaging_delay=0).simulate(network, ending)

    def timed(self, *, first: bool = False) -> TimedStep:
        """Return a steady step, or one of first visits, with a kind for each of `endings`."""
        costs = self.first if first else self.steady
        return TimedStep(
            [(share, costs.with_exchange_of(each)) for share, each in self.endings],
            self.schedule,
            self.config.num_microbatches,
            self.config.num_replicas,
            averaging_delay=self.exchange_delay,
            interval=self.config.exchange_interval,
            placement=self.placement,
        )

    def step_s(self, network: Network, *, first: bool = False) -> float:
        """Return the mean seconds of a step over its endings; later steps may hide part of an exchange."""
        return self.timed(first=first).step_s(network)

    def step_bounds_s(self, network: Network) -> tuple[float, float] | None:
        """Return the 90 % interval of `step_s` from the spread of recorded steps; None with fewer than two.

        It covers variation of the machine and error of the network model; bytes are exact, and the network is taken as named.
        """
        if len(self.steady.paces) < 2:
            return None
        paces = mean_bounds(self.steady.paces)
        low, high = (replace(self, steady=self.steady.at_pace(pace)).step_s(network) for pace in paces)
        return bounds_with_model_error(self.step_s(network), (low, high), self.step_s(FREE))

    def expected(self, costs: FleetCosts, network: Network) -> Expected:
        """Return a mean step with the churn and money of `costs`."""
        return self.timed().expected(costs, network)

    def run_s(self, network: Network) -> float:
        """Return the seconds of all training steps, without evaluations and checkpoints."""
        steady_s = self.step_s(network)
        first_s = self.step_s(network, first=True) if self.first_steps else 0.0
        return self.first_steps * first_s + (self.num_steps - self.first_steps) * steady_s


Shadows = dict[int, Shadow]
"""A model on fake tensors, by samples in a microbatch."""


def forecast(
    source: str | Path | RunConfig = "digits-cnn",
    *overrides: str,
    device: str | None = None,
    profile: str | Path | Profile | None = None,
    efficiency: float = EFFICIENCY,
    codec_bytes_per_s: float | None = None,
    transport: str = "ray",
    averaging: str | None = None,
    shadows: Shadows | None = None,
) -> Forecast:
    """Forecast a run with compute from the datasheet of `device`, or from `profile`, a file written by `raysim profile`.

    `efficiency`: the assumed share of the datasheet's 16-bit peak that training reaches. Codec seconds are counted work divided
    by `codec_bytes_per_s`, by default the device's speed (see `raysim.network.presets`); with a recorded profile and no
    `codec_bytes_per_s`, codecs are timed on this machine. `transport`: "ray", "nccl" or "gloo". `averaging`: how replicas average
    over it, such as "ring/25MiB", by default the transport's way. `shadows`: the same mapping in all forecasts of a model counts each
    microbatch once. Raises ConfigError.

    >>> plan = forecast("digits-cnn", "forward=TopK(0.1)", device="T4")
    >>> from raysim.network.presets import parse_network
    >>> plan.step_s(parse_network("free")) < plan.step_s(parse_network("100mbps")) < plan.step_s(parse_network("8mbps"))
    True
    """
    config = source if isinstance(source, RunConfig) else read_config(source, overrides)
    try:
        check_real("efficiency", efficiency, 0, 1, open_low=True)
        if codec_bytes_per_s is not None:
            check_real("codec_bytes_per_s", codec_bytes_per_s, 0, math.inf, open_low=True)
        if (device is None) == (profile is None):
            raise ConfigError(
                f"Exactly one of `device` ({', '.join(DEVICES)}) and `profile` (a file written by `raysim profile`) must be given."
            )
        if device is not None:
            check_choice("device", device, DEVICES)
        recorded = Profile.load(profile) if isinstance(profile, (str, Path)) else profile
        over = calibrated_transport(transport, averaging)
        return _forecast(
            config, device, recorded, efficiency, codec_bytes_per_s, over, {} if shadows is None else shadows
        )
    except ValueError as error:
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from None


def _forecast(
    config: RunConfig,
    device: str | None,
    recorded: Profile | None,
    efficiency: float,
    codec_bytes_per_s: float | None,
    transport: Transport,
    shadows: Shadows,
) -> Forecast:
    notes: list[str] = []
    shape, num_samples = data_of(config, notes)
    if num_samples < config.batch_size:
        raise ConfigError(
            f"`batch_size` must be at most the number of training samples ({num_samples}), but got {config.batch_size}."
        )
    parts = _parts(config, shape, notes, shadows)
    num_stages = len(parts.stages)
    cut_backward = cuts_backward(config, num_stages)  # raises if the schedule does not fit
    memories = stage_memories(config, parts, num_samples)
    weight_shares = parts.weight_shares(DTYPES[config.dtype]) if cut_backward and device is not None else ()
    compute = _compute(
        config, device, recorded, efficiency, parts.flops_forward, weight_shares, parts.boundaries, notes
    )
    codec_bytes_per_s = _codec_speed(device, codec_bytes_per_s, notes)
    links = link_costs(config, parts.boundaries, codec_bytes_per_s, notes)
    notes.append(f"Transport {transport}.")
    if config.compress_from:
        notes.append(
            f"Priced are the compressed steps, from `compress_from` = {config.compress_from} on; those before are dense, and count as "
            "compressed in the seconds of the run."
        )
    num_workers = config.num_replicas * len(config.executed_schedule.rows(num_stages, config.num_microbatches))
    compute, num_ops = compute.over(transport, num_workers), compute.compute_s.shape[2]
    notes += _schedule_notes(config, weight_shares)
    averaged = _averaged(config, parts)
    averages = replica_costs(config, averaged, codec_bytes_per_s, notes) if config.num_replicas > 1 else []
    sums, tied_s = tied_costs(config, tied_shapes(parts), codec_bytes_per_s)
    compute = replace(compute, update_s=compute.update_s + tied_s)
    endings = endings_of(config, averages, sums)
    steady, first = (
        compute.with_packets_of(packets_profile(links, num_stages, num_ops, first=visit)).with_exchange_of(
            endings[0][1]
        )
        for visit in (False, True)
    )
    if averages:
        notes.append(f"{config.num_replicas} replicas average their gradients {averaging_words(steady)}.")
    steps_per_epoch = num_samples // config.batch_size
    num_steps = config.steps or (config.epochs or 0) * steps_per_epoch
    _check_steps(config, num_steps)
    first_epochs = max(_warmup_epochs(config, parts, num_samples, notes), 1)
    if all(link.first_bytes == link.wire_bytes for link in links):
        first_epochs = 0
    return Forecast(
        config=config,
        schedule=config.executed_schedule,
        steady=steady,
        first=first,
        first_steps=min(num_steps, steps_per_epoch * first_epochs),
        num_steps=num_steps,
        memories=memories,
        capacity_bytes=DEVICES[device].memory_bytes if device is not None else None,
        links=links,
        averages=tuple(averages),
        endings=endings,
        exchange_delay=config.exchange_delay,
        cut_choices=parts.cut_choices,
        flops_forward=parts.flops_forward,
        tied=tied_shapes(parts),
        boundaries=tuple(parts.boundaries),
        averaged=averaged,
        codec_bytes_per_s=codec_bytes_per_s,
        notes=tuple(notes),
    )


def _parts(config: RunConfig, shape: DataShape, notes: list[str], shadows: Shadows) -> Partition:
    """Return the structure of the model, cut into the stages of a run."""
    parts = partition(
        structure_of(config, shape, notes),
        shape,
        num_stages=config.stages if config.cuts is None else None,
        cuts=config.cuts,
        batch=config.microbatch_size,
        bottleneck=config.bottleneck,
        bottleneck_form=config.bottleneck_form,
        seed=config.seed,
        loss=task_of(config, shape).loss,
        shadow=shadows.get(config.microbatch_size),
    )
    if config.bottleneck is None:  # which changes the model
        shadows[config.microbatch_size] = parts.shadow
    check_names(config, parts.boundaries)
    return parts


def _averaged(config: RunConfig, parts: Partition) -> tuple[Mapping[str, tuple[int, ...]], ...]:
    """Return the shapes of the gradients that replicas average, by stage."""
    owners = tied_owners(parts)
    return tuple(averaged_shapes(stage, module, config, owners) for stage, module in enumerate(parts.stages))


def _warmup_epochs(config: RunConfig, parts: Partition, num_samples: int, notes: list[str]) -> int:
    """Return the epochs until all links compress; add a note on each method that forgets samples."""
    replicas = config.compressors([boundary.shapes for boundary in parts.boundaries])
    methods = {method for links in replicas for pairs in links for pair in pairs.values() for method in pair}
    notes += [
        f"{method} forgets some of {num_samples} samples: that their visits are sent in full again is not in the steady step."
        for method in sorted({repr(method) for method in methods if method.forgets(num_samples)})
    ]
    return max((method.warmup_epochs for method in methods), default=0)


def _check_steps(config: RunConfig, num_steps: int) -> None:
    """Raise ConfigError if a stage's replica method needs more steps."""
    for stage, averaging in enumerate(config.replica_methods()):
        try:
            averaging.check_steps(num_steps)
        except ValueError as error:
            raise ConfigError(f"`replica_gradient` at stage {stage}: {error}") from None


def _schedule_notes(config: RunConfig, weight_shares: Sequence[float]) -> Iterator[str]:
    if weight_shares:
        later = [f"{share:.0%}" for share in weight_shares[1:]] or ["100%"]
        between = later[0] if len({*later}) == 1 else f"{min(later)} to {max(later)}"
        yield f"Weight gradients take {between} of a backward, counted in operations; all of it at the first stage."
    if config.weights.between_steps != "flush":
        yield (
            f"{config.weights!r}: a step is one of many without a flush, from the end of the step before to its own; its parts "
            "by worker are those of that time."
        )


def _compute(
    config: RunConfig,
    device: str | None,
    recorded: Profile | None,
    efficiency: float,
    flops_forward: Sequence[int],
    weight_shares: Sequence[float],
    boundaries: Sequence[BoundaryTensors],
    notes: list[str],
) -> Profile:
    """Return the compute of a step, from a datasheet or a recorded profile."""
    if device is not None:
        notes.append(
            f"Compute: counted operations at {efficiency:g} of the {device}'s dense 16-bit peak by its datasheet, whatever `dtype` is. "
            "The optimiser's update is not counted, nor the host's time to launch kernels, which bounds small microbatches: "
            "on an H100, 11 ms for nine blocks of width 576 at 256 tokens, 0.05 ms by their operations. `raysim profile` measures it."
        )
        return datasheet_profile(config, device, flops_forward, weight_shares, efficiency)
    assert recorded is not None
    bounds = " The interval is that of its mean over recorded steps." if len(recorded.paces) > 1 else ""
    notes.append(f"Compute and update: the profile ({recorded.source or 'made by hand'}).{bounds}")
    return recorded_profile(config, recorded, boundaries)


def _codec_speed(device: str | None, given: float | None, notes: list[str]) -> float | None:
    """Return the codecs' bytes a second: as given, else from the datasheet; None if codecs are timed here."""
    if given is not None:
        notes.append(f"Codecs: {format_bytes(given)} a second of the dense tensors that they go over, as given.")
        return given
    if device is None:
        return None
    speed = DEVICES[device].codec_bytes_per_s
    notes.append(
        f"Codecs: {format_bytes(speed)} a second of the dense tensors that they go over, 1/{CODEC_PASSES} of the "
        f"{device}'s memory bandwidth by its datasheet. `--codec-speed` sets another."
    )
    return speed
