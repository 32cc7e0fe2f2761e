"""What a run leaves behind: Parquet with explicit schemas, units in the names, and a version.

While a run goes, rows are written in numbered parts, each whole and renamed into place; a finished run has one file a
table. A run that is killed loses at most what came after its last flush. Of a table that is there as a whole, parts are
leftovers: they are not read.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raysim.places import Place, PlaceError, arrow_source, open_place
from raysim.quality import Measure, measures_of

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 2

_STEP = ("step", pa.int32())
_REPLICA = ("replica", pa.int16())

SCHEMAS: dict[str, pa.Schema] = {
    "steps": pa.schema(
        [
            _STEP,
            ("epoch", pa.int32()),
            ("loss", pa.float64()),
            ("learning_rate", pa.float64()),
            ("gradient_norm", pa.float64()),  # before clipping; null where it is not clipped
            ("seconds", pa.float64()),
            ("wire_bytes", pa.int64()),
            ("dense_bytes", pa.int64()),
        ]
    ),
    "evals": pa.schema(
        [
            _STEP,  # steps done before it
            ("mode", pa.string()),  # links in evaluation: "on", "off", or "on_direct"
            ("batchnorm", pa.string()),  # statistics of training ("running"), or "estimated" anew under the mode
            ("loss", pa.float64()),
            ("accuracy", pa.float64()),  # null where the run does not measure it, as the further metrics
            ("perplexity", pa.float64()),
            ("predictions", pa.int64()),
            ("seconds", pa.float64()),
            # and a column for each further metric of the run, see `schema_of`
        ]
    ),
    "links": pa.schema(
        [
            _STEP,
            _REPLICA,
            ("stage", pa.int16()),  # of a replica gradient, null otherwise
            (
                "boundary",
                pa.int16(),
            ),  # null for replica gradients and for tied parameters, which cross between their owners
            ("direction", pa.string()),  # "forward", "backward", "replica_gradient" or "tied"
            ("codec", pa.string()),
            ("rounds", pa.int16()),  # of collectives, null for links
            ("packets", pa.int32()),
            ("wire_bytes", pa.int64()),
            ("dense_bytes", pa.int64()),  # of a replica gradient: of an uncompressed all-reduce
            ("gain", pa.float64()),  # squared norm received over squared norm to send, where measured
            ("fidelity", pa.float64()),  # 1 - squared norm of their difference over that to send, where measured
            ("residual_norm", pa.float64()),  # of all that the sender remembers, where measured
            ("encode_s", pa.float64()),
            ("decode_s", pa.float64()),
        ]
    ),
    "actions": pa.schema(
        [
            _STEP,
            _REPLICA,
            ("stage", pa.int16()),
            ("op", pa.string()),
            ("microbatch", pa.int32()),
            ("start_s", pa.float64()),  # of the driver's clock, since the stages came up or the run was resumed
            ("end_s", pa.float64()),
            ("decode_s", pa.float64()),
            ("compute_wall_s", pa.float64()),
            ("compute_cpu_s", pa.float64()),
            ("encode_s", pa.float64()),
            ("wire_bytes", pa.int64()),
            ("dense_bytes", pa.int64()),
            # Beside one forward or backward: "twin", the same with the parameters of the step before, or "sensitivity",
            # measuring that of gradients to errors; null where there was nothing.
            ("work", pa.string()),
        ]
    ),
    "collectives": pa.schema(  # a row for each transfer of the groups that end a profiled step
        [
            _STEP,
            ("direction", pa.string()),  # "replica_gradient" or "tied"
            ("stage", pa.int16()),  # whose replicas average; of a tied parameter, its first owner
            ("round", pa.int16()),
            ("source_replica", pa.int16()),
            ("source_stage", pa.int16()),
            ("target_replica", pa.int16()),
            ("target_stage", pa.int16()),
            ("wire_bytes", pa.int64()),
        ]
    ),
    "decisions": pa.schema(
        [
            _STEP,
            _REPLICA,  # null where all replicas agreed
            ("where", pa.string()),  # "forward", "backward" or "replica_gradient"
            ("stage", pa.int16()),
            ("boundary", pa.int16()),
            ("layer", pa.string()),  # null where it holds for all
            ("method", pa.string()),
            ("branch", pa.string()),
            ("factor", pa.float64()),  # dense values over values sent, or bytes over bytes
            ("minimum", pa.float64()),  # factors between which the method explores
            ("candidate", pa.float64()),
            ("gain_minimum", pa.float64()),  # as the rule saw them
            ("gain_candidate", pa.float64()),
            ("gain", pa.float64()),  # of what was sent
            ("throughput", pa.float64()),  # samples a second, by the run's clock
            ("event", pa.string()),
            ("reason", pa.string()),
        ]
    ),
}


def schema_of(table: str, measures: Iterable[str] = ()) -> pa.Schema:
    """Return the schema of a table of a run that has these `measures`: each has a column in `evals`."""
    schema = SCHEMAS[table]
    if table == "evals":
        for name in measures:
            if name not in schema.names:
                schema = schema.append(pa.field(name, pa.float64()))
    return schema


# Tables that a run without adaptive methods, or without replicas and tied parameters, does not have.
OCCASIONAL = {"decisions", "collectives"}

STATUSES = ("running", "finished", "diverged", "failed", "interrupted", "killed")
SILENT_S = 600.0  # since the last write to a folder that nobody here has locked: its run is taken for dead
FINISHED = ("finished", "diverged")  # over, with all their records


class RecordsError(ValueError):
    """A run's folder cannot be written or read: one sentence with its path and what is wrong."""


class Recorder:
    """Writes the tables of one run into its folder; only one process at a time may."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.measures: tuple[str, ...] = ()  # of its evaluations
        self._parts = folder / "parts"
        self._rows: dict[str, list[Mapping[str, Any]]] = {name: [] for name in SCHEMAS}
        self._next_part = 0
        self._lock: IO[str] | None = None

    def open(self) -> None:
        """Make the folder and lock it; raises RecordsError where that cannot be done."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = self._acquire()
            self._reopen()
            numbers = [int(path.stem.rsplit("-", 1)[1]) for path in self._parts.glob("*-*.parquet")]
            self._next_part = max(numbers, default=-1) + 1
        except BlockingIOError:
            raise RecordsError(f"Another process is writing the run in {self.folder}.") from None
        except OSError as error:
            raise RecordsError(
                f"The run's folder {self.folder} cannot be written: {error.strerror or error}."
            ) from None

    def close(self) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            (self.folder / ".lock").unlink(missing_ok=True)  # while it is held: never another's
            self._lock.close()
            self._lock = None

    def _acquire(self) -> IO[str]:
        """Return the lock file, locked; one that its last owner has removed meanwhile locks nothing, and is left."""
        while True:
            file = (self.folder / ".lock").open("w")
            try:
                import fcntl  # reading a run must work where there is none

                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.close()
                raise
            if os.fstat(file.fileno()).st_nlink:
                return file
            file.close()

    def _reopen(self) -> None:
        """Make whole tables the first of their parts: a run that was killed between its compaction and its end goes on."""
        self._parts.mkdir(exist_ok=True)
        for table in SCHEMAS:
            whole = self.folder / f"{table}.parquet"
            if whole.is_file():
                for path in self._parts.glob(f"{table}-*.parquet"):
                    path.unlink()
                whole.rename(self._parts / f"{table}-00000.parquet")

    def add(self, table: str, row: Mapping[str, Any]) -> None:
        """Keep a row for the next flush."""
        self._rows[table].append(row)

    def flush(self) -> None:
        """Write the rows kept since the last flush as one part a table."""
        for table, rows in self._rows.items():
            if rows:
                path = self._parts / f"{table}-{self._next_part:05d}.parquet"
                write_table(pa.Table.from_pylist(list(rows), schema_of(table, self.measures)), path)
                rows.clear()
        self._next_part += 1

    def forget(self, step: int) -> None:
        """Drop what a restarted or resumed run does again: rows of `step` and later, evaluations of it among them.

        Part by part, so that being killed in between leaves nothing that doing it again would not mend.
        """
        for table in SCHEMAS:
            self._rows[table].clear()
            for path in self._parts.glob(f"{table}-*.parquet"):
                part = pq.read_table(path, schema=schema_of(table, self.measures))
                kept = part.filter(pc.less(part["step"], step))
                if kept.num_rows == 0:
                    path.unlink()
                elif kept.num_rows < part.num_rows:
                    write_table(kept, path)

    def discard(self) -> None:
        """Remove what the start of a run has written, and the folder where nothing else is in it: it did not begin."""
        (self.folder / "run.parquet").unlink(missing_ok=True)
        shutil.rmtree(self._parts, ignore_errors=True)
        self.close()
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def write_run(self, row: Mapping[str, Any]) -> None:
        """Write `run.parquet`, one row, anew."""
        write_table(
            pa.table({key: pa.array([value], type=_type_of(key, value)) for key, value in row.items()}),
            self.folder / "run.parquet",
        )

    def compact(self) -> None:
        """Make one file a table of the parts, then drop the parts, which nobody reads from then on."""
        self.flush()
        for table in SCHEMAS:
            rows = read_table(_part_files(self.folder, table), table, self.measures)
            if rows.num_rows or table not in OCCASIONAL:
                write_table(rows, self.folder / f"{table}.parquet")
        shutil.rmtree(self._parts)


def write_table(table: pa.Table, path: Path) -> None:
    """Write a Parquet file whole and rename it into place; the schema version is in its metadata."""
    metadata = {**(table.schema.metadata or {}), b"raysim_schema_version": str(SCHEMA_VERSION).encode()}
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    pq.write_table(table.replace_schema_metadata(metadata), draft, compression="zstd")
    draft.replace(path)


def table_files(folder: Place, table: str) -> list[Place]:
    """Return the files of a table: the whole one, or the parts of a run that goes on or broke off, in their order."""
    whole = folder / f"{table}.parquet"
    if whole.is_file():
        return [whole]
    return _part_files(folder, table)


def _part_files(folder: Place, table: str) -> list[Place]:
    return sorted((folder / "parts").glob(f"{table}-*.parquet"), key=lambda path: (len(path.name), path.name))


def read_table(files: Sequence[Place], table: str, measures: Iterable[str] = ()) -> pa.Table:
    """Return the rows of a table's files, of a run that has these `measures`."""
    schema = schema_of(table, measures)
    if not files:
        return schema.empty_table()
    sources = [arrow_source(file) for file in files]
    return pa.concat_tables([pq.read_table(path, schema=schema, filesystem=fs) for path, fs in sources])


def present_status(folder: Place, written: str) -> str:
    """Return the status of a run whose `run.parquet` says `written`: "killed" where that is "running" and no process is at it.

    A process that trains holds the lock of the run's folder. Where there is no lock file, as in a copy of the folder, the run
    counts as killed once nothing has been written for `SILENT_S` seconds. In a bucket there is neither: what is written holds.
    """
    if written != "running" or not isinstance(folder, Path):
        return written
    try:
        with (folder / ".lock").open() as lock:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "running"
    except (OSError, ImportError):
        places = [folder, folder / "parts", folder / "run.parquet"]
        newest = max((place.stat().st_mtime for place in places if place.exists()), default=0.0)
        return "running" if time.time() - newest < SILENT_S else "killed"
    return "killed"


class Run:
    """A run's folder, by path or by the URI of a bucket: its tables as DataFrames, and its status.

    >>> run = Run("results/none")
    Traceback (most recent call last):
    raysim.records.RecordsError: There is no run in results/none: it has no run.parquet.
    """

    def __init__(self, folder: str | Place) -> None:
        try:
            self.folder = open_place(folder)
        except PlaceError as error:
            raise RecordsError(str(error)) from None
        if not (self.folder / "run.parquet").is_file():
            raise RecordsError(f"There is no run in {self.folder}: it has no run.parquet.")

    def __repr__(self) -> str:
        row = self.row
        keys = ("forward", "backward", "replica_gradient")
        setting = [f"{key}={row[key]}" for key in keys if row.get(key) not in (None, "Identity")] or ["uncompressed"]
        shown = ("loss", *(name for name in self.measures if name != "loss"))
        quality = [
            f"{name} {row[f'final_{name}_on']:.4f}" for name in shown[:2] if row.get(f"final_{name}_on") is not None
        ]
        words = [*setting, f"{len(self.steps)} steps", self.status, *quality]
        return f"Run({str(self.folder)!r}: {', '.join(words)})"

    @property
    def row(self) -> dict[str, Any]:
        """The one row of `run.parquet`: configuration, versions, final metrics, status."""
        try:
            path, system = arrow_source(self.folder / "run.parquet")
            rows: list[dict[str, Any]] = pq.read_table(path, filesystem=system).to_pylist()
        except (OSError, pa.ArrowInvalid) as error:
            raise RecordsError(f"{self.folder / 'run.parquet'} cannot be read: {error}.") from None
        return rows[0]

    @property
    def measures(self) -> dict[str, Measure]:
        """The measures of its evaluations, the one by which settings are judged first; a run of an older version has a loss and
        an accuracy."""
        return measures_of(self.row)

    @property
    def status(self) -> str:
        """One of `STATUSES`, as of now: see `present_status`."""
        return present_status(self.folder, str(self.row["status"]))

    @property
    def steps(self) -> pd.DataFrame:
        """A row a step: loss, learning rate, seconds, wire and dense bytes."""
        return self._table("steps")

    @property
    def evals(self) -> pd.DataFrame:
        """A row an evaluation: the loss and all metrics, with compression on and off."""
        return self._table("evals")

    @property
    def links(self) -> pd.DataFrame:
        """A row a step, boundary and direction: packets, bytes, codec seconds, fidelity."""
        return self._table("links")

    @property
    def decisions(self) -> pd.DataFrame:
        """A row a decision of an adaptive method: what it sent, at which gains, and why."""
        return self._table("decisions")

    @property
    def collectives(self) -> pd.DataFrame:
        """A row for each transfer between replicas, or between owners of a tied parameter, at the end of the profiled steps."""
        return self._table("collectives")

    @property
    def actions(self) -> pd.DataFrame:
        """A row an action of the profiled steps: when it ran, and what of that was codec and compute."""
        return self._table("actions")

    def _table(self, name: str) -> pd.DataFrame:
        files = table_files(self.folder, name)
        if not files and name not in OCCASIONAL and self.status in FINISHED:
            raise RecordsError(f"The table {name!r} of {self.folder} cannot be read: there is no {name}.parquet.")
        try:
            table = read_table(files, name, self.measures)
        except (OSError, pa.ArrowInvalid) as error:
            raise RecordsError(f"The table {name!r} of {self.folder} cannot be read: {error}.") from None
        frame: pd.DataFrame = table.to_pandas()
        return frame


_TYPES: Sequence[tuple[type, pa.DataType]] = (
    (bool, pa.bool_()),
    (int, pa.int64()),
    (float, pa.float64()),
    (str, pa.string()),
)
_NULLABLE = {
    "num_stages": pa.int64(),
    "cuts": pa.list_(pa.string()),
    "bottleneck": pa.string(),
    "steps": pa.int64(),
    "epochs": pa.int64(),
    "evaluate_samples": pa.int64(),
    "gpus_per_stage": pa.float64(),
    "profile": pa.string(),
    "codec_speed": pa.float64(),
    "optimizer.momentum": pa.float64(),
    "optimizer.betas": pa.list_(pa.float64()),
    "optimizer.epsilon": pa.float64(),
    "optimizer.decay_epochs": pa.float64(),
    "optimizer.decay_at": pa.list_(pa.int64()),
    "optimizer.clip_norm": pa.float64(),
    "loss": pa.string(),
    "metrics": pa.list_(pa.string()),
    "schedule_rows": pa.string(),  # of a custom schedule, as its file had them
    "diverged_step": pa.int64(),
    "diverged_at": pa.string(),
    "warning": pa.string(),  # the first one of the run, such as a link's fidelity below zero
    "error": pa.string(),
}


def _type_of(key: str, value: object) -> pa.DataType | None:
    """Return the Arrow type of a column of `run.parquet`: fixed for the fields that may be null, else by the value.

    None leaves it to Arrow: options of a model or a data set may be lists or tables.
    """
    if key in _NULLABLE:
        return _NULLABLE[key]
    if value is None or key.startswith("final_"):
        return pa.float64()
    return next((arrow for python, arrow in _TYPES if isinstance(value, python)), None)
