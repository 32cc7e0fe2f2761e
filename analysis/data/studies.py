"""The part of a study's file that is read beside its runs: directions of objectives, planned seeds, the network of step times."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

from raysim.network.presets import parse_network
from raysim.places import Place


class StudyFile:
    """The file `study.toml` of a study's folder; raises OSError or ValueError where it cannot be read."""

    def __init__(self, folder: Place) -> None:
        written = tomllib.loads((folder / "study.toml").read_text(encoding="utf-8"))
        self.seeds = tuple(int(seed) for seed in _list(written, "seeds"))
        """The seeds that it fixed before it began; none where it does not say."""
        self._objectives = [_named(one) for one in _list(written, "objectives")]

    @property
    def directions(self) -> dict[str, str]:
        """The directions that it gives to objectives, by their names: "minimize" or "maximize"."""
        return {str(one["name"]): one["direction"] for one in self._objectives if "name" in one and "direction" in one}

    @property
    def network(self) -> str | None:
        """The network of the first `step_s@NETWORK` among its objectives; None without one, or where it is a file that is not here."""
        names = (str(one.get("name", "")) for one in self._objectives)
        network = next((name.partition("@")[2] for name in names if name.startswith("step_s@")), None)
        try:
            return network if network is None or parse_network(network) else None
        except (OSError, ValueError):
            return None


def _list(written: Mapping[str, Any], key: str) -> list[Any]:
    found = written.get(key, [])
    return found if isinstance(found, list) else []


def _named(objective: Any) -> Mapping[str, Any]:
    """Return an objective as a table; a file that was written by hand may have its name alone."""
    return objective if isinstance(objective, dict) else {"name": objective}
