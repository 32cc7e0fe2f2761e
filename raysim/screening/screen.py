"""A screen: every candidate of links and of replica gradients, measured on a model's own weights and data, without training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from raysim.config import ConfigError, RunConfig
from raysim.config.identity import DENSE, IDENTITY, Setting
from raysim.forecast.compute import check_split
from raysim.limits import process_memory
from raysim.network.topology import Network
from raysim.pipeline.plan import Plan
from raysim.pipeline.prepare import Workload, prepare
from raysim.pipeline.state import under, unpack_tensors
from raysim.screening import candidates
from raysim.screening.bench import Bench, Measurements, memory_error, screen_memory
from raysim.screening.passes import Passes, TensorFacts
from raysim.screening.prices import Prices, measured_profile
from raysim.screening.ray_bench import RayBench, bench_actors
from raysim.screening.verdicts import WORTH, verdict
from raysim.training.branch import find_parent
from raysim.training.start import check_start
from raysim.units import format_bytes, format_seconds
from raysim.workloads.task import chance

Say = Callable[[str], None]


class Price(NamedTuple):
    """The step of a setting on a network."""

    step_s: float
    speedup: float
    """Dense's step over this one."""


@dataclass(frozen=True, eq=False)
class Screened:
    """A setting with its measurements, prices by network, and verdict."""

    setting: Setting
    result: Measurements
    prices: Mapping[str, Price]
    verdict: str
    reason: str

    @property
    def linked(self) -> bool:
        """True if activations or their gradients are compressed."""
        return (self.setting.forward, self.setting.backward) != (IDENTITY, IDENTITY)

    @property
    def wire_bytes(self) -> int:
        """Bytes of all messages of the screen."""
        return sum(int(row["wire_bytes"]) for row in self.result.measured.links)

    @property
    def dense_bytes(self) -> int:
        """The same, uncompressed."""
        return sum(int(row["dense_bytes"]) for row in self.result.measured.links)

    @property
    def codec_s(self) -> float:
        """Seconds of encoding and decoding all messages."""
        return math.fsum(row["encode_s"] + (row.get("decode_s") or 0.0) for row in self.result.measured.links)

    def fidelities(self, direction: str) -> list[float]:
        """Return the fidelity of each link, or of each stage's replica gradient, in order."""
        return [row["fidelity"] for row in self.result.measured.links if row["direction"] == direction]


@dataclass(frozen=True, eq=False)
class Screen:
    """Screened settings of a run, dense first."""

    config: RunConfig
    plan: Plan
    num_samples: int
    num_messages: int
    """Microbatches, each with one message for each link and direction."""
    chance: Mapping[str, float]
    """Results of a model that knows only the training targets, by measure."""
    facts: Sequence[TensorFacts]
    settings: Sequence[Screened]
    networks: Sequence[Network]
    shares: Mapping[str, Mapping[str, float]]
    """By network, the share of the dense step saved if links, tied parameters or replicas sent nothing."""
    notes: Sequence[str]
    seconds: float
    pass_s: float
    """Seconds of one forward and backward of all samples, dense."""

    @property
    def dense(self) -> Screened:
        return self.settings[0]

    def worth(self) -> list[Screened]:
        """Return the settings worth training, fastest on the first network first."""
        kept = [each for each in self.settings[1:] if each.verdict == WORTH]
        return sorted(kept, key=lambda each: -next((price.speedup for price in each.prices.values()), 0.0))


def screen(
    config: RunConfig,
    networks: Sequence[Network] = (),
    *,
    tried: Sequence[Setting] = (),
    only_tried: bool = False,
    num_batches: int = 1,
    device: str | None = None,
    profile: str | None = None,
    transport: str = "ray",
    gradients: bool = True,
    engine: str = "inline",
    say: Say = lambda line: None,
) -> Screen:
    """Measure candidates on the first `num_batches` batches of a run's test data, without training.

    `tried`: settings in addition to the defaults, or instead of them with `only_tried`. `device`, `profile` and `transport` are for
    prices, as in `forecast`; by default compute is measured in the screen's own passes. Without `gradients` only forwards run.
    `engine`: inline, all in this process, or ray, candidates at the same time in as many processes as fit. `say` gets lines on
    memory and progress. Raises ConfigError or InputError before a pass, WorkerLostError if a process of Ray is lost.
    """
    began = time.perf_counter()
    check_start(None, engine)
    config = dense_of(config)
    workload = _workload(config)
    plan = workload.plan
    _check(plan, num_batches)
    own = [candidates.tried_setting(setting, plan, gradients=gradients) for setting in tried]
    averages = (
        gradients
        and plan.num_replicas > 1
        and (not only_tried or any(each.replica_gradient != IDENTITY for each in own))
    )
    pricing = partial(Prices, config, plan, transport=transport)
    prices = pricing(device=device, profile=profile) if networks and (device or profile) else None
    if prices is None and gradients:
        check_split(plan.config.schedule, plan.weight_shares)
    needed = screen_memory(plan, num_batches, by_replica=averages, gradients=gradients)
    if engine == "inline" and needed > (limit := process_memory()).size:
        raise memory_error(needed, limit)
    count = num_batches * config.batch_size
    say(
        f"{config.name}: {count} test samples in microbatches of {config.microbatch_size}, {plan.num_stages} stages; "
        f"about {format_bytes(needed)} of memory{' in each process' if engine == 'ray' else ''}."
    )
    make = partial(_bench, workload, num_batches, by_replica=averages, gradients=gradients)
    most = len(own) + (0 if only_tried else candidates.MOST)
    with (
        bench_actors(config, needed, max(most, 1)) if engine == "ray" else nullcontext() as actors,
        _own_threads_and_random(),
    ):
        bench = RayBench(actors, make, gradients=gradients) if actors else make()
        results = _measure_all(bench, [] if only_tried else candidates.defaults(plan, bench.facts), own, say)
    base = chance(workload.data, plan.task)
    if networks and prices is None:
        prices = pricing(device=None, profile=measured_profile(plan, bench.seconds))
    return Screen(
        config=config,
        plan=plan,
        num_samples=count,
        num_messages=num_batches * config.num_replicas * config.num_microbatches,
        chance=base,
        facts=bench.facts,
        settings=_judged(results, base["loss"], prices, networks),
        networks=tuple(networks),
        shares={repr(network): prices.shares(network) for network in networks} if prices else {},
        notes=prices.notes if prices else [],
        seconds=time.perf_counter() - began,
        pass_s=bench.pass_s,
    )


def dense_of(config: RunConfig) -> RunConfig:
    """Return a run without its compression."""
    return config.changed(**{key: value for key, value in DENSE._asdict().items() if key != "weights"})


def _bench(workload: Workload, num_batches: int, *, by_replica: bool, gradients: bool) -> Bench:
    """Return a bench on this process's device."""
    usable = workload.plan.config.device != "cpu" and torch.cuda.is_available()
    passes = Passes(workload, num_batches, torch.device("cuda" if usable else "cpu"), gradients=gradients)
    return Bench(passes, by_replica=by_replica, gradients=gradients)


def _measure_all(
    bench: Bench | RayBench, usual: Sequence[Setting], own: Sequence[Setting], say: Say
) -> dict[Setting, Measurements]:
    """Return the measurements of dense, of the `usual` settings and of `own`."""
    if not bench.gradients:
        usual = [Setting(each.forward) for each in usual]
    settings = candidates.distinct([*usual, *own])
    count = bench.num_processes
    say(
        f"Dense: {_measure_words(bench.dense)} in {format_seconds(bench.pass_s)}; {len(settings)} settings "
        f"{f'in {count} processes ' if count > 1 else ''}take about {format_seconds(-(-len(settings) // count) * bench.pass_s)}."
    )
    results = {DENSE: bench.dense}
    for i, (setting, result) in enumerate(zip(settings, bench.measure_all(settings), strict=True), 1):
        results[setting] = result
        say(f"{i}/{len(settings)} {words(setting)}: {_measure_words(results[setting])}")
    return results


def words(setting: Setting) -> str:
    """Return a setting in a line: "forward / backward", and its methods of replicas and of tied parameters."""
    parts = (
        [f"{setting.forward} / {setting.backward}"]
        if (setting.forward, setting.backward) != (IDENTITY, IDENTITY)
        else []
    )
    parts += [f"replicas {setting.replica_gradient}"] if setting.replica_gradient != IDENTITY else []
    parts += [f"tied {setting.tied_gradient}"] if setting.tied_gradient != IDENTITY else []
    return ", ".join(parts) or "dense"


def _measure_words(result: Measurements) -> str:
    """Return each measure, and its difference from dense if there is one."""
    if not result.measures:
        return "a tensor overflows"
    return ", ".join(
        f"{name} {each.value:.4g}" + (f" ({each.difference:+.2g})" if each.difference else "")
        for name, each in result.measures.items()
    )


def _workload(config: RunConfig) -> Workload:
    """Return the run's workload, with the weights of `start` if it is given."""
    parent = find_parent(config)
    if parent is None:
        return prepare(config)
    workload = prepare(config, origin=parent.origin(config))
    for part in parent.parts(workload.plan, workload.modules)[: len(workload.plan.rows)]:
        tensors = unpack_tensors(part)
        for stage, module in enumerate(workload.modules):
            own = under(f"stage.{stage}.model.", tensors)
            if own:
                module.load_state_dict(own)
    return workload


def _check(plan: Plan, num_batches: int) -> None:
    """Raise ConfigError if a run sends nothing, or has fewer test samples than are wanted."""
    if not plan.boundaries and plan.num_replicas == 1:
        raise ConfigError(
            "A run of one stage and one replica sends nothing to compress: set `num_stages` or `num_replicas`."
        )
    most = plan.num_test_samples // plan.config.batch_size
    if not 1 <= num_batches <= most:
        remedy = "" if most else f" Set `batch_size` to at most {plan.num_test_samples}."
        raise ConfigError(
            f"`--batches` must be from 1 to {max(most, 1)}, for {plan.num_test_samples} test samples in batches of "
            f"{plan.config.batch_size}, but got {num_batches}.{remedy}"
        )


def _judged(
    results: Mapping[Setting, Measurements], base: float, prices: Prices | None, networks: Sequence[Network]
) -> list[Screened]:
    """Return the settings with their prices and verdicts."""
    dense_s = {network: prices.dense.step_s(network) for network in networks} if prices else {}
    judged = []
    for setting, each in results.items():
        priced: dict[str, Price] = {}
        if prices and each.measures:
            plan = prices.priced(setting, each.measured, each.accounts)
            steps = {network: plan.step_s(network) for network in networks}
            priced = {repr(network): Price(step, dense_s[network] / step) for network, step in steps.items()}
        speedups = {name: price.speedup for name, price in priced.items()}
        outcome = ("dense", "") if setting == DENSE else verdict(each.measures.get("loss"), base, speedups)
        judged.append(Screened(setting, each, priced, *outcome))
    return judged


@contextmanager
def _own_threads_and_random() -> Iterator[None]:
    """Restore torch's number of threads and random state afterwards."""
    threads = torch.get_num_threads()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        torch.set_num_threads(threads)
