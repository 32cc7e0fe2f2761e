"""Rows with named columns (CSV, TSV, JSON lines, Parquet, Hugging Face data sets), and encodings of text files."""

from __future__ import annotations

import codecs
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from raysim.notation import suggestion
from raysim.workloads.options import check_path, import_hub, reason_of

SUFFIXES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
_AT_ONCE = 4096
_AT_ONCE_OF_HUB = 1000
_MARKS = (  # UTF-32's begins with UTF-16's
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (codecs.BOM_UTF8, "utf-8-sig"),
)
_LOOKED_AT = 4096  # bytes


def encoding_of(file: Path) -> str | None:
    """Return the encoding named by a file's byte order mark, None without a mark.

    Raises ValueError naming a file without a mark whose every second byte is zero, as in UTF-16.
    """
    with file.open("rb") as stream:
        start = stream.read(_LOOKED_AT)
    encoding = next((name for mark, name in _MARKS if start.startswith(mark)), None)
    even, odd = start[::2], start[1::2]
    if encoding is None and len(start) > 1 and sorted((any(even), any(odd))) == [False, True]:
        raise ValueError(
            f"`data.path`: {file} holds a zero in every second byte, like UTF-16 without a byte order mark. Save it as UTF-8."
        )
    return encoding


def read_marked(file: Path) -> bytes:
    """Return a text file in UTF-8, without a byte order mark; the bytes themselves if the file has none.

    Raises ValueError naming a file that does not hold the encoding of its mark.
    """
    encoding = encoding_of(file)
    content = file.read_bytes()
    if encoding is None:
        return content
    try:
        return content.decode(encoding).encode()
    except UnicodeError as error:
        raise ValueError(f"`data.path`: {file} begins with the mark of {encoding}, but is not: {error}.") from None


class RowPart(ABC):
    """The rows of one file or hub split, whose name is used in error messages."""

    def __init__(self, name: str, *files: Path, remedy: str = "Leave these rows out.") -> None:
        self.name = name
        self.files = files
        self.remedy = remedy  # for rows whose labels are none of the classes

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The columns and their types."""

    @abstractmethod
    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield batches of the given columns, in order; raises ValueError naming a row that cannot be read."""

    def check_column(self, field: str, column: str) -> str:
        """Return `column`; raises ValueError naming `field` if there is no such column."""
        names = self.schema.names
        if column not in names:
            raise ValueError(
                f"`{field}` must be a column of {self.name} ({', '.join(names)}), but got {column!r}."
                f"{suggestion(column, names)}"
            )
        if names.count(column) > 1:
            raise ValueError(
                f"`{field}`: {self.name} has {names.count(column)} columns {column!r}. Rename one of them."
            )
        if (problem := self.encoding_problem(column)) is not None:
            raise ValueError(problem)
        return column

    def encoding_problem(self, column: str) -> str | None:
        """Return a sentence if a column of a text file is not UTF-8, otherwise None."""
        return None

    @contextmanager
    def _readable(self, as_what: str = "") -> Iterator[None]:
        """Turn read errors into ValueErrors that name the file."""
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{self.name} cannot be read{as_what}: {reason_of(error)}.") from None


class RowSource(RowPart):
    """The rows of one split: the concatenation of parts with the same schema."""

    def __init__(self, *parts: RowPart) -> None:
        more = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
        files = (file for part in parts for file in part.files)
        super().__init__(f"{parts[0].name}{more}", *files, remedy=parts[0].remedy)
        self._parts = parts
        self._starts = [0]  # of the parts read so far

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

    def encoding_problem(self, column: str) -> str | None:
        return self._parts[0].encoding_problem(column)

    def row(self, number: int) -> str:
        """Return the name of a row for messages; rows count from 1, up to the last batch read."""
        i = sum(start < number for start in self._starts) - 1
        return f"row {number - self._starts[i]} of {self._parts[i].name}"

    def texts(self, columns: Sequence[str]) -> Iterator[tuple[str, ...]]:
        """Yield the texts of the given columns row by row; raises ValueError naming a row without text."""
        number = 0
        for batch in self.batches(list(dict.fromkeys(columns))):
            for texts in zip(*(batch.column(name).to_pylist() for name in columns), strict=True):
                number += 1
                for name, text in zip(columns, texts, strict=True):
                    if not isinstance(text, str):
                        raise ValueError(f"There is no text in column `{name}` in {self.row(number)}.")
                yield texts


def open_rows_of(*files: Path) -> RowSource:
    """Return the concatenated rows of files, read by suffix; raises ValueError if a suffix is not in `SUFFIXES`."""
    for file in files:
        if file.suffix not in SUFFIXES:
            raise ValueError(
                f"`data.path` must end in {', '.join(SUFFIXES)} to be read by rows, but got {str(file)!r}."
            )
    kinds: dict[str, Callable[[str, Path], RowPart]] = {
        ".parquet": _ParquetRows,
        ".jsonl": _JsonRows,
        ".json": _JsonRows,
    }
    return RowSource(*(kinds.get(file.suffix, _CsvRows)(str(file), file) for file in files))


def open_splits(value: object, suffixes: Sequence[str] = SUFFIXES) -> list[RowSource]:
    """Return the rows of each split in `data.path`: a file, or a folder with files train* and test*.

    Files valid*, val* or dev* are the test split if there are no files test*. Files of one suffix are read, since others may hold
    the same rows. Raises ValueError if a split has no file.
    """
    path = check_path("data.path", value)
    if path.is_file():
        return [open_rows_of(path)]
    splits = []
    for names in (("train",), ("test", "valid", "val", "dev")):
        kinds = ((name, suffix) for name in names for suffix in suffixes)
        found = (sorted(file for file in path.rglob(f"{name}*") if file.suffix == suffix) for name, suffix in kinds)
        files = next(filter(None, found), None)
        if files is None:
            ends = ", ".join(suffixes)
            raise ValueError(
                f"`data.path` must hold files {names[0]}* that end in {ends}, but {str(path)!r} has no such file."
            )
        splits.append(open_rows_of(*files))
    return splits


class _ParquetRows(RowPart):
    @property
    def schema(self) -> pa.Schema:
        with self._readable(" as Parquet"):
            return pq.read_schema(self.files[0])

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        with self._readable():
            yield from pq.ParquetFile(self.files[0]).iter_batches(_AT_ONCE, columns=list(columns))


class _CsvRows(RowPart):
    """Rows of a CSV file; numbers are read as floating point, so a column may begin with integers."""

    @property
    def schema(self) -> pa.Schema:
        with self._readable():
            inferred = self._open(None).schema
            names = inferred.names
        whole = [pa.types.is_integer(kind) or pa.types.is_null(kind) for kind in inferred.types]
        kinds = (pa.float64() if wide else kind for kind, wide in zip(inferred.types, whole, strict=True))
        return pa.schema(list(zip(names, kinds, strict=True)))

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        options = pa_csv.ConvertOptions(include_columns=list(columns), column_types=self.schema)
        with self._readable():
            yield from self._open(options)

    def encoding_problem(self, column: str) -> str | None:
        return self._not_utf8(f"column `{column}`") if pa.types.is_binary(self.schema.field(column).type) else None

    def _not_utf8(self, where: str) -> str:
        """Return the sentence on text in another encoding."""
        return (
            f"`data.path`: {self.name} must be UTF-8, but {where} is not. Convert it, for example by "
            "`iconv -f WINDOWS-1252 -t UTF-8`."
        )

    @contextmanager
    def _readable(self, as_what: str = "") -> Iterator[None]:
        try:
            with super()._readable(as_what):
                yield
        except ValueError as error:
            if not isinstance(error, UnicodeError) and "invalid UTF8" not in str(error):
                raise
            raise ValueError(self._not_utf8(f"some text ({reason_of(error)})")) from None

    def _open(self, options: pa_csv.ConvertOptions | None) -> pa_csv.CSVStreamingReader:
        encoding = encoding_of(self.files[0]) or "utf-8"
        delimiter = "\t" if self.files[0].suffix == ".tsv" else ","
        return pa_csv.open_csv(
            self.files[0],
            read_options=pa_csv.ReadOptions(use_threads=False, encoding=encoding),  # then errors name the row
            parse_options=pa_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=options,
        )


class _JsonRows(RowPart):
    """Rows of a file with one JSON object per line."""

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
        marked = encoding_of(self.files[0]) is not None
        with BytesIO(read_marked(self.files[0])) if marked else self.files[0].open("rb") as file:
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


class HubRows(RowPart):
    """A split of a Hugging Face data set, read from the library's cached Arrow files; images stay encoded."""

    def __init__(self, name: str, split: Any, *, remedy: str = "Leave these rows out.") -> None:
        super().__init__(name, *(Path(each["filename"]) for each in split.cache_files), remedy=remedy)
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


def load_hub_set(*name: str) -> Any:
    """Return the splits of a data set on the Hugging Face hub; raises ValueError if it cannot be loaded."""
    datasets = import_hub("datasets")
    try:
        return datasets.load_dataset(*name)
    except Exception as error:  # the library raises many types
        raise ValueError(
            f"{name[0]} cannot be loaded from the hub ({type(error).__name__}). Give local files with `data.path`."
        ) from error
