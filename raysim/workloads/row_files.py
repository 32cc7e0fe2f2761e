"""Rows with named columns, read some at a time: CSV, TSV, JSON lines, Parquet, and data sets of Hugging Face."""

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
from raysim.workloads.options import import_hub, reason_of

SUFFIXES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
_AT_ONCE = 4096
_AT_ONCE_OF_HUB = 1000


class RowSource(ABC):
    """Rows with named columns, read from `files`; messages use its name."""

    def __init__(self, name: str, files: Sequence[Path]) -> None:
        self.name = name
        self.files = tuple(files)

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The columns and their types."""

    @abstractmethod
    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield some columns of all rows, in order; raises ValueError naming a row that cannot be read."""

    def row(self, number: int) -> str:
        """Return the name of a row for messages; rows count from 1, up to the next batch of `batches`."""
        return f"row {number} of {self.name}"

    def texts(self, columns: Sequence[str]) -> Iterator[tuple[str, ...]]:
        """Yield the texts of some columns row by row; raises ValueError naming a row that has none."""
        number = 0
        for batch in self.batches(columns):
            for texts in zip(*(batch.column(name).to_pylist() for name in columns), strict=True):
                number += 1
                for name, text in zip(columns, texts, strict=True):
                    if not isinstance(text, str):
                        raise ValueError(f"There is no text in column `{name}` in {self.row(number)}.")
                yield texts

    def check_column(self, field: str, column: str) -> str:
        """Return a column's name; raises ValueError naming `field` if there is no such column."""
        names = self.schema.names
        if column not in names:
            raise ValueError(
                f"`{field}` must be a column of {self.name} ({', '.join(names)}), but got {column!r}."
                f"{suggestion(column, names)}"
            )
        return column


def open_rows_of(files: Sequence[Path]) -> RowSource:
    """Return the rows of files one after another, by their suffixes; raises ValueError if a suffix is not among `SUFFIXES`."""
    sources = [_open_file(file) for file in files]
    return sources[0] if len(sources) == 1 else _Chained(sources)


def _open_file(path: Path) -> RowSource:
    kinds: dict[str, type[RowSource]] = {".parquet": _ParquetRows, ".jsonl": _JsonRows, ".json": _JsonRows}
    if path.suffix not in SUFFIXES:
        raise ValueError(f"`data.path` must end in {', '.join(SUFFIXES)} to be read by rows, but got {str(path)!r}.")
    return kinds.get(path.suffix, _CsvRows)(str(path), [path])


def split_files(field: str, path: Path, suffixes: Sequence[str] = SUFFIXES) -> list[list[Path]]:
    """Return the files of each split: `path` alone, or train* and test* (or else valid*, val* or dev*) of a folder."""
    if path.is_file():
        return [[path]]
    splits = []
    for names in (("train",), ("test", "valid", "val", "dev")):
        by_name = ([file for file in sorted(path.rglob(f"{name}*")) if file.suffix in suffixes] for name in names)
        files = next((found for found in by_name if found), None)
        if files is None:
            ends = ", ".join(suffixes)
            raise ValueError(
                f"`{field}` must hold files {names[0]}* that end in {ends}, but {str(path)!r} has no such file."
            )
        splits.append(files)
    return splits


class _Chained(RowSource):
    """The rows of several files of one schema, one file after the other."""

    def __init__(self, parts: Sequence[RowSource]) -> None:
        super().__init__(f"{parts[0].name} and {len(parts) - 1} more", [file for part in parts for file in part.files])
        self._parts = parts
        self._starts = [0]  # of the files that have been begun

    @property
    def schema(self) -> pa.Schema:
        return self._parts[0].schema

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        count, self._starts = 0, []
        for part in self._parts:
            for column in columns:
                part.check_column("data.path", column)
            self._starts.append(count)
            for batch in part.batches(columns):
                yield batch
                count += batch.num_rows

    def row(self, number: int) -> str:
        place = sum(start < number for start in self._starts) - 1
        return self._parts[place].row(number - self._starts[place])


class _ParquetRows(RowSource):
    @property
    def schema(self) -> pa.Schema:
        return self._open().schema_arrow

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._open().iter_batches(_AT_ONCE, columns=list(columns))
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{self.name} cannot be read: {reason_of(error)}.") from None

    def _open(self) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(self.files[0])
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{self.name} cannot be read as Parquet: {reason_of(error)}.") from None


class _CsvRows(RowSource):
    """Rows of a CSV file; numbers are read as floating point, so that a column may begin with whole ones."""

    @property
    def schema(self) -> pa.Schema:
        try:
            found = self._open(None).schema
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{self.name} cannot be read: {reason_of(error)}.") from None
        wide = [
            f.with_type(pa.float64()) if pa.types.is_integer(f.type) or pa.types.is_null(f.type) else f for f in found
        ]
        return pa.schema(wide)

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        options = pa_csv.ConvertOptions(include_columns=list(columns), column_types=self.schema)
        try:
            yield from self._open(options)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{self.name} cannot be read: {reason_of(error)}.") from None

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
            raise ValueError(f"{self.name} must hold one JSON object per line, but is empty.")
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
                f"Rows {last - len(rows) + 1} to {last} of {self.name} do not have the same types: {reason_of(error)}."
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


class HubRows(RowSource):
    """A split of a data set of Hugging Face, whose files are Arrow files of the library's cache; images stay encoded."""

    def __init__(self, name: str, split: Any) -> None:
        super().__init__(name, [Path(each["filename"]) for each in split.cache_files])
        datasets = import_hub("datasets")
        for column, feature in split.features.items():
            if isinstance(feature, datasets.Image):
                split = split.cast_column(column, datasets.Image(decode=False))
        self._split = split.with_format("arrow")

    @property
    def schema(self) -> pa.Schema:
        return self._split.features.arrow_schema

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        for table in self._split.select_columns(list(columns)).iter(_AT_ONCE_OF_HUB):
            yield from table.combine_chunks().to_batches()


def coded_labels(
    sources: Sequence[RowSource], label: str, *, from_zero: bool = False
) -> tuple[list[NDArray[np.int64]], int]:
    """Return the classes of each source's rows as numbers, and how many classes there are.

    Whole numbers from 0 are the classes themselves; words, and numbers if some are negative, are numbered in their order. With
    `from_zero` negative numbers raise ValueError.
    """
    parts = [_labels_of(source, label) for source in sources]
    labels = np.concatenate(parts)
    known = np.unique(labels)
    whole = known.dtype.kind in "iu"
    if from_zero and whole and known[0] < 0:
        raise ValueError(f"Column `{label}` of {sources[0].name} must hold classes from 0, but holds {known[0]}.")
    if whole and known[0] >= 0:
        codes, num_classes = labels.astype(np.int64), int(known[-1]) + 1
    else:
        codes, num_classes = np.searchsorted(known, labels), len(known)
    return np.split(codes, np.cumsum([len(part) for part in parts[:-1]])), num_classes


def _labels_of(source: RowSource, label: str) -> NDArray[Any]:
    """Return a column of classes, as whole numbers or words; raises ValueError naming a row that has none."""
    parts: list[NDArray[Any]] = []
    for batch in source.batches([label]):
        if batch[0].null_count:
            row = sum(len(part) for part in parts) + int(np.asarray(batch[0].is_null()).argmax()) + 1
            raise ValueError(f"There is no value in column `{label}` in {source.row(row)}.")
        parts.append(np.asarray(batch[0].to_pylist()))
    found = np.concatenate(parts)
    if found.dtype.kind == "f" and (found == found.round()).all():  # whole numbers of a CSV file
        found = found.astype(np.int64)
    if found.dtype.kind not in "iuUb":
        raise ValueError(f"Column `{label}` of {source.name} must hold classes, as whole numbers or words.")
    return found.astype(np.int64) if found.dtype.kind == "b" else found
