"""Texts with a class each, or pairs of texts: cut or filled up to one length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raysim.on_demand import torch
from raysim.random import derive_key
from raysim.workloads.mapped import Rows, cached, new_rows, open_rows
from raysim.workloads.order import permutation
from raysim.workloads.rows import RowSource, labels_of
from raysim.workloads.splits import Data, DataShape, limit
from raysim.workloads.tokens import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

TEST_SHARE = 10  # one in this many texts is a test text, where there is no file of test texts


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
    """Return texts and their classes, of one source (a tenth, drawn alike for every run, is tested on) or of two."""
    columns = [column, *([] if pair is None else [pair])]
    for source in sources:
        for field, name in zip(("data.column", "data.pair"), columns, strict=False):
            source.check_column(field, name)
        source.check_column("data.label", label)
    found = [labels_of(source, label) for source in sources]
    known = np.unique(np.concatenate(found))
    if known.dtype.kind == "i" and known[0] >= 0:
        codes, num_classes = np.concatenate(found), int(known[-1]) + 1
    else:
        codes, num_classes = np.searchsorted(known, np.concatenate(found)), len(known)

    def write(place: Path) -> None:
        dtype = np.min_scalar_type(max(tokenizer.num_tokens - 1, tokenizer.padding))
        array = new_rows(place, (len(codes), length), dtype)
        array[:] = tokenizer.padding
        for row, (text, other) in enumerate(_texts(sources, columns)):
            ids = tokenizer.sample(text, other, length)
            array[row, : len(ids)] = ids

    files = [file for source in sources for file in source.files]
    tokens = open_rows(cached("labelled", files, [columns, length, tokenizer.key], write, ".npy"))
    if len(sources) == 2:
        train, test = np.arange(len(found[0])), np.arange(len(found[0]), len(codes))
    else:
        if len(codes) < 2:
            raise ValueError(
                f"{sources[0].name} must have 2 rows or more, to train and to test on, but has {len(codes)}."
            )
        order, num_test = permutation(len(codes), derive_key("labelled", "split")), max(1, len(codes) // TEST_SHARE)
        train, test = np.sort(order[num_test:]), np.sort(order[:num_test])
    splits = [
        LabelledSplit(tokens, codes.astype(np.int64), rows[: limit(f"data.{name}_samples", wanted, len(rows))])
        for name, rows, wanted in (("train", train, train_samples), ("test", test, test_samples))
    ]
    shape = DataShape((length,), "int64", num_classes, num_tokens=tokenizer.num_tokens, padding=tokenizer.padding)
    return Data(splits[0], splits[1], shape)


def _texts(sources: Sequence[RowSource], columns: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    for source in sources:
        row = 0
        for batch in source.batches(columns):
            values: list[list[Any]] = [batch.column(name).to_pylist() for name in columns]
            for texts in zip(*values, strict=True):
                row += 1
                for name, text in zip(columns, texts, strict=True):
                    if not isinstance(text, str):
                        raise ValueError(f"There is no text in column `{name}` in {source.row(row)}.")
                yield texts[0], texts[1] if len(texts) > 1 else None
