"""Files of rows with named columns: CSV, TSV, JSON lines and Parquet, read some rows at a time."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from raysim.notation import suggestion

SUFFIXES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
_AT_ONCE = 4096


class RowSource(ABC):
    """Rows with named columns, by the name that messages give it; `files` are those that it is read from."""

    def __init__(self, name: str, files: Sequence[Path]) -> None:
        self.name = name
        self.files = tuple(files)

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The columns and their types."""

    @abstractmethod
    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield all rows in order, of some columns; raises ValueError naming a row that cannot be read."""

    def check_column(self, field: str, column: str) -> str:
        """Return a column's name; raises ValueError by field where there is none."""
        names = self.schema.names
        if column not in names:
            raise ValueError(
                f"`{field}` must be a column of {self.name} ({', '.join(names)}), but got {column!r}."
                f"{suggestion(column, names)}"
            )
        return column


def open_rows_of(path: Path) -> RowSource:
    """Return the rows of a file, by its suffix; raises ValueError where that is not one of `SUFFIXES`."""
    kinds: dict[str, type[RowSource]] = {".parquet": _ParquetRows, ".jsonl": _JsonRows, ".json": _JsonRows}
    if path.suffix not in SUFFIXES:
        raise ValueError(f"`data.path` must end in {', '.join(SUFFIXES)} to be read by rows, but got {str(path)!r}.")
    return kinds.get(path.suffix, _CsvRows)(str(path), [path])


def split_files(field: str, path: Path, suffixes: Sequence[str] = SUFFIXES) -> tuple[Path, Path | None]:
    """Return the files of the two splits: `path` itself and none, or train* and test* (or valid*) of a folder."""
    if path.is_file():
        return path, None
    found: list[Path] = []
    for names in (("train",), ("test", "valid", "val", "dev")):
        files = [
            file
            for name in names
            for file in sorted(path.rglob(f"{name}*"))
            if file.is_file() and file.suffix in suffixes
        ]
        if not files:
            ends = ", ".join(suffixes)
            raise ValueError(
                f"`{field}` must hold files {names[0]}* that end in one of {ends}, but {str(path)!r} has no such file."
            )
        found.append(files[0])
    return found[0], found[1]


class _ParquetRows(RowSource):
    @property
    def schema(self) -> pa.Schema:
        return self._open().schema_arrow

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._open().iter_batches(_AT_ONCE, columns=list(columns))
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{self.name} cannot be read: {_first_line(error)}.") from None

    def _open(self) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(self.files[0])
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{self.name} cannot be read as Parquet: {_first_line(error)}.") from None


class _CsvRows(RowSource):
    """Rows of a CSV file; numbers are read as floating point, so that a column may begin with whole ones."""

    @property
    def schema(self) -> pa.Schema:
        try:
            found = self._open(None).schema
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{self.name} cannot be read: {_first_line(error)}.") from None
        wide = [
            f.with_type(pa.float64()) if pa.types.is_integer(f.type) or pa.types.is_null(f.type) else f for f in found
        ]
        return pa.schema(wide)

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        options = pa_csv.ConvertOptions(include_columns=list(columns), column_types=self.schema)
        try:
            yield from self._open(options)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{self.name} cannot be read: {_first_line(error)}.") from None

    def _open(self, options: pa_csv.ConvertOptions | None) -> pa_csv.CSVStreamingReader:
        delimiter = "\t" if self.files[0].suffix == ".tsv" else ","
        return pa_csv.open_csv(
            self.files[0],
            read_options=pa_csv.ReadOptions(use_threads=False),  # errors name their row
            parse_options=pa_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=options,
        )


class _JsonRows(RowSource):
    """Rows of a file with one JSON object a line."""

    @property
    def schema(self) -> pa.Schema:
        first = next(self._rows(), None)
        if first is None:
            raise ValueError(f"{self.name} must hold a JSON object a line, but is empty.")
        return pa.RecordBatch.from_pylist([first[1]]).schema

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        kept: list[dict[str, Any]] = []
        for number, row in self._rows():
            for column in columns:
                if column not in row:
                    raise ValueError(f"Row {number} of {self.name} has no {column!r}.")
            kept.append({column: row[column] for column in columns})
            if len(kept) == _AT_ONCE:
                yield self._batch(kept, number)
                kept = []
        if kept:
            yield self._batch(kept, number)

    def _batch(self, rows: list[dict[str, Any]], last: int) -> pa.RecordBatch:
        try:
            return pa.RecordBatch.from_pylist(rows)
        except (pa.ArrowException, TypeError) as error:
            raise ValueError(
                f"Rows {last - len(rows) + 1} to {last} of {self.name} do not have the same types: {_first_line(error)}."
            ) from None

    def _rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        with self.files[0].open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"Row {number} of {self.name} is not JSON: {error}.") from None
                if not isinstance(row, dict):
                    raise ValueError(f"Row {number} of {self.name} must be a JSON object, but is {type(row).__name__}.")
                yield number, row


def labels_of(source: RowSource, label: str) -> NDArray[Any]:
    """Return a column of classes, as whole numbers or words; raises ValueError naming a row that has none."""
    parts: list[NDArray[Any]] = []
    for batch in source.batches([label]):
        if batch[0].null_count:
            row = sum(len(part) for part in parts) + int(np.asarray(batch[0].is_null()).argmax()) + 1
            raise ValueError(f"Row {row} of {source.name} has no value in column `{label}`.")
        parts.append(np.asarray(batch[0].to_pylist()))
    found = np.concatenate(parts)
    if found.dtype.kind == "f" and (found == found.round()).all():  # whole numbers of a CSV file
        found = found.astype(np.int64)
    if found.dtype.kind not in "iuUb":
        raise ValueError(f"Column `{label}` of {source.name} must hold classes, as whole numbers or words.")
    return found.astype(np.int64) if found.dtype.kind == "b" else found


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
