"""The compressors of the tensors that cross the boundaries of a model, by the tables of a configuration."""

from __future__ import annotations

from collections.abc import Sequence

from raysim.config import ConfigError, RunConfig
from raysim.config.boundaries import Pairs, named, of_tensor
from raysim.values import UNNAMED, Boundary


def compressors_of(config: RunConfig, boundaries: Sequence[Boundary]) -> list[list[Pairs]]:
    """Return the compressors of each replica, boundary and tensor of floating-point numbers; replicas of one setting share a list."""
    known: dict[int, list[Pairs]] = {}
    replicas = config.compressors()
    for links in replicas:
        if id(links) not in known:
            known[id(links)] = [
                {name: of_tensor(pairs, name) for name in boundary.shapes}
                for pairs, boundary in zip(links, boundaries, strict=True)
            ]
    return [known[id(links)] for links in replicas]


def check_names(config: RunConfig, boundaries: Sequence[Boundary]) -> None:
    """Raise ConfigError where a table names a tensor that does not cross, or compresses integers or booleans.

    Each tensor that a table for all boundaries names must cross at least one boundary. Each tensor that the table of one boundary
    names must cross that boundary.
    """
    for field in ("forward", "backward"):
        for i, name, compressor in named(getattr(config, field)):
            here = list(boundaries) if i is None else [boundaries[i]]
            where = "a boundary" if i is None else f"boundary {i}"
            crossing = dict.fromkeys(
                known for one in here for known in (*one.shapes, *one.exact_bytes) if known != UNNAMED
            )
            if name not in crossing:
                held = ", ".join(crossing) or "one without a name"
                raise ConfigError(f"`{field}` must name tensors that cross {where} ({held}), but got {name!r}.")
            if any(name in one.exact_bytes for one in here) and not compressor.exact:
                raise ConfigError(
                    f"`{field}.{name}` must be Identity or be left out, since `{name}` holds integers or booleans, which are sent "
                    f"as they are, but got {compressor!r}."
                )
