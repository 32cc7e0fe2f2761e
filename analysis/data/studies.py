"""Objectives, planned seeds and the network of step times, from a study's file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Any

from raysim.network.presets import parse_network
from raysim.network.transport import TRANSPORTS
from raysim.quality import MEASURES, Measure
from raysim.storage.places import Place

USUAL_TRANSPORT = "ray"  # if neither the caller nor a study names one

TITLES = {"ray": "Ray", "nccl": "NCCL", "gloo": "Gloo", "bare": "bare wires"}


def over(transport: str) -> str:
    """Return the transport of a price in words.

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


MAXIMIZED = ("compression_factor", "factor", "speedup", "fidelity", "gain", "utilisation", "throughput")


def natural_direction(name: str, measures: Mapping[str, Measure] | None = None) -> str:
    """Return whether a quantity is minimised or maximised, by its name; `measures` adds your own measures of the runs.

    >>> natural_direction("objective.accuracy_on"), natural_direction("step_s@100mbps"), natural_direction("speedup")
    ('maximize', 'minimize', 'maximize')
    """
    bare = name.removeprefix("objective.").removeprefix("final_").partition("@")[0]
    quality = re.sub("_(on|off|on_direct)(_estimated)?$", "", bare)
    measure = {**MEASURES, **(measures or {})}.get(quality)
    if measure is not None:
        return "maximize" if measure.higher else "minimize"
    return "maximize" if bare.startswith(MAXIMIZED) else "minimize"


class StudyFile:
    """The file `study.toml` of a study's folder; raises OSError or ValueError if it cannot be read."""

    def __init__(self, folder: Place) -> None:
        written = tomllib.loads((folder / "study.toml").read_text(encoding="utf-8"))
        seeds = tuple(int(seed) for seed in _list(written, "seeds"))
        planned = written.get("planned_seeds")
        self.seeds = seeds[:planned] if isinstance(planned, int) else seeds
        """The seeds fixed before it began, or by the plan of its budget; none if it names none."""
        self._objectives = [_named(objective) for objective in _list(written, "objectives")]

    @property
    def directions(self) -> dict[str, str]:
        """The directions of objectives by name: "minimize" or "maximize"."""
        return {str(o["name"]): o["direction"] for o in self._objectives if "name" in o and "direction" in o}

    @property
    def network(self) -> str | None:
        """The network of the first `step_s@NETWORK` among its objectives; None without one, or if its file is missing here."""
        name = self._step
        network = None if name is None else network_and_transport(name)[0]
        try:
            return network if network is None or parse_network(network) else None
        except (OSError, ValueError):
            return None

    @property
    def transport(self) -> str | None:
        """The transport of the first `step_s@NETWORK` among its objectives; None without one."""
        return None if self._step is None else network_and_transport(self._step)[1]

    @property
    def qualities(self) -> list[str]:
        """Its objectives with compression on, without `_on`; by the first of them it chooses settings."""
        names = (str(objective.get("name", "")) for objective in self._objectives)
        return [name.removesuffix("_on") for name in names if name.endswith("_on")]

    @property
    def _step(self) -> str | None:
        names = (str(objective.get("name", "")) for objective in self._objectives)
        return next((name for name in names if name.startswith("step_s@")), None)


def _list(written: Mapping[str, Any], key: str) -> list[Any]:
    values = written.get(key, [])
    return values if isinstance(values, list) else []


def _named(objective: Any) -> Mapping[str, Any]:
    """Return an objective as a table; a file written by hand may have only its name."""
    return objective if isinstance(objective, dict) else {"name": objective}
