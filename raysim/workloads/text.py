"""Data sets of text: Python's own help pages, any text file, WikiText-2; by bytes or by the tokens of GPT-2."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from raysim.notation import check_integer
from raysim.workloads.options import check_hub, check_path, import_hub, local_or_hub
from raysim.workloads.splits import Data, DataShape, TextSplit, limit

WIKITEXT2_HUB = ("Salesforce/wikitext", "wikitext-2-v1")
TEST_SHARE = 10  # one in so many tokens is the test split of a text that has none
Tokens = np.ndarray[tuple[int], np.dtype[Any]]


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
    train_file: str | None = None,
    test_file: str | None = None,
    train_samples: int | None = None,
    test_samples: int | None = None,
) -> Data:
    """Return a text file (the last tenth is the test split), or a folder with `train_file` and `test_file`.

    These are train.txt and test.txt unless they are named. Tokens are bytes, or those of `tokenizer`, a folder with a
    tokenizer's files or a hub name.
    """
    length = check_integer("data.length", length, 1)
    found = check_path("data.path", path)
    reader = _Tokenizer(tokenizer) if tokenizer is not None else _Bytes()
    if found.is_file():
        for field, name in (("data.train_file", train_file), ("data.test_file", test_file)):
            if name is not None:
                raise ValueError(f"`{field}` has a meaning only where `data.path` is a folder, but {path!r} is a file.")
        train, test = _last_tenth(reader.read([found.read_bytes()]))
    else:
        files = _split_files(found, train_file, test_file)
        train, test = (reader.read([file.read_bytes()]) for file in files)
    return _data(train, test, reader.num_tokens, length, train_samples, test_samples)


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
    reader = _Tokenizer(tokenizer)
    if files is not None:
        lines = [file.read_bytes().splitlines(keepends=True) for file in files]
    else:
        for field, name in (("data.train_file", train_file), ("data.test_file", test_file)):
            if name is not None:
                raise ValueError(f"`{field}` has a meaning only with `data.path`.")
        lines = _read_hub()
    train, test = (reader.read(line for line in part if line.strip()) for part in lines)
    return _data(train, test, reader.num_tokens, length, train_samples, test_samples)


class _Bytes:
    num_tokens = 256

    def read(self, pieces: Iterable[bytes]) -> Tokens:
        return np.frombuffer(b"".join(pieces), dtype=np.uint8)


class _Tokenizer:
    """A byte-pair tokenizer, from a folder with tokenizer.json or GPT-2's two older files, or from the hub."""

    def __init__(self, name: str) -> None:
        place = local_or_hub("data.tokenizer", name)
        library = import_hub("tokenizers")
        folder = Path(place)
        pairs = [(folder / "vocab.json", folder / "merges.txt"), (folder / "encoder.json", folder / "vocab.bpe")]
        pair = next((files for files in pairs if all(file.is_file() for file in files)), None)
        try:
            if (folder / "tokenizer.json").is_file():
                self._tokenizer = library.Tokenizer.from_file(str(folder / "tokenizer.json"))
            elif pair is not None:
                self._tokenizer = library.ByteLevelBPETokenizer.from_file(*map(str, pair))
            elif folder.is_dir():
                raise ValueError(f"`data.tokenizer` must be a folder that holds tokenizer.json, but got {name!r}.")
            else:
                check_hub(f"`data.tokenizer` = {name!r}", place, "tokenizer.json")
                self._tokenizer = library.Tokenizer.from_pretrained(place)
        except ValueError:
            raise
        except Exception as error:  # the library raises bare exceptions
            raise ValueError(f"`data.tokenizer` {name!r} cannot be loaded: {str(error).rstrip('.')}.") from error
        self.num_tokens = int(self._tokenizer.get_vocab_size())

    def read(self, pieces: Iterable[bytes]) -> Tokens:
        dtype = np.min_scalar_type(self.num_tokens - 1)
        try:
            parts = [
                np.array(self._tokenizer.encode(piece.decode(), add_special_tokens=False).ids, dtype)
                for piece in pieces
            ]
        except UnicodeDecodeError as error:
            raise ValueError(f"`data.path` must hold UTF-8 text to be tokenised, but it does not: {error}.") from error
        return np.concatenate(parts) if parts else np.empty(0, dtype)


def _split_files(folder: Path, train_file: str | None, test_file: str | None) -> tuple[Path, Path]:
    files = []
    for field, name in (("data.train_file", train_file or "train.txt"), ("data.test_file", test_file or "test.txt")):
        file = folder / name
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


def _read_hub() -> list[list[bytes]]:
    datasets = import_hub("datasets")
    try:
        loaded = datasets.load_dataset(*WIKITEXT2_HUB)
    except Exception as error:
        raise ValueError(
            f"{WIKITEXT2_HUB[0]} cannot be loaded from the hub ({type(error).__name__}). "
            "Give local files by `data.path`."
        ) from error
    return [[row.encode() for row in loaded[split]["text"]] for split in ("train", "test")]


def _last_tenth(tokens: Tokens) -> tuple[Tokens, Tokens]:
    cut = len(tokens) - len(tokens) // TEST_SHARE
    return tokens[:cut], tokens[cut:]


def _data(
    train: Tokens, test: Tokens, num_tokens: int, length: int, train_samples: int | None, test_samples: int | None
) -> Data:
    splits = []
    for name, tokens, wanted in (("train", train, train_samples), ("test", test, test_samples)):
        available = (len(tokens) - 1) // length
        if available < 1:
            raise ValueError(
                f"`data.length` must be less than the number of tokens to {name} on ({len(tokens)}), but got {length}."
            )
        splits.append(TextSplit(tokens[: limit(f"data.{name}_samples", wanted, available) * length + 1], length))
    return Data(splits[0], splits[1], DataShape((length,), "int64", num_tokens))
