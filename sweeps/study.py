"""A study: its space, sampler, objectives and budget, and the file that keeps it beside its trials."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import tomli_w
from optuna.trial import FixedTrial

from raysim.config import ConfigError, RunConfig, apply_override, as_written, keys_of, make_config
from raysim.files import write_whole
from raysim.plugins import modules_in
from raysim.sweeps.objectives import Constraint, Objective, as_mapping, priced
from raysim.sweeps.space import Choice, Space, SpaceFunction, draws, points

DRAWS = 200  # points of the space, to find values that are never valid
CHANGEABLE = {"trials", "jobs", "confirm"}  # of a study that is resumed
COMPRESSORS = ("forward", "backward", "replica_gradient")


@dataclass(frozen=True)
class Baseline:
    """A trial that comes first: a point of the space, or a configuration outside of it."""

    name: str
    params: Mapping[str, Choice] | None = None
    set: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Study:
    """A checked study. `sweeps.reading.read_study` makes it."""

    name: str
    base: Mapping[str, Any]
    seeds: tuple[int, ...]
    trials: int | None
    sampler: str
    sampler_seed: int
    startup_trials: int
    population: int
    early_stopping: str
    engine: str
    jobs: int | None
    compute: str
    objectives: tuple[Objective, ...]
    constraints: tuple[Constraint, ...]
    baselines: tuple[Baseline, ...]
    space: SpaceFunction
    source: str | None = None
    """The text of the Python file that holds the space."""
    confirm: int = 0
    """Number of fresh seeds on which the choice is confirmed; 0 for none."""

    def config(self, overrides: Mapping[str, Any]) -> RunConfig:
        """Return the configuration of a trial, without a seed of its own; raises ConfigError."""
        values = copied(self.base)
        for key, value in overrides.items():
            override(values, key, value)
        return make_config(values)

    def overrides(self, trial: Any, baseline: str | None = None) -> Mapping[str, Any]:
        """Return the overrides of a trial: a baseline's `set`, or the draw of the space."""
        chosen = next((one for one in self.baselines if one.name == baseline), None)
        return chosen.set if chosen is not None and chosen.set is not None else self.space(trial)

    @cached_property
    def dense(self) -> Baseline | None:
        """The baseline without compression."""
        for one in self.baselines:
            trial = FixedTrial(dict(one.params or {}))
            flat = _canonical(self.config(self.overrides(trial, one.name)))
            if all(flat.get(key) == "Identity" for key in COMPRESSORS):
                return one
        return None

    def notation(self, config: RunConfig) -> str:
        """Return the canonical configuration, seed apart: both directions, and every key that is not the base's."""
        base, flat = _canonical(self.config({})), _canonical(config)
        keys = [key for key in sorted({*base, *flat} - keys_of("place", "seed")) if base.get(key) != flat.get(key)]
        shown = ["forward", "backward", *(key for key in keys if key not in ("forward", "backward"))]
        return " ".join(f"{key}={flat.get(key)}" for key in shown)

    @cached_property
    def grid(self) -> list[dict[str, Choice]]:
        """The points of a grid, shuffled by the seed of the sampler: the first of them are a sample of the whole."""
        found = points(self.space) if self.sampler == "grid" else []
        Random(self.sampler_seed).shuffle(found)
        return found

    def drawn(self) -> list[tuple[Mapping[str, Choice], Mapping[str, Any]]]:
        """Return points of the space, each with its changes to the base: all points of a grid, or the same random ones."""
        if self.sampler == "grid":
            return [(point, self.space(FixedTrial(point))) for point in self.grid]
        return list(draws(self.space, DRAWS))

    @cached_property
    def configs(self) -> list[RunConfig]:
        """The valid configurations of the points of `drawn`, and of the baselines outside the space."""
        found = []
        outside = [one.set for one in self.baselines if one.set is not None]
        for overrides in [*(overrides for _, overrides in self.drawn()), *outside]:
            with suppress(ConfigError):
                found.append(self.config(overrides))
        return found

    @cached_property
    def modules(self) -> set[str]:
        """The modules that its file names, whose classes its own records may name too."""
        return modules_in(repr(self.as_mapping()), self.source or "")

    @property
    def budget(self) -> int:
        """Configurations to train at most."""
        whole = len(self.grid) + len(self.baselines)
        if self.sampler != "grid":
            assert self.trials is not None
            return self.trials
        return whole if self.trials is None else min(whole, self.trials)

    def with_budget(
        self,
        *,
        trials: int | None = None,
        seeds: int | None = None,
        jobs: int | None = None,
        confirm: int | None = None,
    ) -> Study:
        """Return it with other trials, seeds from 0 on, or trials at once; raises ConfigError where one is too small."""
        if seeds is not None and seeds < 1:
            raise ConfigError(f"`seeds` must be at least 1, but got {seeds}.")
        for option, value, most in (("seeds", seeds, 10_000), ("jobs", jobs, 10_000), ("trials", trials, 1_000_000)):
            if value is not None and value > most:
                raise ConfigError(f"`{option}` must be at most {most}, but got {value}.")
        found = replace(
            self,
            trials=self.trials if trials is None else trials,
            seeds=self.seeds if seeds is None else tuple(range(seeds)),
            jobs=self.jobs if jobs is None else jobs,
            confirm=self.confirm if confirm is None else confirm,
        )
        if found.jobs is not None and found.jobs < 1:
            raise ConfigError(f"`jobs` must be at least 1, but got {found.jobs}.")
        if found.trials is None and found.sampler != "grid":
            raise ConfigError(f"`trials` must be given with `sampler` = {found.sampler!r}, which has no end.")
        if found.trials is not None and found.trials < max(1, len(found.baselines)):
            least = f"the baselines ({len(found.baselines)})" if found.baselines else "1"
            raise ConfigError(f"`trials` must be at least {least}, but got {found.trials}.")
        return found

    def with_transport(self, transport: str | None) -> Study:
        """Return it with its prices over a transport, but for those that name one; raises ConfigError without a price."""
        if transport is None:
            return self
        if not priced(self.objectives):
            raise ConfigError("`transport` is of prices such as step_s@1gbps, but `objectives` have none.")
        objectives = tuple(one.over(transport) for one in self.objectives)
        names = {old.name: new.name for old, new in zip(self.objectives, objectives, strict=True)}
        constraints = tuple(replace(one, objective=names[one.objective]) for one in self.constraints)
        return replace(self, objectives=objectives, constraints=constraints)

    def as_mapping(self) -> dict[str, Any]:
        """Return it as a study's file would write it, base and overrides resolved."""
        space: dict[str, Any] = {"space": "space.py"}
        if isinstance(self.space, Space):
            space = {"space": dict(self.space.keys), "symbols": dict(self.space.symbols)}
        found = {
            "name": self.name,
            "trials": self.trials,
            "sampler": self.sampler,
            "sampler_seed": self.sampler_seed,
            "startup_trials": self.startup_trials if self.sampler == "tpe" else None,
            "population": self.population if self.sampler == "nsga2" else None,
            "seeds": list(self.seeds),
            "early_stopping": self.early_stopping,
            "engine": self.engine,
            "jobs": self.jobs,
            "confirm": self.confirm or None,
            "compute": self.compute,
            "base": copied(self.base),
            "objectives": [as_mapping(one) for one in self.objectives],
            "constraints": [as_mapping(one) for one in self.constraints],
            "baselines": [{k: v for k, v in vars(one).items() if v is not None} for one in self.baselines],
            **space,
        }
        return {key: value for key, value in found.items() if value not in (None, [], {})}

    def write(self, folder: Path) -> None:
        """Write `study.toml` into its folder, whole or not at all, and the Python source beside it."""
        if self.source is not None:
            write_whole(folder / "space.py", self.source.encode())
        write_whole(folder / "study.toml", tomli_w.dumps(self.as_mapping()).encode())

    def check_same(self, folder: Path) -> None:
        """Raise ConfigError, by field, where the study in `folder` is another one; budget and jobs may change."""
        try:
            old = tomllib.loads((folder / "study.toml").read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"Nothing to resume: {folder / 'study.toml'} cannot be read ({error}).") from None
        new = tomllib.loads(tomli_w.dumps(self.as_mapping()))
        for key in sorted((old.keys() | new.keys()) - CHANGEABLE):
            _check_same(key, old.get(key), new.get(key))
        if self.source is not None and (folder / "space.py").read_text(encoding="utf-8") != self.source:
            raise ConfigError(
                f"The Python file of the study must be as it was, but {folder / 'space.py'} is another one."
            )


def most_workers(study: Study) -> int:
    """Return the most workers that a trial of the study has, over the draws that are checked."""
    return max((workers(config) for config in study.configs), default=1)


def workers(config: RunConfig) -> int:
    """Return the number of workers over all replicas, each a process of its own on Ray."""
    return config.num_replicas * (max(config.parsed_schedule.workers(config.stages)) + 1)


def override(values: dict[str, Any], key: str, value: Any) -> None:
    """Change nested values by a key and a value, as `key=value` on a command line would."""
    text = tomli_w.dumps({"v": value}).partition("=")[2].strip() if not isinstance(value, Mapping) else None
    if text is None:
        for inner, inner_value in value.items():
            override(values, f"{key}.{inner}", inner_value)
    else:
        apply_override(values, f"{key}={text}")


def copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values, the tables among them copied."""
    return {key: copied(value) if isinstance(value, Mapping) else value for key, value in values.items()}


def _canonical(config: RunConfig) -> dict[str, Any]:
    """Return the flat configuration, one compressor for all boundaries where they are alike."""
    flat = config.flat()
    for key in COMPRESSORS:
        if isinstance(flat[key], tuple):
            flat[key] = flat[key][0] if all(one == flat[key][0] for one in flat[key]) else flat[key]
        flat[key] = as_written(flat[key])
    return flat


def _check_same(key: str, old: Any, new: Any) -> None:
    """Raise ConfigError at the first field in which two tables differ."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for inner in sorted(old.keys() | new.keys()):
            _check_same(f"{key}.{inner}", old.get(inner), new.get(inner))
    elif old != new:
        raise ConfigError(f"`{key}` must be {old!r}, as in the study to resume, but got {new!r}.")
