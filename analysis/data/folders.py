"""Folders of runs and studies, at any depth, on this machine, in buckets, or in packs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from raysim.analysis.data import AnalysisError
from raysim.records import RecordsError
from raysim.records.packs import open_pack
from raysim.storage.places import ListedPath, Place, walk

CONFIRMATION = "confirm"
"""Name of the folder with runs that confirm a choice of other runs, in a study or any folder of runs."""


class Contents(NamedTuple):
    """Runs and studies in folders: their folders by name, which is relative to the given folder."""

    runs: dict[str, Place]
    studies: dict[str, Place]
    study_of: dict[str, str]
    """The study of a run, by names."""
    problems: list[str]
    """A sentence for each unreadable file that may be of a pack."""


def find(folders: Iterable[Place]) -> Contents:
    """Return the runs and studies in folders, each once, in the order of their names.

    A folder with a `run.parquet` is a run, one with a `study.toml` is a study: its runs lie in its folder `trials`, and the
    study that confirms its choice in its folder `confirm`. A pack stands for the packed folder. Hidden folders are
    skipped. Raises AnalysisError if a folder does not exist.
    """
    roots = list(folders)
    runs: dict[Place, str] = {}
    studies: dict[Place, str] = {}
    study_of: dict[str, str] = {}
    problems: list[str] = []
    for root in roots:
        if not root.is_dir():
            raise AnalysisError(f"There is no folder {root}.")
        for folder, study, is_run in _walk(root, problems):
            name = _name(folder, root, alone=len(roots) == 1)
            path = folder.resolve()
            if path in runs or path in studies:
                continue
            if is_run:
                runs[path] = name
                if study is not None:
                    study_of[name] = _name(study, root, alone=len(roots) == 1)
            else:
                studies[path] = name
    return Contents(_by_name(runs), _by_name(studies), study_of, list(dict.fromkeys(problems)))


def is_confirmation(run: Place) -> bool:
    """Return whether a run confirms a choice, by its folder.

    >>> from pathlib import Path
    >>> is_confirmation(Path("study/confirm/trials/1-s5")), is_confirmation(Path("study/trials/1-s5"))
    (True, False)
    """
    parents = str(run.resolve()).split("/")[-3:-1]
    return parents[-1:] == [CONFIRMATION] or parents == [CONFIRMATION, "trials"]


def _walk(root: Place, problems: list[str], around: Place | None = None) -> Iterator[tuple[Place, Place | None, bool]]:
    """Yield the folders of runs and studies, each with the study around it, and whether it is a run's.

    `problems` takes the sentences on unreadable packs; `around` is the study around the root.
    """
    inside: dict[Place, Place] = {} if around is None else {root: around}
    for folder, folders, files in walk(root):
        study = inside.get(folder)
        if "run.parquet" in files:
            yield folder, study, True
            folders.clear()
            continue
        try:
            pack = open_pack(folder)
        except RecordsError as error:
            problems.append(str(error))
            pack = None
        if pack is not None:
            yield from _walk(pack, problems, study)
            folders.clear()
            continue
        if "study.toml" in files:
            yield folder, None, False
            study = folder
            folders[:] = [name for name in folders if name in ("trials", CONFIRMATION)]
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if study is not None:
            inside |= dict.fromkeys((folder / name for name in folders), study)


def _name(folder: Place, root: Place, *, alone: bool) -> str:
    """Return the name of a folder: its path from the root, or its own name if it is the root; of several roots, its whole path."""
    inside = str(folder.relative_to(str(root.resolve() if isinstance(folder, ListedPath) else root)))
    if inside in ("", "."):
        return root.resolve().name or str(root) if alone else str(root)
    return inside if alone else str(root / inside)


def _by_name(folders: dict[Place, str]) -> dict[str, Place]:
    return dict(sorted((name, folder) for folder, name in folders.items()))
