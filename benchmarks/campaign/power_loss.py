"""A loss of power at each operation of a process on files: the folders that a disk may then hold.

After ALICE (Pillai et al., OSDI 2014): the content of a file is safe once the file is synced, its name once its folder is.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, cast

ROOT = 0
DATABASE = "optuna.db"  # sqlite syncs its files itself, unseen; every state of it is tried as if it were safe

Name = tuple[int, str]  # the folder, and a name in it
Change = dict[Name, int | None]  # of an operation: what each name stands for after it; a rename changes two


class Held(NamedTuple):
    """A folder after a loss of power: the paths of its files by the digest of their content, and of its folders by None."""

    tree: dict[str, str | None]
    moment: str
    """What was done last, and what was lost."""
    over: bool
    """True if the process had ended."""


class DiskLog:
    """Notes what a process does in a folder, and writes each content once into `contents`; `note` is for `file_calls.Calls`."""

    def __init__(self, home: Path, contents: Path) -> None:
        self._home, self._contents = home, contents
        contents.mkdir(parents=True, exist_ok=True)
        self._ids: dict[int, int] = {home.stat().st_ino: ROOT}
        self._made = ROOT
        self._folders = {ROOT}
        self._names: dict[Name, int] = {}
        self._now: dict[int, str | None] = {}  # the digest of each file, None for folders
        self._safe_names: dict[Name, int] = {}
        self._safe: dict[int, str] = {}
        self._pending: list[tuple[str, Change]] = []
        self._began, self._synced = "the start", cast("int | None", None)
        self.held: dict[str, Held] = {}
        self._scan()  # what is there is safe
        self._safe_names = dict(self._names)
        self._safe = {key: digest for key, digest in self._now.items() if digest is not None}

    def note(self, count: int, event: str, target: object) -> None:
        """See what the operation before this one has changed."""
        if event in ("stat", "read", "os.listdir", "os.scandir", "fcntl.flock"):
            return
        self._look(f"{count}: {event}")
        self._synced = self._ids.get(os.fstat(target).st_ino) if isinstance(target, int) and event == "fsync" else None
        self._began = f"{count}: {event} {target}"

    def end(self) -> None:
        """See what the last operation has changed: the process is over."""
        self._look("the end", over=True)

    def _look(self, moment: str, *, over: bool = False) -> None:
        before = dict(self._names)
        self._scan()
        change: Change = {name: self._names.get(name) for name in before.keys() | self._names.keys()}
        change = {name: key for name, key in change.items() if before.get(name) != key}
        if change:
            self._pending.append((self._began, change))
        if self._synced is not None and self._now.get(self._synced) is None:  # a folder
            for _, safe in [one for one in self._pending if any(home == self._synced for home, _ in one[1])]:
                _apply(self._safe_names, safe)
            self._pending = [one for one in self._pending if all(home != self._synced for home, _ in one[1])]
        elif self._synced is not None:
            self._safe[self._synced] = self._now[self._synced] or ""
        self._hold(moment, over)

    def _scan(self) -> None:
        """Read the folder."""
        self._names, self._now, ids = {}, {ROOT: None}, {self._home.stat().st_ino: ROOT}
        for folder, folders, files in os.walk(self._home):
            home = ids[Path(folder).lstat().st_ino]
            for name in [*folders, *files]:
                path = Path(folder, name)
                found = path.lstat()
                if (key := self._ids.get(found.st_ino)) is None:
                    key = self._made = self._made + 1
                ids[found.st_ino] = self._names[home, name] = key
                if stat.S_ISDIR(found.st_mode):
                    self._folders.add(key)
                self._now[key] = None if key in self._folders else self._kept(path.read_bytes())
                if name.startswith(DATABASE):
                    self._safe[key] = self._now[key] or ""
        self._ids = ids

    def _kept(self, content: bytes) -> str:
        digest = hashlib.sha256(content).hexdigest()
        if not (file := self._contents / digest).exists():
            file.write_bytes(content)
        return digest

    def _hold(self, moment: str, over: bool) -> None:
        changes = [change for _, change in self._pending]
        self._add(self._names, self._now, f"{moment}, nothing is lost", over)
        self._add(self._names, self._safe, f"{moment}, contents are lost", over)
        self._add(self._safe_names, self._safe, f"{moment}, all that was not synced is lost", over)
        for place, (what, change) in enumerate(self._pending):
            rest = changes[:place] + changes[place + 1 :]
            self._add(_after(self._safe_names, rest), self._safe, f"{moment}, without {what}", over)
            self._add(_after(self._safe_names, [change]), self._safe, f"{moment}, with {what} alone", over)

    def _add(self, names: Mapping[Name, int], contents: Mapping[int, str | None], moment: str, over: bool) -> None:
        children: dict[int, list[tuple[str, int]]] = {}
        for (home, name), key in names.items():
            children.setdefault(home, []).append((name, key))
        tree = dict(sorted(self._below("", ROOT, children, contents)))
        digest = hashlib.sha256(json.dumps([tree, over]).encode()).hexdigest()
        self.held.setdefault(digest, Held(tree, moment, over))

    def _below(
        self, path: str, home: int, children: Mapping[int, list[tuple[str, int]]], contents: Mapping[int, str | None]
    ) -> Iterator[tuple[str, str | None]]:
        for name, key in children.get(home, ()):
            yield f"{path}{name}", None if key in self._folders else contents.get(key) or self._kept(b"")
            if key in self._folders:
                yield from self._below(f"{path}{name}/", key, children, contents)


def _after(names: Mapping[Name, int], changes: Iterable[Change]) -> dict[Name, int]:
    changed = dict(names)
    for change in changes:
        _apply(changed, change)
    return changed


def _apply(names: dict[Name, int], change: Change) -> None:
    for name, key in change.items():
        if key is None:
            names.pop(name, None)
        else:
            names[name] = key


def lay_out(tree: Mapping[str, str | None], contents: Path, home: Path) -> None:
    """Make the folder that was held."""
    home.mkdir()
    for path, digest in tree.items():
        if digest is None:
            (home / path).mkdir()
        else:
            shutil.copyfile(contents / digest, home / path)
