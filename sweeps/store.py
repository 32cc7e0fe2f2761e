"""The place of a study: a folder that all machines see, or one in a bucket that each machine copies to and from."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pyarrow import fs

from raysim.config import ConfigError
from raysim.file_lock import NAME as LOCK
from raysim.file_lock import FolderLock
from raysim.places import ListedPath, Place, PlaceError, in_bucket, local_path, open_system
from raysim.training.checkpoint import checkpoints

MAKES_FOLDERS = ("hdfs",)  # file systems with folders of their own; buckets have keys alone


class Store:
    """A study's folder by path or URI (`s3://`, `gs://`, `abfs://`): `local` is where to write.

    For a URI, `local` is a scratch folder of this machine, and files that were sent are in the bucket too.
    """

    def __init__(self, out: str | Path) -> None:
        self.remote = in_bucket(out)
        self.out = str(out) if self.remote else str(local_path(out))
        self._sent: dict[str, list[int]] = {}  # the step of the last checkpoint in the bucket, by run
        self._files_sent: dict[str, tuple[int, int]] = {}  # when a file that was sent had been written, and its bytes
        if not self.remote:
            self.local = Path(self.out)
            return
        self._system, self._root = fs.FileSystem.from_uri(_with_whole_files(self.out))
        self._root = self._root.rstrip("/")
        digest = hashlib.sha256(self.out.encode()).hexdigest()[:12]
        self.local = Path(tempfile.gettempdir()) / "raysim-sweeps" / digest

    @classmethod
    def checked(cls, out: str | Path) -> Store:
        """Return the store of a bucket that answers; raises ConfigError, within seconds, where it does not."""
        if in_bucket(out):
            try:
                open_system(str(out))
            except PlaceError as error:
                raise ConfigError(f"`out`: {error}") from None
        return cls(out)

    def place(self) -> Place:
        """Return the study's folder to read runs in: that of the bucket, to which every node sends its runs.

        Raises PlaceError if the bucket cannot be listed.
        """
        if not self.remote:
            return self.local
        return ListedPath.listed(f"{self.out.partition('://')[0]}://", self._system, self._root)

    def fetch(self, name: str) -> Path:
        """Return the local folder of a run, as the bucket has it: another machine may have gone on with it since.

        A run that the bucket lacks is removed here: it is of an earlier study with this URI.
        """
        folder = self.local / name
        if self.remote:
            shutil.rmtree(folder, ignore_errors=True)
            for key in self._files(name):
                file = self.local / key
                file.parent.mkdir(parents=True, exist_ok=True)
                fs.copy_files(f"{self._root}/{key}", str(file), source_filesystem=self._system)
            for step in folder.glob("checkpoints/step-*"):
                if not (step / "manifest.json").is_file():  # sent last: the copy was broken off
                    shutil.rmtree(step)
        return folder

    def send_run(self, name: str) -> None:
        """Copy a run that goes on, where it has a checkpoint that the bucket lacks."""
        if self.remote:
            newest = [one.step for one in checkpoints(self.local / name / "checkpoints")][-1:]
            if newest != self._sent.get(name, []):
                self.send(name)
                self._sent[name] = newest

    def fetch_file(self, name: str) -> bool:
        """Download a file of the bucket, replacing the local one; return whether the bucket has it."""
        if not self.remote or self._system.get_file_info(f"{self._root}/{name}").type != fs.FileType.File:
            return (self.local / name).is_file()
        file = self.local / name
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_name(f".{file.name}.{os.getpid()}")
        fs.copy_files(f"{self._root}/{name}", str(draft), source_filesystem=self._system)
        draft.replace(file)  # whole: another process may read it
        return True

    def send(self, name: str) -> None:
        """Copy a file, or the files in a folder, to the bucket; files that are gone here go there."""
        if not self.remote:
            return
        source = self.local / name
        if source.is_file():
            self._send_file(name)
            return
        here = {
            str(path.relative_to(self.local))
            for path in source.rglob("*")
            if path.is_file() and not path.name.startswith(".")
        }
        for file in sorted(here, key=lambda file: (file.endswith("run.parquet"), file.endswith("manifest.json"), file)):
            self._send_file(file)
        self._remove(name, [file for file in self._files(name) if file not in here], here)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the local folder, since one sweep at a time writes it; remove it at the end if it is empty.

        Raises ConfigError if another process holds it, or it cannot be written.
        """
        lock = FolderLock(self.local)
        try:
            lock.acquire()
        except BlockingIOError:
            raise ConfigError(f"Another process is sweeping in {self.local}.") from None
        except OSError as error:
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
        """Remove everything in the local folder but its lock."""
        for path in self.local.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != LOCK:
                path.unlink()

    def is_empty(self) -> bool:
        """Return whether nothing is there yet."""
        if self.remote:
            return not self._files("")
        return not self.local.is_dir() or not any(self.local.iterdir())

    def is_unbegun(self) -> bool:
        """Return whether the folder holds no more than the first moments of a sweep that was killed in them."""
        if self.remote or not self.local.is_dir():
            return False
        found = {path.name for path in self.local.iterdir()}
        drafts = {name for name in found if name.startswith(".study.toml.")}
        return LOCK in found and found - drafts <= {LOCK, "space.py"}

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

    def _remove(self, name: str, gone: list[str], kept: set[str]) -> None:
        """Remove files, whole folders at once where nothing in them is kept.

        pyarrow writes an empty key for the folder that it has removed something from, so that it goes on being a folder:
        the highest folder without files has to go, or its key would stay and be a folder wherever it is copied.
        """
        tops = set()
        for file in gone:
            top = file
            while (parent := top.rpartition("/")[0]) != name and not any(one.startswith(f"{parent}/") for one in kept):
                top = parent
            tops.add(top)
        for file in gone:
            self._files_sent.pop(file, None)
        for top in sorted(tops):
            if top in gone:
                self._system.delete_file(f"{self._root}/{top}")
            else:
                self._system.delete_dir(f"{self._root}/{top}")

    def _files(self, name: str) -> list[str]:
        """Return the files of the bucket in a folder, by their names in the study's."""
        top = f"{self._root}/{name}".rstrip("/")
        infos = self._system.get_file_info(fs.FileSelector(top, recursive=True, allow_not_found=True))
        return [info.path.removeprefix(f"{self._root}/") for info in infos if info.type == fs.FileType.File]


def _with_whole_files(uri: str) -> str:
    """Return a URI by which pyarrow sends small files to S3 in one request instead of three."""
    if not uri.startswith("s3://") or "allow_delayed_open=" in uri:
        return uri
    return f"{uri}{'&' if '?' in uri else '?'}allow_delayed_open=true"
