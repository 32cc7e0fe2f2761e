"""Data sets of Hugging Face, by hub name or local path: pictures, texts, or columns of numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from raysim.notation import check_integer
from raysim.workloads.options import import_hub
from raysim.workloads.picture_data import pictures_of
from raysim.workloads.row_files import RowSource
from raysim.workloads.splits import Data
from raysim.workloads.table_data import table_of
from raysim.workloads.text_data import labelled_texts, packed_texts
from raysim.workloads.tokenizers import make_tokenizer

_AT_ONCE = 1000


class HubRows(RowSource):
    """A split of a data set, whose files are Arrow files of the library's cache."""

    def __init__(self, name: str, split: Any) -> None:
        super().__init__(name, [Path(each["filename"]) for each in split.cache_files])
        self._split = split.with_format("arrow")

    @property
    def schema(self) -> pa.Schema:
        return self._split.features.arrow_schema

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        for table in self._split.select_columns(list(columns)).iter(_AT_ONCE):
            yield from table.combine_chunks().to_batches()


def hf(
    *,
    path: str,
    name: str | None = None,
    column: str | list[str] | None = None,
    target: str | None = None,
    pair: str | None = None,
    train_split: str = "train",
    test_split: str = "test",
    tokenizer: str | None = None,
    length: int = 128,
    classes: bool | None = None,
    size: int | list[int] | None = None,
    augment: str = "none",
    mean: list[float] | None = None,
    std: list[float] | None = None,
    train_samples: int | None = None,
    test_samples: int | None = None,
) -> Data:
    """Return a data set of Hugging Face by hub name, by the folder that `save_to_disk` wrote, or by a folder of data files.

    `name` is the configuration of a set that has several. `column` is the input, and its kind decides the kind of samples:
    pictures (see `images`, with `target` as their label), texts (see `text`; with a `target` each is classified, without one
    they are packed), or numbers (one column or a list; see `table`). Of a set without `test_split` a tenth is tested on.
    """
    sources = _sources(path, name, train_split, test_split)
    features = sources[0].schema
    if column is None:
        usual = [each for each in ("text", "image", "img", "sentence") if each in features.names]
        if not usual:
            raise ValueError(f"`data.column` must be given: the columns of {path!r} are {', '.join(features.names)}.")
        column = usual[0]
    first = column if isinstance(column, str) else column[0]
    kind = features.field(sources[0].check_column("data.column", first)).type
    if pa.types.is_struct(kind) or pa.types.is_binary(kind):
        label = target or "label"
        return pictures_of(sources, first, label, size, augment, mean, std, train_samples, test_samples)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        length, reader = check_integer("data.length", length, 1), make_tokenizer(tokenizer)
        if target is None:
            return packed_texts(sources, reader, length, first, train_samples, test_samples)
        return labelled_texts(sources, reader, length, first, pair, target, train_samples, test_samples)
    if target is None:
        raise ValueError(
            f"`data.target` must be given where inputs are numbers, as column {first!r} of {path!r} holds."
        )
    columns = [column] if isinstance(column, str) else list(column)
    return table_of(sources, target, columns, classes, train_samples, test_samples)


def _sources(path: str, name: str | None, train_split: str, test_split: str) -> list[RowSource]:
    """Return the rows of the training split, and of the test split if there is one."""
    datasets = import_hub("datasets")
    folder = Path(path).expanduser()
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            loaded = datasets.load_from_disk(str(folder))
        else:
            loaded = datasets.load_dataset(str(folder) if folder.is_dir() else path, name)
    except Exception as error:  # the library raises of all kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ValueError(f"`data.path` = {path!r} cannot be loaded as a data set: {reason}.") from None
    splits = loaded if isinstance(loaded, dict) else {train_split: loaded}
    if train_split not in splits:
        raise ValueError(
            f"`data.train_split` must be a split of {path!r} ({', '.join(splits)}), but got {train_split!r}."
        )
    known = [train_split, *([test_split] if test_split in splits else [])]
    return [HubRows(f"{path}, split {split}", _without_decoding(datasets, splits[split])) for split in known]


def _without_decoding(datasets: Any, split: Any) -> Any:
    """Return a split whose pictures are left encoded."""
    for column, feature in split.features.items():
        if isinstance(feature, datasets.Image):
            split = split.cast_column(column, datasets.Image(decode=False))
    return split
