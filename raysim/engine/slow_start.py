"""TCP's slow start after idle, which costs distant hosts many trips a packet unless it is switched off."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

SETTING = "net.ipv4.tcp_slow_start_after_idle"
DISTANT_S = 0.01  # round trip from which on it counts


class Reach(NamedTuple):
    """A worker's connections to its peers."""

    slow_start: bool
    """True where this host's TCP starts slowly after idle, as Linux's does by default."""
    farthest_s: float
    """Round trip of a call to the farthest peer, in seconds; 0 without peers."""


def starts_slowly() -> bool:
    """Return whether TCP of this host starts slowly after idle; False where the host does not say."""
    setting = Path("/proc/sys") / SETTING.replace(".", "/")
    return setting.is_file() and setting.read_text(encoding="ascii").strip() == "1"


def slow_start_warning(reaches: Mapping[str, Reach]) -> str | None:
    """Return a sentence on the nodes that start slowly and have a distant peer; None where there are none.

    >>> slow_start_warning({"10.0.0.1": Reach(True, 0.001), "10.0.0.2": Reach(False, 0.08)}) is None
    True
    """
    slow = [node for node, reach in reaches.items() if reach.slow_start and reach.farthest_s >= DISTANT_S]
    if not slow:
        return None
    farthest_s = max(reaches[node].farthest_s for node in slow)
    return (
        f"TCP starts slowly after idle on {', '.join(slow)}, {1000 * farthest_s:.0f} ms from a neighbour: large packets take two to "
        f"four times as long. Run `sysctl -w {SETTING}=0` there (docs/networks.md)."
    )
