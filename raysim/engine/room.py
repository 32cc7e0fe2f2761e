"""The refusal of stages that need more memory than there is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raysim.config import ConfigError
from raysim.limits import MemoryLimit
from raysim.network.memory import StageMemory, check_memory


def check_room(
    memories: Sequence[StageMemory], capacity: MemoryLimit | Mapping[Any, int], nodes: Sequence[str] | None = None
) -> None:
    """Raise ConfigError with the arithmetic where the stages that share a node need more than its memory.

    `capacity` is that of this machine, or the bytes of each node.
    """
    try:
        check_memory(memories, capacity.size if isinstance(capacity, MemoryLimit) else capacity, nodes)
    except ValueError as error:
        limit = f" {str(capacity)[0].upper()}{str(capacity)[1:]}." if isinstance(capacity, MemoryLimit) else ""
        raise ConfigError(f"{error}{limit}") from None
