"""What a run that was never made would take: a profile from counted operations, real codecs and a datasheet or a recorded profile.

Nothing is trained. Operations, shapes and memory are counted on the model's structure, so that a model larger than this machine can be
forecast too; packets are made by the run's own compressors from seeded tensors of the boundaries' shapes.
"""

from __future__ import annotations

import dataclasses
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from raysim.codecs import TopK, derive_key, kernels
from raysim.codecs.packet import DTYPES
from raysim.compressors import AQSGD, Compressor, Context, State
from raysim.config import ConfigError, RunConfig, apply_override, read_config, read_source
from raysim.network.devices import DEVICES
from raysim.network.exchange import exchange_s
from raysim.network.memory import StageMemory, format_bytes, in_flight, packets_in_flight
from raysim.network.network import Network
from raysim.network.placement import Placement
from raysim.network.profile import Profile, mean_profile, profiles_from_actions
from raysim.network.schedule import SIMULATED, Schedule, calls, parse_schedule
from raysim.network.simulate import simulate
from raysim.network.table import make_table
from raysim.network.timeline import Timeline
from raysim.notation import check_choice, check_integer, check_real
from raysim.pipeline.engine import InlineEngine, host_memory_bytes
from raysim.pipeline.plan import Workload, prepare, stage_memories
from raysim.workloads.data import DATASETS, load_data
from raysim.workloads.models import MODELS, build_model
from raysim.workloads.options import bind_options
from raysim.workloads.partition import Partition, partition
from raysim.workloads.splits import DataShape

T = TypeVar("T")

LATE = 2**20  # an epoch after any warm-up
VISITS = 4  # of one message: the first, and what is timed after it
WARMUP_STEPS = 2  # of a profile: what loads and compiles, and is not recorded
CIFAR10 = (DataShape((3, 32, 32), "float32", 10), 50_000)
WIKITEXT2 = (50_257, 2_391_884)  # tokens that GPT-2 knows, and that the training text has: as the tokeniser counts them
GPT2 = {"gpt2": (12, 768, 12), "gpt2-medium": (24, 1024, 16), "gpt2-large": (36, 1280, 20), "gpt2-xl": (48, 1600, 25)}


class LinkCost(NamedTuple):
    """What a message costs on one direction of one boundary: at its first visit, and when visited again."""

    boundary: int
    direction: str
    codec: str
    dense_bytes: int
    first_bytes: int
    wire_bytes: int
    encode_s: float
    decode_s: float
    first_encode_s: float
    first_decode_s: float


@dataclass(frozen=True, eq=False)
class Forecast:
    """A run as it would be: ready to be simulated on any network."""

    config: RunConfig
    schedule: Schedule
    steady: Profile
    first: Profile
    """Of steps in which samples are visited for the first time: the same where compressors do not mind."""
    first_steps: int
    num_steps: int
    num_replicas: int
    memories: tuple[StageMemory, ...]
    """By stage, of one replica: as the plan of a real run has them."""
    capacity_bytes: int | None
    """The device's memory, where one is named."""
    links: tuple[LinkCost, ...]
    flops_forward: tuple[int, ...]
    """By stage, of one microbatch's forward."""
    tied: tuple[tuple[int, int, int], ...]
    """Parameters in two stages: both, and the bytes of the gradient that each sends to the other."""
    notes: tuple[str, ...]
    """What the figures assume, a sentence each."""

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
        """Return the peak memory of every worker, all its stages together."""
        totals = [0] * self.num_workers
        for memory, worker in zip(self.memories, self.owner, strict=True):
            totals[worker] += memory.total_bytes
        return totals

    def simulate(self, network: Network, *, first: bool = False, seed: int = 0) -> Timeline:
        """Return the timeline of a steady step, or of one of first visits; tied gradients are apart, in `tied_s`."""
        try:
            return simulate(
                self.schedule,
                self.first if first else self.steady,
                network,
                num_microbatches=self.config.num_microbatches,
                num_replicas=self.num_replicas,
                seed=seed,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def tied_s(self, network: Network) -> float:
        """Return the seconds in which owners of tied parameters exchange their gradients, at the step's end."""
        hosts = Placement.spread(self.num_replicas * self.num_workers, network.num_hosts).hosts
        return sum(exchange_s(network, [hosts[self.owner[stage]] for stage in ends], size) for *ends, size in self.tied)

    def step_s(self, network: Network, *, first: bool = False) -> float:
        """Return the seconds of a step, tied gradients among them."""
        return self.simulate(network, first=first).step_s + self.tied_s(network)

    def run_s(self, network: Network) -> float:
        """Return the seconds of all training steps, without evaluations and checkpoints."""
        steady_s = self.step_s(network)
        first_s = self.step_s(network, first=True) if self.first_steps else 0.0
        return self.first_steps * first_s + (self.num_steps - self.first_steps) * steady_s


def read_forecast(source: str | Path, overrides: Iterable[str] = ()) -> tuple[RunConfig, Schedule]:
    """Return a configuration as `raysim train` reads it, and its schedule, which may be one that is only simulated.

    >>> read_forecast("digits-cnn", ["schedule=ZBH1"])[1]
    ZBH1
    """
    text: object = read_source(source)[1].get("schedule", RunConfig.model_fields["schedule"].default)
    others = []
    for override in overrides:
        if override.partition("=")[0].strip() == "schedule":
            changed: dict[str, object] = {}
            apply_override(changed, override)
            text = changed["schedule"]
        else:
            others.append(override)
    config = read_config(source, [*others, "schedule=1F1B"])
    try:
        return config, parse_schedule(text, SIMULATED)  # type: ignore[arg-type]  # which checks that it is text
    except ValueError as error:
        raise ConfigError(f"`schedule`: {error}") from None


def forecast(
    source: str | Path | RunConfig = "digits-cnn",
    *overrides: str,
    device: str | None = None,
    profile: str | Path | Profile | None = None,
    efficiency: float = 0.4,
    codec_bytes_per_s: float | None = None,
    num_replicas: int = 1,
) -> Forecast:
    """Return what a run would be on `device`, from its datasheet, or with the compute of `profile`, a file of `raysim profile`.

    `efficiency` is the share of the datasheet's 16-bit peak that training reaches: an assumption, not a measurement.
    Codecs are timed on this machine, unless `codec_bytes_per_s` says how fast the device packs, and again unpacks, dense bytes.
    `num_replicas` pipelines each run the configuration's batch and average dense gradients by a ring. Raises ConfigError.

    >>> plan = forecast("digits-cnn", "forward=TopK(0.1)", device="T4")
    >>> from raysim.network.presets import parse_network
    >>> plan.step_s(parse_network("free")) < plan.step_s(parse_network("100mbps")) < plan.step_s(parse_network("8mbps"))
    True
    """
    try:
        if isinstance(source, RunConfig):
            config, schedule = source, source.parsed_schedule
        else:
            config, schedule = read_forecast(source, overrides)
        check_integer("num_replicas", num_replicas, 1)
        check_real("efficiency", efficiency, 0, 1, open_low=True)
        if codec_bytes_per_s is not None:
            check_real("codec_bytes_per_s", codec_bytes_per_s, 0, math.inf, open_low=True)
        if (device is None) == (profile is None):
            raise ConfigError(
                f"Just one of `device` ({', '.join(DEVICES)}) and `profile` (a file of `raysim profile`) must be given."
            )
        if device is not None:
            check_choice("device", device, DEVICES)
        recorded = Profile.load(profile) if isinstance(profile, (str, Path)) else profile
        return _forecast(config, schedule, device, recorded, efficiency, codec_bytes_per_s, num_replicas)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _forecast(
    config: RunConfig,
    schedule: Schedule,
    device: str | None,
    recorded: Profile | None,
    efficiency: float,
    codec_bytes_per_s: float | None,
    num_replicas: int,
) -> Forecast:
    notes: list[str] = []
    shape, num_samples = _data_of(config, notes)
    if num_samples < config.batch_size:
        raise ConfigError(
            f"`batch_size` must be at most the number of training samples ({num_samples}), but got {config.batch_size}."
        )
    model = _structure(config, shape, notes)
    size = config.batch_size // config.num_microbatches
    cut = {"cuts": config.cuts} if config.cuts is not None else {"num_stages": config.stages}
    parts = partition(model, shape, batch=size, bottleneck=config.bottleneck, seed=config.seed, **cut)
    num_stages = len(parts.stages)
    table = make_table(schedule, num_stages, config.num_microbatches)  # raises where they do not fit
    memories = _memories(config, schedule, parts, num_samples)
    parameters = np.array(parts.num_parameters, np.float64)

    if device is not None:
        steady = Profile.analytic(
            parts.flops_forward,
            device=device,
            efficiency=efficiency,
            wire_bytes=0.0,
            backward_factor=3.0 if config.recompute else 2.0,
            gradient_bytes=4 * parameters,
        )
        notes.append(
            f"Compute: counted operations at {efficiency:g} of the {device}'s dense 16-bit peak by its datasheet, whatever `dtype` is. "
            "Host overheads and the optimiser's update are not counted."
        )
    else:
        assert recorded is not None
        if recorded.num_stages != num_stages:
            raise ConfigError(
                f"`num_stages` must be that of the profile ({recorded.num_stages}), but got {num_stages}."
            )
        if recorded.compute_s.shape[2] != 2 or recorded.num_replicas != 1:
            raise ConfigError(
                "`profile` must hold forwards and joint backwards of one replica, but got others: record it anew."
            )
        steady = replace(_with_loading(recorded).mean_microbatch(), gradient_bytes=4 * parameters)
        notes.append(
            f"Compute, update and overheads: the profile ({recorded.source}). Its microbatches must have {size} samples, as here."
        )

    links = _link_costs(config, parts.boundary_shapes, codec_bytes_per_s, notes, named=device is not None)
    steady = steady.with_packets_of(_packets(links, num_stages, first=False))
    first = steady.with_packets_of(_packets(links, num_stages, first=True))
    if int(table.op.max()) == 2:
        steady, first = steady.split_backward(), first.split_backward()
        notes.append("Backward is cut into equal halves, for the inputs and for the weights.")
    if num_replicas > 1:
        notes.append(
            f"{num_replicas} replicas, each with the whole `batch_size`, average float32 gradients by a ring once the pipeline is done."
        )
    steps_per_epoch = num_samples // config.batch_size
    num_steps = config.steps or (config.epochs or 0) * steps_per_epoch
    warmup = max((m.warmup for pair in config.compressors() for m in pair if isinstance(m, AQSGD)), default=0)
    differs = any(link.first_bytes != link.wire_bytes for link in links)
    forgetful = {
        repr(method)
        for pair in config.compressors()
        for method in pair
        if isinstance(method, AQSGD) and method.key == "sample" and (method.capacity or num_samples) < num_samples
    }
    notes += [
        f"{method} forgets some of {num_samples} samples: that their visits are sent in full again is not in the steady step."
        for method in sorted(forgetful)
    ]
    names = [dict(module.named_parameters()) for module in parts.stages]
    return Forecast(
        config=config.model_copy(update={"schedule": repr(schedule)}),
        schedule=schedule,
        steady=steady,
        first=first,
        first_steps=min(num_steps, steps_per_epoch * max(warmup, 1)) if differs else 0,
        num_steps=num_steps,
        num_replicas=num_replicas,
        memories=memories,
        capacity_bytes=DEVICES[device].memory_bytes if device is not None else None,
        links=links,
        flops_forward=parts.flops_forward,
        tied=tuple((one.stage, one.other_stage, 4 * names[one.stage][one.name].numel()) for one in parts.tied),
        notes=tuple(notes),
    )


def _with_loading(recorded: Profile) -> Profile:
    """Return the profile with what decoding took where no packet is taken, the reading of data, as part of compute."""
    loading = np.zeros_like(recorded.decode_s)
    loading[:, 0, 0], loading[:, -1, 1] = recorded.decode_s[:, 0, 0], recorded.decode_s[:, -1, 1]
    return replace(recorded, compute_s=recorded.compute_s + loading, decode_s=recorded.decode_s - loading)


def _memories(config: RunConfig, schedule: Schedule, parts: Partition, num_samples: int) -> tuple[StageMemory, ...]:
    """Return what the plan of a real run counts, under a schedule that may be one that is only simulated."""
    counts = in_flight(schedule, len(parts.stages), config.num_microbatches)
    packets = packets_in_flight(counts)
    planned = stage_memories(config, parts, num_samples)
    return tuple(
        dataclasses.replace(memory, in_flight=count, packets=waiting)
        for memory, count, waiting in zip(planned, counts, packets, strict=True)
    )


def _data_of(config: RunConfig, notes: list[str]) -> tuple[DataShape, int]:
    """Return the shape and number of training samples; of the sets that come from the hub without fetching them."""
    name, options = config.data.name, config.data.options
    if name not in ("cifar10", "wikitext2") or options.get("path") is not None:
        data = load_data(name, options, config.seed)
        return data.shape, len(data.train)
    options = bind_options("data", name, DATASETS[name], options)
    notes.append(f"Data: {name} by its published size, not read.")
    if name == "cifar10":
        shape, count = CIFAR10
    else:
        length = check_integer("data.length", options.get("length", 1024), 1)
        shape, count = DataShape((length,), "int64", WIKITEXT2[0]), WIKITEXT2[1] // length
    wanted = options.get("train_samples")
    return shape, count if wanted is None else check_integer("data.train_samples", wanted, 1, count)


def _structure(config: RunConfig, shape: DataShape, notes: list[str]) -> nn.Sequential:
    """Return the model with parameters that have a shape and take no memory; models of the user's own are built for real."""
    name, options = config.model.name, config.model.options
    if name not in MODELS:
        return build_model(name, options, shape, config.seed)
    arguments = bind_options("model", name, MODELS[name], options)
    if name == "gpt2":
        path = str(arguments.get("path", "gpt2"))
        if path not in GPT2 or Path(path).exists():
            return build_model(name, options, shape, config.seed)
        notes.append(f"Model: {path} by its published size, its weights not read.")
        blocks, width, heads = GPT2[path]
        name, arguments = (
            "gpt",
            {"num_blocks": blocks, "width": width, "num_heads": heads, "tied": True, "dropout": 0.1},
        )
    with torch.device("meta"):
        model = MODELS[name](shape=shape, **arguments)
    return _hollow(model)


def _hollow(model: nn.Sequential) -> nn.Sequential:
    """Put parameters of one number each, seen as if of their whole shape, in place of those that have no memory at all.

    Counting works on a CPU's tensors, whose kernels save what will really be saved; these are copied as they are, not spelled out.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                hollow = nn.Parameter(torch.zeros((), dtype=parameter.dtype).expand(parameter.shape))
                hollow.__deepcopy__ = partial(_itself, hollow)  # type: ignore[method-assign]
                made[id(parameter)] = hollow
            module.register_parameter(name, made[id(parameter)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, torch.zeros(buffer.shape, dtype=buffer.dtype))
    return model


def _itself(parameter: nn.Parameter, _memo: object) -> nn.Parameter:
    return parameter


def _link_costs(
    config: RunConfig,
    shapes: Sequence[tuple[int, ...]],
    codec_bytes_per_s: float | None,
    notes: list[str],
    *,
    named: bool,
) -> tuple[LinkCost, ...]:
    """Return what messages cost on every link: encoded and decoded by the real compressors, on this machine."""
    dtype = DTYPES[config.dtype]
    largest = max((math.prod(shape) * dtype.itemsize for shape in shapes), default=0)
    if 8 * largest > host_memory_bytes():
        raise ConfigError(
            f"A message must leave this machine's memory ({format_bytes(host_memory_bytes())}) room to encode it, but has "
            f"{format_bytes(largest)}. Use more microbatches."
        )
    device = "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"
    before = torch.get_num_threads()
    torch.set_num_threads(config.threads_per_stage)
    measured: dict[tuple[str, tuple[int, ...]], list[LinkCost]] = {}
    links: list[LinkCost] = []
    try:
        kernels.warm()
        for boundary, (methods, shape) in enumerate(zip(config.compressors(), shapes, strict=True)):
            key = repr(methods), tuple(shape)
            if key not in measured:
                measured[key] = _measure(methods, tuple(shape), dtype, device, config.seed)
            links += [link._replace(boundary=boundary) for link in measured[key]]
    finally:
        torch.set_num_threads(before)
    if codec_bytes_per_s is not None:
        links = [_at_speed(link, link.dense_bytes / codec_bytes_per_s) for link in links]
        speed = f"{format_bytes(codec_bytes_per_s)}/s of dense bytes, as given"
    else:
        where = (
            torch.cuda.get_device_name()
            if device == "cuda"
            else f"{config.threads_per_stage} thread(s) of this machine's CPU"
        )
        speed = f"measured on {where}" + ("; `--codec-speed` says how fast the device is" if named else "")
    notes.append(f"Packets: made by the compressors themselves of seeded normal tensors. Codec seconds: {speed}.")
    return tuple(links)


def _at_speed(link: LinkCost, seconds: float) -> LinkCost:
    return link._replace(encode_s=seconds, decode_s=seconds, first_encode_s=seconds, first_decode_s=seconds)


def _measure(
    methods: Sequence[Compressor], shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int
) -> list[LinkCost]:
    """Return the costs of both directions of one boundary; gradients may need to know what the activations kept."""
    costs = []
    support = None
    for direction, method in zip(("forward", "backward"), methods, strict=True):
        generator = torch.Generator().manual_seed(derive_key(seed, "forecast", direction) % 2**63)
        x = torch.randn(shape, generator=generator).to(device, dtype)
        sender: State = {}
        receiver: State = {}
        visits = []
        for visit in range(VISITS + 1):
            if visit == 1:  # that one only warmed up
                sender, receiver = {}, {}
            context = Context(
                direction=direction,
                boundary=0,
                step=visit,
                epoch=0 if visit <= 1 else LATE,
                microbatch=0,
                sample_ids=tuple(range(shape[0])),
                key=derive_key(seed, "forecast", direction, visit),
                support=support,
            )
            moved = x + 0.1 * torch.roll(x, visit)  # a later visit finds the activation changed
            encode_s, (packet, changes) = _timed(partial(method.encode, moved, sender, context), device)
            method.commit(sender, changes)
            decode_s, (_, changes) = _timed(partial(method.decode, packet, receiver, context, device), device)
            method.commit(receiver, changes)
            visits.append((packet.wire_bytes, encode_s, decode_s))
        if direction == "forward" and isinstance(method.codec, TopK):
            support = method.codec.support(packet, torch.device(device))
        (first_bytes, first_encode_s, first_decode_s), later = visits[1], visits[2:]
        if first_bytes == later[-1][0]:
            later = visits[1:]
            first_encode_s, first_decode_s = (statistics.median(visit[i] for visit in later) for i in (1, 2))
        costs.append(
            LinkCost(
                boundary=0,
                direction=direction,
                codec=repr(method),
                dense_bytes=x.numel() * dtype.itemsize,
                first_bytes=first_bytes,
                wire_bytes=later[-1][0],
                encode_s=statistics.median(visit[1] for visit in later),
                decode_s=statistics.median(visit[2] for visit in later),
                first_encode_s=first_encode_s,
                first_decode_s=first_decode_s,
            )
        )
    return costs


def _timed(run: Callable[[], T], device: str) -> tuple[float, T]:
    start = time.perf_counter()
    result = run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def _packets(links: Sequence[LinkCost], num_stages: int, *, first: bool) -> Profile:
    """Return a profile of packets and codec seconds alone."""
    wire_bytes, dense_bytes, encode_s, decode_s = (np.zeros((1, num_stages, 2, 1)) for _ in range(4))
    for link in links:
        op = 0 if link.direction == "forward" else 1
        source, target = (link.boundary, link.boundary + 1) if op == 0 else (link.boundary + 1, link.boundary)
        wire_bytes[0, source, op] = link.first_bytes if first else link.wire_bytes
        dense_bytes[0, source, op] = link.dense_bytes
        encode_s[0, source, op] = link.first_encode_s if first else link.encode_s
        decode_s[0, target, op] = link.first_decode_s if first else link.decode_s
    return Profile(
        compute_s=np.zeros((1, num_stages, 2, 1)),
        wire_bytes=wire_bytes,
        dense_bytes=dense_bytes,
        encode_s=encode_s,
        decode_s=decode_s,
    )


def record_profile(config: RunConfig, *, num_steps: int = 5) -> Profile:
    """Return what actions cost on this machine: a short real run in this process, one action at a time.

    `num_steps` are recorded, each after one that is not. Stages have the machine to themselves, one after another, so what
    Ray needs for a packet is not in it; what a step took outside of its actions is the optimiser's, by the number of parameters.
    """
    if num_steps < 1:
        raise ConfigError(f"`num_steps` must be an integer of at least 1, but got {num_steps}.")
    total = WARMUP_STEPS + 2 * num_steps
    workload = prepare(config.model_copy(update={"steps": total, "epochs": None, "profile_every_steps": 2}))
    engine = InlineEngine(workload)
    engine.check()
    engine.start()
    columns: dict[str, list[object]] = {}
    outside = []
    spare_s = 0.0
    try:
        for step in range(total):
            before = time.perf_counter()
            reports = engine.step(step)
            seconds = time.perf_counter() - before
            actions = [action for report in reports for action in report.actions]
            if step < WARMUP_STEPS or not actions:
                continue
            outside.append(seconds - (max(a.end_s for a in actions) - min(a.start_s for a in actions)))
            for action in actions:
                row = action._asdict() | {"step": step, "replica": 0, "inlined": None}
                spare_s += action.end_s - action.start_s - action.decode_s - action.compute_wall_s - action.encode_s
                for name, value in row.items():
                    columns.setdefault(name, []).append(value)
    finally:
        engine.close()
    num_calls = sum(len(calls(row, workload.plan.num_stages)) for row in workload.plan.rows)
    profiles = profiles_from_actions({name: np.array(values) for name, values in columns.items()})
    return replace(
        mean_profile(list(profiles.values())),
        update_s=_updates_s(workload, statistics.median(outside)),
        call_s=max(spare_s / len(profiles) / num_calls, 0.0),
        source=_source(config, workload, len(profiles)),
    )


def _updates_s(workload: Workload, outside_s: float) -> NDArray[np.float64]:
    """Return the seconds of every stage's update: shares of what a step took outside of its actions."""
    sizes = [sum(parameter.numel() for parameter in module.parameters()) for module in workload.modules]
    return max(outside_s, 0.0) * np.array(sizes, np.float64) / max(sum(sizes), 1)


def _source(config: RunConfig, workload: Workload, num_steps: int) -> str:
    size = config.batch_size // config.num_microbatches
    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    where = torch.cuda.get_device_name() if on_gpu else f"{config.threads_per_stage} thread(s) of {platform.machine()}"
    return (
        f"raysim profile of {config.name} on {where}, host {platform.node()}: {workload.plan.num_stages} stages, "
        f"microbatches of {size} samples, mean of {num_steps} steps"
    )
