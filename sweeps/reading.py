"""Reading a study: a TOML file, or a Python file where a function says it better. Checked whole, before Ray starts."""

from __future__ import annotations

import hashlib
import importlib.util
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from raysim.config import ConfigError, apply_override, make_config, read_source
from raysim.config.reading import find_data
from raysim.files import read_text
from raysim.notation import known_words
from raysim.sweeps.checking import check_baseline, check_confirm, check_draws, check_fields
from raysim.sweeps.objectives import Constraint, Objective
from raysim.sweeps.space import Space, SpaceFunction
from raysim.sweeps.study import Baseline, Study, copied, override


class StudyFile(BaseModel):
    """The keys of a study's file."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, strict=True)

    name: str | None = Field(default=None, pattern=r"^[\w+=-][\w.+=-]*$")
    """Name of the study in sqlite and of its folder; the file's name where not given."""
    base: str | dict[str, Any]
    """A recipe or a .toml file, or the keys of a run."""
    set: dict[str, Any] = {}
    """Changes to the base that hold for every trial."""
    seeds: list[int] | None = Field(default=None, min_length=1)
    """Seeds of every configuration, trained one after the other; the base's seed where not given."""
    trials: int | None = Field(default=None, ge=1, le=1_000_000)
    """Configurations trained at most, baselines among them; all points of a grid where not given."""
    confirm: int = Field(default=0, ge=0)
    """Fresh seeds on which the chosen settings and the dense baseline are trained after the sweep, and judged."""
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
    """Trials at once; by default as many as there are CPUs for, one a stage."""
    compute: Literal["auto", "cpu", "wall"] = "auto"
    """Seconds of compute in prices: of the CPU, of the wall clock, or by the kind of device (auto)."""
    objectives: list[str | dict[str, Any]] = Field(min_length=1)
    """Names, such as step_s@1gbps or step_s@1gbps/nccl, or tables of name, direction, target and mode."""
    constraints: list[dict[str, Any]] = []
    """Tables of objective and at_most, at_least, or within and of."""
    baselines: list[dict[str, Any]] = []
    """Tables of name and `params` of the space, or `set` of keys: run first."""
    space: dict[str, Any] | str | None = None
    """Keys with their choices, or the function `space` of a .py file."""
    symbols: dict[str, Any] = {}
    """Values of the holes in texts."""


def study_names() -> list[str]:
    """Return the names of the studies that come with raysim."""
    found = resources.files("raysim.sweeps").joinpath("studies").iterdir()
    return sorted(entry.name.removesuffix(".toml") for entry in found if entry.name.endswith(".toml"))


def read_study(
    source: str | Path,
    overrides: Sequence[str] = (),
    *,
    trials: int | None = None,
    seeds: int | None = None,
    jobs: int | None = None,
    confirm: int | None = None,
    transport: str | None = None,
) -> Study:
    """Return the study of a built-in's name, a .toml or a .py file; its base changed by `key=value` texts.

    `transport` is that of the prices among its objectives which name none.

    Raises ConfigError by field and rule.

    >>> read_study("quickstart").budget
    9
    """
    path = Path(source)
    if str(source) in study_names():
        text = resources.files("raysim.sweeps").joinpath("studies", f"{source}.toml").read_text(encoding="utf-8")
        values, function, python = tomllib.loads(text), None, None
    elif path.suffix in (".toml", ".py"):
        try:
            text = read_text(path)
        except OSError as error:
            raise ConfigError(f"The study {str(source)!r} cannot be read: {error.strerror}.") from None
        python = text if path.suffix == ".py" else None
        values, function = _read_python(path) if python else (_read_toml(path, text), None)
    else:
        raise ConfigError(
            f"Unknown study {str(source)!r}."
            + known_words(str(source), study_names(), rest="; or give a .toml or .py file")
        )
    if function is None and isinstance(values.get("space"), str):  # the copy in a study's folder
        beside = path.parent / values["space"]
        try:
            python = read_text(beside)
        except OSError as error:
            raise ConfigError(
                f"`space` must be a table or a Python file, but {beside} cannot be read: {error.strerror}."
            ) from None
        values, function = {**values, "space": None}, _read_python(beside)[1]
    study = _make(values, path.stem if path.stem != "study" else None, path.parent, overrides, function, python)
    study = study.with_budget(trials=trials, seeds=seeds, jobs=jobs, confirm=confirm).with_transport(transport)
    check_draws(study)
    for baseline in study.baselines:
        check_baseline(study, baseline)
    check_confirm(study)
    return study


def _read_toml(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}.") from None


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


def _make(
    values: dict[str, Any],
    stem: str | None,
    folder: Path,
    overrides: Sequence[str],
    function: SpaceFunction | None,
    python: str | None,
) -> Study:
    try:
        file = StudyFile.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_sentence(error)) from None
    name = file.name or stem
    if name is None:
        raise ConfigError("`name` must be given.")
    base = _base(file.base, folder)
    for key, value in file.set.items():
        override(base, key, value)
    for text in overrides:
        apply_override(base, text)
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
        confirm=file.confirm,
    )
    check_fields(study, config)
    return study


def _base(base: str | dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the values of the base as a run's file would hold them; its own name is the study's."""
    if isinstance(base, dict):
        values = copied(base)
        find_data(values, folder)
        return values
    values = read_source(folder / base if base.endswith(".toml") and not Path(base).is_absolute() else base)[1]
    values.pop("name", None)
    return values


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


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"Unknown key `{key}` of a study.{known_words(key, StudyFile.model_fields)}"
    if first["type"] == "missing":
        return f"`{key}` must be given."
    field = str(first["loc"][0])
    rule = str(first["msg"]).removeprefix("Input should be ").removeprefix("List should ")
    return f"`{field}` must be {rule}, but got {first['input']!r}."
