"""Commands for missing runs: the recorded configuration with other compression and other seeds."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from raysim.analysis.comparison.contexts import ComparedRuns
from raysim.analysis.data.settings import COMPRESSION, NO_SETTING
from raysim.analysis.runs.results import Results
from raysim.config.identity import Setting, plain
from raysim.plugins import from_record

LONGEST_NAME = 200  # bytes of a folder's name, of which file systems take 255


class Cost(NamedTuple):
    """The cost of missing runs."""

    runs: int
    seconds: float | None
    """Seconds of all commands in turn, by the seconds of similar recorded runs; None if there is no similar run."""

    def __str__(self) -> str:
        """Return the cost in words.

        >>> str(Cost(6, 200.0)), str(Cost(1, None))
        ('6 runs, about 4 minutes one after another', '1 run, of unknown duration')
        """
        count = f"{self.runs} run{'' if self.runs == 1 else 's'}"
        if self.seconds is None:
            return f"{count}, of unknown duration"
        hours, minutes = self.seconds / 3600, math.ceil(self.seconds / 60)
        about = f"{hours:.1f} hours" if hours >= 2 else f"{minutes} minute{'' if minutes == 1 else 's'}"
        return f"{count}, about {about} one after another"


def cost_of(results: Results, context: ComparedRuns, wanted: Mapping[Setting, Iterable[int]]) -> Cost | None:
    """Return the cost of training settings at seeds, by the recorded seconds of the runs of `context`; None for no runs."""
    count = sum(len(list(seeds)) for seeds in wanted.values())
    if not count:
        return None
    runs = results.runs[results.runs["run"].isin(context.rows["run"])]
    seconds = runs["seconds"].astype(float).median() if "seconds" in runs and len(runs) else math.nan
    return Cost(count, None if math.isnan(seconds) else count * float(seconds))


def train_commands(
    results: Results, context: ComparedRuns, wanted: Mapping[Setting, Iterable[int]], recipe: tuple[str, ...]
) -> list[str]:
    """Return one command for each setting that trains the wanted seeds, in new folders beside the loaded ones.

    All other keys are as in the runs of `context`, or as in `recipe` if it has no runs. A configuration that
    cannot be written as a recipe with overrides came from a file; the command uses the name of its runs.
    """
    runs = results.runs[results.runs["run"].isin(context.rows["run"])]
    like = runs.iloc[0] if len(runs) else None
    base, changes = _base(like, results.keys, recipe)
    commands = []
    for setting, seeds in sorted(wanted.items(), key=lambda item: str(item[0])):
        if not seeds:
            continue
        words = ["raysim", "train", base, *changes]
        words += [f"{key}={str(value).lower() if value is True else value}" for key, value in setting.changes().items()]
        root = results.folders[0]
        folder = _folder(root if isinstance(root, Path) else Path("results"), setting, context, seeds)
        each = sorted(seeds)
        if len(each) == 1:
            commands.append(shlex.join([*words, f"seed={each[0]}", "--out", f"{folder}-s{each[0]}"]))
        else:
            line = f"{shlex.join(words)} seed=$s --out {shlex.quote(folder)}-s$s"
            commands.append(f"for s in {' '.join(map(str, each))}; do {line}; done")
    return commands


def _base(like: pd.Series[Any] | None, keys: Iterable[str], recipe: tuple[str, ...]) -> tuple[str, list[str]]:
    """Return a recipe and the changes to it that give a recorded configuration, except for compression and seed."""
    if like is None:
        return recipe[0], list(recipe[1:])
    from raysim.config import ConfigError, read_config, recipe_names

    name = str(like.get("name"))
    for base in sorted(recipe_names(), key=lambda known: (known != name, known != recipe[0])):
        changes = [
            f"{key}={_toml(value)}"
            for key, value in _differing(like, keys, read_config(base).flat()).items()
            if value is not None  # a key without a value disappears together with its choice
        ]
        try:
            with from_record():
                flat = read_config(base, changes).flat()
        except ConfigError:
            continue
        if not _differing(like, keys, flat):
            return base, changes
    return f"{name}.toml", []  # the user's own file, by the name of its runs


def _differing(like: pd.Series[Any], keys: Iterable[str], flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys in which a recorded configuration differs from this one, with its recorded values."""
    compared = {*keys, *(key for key in flat if "." in key)} - {*COMPRESSION, *NO_SETTING, "seed", "num_stages", "cuts"}
    recorded = {key: plain(like.get(key)) for key in sorted(compared)}
    changes = {key: value for key, value in recorded.items() if value != plain(flat.get(key))}
    cuts, count = plain(like.get("cuts")), plain(like.get("num_stages"))
    if cuts is not None:  # a run records both cuts and number of stages; the cuts are exact
        return changes if plain(flat.get("cuts")) == cuts else changes | {"cuts": cuts}
    return changes if (flat.get("num_stages") or 4) == count else changes | {"num_stages": count}


def _toml(value: Any) -> str:
    """Return a value as TOML, texts without quotes."""
    return value if isinstance(value, str) else json.dumps(value)


def _folder(root: Path, setting: Setting, context: ComparedRuns, seeds: Iterable[int]) -> str:
    """Return a new folder for runs of a setting, to which -sSEED is added."""
    text = str(setting)
    for key in ("forward", "backward", "replica_gradient"):
        text = text.replace(f"{key}=", "")
    name = re.sub(r"[^\w.]+", "-", text).strip("-")
    tail = re.sub(r"[^\w.=]+", "-", context.label.partition(",")[2]).strip("-")
    name = f"{name}-{tail}" if tail else name
    if len(name.encode()) > LONGEST_NAME:
        name = f"{name.encode()[:LONGEST_NAME].decode(errors='ignore')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    folder, i = root / name, 1
    while any(Path(f"{folder}-s{seed}").exists() for seed in seeds):
        i += 1
        folder = root / f"{name}-{i}"
    return str(folder)
