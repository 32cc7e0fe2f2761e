"""Files that users name: read whole, and refused where they have no end or are far larger than the text that is asked for."""

from __future__ import annotations

import errno
from pathlib import Path

LARGEST_BYTES = 64 * 2**20  # of a text: the profile of a run with thousands of actions has a hundredth of it


def read_text(path: str | Path, largest_bytes: int = LARGEST_BYTES) -> str:
    """Return the UTF-8 text of a regular file.

    Raises OSError, with the reason in `strerror`, where there is no such file, a path is malformed, a device or a pipe
    stands in its place, it is larger than `largest_bytes`, or it holds no UTF-8.
    """
    file = Path(path)
    try:
        if file.exists() and not file.is_file():
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        with file.open("rb") as stream:
            content = stream.read(largest_bytes + 1)
        if len(content) > largest_bytes:
            raise OSError(errno.EFBIG, f"it has more than {largest_bytes:,} bytes", str(path))
        return content.decode()
    except UnicodeDecodeError:
        raise OSError(errno.EINVAL, "it holds no UTF-8 text", str(path)) from None
    except ValueError as error:  # a zero byte in the path
        raise OSError(errno.EINVAL, str(error), str(path)) from None


def is_file(path: str | Path) -> bool:
    """Return whether a path names a regular file; one that is malformed or too long names none.

    >>> is_file("x" * 100_000)
    False
    """
    try:
        return Path(path).is_file()
    except OSError:
        return False
