"""Folders of runs for the tests of the report: a few that are trained, and studies of many made of their records."""

import math
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from configurations import SMALL

from raysim import train
from raysim.config import make_config
from raysim.records import schema_of, write_table

SETTINGS = {
    "dense": {},
    "q8": {"forward": "Quantize(8)", "backward": "Quantize(8)"},
    "topk": {"forward": "TopK(0.1)"},
    "feedback": {"forward": "ErrorFeedback(TopK(0.3))", "backward": "TopK(0.3)"},
}
SEEDS = (1, 2, 3)
SPITE = "<img src=x onerror=alert(1)>|`*_"  # of which nothing may come but itself


def train_settings(folder):
    """Train every setting once, a few steps; the other seeds are copies with another final quality."""
    for name, changes in SETTINGS.items():
        first = folder / f"{name}-s{SEEDS[0]}"
        config = make_config({**SMALL, **changes, "seed": SEEDS[0], "evaluate_every_steps": 2})
        run = train(config, engine="inline", out=first)
        for seed in SEEDS[1:]:
            finals = {
                f"final_accuracy_{mode}": run.row[f"final_accuracy_{mode}"] + seed / 100 for mode in ("on", "off")
            }
            copy_run(first, folder / f"{name}-s{seed}", seed=seed, **finals)
    return folder


def copy_run(source, target, **changes):
    """Copy a run with another configuration in its `run.parquet`: what it recorded stays."""
    shutil.copytree(source, target)
    change_row(target, **changes)
    return target


def change_row(folder, drop=(), **changes):
    """Write a run's `run.parquet` anew, with other values and without some columns."""
    table = pq.read_table(folder / "run.parquet")
    row = table.to_pylist()[0]
    dropped = {*drop, "job", "setting"}  # which reading computes anew
    columns = {
        name: pa.array([row[name]], table.schema.field(name).type) for name in table.column_names if name not in dropped
    }
    write_table(
        pa.table(columns | {name: pa.array([value]) for name, value in changes.items()}), folder / "run.parquet"
    )


def change_columns(file, **changes):
    """Replace columns of a table by functions of their values, as arrays."""
    table = pq.read_table(file)
    for name, change in changes.items():
        place, kind = table.schema.get_field_index(name), table.schema.field(name)
        values = np.array(table[name].to_pylist(), float)
        table = table.set_column(place, kind, pa.array(change(values), kind.type, safe=False))
    write_table(table, file)


def slow_but_small(folder):
    """Let a run's packets take long to pack and weigh nothing: last on a free network, first on a slow one."""
    change_columns(folder / "actions.parquet", encode_s=lambda s: 0 * s + 0.05, wire_bytes=lambda size: 0 * size + 1)


def make_study(runs, folder, count):
    """Make a study of `count` runs of the records of a few, with settings and qualities of their own."""
    generator = np.random.default_rng(0)
    trials = folder / "trials"
    places = [f"dense-s{seed}" for seed in SEEDS]
    for seed, place in zip(SEEDS, places, strict=True):
        copy_run(runs / place, trials / f"0-s{seed}", final_accuracy_on=0.9 + seed / 1000, final_accuracy_off=0.9)
    for number in range(1, math.ceil((count - len(SEEDS)) / len(SEEDS)) + 1):
        codec = ("TopK({:g})", "Quantize({:g})", "ErrorFeedback(TopK({:g}))", "RandomK({:g})")[number % 4]
        strength = 2 + number // 4 % 7 if number % 4 == 1 else (1 + number) / 100
        source = ("topk", "q8", "feedback", "topk")[number % 4]
        for seed in SEEDS[: min(len(SEEDS), count - len(SEEDS) - (number - 1) * len(SEEDS))]:
            good = 0.9 - 0.3 * generator.random() * (number % 5 > 1)
            copy_run(
                runs / f"{source}-s{seed}",
                trials / f"{number}-s{seed}",
                forward=codec.format(strength),
                final_accuracy_on=good,
                final_accuracy_off=good - 0.1 * generator.random(),
            )
    return folder


def write_decisions(folder, steps=6):
    """Write decisions as GraVAC takes them into a run's folder, all replicas alike."""
    rows = [
        {
            "step": step,
            "where": "replica_gradient",
            "stage": stage,
            "layer": f"layer{stage}.weight",
            "method": "GraVAC(TopK, cf_min=10.0, cf_max=1000.0)",
            "branch": "candidate" if step % 2 else "minimum",
            "factor": 10.0 * (1 + step),
            "minimum": 10.0,
            "candidate": 20.0,
            "gain_minimum": 0.9,
            "gain_candidate": 0.8,
            "gain": 0.85 - step / 100,
            "event": "promote" if step == 3 else None,
            "reason": "gain <of> the candidate | above epsilon",
        }
        for step in range(steps)
        for stage in range(2)
    ]
    write_table(pa.Table.from_pylist(rows, schema_of("decisions")), folder / "decisions.parquet")
