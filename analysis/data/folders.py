"""Folders of runs and studies, at any depth, on this machine, in buckets, or in packs; and the file of a study."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from raysim.analysis.data import AnalysisError
from raysim.network.presets import parse_network
from raysim.network.transport import TRANSPORTS
from raysim.notation import check_choice
from raysim.quality import MEASURES, Measure
from raysim.records import RecordsError
from raysim.records.packs import open_pack
from raysim.storage.places import Place, inside, read_place, walk
from raysim.storage.texts import LARGEST_TOML, parse_toml

PROFILE = "profile.json"
"""Name of the file with the profile of a study."""
SCREEN = "screen.parquet"
"""Name of the file that the folder of a screen has."""
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


def find_runs(folders: Iterable[Place]) -> Contents:
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
            path = folder.resolve()
            name = _name(path, root, alone=len(roots) == 1)
            if path in runs or path in studies:
                continue
            if is_run:
                runs[path] = name
                if study is not None:
                    study_of[name] = _name(study, root, alone=len(roots) == 1)
            else:
                studies[path] = name
    runs_by_name, studies_by_name = (
        dict(sorted((name, folder) for folder, name in names.items())) for names in (runs, studies)
    )
    return Contents(runs_by_name, studies_by_name, study_of, list(dict.fromkeys(problems)))


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
    study_around: dict[Place, Place] = {} if around is None else {root: around}
    for folder, folders, files in walk(root):
        study = study_around.get(folder)
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
            study_around |= dict.fromkeys((folder / name for name in folders), study)


def _name(folder: Place, root: Place, *, alone: bool) -> str:
    """Return the name of a folder: its path from the root, or its own name if it is the root; with several roots, its whole path."""
    name = inside(folder, root)
    if not name:
        return root.resolve().name or str(root) if alone else str(root)
    return name if alone else str(root / name)


USUAL_TRANSPORT = "ray"  # if neither the caller nor a study names one

TITLES = {"ray": "Ray", "nccl": "NCCL", "gloo": "Gloo", "bare": "bare wires"}


def over(transport: str) -> str:
    """Describe the transport of a price.

    >>> over("nccl")
    'over NCCL'
    """
    return f"over {TITLES.get(transport, transport)}"


def network_and_transport(objective: str) -> tuple[str, str]:
    """Return the network and the transport in the name of a price, as texts.

    >>> network_and_transport("step_s@100mbps+20ms/nccl"), network_and_transport("step_s@nets/a.toml")
    (('100mbps+20ms', 'nccl'), ('nets/a.toml', 'ray'))
    """
    where = objective.partition("@")[2]
    network, _, transport = where.rpartition("/")
    return (network, transport) if transport in TRANSPORTS else (where, USUAL_TRANSPORT)


MAXIMIZED = (
    *("compression_factor", "factor", "speedup", "fidelity", "gain", "utilisation", "throughput"),
    *("break_even", "chance"),  # the bandwidth below which a setting is faster, and the chance that it is safe
)


def natural_direction(name: str, measures: Mapping[str, Measure] | None = None) -> str:
    """Return whether a quantity is minimised or maximised, by its name; `measures` adds your own measures of the runs.

    Raises AnalysisError for a column of an unknown measure.

    >>> natural_direction("objective.accuracy_on"), natural_direction("step_s@100mbps"), natural_direction("speedup")
    ('maximize', 'minimize', 'maximize')
    """
    bare = name.removeprefix("objective.").removeprefix("final_").partition("@")[0]
    quality = re.sub("_(on|off|on_direct)(_estimated)?$", "", bare)
    measure = {**MEASURES, **(measures or {})}.get(quality)
    if measure is not None:
        return "maximize" if measure.higher else "minimize"
    if quality != bare != name:
        raise AnalysisError(f"`{name}` is a measure of your own: give its direction, as in {{{name!r}: 'maximize'}}.")
    return "maximize" if bare.startswith(MAXIMIZED) else "minimize"


class StudyFile:
    """The file `study.toml` of a study's folder; raises OSError or ValueError if it cannot be read."""

    def __init__(self, folder: Place) -> None:
        written = parse_toml(read_place(folder / "study.toml", LARGEST_TOML).decode())
        seeds = tuple(_list(written, "seeds"))
        if not all(isinstance(seed, int) for seed in seeds):
            raise ValueError("`seeds` must be integers")
        planned = written.get("planned_seeds")
        self.seeds = seeds[:planned] if isinstance(planned, int) else seeds
        """The seeds fixed before it began, or by the plan of its budget; none if it names none."""
        self._objectives = [_named(objective) for objective in _list(written, "objectives")]
        self._names = [str(objective.get("name", "")) for objective in self._objectives]
        self._step = next((network_and_transport(name) for name in self._names if name.startswith("step_s@")), None)
        self._written, self._folder = written, folder

    @property
    def directions(self) -> dict[str, str]:
        """The directions of objectives by name: "minimize" or "maximize"."""
        return {str(o["name"]): o["direction"] for o in self._objectives if "name" in o and "direction" in o}

    @property
    def network(self) -> str | None:
        """The network of the first `step_s@NETWORK` among its objectives; None without one, or if its file is missing here."""
        if self._step is None:
            return None
        try:
            parse_network(self._step[0])
        except (OSError, ValueError):
            return None
        return self._step[0]

    @property
    def transport(self) -> str | None:
        """The transport of the first `step_s@NETWORK` among its objectives; None without one."""
        return None if self._step is None else self._step[1]

    @property
    def compute(self) -> str:
        """The clock of compute in prices; raises ValueError if it is none."""
        from raysim.analysis.data.recording import CLOCKS

        clock = str(self._written.get("compute", "auto"))
        check_choice("compute", clock, CLOCKS)
        return clock

    @property
    def profile(self) -> Place | None:
        """The file of the profile whose compute takes the place of the recorded in prices."""
        return self._folder / PROFILE if "profile" in self._written else None

    @property
    def qualities(self) -> list[str]:
        """Its objectives with compression on, without `_on`; the first one chooses settings."""
        return [name.removesuffix("_on") for name in self._names if name.endswith("_on")]


def _list(written: Mapping[str, Any], key: str) -> list[Any]:
    values = written.get(key, [])
    return values if isinstance(values, list) else []


def _named(objective: Any) -> Mapping[str, Any]:
    """Return an objective as a table; a file written by hand may have only its name."""
    return objective if isinstance(objective, dict) else {"name": objective}
