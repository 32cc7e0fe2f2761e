"""Checks of a whole study: its parts fit together, and every choice of its space occurs in a valid configuration."""

from __future__ import annotations

from optuna.trial import FixedTrial

from raysim.config import ConfigError, keys_of
from raysim.sweeps.objectives import any_priced
from raysim.sweeps.space import NEVER
from raysim.sweeps.study import Baseline, RaceTerms, Study
from raysim.training.trackers import check_trackers
from raysim.workloads.data import bind_data
from raysim.workloads.metrics import own_metric

MIN_SEEDS = 3  # for a verdict, as in `analysis.comparison.statistics`


def check_fields(study: Study) -> None:
    """Raise ConfigError if a field does not fit the others or the base."""
    config = study.config({})
    objectives = [objective.name for objective in study.objectives]
    baselines = [baseline.name for baseline in study.baselines]
    for field, names in (
        ("seeds", study.seeds),
        ("objectives", objectives),
        ("constraints", [constraint.name for constraint in study.constraints]),
        ("baselines", baselines),
    ):
        twice = [name for name in names if list(names).count(name) > 1]
        if twice:
            raise ConfigError(f"`{field}` must be different, but {twice[0]} occurs twice.")
    if study.trials is None and study.sampler != "grid":
        raise ConfigError(f"`trials` must be given with `sampler` = {study.sampler!r}, which never runs out of points.")
    if study.trials is not None and study.trials < len(study.baselines):
        raise ConfigError(f"`trials` must be at least the baselines ({len(study.baselines)}), but got {study.trials}.")
    if study.early_stopping == "asha" and not config.evaluate_every_steps:
        raise ConfigError(
            "`early_stopping` = 'asha' needs `evaluate_every_steps` of at least 1 in the base, but got 0."
        )
    check_trackers(config.report_to or ())
    if any_priced(study.objectives) and not config.profile_every_steps:
        raise ConfigError("`profile_every_steps` of the base must be at least 1, for steps to be priced, but got 0.")
    for constraint in study.constraints:
        if constraint.objective not in objectives:
            known = ", ".join(objectives)
            raise ConfigError(
                f"`constraints.objective` must be one of `objectives` ({known}), but got {constraint.objective!r}."
            )
        if constraint.of is not None and constraint.of not in baselines:
            known = ", ".join(baselines) or "none"
            raise ConfigError(f"`constraints.of` must name one of `baselines` ({known}), but got {constraint.of!r}.")


def _check_baseline(study: Study, baseline: Baseline) -> None:
    """Raise ConfigError if a baseline is not a point of the space, or not a valid configuration."""
    if (baseline.params is None) == (baseline.set is None):
        raise ConfigError(f"The baseline {baseline.name} must have exactly one of `params` and `set`.")
    if baseline.params is None and study.sampler == "nsga2":
        raise ConfigError(
            f"The baseline {baseline.name} must have `params` with `sampler` = 'nsga2', which recombines the parameters of trials."
        )
    try:
        trial = FixedTrial(dict(baseline.params or {}))
        overrides = study.overrides(trial, baseline.name)
        unused = sorted(set(baseline.params or {}) - set(trial.distributions))
        if unused:
            raise ValueError(f"the space does not use `{unused[0]}`")
        study.config(overrides)
    except ConfigError as error:
        raise ConfigError(f"The baseline {baseline.name}: {error}") from None
    except ValueError as error:
        reason = str(error).partition(". ")[0].rstrip(".")
        raise ConfigError(f"`params` of the baseline {baseline.name} must be a point of the space: {reason}.") from None


def _check_draws(study: Study) -> None:
    """Raise ConfigError if drawing fails, or if a choice or an end of a range occurs in no valid configuration."""
    good: set[tuple[str, str]] = set()
    bad: dict[tuple[str, str], list[str]] = {}
    try:
        drawn = study.drawn()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"The space cannot be drawn from: {type(error).__name__}: {error}.") from None
    for params, overrides in drawn:
        choices = {(name.rpartition(".")[2], repr(value)) for name, value in params.items()}  # regardless of their key
        choices |= {("", "")}
        if choices <= good:
            continue
        try:
            study.config(overrides)
            good |= choices
        except ConfigError as error:
            for choice in choices:
                bad.setdefault(choice, []).append(str(error))
    enough = 1 if study.sampler == "grid" else NEVER
    for (name, value), errors in sorted(bad.items()):
        if (name, value) not in good and (len(errors) >= enough or not name):
            never = f"`{name}` = {value} is never valid" if name else "no drawn configuration is valid"
            raise ConfigError(f"`space`: {never}: {errors[0]}")


def check_trials(study: Study) -> None:
    """Raise ConfigError if the trials of a study cannot be drawn, confirmed or raced, or a baseline is invalid."""
    _check_draws(study)
    for baseline in study.baselines:
        _check_baseline(study, baseline)
    if study.profile is not None:
        try:
            for config in study.configs:
                study.profile.check_run(config.stages, config.microbatch_size)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    if study.confirm:
        if study.confirm < MIN_SEEDS:
            raise ConfigError(f"`confirm` must be 0 or at least {MIN_SEEDS} seeds, but got {study.confirm}.")
        _check_judged(study, "confirm")
    if study.race is not None:
        _check_race(study, study.race)
    elif study.price_per_hour is not None:
        raise ConfigError("`price_per_hour` is for a `budget` in money: add `--budget '40 EUR'`.")
    elif study.planned_seeds is not None:
        raise ConfigError("`planned_seeds` is written by the plan of a `budget`: give `seeds` instead.")


def _check_judged(study: Study, field: str) -> Baseline:
    """Return the dense baseline; raises ConfigError if there is none, or no objective by which to compare settings with it."""
    if study.dense is None:
        raise ConfigError(f"`{field}` needs a baseline without compression among `baselines`, but there is none.")
    if not any(objective.quality is not None for objective in study.objectives):
        raise ConfigError(
            f"`{field}` needs accuracy_on, loss_on or another quality with compression on among `objectives`."
        )
    return study.dense


def _check_race(study: Study, terms: RaceTerms) -> None:
    """Raise ConfigError if settings cannot be paired with dense, seed by seed and step by step."""
    baseline = _check_judged(study, "race")
    least = max(MIN_SEEDS, terms.first)
    if len(study.seeds) < least:
        raise ConfigError(f"`race` needs at least {least} seeds, but got {len(study.seeds)}: add `--seeds 5`.")
    if study.sampler not in ("grid", "random"):
        raise ConfigError(
            f"`race` starts all settings together, so `sampler` must be grid or random, but got {study.sampler!r}."
        )
    if study.early_stopping != "none":
        raise ConfigError("`race` stops trials itself: leave out `early_stopping`, or `race`.")
    dense = study.config(study.overrides_at(baseline.params, baseline.name)).flat()
    free = keys_of("place", "observation", "arithmetic", "compression", "seed")
    for config in study.configs:
        flat = config.flat()
        other = next((key for key in sorted({*flat, *dense} - free) if flat.get(key) != dense.get(key)), None)
        if other is not None:
            raise ConfigError(
                f"`race` compares settings of compression, so `{other}` must be the same in all trials, but got "
                f"{flat.get(other)!r} and {dense.get(other)!r} in dense. Leave out `race`."
            )


def check_branches(study: Study, num_steps: int) -> None:
    """Raise ConfigError if trials cannot be trained for `num_steps` steps from the points of `branches`."""
    base, points = study.config({}), study.branch_steps
    if base.steps is None:
        raise ConfigError(
            "`branches` needs `steps` in the base, because its points are shares of them, but got epochs."
        )
    if base.start is not None:
        raise ConfigError("`branches` makes the run from which trials start: leave out `start` of the base.")
    for field, given in (
        ("budget", study.budget is not None),
        ("race", study.race is not None),
        ("confirm", bool(study.confirm)),
        ("early_stopping", study.early_stopping != "none"),
        ("constraints.of", any(constraint.of is not None for constraint in study.constraints)),
    ):
        if given:
            sentence = f"`{field}` must be left out with `branches`, whose table judges each point."
            if field in ("budget", "race"):
                sentence += " To race from one point, train dense with `checkpoint_at_steps`, and set `start=FOLDER@STEP` instead."
            raise ConfigError(sentence)
    if study.sampler != "grid":
        raise ConfigError(
            f"`branches` trains every setting at every point, so `sampler` must be grid, but got {study.sampler!r}."
        )
    for baseline in study.baselines:
        _check_baseline(study, baseline)
    if study.dense is None:
        raise ConfigError("`branches` needs a baseline without compression among `baselines`, but there is none.")
    if len(set(points)) < len(points):
        raise ConfigError(
            f"`branches.at` must give different steps of the {base.steps} of the base, but got {', '.join(map(str, points))}."
        )
    most = base.steps - max(points)
    if num_steps > most:
        raise ConfigError(
            f"`branches.steps` must be at most {most}, from the last point (step {max(points)}) to the end of the base's {base.steps} "
            f"steps, but got {num_steps}."
        )


def check_here(study: Study) -> None:
    """Raise ConfigError if data or a custom metric is missing on this machine; on a cluster, nodes may have other files."""
    try:
        for name in study.config({}).metrics or ():
            if ":" in name:
                own_metric(name)
        for data in {repr(config.data): config.data for config in study.configs}.values():
            bind_data(data.name, data.options)
    except ValueError as error:
        raise ConfigError(str(error)) from None
