"""Reading the runs and studies of folders; unreadable files are left out and named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from raysim.analysis.data import AnalysisError
from raysim.analysis.data.folders import Contents, find_runs
from raysim.analysis.data.reading import file_problems, read_files, stack, unreadable
from raysim.analysis.runs.results import Results, RunPool
from raysim.config.keys import run_keys
from raysim.notation import printable
from raysim.records import FINISHED, SCHEMA_VERSION, present_status
from raysim.records.bounds import NEEDED, check_row, identified, printable_rows
from raysim.records.packs import open_folder
from raysim.records.tables import FEW_ROWS
from raysim.storage.places import Place, PlaceError


def load(*folders: str | Path) -> Results:
    """Return the runs and studies in `folders`, paths or URIs of buckets, at any depth, as tidy DataFrames.

    `run.parquet` of every run is read immediately, the other tables on first use. Unreadable files are left out and named in
    `problems`. Raises AnalysisError if a folder does not exist.

    >>> load("results/none")
    Traceback (most recent call last):
    raysim.analysis.data.AnalysisError: There is no folder results/none.
    """
    if not folders:
        raise AnalysisError("`load` needs at least one folder.")
    try:
        roots = tuple(open_folder(folder) for folder in folders)
    except PlaceError as error:
        raise AnalysisError(str(error)) from None
    contents = find_runs(roots)
    problems = list(contents.problems)
    runs, rows, keys = _read_runs(contents, problems)
    kept = {name: contents.runs[name] for name in runs["run"]}
    if not contents.runs:
        problems.append(f"There is no run in {', '.join(map(str, folders))}: no folder there has a run.parquet.")
    problems += _unfinished(runs) + _other_schemas(runs) + file_problems(runs, kept)
    problems = [printable(problem) for problem in problems]
    over = runs["run"][runs["status"].isin(FINISHED)].astype(str)
    pool = RunPool({run: kept[run] for run in over}, rows, problems)
    return Results(roots, contents._replace(runs=kept), runs, keys, problems, pool)


def _read_runs(contents: Contents, problems: list[str]) -> tuple[pd.DataFrame, dict[str, dict[str, Any]], list[str]]:
    """Return one row for each readable run, the rows as written, and the keys of the configuration among the columns."""
    files = [path / "run.parquet" for path in contents.runs.values()]
    good = {}
    for name, file, table in zip(contents.runs, files, read_files(files, FEW_ROWS), strict=True):
        if isinstance(table, str):
            problems.append(table)
        elif lacking := [column for column in NEEDED if column not in table.column_names]:
            problems.append(f"{file} is left out: it is not a run of raysim, since it lacks {', '.join(lacking)}.")
        elif len(table) != 1:
            problems.append(f"{file} is left out: it must have one row, of a run, but has {len(table)}.")
        else:
            try:
                check_row(table)
            except pa.ArrowException as error:
                problems.append(unreadable(file, error))
            else:
                good[name] = identified(printable_rows(table))
    keys = list(dict.fromkeys(key for table in good.values() for key in _configuration(table.column_names)))
    frame = stack(list(good.values()), "run", list(good))
    trained = ~frame["probe"].fillna(False).astype(bool) if "probe" in frame else pd.Series(True, frame.index)
    defaults: dict[str, Any] = {key.name: key.default for key in run_keys() if key.name in keys}
    for name, default in defaults.items():
        if default is not None:  # a run older than the key did as by its default
            frame.loc[trained & frame[name].isna(), name] = default
    for column in (*NEEDED, "job", "setting", "wire_bytes", "dense_bytes"):
        if column not in frame:
            text = column in ("status", "job", "setting")
            frame[column] = pd.Series([None] * len(frame), dtype="str" if text else "Int64")
    trials = _trials(contents.studies)
    of_runs = [trials.get(str(contents.runs[name]), (None, "")) for name in frame["run"]]
    frame.insert(1, "study", pd.Series([contents.study_of.get(name) for name in frame["run"]], dtype="str"))
    frame.insert(2, "trial", pd.Series([number for number, _ in of_runs], dtype="Int64"))
    for i, column in enumerate(("job", "setting"), start=3):
        frame.insert(i, column, frame.pop(column))
    for i in frame.index[frame["status"] == "interrupted"]:
        if of_runs[i][1] == "pruned":  # intended: the sweep stopped the trial
            frame.loc[i, "status"] = "pruned"
    for i in frame.index[frame["status"] == "running"]:
        frame.loc[i, "status"] = present_status(contents.runs[str(frame.loc[i, "run"])], "running")
    sent = frame["wire_bytes"].astype("float64")
    frame["compression_factor"] = frame["dense_bytes"].astype("float64") / sent.where(sent > 0)
    return frame, {name: table.to_pylist()[0] for name, table in good.items()}, keys


def _configuration(columns: list[str]) -> list[str]:
    """Return the columns of a `run.parquet` that are keys of its configuration: all before the schema version."""
    return columns[: columns.index("schema_version")]


def _trials(studies: Mapping[str, Place]) -> dict[str, tuple[int, str]]:
    """Return the number and the status of the trial of each run, by the run's folder."""
    folders = [folder for folder in studies.values() if (folder / "trials.parquet").is_file()]
    tables = read_files([folder / "trials.parquet" for folder in folders])
    return {
        str(folder / run): (row["trial"], row["status"])
        for folder, table in zip(folders, tables, strict=True)
        if not isinstance(table, str) and {"trial", "status", "runs"} <= set(table.column_names)
        for row in reversed(table.select(["trial", "status", "runs"]).to_pylist())  # the first of equal trials counts
        for run in row["runs"] or ()
    }


def _unfinished(runs: pd.DataFrame) -> list[str]:
    over = runs["status"].isin({*FINISHED, "pruned"})  # pruning is the sweep's decision, not a problem
    if over.all():
        return []
    counts = ", ".join(f"{count} {status}" for status, count in sorted(Counter(runs["status"][~over]).items()))
    if not over.any():
        return [f"None of the {len(runs)} runs is finished ({counts}): their records so far are shown."]
    return [f"{(~over).sum()} of {len(runs)} runs are not finished ({counts}): they are shown, but not compared."]


def _other_schemas(runs: pd.DataFrame) -> list[str]:
    other = runs["schema_version"][runs["schema_version"] != SCHEMA_VERSION]
    if other.empty:
        return []
    versions = ", ".join(str(version) for version in sorted(other.dropna().unique()))
    return [
        f"{len(other)} of {len(runs)} runs have records of version {versions}, where this raysim writes {SCHEMA_VERSION}: "
        "unknown columns are left out, and missing columns are empty, or have the default of their key."
    ]
