"""The encoding of a text file, by its byte order mark."""

from __future__ import annotations

import codecs
from pathlib import Path

_MARKS = (  # UTF-32's begins with UTF-16's
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (codecs.BOM_UTF8, "utf-8-sig"),
)
_LOOKED_AT = 4096  # bytes


def encoding_of(file: Path) -> str | None:
    """Return the encoding named by a file's byte order mark, None without a mark.

    Raises ValueError naming a file without a mark whose every second byte is zero, as in UTF-16.
    """
    with file.open("rb") as stream:
        start = stream.read(_LOOKED_AT)
    encoding = next((name for mark, name in _MARKS if start.startswith(mark)), None)
    even, odd = start[::2], start[1::2]
    if encoding is None and len(start) > 1 and sorted((any(even), any(odd))) == [False, True]:
        raise ValueError(
            f"`data.path`: {file} holds a zero in every second byte, like UTF-16 without a byte order mark. Save it as UTF-8."
        )
    return encoding


def read_marked(file: Path) -> bytes:
    """Return a text file in UTF-8, without a byte order mark; the bytes themselves if the file has none.

    Raises ValueError naming a file that does not hold the encoding of its mark.
    """
    encoding = encoding_of(file)
    content = file.read_bytes()
    if encoding is None:
        return content
    try:
        return content.decode(encoding).encode()
    except UnicodeError as error:
        raise ValueError(f"`data.path`: {file} begins with the mark of {encoding}, but is not: {error}.") from None
