"""Tabular data sets: rows of numbers and words, and the column to predict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raysim.on_demand import torch
from raysim.workloads.labels import check_labels, declared_classes
from raysim.workloads.options import check_boolean
from raysim.workloads.row_files import RowSource, open_splits
from raysim.workloads.splits import Data, DataShape, Rows, Wanted, cached_rows, split_rows

if TYPE_CHECKING:
    from torch import Tensor

MOST_WORDS = 100  # most different words of a one-hot column
_AT_ONCE = 65_536


@dataclass(frozen=True, eq=False)
class TableSplit:
    """Selected `rows` of features and targets, standardised to (x - mean) / std when read, except classes."""

    features: Rows
    targets_of: Rows
    rows: NDArray[np.int64]
    mean: NDArray[np.float32]
    std: NDArray[np.float32]
    target_mean: NDArray[np.float32] | None  # None for classes
    target_std: NDArray[np.float32] | None

    def __len__(self) -> int:
        return len(self.rows)

    def inputs(self, ids: NDArray[np.int64], epoch: int, key: int, training: bool) -> Tensor:
        return torch.from_numpy((self.features[self.rows[ids]] - self.mean) / self.std)

    def targets(self, ids: NDArray[np.int64]) -> Tensor:
        values = self.targets_of[self.rows[ids]]
        if self.target_mean is None or self.target_std is None:
            return torch.from_numpy(values.astype(np.int64))
        return torch.from_numpy((values - self.target_mean) / self.target_std)


def table(
    *,
    path: str,
    target: str | list[str],
    columns: list[str] | None = None,
    classes: bool | None = None,
    train_samples: int | None = None,
    test_samples: int | None = None,
) -> Data:
    """Return the rows of a CSV, TSV, JSON-lines or Parquet file, with `target` as the column to predict.

    `path` may also be a folder with files train* and test* (or valid*); of a single file, a fixed random tenth of the rows is the
    test split. Features are all other `columns`: numbers and booleans as they are, words one-hot. Features and numeric targets
    are standardised by the mean and standard deviation of the training rows, so the loss is that of standardised targets, while
    `mae` is in the column's own units. `classes`: whether targets are classes (words and booleans always are) or numbers.
    """
    return table_of_rows(open_splits(path), target, columns, classes, (train_samples, test_samples))


def table_of_rows(
    sources: Sequence[RowSource],
    target: str | list[str],
    columns: list[str] | None,
    classes: bool | None,
    wanted: Wanted,
) -> Data:
    """Return a table data set from one source to be split, or from a training and a test source."""
    targets = [target] if isinstance(target, str) else list(target)
    if not targets or not all(isinstance(name, str) for name in targets):
        raise ValueError(f"`data.target` must be a column or a list of columns, but got {target!r}.")
    names = [name for name in sources[0].schema.names if name not in targets] if columns is None else list(columns)
    for source in sources:
        for field, chosen in (("data.target", targets), ("data.columns", names)):
            for name in chosen:
                source.check_column(field, name)
    if overlap := [name for name in names if name in targets]:
        raise ValueError(f"`data.columns` must not hold the target, but got {overlap[0]!r}.")
    if not names:
        raise ValueError(f"{sources[0].name} must have columns other than the target, but has none.")
    survey = _Survey(sources, names, targets, classes)
    inputs, outputs = (survey.array(part, chosen) for part, chosen in (("features", names), ("targets", targets)))
    train, test = split_rows("table", survey.counts, wanted, outputs if survey.classes else None)
    mean, std = _moments(inputs, train)
    target_mean, target_std = (None, None) if survey.classes else _moments(outputs, train)
    first, second = (TableSplit(inputs, outputs, rows, mean, std, target_mean, target_std) for rows in (train, test))
    width = sum(survey.width(name) for name in names)
    if target_std is None:
        return Data(first, second, DataShape((width,), "float32", len(survey.words[targets[0]])))
    scale = tuple(map(float, target_std))
    return Data(first, second, DataShape((width,), "float32", len(targets), (len(targets),), "float32", scale))


class _Survey:
    """Results of a first pass over all rows: their number, the words of each column, the target."""

    def __init__(
        self, sources: Sequence[RowSource], names: Sequence[str], target: Sequence[str], classes: bool | None
    ) -> None:
        self.sources = sources
        self.counts: list[int] = []
        words: dict[str, set[Any]] = {name: set() for name in [*names, *target]}
        kinds = {name: _kind(sources[0], name) for name in words}
        whole = set(target)  # targets that hold only integers
        for source in sources:
            count = 0
            for batch in source.batches(list(words)):
                for name in words:
                    values = batch.column(name)
                    _check_known(values, name, source, count, kinds[name])
                    if kinds[name] != "number" or [name] == list(target):
                        seen = values.unique().to_pylist()
                        if any(isinstance(x, float) and not x.is_integer() for x in seen):
                            whole.discard(name)
                        if kinds[name] != "number" or (name in whole and classes is not False):
                            words[name] |= set(seen)
                    if name in names and len(words[name]) > MOST_WORDS:
                        raise ValueError(
                            f"Column `{name}` of {source.name} holds more than {MOST_WORDS} different words, too many to be "
                            "features. Leave it out of `data.columns`."
                        )
                count += batch.num_rows
            self.counts.append(count)
        self.classes = _targets_are_classes(sources[0], target, kinds, whole, classes)
        coded = [name for name in names if kinds[name] == "word"] + list(target if self.classes else ())
        self.words = {name: sorted(words[name], key=str if kinds[name] == "word" else None) for name in coded}
        if self.classes:
            self._check_classes(target[0])
        self._target = target
        self._names = names

    def _check_classes(self, target: str) -> None:
        """Raise ValueError naming a row whose class is not declared, or else does not occur in the training split."""
        names = declared_classes(self.sources[0].schema, target)
        if names is None and len(self.sources) == 1:
            return
        columns = [[batch[0].to_pylist() for batch in source.batches([target])] for source in self.sources]
        parts = [np.asarray(list(chain.from_iterable(batches))) for batches in columns]
        known = np.unique(parts[0]) if names is None else np.arange(len(names))
        for source, labels in zip(self.sources, parts, strict=True):
            check_labels(source, target, labels, known)

    def width(self, name: str) -> int:
        """Return the number of features made from a column: one per word, or one for numbers."""
        return len(self.words.get(name, (0,)))

    def array(self, part: str, columns: Sequence[str]) -> Rows:
        """Return columns of all sources: classes as (rows,), features and other targets as (rows, features)."""
        as_classes = part == "targets" and self.classes
        width = sum(self.width(name) for name in columns)

        def write(path: Path) -> None:
            shape = (sum(self.counts),) if as_classes else (sum(self.counts), width)
            array = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
            start = 0
            for source in self.sources:
                for batch in source.batches(columns):
                    array[start : start + batch.num_rows] = self._values(batch, columns, as_classes)
                    start += batch.num_rows

        files = [file for source in self.sources for file in source.files]
        return cached_rows("table", files, [part, self._names, self._target, self.classes], write)

    def _values(self, batch: pa.RecordBatch, columns: Sequence[str], as_classes: bool) -> NDArray[Any]:
        parts = []
        for name in columns:
            values = batch.column(name)
            if name in self.words:
                codes = {word: i for i, word in enumerate(self.words[name])}
                numbers = np.array([codes[value] for value in values.to_pylist()], np.int64)
                parts.append(numbers if as_classes else np.eye(len(codes), dtype=np.float32)[numbers])
            else:
                parts.append(values.to_numpy(zero_copy_only=False).astype(np.float32)[:, None])
        return parts[0] if as_classes else np.concatenate(parts, axis=1)


def _targets_are_classes(
    source: RowSource, target: Sequence[str], kinds: dict[str, str], whole: set[str], classes: bool | None
) -> bool:
    if classes is not None:
        check_boolean("data.classes", classes)
    words = [name for name in target if kinds[name] != "number"]
    if len(target) > 1:
        if words or classes:
            raise ValueError(f"`data.target` must be one column if targets are classes, but got {list(target)}.")
        return False
    if words:
        if classes is False:
            raise ValueError(f"Column `{words[0]}` of {source.name} holds no numbers: leave `data.classes` out.")
        return True
    if classes is None and whole:
        raise ValueError(
            f"Column `{target[0]}` of {source.name} holds whole numbers only: say whether they are classes "
            "(`data.classes = true`) or numbers (`data.classes = false`)."
        )
    if classes and not whole:
        raise ValueError(f"Column `{target[0]}` of {source.name} holds fractions, which cannot be classes.")
    return bool(classes)


def _kind(source: RowSource, name: str) -> str:
    kind = source.schema.field(name).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_boolean(kind):
        return "flag"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return "number"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "word"
    raise ValueError(
        f"Column `{name}` of {source.name} must hold numbers, booleans or words, but holds {kind}. "
        "Leave it out of `data.columns`."
    )


def _check_known(values: pa.Array, name: str, source: RowSource, before: int, kind: str) -> None:
    """Raise ValueError naming the row (from 1) if a value is missing, or is not a number in a column of numbers."""
    bad = np.asarray(values.is_null())
    if kind == "number":
        bad = bad | ~np.isfinite(values.to_numpy(zero_copy_only=False).astype(np.float64))
    if bad.any():
        row = before + int(bad.argmax()) + 1
        raise ValueError(f"There is no value in column `{name}` in {source.row(row)}.")


def _moments(array: Rows, rows: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the mean and standard deviation of the given rows; the deviation is 1 if all are equal."""
    parts = [rows[start : start + _AT_ONCE] for start in range(0, len(rows), _AT_ONCE)]
    total: Any = sum(array[part].sum(axis=0, dtype=np.float64) for part in parts)
    mean = total / len(rows)
    squares: Any = sum(((array[part].astype(np.float64) - mean) ** 2).sum(axis=0) for part in parts)
    std = np.sqrt(squares / len(rows))
    return mean.astype(np.float32), np.where(std > 0, std, 1.0).astype(np.float32)
