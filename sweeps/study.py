"""A study: what is searched, by what, for what, and how much of it. A TOML file, or a Python file where a function says it better.

Checked here whole, before Ray starts: every choice of the space must be in some valid configuration.
"""

from __future__ import annotations

import hashlib
import importlib.util
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import tomli_w
from optuna.trial import FixedTrial
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from raysim.config import ConfigError, RunConfig, apply_override, make_config, read_source
from sweeps.objectives import PRICED, Constraint, Objective, as_mapping
from sweeps.space import Choice, Space, SpaceFunction, draws, points

SAMPLERS = ("grid", "random", "tpe", "nsga2")
DRAWS = 200  # of the space, to find what can never be
NEVER = 5  # draws of a choice, none of them valid, that say that none is
RUNTIME = {"name", "seed", "timeout_s", "placement", "cpus_per_stage", "gpus_per_stage"}  # decide no result, seed apart
CHANGEABLE = {"trials", "jobs"}  # of a study that is resumed


class _File(BaseModel):
    """What a study's file may hold."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, strict=True)

    name: str | None = Field(default=None, pattern=r"^[\w+=-][\w.+=-]*$")
    """Of the study in sqlite and of its folder; the file's where not given."""
    base: str | dict[str, Any]
    """A recipe or a .toml file, or the keys of a run."""
    set: dict[str, Any] = {}
    """Changes to it that hold for every trial."""
    seeds: list[int] | None = Field(default=None, min_length=1)
    """Of every configuration, one after the other; the base's where not given."""
    trials: int | None = Field(default=None, ge=1)
    """Configurations trained at most, baselines among them; all points of a grid where not given."""
    sampler: Literal["grid", "random", "tpe", "nsga2"] = "tpe"
    """Who chooses."""
    sampler_seed: int = Field(default=0, ge=0)
    """Of what it draws."""
    startup_trials: int = Field(default=10, ge=0)
    """Drawn at random before tpe learns from them."""
    population: int = Field(default=20, ge=2)
    """Of a generation of nsga2."""
    early_stopping: Literal["asha", "none"] | None = None
    """Whether trials of high loss are stopped at an evaluation: asha, except for grids."""
    engine: Literal["ray", "inline"] = "ray"
    """One actor a stage, or all stages in the trial's own process."""
    jobs: int | None = Field(default=None, ge=1)
    """Trials at once; as many as have a CPU a stage where not given."""
    compute: Literal["cpu", "wall"] | None = None
    """How steps are priced: on cores of their own (cpu, without GPUs), or as they passed."""
    objectives: list[str | dict[str, Any]] = Field(min_length=1)
    """Names, or tables of name, direction, target and mode."""
    constraints: list[dict[str, Any]] = []
    """Tables of objective and at_most, at_least, or within and of."""
    baselines: list[dict[str, Any]] = []
    """Tables of name and `params` of the space, or `set` of keys: run first."""
    space: dict[str, Any] | str | None = None
    """Keys and what they may be; the function `space` of a .py file."""
    symbols: dict[str, Any] = {}
    """What the holes in texts stand for."""


@dataclass(frozen=True)
class Baseline:
    """A trial that comes first: a point of the space, or a configuration outside of it."""

    name: str
    params: Mapping[str, Choice] | None = None
    set: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Study:
    """A checked study. `read_study` makes it."""

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
    compute: str | None
    objectives: tuple[Objective, ...]
    constraints: tuple[Constraint, ...]
    baselines: tuple[Baseline, ...]
    space: SpaceFunction
    source: str | None = None
    """The text of the Python file that holds the space."""

    def config(self, overrides: Mapping[str, Any]) -> RunConfig:
        """Return the configuration of a trial, without a seed of its own; raises ConfigError."""
        values = _copy(self.base)
        for key, value in overrides.items():
            _override(values, key, value)
        return make_config(values)

    def overrides(self, trial: Any, baseline: str | None = None) -> Mapping[str, Any]:
        """Return what a trial changes of the base: a baseline's `set`, or what the space draws."""
        chosen = next((one for one in self.baselines if one.name == baseline), None)
        return chosen.set if chosen is not None and chosen.set is not None else self.space(trial)

    def notation(self, config: RunConfig) -> str:
        """Return the canonical configuration, seed apart: both directions, and every key that is not the base's."""
        base, flat = _canonical(self.config({})), _canonical(config)
        keys = [key for key in sorted({*base, *flat} - RUNTIME) if base.get(key) != flat.get(key)]
        shown = ["forward", "backward", *(key for key in keys if key not in ("forward", "backward"))]
        return " ".join(f"{key}={flat.get(key)}" for key in shown)

    @cached_property
    def grid(self) -> list[dict[str, Choice]]:
        """The points of a grid."""
        return points(self.space) if self.sampler == "grid" else []

    @property
    def budget(self) -> int:
        """Configurations to train at most."""
        whole = len(self.grid) + len(self.baselines)
        if self.sampler != "grid":
            assert self.trials is not None
            return self.trials
        return whole if self.trials is None else min(whole, self.trials)

    def with_trials(self, trials: int | None, jobs: int | None = None) -> Study:
        """Return it with another budget; raises ConfigError where that is none."""
        found = replace(
            self, trials=self.trials if trials is None else trials, jobs=self.jobs if jobs is None else jobs
        )
        if found.jobs is not None and found.jobs < 1:
            raise ConfigError(f"`jobs` must be at least 1, but got {found.jobs}.")
        if found.trials is None and found.sampler != "grid":
            raise ConfigError(f"`trials` must be given with `sampler` = {found.sampler!r}, which has no end.")
        if found.trials is not None and found.trials < max(1, len(found.baselines)):
            least = f"the baselines ({len(found.baselines)})" if found.baselines else "1"
            raise ConfigError(f"`trials` must be at least {least}, but got {found.trials}.")
        return found

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
            "compute": self.compute,
            "base": _copy(self.base),
            "objectives": [as_mapping(one) for one in self.objectives],
            "constraints": [as_mapping(one) for one in self.constraints],
            "baselines": [{k: v for k, v in vars(one).items() if v is not None} for one in self.baselines],
            **space,
        }
        return {key: value for key, value in found.items() if value not in (None, [], {})}

    def write(self, folder: Path) -> None:
        """Write `study.toml` into its folder, whole or not at all, and the Python source beside it."""
        if self.source is not None:
            (folder / "space.py").write_text(self.source, encoding="utf-8")
        draft = folder / ".study.toml"
        draft.write_text(tomli_w.dumps(self.as_mapping()), encoding="utf-8")
        draft.replace(folder / "study.toml")

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


def study_names() -> list[str]:
    """Return the names of the studies that come with raysim."""
    found = resources.files("sweeps").joinpath("studies").iterdir()
    return sorted(entry.name.removesuffix(".toml") for entry in found if entry.name.endswith(".toml"))


def read_study(
    source: str | Path, overrides: Sequence[str] = (), *, trials: int | None = None, jobs: int | None = None
) -> Study:
    """Return the study of a built-in's name, a .toml or a .py file; its base changed by `key=value` texts.

    Raises ConfigError by field and rule.

    >>> read_study("quickstart").budget
    8
    """
    path = Path(source)
    if str(source) in study_names():
        text = resources.files("sweeps").joinpath("studies", f"{source}.toml").read_text(encoding="utf-8")
        values, function, python = tomllib.loads(text), None, None
    elif path.suffix in (".toml", ".py"):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"The study {str(source)!r} cannot be read: {error}.") from None
        python = text if path.suffix == ".py" else None
        values, function = _read_python(path) if python else (_read_toml(path, text), None)
    else:
        raise ConfigError(
            f"Unknown study {str(source)!r}. Known: {', '.join(study_names())}; or give a .toml or .py file."
        )
    if function is None and isinstance(values.get("space"), str):  # the copy in a study's folder
        beside = path.parent / values["space"]
        python = beside.read_text(encoding="utf-8") if beside.is_file() else None
        values, function = {**values, "space": None}, _read_python(beside)[1]
    study = _make(values, path.stem if path.stem != "study" else None, path.parent, overrides, function, python)
    study = study.with_trials(trials, jobs)
    _check_draws(study)
    for baseline in study.baselines:
        _check_baseline(study, baseline)
    return study


def _read_toml(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}.") from None


def _read_python(path: Path) -> tuple[dict[str, Any], SpaceFunction]:
    """Return `study` and `space` of a Python file."""
    spec = importlib.util.spec_from_file_location(f"study_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}", path)
    try:
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"The study {path} cannot be imported: {type(error).__name__}: {error}.") from None
    function, values = getattr(module, "space", None), getattr(module, "study", {})
    if not callable(function) or not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a function `space(trial)` and a dict `study`.")
    return values, function


def _make(
    values: dict[str, Any],
    stem: str | None,
    folder: Path,
    overrides: Sequence[str],
    function: SpaceFunction | None,
    python: str | None,
) -> Study:
    try:
        file = _File.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_sentence(error)) from None
    name = file.name or stem
    if name is None:
        raise ConfigError("`name` must be given.")
    base = _base(file.base, folder)
    for key, value in file.set.items():
        _override(base, key, value)
    for override in overrides:
        apply_override(base, override)
    config = make_config(base)
    base.setdefault("name", name)
    space: SpaceFunction
    if function is not None:
        space = function
    elif isinstance(file.space, dict) and file.space:
        space = Space(file.space, file.symbols, config.stages)
    else:
        raise ConfigError("`space` must be a table of keys and what they may be, but got none.")
    early = file.early_stopping
    if early == "asha" and not config.evaluate_every_steps:
        raise ConfigError(
            "`early_stopping` = 'asha' needs `evaluate_every_steps` of at least 1 in the base, but got 0."
        )
    if early is None:
        early = "asha" if file.sampler != "grid" and config.evaluate_every_steps else "none"
    study = Study(
        name=name,
        base=base,
        seeds=tuple(file.seeds) if file.seeds is not None else (config.seed,),
        trials=file.trials,
        sampler=file.sampler,
        sampler_seed=file.sampler_seed,
        startup_trials=file.startup_trials,
        population=file.population,
        early_stopping=early,
        engine=file.engine,
        jobs=file.jobs,
        compute=file.compute,
        objectives=tuple(
            _fields(Objective, {"name": one} if isinstance(one, str) else one, "objectives") for one in file.objectives
        ),
        constraints=tuple(_fields(Constraint, one, "constraints") for one in file.constraints),
        baselines=tuple(_fields(Baseline, one, "baselines") for one in file.baselines),
        space=space,
        source=python,
    )
    _check(study, config)
    return study


def _base(base: str | dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the values of the base as a run's file would hold them; its own name is the study's."""
    if isinstance(base, dict):
        return _copy(base)
    values = read_source(folder / base if base.endswith(".toml") and not Path(base).is_absolute() else base)[1]
    values.pop("name", None)
    return values


def _check(study: Study, config: RunConfig) -> None:
    for seed in study.seeds:
        if not 0 <= seed < 2**63:
            raise ConfigError(f"`seeds` must be at least 0, but got {seed}.")
    for what, names in (
        ("seeds", study.seeds),
        ("objectives", [one.name for one in study.objectives]),
        ("constraints", [one.name for one in study.constraints]),
        ("baselines", [one.name for one in study.baselines]),
    ):
        twice = [one for one in names if list(names).count(one) > 1]
        if twice:
            raise ConfigError(f"`{what}` must differ, but {twice[0]} is there twice.")
    if any(one.kind in PRICED for one in study.objectives) and not config.profile_every_steps:
        raise ConfigError("`profile_every_steps` of the base must be at least 1, for steps to be priced, but got 0.")
    for constraint in study.constraints:
        if constraint.objective not in [one.name for one in study.objectives]:
            known = ", ".join(one.name for one in study.objectives)
            raise ConfigError(
                f"`constraints.objective` must be one of `objectives` ({known}), but got {constraint.objective!r}."
            )
        if constraint.of is not None and constraint.of not in [one.name for one in study.baselines]:
            known = ", ".join(one.name for one in study.baselines) or "none"
            raise ConfigError(f"`constraints.of` must name one of `baselines` ({known}), but got {constraint.of!r}.")


def _check_baseline(study: Study, baseline: Baseline) -> None:
    if (baseline.params is None) == (baseline.set is None):
        raise ConfigError(f"The baseline {baseline.name} must have just one of `params` and `set`.")
    if baseline.params is None and study.sampler == "nsga2":
        raise ConfigError(
            f"The baseline {baseline.name} must have `params` with `sampler` = 'nsga2', which crosses what all trials share."
        )
    try:
        trial = FixedTrial(dict(baseline.params or {}))
        overrides = study.overrides(trial, baseline.name)
        unused = sorted(set(baseline.params or {}) - set(trial.distributions))
        if unused:
            raise ValueError(f"`{unused[0]}` is not asked for")
        study.config(overrides)
    except ConfigError as error:
        raise ConfigError(f"The baseline {baseline.name}: {error}") from None
    except ValueError as error:
        reason = str(error).partition(". ")[0].rstrip(".")
        raise ConfigError(
            f"`params` of the baseline {baseline.name} must be a point of the space, but: {reason}."
        ) from None


def _check_draws(study: Study) -> None:
    """Raise ConfigError where the space fails, or where a choice is in no valid configuration."""
    good: set[tuple[str, str]] = set()
    bad: dict[tuple[str, str], list[str]] = {}
    try:
        if study.sampler == "grid":
            drawn = [(point, study.space(FixedTrial(point))) for point in study.grid]
        else:
            drawn = list(draws(study.space, DRAWS))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"The space cannot be drawn from: {type(error).__name__}: {error}.") from None
    for params, overrides in drawn:
        chosen = {(name, value) for name, value in params.items() if isinstance(value, (str, bool))}
        choices = {(name.rpartition(".")[2], repr(value)) for name, value in chosen} | {("", "")}  # wherever it stands
        try:
            study.config(overrides)
            good |= choices
        except ConfigError as error:
            for choice in choices:
                bad.setdefault(choice, []).append(str(error))
    enough = 1 if study.sampler == "grid" else NEVER
    for (name, value), errors in sorted(bad.items()):
        if (name, value) not in good and (len(errors) >= enough or not name):
            raise ConfigError(
                f"`space`: {f'`{name}` = {value}' if name else 'what it draws'} is never valid: {errors[0]}"
            )


def most_workers(study: Study) -> int:
    """Return the most workers that a trial of the study has, over the draws that are checked."""
    drawn = [study.space(FixedTrial(point)) for point in study.grid] or [o for _, o in draws(study.space, DRAWS)]
    found = 1
    for overrides in [*drawn, *(one.set for one in study.baselines if one.set is not None)]:
        try:
            found = max(found, workers(study.config(overrides)))
        except ConfigError:
            continue
    return found


def workers(config: RunConfig) -> int:
    """Return the number of workers over all replicas, each a process of its own on Ray."""
    return config.num_replicas * (max(config.parsed_schedule.workers(config.stages)) + 1)


def _canonical(config: RunConfig) -> dict[str, Any]:
    """Return the flat configuration, one compressor for all boundaries where they are alike."""
    flat = config.flat()
    for key in ("forward", "backward", "replica_gradient"):
        if isinstance(flat[key], tuple):
            flat[key] = flat[key][0] if len(set(flat[key])) == 1 else "[" + ", ".join(flat[key]) + "]"
    return flat


def _override(values: dict[str, Any], key: str, value: Any) -> None:
    """Change nested values by a key and a value, as `key=value` on a command line would."""
    text = tomli_w.dumps({"v": value}).partition("=")[2].strip() if not isinstance(value, Mapping) else None
    if text is None:
        for inner, inner_value in value.items():
            _override(values, f"{key}.{inner}", inner_value)
    else:
        apply_override(values, f"{key}={text}")


def _copy(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in values.items()}


def _fields(kind: Any, values: Mapping[str, Any], where: str) -> Any:
    known = list(kind.__dataclass_fields__)
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ConfigError(f"Unknown key `{where}.{unknown[0]}`. Known: {', '.join(known)}.")
    first = known[0]
    for key in (first, "of", "target"):
        if key in values and not isinstance(values[key], str):
            raise ConfigError(f"`{where}.{key}` must be a text, but got {values[key]!r}.")
    for key in ("params", "set"):
        if key in values and not isinstance(values[key], Mapping):
            raise ConfigError(f"`{where}.{key}` must be a table, but got {values[key]!r}.")
    if first not in values:
        raise ConfigError(f"`{where}.{first}` must be given.")
    return kind(**values)


def _check_same(key: str, old: Any, new: Any) -> None:
    """Raise ConfigError at the first field in which two tables differ."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for inner in sorted(old.keys() | new.keys()):
            _check_same(f"{key}.{inner}", old.get(inner), new.get(inner))
    elif old != new:
        raise ConfigError(f"`{key}` must be {old!r}, as in the study to resume, but got {new!r}.")


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"Unknown key `{key}` of a study. Known: {', '.join(_File.model_fields)}."
    if first["type"] == "missing":
        return f"`{key}` must be given."
    field = str(first["loc"][0])
    rule = str(first["msg"]).removeprefix("Input should be ").removeprefix("List should ")
    return f"`{field}` must be {rule}, but got {first['input']!r}."
