"""Compressors of links as they are configured: one for all boundaries, a list of one each, or a table of these by replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from raysim.compressors import parse as parse_compressor
from raysim.config.fields import MOST_STAGES
from raysim.notation import shown

Notations = str | Annotated[tuple[str, ...], Field(max_length=MOST_STAGES)]
ByReplica: TypeAlias = Notations | dict[str, Notations]
"""A table holds the setting of some replicas by number, and of all `others`, which by default send uncompressed."""

OTHERS = "others"


def checked_table(field: str, value: Any) -> Any:
    """Return a table by replica with keys in order, other values as they are; raises ValueError by field and rule."""
    if not isinstance(value, Mapping):
        return value
    if not value:
        raise ValueError(f"`{field}` by replica must name one replica or more, but the table is empty.")
    found: dict[str, Any] = {}
    for key, notations in sorted(value.items(), key=lambda item: (len(str(item[0])), str(item[0]))):
        name = str(key)
        numbered = len(name) < 10 and name.isascii() and name.isdecimal() and name == str(int(name))
        if name != OTHERS and not numbered:
            raise ValueError(
                f"`{field}` by replica must have numbers of replicas and `{OTHERS}` as keys, but got {shown(key)}."
            )
        listed = isinstance(notations, (list, tuple)) and all(isinstance(each, str) for each in notations)
        if not isinstance(notations, str) and not listed:
            raise ValueError(
                f"`{field}.{name}` must be a compressor or a list of one a boundary, but got {shown(notations)}."
            )
        found[name] = notations if isinstance(notations, str) else tuple(notations)
    return found


def canonical(value: ByReplica) -> ByReplica:
    """Return the same setting in canonical notations; raises ValueError where one cannot be read."""
    if isinstance(value, str):
        return repr(parse_compressor(value))
    if isinstance(value, tuple):
        return tuple(repr(parse_compressor(text)) for text in value)
    return {key: canonical(notations) for key, notations in value.items()}  # type: ignore[misc]


def check_numbers(field: str, value: ByReplica, num_boundaries: int, num_replicas: int) -> None:
    """Raise ValueError where a setting does not fit the number of boundaries or of replicas."""
    if isinstance(value, dict):
        if num_replicas == 1:
            raise ValueError(
                f"`{field}` by replica has no effect with one replica. Name one compressor, or set `num_replicas`."
            )
        for key, notations in value.items():
            if key != OTHERS and int(key) >= num_replicas:
                raise ValueError(f"`{field}` by replica must name replicas 0 to {num_replicas - 1}, but got {key}.")
            check_numbers(f"{field}.{key}", notations, num_boundaries, num_replicas)
    elif isinstance(value, tuple) and len(value) != num_boundaries:
        raise ValueError(
            f"`{field}` must be one compressor or a list of one a boundary ({num_boundaries}), but got {len(value)}."
        )


def of_replica(value: ByReplica, replica: int, num_boundaries: int) -> Sequence[str]:
    """Return the notations of a replica's boundaries.

    >>> of_replica({"1": "TopK(0.05)"}, 1, 2), of_replica({"1": "TopK(0.05)"}, 0, 2)
    (('TopK(0.05)', 'TopK(0.05)'), ('Identity', 'Identity'))
    """
    if isinstance(value, dict):
        value = value.get(str(replica), value.get(OTHERS, "Identity"))
    return (value,) * num_boundaries if isinstance(value, str) else value
