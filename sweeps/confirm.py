"""Confirmation of a sweep's choice: the chosen settings and the dense baseline trained on held-out seeds.

The confirmation is a separate study in the folder `confirm` of the first, and all its trials are baselines. So it is
resumed, recorded and judged like any other study, and its `study.toml` records the choice.
"""

from __future__ import annotations

from dataclasses import replace

from raysim.analysis.data.folders import CONFIRMATION
from raysim.config import ConfigError
from raysim.sweeps.objectives import cost_among
from raysim.sweeps.runner import Sweep
from raysim.sweeps.study import FILES, STUDY, Baseline, Study
from raysim.sweeps.study_file import read_study
from raysim.sweeps.trial_rows import Rows, TrialRow, best_trials

CHOSEN = "trial-"  # before a chosen trial's number, in the name of its baseline
MOST = 5  # settings to confirm: each more costs power, and as many runs as there are held-out seeds


def confirming(sweep: Sweep) -> Sweep | None:
    """Return the sweep that confirms a sweep's choice, or None if no trial is worth confirming.

    The choice is made once: an existing confirmation is resumed, even after further trials. Raises ConfigError if it
    was begun with other seeds.
    """
    out = f"{sweep.store.out.rstrip('/')}/{CONFIRMATION}"
    for name in FILES:
        sweep.store.fetch_file(f"{CONFIRMATION}/{name}")
    if (sweep.folder / CONFIRMATION / STUDY).is_file():
        begun = read_study(sweep.folder / CONFIRMATION / STUDY)
        if list(begun.seeds) != fresh_seeds(sweep.study):
            raise ConfigError(f"`confirm` must be {len(begun.seeds)}, as when it began, but got {sweep.study.confirm}.")
        return Sweep(begun, out=out, resume=True, address=sweep.address, wait_s=sweep.wait_s)
    picked = chosen(sweep.study, sweep.rows)
    if not picked:
        return None
    return Sweep(confirmation(sweep.study, picked), out=out, address=sweep.address, wait_s=sweep.wait_s)


def fresh_seeds(study: Study) -> list[int]:
    """Return the seeds of the confirmation, which follow the study's own."""
    return [max(study.seeds) + 1 + i for i in range(study.confirm)]


def chosen(study: Study, rows: Rows) -> list[TrialRow]:
    """Return the trials to confirm: frontier trials with a mean quality within the margin of dense.

    At most `MOST`, the cheapest ones. Empty if no trial is within the margin. Raises ConfigError if harm is undefined.
    """
    quality = next(objective for objective in study.objectives if objective.quality is not None)
    measure = quality.quality
    assert measure is not None
    name = study.dense.name if study.dense is not None else None
    dense = next((row for row in rows if row.name is not None and row.name == name and row.status == "finished"), None)
    if dense is None:
        return []
    reference = dense.value(quality.name)
    assert reference is not None
    if why := measure.undefined(reference):
        raise ConfigError(f"Nothing to confirm: {why}.")
    near = []
    for row in best_trials(rows, study.objectives):
        value = row.value(quality.name)
        if row.name is None and value is not None and measure.harm(value, reference) <= measure.margin:
            near.append(row)
    cost = cost_among(study.objectives)
    if cost is not None:
        sign = 1 if cost.minimize else -1
        near.sort(key=lambda row: sign * (row.value(cost.name) or 0.0))
    return near[:MOST]


def confirmation(study: Study, picked: list[TrialRow]) -> Study:
    """Return the study that trains the dense baseline and the picked trials on held-out seeds."""
    dense = study.dense
    assert dense is not None
    baselines = [Baseline(dense.name, set=study.overrides_at(dense.params, dense.name))]
    baselines += [Baseline(f"{CHOSEN}{row.trial}", set=study.overrides_at(row.params)) for row in picked]
    return replace(
        study,
        name=f"{study.name}-{CONFIRMATION}",
        seeds=tuple(fresh_seeds(study)),
        trials=len(baselines),
        sampler="random",
        early_stopping="none",
        constraints=(),
        baselines=tuple(baselines),
        confirm=0,
        race=None,
        budget=None,
        price_per_hour=None,
        planned_seeds=None,
        screen=False,
    )


def chosen_trials(study: Study) -> list[int]:
    """Return the numbers of the trials that a confirmation's study names."""
    names = [baseline.name for baseline in study.baselines]
    return [int(name.removeprefix(CHOSEN)) for name in names if name.startswith(CHOSEN)]
