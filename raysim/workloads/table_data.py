"""Tabular data sets: rows of numbers and words, and the column to predict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raysim.on_demand import torch
from raysim.workloads.mapped_arrays import Rows, cached, new_rows, open_rows
from raysim.workloads.options import check_flag, check_path
from raysim.workloads.row_files import RowSource, open_rows_of, split_files
from raysim.workloads.splits import Data, DataShape, split_rows

if TYPE_CHECKING:
    from torch import Tensor

MOST_WORDS = 100  # different words of a column that becomes columns of 0 and 1
_AT_ONCE = 65_536


@dataclass(frozen=True, eq=False)
class TableSplit:
    """Selected `rows` of features and targets, standardised to (x - mean) / std when read."""

    features: Rows
    targets_of: Rows
    rows: NDArray[np.int64]
    mean: NDArray[np.float32]
    std: NDArray[np.float32]
    target_mean: NDArray[np.float32] | None  # None of classes
    target_std: NDArray[np.float32] | None

    def __len__(self) -> int:
        return len(self.rows)

    def inputs(self, ids: NDArray[np.int64], epoch: int, key: int, training: bool) -> Tensor:
        """Return (batch, features) in float32."""
        return torch.from_numpy((self.features[self.rows[ids]] - self.mean) / self.std)

    def targets(self, ids: NDArray[np.int64]) -> Tensor:
        """Return the classes, (batch,), or the numbers, (batch, columns), in units of their standard deviation."""
        found = self.targets_of[self.rows[ids]]
        if self.target_mean is None or self.target_std is None:
            return torch.from_numpy(found.astype(np.int64))
        return torch.from_numpy((found - self.target_mean) / self.target_std)


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

    `path` may also be a folder with files train* and test* (or valid*); of one file a tenth of the rows, drawn once and for all, is the
    test split. Features are all other `columns`: numbers and booleans as they are, words one-hot. Features,
    and targets that are numbers, are standardised by the mean and the standard deviation of the training rows, so the loss is of
    standardised targets, and `mae` is in the column's own units. `classes` says whether targets are classes (words and
    booleans always are) or numbers.
    """
    sources = [open_rows_of(files) for files in split_files("data.path", check_path("data.path", path))]
    return table_of(sources, target, columns, classes, train_samples, test_samples)


def table_of(
    sources: Sequence[RowSource],
    target: str | list[str],
    columns: list[str] | None,
    classes: bool | None,
    train_samples: int | None,
    test_samples: int | None,
) -> Data:
    """Return a table data set from one source, or from two: one for training and one for testing."""
    wanted = [target] if isinstance(target, str) else list(target)
    if not wanted or not all(isinstance(name, str) for name in wanted):
        raise ValueError(f"`data.target` must be a column or a list of columns, but got {target!r}.")
    source = sources[0]
    names = [name for name in source.schema.names if name not in wanted] if columns is None else list(columns)
    for each in sources:
        for field, chosen in (("data.target", wanted), ("data.columns", names)):
            for name in chosen:
                each.check_column(field, name)
    if overlap := [name for name in names if name in wanted]:
        raise ValueError(f"`data.columns` must not hold the target, but got {overlap[0]!r}.")
    if not names:
        raise ValueError(f"{source.name} must have columns beside the target, but has none.")
    found = _Survey(sources, names, wanted, classes)
    width = sum(len(found.words.get(name, (0,))) for name in names)
    files = [file for each in sources for file in each.files]
    key = [names, wanted, found.classes]

    def write_features(place: Path) -> None:
        array = new_rows(place, (found.count, width), np.float32)
        for start, batch in found.batches(sources, names):
            parts = [_columns(batch, name, found.words.get(name)) for name in names]
            array[start : start + batch.num_rows] = np.concatenate(parts, axis=1)

    def write_targets(place: Path) -> None:
        array = new_rows(place, (found.count,) if found.classes else (found.count, len(wanted)), np.float32)
        for start, batch in found.batches(sources, wanted):
            if found.classes:
                array[start : start + batch.num_rows] = _codes(batch, wanted[0], found.words[wanted[0]])
            else:
                parts = [_columns(batch, name, None) for name in wanted]
                array[start : start + batch.num_rows] = np.concatenate(parts, axis=1)

    features = open_rows(cached("table", files, ["features", *key], write_features, ".npy"))
    targets = open_rows(cached("table", files, ["targets", *key], write_targets, ".npy"))
    train, test = split_rows("table", found.counts, train_samples, test_samples)
    mean, std = _moments(features, train)
    target_mean, target_std = (None, None) if found.classes else _moments(targets, train)
    first, second = (TableSplit(features, targets, rows, mean, std, target_mean, target_std) for rows in (train, test))
    if found.classes:
        return Data(first, second, DataShape((width,), "float32", len(found.words[wanted[0]])))
    assert target_std is not None
    scale = tuple(float(one) for one in target_std)
    return Data(first, second, DataShape((width,), "float32", len(wanted), (len(wanted),), "float32", scale))


class _Survey:
    """Results of a first pass over all rows: their number, the words of each column, the target."""

    def __init__(
        self, sources: Sequence[RowSource], names: Sequence[str], target: Sequence[str], classes: bool | None
    ) -> None:
        self.counts: list[int] = []
        found: dict[str, set[Any]] = {name: set() for name in [*names, *target]}
        kinds = {name: _kind(sources[0], name) for name in found}
        whole = set(target)  # targets that hold whole numbers only
        for source in sources:
            count = 0
            for batch in source.batches(list(found)):
                for name in found:
                    values = batch.column(name)
                    _check_known(values, name, source, count, kinds[name])
                    if kinds[name] != "number" or (len(target) == 1 and name in target):
                        seen = values.unique().to_pylist()
                        whole -= {name} if any(isinstance(x, float) and not x.is_integer() for x in seen) else set()
                        if kinds[name] != "number" or (name in whole and classes is not False):
                            found[name] |= set(seen)
                    if name in names and len(found[name]) > MOST_WORDS:
                        raise ValueError(
                            f"Column `{name}` of {source.name} holds more than {MOST_WORDS} different words, too many to be "
                            "features. Leave it out of `data.columns`."
                        )
                count += batch.num_rows
            self.counts.append(count)
        self.classes = self._classify(sources[0], target, kinds, whole, classes)
        kept = [*names, *(target if self.classes else ())]
        self.words = {
            name: sorted(found[name], key=str if kinds[name] == "word" else None)
            for name in kept
            if kinds[name] == "word" or name in target
        }

    @property
    def count(self) -> int:
        """Rows of all sources together."""
        return sum(self.counts)

    def batches(self, sources: Sequence[RowSource], columns: Sequence[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield the rows of all sources after each other, with the number of the first."""
        start = 0
        for source in sources:
            for batch in source.batches(columns):
                yield start, batch
                start += batch.num_rows

    def _classify(
        self, source: RowSource, target: Sequence[str], kinds: dict[str, str], whole: set[str], classes: bool | None
    ) -> bool:
        if classes is not None:
            check_flag("data.classes", classes)
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


def _columns(batch: pa.RecordBatch, name: str, words: Sequence[Any] | None) -> NDArray[np.float32]:
    """Return a column of features as (rows, 1), or (rows, words) for words."""
    if words is None:
        values = batch.column(name).to_numpy(zero_copy_only=False)
        return values.astype(np.float32)[:, None]  # type: ignore[no-any-return]
    return np.eye(len(words), dtype=np.float32)[_codes(batch, name, words)]


def _codes(batch: pa.RecordBatch, name: str, words: Sequence[Any]) -> NDArray[np.int64]:
    place = {word: index for index, word in enumerate(words)}
    return np.array([place[value] for value in batch.column(name).to_pylist()], np.int64)


def _moments(array: Rows, rows: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return mean and standard deviation of some rows; the deviation is 1 if all are equal."""
    total: Any = 0.0
    for start in range(0, len(rows), _AT_ONCE):
        total = total + array[rows[start : start + _AT_ONCE]].sum(axis=0, dtype=np.float64)
    mean = total / len(rows)
    squares: Any = 0.0
    for start in range(0, len(rows), _AT_ONCE):
        part = array[rows[start : start + _AT_ONCE]].astype(np.float64)
        squares = squares + ((part - mean) ** 2).sum(axis=0)
    std = np.sqrt(squares / len(rows))
    return mean.astype(np.float32), np.where(std > 0, std, 1.0).astype(np.float32)
