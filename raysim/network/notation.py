"""The text of a network: bandwidth, latency, jitter, sharing and TCP's window, as in "100mbps+20ms~2ms/port/4MB"."""

from __future__ import annotations

import math
import re
from typing import Any

from raysim.notation import shown

BANDWIDTHS = {"kbps": 1e3, "mbps": 1e6, "gbps": 1e9}
TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
SIZES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}
BINARY = {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
NUMBER = r"(\d+(?:\.\d+)?)"
WINDOW = re.compile(rf"(?:([1-9]\d*)x)?{NUMBER}\s*([kmg]?i?b)", re.IGNORECASE)
IN_BYTES = re.compile(rf"{NUMBER}\s*([kKMG])(?:B(?:ps|/s)|[Bb]yte/s)")
PATTERN = re.compile(rf"(?:{NUMBER}(kbps|mbps|gbps)|free)(?:\+{NUMBER}(us|ms|s))?(?:~{NUMBER}(us|ms|s))?(?:/(\w+))?")


def read_wires(text: str) -> dict[str, Any] | None:
    """Parse wires such as "100mbps+20ms~2ms/port" or "100 Mbit/s + 20 ms" as fields of `Network`; None if it is not one.

    Latency is one way. Raises ValueError for bytes a second, such as 25MB/s: a bandwidth is in bits.

    >>> read_wires("1gbps+0.5ms")
    {'bandwidth_bps': 1000000000.0, 'latency_s': 0.0005, 'jitter_s': 0.0, 'sharing': 'pair'}
    """
    if in_bytes := IN_BYTES.match(text.strip()):
        bits = f"{8 * float(in_bytes[1]):.12g}{in_bytes[2].lower()}bps"
        meant = f"{in_bytes[1]}{in_bytes[2].lower()}bps"
        raise ValueError(
            f"A bandwidth is in bits a second, but {shown(text)} has bytes: write {bits}, or {meant} if bits were meant."
        )
    plain = re.sub(r"\s*([+~/])\s*|(?<=\d)\s+(?=[a-z])", r"\1", text.strip().lower())
    match = PATTERN.fullmatch(re.sub(r"(?<=\d)([kmg])bit/s", r"\1bps", plain))
    if match is None:
        return None
    return {
        "bandwidth_bps": float(match[1]) * BANDWIDTHS[match[2]] if match[1] else math.inf,
        "latency_s": float(match[3]) * TIMES[match[4]] if match[3] else 0.0,
        "jitter_s": float(match[5]) * TIMES[match[6]] if match[5] else 0.0,
        "sharing": match[7] or "pair",
    }


def read_window(text: str) -> dict[str, Any] | None:
    """Parse the window of a connection, "4MiB", or of two in parallel, "2x4MiB", as fields of `Network`; None if it is not one.

    >>> read_window("9.7MB"), read_window("2x4MiB"), read_window("4mbps")
    ({'window_bytes': 9700000.0, 'streams': 1}, {'window_bytes': 4194304.0, 'streams': 2}, None)
    """
    units = {name.lower(): size for name, size in (SIZES | BINARY).items()}
    match = WINDOW.fullmatch(text.strip())
    if match is None or match[3].lower() not in units:
        return None
    return {"window_bytes": float(match[2]) * units[match[3].lower()], "streams": int(match[1] or 1)}


def bandwidth_text(bps: float) -> str:
    """Return a bandwidth as `read_wires` parses it."""
    return "free" if math.isinf(bps) else _scaled(bps, BANDWIDTHS)


def time_text(seconds: float) -> str:
    """Return a latency as `read_wires` parses it."""
    return _scaled(seconds, TIMES)


def window_text(window_bytes: float, streams: int) -> str:
    """Return a window as `read_window` parses it."""
    size = min((_scaled(window_bytes, units) for units in (SIZES, BINARY)), key=len)
    return (f"{streams}x" if streams > 1 else "") + size


def _scaled(value: float, units: dict[str, float]) -> str:
    unit = next((name for name in reversed(units) if value >= units[name] * (1 - 1e-12)), next(iter(units)))
    return f"{value / units[unit]:.12g}{unit}"
