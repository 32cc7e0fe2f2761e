"""Study files: TOML, or Python if a function describes the space better. Every rule is checked before Ray starts."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, ValidationError, ValidationInfo, field_validator

from raysim.config import ConfigError, apply_override, make_config, read_source
from raysim.config.reading import check_held, find_data, first_error
from raysim.network.profile import Profile
from raysim.notation import known_words
from raysim.storage.files import read_text
from raysim.storage.texts import parse_toml
from raysim.sweeps.budget import Budget
from raysim.sweeps.objectives import Constraint, Objective
from raysim.sweeps.space import Space, SpaceFunction
from raysim.sweeps.study import MOST_SEEDS, PARENT, Baseline, Branches, RaceTerms, Study, as_toml, override
from raysim.sweeps.study_checks import check_branches, check_fields, check_trials

MOST_PLANNED = 21  # by a budget: the last interim analysis of `analysis.comparison.rule`
PARTS: Mapping[str, type] = {"objectives": Objective, "constraints": Constraint, "baselines": Baseline}


class StudyKeys(BaseModel):
    """The keys of a study's file."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, strict=True)

    name: str | None = Field(default=None, pattern=r"^[\w+=-][\w.+=-]*$")
    """Name of the study in sqlite and of its folder; by default the file's name."""
    base: str | dict[str, Any]
    """A recipe or a .toml file, or the keys of a run."""
    set: dict[str, Any] = {}
    """Changes to the base that hold for every trial."""
    seeds: list[Annotated[int, Field(ge=0, lt=2**63)]] | None = Field(default=None, min_length=1)
    """Seeds of every configuration, trained one after the other; by default the base's seed."""
    trials: int | None = Field(default=None, ge=1, le=1_000_000)
    """Configurations trained at most, baselines among them; by default all points of a grid."""
    confirm: int = Field(default=0, ge=0)
    """Fresh seeds on which the chosen settings and the dense baseline are trained after the sweep, and judged."""
    race: RaceTerms | None = None
    """true: train settings in parts, paired with dense, only while they may be the answer; or a table of first, error, hopeless."""
    budget: str | Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """What a race may spend, with or without `race`: seconds or 3h of the sweep, "2 GPU hours", or money, with `price_per_hour`."""
    price_per_hour: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Of all machines of the sweep together, for a budget in money."""
    planned_seeds: int | None = Field(default=None, ge=3)
    """Number of seeds of the first verdicts; written by the plan of a budget."""
    screen: bool = True
    """In a race or with several seeds: drop a setting that breaks trained weights at once, before its first step."""
    branches: Branches | None = None
    """Table of `at`, shares of the base's steps, and `steps`: one dense run is trained, and every setting continues from there."""
    sampler: Literal["grid", "random", "tpe", "nsga2"] = "tpe"
    """Algorithm that chooses the trials."""
    sampler_seed: int = Field(default=0, ge=0)
    """Seed of the sampler."""
    startup_trials: int = Field(default=10, ge=0)
    """Trials that are drawn at random before tpe learns from them."""
    population: int = Field(default=20, ge=2)
    """Trials in a generation of nsga2."""
    early_stopping: Literal["asha", "none"] | None = None
    """ASHA (`asha`) stops poor trials early; on by default except for grids."""
    engine: Literal["auto", "ray", "inline"] = "auto"
    """`ray`: one actor a stage. `inline`: all stages in the trial's own process."""
    jobs: int | None = Field(default=None, ge=1, le=10_000)
    """Trials at once; by default as many as there are CPUs for, one per stage."""
    compute: Literal["auto", "cpu", "wall"] = "auto"
    """Seconds of compute in prices: of the CPU, of the wall clock, or by the kind of device (auto)."""
    profile: str | None = None
    """A file of `raysim profile` whose compute takes the place of the recorded in prices."""
    objectives: list[InstanceOf[Objective]] = Field(min_length=1)
    """Names, such as step_s@1gbps or step_s@1gbps/nccl, or tables of name, direction, target and mode."""
    constraints: list[InstanceOf[Constraint]] = []
    """Tables of objective and at_most, at_least, or within and of: within = 0.01 is one point of an accuracy, 1 % of a loss."""
    baselines: list[InstanceOf[Baseline]] = []
    """Tables of name and `params` of the space, or `set` of keys: run first."""
    space: dict[str, Any] | str | None = None
    """Keys with their choices, or the function `space` of a .py file."""
    symbols: dict[str, Any] = {}
    """Values of the placeholders in texts."""

    @field_validator("race", mode="before")
    @classmethod
    def _terms(cls, value: Any) -> Any:
        return ({} if value else None) if isinstance(value, bool) else value

    @field_validator("objectives", "constraints", "baselines", mode="before")
    @classmethod
    def _made(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, list):
            return value  # rejected by the field's type
        return [_part(str(info.field_name), each) for each in value]


def study_names() -> list[str]:
    """Return the names of the built-in studies."""
    entries = resources.files("raysim.sweeps").joinpath("studies").iterdir()
    return sorted(entry.name.removesuffix(".toml") for entry in entries if entry.name.endswith(".toml"))


def study_text(name: str) -> str:
    """Return the text of a built-in study's file."""
    return resources.files("raysim.sweeps").joinpath("studies", f"{name}.toml").read_text(encoding="utf-8")


def unknown_study(name: str) -> ConfigError:
    """Return the error for an unknown study, with the known names."""
    known = known_words(name, study_names(), rest="; or give a .toml or .py file")
    return ConfigError(f"Unknown study {name!r}.{known}")


def read_study(
    source: str | Path,
    overrides: Sequence[str] = (),
    *,
    trials: int | None = None,
    seeds: int | None = None,
    jobs: int | None = None,
    confirm: int | None = None,
    transport: str | None = None,
    race: bool = False,
    budget: str | None = None,
    price_per_hour: float | None = None,
    screen: bool | None = None,
) -> Study:
    """Read a built-in study, a .toml file or a .py file.

    `overrides` are `key=value` texts that change its base. `trials`, `jobs`, `confirm`, `budget` and `price_per_hour` replace the
    file's; `seeds` is a number of seeds from 0 on, instead of the file's. `race`, or a budget, turns the study into a race.
    `screen` replaces the file's. `transport` is for priced objectives that name none. Raises ConfigError by field and rule.

    >>> read_study("quickstart").most_trials
    9
    """
    if seeds is not None and not 1 <= seeds <= MOST_SEEDS:
        rule = "at least 1" if seeds < 1 else f"at most {MOST_SEEDS}"
        raise ConfigError(f"`seeds` must be {rule}, but got {seeds}.")
    file = _read(source)
    raced = race or budget is not None or "budget" in file.values
    changes = {
        "trials": trials,
        "jobs": jobs,
        "confirm": confirm,
        "seeds": None if seeds is None else [*range(seeds)],
        "budget": budget,
        "price_per_hour": price_per_hour,
        "screen": screen,
        "race": True if raced and not file.values.get("race") else None,
    }
    values = file.values | {key: value for key, value in changes.items() if value is not None}
    study = _make(file._replace(values=values), overrides)
    if transport is not None:
        study = study.over(transport)
    check_trials(study)
    if overrides:
        chosen = [changes for _, changes in study.drawn()]
        chosen += [study.overrides_at(baseline.params, baseline.name) for baseline in study.baselines]
        for key in (text.partition("=")[0].strip() for text in overrides):
            if all(key in changes for changes in chosen):
                raise ConfigError(f"`{key}` has no effect, as `space` and all baselines set it. Leave it out.")
    return study


class _File(NamedTuple):
    """The contents of a study's file; `space` and `python` are the function and the text of a Python file."""

    name: str | None
    folder: Path
    values: dict[str, Any]
    space: SpaceFunction | None = None
    python: str | None = None


def _read(source: str | Path) -> _File:
    path = Path(source)
    if str(source) in study_names():
        return _File(path.stem, path.parent, parse_toml(study_text(str(source))))
    if path.suffix not in (".toml", ".py"):
        raise unknown_study(str(source))
    try:
        text = read_text(path)
    except OSError as error:
        raise ConfigError(f"The study {str(source)!r} cannot be read: {error.strerror}.") from None
    name = path.stem if path.stem != "study" else None
    if path.suffix == ".py":
        values, space = _read_python(path)
        return _File(name, path.parent, values, space, text)
    try:
        values = parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}.") from None
    if not isinstance(values.get("space"), str):
        return _File(name, path.parent, values)
    python = path.parent / values.pop("space")  # the copy in a study's folder
    try:
        text = read_text(python)
    except OSError as error:
        raise ConfigError(
            f"`space` must be a table or a Python file, but {python} cannot be read: {error.strerror}."
        ) from None
    return _File(name, path.parent, values, _read_python(python)[1], text)


def _read_python(path: Path) -> tuple[dict[str, Any], SpaceFunction]:
    """Return `study` and `space` of a Python file."""
    spec = importlib.util.spec_from_file_location(f"study_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}", path)
    try:
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"The study {path} cannot be imported: {type(error).__name__}: {error}.") from None
    function, values = getattr(module, "space", None), getattr(module, "study", {})
    if not callable(function) or not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a function `space(trial)` and a dict `study`.")
    return values, function


def _make(file: _File, overrides: Sequence[str]) -> Study:
    try:
        keys = StudyKeys.model_validate(file.values)
    except ValidationError as error:
        raise ConfigError(first_error(error, StudyKeys.model_fields, " of a study")) from None
    name = keys.name or file.name
    if name is None:
        raise ConfigError(
            "`name` must be given in a study's file called study.toml, because each sweep writes a file of that name."
        )
    base = _base(keys.base, file.folder)
    override(base, keys.set)
    given = [apply_override(base, text) for text in overrides]
    check_held(base, given)
    if keys.seeds is not None and "seed" in (*keys.set, *given):
        raise ConfigError("`seed` has no effect beside `seeds` of the study. Leave it out.")
    config = make_config(base)
    base.setdefault("name", name)
    space = file.space
    if space is None:
        if not isinstance(keys.space, dict) or not keys.space:
            raise ConfigError("`space` must be a table of keys and their possible values, but got none.")
        space = Space(keys.space, keys.symbols, config.stages)
    sampler = "random" if keys.race is not None and "sampler" not in keys.model_fields_set else keys.sampler
    learns = sampler != "grid" and keys.race is None and config.evaluate_every_steps
    same = {name: getattr(keys, name) for name in Study.__dataclass_fields__ if name in StudyKeys.model_fields}
    resolved = {
        "name": name,
        "base": base,
        "seeds": tuple(keys.seeds or ((config.seed,) if keys.budget is None else range(MOST_PLANNED))),
        "early_stopping": keys.early_stopping or ("asha" if learns else "none"),
        "sampler": sampler,
        "budget": None if keys.budget is None else Budget.parse(keys.budget, keys.price_per_hour),
        "space": space,
        "source": file.python,
        "profile": None if keys.profile is None else _profile(file.folder / keys.profile),
    }
    study = Study(**same | {part: tuple(getattr(keys, part)) for part in PARTS} | resolved)
    if keys.branches is not None:
        study = replace(study, baselines=tuple(_at_points(study)))
        check_branches(study, keys.branches.steps)
    check_fields(study)
    return study


def _profile(path: Path) -> Profile:
    try:
        return Profile.load(path)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _at_points(study: Study) -> Iterator[Baseline]:
    """Yield every baseline at every point of `branches`."""
    for baseline in study.baselines:
        given = baseline.params if baseline.params is not None else baseline.set
        for start in study.starts if "start" not in (given or {}) else ():
            params, changes = (
                {**part, "start": start} if part is not None else None for part in (baseline.params, baseline.set)
            )
            yield Baseline(f"{baseline.name}{start.removeprefix(PARENT)}", params, changes)
        if "start" in (given or {}):
            yield baseline


def _base(base: str | dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the values of the base as in a run's file, without a name."""
    if isinstance(base, dict):
        values: dict[str, Any] = as_toml(base)
        find_data(values, folder)
        return values
    values = read_source(folder / base if base.endswith(".toml") else base)[1]
    values.pop("name", None)
    return values


def _part(field: str, values: Any) -> Any:
    """Build an objective, constraint or baseline from its table; raises ConfigError by key."""
    known = list(PARTS[field].__dataclass_fields__)  # type: ignore[attr-defined]
    first = known[0]
    if field == "objectives" and isinstance(values, str):
        values = {"name": values}
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"`{field}` must list {'names or ' if field == 'objectives' else ''}tables, but got {values!r}."
        )
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ConfigError(f"Unknown key `{field}.{unknown[0]}`. Known: {', '.join(known)}.")
    for key in (first, "of", "target"):
        if key in values and not isinstance(values[key], str):
            raise ConfigError(f"`{field}.{key}` must be a text, but got {values[key]!r}.")
    for key in ("params", "set"):
        if key in values and not isinstance(values[key], Mapping):
            raise ConfigError(f"`{field}.{key}` must be a table, but got {values[key]!r}.")
    if first not in values:
        raise ConfigError(f"`{field}.{first}` must be given.")
    return PARTS[field](**values)
