"""The files that the runs of a pack would have, made from the tables of the pack when they are opened."""

from __future__ import annotations

import io
from collections.abc import Mapping
from threading import Lock
from typing import Any, NamedTuple

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raysim.places import Place, arrow_source


class _Rows(NamedTuple):
    """A table of all runs, and the first row and the number of rows of each run."""

    table: pa.Table
    spans: Mapping[str, tuple[int, int]]


class PackedFiles(fsspec.AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The files of a pack: those of its runs, each made when it is opened, and those of its studies as they are.

    A table of the pack is read whole when a run's part of it is first asked for, and held. `row` is the column with the run's own
    row of `run.parquet`.
    """

    cachable = False

    def __init__(self, origins: Mapping[str, Place], packed: set[str], row: str) -> None:
        super().__init__()
        self._origins = origins
        self._packed = packed
        self._row = row
        self._read: dict[Place, _Rows | Exception] = {}
        self._lock = Lock()

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Return that a path is a file; readers ask for no more."""
        return {"name": path, "type": "file", "size": None}

    def _open(self, path: str, mode: str = "rb", **_: Any) -> io.BytesIO:
        if mode != "rb":
            raise OSError(f"{path} is in a pack, which can only be read.")
        origin = self._origins[path]
        if path not in self._packed:
            return io.BytesIO(origin.read_bytes())
        run, file = path.rsplit("/", 1)
        rows = self._rows(origin)
        mine = rows.table.slice(*rows.spans.get(run, (0, 0)))
        return io.BytesIO(_written(_own_row(mine, self._row) if file == "run.parquet" else mine))

    def _rows(self, file: Place) -> _Rows:
        """Return a table of the pack, read once; raises as it did then where it cannot be read."""
        with self._lock:
            if file not in self._read:
                try:
                    self._read[file] = _read(file)
                except (OSError, pa.ArrowException) as error:
                    self._read[file] = error
        found = self._read[file]
        if isinstance(found, Exception):
            raise found
        return found


def _read(file: Place) -> _Rows:
    """Return a table of a pack; raises OSError or ArrowException where it cannot be read."""
    path, system = arrow_source(file)
    with pq.ParquetFile(path, filesystem=system, read_dictionary=["run"], page_checksum_verification=True) as opened:
        # Without threads: a reader's thread that waits here for others of Arrow's pool may wait for itself.
        table = opened.read(use_threads=False).replace_schema_metadata()
    column = table["run"].combine_chunks()
    codes, names = column.indices.to_numpy(), column.dictionary.to_pylist()
    starts = np.flatnonzero(np.diff(codes, prepend=-1)).tolist()
    ends = [*starts, len(codes)][1:]
    spans = {names[codes[start]]: (start, end - start) for start, end in zip(starts, ends, strict=True)}
    if len(spans) != len(starts):
        raise pa.ArrowInvalid("the rows of a run must follow each other")
    return _Rows(table.drop_columns("run"), spans)


def _own_row(rows: pa.Table, column: str) -> pa.Table:
    """Return the row of `run.parquet` of the only run of `rows`."""
    with pa.ipc.open_stream(rows[column][0].as_buffer()) as stream:
        return stream.read_all()


def _written(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="none", use_dictionary=False)
    content: bytes = sink.getvalue().to_pybytes()
    return content
