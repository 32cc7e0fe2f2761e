"""Memory of hosts, and the refusal of stages that need more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from raysim.config import ConfigError
from raysim.network.memory import StageMemory, check_memory


def host_memory_bytes() -> int:
    """Return the memory of this machine, or the limit of its container."""
    total: int = psutil.virtual_memory().total
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    except (OSError, ValueError):  # no control group, or "max"
        return total


def check_room(
    memories: Sequence[StageMemory], capacity_bytes: int | Mapping[Any, int], nodes: Sequence[str] | None = None
) -> None:
    """Raise ConfigError with the arithmetic where the stages that share a node need more than its memory."""
    try:
        check_memory(memories, capacity_bytes, nodes)
    except ValueError as error:
        raise ConfigError(str(error)) from None
