"""The files of a run's tables: readers, and the recorder that writes them."""

from __future__ import annotations

import errno
import hashlib
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raysim.config.identity import identity
from raysim.limits import process_memory
from raysim.notation import InputError
from raysim.records.bounds import check_row, fitted
from raysim.records.schema import ENCODINGS, OCCASIONAL, SCHEMA_VERSION, SCHEMAS, run_schema, schema_of
from raysim.storage.files import FolderLock, check_inside, read_bytes, sync_folder, write_whole
from raysim.storage.places import ListedPath, Place, read_place

VALUE_BYTES = 8  # of a value in memory
SMALL_BYTES = 2**28  # of a table in memory, which is read without looking at the machine
FEW_ROWS = 1000  # of a `run.parquet`, which is read and then refused if it has more than one
_PART = re.compile(r"[a-z]+-([0-9]{5,18})\.parquet")
PARTS, CHECKPOINTS, TENSORBOARD = "parts", "checkpoints", "tensorboard"  # folders in a run's folder
UNREADABLE = (OSError, ValueError, pa.ArrowException)  # for a missing, truncated or damaged file


class RecordsError(InputError):
    """A run's folder cannot be written or read; one sentence with path and cause."""


def write_table(table: pa.Table, path: Path) -> str:
    """Write a Parquet file atomically and return its SHA-256; raises OSError.

    The metadata hold the schema version, and every page a checksum, so that damage is noticed on reading.
    """
    metadata = {**(table.schema.metadata or {}), b"raysim_schema_version": str(SCHEMA_VERSION).encode()}
    sink = pa.BufferOutputStream()
    pq.write_table(
        table.replace_schema_metadata(metadata), sink, compression="zstd", write_page_checksum=True, **_encoded(table)
    )
    content = sink.getvalue()
    write_whole(path, memoryview(content))
    return hashlib.sha256(content).hexdigest()


def _encoded(table: pa.Table) -> dict[str, Any]:
    """Return the Parquet writer's options for columns with special encodings."""
    if "sample" not in table.column_names:
        return {}
    return {
        "column_encoding": ENCODINGS,
        "use_dictionary": [name for name in table.column_names if name not in ENCODINGS],
    }


def table_files(folder: Place, table: str) -> list[Place]:
    """Return the files of a table: its one file, or the parts of an unfinished run, in order."""
    whole = folder / f"{table}.parquet"
    if whole.is_file():
        return [whole]
    parts = part_files(folder, table)
    return [whole] if whole.is_file() else parts  # some may have been merged and removed meanwhile


def part_files(folder: Place, table: str) -> list[Place]:
    """Return the parts of a table, in order."""
    try:
        parts: list[Place] = [
            path
            for path in (folder / PARTS).iterdir()
            if path.name.startswith(f"{table}-") and _PART.fullmatch(path.name) is not None and path.is_file()
        ]
    except OSError:  # there are none, or the run has just merged them
        return []
    return sorted(parts, key=lambda path: (len(path.name), path.name))


def read_table(
    files: Sequence[Place], table: str, measures: Iterable[str] = (), most_rows: int | None = None
) -> pa.Table:
    """Return the rows of a table's files, for a run with these `measures`; raises one of `UNREADABLE`, see `read_whole`."""
    schema = schema_of(table, measures)
    if not files:
        return schema.empty_table()
    rows = pa.concat_tables([read_as(file, schema, most_rows) for file in files])
    if rows["step"].null_count:
        raise pa.ArrowInvalid("it has rows without a step")
    return rows


def read_whole(file: Place, most_rows: int | None = None) -> pa.Table:
    """Return the rows of one file in its own schema.

    Raises one of `UNREADABLE`, also if it has more than `most_rows` rows or more than fit into memory: a small file may hold
    billions.
    """
    if isinstance(file, ListedPath) and (rows := file.listing.rows(file.key)) is not None:
        return rows
    content = pa.BufferReader(read_place(file))  # one request to a bucket
    with pq.ParquetFile(content, page_checksum_verification=True) as opened:
        check_table_size(opened.metadata, most_rows)
        return opened.read(use_threads=False)


def check_table_size(metadata: pq.FileMetaData, most_rows: int | None = None) -> None:
    """Raise ArrowInvalid if a file has more rows than `most_rows`, or than half the memory of this process can hold."""
    rows, size = metadata.num_rows, metadata.num_rows * metadata.num_columns * VALUE_BYTES
    if most_rows is not None and rows > most_rows:
        raise pa.ArrowInvalid(f"it has {rows:,} rows, but its run can have at most {most_rows:,}")
    if size > SMALL_BYTES and 2 * size > (limit := process_memory()).size:
        raise pa.ArrowInvalid(f"its {rows:,} rows need {size / 1e9:.1f} GB, but {limit}")


def read_as(file: Place, schema: pa.Schema, most_rows: int | None = None) -> pa.Table:
    """Return the rows of one file in a schema: missing columns are null, extra ones are dropped; raises as `read_whole`."""
    rows = read_whole(file, most_rows)
    known = set(rows.column_names)
    columns = [
        rows[field.name].cast(field.type) if field.name in known else pa.nulls(len(rows), field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def check_recordable(row: Mapping[str, Any]) -> None:
    """Raise RecordsError if a row of `run.parquet` could be written but not read again."""
    try:
        check_row(_run_table(row))
    except (pa.ArrowException, OverflowError) as error:
        raise RecordsError(f"This run cannot be recorded: {str(error).rstrip('.')}.") from None


def _run_table(row: Mapping[str, Any]) -> pa.Table:
    fit = fitted(row)
    fit |= fitted(identity(fit))
    return pa.Table.from_pylist([fit], run_schema(fit))


class Recorder:
    """Writes the tables of a run into its folder, and locks the folder against other processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.measures: tuple[str, ...] = ()  # of the run's evaluations
        self._parts = folder / PARTS
        self._rows: dict[str, list[Mapping[str, Any]]] = {name: [] for name in SCHEMAS}
        self._next_part = 0
        self._hashes: dict[str, str] = {}  # SHA-256 of the parts by name, as far as known
        self._lock = FolderLock(folder)

    def lock(self) -> None:
        """Make the folder and lock it, unless this recorder has locked it; raises RecordsError if that fails.

        After this call nothing has been written, and no other process will write: the time to check the folder's contents.
        """
        try:
            self._lock.acquire()
        except BlockingIOError:
            raise RecordsError(f"Another process is writing the run in {self.folder}.") from None
        except OSError as error:
            raise self._unwritable(error) from None

    def open(self) -> None:
        """Lock the folder and prepare it for writing; raises RecordsError if that fails."""
        self.lock()
        try:
            for own in (PARTS, CHECKPOINTS, TENSORBOARD):
                check_inside(self.folder / own, self.folder)
            for draft in (*self.folder.glob(".*.parquet.*"), *self._parts.glob(".*.parquet.*")):
                draft.unlink()  # left by a killed process
            self._reopen()
            numbers = [int(match[1]) for path in self._parts.iterdir() if (match := _PART.fullmatch(path.name))]
            self._next_part = max(numbers, default=-1) + 1
        except OSError as error:
            raise self._unwritable(error) from None

    def close(self) -> None:
        """Unlock the folder if this recorder has locked it."""
        self._lock.release()

    def _unwritable(self, error: OSError) -> RecordsError:
        return RecordsError(f"The run's folder {self.folder} cannot be written: {error.strerror or error}.")

    def _reopen(self) -> None:
        """Remove merged tables: a run killed during compaction resumes from its parts, which are complete."""
        self._parts.mkdir(exist_ok=True)
        for table in SCHEMAS:
            (self.folder / f"{table}.parquet").unlink(missing_ok=True)
        sync_folder(self.folder)  # a merged table that reappears after a crash would hide new parts

    def add(self, table: str, row: Mapping[str, Any]) -> None:
        """Keep a row for the next flush."""
        self._rows[table].append(row)

    def flush(self) -> None:
        """Write the rows since the last flush, as one part per table."""
        for table, rows in self._rows.items():
            if rows:
                path = self._parts / f"{table}-{self._next_part:05d}.parquet"
                made = pa.Table.from_pylist(list(rows), schema_of(table, self.measures))
                self._hashes[path.name] = write_table(made, path)
                rows.clear()
        self._next_part += 1

    def parts(self) -> dict[str, str]:
        """Return the SHA-256 of every part on disk by name, so that a checkpoint can list its records."""
        for table in SCHEMAS:
            for path in part_files(self.folder, table):
                if path.name not in self._hashes:
                    self._hashes[path.name] = hashlib.sha256(read_place(path)).hexdigest()
        return dict(sorted(self._hashes.items()))

    def check_parts(self, listed: Mapping[str, str]) -> None:
        """Raise RecordsError if a part listed in a checkpoint is missing or has changed."""
        for name, digest in listed.items():
            path = self._parts / name
            try:
                content = read_bytes(path)
            except OSError as error:
                raise RecordsError(f"{path} cannot be read ({error.strerror})") from None
            if hashlib.sha256(content).hexdigest() != digest:
                raise RecordsError(f"{path} has changed since it was written")
            self._hashes[name] = digest

    def forget(self, step: int) -> None:
        """Drop the rows that a restarted or resumed run will repeat: all rows of `step` and later, including evaluations.

        An unreadable part is dropped too, but OSError is raised if it was intact before: the checkpoint of `step` may depend on
        it. Parts are rewritten one by one, the last first, so that readers see no gap. After a kill, calling this method again
        completes it. Raises OSError.
        """
        for table in SCHEMAS:
            self._rows[table].clear()
            for path in reversed([self._parts / part.name for part in part_files(self.folder, table)]):
                schema = schema_of(table, self.measures)
                try:
                    part = read_as(path, schema)
                except UNREADABLE:
                    if path.name in self._hashes:
                        raise OSError(errno.EIO, "it was whole, and can no longer be read", str(path)) from None
                    part = schema.empty_table()
                kept = part.filter(pc.less(part["step"], step))
                if kept.num_rows == 0:
                    path.unlink()
                    sync_folder(self._parts)  # before the rows are repeated in another part
                    self._hashes.pop(path.name, None)
                elif kept.num_rows < part.num_rows:
                    self._hashes[path.name] = write_table(kept, path)

    def discard(self) -> None:
        """Remove the files of a run that did not begin, and its folder if nothing else is in it."""
        (self.folder / "run.parquet").unlink(missing_ok=True)
        shutil.rmtree(self._parts, ignore_errors=True)
        self.close()
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def write_run(self, row: Mapping[str, Any]) -> None:
        """Replace `run.parquet` by this row, adapted to its reader by `fitted`."""
        write_table(_run_table(row), self.folder / "run.parquet")

    def compact(self) -> None:
        """Merge the parts of each table into one file; readers then skip the parts, until `drop_parts` removes them."""
        self.flush()
        for table in SCHEMAS:
            rows = read_table(part_files(self.folder, table), table, self.measures)
            if rows.num_rows or table not in OCCASIONAL:
                write_table(rows, self.folder / f"{table}.parquet")

    def drop_parts(self) -> None:
        """Remove the parts. Call this only once `run.parquet` says that the run is over: until then it may resume from the parts.

        Parts that cannot be removed stay: the run is complete without them, and readers skip them.
        """
        shutil.rmtree(self._parts, ignore_errors=True)
        self._hashes.clear()
