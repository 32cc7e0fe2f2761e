"""Runs and studies as DataFrames: small tables are read completely, large ones by columns and rows on request.

Nothing is copied or converted on disk: polars and DuckDB read the same files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa

from raysim.analysis.data import AnalysisError, ReplayError
from raysim.analysis.data.folders import USUAL_TRANSPORT, Contents, StudyFile, natural_direction
from raysim.analysis.data.reading import Filter, condition_of, labelled, read_files, scan, stack, to_frame
from raysim.notation import printable
from raysim.quality import Measure, measures_of
from raysim.records import SCHEMAS, schema_of, table_files
from raysim.records.bounds import most_rows
from raysim.storage.files import LARGEST_BYTES
from raysim.storage.places import Place, origin_of, read_place

if TYPE_CHECKING:
    from raysim.analysis.data.recording import Recording
    from raysim.analysis.runs.job_costs import JobCosts
    from raysim.analysis.runs.step import Replay
    from raysim.network.profile import Profile

USUAL_NETWORK = "1gbps"  # if neither the caller nor a study names one


class Results:
    """Runs and studies, one DataFrame per table; units are in the names of the columns.

    `runs` has one row for each run: its name (its folder relative to the loaded one, and the column `run` of all other tables),
    `study` and `trial` if it belongs to one, `job` and `setting` (what its steps compute, and what they compress), then the other
    columns of `run.parquet`, and `compression_factor`. `problems` has a sentence for everything left out; it grows as tables are
    read.
    """

    def __init__(
        self,
        folders: tuple[Place, ...],
        contents: Contents,
        runs: pd.DataFrame,
        keys: Sequence[str],
        problems: list[str],
        pool: RunPool,
    ) -> None:
        self.folders = folders
        self.runs = runs
        self.keys = tuple(keys)
        """Columns of `runs` that are keys of the configuration."""
        self.problems = problems
        self._contents = contents
        self._pool = pool

    def __repr__(self) -> str:
        counts = Counter(self.runs["status"].astype(str)) if len(self) else {}
        states = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
        parts = [f"{len(self)} runs" + (f" ({states})" if states else ""), f"{len(self._contents.studies)} studies"]
        if self.problems:
            parts.append(f"{len(self.problems)} problems")
        return f"Results({', '.join(repr(str(folder)) for folder in self.folders)}: {', '.join(parts)})"

    def __len__(self) -> int:
        return len(self.runs)

    def path(self, run: str) -> Place:
        """Return a run's folder; raises AnalysisError if it is not among these."""
        if run not in self._contents.runs:
            raise AnalysisError(f"There is no run {run!r} among these {len(self)}.")
        return self._contents.runs[run]

    @property
    def studies(self) -> dict[str, Place]:
        """The folders of the studies, by name."""
        return dict(self._contents.studies)

    @cached_property
    def rows(self) -> dict[str, dict[Any, Any]]:
        """The row of each run in `runs`, by its name."""
        return {str(row["run"]): row for row in self.runs.to_dict("records")}

    @property
    def measures(self) -> dict[str, Measure]:
        """The measures of all runs, by name."""
        columns = [name for name in ("measures", "data", "data.label") if name in self.runs]
        rows = self.runs[columns].drop_duplicates().to_dict("records")
        return {name: measure for row in rows for name, measure in measures_of(row).items()}

    def select(self, runs: pd.Series[bool] | pd.DataFrame | Iterable[str]) -> Results:
        """Return results of some runs only: selected by a mask over `runs`, by a frame of runs, or by name.

        The files of other runs are not opened, unless a pack stores them in the same file.
        """
        if isinstance(runs, pd.DataFrame):
            chosen = self.runs["run"].isin(runs["run"])
        elif isinstance(runs, pd.Series) and runs.dtype in (bool, "boolean"):
            chosen = runs.fillna(False).astype(bool)
        else:
            names = list(runs)
            for name in names:
                self.path(name)
            chosen = self.runs["run"].isin(names)
        kept = self.runs[chosen].reset_index(drop=True)
        paths = {name: self._contents.runs[name] for name in kept["run"]}
        contents = self._contents._replace(runs=paths)
        return Results(self.folders, contents, kept, self.keys, self.problems, self._pool)

    def replay(
        self,
        run: str,
        *,
        compute: str = "auto",
        profile: Profile | Path | str | None = None,
        transport: str = USUAL_TRANSPORT,
    ) -> Replay:
        """Return a run ready to be priced, with the costs of all loaded runs of its job, selected or not.

        Raises ReplayError if it cannot be.
        """
        self.path(run)
        return self._pool.replay(run, compute, profile, transport)

    def unpriced(self, compute: str = "auto") -> frozenset[str]:
        """Return the finished runs, of all loaded ones, that cannot be priced."""
        return self._pool.unpriced(compute)

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One row for each run and step: loss, learning rate, seconds, wire and dense bytes."""
        return self.table("steps")

    @cached_property
    def evals(self) -> pd.DataFrame:
        """One row for each evaluation: the loss and all metrics, with compression on and off."""
        return self.table("evals")

    @cached_property
    def links(self) -> pd.DataFrame:
        """One row for each run, step, boundary and direction: packets, bytes, codec seconds, fidelity."""
        return self.table("links")

    @cached_property
    def actions(self) -> pd.DataFrame:
        """One row for each action of the profiled steps: its start and end, and the seconds of codec and compute in it."""
        return self.table("actions")

    @cached_property
    def collectives(self) -> pd.DataFrame:
        """One row for each transfer between replicas, or between owners of a tied parameter, of the profiled steps."""
        return self.table("collectives")

    @cached_property
    def decisions(self) -> pd.DataFrame:
        """One row for each decision of an adaptive method, and why."""
        return self.table("decisions")

    @cached_property
    def trials(self) -> pd.DataFrame:
        """One row for each trial: parameters, objectives, their spread over seeds, constraints; `folder` is the study's."""
        files = {name: path / "trials.parquet" for name, path in self._contents.studies.items()}
        there = {name: file for name, file in files.items() if file.is_file()}
        read = read_files(list(there.values()))
        for sentence in read:
            if isinstance(sentence, str):
                self.complain(sentence)
        for name in sorted(files.keys() - there):
            self.complain(
                f"The study in {files[name].parent} has no trials.parquet: no trial has ended, or its runs alone were kept."
            )
        good = [(name, table) for name, table in zip(there, read, strict=True) if not isinstance(table, str)]
        return stack([table for _, table in good], "folder", [name for name, _ in good])

    def directions(self, study: str) -> dict[str, str]:
        """Return each objective of a study's `trials`, and whether it is to "minimize" or "maximize"."""
        trials = self.trials
        of_study = trials[trials["folder"] == study].dropna(axis=1, how="all")
        names = [str(name).removeprefix("objective.") for name in of_study if str(name).startswith("objective.")]
        given: Mapping[str, str] = {}
        try:
            given = StudyFile(self._contents.studies[study]).directions
        except (KeyError, OSError, ValueError) as error:
            self.complain(
                f"The study.toml of {study} cannot be read ({error}): objectives are minimised or maximised by their names."
            )
        return {name: given.get(name, natural_direction(name, self.measures)) for name in names}

    def planned_seeds(self, study: str) -> tuple[int, ...]:
        """Return the seeds that a study fixed before it began; none if its file names none."""
        return next((file.seeds for file in self._study_files([study])), ())

    def network_of(self, studies: Iterable[str]) -> str:
        """Return the network on which studies compare steps: the first of `step_s@NETWORK` in their objectives.

        "1gbps" if they name none, different ones, or a missing file.
        """
        networks = {file.network for file in self._study_files(studies) if file.network is not None}
        return networks.pop() if len(networks) == 1 else USUAL_NETWORK

    def pricing_of(self, runs: pd.DataFrame, **given: Any) -> dict[str, Any]:
        """Return the options of `replay`: `given`, or for None those by which the study of `runs` compares steps.

        The transport is that of its objectives. Studies that differ have the usual options, runs without one the recorded compute.
        """
        usual, studies = ("auto", None), runs["study"].dropna()
        files = self._study_files(studies)
        transports = {file.transport for file in files if file.transport is not None}
        found: set[tuple[str, Profile | None]] = set()
        for file in files if len(studies) == len(runs) else ():
            try:
                found.add((file.compute, None if file.profile is None else self._pool.profile(file.profile)))
            except (OSError, ValueError) as error:
                self.complain(f"{str(error).rstrip('.')}: steps are priced by the recorded compute.")
                found.add(usual)
        compute, profile = found.pop() if len(found) == 1 else usual
        transport = transports.pop() if len(transports) == 1 else USUAL_TRANSPORT
        own = {"compute": compute, "profile": profile, "transport": transport}
        return own | {key: value for key, value in given.items() if value is not None}

    def measure_of(self, runs: pd.DataFrame) -> Measure:
        """Return the measure by which runs of one job are judged.

        It is the first quality among the objectives of their studies; the first of their `metrics` if they belong to no
        study, or to studies that differ in it.
        """
        known = measures_of(runs.iloc[0].to_dict())
        files = self._study_files(runs["study"].dropna())
        chosen = {next((name for name in file.qualities if name in known), "") for file in files}
        return known[chosen.pop()] if len(chosen) == 1 and chosen != {""} else next(iter(known.values()))

    def _study_files(self, studies: Iterable[str]) -> list[StudyFile]:
        """Return the readable files of studies, each once."""
        files = []
        for study in set(studies):
            with suppress(KeyError, OSError, ValueError):
                files.append(StudyFile(self._contents.studies[study]))
        return files

    def files(self, table: str) -> list[str]:
        """Return the Parquet files of a table, run by run, for DuckDB or polars.

        The runs of a pack share one file, with all runs of the pack, and a column `run` that the file of a run does not have.
        """
        files = (file for of_run in self._files(table).values() for file in of_run)
        return list(dict.fromkeys(str(origin_of(file)) for file in files))

    def table(self, name: str, columns: Sequence[str] | None = None, where: Filter | None = None) -> pd.DataFrame:
        """Return a table of all runs: its `columns`, and the rows that satisfy `where`; only packs are read completely.

        `where` is pyarrow's: an expression, or tuples such as [("direction", "==", "forward")]. The first column names the
        run. Raises AnalysisError if there is no such table or column.
        """
        files = self._files(name)
        bounds = {file: most_rows(name, self.rows[run]) for run, of_run in files.items() for file in of_run}
        source = {file: i for i, of_run in enumerate(files.values()) for file in of_run}
        schema = schema_of(name, self.measures)
        wanted = list(schema.names if columns is None else [c for c in columns if c != "run"])
        for column in wanted:
            if column not in schema.names:
                raise AnalysisError(f"`columns` of {name} must be among {', '.join(schema.names)}, but got {column!r}.")
        condition = condition_of(where, schema)
        runs = pa.array(list(files), pa.string())
        scanned = scan(bounds, schema, wanted, condition)
        if any(isinstance(rows, str) for rows in scanned) and self._files(name) != files:
            return self.table(name, columns, where)  # some were merged or dropped by processes that write runs
        parts = [labelled(pa.schema([schema.field(c) for c in wanted]).empty_table(), runs, 0)]
        for file, rows in zip(bounds, scanned, strict=True):
            if not isinstance(rows, str):
                parts.append(labelled(rows, runs, source[file]))
            elif not any(problem.startswith(f"{origin_of(file)} ") for problem in self.problems):  # known since loading
                self.complain(rows)
        table = pa.concat_tables(parts).unify_dictionaries()
        frame = to_frame(table)
        if name == "steps" and where is None:
            self._check_steps(frame)
        return frame

    def _check_steps(self, steps: pd.DataFrame) -> None:
        """Report runs that count steps in `run.parquet` but have no rows of them."""
        if "steps_done" in self.runs:
            counting = self.runs[(self.runs["steps_done"] > 0) & ~self.runs["run"].isin(steps["run"])]
            for run, count in zip(counting["run"], counting["steps_done"], strict=True):
                folder = self.path(run)
                known = (f"{folder}/", f"The run in {folder} ")
                if not any(problem.startswith(known) for problem in self.problems):  # that problem says why
                    self.complain(f"The run in {folder} has done {count} steps, but its table of them is empty.")

    def _files(self, table: str) -> dict[str, list[Place]]:
        """Return the files of a table, run by run; the parts of an unfinished run."""
        if table not in SCHEMAS:
            raise AnalysisError(f"The tables of runs are {', '.join(SCHEMAS)}, but got {table!r}.")
        return {name: table_files(folder, table) for name, folder in self._contents.runs.items()}

    def complain(self, sentence: str) -> None:
        """Add a sentence to `problems`, once."""
        add_problem(self.problems, sentence)


class RunPool:
    """The finished runs of a folder, each read once, to be priced with the costs of its job.

    `folders` and `rows` (of `run.parquet`) are keyed by run name. `problems` takes a sentence for each run that
    cannot be priced.
    """

    def __init__(
        self, folders: Mapping[str, Place], rows: Mapping[str, Mapping[str, Any]], problems: list[str]
    ) -> None:
        self._folders = folders
        self._rows = rows
        self._problems = problems
        self._recordings: dict[str, dict[str, Recording]] = {}
        self._refused: dict[str, str] = {}
        self._costs: dict[tuple[str, str, str | Profile | None], JobCosts] = {}
        self._replays: dict[tuple[str, str, str | Profile | None, str], Replay] = {}
        self._profiles: dict[str, Profile] = {}

    def replay(self, run: str, compute: str, profile: Profile | Path | str | None, transport: str) -> Replay:
        """Return a run ready to be priced; raises ReplayError if it cannot be."""
        from raysim.analysis.runs.job_costs import JobCosts
        from raysim.analysis.runs.step import Replay

        recordings = self._read(compute)
        if run not in recordings:
            raise ReplayError(self._refused.get(run, f"The run {run} cannot be priced: it is not over."))
        named = str(profile) if isinstance(profile, Path) else profile
        key, basis = (run, compute, named, transport), (recordings[run].job, compute, named)
        if basis not in self._costs:
            self._costs[basis] = JobCosts([other for other in recordings.values() if other.job == basis[0]], profile)
        if key not in self._replays:
            self._replays[key] = Replay(recordings[run], costs=self._costs[basis], transport=transport)
        return self._replays[key]

    def profile(self, file: Place) -> Profile:
        """Return the profile of a study, the same one for equal files; raises OSError or ValueError."""
        from raysim.network.profile import Profile

        if not file.is_file():  # as in packs of older versions
            raise ValueError(f"The profile {str(file)!r} is missing")
        text = read_place(file, LARGEST_BYTES).decode()
        if text not in self._profiles:
            self._profiles[text] = Profile.from_json(text, str(file))
        return self._profiles[text]

    def unpriced(self, compute: str) -> frozenset[str]:
        """Return the runs that cannot be priced."""
        return frozenset(self._folders) - self._read(compute).keys()

    def _read(self, compute: str) -> Mapping[str, Recording]:
        from raysim.analysis.data.recording import Recording

        if compute not in self._recordings:
            self._recordings[compute] = {}
            for name, folder in self._folders.items():
                try:
                    self._recordings[compute][name] = Recording(folder, clock=compute, row=self._rows[name])
                except ReplayError as error:
                    self._refused[name] = str(error)
                    add_problem(self._problems, str(error))
        return self._recordings[compute]


def add_problem(problems: list[str], sentence: str) -> None:
    """Add a sentence to a list, once, without control characters."""
    sentence = printable(sentence)
    if sentence not in problems:
        problems.append(sentence)
