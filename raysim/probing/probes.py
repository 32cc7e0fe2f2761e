"""A probe: tries candidates on the tensors of a running training, and writes records for `raysim replay`."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from raysim.distributed.exchange import Channel, build_alike
from raysim.nn.link import parse_methods
from raysim.pipeline.link import DIRECTIONS
from raysim.probing.branching import Branch, branches
from raysim.probing.candidates import (
    IDENTITY,
    GradientCandidate,
    LinkCandidate,
    Sample,
    check_gradients,
    merge_samples,
    with_whole_backwards,
    write_candidate,
)
from raysim.probing.station import GradientStation, Sampling, Station
from raysim.probing.stopwatch import Stopwatch
from raysim.schedules.actions import rows_to_csv
from raysim.schedules.families import Custom, parse_schedule
from raysim.values import UNNAMED

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful
    from torch.distributed.pipelining import PipelineStage


class Probe:
    """A context that measures a training as if its messages were compressed, without changing it.

    Made by `raysim.probe`. If a `group` of ranks is probed together, all must enter and leave the context, and its first rank
    writes the records.
    """

    def __init__(
        self,
        stations: Sequence[Station],
        settings: Sequence[Mapping[str, str]],
        cuts: Sequence[str],
        sampling: Sampling,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.folder = sampling.out
        self._stations = stations
        self._settings = settings
        self._cuts = cuts
        self._sampling = sampling
        self._group = group
        self._began = 0.0
        self._ended: float | None = None

    def __enter__(self) -> Self:
        for station in self._stations:
            station.open()
        self._began = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for station in self._stations:
            station.close(ends=error is None)
        self._ended = time.perf_counter()
        if error is not None and self._group is not None:
            return  # the other ranks may no longer communicate
        parts = [part for rank in self._gathered([station.samples for station in self._stations]) for part in rank]
        if not parts:
            return  # only the first rank writes
        samples = merge_samples(parts)
        if not samples:
            warnings.warn(
                f"The probe sampled no whole step of {self._sampling.num_microbatches} microbatches, so {self.folder} has nothing "
                "to be priced.",
                stacklevel=2,
            )
        samples = self._as_scheduled(samples)
        for i, setting in enumerate(self._settings):
            texts = [text for text in (setting["forward"], setting["replica_gradient"]) if text != IDENTITY]
            name = f"{i}-{re.sub(r'[^A-Za-z0-9.]+', '-', ' '.join(texts or [IDENTITY])).strip('-')}"
            write_candidate(self.folder / name[:200], self._facts(setting), samples, i)

    def _as_scheduled(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with backwards split as in the schedule that prices them."""
        halves = self._sampling.halves(len(self._cuts) + 1)
        timed_apart = any(op == "W" for sample in samples for _, _, op, _ in sample.seconds)
        if halves and samples and not timed_apart:
            warnings.warn(
                f"`schedule` = {self._sampling.schedule} computes weight gradients separately, but this pipeline did not: their "
                "seconds are counted in the backward before them.",
                stacklevel=3,
            )
        return [with_whole_backwards(sample, halves) for sample in samples]

    @property
    def overhead(self) -> float:
        """The probe's share of the time in the context, on this rank."""
        ended = time.perf_counter() if self._ended is None else self._ended
        return sum(station.overhead_s for station in self._stations) / (ended - self._began)

    def end_step(self) -> None:
        """End the current step, if it has fewer microbatches than `num_microbatches`. Such steps are not sampled."""
        for station in self._stations:
            station.end_step()

    def branch(
        self,
        train_step: Callable[[Any], Tensor | float],
        batches: Sequence[Any],
        state: Sequence[Stateful] = (),
        *,
        say: Callable[[str], None] = print,
    ) -> list[Branch]:
        """Return the losses of `train_step` on `batches`, dense and under each candidate, starting from the current state.

        Call it between two steps. The state of the model, of `state` (such as the optimiser and its schedule) and of the random
        generators is restored bit for bit. `say` gets the expected cost first. The steps are not sampled. Raises ValueError for a
        pipeline or replicas, where all ranks would have to take part.
        """
        if self._group is not None or not self._cuts:
            raise ValueError("`branch` needs a model in one process, with candidates at its cuts.")
        (station,) = self._stations
        began = time.perf_counter()
        candidates = list(dict.fromkeys(setting["forward"] for setting in self._settings))
        with station.paused():
            results = branches(
                station.module,
                station.watch.cuts,
                candidates,
                train_step,
                batches,
                state,
                num_microbatches=self._sampling.num_microbatches,
                seed=self._sampling.seed,
                say=say,
            )
        station.overhead_s += time.perf_counter() - began
        return results

    def _gathered(self, own: list[Any]) -> list[list[Any]]:
        """Return the lists of all ranks at the group's first rank, an empty list at the others."""
        if self._group is None:
            return [own]
        first = dist.get_rank(self._group) == 0
        everyone: list[Any] | None = [None] * dist.get_world_size(self._group) if first else None
        dist.gather_object(own, everyone, dist.get_global_rank(self._group, 0), group=self._group)
        return everyone or []

    def _facts(self, setting: Mapping[str, str]) -> dict[str, Any]:
        sampling, station = self._sampling, self._stations[0]
        rows = max(each.num_rows for each in self._stations)
        num_stages, schedule = len(self._cuts) + 1, parse_schedule(sampling.schedule)
        custom = isinstance(schedule, Custom)
        return {
            "probe_every": sampling.every,
            "probe_overhead": self.overhead,
            "model": type(station.module).__name__,
            "data": "own",
            "num_stages": num_stages,
            "cuts": list(self._cuts),
            "num_microbatches": sampling.num_microbatches,
            "num_replicas": station.num_replicas,
            "batch_size": rows * sampling.num_microbatches * station.num_replicas,
            "schedule": sampling.schedule,
            "schedule_rows": rows_to_csv(schedule.rows(num_stages, sampling.num_microbatches)) if custom else None,
            **setting,
            "shared_indices": False,
            "seed": sampling.seed,
            "profile_every_steps": 1,
            "threads_per_stage": torch.get_num_threads(),
            "device_kind": next(station.module.parameters()).device.type,
            "engine": "inline",
            "seconds": time.perf_counter() - self._began,
        }


def probe(
    model: nn.Module | PipelineStage | Sequence[PipelineStage],
    cuts: Sequence[str] = (),
    candidates: Sequence[str] = (),
    *,
    gradients: Sequence[str] = (),
    out: str | Path,
    steps: int = 20,
    every: int = 10,
    num_microbatches: int = 1,
    schedule: str = "1F1B",
    seed: int = 0,
) -> Probe:
    """Return a context that measures how compression would affect a training's messages, without changing it.

    In every `every`-th step, until `steps` are sampled, each candidate encodes tensors of the training. `out` gets a run folder
    for each candidate and one for dense tensors, to be priced by `raysim replay`. The model decides what is probed:

    A module in one process: activations and gradients at the modules named in `cuts`, as if it were cut into stages there, by
    each of `candidates` (links in both directions). A `PipelineStage` of torch's pipelines, or a list of this rank's stages: the
    same at the boundaries of the stages, on all ranks. A DistributedDataParallel model: the gradients of its replicas, by each of
    `gradients` (replica methods), on all ranks; with `cuts`, also the links of every replica, and each candidate with each method.

    `num_microbatches` calls of the model make a step. Steps are priced under `schedule`. Memories keyed by sample need
    `raysim.nn.samples`. Bytes, errors and seconds are measured, but not the effect of a candidate on the training's quality.

    Raises ValueError, on all ranks alike, if a cut does not exist, a candidate cannot be parsed, or `out` holds files.
    """
    sampling = Sampling(Path(out), steps, every, num_microbatches, schedule, seed)
    if isinstance(model, DistributedDataParallel):
        return probe_module(model.module, cuts, candidates, gradients, sampling, model.process_group)
    if not isinstance(model, nn.Module):
        stages = list(model) if isinstance(model, Sequence) else [model]
        return _probe_stages(stages, candidates, sampling, others=[*cuts, *gradients])
    if gradients:
        raise ValueError("`gradients` needs a model in DistributedDataParallel.")
    return probe_module(model, cuts, candidates, (), sampling)


def probe_module(
    model: nn.Module,
    cuts: Sequence[str],
    candidates: Sequence[str],
    gradients: Sequence[str],
    sampling: Sampling,
    group: dist.ProcessGroup | None = None,
) -> Probe:
    """Return the probe of a module: of its links at `cuts`, and, if replicated on a `group` of ranks, of its gradients."""

    def build() -> Probe:
        if group is None and not cuts:
            raise ValueError("`cuts` must name at least one module of the model, but got none.")
        if candidates and not cuts:
            raise ValueError(
                "`cuts` must name at least one module of the model where `candidates` are given, but got none."
            )
        if not gradients and not cuts:
            raise ValueError("`gradients` must name at least one replica method, but got none.")
        modules = _modules(model, cuts)
        sampling.check(len(cuts) + 1)
        channel = None if group is None else Channel(group, next(model.parameters()).device)
        links = [(direction, boundary, UNNAMED) for boundary in range(len(cuts)) for direction in DIRECTIONS]
        replica = 0 if channel is None else channel.rank
        tried = [LinkCandidate(parse_methods(text, text), links, replica) for text in _with_dense(candidates)]
        watch = Stopwatch(model, modules, num_stages=len(cuts) + 1)
        if channel is None:
            return Probe([Station(watch, tried, sampling)], _settings_of(tried), cuts, sampling)
        methods = [GradientCandidate(text) for text in _with_dense(gradients)]
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
        for candidate in methods:
            check_gradients(candidate.method, shapes, channel.size)
        station = GradientStation(watch, tried, methods, sampling, channel)
        return Probe([station], _settings_of(tried, methods), cuts, sampling, group)

    given = {"`cuts`": list(cuts), "`candidates`": list(candidates), "`gradients`": list(gradients)}
    return build_alike(group, "probe", build, {**given, **_facts_of(sampling)})


def _modules(model: nn.Module, cuts: Sequence[str]) -> list[nn.Module]:
    """Return the modules named in `cuts`; raises ValueError if one does not exist."""
    known = dict(model.named_modules())
    for cut in cuts:
        if not cut or cut not in known:
            raise ValueError(f"`cuts` must name modules of the model, as in `model.named_modules()`, but got {cut!r}.")
    return [known[cut] for cut in cuts]


def _probe_stages(
    stages: Sequence[PipelineStage], candidates: Sequence[str], sampling: Sampling, others: Sequence[str]
) -> Probe:
    """Return the probe of a pipeline at the boundaries of its stages; `stages` are those of this rank."""
    group = stages[0].group or dist.group.WORLD
    assert group is not None
    num_stages = stages[0].num_stages

    def build() -> Probe:
        if others:
            raise ValueError("`cuts` and `gradients` must be left out for stages of a pipeline, which are cut already.")
        if num_stages < 2:
            raise ValueError("A pipeline of at least 2 stages has links to probe, but got 1 stage.")
        sampling.check(num_stages, times_halves=True)
        stations = []
        for stage in stages:
            index = stage.stage_index
            if not any(parameter.requires_grad for parameter in stage.submod.parameters()):
                raise ValueError(
                    f"Every stage must train a parameter, since a probe counts steps by its updates, but stage {index} has none."
                )
            links = [("forward", index, UNNAMED)] * (index < num_stages - 1)
            links += [("backward", index - 1, UNNAMED)] * (index > 0)
            tried = [LinkCandidate(parse_methods(text, text), links) for text in _with_dense(candidates)]
            watch = Stopwatch(stage.submod, first=index, num_stages=num_stages, stage=stage)
            stations.append(Station(watch, tried, sampling))
        cuts = [f"stage {boundary}" for boundary in range(num_stages - 1)]
        return Probe(stations, _settings_of(tried), cuts, sampling, group)

    return build_alike(group, "probe", build, {"`candidates`": list(candidates), **_facts_of(sampling)})


def _facts_of(sampling: Sampling) -> dict[str, Any]:
    """Return the fields that must be equal on all ranks, under their names in error messages."""
    return {f"`{name}`": value for name, value in vars(sampling).items() if name != "out"}


def _with_dense(notations: Iterable[str]) -> list[str]:
    """Return the distinct notations, the dense one first."""
    return list(dict.fromkeys([IDENTITY, *notations]))


def _settings_of(links: Sequence[LinkCandidate], methods: Sequence[GradientCandidate] = ()) -> list[dict[str, str]]:
    """Return the run settings for each pair of a link candidate and a replica method."""
    return [
        {**{direction: repr(method) for direction, method in link.methods.items()}, "replica_gradient": averaging}
        for link in links
        for averaging in [repr(each.method) for each in methods] or [IDENTITY]
    ]
