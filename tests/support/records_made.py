"""Runs and studies as raysim's own writers leave them, made in a moment: no model is trained for them."""

import json
import math
from typing import Any

import pyarrow as pa

from raysim.config import make_config
from raysim.records import SCHEMA_VERSION, SCHEMAS, Recorder, write_table
from raysim.records.schema import OCCASIONAL, schema_of

FILES: dict[tuple[str, str], bytes] = {}
"""Files of tables by their rows: most runs have the same, and to write one takes longer than all else."""


def configuration(**changes):
    """Return a configuration as `run.parquet` has it, flat."""
    return make_config({"steps": 4, "num_stages": 3, "profile_every_steps": 0, **changes}).flat()


def write_run(
    folder,
    *,
    status="finished",
    version=SCHEMA_VERSION,
    finals=(),
    extra=(),
    wire_bytes=100,
    tables=True,
    predictions=3600,
    samples=100,
    **changes,
):
    """Write a run of 4 steps and 3 stages. `finals`: its final evaluation; `extra`: columns of `run.parquet` besides."""
    flat: dict[str, Any] = {key: list(v) if isinstance(v, tuple) else v for key, v in configuration(**changes).items()}
    flat |= {key: json.dumps(flat[key]) for key in ("forward", "backward") if isinstance(flat[key], list)}
    steps = flat["steps"] or 4
    rows: dict[str, list[dict[str, Any]]] = {table: [] for table in SCHEMAS}
    over = status in ("finished", "diverged")
    row = flat | {"schema_version": version, "run_id": folder.name, "status": status, "error": None}
    row |= {"chance_loss": 2.3, "chance_accuracy": 0.1, **dict(extra)}
    for step in range(steps if tables else 0):
        for direction in ("forward", "backward"):
            for boundary in range(2):
                link = {"step": step, "replica": 0, "boundary": boundary, "direction": direction, "packets": 4}
                sizes = {"codec": flat[direction], "wire_bytes": wire_bytes // 4, "dense_bytes": 250}
                rows["links"].append(link | sizes)
        sizes = {"wire_bytes": wire_bytes, "dense_bytes": 1000}
        rows["steps"].append({"step": step, "epoch": 0, "loss": 2.0 - step / 10, "seconds": 0.1} | sizes)
    finals = dict(finals)
    for mode in ("on", "off"):
        if f"loss_{mode}" in finals or f"accuracy_{mode}" in finals:
            loss = finals.get(f"loss_{mode}", math.nan)
            accuracy = finals.get(f"accuracy_{mode}", math.nan)
            evaluated = {"loss": loss, "accuracy": accuracy, "predictions": predictions, "samples": samples}
            rows["evals"].append({"step": steps, "mode": mode, "batchnorm": "running", **evaluated})
            row |= {f"final_loss_{mode}": loss, f"final_accuracy_{mode}": accuracy}
    recorder = Recorder(folder)
    recorder.open()
    if over:
        recorder.drop_parts()
        for table, each in rows.items():
            if each or table not in OCCASIONAL:
                write_once(table, each, folder / f"{table}.parquet")
        row |= {"wire_bytes": wire_bytes * steps, "dense_bytes": 1000 * steps, "steps_done": steps}
    else:
        for table, each in rows.items():
            for one in each:
                recorder.add(table, one)
        recorder.flush()
    recorder.write_run(row)
    recorder.close()
    return folder


def write_once(table, rows, file):
    """Write a table's file, or that of the same rows again."""
    key = table, repr(rows)
    if key not in FILES:
        write_table(pa.Table.from_pylist(rows, schema_of(table)), file)
        FILES[key] = file.read_bytes()
    file.write_bytes(FILES[key])


def write_study(folder, trials, *, objectives=(), name="study"):
    """Write a study's `study.toml` and `trials.parquet`: `trials` are rows of what differs from the usual."""
    folder.mkdir(parents=True)
    usual = {"study": name, "baseline": False, "status": "finished", "seeds": [0], "runs": []}
    types = {
        "name": pa.string(),
        "same_as": pa.int64(),
        "started_at": pa.timestamp("us", "UTC"),
        "seconds": pa.float64(),
        "error": pa.string(),
        "seeds": pa.list_(pa.int64()),
        "runs": pa.list_(pa.string()),
    }
    rows = [{**dict.fromkeys(types), **usual, "trial": number, **trial} for number, trial in enumerate(trials)]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = pa.table({c: pa.array([row.get(c) for row in rows], type=types.get(c)) for c in columns})
    write_table(table, folder / "trials.parquet")
    written = "".join(f'[[objectives]]\nname = "{n}"\ndirection = "{d}"\n' for n, d in dict(objectives).items())
    (folder / "study.toml").write_text(f'name = "{name}"\n{written}', encoding="utf-8")
    return folder
