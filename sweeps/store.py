"""The folder of a study: on a file system that all machines see, or in a bucket that each machine copies to and from."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import repeat
from pathlib import Path

from pyarrow import fs

from raysim.config import ConfigError
from raysim.storage.files import LOCK, FolderLock, check_inside, os_sentence, private_folder, sync_folder, write_whole
from raysim.storage.places import Place, PlaceError, check_answers, in_bucket, list_bucket, local_path
from raysim.training.checkpoint import checkpoints

FIRST, DRAFTS = {LOCK, "space.py", "profile.json"}, (".study.toml.", ".decision.json.")
FOLDERS = ("trials", "confirm", "tensorboard", "tune", "screen", "race")  # in a study's folder, or a decision's
MAKES_FOLDERS = ("hdfs",)  # file systems with real folders; buckets have only keys
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE}


class Store:
    """A study's folder by path or URI (`s3://`, `gs://`, `abfs://`), written under `local`.

    For a URI, `local` is a scratch folder on this machine, copied to the bucket.
    """

    def __init__(self, out: str | Path) -> None:
        self.remote = in_bucket(out)
        self.out = str(out) if self.remote else str(local_path(out))
        self._sent: dict[str, list[int]] = {}  # the step of the last checkpoint in the bucket, by run
        self._files_sent: dict[str, tuple[int, int]] = {}  # modification times and sizes of sent files
        if not self.remote:
            self.local = Path(self.out)
            return
        self._system, self._root = fs.FileSystem.from_uri(_with_whole_files(self.out))
        self._root = self._root.rstrip("/")
        digest = hashlib.sha256(self.out.encode()).hexdigest()[:12]
        self.local = private_folder(f"sweeps-{digest}")

    @classmethod
    def checked(cls, out: str | Path) -> Store:
        """Return the store; raises ConfigError within seconds if its bucket does not answer."""
        if in_bucket(out):
            try:
                check_answers(str(out))
            except PlaceError as error:
                raise ConfigError(f"`out`: {error}") from None
        return cls(out)

    def place(self) -> Place:
        """Return the folder to read runs from: the bucket's, to which every node sends its runs.

        Raises PlaceError if the bucket cannot be listed.
        """
        if not self.remote:
            return self.local
        return list_bucket(f"{self.out.partition('://')[0]}://", self._system, self._root)

    def fetch(self, name: str) -> Path:
        """Return the local folder of a run, copied from the bucket: another machine may have continued it.

        A run that the bucket lacks is removed here: it belongs to an earlier study with this URI.
        """
        folder = self.inside(name)
        if self.remote:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            with suppress(FileNotFoundError):  # the bucket has no such run
                fs.copy_files(f"{self._root}/{name}", str(folder), source_filesystem=self._system)
            for step in folder.glob("checkpoints/step-*"):
                if not (step / "manifest.json").is_file():  # sent last: without it the copy is incomplete
                    shutil.rmtree(step)
        return folder

    def inside(self, name: str) -> Path:
        """Return the local path of a folder to write; raises OSError if a link would lead out of the study's folder."""
        check_inside(self.local / name, self.local)
        return self.local / name

    def send_run(self, name: str) -> None:
        """Copy a running run to the bucket if it has a new checkpoint."""
        if self.remote:
            newest = [checkpoint.step for checkpoint in checkpoints(self.local / name / "checkpoints")][-1:]
            if newest != self._sent.get(name, []):
                self.send(name)
                self._sent[name] = newest

    def drop_checkpoints(self, name: str) -> None:
        """Remove all checkpoints of a run, here and in the bucket."""
        shutil.rmtree(self.inside(name) / "checkpoints", ignore_errors=True)
        if self.remote and self._files(f"{name}/checkpoints"):
            self._system.delete_dir(f"{self._root}/{name}/checkpoints")

    def fetch_file(self, name: str) -> bool:
        """Download a file from the bucket, replacing the local one; return whether the bucket has it."""
        file = self.local / name
        if self.remote:
            with suppress(FileNotFoundError), self._system.open_input_stream(f"{self._root}/{name}") as stream:
                file.parent.mkdir(parents=True, exist_ok=True)
                write_whole(file, stream.read())  # atomic: another process may read it
        return file.is_file()

    def send(self, name: str) -> None:
        """Copy a file, or the files in a folder, to the bucket; files removed here are removed there."""
        if not self.remote:
            return
        source = self.local / name
        if source.is_file():
            self._send_file(name)
            return
        paths = [path for path in source.rglob("*") if path.is_file() and not path.name.startswith(".")]
        for path in sorted(paths, key=lambda path: (path.name == "run.parquet", path.name == "manifest.json", path)):
            self._send_file(str(path.relative_to(self.local)))
        held = self._files(name)
        # whole folders, since pyarrow keeps a key for a folder whose files are removed one by one
        for gone in sorted({part for part in map(self._removed, held, repeat(name)) if part}):
            (self._system.delete_file if gone in held else self._system.delete_dir)(f"{self._root}/{gone}")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the local folder for one sweep at a time; remove it at the end if it is empty.

        Raises ConfigError if another process holds it, or it cannot be written.
        """
        lock = FolderLock(self.local)
        try:
            lock.acquire()
            sync_folder(self.local)  # so that the first files are never there without it
            for name in FOLDERS:
                self.inside(name)
        except BlockingIOError:
            raise ConfigError(f"Another process is sweeping in {self.local}.") from None
        except OSError as error:
            lock.release()
            raise ConfigError(
                f"The study's folder {self.local} cannot be written: {error.strerror or error}."
            ) from None
        try:
            yield
        finally:
            lock.release()
            with suppress(OSError):  # it holds files
                self.local.rmdir()

    def clear(self) -> None:
        """Remove everything in the local folder except its lock."""
        for path in self.local.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != LOCK:
                path.unlink()

    def is_empty(self) -> bool:
        """Return whether there are no files yet."""
        if self.remote:
            return not self._files("")
        return not self.local.is_dir() or not any(self.local.iterdir())

    def is_unbegun(self) -> bool:
        """Return whether the folder holds only the first files of a sweep or decision killed at its start."""
        if self.remote or not self.local.is_dir():
            return False
        names = {path.name for path in self.local.iterdir()}
        return LOCK in names and {name for name in names if not name.startswith(DRAFTS)} <= FIRST

    def _send_file(self, name: str) -> None:
        stat = (self.local / name).stat()
        version = (stat.st_mtime_ns, stat.st_size)
        if self._files_sent.get(name) == version:
            return
        target = f"{self._root}/{name}"
        if self._system.type_name in MAKES_FOLDERS:
            self._system.create_dir(target.rpartition("/")[0], recursive=True)
        fs.copy_files(str(self.local / name), target, destination_filesystem=self._system)
        self._files_sent[name] = version

    def _removed(self, file: str, name: str) -> str | None:
        """Return the outermost folder below `name` around a file that is no longer here, or the file; None if it is here."""
        parts = file.removeprefix(f"{name}/").split("/")
        around = ("/".join((name, *parts[: i + 1])) for i in range(len(parts)))
        return next((part for part in around if not (self.local / part).exists()), None)

    def _files(self, name: str) -> list[str]:
        """Return the files in a folder of the bucket, by their names in the study's."""
        top = f"{self._root}/{name}".rstrip("/")
        infos = self._system.get_file_info(fs.FileSelector(top, recursive=True, allow_not_found=True))
        return [info.path.removeprefix(f"{self._root}/") for info in infos if info.type == fs.FileType.File]


def _with_whole_files(uri: str) -> str:
    """Return a URI by which pyarrow sends small files to S3 in one request instead of three."""
    if not uri.startswith("s3://") or "allow_delayed_open=" in uri:
        return uri
    return f"{uri}{'&' if '?' in uri else '?'}allow_delayed_open=true"


def find_disk_error(error: BaseException, folder: Path) -> str | None:
    """Return a sentence on the disk error that caused `error`; None if it has another cause.

    Such an error ends a sweep, since it would hit every other trial: the disk is full or read-only, or the study's
    `folder` is missing or not writable.
    """
    writable = folder.is_dir() and os.access(folder, os.W_OK)
    for cause in _causes(error):
        if isinstance(cause, OSError) and (cause.errno in DISK_ERRORS or not writable):
            return os_sentence(cause)
    return None


def find_database_error(error: BaseException, database: Path) -> str | None:
    """Return a sentence on the sqlite error that caused `error`; None if it has another cause."""
    cause = next((cause for cause in _causes(error) if isinstance(cause, sqlite3.Error)), None)
    return None if cause is None else os_sentence(OSError(None, str(cause), str(database)))


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__
