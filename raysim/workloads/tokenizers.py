"""Tokenizers: bytes, and Hugging Face's tokenizers by folder or hub name."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from raysim.workloads.options import check_hub, import_hub, local_or_hub, reason_of

Tokens = np.ndarray[tuple[int], np.dtype[Any]]

# Usual names of the token between documents and of the padding token, for tokenizers whose files do not name them.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_PADS = ("<pad>", "[PAD]", "<|endoftext|>", "</s>")


def files_in(folder: Path) -> tuple[bool, tuple[Path, Path] | None]:
    """Return whether a folder holds a tokenizer's files, and GPT-2's two files if it holds these."""
    pairs = [(folder / "vocab.json", folder / "merges.txt"), (folder / "encoder.json", folder / "vocab.bpe")]
    pair = next((files for files in pairs if all(file.is_file() for file in files)), None)
    return any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json")), pair


class Tokenizer(Protocol):
    """Turns text into tokens."""

    num_tokens: int
    padding: int
    separator: int | None  # as in `DataShape`
    dtype: np.dtype[Any]  # of the tokens
    key: str  # differs between tokenizers that give different tokens

    def read(self, pieces: Iterable[bytes]) -> Tokens:
        """Return the concatenated tokens of the pieces, without separators."""

    def documents(self, texts: Iterable[str]) -> Iterator[Tokens]:
        """Yield the tokens of each text, ending with the document separator."""

    def sample(self, text: str, pair: str | None, length: int) -> list[int]:
        """Return `length` tokens of a text or a pair of texts, truncated or padded, with the tokenizer's special tokens."""


class Bytes:
    """Bytes as tokens; 0 is the padding, and a line break separates documents."""

    num_tokens = 256
    padding = 0
    separator: int | None = None
    dtype: np.dtype[Any] = np.dtype(np.uint8)
    key = "bytes"

    def read(self, pieces: Iterable[bytes]) -> Tokens:
        return np.frombuffer(b"".join(pieces), dtype=np.uint8)

    def documents(self, texts: Iterable[str]) -> Iterator[Tokens]:
        for text in texts:
            yield np.frombuffer(f"{text}\n".encode(), dtype=np.uint8)

    def sample(self, text: str, pair: str | None, length: int) -> list[int]:
        return list((text if pair is None else f"{text}\n{pair}").encode()[:length].ljust(length, b"\0"))


class HuggingFace:
    """A tokenizer as transformers' AutoTokenizer reads it from the hub or a folder; GPT-2's two files suffice."""

    def __init__(self, name: str) -> None:
        source = local_or_hub("data.tokenizer", name)
        library = import_hub("transformers")
        folder = Path(source)
        named, pair = files_in(folder)
        if folder.is_dir() and not named and pair is None:
            raise ValueError(f"`data.tokenizer` must be a folder that holds tokenizer.json, but got {name!r}.")
        if not folder.is_dir():
            check_hub(f"`data.tokenizer` = {name!r}", source, "tokenizer.json")
        try:
            if pair is not None and not named:
                backend = import_hub("tokenizers").ByteLevelBPETokenizer.from_file(*map(str, pair))
                self._tokenizer = library.PreTrainedTokenizerFast(tokenizer_object=backend._tokenizer)
            else:
                self._tokenizer = library.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        except Exception as error:  # the library raises bare exceptions
            if "trust_remote_code" in str(error):
                raise ValueError(
                    f"`data.tokenizer` {name!r} needs Python code of its own, which is not run. Write the file tokenizer.json into a "
                    "folder: `AutoTokenizer.from_pretrained(..., trust_remote_code=True).save_pretrained(...)`."
                ) from error
            raise ValueError(f"`data.tokenizer` {name!r} cannot be loaded: {reason_of(error)}.") from error
        vocabulary = self._tokenizer.get_vocab()
        end, padding = self._tokenizer.eos_token, self._tokenizer.pad_token
        self.num_tokens = max(vocabulary.values(), default=-1) + 1
        self._end = next((vocabulary[token] for token in (end, *_ENDS) if token in vocabulary), None)
        self.padding = next((vocabulary[token] for token in (padding, *_PADS) if token in vocabulary), 0)
        both = self._tokenizer("a", "b", verbose=False)
        numbers = both.get("token_type_ids", [])
        self.separator = both["input_ids"][numbers.index(1) - 1] if 1 in numbers[1:] else None
        self.dtype = np.min_scalar_type(max(self.num_tokens - 1, 0))
        self.key = _digest_of_files(self._tokenizer)

    def read(self, pieces: Iterable[bytes]) -> Tokens:
        try:
            parts = [self._encode(piece.decode()) for piece in pieces]
        except UnicodeDecodeError as error:
            raise ValueError(f"`data.path` must hold UTF-8 text to be tokenised, but it does not: {error}.") from error
        return np.concatenate(parts) if parts else np.empty(0, self.dtype)

    def documents(self, texts: Iterable[str]) -> Iterator[Tokens]:
        end = np.array([] if self._end is None else [self._end], self.dtype)
        for text in texts:
            yield np.concatenate([self._encode(text), end])

    def sample(self, text: str, pair: str | None, length: int) -> list[int]:
        ids: list[int] = self._tokenizer(text, pair, truncation=True, max_length=length, verbose=False)["input_ids"]
        if len(ids) > length:
            special = self._tokenizer.num_special_tokens_to_add(pair=pair is not None)
            raise ValueError(
                f"`data.length` must be more than the tokenizer's {special} special tokens, but got {length}."
            )
        filling = [self.padding] * (length - len(ids))
        return filling + ids if self._tokenizer.padding_side == "left" else ids + filling

    def _encode(self, text: str) -> Tokens:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False, verbose=False), self.dtype)


def make_tokenizer(name: str | None) -> Tokenizer:
    """Return the tokenizer of a folder or hub name, `Bytes` for None; raises ValueError if it cannot be loaded."""
    return Bytes() if name is None else HuggingFace(name)


def _digest_of_files(tokenizer: Any) -> str:
    """Return the SHA-256 of all files that transformers writes for a tokenizer."""
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory() as folder:
        for file in sorted(map(Path, tokenizer.save_pretrained(folder))):
            if file.is_file():
                digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
