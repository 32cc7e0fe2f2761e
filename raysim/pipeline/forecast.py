"""What a run that was never made would take: a profile from counted operations, real codecs and a datasheet or a recorded profile.

Nothing is trained. Operations, shapes and memory are counted on the model's structure, so that a model larger than this machine can be
forecast too; packets are made by the run's own compressors from seeded tensors of the boundaries' shapes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from raysim.compressors import AQSGD
from raysim.config import ConfigError, RunConfig, read_config
from raysim.network.devices import DEVICES
from raysim.network.exchange import tied_s
from raysim.network.memory import StageMemory
from raysim.network.network import Network
from raysim.network.placement import Placement
from raysim.network.profile import Profile
from raysim.network.schedule import Schedule
from raysim.network.simulate import simulate
from raysim.network.table import make_table
from raysim.network.timeline import Timeline
from raysim.network.transport import Transport, parse_transport
from raysim.notation import check_choice, check_integer, check_real
from raysim.pipeline.packets import LinkCost, ReplicaCost, link_costs, packets_profile, replica_costs
from raysim.pipeline.plan import stage_memories
from raysim.pipeline.replicas import TIED_TABLE, all_reduce_bytes
from raysim.workloads.data import DATASETS, load_data
from raysim.workloads.models import MODELS, build_model
from raysim.workloads.options import bind_options
from raysim.workloads.partition import Partition, partition
from raysim.workloads.splits import DataShape

CIFAR = {
    "cifar10": (DataShape((3, 32, 32), "float32", 10), 50_000),
    "cifar100": (DataShape((3, 32, 32), "float32", 100), 50_000),
}
WIKITEXT2 = (50_257, 2_391_884)  # tokens that GPT-2 knows, and that the training text has: as the tokeniser counts them
GPT2 = {"gpt2": (12, 768, 12), "gpt2-medium": (24, 1024, 16), "gpt2-large": (36, 1280, 20), "gpt2-xl": (48, 1600, 25)}


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
    memories: tuple[StageMemory, ...]
    """By stage, of one replica: as the plan of a real run has them."""
    capacity_bytes: int | None
    """The device's memory, where one is named."""
    links: tuple[LinkCost, ...]
    averages: tuple[ReplicaCost, ...]
    """By stage, of one replica; none where there is just one."""
    flops_forward: tuple[int, ...]
    """By stage, of one microbatch's forward."""
    tied: tuple[tuple[int, int, int], ...]
    """Parameters in two stages: both, and their number of values."""
    notes: tuple[str, ...]
    """What the figures assume, a sentence each."""

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.memories)

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return self.config.num_replicas

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
        total, fused = 0.0, self.config.fused_embedding
        for *stages, size in self.tied:
            owners = [self.owner[stage] for stage in stages]
            sent = all_reduce_bytes("sum", size, len(stages) * (self.num_replicas if fused else 1), TIED_TABLE)
            total += tied_s(network, hosts, self.num_replicas, owners, sent, 2, fused=fused)
        return total

    def step_s(self, network: Network, *, first: bool = False) -> float:
        """Return the seconds of a step, tied gradients among them."""
        return self.simulate(network, first=first).step_s + self.tied_s(network)

    def run_s(self, network: Network) -> float:
        """Return the seconds of all training steps, without evaluations and checkpoints."""
        steady_s = self.step_s(network)
        first_s = self.step_s(network, first=True) if self.first_steps else 0.0
        return self.first_steps * first_s + (self.num_steps - self.first_steps) * steady_s


def forecast(
    source: str | Path | RunConfig = "digits-cnn",
    *overrides: str,
    device: str | None = None,
    profile: str | Path | Profile | None = None,
    efficiency: float = 0.4,
    codec_bytes_per_s: float | None = None,
    transport: str = "ray",
) -> Forecast:
    """Return what a run would be on `device`, from its datasheet, or with the compute of `profile`, a file of `raysim profile`.

    `efficiency` is the share of the datasheet's 16-bit peak that training reaches: an assumption, not a measurement.
    Codecs are timed on this machine, unless `codec_bytes_per_s` says how fast the device packs, and again unpacks, dense bytes.
    `transport` carries the packets: "ray", "nccl" or "gloo".
    Raises ConfigError.

    >>> plan = forecast("digits-cnn", "forward=TopK(0.1)", device="T4")
    >>> from raysim.network.presets import parse_network
    >>> plan.step_s(parse_network("free")) < plan.step_s(parse_network("100mbps")) < plan.step_s(parse_network("8mbps"))
    True
    """
    try:
        config = source if isinstance(source, RunConfig) else read_config(source, overrides)
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
        return _forecast(config, device, recorded, efficiency, codec_bytes_per_s, parse_transport(transport))
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _forecast(
    config: RunConfig,
    device: str | None,
    recorded: Profile | None,
    efficiency: float,
    codec_bytes_per_s: float | None,
    transport: Transport,
) -> Forecast:
    notes: list[str] = []
    shape, num_samples = _data_of(config, notes)
    if num_samples < config.batch_size:
        raise ConfigError(
            f"`batch_size` must be at most the number of training samples ({num_samples}), but got {config.batch_size}."
        )
    model = _structure(config, shape, notes)
    size = config.microbatch_size
    cut = {"cuts": config.cuts} if config.cuts is not None else {"num_stages": config.stages}
    parts = partition(model, shape, batch=size, bottleneck=config.bottleneck, seed=config.seed, **cut)
    num_stages = len(parts.stages)
    schedule = config.parsed_schedule
    table = make_table(schedule, num_stages, config.num_microbatches)  # raises where they do not fit
    memories = stage_memories(config, parts, num_samples)

    if device is not None:
        steady = Profile.analytic(
            parts.flops_forward,
            device=device,
            efficiency=efficiency,
            wire_bytes=0.0,
            backward_factor=3.0 if config.recompute else 2.0,
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
        if recorded.num_replicas != 1:
            raise ConfigError(f"`profile` must be of one replica, but got {recorded.num_replicas}: record it anew.")
        steady = _with_loading(recorded).mean_microbatch()
        notes.append(
            f"Compute, update and overheads: the profile ({recorded.source}). Its microbatches must have {size} samples, as here."
        )

    links = link_costs(config, parts.boundary_shapes, codec_bytes_per_s, notes, named=device is not None)
    num_ops = steady.compute_s.shape[2]
    notes.append(f"Transport {transport}.")
    steady = replace(steady, transport=transport)
    steady = steady.with_packets_of(packets_profile(links, num_stages, num_ops, first=False))
    first = steady.with_packets_of(packets_profile(links, num_stages, num_ops, first=True))
    if int(table.op.max()) == 2 and num_ops == 2:
        share = 1 / 3 if config.recompute else 1 / 2  # what is recomputed is recomputed in the first part
        steady, first = steady.split_backward(share), first.split_backward(share)
        notes.append("Backward is cut in two parts, for inputs and for weights, that take as long as each other.")
    averages: list[ReplicaCost] = []
    if config.num_replicas > 1:
        averages = replica_costs(config, _averaged_shapes(config, parts), notes)
        averaging: dict[str, Any] = {
            "sent_bytes": np.array([cost.wire_bytes for cost in averages], np.float64),
            "rounds": np.array([cost.rounds for cost in averages], np.float64),
            "method_s": np.array([cost.method_s for cost in averages]),
        }
        steady, first = replace(steady, **averaging), replace(first, **averaging)
        notes.append(f"{config.num_replicas} replicas average their gradients once all pipelines are done.")
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
        config=config,
        schedule=schedule,
        steady=steady,
        first=first,
        first_steps=min(num_steps, steps_per_epoch * max(warmup, 1)) if differs else 0,
        num_steps=num_steps,
        memories=memories,
        capacity_bytes=DEVICES[device].memory_bytes if device is not None else None,
        links=links,
        averages=tuple(averages),
        flops_forward=parts.flops_forward,
        tied=tuple((one.stage, one.other_stage, names[one.stage][one.name].numel()) for one in parts.tied),
        notes=tuple(notes),
    )


def _averaged_shapes(config: RunConfig, parts: Partition) -> list[dict[str, tuple[int, ...]]]:
    """Return the shapes of the gradients that the replicas of each stage average; those of fused owners are summed apart."""
    fused = {end for one in parts.tied for end in ((one.stage, one.name), (one.other_stage, one.other_name))}
    return [
        {
            name: tuple(parameter.shape)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and not (config.fused_embedding and (stage, name) in fused)
        }
        for stage, module in enumerate(parts.stages)
    ]


def _with_loading(recorded: Profile) -> Profile:
    """Return the profile with what decoding took where no packet is taken, the reading of data, as part of compute."""
    loading = np.zeros_like(recorded.decode_s)
    loading[:, 0, 0], loading[:, -1, 1] = recorded.decode_s[:, 0, 0], recorded.decode_s[:, -1, 1]
    return replace(recorded, compute_s=recorded.compute_s + loading, decode_s=recorded.decode_s - loading)


def _data_of(config: RunConfig, notes: list[str]) -> tuple[DataShape, int]:
    """Return the shape and number of training samples; of the sets that come from the hub without fetching them."""
    name, options = config.data.name, config.data.options
    if name not in (*CIFAR, "wikitext2") or options.get("path") is not None:
        data = load_data(name, options, config.seed)
        return data.shape, len(data.train)
    options = bind_options("data", name, DATASETS[name], options)
    notes.append(f"Data: {name} by its published size, not read.")
    if name in CIFAR:
        shape, count = CIFAR[name]
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
