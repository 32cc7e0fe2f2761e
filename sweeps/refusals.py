"""Refusals of the operating system, such as a full disk: they end a sweep, where an error of a trial ends the trial alone."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from raysim.files import os_sentence

OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE}


def find_refusal(error: BaseException, folder: Path) -> str | None:
    """Return the sentence of a refusal behind `error`, None where there is none.

    An error counts as a refusal if any other trial would meet it: the disk is full or read-only, or the study's `folder` is
    gone or may not be written.
    """
    writable = folder.is_dir() and os.access(folder, os.W_OK)
    for behind in _chain(error):
        if isinstance(behind, OSError) and (behind.errno in OF_THE_DISK or not writable):
            return os_sentence(behind)
    return None


def find_database_error(error: BaseException, database: Path) -> str | None:
    """Return the sentence of an error of sqlite behind `error`, None where there is none."""
    found = next((behind for behind in _chain(error) if isinstance(behind, sqlite3.Error)), None)
    return None if found is None else os_sentence(OSError(None, str(found), str(database)))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, then its causes and contexts in turn."""
    behind: BaseException | None = error
    while behind is not None:
        yield behind
        behind = behind.__cause__ or behind.__context__
