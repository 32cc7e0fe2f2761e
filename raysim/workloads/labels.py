"""The classes of a column and their numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raysim.workloads.losses import IGNORED
from raysim.workloads.row_files import RowSource

_CODES = 100  # with more class numbers than this for each class that occurs, they are codes


def coded_labels(
    sources: Sequence[RowSource], label: str, *, from_zero: bool = False
) -> tuple[list[NDArray[np.int64]], int]:
    """Return the class numbers of each source's rows, and the number of classes.

    The classes are those declared in the schema of a Hugging Face data set, or else the labels of the first source, the training
    split. Non-negative integers are class numbers themselves. Words, and integers if some are negative, are numbered in sorted
    order; with `from_zero` negative integers raise ValueError, as do labels that are none of the classes.
    """
    parts = [_labels_of(source, label) for source in sources]
    trained = np.unique(parts[0])
    whole, names = trained.dtype.kind in "iu", declared_classes(sources[0].schema, label)
    if whole and names is not None:
        num_classes = len(names)
    elif whole and trained[0] >= 0:
        num_classes = int(trained[-1]) + 1
        check_codes(f"Column `{label}` of {sources[0].name}", len(trained), num_classes)
    elif whole and (from_zero or trained[0] == IGNORED):
        raise ValueError(f"Column `{label}` of {sources[0].name} must hold classes from 0, but holds {trained[0]}.")
    else:
        num_classes = len(trained)
    by_number = whole and (names is not None or trained[0] >= 0)
    known = np.arange(num_classes) if by_number else trained
    for source, labels in zip(sources, parts, strict=True):
        check_labels(source, label, labels, known)
    return [np.searchsorted(known, labels) for labels in parts], num_classes


def declared_classes(schema: pa.Schema, label: str) -> list[str] | None:
    """Return the class names that a Hugging Face data set declares for a column, in its schema's metadata; None without."""
    try:
        entries = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][label]
        return list(entries["names"]) if entries["_type"] == "ClassLabel" else None
    except (KeyError, TypeError, ValueError):
        return None


def check_labels(source: RowSource, label: str, labels: NDArray[Any], known: NDArray[Any]) -> None:
    """Raise ValueError naming the first row of `source` whose label is none of the `known` classes."""
    if (labels.dtype.kind in "US") != (known.dtype.kind in "US"):
        kinds = ["words" if x.dtype.kind in "US" else "numbers" for x in (labels, known)]
        raise ValueError(f"Column `{label}` of {source.name} holds {kinds[0]}, but {kinds[1]} in the training split.")
    other = ~np.isin(labels, known)
    if other.any():
        i = int(other.argmax())
        first = ", ".join(map(str, known[:5].tolist()))
        more = f", ... {known[-1]}" if len(known) > 5 else ""
        raise ValueError(
            f"Column `{label}` holds {labels[i].item()!r} in {source.row(i + 1)}, which is none of the {len(known)} classes of the "
            f"training split ({first}{more}). {source.remedy}"
        )


def check_codes(where: str, distinct: int, num_classes: int) -> None:
    """Raise ValueError if integers cannot be class numbers, since hardly any number up to the greatest occurs."""
    if num_classes > _CODES * distinct:
        raise ValueError(
            f"{where} holds {distinct} different integers up to {num_classes - 1}, which would make {num_classes} classes. Number "
            "the classes from 0, or write them as words."
        )


def _labels_of(source: RowSource, label: str) -> NDArray[Any]:
    """Return a column of classes, as integers or words; raises ValueError naming a row without one."""
    parts: list[NDArray[Any]] = []
    for batch in source.batches([label]):
        if batch[0].null_count:
            row = sum(len(part) for part in parts) + int(np.asarray(batch[0].is_null()).argmax()) + 1
            raise ValueError(f"There is no value in column `{label}` in {source.row(row)}.")
        parts.append(np.asarray(batch[0].to_pylist()))
    labels = np.concatenate(parts)
    kind = labels.dtype.kind
    if kind == "b" or (kind == "f" and (labels == labels.round()).all()):  # integers from a CSV file are read as floats
        return labels.astype(np.int64)
    if kind not in "iuU":
        raise ValueError(f"Column `{label}` of {source.name} must hold classes, as whole numbers or words.")
    return labels
