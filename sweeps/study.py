"""A study: its space, sampler, objectives and budget, and its file in the folder of trials."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Annotated, Any

import tomli_w
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.trial import BaseTrial, FixedTrial
from pydantic import BaseModel, ConfigDict, Field

from raysim.config import ConfigError, RunConfig, as_row, keys_of, make_config
from raysim.config.identity import DENSE, Setting, as_text
from raysim.config.reading import check_held, merge
from raysim.network.profile import Profile
from raysim.plugins import modules_in
from raysim.storage.files import read_text, write_whole
from raysim.storage.texts import LARGEST_TOML, parse_toml
from raysim.sweeps.budget import Budget
from raysim.sweeps.objectives import Constraint, Objective, Pricing, any_priced, as_mapping
from raysim.sweeps.space import Choice, Space, SpaceFunction, grid_points, random_points

DRAWS = 200  # points of the space drawn to find values that are never valid
STUDY, SPACE, PROFILE = FILES = ("study.toml", "space.py", "profile.json")
CHANGEABLE = {
    "screen",
    "trials",
    "jobs",
    "confirm",
    "budget",
    "price_per_hour",
    "planned_seeds",
}  # when a study is resumed
PARENT = "parent"  # folder of the dense run from which trials branch
MOST_SEEDS = 10_000


@dataclass(frozen=True)
class Baseline:
    """A trial that runs first: a point of the space, or a configuration outside of it."""

    name: str
    params: Mapping[str, Choice] | None = None
    set: Mapping[str, Any] | None = None


class RaceTerms(BaseModel):
    """The terms of a race, see `raysim.analysis.comparison.race.Race`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    first: int = Field(default=2, ge=2, le=MOST_SEEDS)
    """Seeds of the first parts."""
    error: float = Field(default=0.05, gt=0, lt=0.5)
    """Chance of calling a harmless setting harmful, over the whole race."""
    hopeless: float = Field(default=0.1, ge=0, lt=0.5)
    """Chance of a verdict of safe below which a setting is given up."""


class Branches(BaseModel):
    """Points of one dense run, as shares of its steps, from which every setting is trained for some steps."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    at: list[Annotated[float, Field(ge=0, lt=1)]] = Field(min_length=1, max_length=1000)
    steps: int = Field(ge=1, le=2**31 - 1)


@dataclass(frozen=True)
class Study:
    """A checked study, made by `sweeps.study_file.read_study`; its fields are those of `StudyKeys`, resolved."""

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
    profile: Profile | None = None
    """Compute in prices; None for the recorded."""
    confirm: int = 0
    """Number of fresh seeds on which the choice is confirmed; 0 for none."""
    race: RaceTerms | None = None
    """Terms of the race in which trials are trained; None to train each to its end."""
    budget: Budget | None = None
    """What a race may spend."""
    price_per_hour: float | None = None
    """Of all machines together, for a budget in money."""
    planned_seeds: int | None = None
    """Number of seeds of the first verdicts, from the plan of a budget."""
    screen: bool = True
    """Whether settings that are hopeless at once are dropped before their first step, see `screens`."""
    branches: Branches | None = None
    """Points of one dense run from which trials start; None to train each from scratch."""

    def config(self, overrides: Mapping[str, Any]) -> RunConfig:
        """Return the configuration of a trial, with the base's seed; raises ConfigError."""
        if "seed" in overrides:
            raise ConfigError("`seed` must be left out of `space` and `baselines`: `seeds` lists those of every trial.")
        values = as_toml(self.base)
        override(values, overrides)
        if self.branches is not None and "start" in overrides:
            if "steps" in overrides:
                raise ConfigError(
                    "`steps` must be left out of `space` and `baselines`: `branches.steps` is that of every trial."
                )
            override(values, {"steps": self.branches.steps})
        return make_config(values)

    def overrides(self, trial: BaseTrial, baseline: str | None = None) -> Mapping[str, Any]:
        """Return the overrides of a trial: a baseline's `set`, or the draw of the space."""
        chosen = next((each for each in self.baselines if each.name == baseline), None)
        return chosen.set if chosen is not None and chosen.set is not None else self._draw(trial)

    def overrides_at(self, params: Mapping[str, Choice] | None, baseline: str | None = None) -> Mapping[str, Any]:
        """Return the overrides at a point of the space, or of a baseline."""
        return self.overrides(FixedTrial(dict(params or {})), baseline)

    def _draw(self, trial: BaseTrial) -> Mapping[str, Any]:
        overrides = self.space(trial)
        if not isinstance(overrides, Mapping):
            raise ConfigError(f"The function `space` must return a table of keys and values, but got {overrides!r}.")
        if self.branches is None:
            return overrides
        return {**overrides, "start": trial.suggest_categorical("start", self.starts)}

    @property
    def pricing(self) -> Pricing:
        """The source of compute in prices."""
        return {"compute": self.compute, "profile": self.profile}

    @property
    def screens(self) -> bool:
        """True if settings are screened: in a race or with several seeds, but not with branches, whose table needs every setting."""
        return self.screen and self.branches is None and (self.race is not None or len(self.seeds) > 1)

    @property
    def branch_steps(self) -> list[int]:
        """The steps of the dense run from which trials start."""
        steps = self.config({}).steps or 0
        return [round(share * steps) for share in self.branches.at] if self.branches is not None else []

    @property
    def starts(self) -> list[str]:
        """The `start` values of trials; the dense run's folder replaces `PARENT` once it is known."""
        return [f"{PARENT}@{step}" for step in self.branch_steps]

    def make_sampler(self, number: int) -> BaseSampler:
        """Return the sampler of trial `number`, seeded by the number so that a resumed study draws the same trials."""
        seed = (self.sampler_seed + 7919 * number) % 2**32
        if self.sampler == "nsga2":
            return NSGAIISampler(population_size=self.population, seed=seed)
        if self.sampler == "tpe":
            with warnings.catch_warnings():  # `group`: one model for each branch of a conditional space
                warnings.simplefilter("ignore", ExperimentalWarning)
                return TPESampler(n_startup_trials=self.startup_trials, multivariate=True, group=True, seed=seed)
        return RandomSampler(seed=seed)

    @cached_property
    def dense(self) -> Baseline | None:
        """The baseline without compression."""
        for baseline in self.baselines:
            config = self.config(self.overrides_at(baseline.params, baseline.name))
            if Setting.of(as_row(config)) == DENSE:
                return baseline
        return None

    def notation(self, config: RunConfig) -> str:
        """Return the configuration without its seed: its setting, and every other key that differs from the base."""
        base, row = as_row(self.config({})), as_row(config)
        others = sorted({*base, *row} - keys_of("place", "seed", "compression"))
        changed = [f"{key}={as_text(row.get(key))}" for key in others if base.get(key) != row.get(key)]
        return " ".join([str(Setting.of(row)), *changed])

    @cached_property
    def grid(self) -> list[dict[str, Choice]]:
        """The points of a grid, shuffled by the sampler's seed: the first of them are a sample of the whole.

        A race has the order of the space, which says what to train first if a budget is too small for all.
        """
        grid = grid_points(self._draw) if self.sampler == "grid" else []
        if self.race is None:
            Random(self.sampler_seed).shuffle(grid)
        return grid

    def drawn(self) -> list[tuple[Mapping[str, Choice], Mapping[str, Any]]]:
        """Return points of the space, each with its changes to the base: all points of a grid, or the same random ones."""
        if self.sampler == "grid":
            return [(point, self._draw(FixedTrial(point))) for point in self.grid]
        return list(random_points(self._draw, DRAWS))

    @cached_property
    def configs(self) -> list[RunConfig]:
        """The valid configurations of the points of `drawn`, and of the baselines outside the space."""
        configs = []
        outside = [baseline.set for baseline in self.baselines if baseline.set is not None]
        for overrides in [*(overrides for _, overrides in self.drawn()), *outside]:
            with suppress(ConfigError):
                configs.append(self.config(overrides))
        return configs

    @cached_property
    def most_workers(self) -> int:
        return max(map(workers, self.configs), default=1)

    @cached_property
    def modules(self) -> set[str]:
        """The modules named in the study's file; its records may name their classes too."""
        return modules_in(repr(self.as_mapping()), self.source or "")

    @property
    def most_trials(self) -> int:
        """The maximum number of configurations to train."""
        whole = len(self.grid) + len(self.baselines)
        if self.sampler != "grid":
            assert self.trials is not None
            return self.trials
        return whole if self.trials is None else min(whole, self.trials)

    def over(self, transport: str) -> Study:
        """Return the study with this transport for all prices that name none; raises ConfigError if it has no price."""
        if not any_priced(self.objectives):
            raise ConfigError("`transport` is for prices such as step_s@1gbps, but `objectives` have none.")
        objectives = tuple(objective.over(transport) for objective in self.objectives)
        names = {old.name: new.name for old, new in zip(self.objectives, objectives, strict=True)}
        constraints = tuple(replace(each, objective=names[each.objective]) for each in self.constraints)
        return replace(self, objectives=objectives, constraints=constraints)

    def parent(self) -> Study:
        """Return the study that trains the dense run of `branches` once, with the base's seed, and keeps checkpoints at the points."""
        assert self.dense is not None
        overrides = self.overrides_at(self.dense.params, self.dense.name)
        changes = {key: value for key, value in overrides.items() if key != "start"}
        return replace(
            self,
            name=f"{self.name}-{PARENT}",
            base={**self.base, "checkpoint_at_steps": self.branch_steps},
            seeds=(self.config({}).seed,),
            trials=1,
            sampler="random",
            constraints=(),
            baselines=(Baseline("dense", set=changes),),
            branches=None,
        )

    def as_mapping(self) -> dict[str, Any]:
        """Return the study in the format of its file, with base and overrides resolved."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        del values["source"]
        if self.sampler != "tpe":
            del values["startup_trials"]
        if self.sampler != "nsga2":
            del values["population"]
        values |= {
            "confirm": self.confirm or None,
            "race": self.race and vars(self.race),
            "budget": self.budget and self.budget.text,
            "branches": self.branches and vars(self.branches),
            "screen": None if self.screen else False,
            "space": SPACE,
            "profile": self.profile and PROFILE,
        }
        for parts in ("objectives", "constraints", "baselines"):
            values[parts] = [as_mapping(part) for part in values[parts]]
        if isinstance(self.space, Space):
            values |= {"space": self.space.keys, "symbols": self.space.symbols}
        return {key: value for key, value in as_toml(values).items() if value not in (None, [], {})}

    def write(self, folder: Path) -> None:
        """Write `study.toml` atomically into its folder, and the files that it names."""
        for name, content in self._files().items():
            write_whole(folder / name, content)
        write_whole(folder / STUDY, tomli_w.dumps(self.as_mapping()).encode())

    def _files(self) -> dict[str, bytes]:
        """Return the files that `study.toml` names."""
        files = {} if self.source is None else {SPACE: self.source.encode()}
        return files if self.profile is None else files | {PROFILE: self.profile.as_json()}

    def resumed(self, folder: Path) -> Study:
        """Return the study with the plan of its budget in `folder`; raises ConfigError, by field, if the study there differs.

        Budget and jobs may change.
        """
        try:
            old = parse_toml(read_text(folder / STUDY, LARGEST_TOML))
        except (OSError, ValueError) as error:
            raise ConfigError(f"Nothing to resume: {folder / STUDY} cannot be read ({error}).") from None
        seeds, planned = old.get("seeds", []), old.get("planned_seeds")
        if planned is None and self.budget is not None and seeds and list(self.seeds[: len(seeds)]) == seeds:
            study = replace(self, seeds=tuple(seeds))  # written before there were `planned_seeds`
        else:
            study = replace(self, planned_seeds=planned)
        new = study.as_mapping()
        for key in sorted((old.keys() | new.keys()) - CHANGEABLE):
            check_same(key, old.get(key), new.get(key))
        for name, content in self._files().items():
            if _text(folder / name) != content.decode():
                raise ConfigError(f"The files of the study must be unchanged, but {folder / name} differs.")
        return study


def _text(file: Path) -> str | None:
    try:
        return read_text(file)
    except OSError:
        return None


def workers(config: RunConfig) -> int:
    """Return the number of workers over all replicas, each a process of its own on Ray."""
    return config.num_replicas * (max(config.executed_schedule.workers(config.stages)) + 1)


def override(values: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Set nested keys, as `key=value` on a command line does; a table sets each of its keys.

    Raises ConfigError if two changes exclude each other.
    """
    flat = dict(_flat(changes))
    for key, value in flat.items():
        merge(values, key, as_toml(value))
    check_held(values, flat)


def _flat(changes: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key in tables, dotted, with its value; in a table the name comes first, as it drops the options of another."""
    for key in sorted(changes, key=lambda key: bool(prefix) and key != "name"):
        if isinstance(changes[key], Mapping):
            yield from _flat(changes[key], f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", changes[key]


def as_toml(value: Any) -> Any:
    """Return a value with the types of TOML, tables and lists copied."""
    if isinstance(value, Mapping):
        return {key: as_toml(inner) for key, inner in value.items()}
    return [as_toml(each) for each in value] if isinstance(value, (list, tuple)) else value


def check_same(key: str, old: Any, new: Any) -> None:
    """Raise ConfigError at the first field in which two tables differ."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for inner in sorted(old.keys() | new.keys()):
            check_same(f"{key}.{inner}", old.get(inner), new.get(inner))
    elif old != new:
        raise ConfigError(f"`{key}` must be {old!r}, as in the study to resume, but got {new!r}.")
