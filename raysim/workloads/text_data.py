"""Text data sets, packed into blocks of tokens or with one labelled text per sample: help pages, text files, WikiText-2."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from raysim.notation import check_integer
from raysim.on_demand import torch
from raysim.workloads import splits
from raysim.workloads.labels import coded_labels
from raysim.workloads.options import check_path
from raysim.workloads.row_files import SUFFIXES, RowSource, encoding_of, load_hub_set, open_rows_of, read_marked
from raysim.workloads.splits import Data, DataShape, Rows, Wanted, cached_rows, limits, split_rows, write_parts
from raysim.workloads.tokenizers import Bytes, HuggingFace, Tokenizer, make_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

WIKITEXT2_HUB = ("Salesforce/wikitext", "wikitext-2-v1")


@dataclass(frozen=True, eq=False)
class TextSplit:
    """A flat row of tokens; the inputs of sample i are the `length` tokens from i x length on, the targets are one token later.

    >>> split = TextSplit(np.arange(10, dtype=np.uint8), length=4)
    >>> len(split), split.inputs(np.array([1]), epoch=0, key=0, training=True), split.targets(np.array([1]))
    (2, tensor([[4, 5, 6, 7]]), tensor([[5, 6, 7, 8]]))
    """

    tokens: Rows
    length: int

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def inputs(self, ids: NDArray[np.int64], epoch: int, key: int, training: bool) -> Tensor:
        return self._read(ids, 0)

    def targets(self, ids: NDArray[np.int64]) -> Tensor:
        return self._read(ids, 1)

    def _read(self, ids: NDArray[np.int64], shift: int) -> Tensor:
        positions = ids[:, None] * self.length + np.arange(shift, shift + self.length)
        return torch.from_numpy(self.tokens[positions].astype(np.int64))


@dataclass(frozen=True, eq=False)
class LabelledSplit:
    """Selected `rows` of an array of tokens (row, length) and of their classes."""

    tokens: Rows
    labels: NDArray[np.int64]
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)

    def inputs(self, ids: NDArray[np.int64], epoch: int, key: int, training: bool) -> Tensor:
        return torch.from_numpy(self.tokens[self.rows[ids]].astype(np.int64))

    def targets(self, ids: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(self.labels[self.rows[ids]])


def topics(*, length: int = 64, train_samples: int | None = None, test_samples: int | None = None) -> Data:
    """Return the bytes of `pydoc_data.topics`, about 460 kB of English text in every Python installation.

    The last tenth is the test split. Needs no network. The text differs between versions of Python.
    """
    length = check_integer("data.length", length, 1)
    from pydoc_data.topics import topics as pages

    tokens = np.frombuffer("\n".join(pages.values()).encode(), dtype=np.uint8)
    return _data([tokens], 256, length, (train_samples, test_samples))


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
    """Return text in blocks of `length` tokens for next-token prediction, or with `label` texts to classify.

    `path`: a text file, a file of rows (JSON lines, Parquet, CSV, TSV), or a folder. `length`: tokens of a block, or of a text to
    classify, which is truncated or padded. `column`: the texts in a file of rows. The last tenth of a single file is the test split.
    `train_file` and `test_file`: files in the folder, by default train.txt and test.txt, or files train* and test* of rows.
    `tokenizer`: a folder with a tokenizer's files or a hub name; by default tokens are bytes. `label`: a column of classes; each
    row is then a sample, and of a single file a fixed tenth of the rows is the test split. `pair`: a column with a second text for
    each sample.
    """
    length = check_integer("data.length", length, 1)
    source = check_path("data.path", path)
    if source.is_file():
        _check_unnamed(train_file, test_file, f"unless `data.path` is a folder, but {path!r} is a file")
        files = [[source]]
    else:
        files = _split_files(source, train_file, test_file)
    reader, wanted = make_tokenizer(tokenizer), (train_samples, test_samples)
    if label is not None:
        sources = [open_rows_of(*each) for each in files]
        return labelled_texts(sources, reader, length, column, pair, label, wanted)
    if pair is not None:
        raise ValueError("`data.pair` has no effect without `data.label`. Leave it out.")
    return _data([_read(each, reader, column) for each in files], reader.num_tokens, length, wanted)


def packed_texts(sources: Sequence[RowSource], tokenizer: Tokenizer, length: int, column: str, wanted: Wanted) -> Data:
    """Return the concatenated texts of rows in blocks of `length` tokens."""
    parts = [_read_rows(source, tokenizer, column) for source in sources]
    return _data(parts, tokenizer.num_tokens, length, wanted)


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

    Lines are tokenised one by one and empty lines left out, as in the hub's rows, so both sources give the same tokens.
    `train_file` and `test_file` default to train.txt and test.txt. `tokenizer`: a folder with a tokenizer's files, or a
    hub name.
    """
    length = check_integer("data.length", length, 1)
    if path is None:
        _check_unnamed(train_file, test_file, "without `data.path`")
        reader, loaded = HuggingFace(tokenizer), load_hub_set(*WIKITEXT2_HUB)
        lines = [[row.encode() for row in loaded[split]["text"]] for split in ("train", "test")]
    else:
        folder = check_path("data.path", path)
        if not folder.is_dir():
            raise ValueError(
                f"`data.path` must be a folder of text files, but {path!r} is a file. Use `data = 'text'` for one file."
            )
        files = _split_files(folder, train_file, test_file)
        reader = HuggingFace(tokenizer)
        lines = [b"".join(map(read_marked, each)).splitlines(keepends=True) for each in files]
    parts = [reader.read(line for line in part if line.strip()) for part in lines]
    return _data(parts, reader.num_tokens, length, (train_samples, test_samples))


def _check_unnamed(train_file: str | None, test_file: str | None, condition: str) -> None:
    for field, name in (("data.train_file", train_file), ("data.test_file", test_file)):
        if name is not None:
            raise ValueError(f"`{field}` has no effect {condition}.")


def _read(files: Sequence[Path], reader: Tokenizer, column: str) -> Rows:
    """Return the tokens of a text file or of files of rows, cached on disk, and memory-mapped if there are many."""
    file = files[0]
    if file.suffix in SUFFIXES:
        return _read_rows(open_rows_of(*files), reader, column)
    if file.stat().st_size <= splits.IN_MEMORY and isinstance(reader, Bytes):
        return reader.read([read_marked(file)])

    def write(path: Path) -> None:
        write_parts(path, (reader.read([piece]) for piece in _pieces(file)), reader.dtype)

    return cached_rows("tokens", [file], reader.key, write)


def _read_rows(source: RowSource, reader: Tokenizer, column: str) -> Rows:
    source.check_column("data.column", column)

    def write(path: Path) -> None:
        write_parts(path, reader.documents(text for (text,) in source.texts([column])), reader.dtype)

    return cached_rows("tokens", source.files, [source.name, column, reader.key], write)


def _pieces(file: Path) -> Iterator[bytes]:
    """Yield a small text file whole, or a large one in batches of lines."""
    if file.stat().st_size <= splits.IN_MEMORY or encoding_of(file) is not None:
        yield read_marked(file)
        return
    with file.open("rb") as lines:
        while piece := b"".join(lines.readlines(2**24)):
            yield piece


def _split_files(folder: Path, train_file: str | None, test_file: str | None) -> list[list[Path]]:
    """Return the files of each split: the named one, or else its text file, or else all its files of rows of one suffix."""
    splits = []
    for split, given in (("train", train_file), ("test", test_file)):
        file = folder / (given or f"{split}.txt")
        files = [file] if file.is_file() else []
        if given is None and not files:
            files = next(filter(None, (sorted(folder.glob(f"{split}*{suffix}")) for suffix in SUFFIXES)), [])
        if not files:
            names = sorted(path.name for path in folder.iterdir() if path.is_file())
            raise ValueError(
                f"`data.path` must hold {given or file.name}, but {str(folder)!r} holds {', '.join(names[:10]) or 'no file'}. "
                f"Name another with `data.{split}_file`."
            )
        splits.append(files)
    return splits


def _data(parts: Sequence[Rows], num_tokens: int, length: int, wanted: Wanted) -> Data:
    """Return blocks of the training and test tokens; the last tenth of a single part is the test split."""
    if len(parts) == 1:
        cut = len(parts[0]) - len(parts[0]) // splits.TEST_SHARE
        parts = parts[0][:cut], parts[0][cut:]
    for name, tokens in zip(("train", "test"), parts, strict=True):
        if len(tokens) <= length:
            raise ValueError(
                f"`data.length` must be less than the number of tokens to {name} on ({len(tokens)}), but got {length}."
            )
    counts = limits(wanted, [len(TextSplit(tokens, length)) for tokens in parts])
    train, test = (TextSplit(tokens[: count * length + 1], length) for tokens, count in zip(parts, counts, strict=True))
    return Data(train, test, DataShape((length,), "int64", num_tokens, target_shape=(length,)))


def labelled_texts(
    sources: Sequence[RowSource],
    tokenizer: Tokenizer,
    length: int,
    column: str,
    pair: str | None,
    label: str,
    wanted: Wanted,
) -> Data:
    """Return texts and their classes, from one source (a fixed tenth is the test split) or two."""
    columns = [column] if pair is None else [column, pair]
    for source in sources:
        for field, name in zip(("data.column", "data.pair"), columns, strict=False):
            source.check_column(field, name)
        source.check_column("data.label", label)
    labels, num_classes = coded_labels(sources, label)
    codes = np.concatenate(labels)

    def write(path: Path) -> None:
        array = np.lib.format.open_memmap(path, mode="w+", dtype=tokenizer.dtype, shape=(len(codes), length))
        texts = (row for source in sources for row in source.texts(columns))
        for i, (text, *other) in enumerate(texts):
            array[i] = tokenizer.sample(text, other[0] if other else None, length)

    files = [file for source in sources for file in source.files]
    tokens = cached_rows("labelled", files, [columns, length, tokenizer.key], write)
    train, test = (
        LabelledSplit(tokens, codes, rows)
        for rows in split_rows("labelled", [len(part) for part in labels], wanted, codes)
    )
    shape = DataShape((length,), "int64", num_classes, num_tokens=tokenizer.num_tokens, padding=tokenizer.padding)
    if pair is not None:
        shape = shape._replace(separator=tokenizer.separator)
    return Data(train, test, shape)
