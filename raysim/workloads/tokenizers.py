"""Tokenizers: bytes, and Hugging Face's tokenizers by folder or hub name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from raysim.workloads.options import check_hub, import_hub, local_or_hub

Tokens = np.ndarray[tuple[int], np.dtype[Any]]

# Usual names of the token between documents and of the padding token, for tokenizers whose files do not name them.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_PADS = ("<pad>", "[PAD]", "<|endoftext|>", "</s>")


class Tokenizer(Protocol):
    """Turns text into tokens."""

    num_tokens: int
    padding: int
    dtype: np.dtype[Any]  # of the tokens
    key: str  # differs between tokenizers that give different tokens

    def read(self, pieces: Iterable[bytes]) -> Tokens:
        """Return the concatenated tokens of the pieces, without separators."""

    def documents(self, texts: Iterable[str]) -> Iterator[Tokens]:
        """Yield the tokens of each text, ending with the document separator."""

    def sample(self, text: str, pair: str | None, length: int) -> list[int]:
        """Return at most `length` tokens of a text or a pair of texts, with the tokenizer's special tokens."""


class Bytes:
    """Bytes as tokens; 0 is the padding, and a line break separates documents."""

    num_tokens = 256
    padding = 0
    dtype: np.dtype[Any] = np.dtype(np.uint8)
    key = "bytes"

    def read(self, pieces: Iterable[bytes]) -> Tokens:
        return np.frombuffer(b"".join(pieces), dtype=np.uint8)

    def documents(self, texts: Iterable[str]) -> Iterator[Tokens]:
        for text in texts:
            yield np.frombuffer(f"{text}\n".encode(), dtype=np.uint8)

    def sample(self, text: str, pair: str | None, length: int) -> list[int]:
        return list((text if pair is None else f"{text}\n{pair}").encode()[:length])


class HuggingFace:
    """A tokenizer from the hub, or from a folder with tokenizer.json, GPT-2's two older files, or other transformers files."""

    def __init__(self, name: str) -> None:
        source = local_or_hub("data.tokenizer", name)
        library = import_hub("tokenizers")
        folder = Path(source)
        pairs = [(folder / "vocab.json", folder / "merges.txt"), (folder / "encoder.json", folder / "vocab.bpe")]
        pair = next((files for files in pairs if all(file.is_file() for file in files)), None)
        try:
            if (folder / "tokenizer.json").is_file():
                self._tokenizer = library.Tokenizer.from_file(str(folder / "tokenizer.json"))
            elif pair is not None:
                self._tokenizer = library.ByteLevelBPETokenizer.from_file(*map(str, pair))
            elif (folder / "tokenizer_config.json").is_file():
                library = import_hub("transformers")
                self._tokenizer = library.AutoTokenizer.from_pretrained(
                    source, trust_remote_code=False
                ).backend_tokenizer
            elif folder.is_dir():
                raise ValueError(f"`data.tokenizer` must be a folder that holds tokenizer.json, but got {name!r}.")
            else:
                check_hub(f"`data.tokenizer` = {name!r}", source, "tokenizer.json")
                self._tokenizer = library.Tokenizer.from_pretrained(source)
        except Exception as error:  # the library raises bare exceptions
            if "trust_remote_code" in str(error):
                raise ValueError(
                    f"`data.tokenizer` {name!r} needs Python code of its own, which is not run. Write the file tokenizer.json into a "
                    "folder: `AutoTokenizer.from_pretrained(..., trust_remote_code=True).save_pretrained(...)`."
                ) from error
            if isinstance(error, ValueError):
                raise
            raise ValueError(f"`data.tokenizer` {name!r} cannot be loaded: {str(error).rstrip('.')}.") from error
        vocabulary = self._tokenizer.get_vocab()
        self.num_tokens = max(vocabulary.values(), default=-1) + 1
        named = _special_tokens(folder / "tokenizer_config.json")
        self._end = next((vocabulary[token] for token in (named.get("eos_token"), *_ENDS) if token in vocabulary), None)
        self.padding = next((vocabulary[token] for token in (named.get("pad_token"), *_PADS) if token in vocabulary), 0)
        self.key = hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()
        self.dtype = np.min_scalar_type(max(self.num_tokens - 1, 0))

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
        self._tokenizer.enable_truncation(length)
        ids: list[int] = self._tokenizer.encode(text, pair).ids
        self._tokenizer.no_truncation()
        return ids

    def _encode(self, text: str) -> Tokens:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, self.dtype)


def make_tokenizer(name: str | None) -> Tokenizer:
    """Return the tokenizer of a folder or hub name, `Bytes` for None; raises ValueError if it cannot be loaded."""
    return Bytes() if name is None else HuggingFace(name)


def _special_tokens(file: Path) -> dict[str, str]:
    """Return the special tokens named in a tokenizer_config.json."""
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    tokens = {name: entries.get(name) for name in ("eos_token", "pad_token")}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
