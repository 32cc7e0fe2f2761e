"""Data sets of Hugging Face, by hub name or local path: images, texts, or columns of numbers."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from raysim.notation import check_integer
from raysim.workloads.options import import_hub, reason_of
from raysim.workloads.picture_data import PictureOptions, pictures_of
from raysim.workloads.row_files import HubRows, RowSource
from raysim.workloads.splits import Data
from raysim.workloads.table_data import table_of
from raysim.workloads.text_data import labelled_texts, packed_texts
from raysim.workloads.tokenizers import make_tokenizer


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

    `name` is the configuration of a set that has several. `column` is the input, and its kind decides the kind of
    samples: images (see `images`, with `target` as their label), texts (see `text`; with a `target` each is classified,
    without one they are packed), or numbers (one column or a list; see `table`). Of a set without `test_split` a tenth
    is tested on.
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
        options = PictureOptions(size, augment, mean, std, train_samples, test_samples)
        return pictures_of(sources, first, target or "label", options)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        length, reader = check_integer("data.length", length, 1), make_tokenizer(tokenizer)
        if target is None:
            return packed_texts(sources, reader, length, first, train_samples, test_samples)
        return labelled_texts(sources, reader, length, first, pair, target, train_samples, test_samples)
    if target is None:
        raise ValueError(f"`data.target` must be given if inputs are numbers, as column {first!r} of {path!r} holds.")
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
        reason = reason_of(error)
        raise ValueError(f"`data.path` = {path!r} cannot be loaded as a data set: {reason}.") from None
    splits = loaded if isinstance(loaded, dict) else {train_split: loaded}
    if train_split not in splits:
        raise ValueError(
            f"`data.train_split` must be a split of {path!r} ({', '.join(splits)}), but got {train_split!r}."
        )
    known = [train_split, *([test_split] if test_split in splits else [])]
    return [HubRows(f"{path}, split {split}", splits[split]) for split in known]
