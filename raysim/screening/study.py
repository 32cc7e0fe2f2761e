"""Write a study of the settings worth training, beside dense, on the screen's own model and data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from raysim.forecast.fleet import SAME, Setting
from raysim.network.topology import Network
from raysim.notation import InputError
from raysim.pipeline.plan import Plan
from raysim.quality import MEASURES
from raysim.screening.screen import Screen, words
from raysim.storage.files import output_file

SEEDS = 5
LONGEST = 4096  # characters of a path
PATHS = ("path", "tokenizer", "config", "start", "profile")
"""Keys and options that may hold a path; other texts are names, even if there is a file of that name."""


def write_study(done: Screen, base: Mapping[str, Any], path: Path, transport: str) -> str:
    """Write the study's file and return a summary of it; raises InputError if no setting is worth training.

    `base`: the values of the screened run, nested as in its file; relative paths of existing files become absolute.
    """
    settings = [each.setting for each in done.worth()]
    if not settings:
        raise InputError("`--study`: no setting is worth training, so there is nothing to study.")
    study = study_of(done.plan, done.networks, settings, base, transport)
    head = (
        f"# Written by raysim screen: the settings worth training of {done.config.name}, beside dense.\n"
        f"# Train them by: raysim sweep {path.name}\n"
    )
    with output_file(path) as file:
        file.write((head + tomli_w.dumps(study)).encode())
    return (
        f"Study: {path}, {len(settings)} settings and dense on {SEEDS} seeds, {SEEDS * (len(settings) + 1)} runs. "
        f"Train it by: raysim sweep {json.dumps(str(path)) if ' ' in str(path) else path}"
    )


def study_of(
    plan: Plan, networks: Sequence[Network], settings: Sequence[Setting], base: Mapping[str, Any], transport: str
) -> dict[str, Any]:
    """Return the keys of a study of settings beside dense, on the model and data of the run whose values are `base`."""
    measure = plan.task.measures[0]
    objective = f"{measure.name}_on" if measure.name in MEASURES else measure.name
    priced = [f"step_s@{network.name or network!r}/{transport}" for network in networks]
    own = {key: _absolute(key, value) for key, value in base.items() if key != "name"}
    return {
        "seeds": list(range(SEEDS)),
        "sampler": "grid",
        "early_stopping": "none",
        "objectives": [objective, "wire_bytes", *priced],
        "constraints": [{"objective": objective, "within": measure.margin / 100, "of": "dense"}],
        "base": own,
        "baselines": [{"name": "dense", "set": _keys(Setting(), plan)}],
        "space": {"variants": {words(setting): _keys(setting, plan) for setting in settings}},
    }


def _keys(setting: Setting, plan: Plan) -> dict[str, str]:
    """Return a setting's keys of a run; those that have no effect in this run are left out."""
    keys = setting._asdict()
    if not plan.boundaries:
        del keys["forward"], keys["backward"]
    if plan.num_replicas == 1:
        assert keys["replica_gradient"] == SAME, "one replica has no gradients to average"
        del keys["replica_gradient"]
    if not plan.tied:
        assert keys["tied_gradient"] == SAME, "no tied parameters to sum"
        del keys["tied_gradient"]
    return keys


def _absolute(key: str, value: Any) -> Any:
    """Return a value with the relative paths of existing files made absolute."""
    if isinstance(value, Mapping):
        return {name: _absolute(name, inner) for name, inner in value.items()}
    if key not in PATHS or not isinstance(value, str) or len(value) > LONGEST:
        return value
    folder, at, step = value.partition("@") if key == "start" else (value, "", "")
    path = Path(folder).expanduser()
    return f"{path.absolute()}{at}{step}" if path.exists() else value
