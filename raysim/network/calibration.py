"""The seconds of transports on this machine, as `raysim calibrate` measured and kept them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

from raysim.files import cache_folder, read_text, write_whole
from raysim.network.transport import HostCosts, Transport, parse_transport
from raysim.notation import check_real

FILE = "transports.json"  # in the cache


def calibration_file() -> Path:
    """Return the file of this machine's calibrations."""
    return cache_folder() / FILE


def calibrated_transport(name: str) -> Transport:
    """Return the transport of a name with the seconds of this machine if they were measured, else with those it comes with.

    Raises ValueError if there is no such transport, or if the file of calibrations is not what `save_calibration` writes.
    """
    transport = parse_transport(name)
    found = _read().get(transport.name)
    return transport if found is None else replace(transport, host=found)


def save_calibration(name: str, costs: HostCosts) -> Path:
    """Keep the seconds of a transport on this machine, in place of earlier ones, and return the file; raises OSError."""
    known = {one: asdict(of) for one, of in (_read() | {parse_transport(name).name: costs}).items()}
    path = calibration_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(known, indent=1).encode())
    return path


def _read() -> dict[str, HostCosts]:
    path = calibration_file()
    if not path.is_file():
        return {}
    try:
        found = {}
        for name, values in json.loads(read_text(path)).items():
            source = str(values.pop("source"))
            found[name] = HostCosts(**{k: check_real(k, v, 0, math.inf) for k, v in values.items()}, source=source)
        return found
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"The calibration {path} cannot be read ({error}). Run `raysim calibrate`, or delete it."
        ) from None
