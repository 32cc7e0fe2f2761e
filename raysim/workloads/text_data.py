"""Data sets of text, packed into blocks of tokens or one labelled text a sample: Python's help pages, text files, WikiText-2."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raysim.notation import check_integer
from raysim.on_demand import torch
from raysim.workloads.mapped_arrays import IN_MEMORY, Rows, cached, new_rows, open_rows, write_parts
from raysim.workloads.options import check_path, load_hub_set
from raysim.workloads.row_files import SUFFIXES, RowSource, coded_labels, open_rows_of
from raysim.workloads.splits import TEST_SHARE, Data, DataShape, TextSplit, limit, split_rows
from raysim.workloads.tokenizers import Bytes, HuggingFace, Tokenizer, make_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

WIKITEXT2_HUB = ("Salesforce/wikitext", "wikitext-2-v1")


def topics(*, length: int = 64, train_samples: int | None = None, test_samples: int | None = None) -> Data:
    """Return the text of `pydoc_data.topics` by bytes, some 460 kB of English that every Python carries.

    The last tenth is the test split. Needs no network. The text differs between versions of Python.
    """
    length = check_integer("data.length", length, 1)
    from pydoc_data.topics import topics as pages

    tokens = np.frombuffer("\n".join(pages.values()).encode(), dtype=np.uint8)
    return _data(*_last_tenth(tokens), 256, length, train_samples, test_samples)


def text(
    *,
    path: str,
    length: int = 64,
    tokenizer: str | None = None,
    column: str = "text",
    label: str | None = None,
    pair: str | None = None,
    train_file: str | None = None,
    test_file: str | None = None,
    train_samples: int | None = None,
    test_samples: int | None = None,
) -> Data:
    """Return text in blocks of `length` tokens, each to be predicted from the tokens before it; or texts with a `label` each.

    `path` is a text file, or a file of rows (JSON lines, Parquet, CSV, TSV) with a text in each row's `column`; the last tenth
    is the test split. Or it is a folder with `train_file` and `test_file`: train.txt and test.txt, or files train* and test*
    of rows, unless they are named. Tokens are bytes, or the tokens of `tokenizer`, a folder with a tokenizer's files or a hub name.
    With `label`, a column of classes, each row is a sample: its text, and the text of the column `pair` if given, cut or filled up
    to `length`. Of a single file, a fixed tenth of the rows is the test split.
    """
    length = check_integer("data.length", length, 1)
    found = check_path("data.path", path)
    if found.is_file():
        for field, name in (("data.train_file", train_file), ("data.test_file", test_file)):
            if name is not None:
                raise ValueError(f"`{field}` has no effect unless `data.path` is a folder, but {path!r} is a file.")
        files = [found]
    else:
        files = list(_split_files(found, train_file, test_file))
    reader = make_tokenizer(tokenizer)
    if label is not None:
        sources = [open_rows_of([file]) for file in files]
        return labelled_texts(sources, reader, length, column, pair, label, train_samples, test_samples)
    if pair is not None:
        raise ValueError("`data.pair` has no effect without `data.label`. Leave it out.")
    parts = [_read(file, reader, column) for file in files]
    train, test = parts if len(parts) == 2 else _last_tenth(parts[0])
    return _data(train, test, reader.num_tokens, length, train_samples, test_samples)


def packed_texts(
    sources: Sequence[RowSource],
    tokenizer: Tokenizer,
    length: int,
    column: str,
    train_samples: int | None,
    test_samples: int | None,
) -> Data:
    """Return the texts of rows, one after the other, in blocks of `length` tokens."""
    parts = [_read_rows(source, tokenizer, column) for source in sources]
    train, test = parts if len(parts) == 2 else _last_tenth(parts[0])
    return _data(train, test, tokenizer.num_tokens, length, train_samples, test_samples)


def wikitext2(
    *,
    path: str | None = None,
    length: int = 1024,
    tokenizer: str = "gpt2",
    train_file: str | None = None,
    test_file: str | None = None,
    train_samples: int | None = None,
    test_samples: int | None = None,
) -> Data:
    """Return WikiText-2 in blocks of `length` tokens, from the folder `path` of text files, or from the hub.

    Lines are tokenised one by one and empty lines left out, as in the hub's rows, so both ways give the same tokens.
    `train_file` and `test_file` are train.txt and test.txt unless they are named. `tokenizer` is a folder with a
    tokenizer's files, or a hub name.
    """
    length = check_integer("data.length", length, 1)
    files: tuple[Path, Path] | None = None
    if path is not None:
        found = check_path("data.path", path)
        if not found.is_dir():
            raise ValueError(
                f"`data.path` must be a folder of text files, but {path!r} is a file. Use `data = 'text'` for one file."
            )
        files = _split_files(found, train_file, test_file)
    reader = HuggingFace(tokenizer)
    if files is not None:
        lines = [file.read_bytes().splitlines(keepends=True) for file in files]
    else:
        for field, name in (("data.train_file", train_file), ("data.test_file", test_file)):
            if name is not None:
                raise ValueError(f"`{field}` has no effect without `data.path`.")
        loaded = load_hub_set(*WIKITEXT2_HUB)
        lines = [[row.encode() for row in loaded[split]["text"]] for split in ("train", "test")]
    train, test = (reader.read(line for line in part if line.strip()) for part in lines)
    return _data(train, test, reader.num_tokens, length, train_samples, test_samples)


def _read(file: Path, reader: Tokenizer, column: str) -> Rows:
    """Return the tokens of a file, cached on disk, and mapped if there are many."""
    if file.suffix in SUFFIXES:
        return _read_rows(open_rows_of([file]), reader, column)
    if file.stat().st_size <= IN_MEMORY and isinstance(reader, Bytes):
        return reader.read([file.read_bytes()])

    def write(place: Path) -> None:
        write_parts(place, (reader.read([piece]) for piece in _pieces(file)), _dtype(reader))

    return open_rows(cached("tokens", [file], reader.key, write, ".npy"))


def _read_rows(source: RowSource, reader: Tokenizer, column: str) -> Rows:
    source.check_column("data.column", column)

    def write(path: Path) -> None:
        texts = (text for (text,) in source.texts([column]))
        write_parts(path, reader.documents(texts), _dtype(reader))

    return open_rows(cached("tokens", source.files, [source.name, column, reader.key], write, ".npy"))


def _dtype(reader: Tokenizer) -> np.dtype[Any]:
    return np.min_scalar_type(max(reader.num_tokens - 1, 0))


def _pieces(file: Path) -> Iterator[bytes]:
    """Yield a text file whole if it is small, else some lines at a time."""
    if file.stat().st_size <= IN_MEMORY:
        yield file.read_bytes()
        return
    with file.open("rb") as lines:
        while piece := b"".join(lines.readlines(2**24)):
            yield piece


def _split_files(folder: Path, train_file: str | None, test_file: str | None) -> tuple[Path, Path]:
    files = []
    for field, name in (("data.train_file", train_file or "train.txt"), ("data.test_file", test_file or "test.txt")):
        file = folder / name
        if not file.is_file() and (train_file if "train" in field else test_file) is None:
            of_rows = (each for suffix in SUFFIXES for each in sorted(folder.glob(f"{Path(name).stem}*{suffix}")))
            file = next(of_rows, file)
        if not file.is_file():
            held = (
                ", ".join(itertools.islice(sorted(each.name for each in folder.iterdir() if each.is_file()), 10))
                or "no file"
            )
            raise ValueError(
                f"`data.path` must hold {name}, but {str(folder)!r} holds {held}. Name another by `{field}`."
            )
        files.append(file)
    return files[0], files[1]


def _last_tenth(tokens: Rows) -> tuple[Rows, Rows]:
    cut = len(tokens) - len(tokens) // TEST_SHARE
    return tokens[:cut], tokens[cut:]


def _data(
    train: Rows, test: Rows, num_tokens: int, length: int, train_samples: int | None, test_samples: int | None
) -> Data:
    splits = []
    for name, tokens, wanted in (("train", train, train_samples), ("test", test, test_samples)):
        available = (len(tokens) - 1) // length
        if available < 1:
            raise ValueError(
                f"`data.length` must be less than the number of tokens to {name} on ({len(tokens)}), but got {length}."
            )
        splits.append(TextSplit(tokens[: limit(f"data.{name}_samples", wanted, available) * length + 1], length))
    return Data(splits[0], splits[1], DataShape((length,), "int64", num_tokens, target_shape=(length,)))


@dataclass(frozen=True, eq=False)
class LabelledSplit:
    """Some `rows` of an array of token rows, and of their classes."""

    tokens: Rows
    labels: NDArray[np.int64]
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)

    def inputs(self, ids: NDArray[np.int64], epoch: int, key: int, training: bool) -> Tensor:
        """Return (batch, length) in int64."""
        return torch.from_numpy(self.tokens[self.rows[ids]].astype(np.int64))

    def targets(self, ids: NDArray[np.int64]) -> Tensor:
        """Return the classes, (batch,)."""
        return torch.from_numpy(self.labels[self.rows[ids]])


def labelled_texts(
    sources: Sequence[RowSource],
    tokenizer: Tokenizer,
    length: int,
    column: str,
    pair: str | None,
    label: str,
    train_samples: int | None,
    test_samples: int | None,
) -> Data:
    """Return texts and their classes, from one source (a fixed tenth is the test split) or from two."""
    columns = [column, *([] if pair is None else [pair])]
    for source in sources:
        for field, name in zip(("data.column", "data.pair"), columns, strict=False):
            source.check_column(field, name)
        source.check_column("data.label", label)
    labels, num_classes = coded_labels(sources, label)
    codes = np.concatenate(labels)

    def write(path: Path) -> None:
        dtype = np.min_scalar_type(max(tokenizer.num_tokens - 1, tokenizer.padding))
        array = new_rows(path, (len(codes), length), dtype)
        array[:] = tokenizer.padding
        texts = (row for source in sources for row in source.texts(columns))
        for row, (text, *other) in enumerate(texts):
            ids = tokenizer.sample(text, other[0] if other else None, length)
            array[row, : len(ids)] = ids

    files = [file for source in sources for file in source.files]
    tokens = open_rows(cached("labelled", files, [columns, length, tokenizer.key], write, ".npy"))
    parts = split_rows("labelled", [len(each) for each in labels], train_samples, test_samples)
    train, test = (LabelledSplit(tokens, codes, rows) for rows in parts)
    shape = DataShape((length,), "int64", num_classes, num_tokens=tokenizer.num_tokens, padding=tokenizer.padding)
    return Data(train, test, shape)
