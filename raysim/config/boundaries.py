"""The configured compressors of boundaries, parsed once.

A setting is one compressor for all boundaries, or a list with one per boundary. A boundary's entry may be a table by
tensor name, and the whole setting may be a table by replica.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from raysim.codecs import Codec
from raysim.compressors import Compressor, Plain, parse, share_indices
from raysim.config.fields import MOST_STAGES
from raysim.notation import shown
from raysim.storage.texts import parse_toml

ByTensor: TypeAlias = dict[str, Compressor]
"""A table holds the compressors of some tensors by name, and of all `others`, which by default are sent uncompressed."""
OfBoundary: TypeAlias = Compressor | ByTensor
Setting: TypeAlias = OfBoundary | tuple[OfBoundary, ...]
ByReplica: TypeAlias = Setting | dict[str, Setting]
"""A table holds the setting of some replicas by number, and of all `others`, which by default send uncompressed."""
Pairs: TypeAlias = dict[str, tuple[Compressor, Compressor]]
"""The compressors of a boundary, of activations and of gradients: by the name of a tensor, and of all `OTHERS`."""

OTHERS = "others"
UNCOMPRESSED = parse("Identity")


def read_setting(field: str, value: Any) -> ByReplica:
    """Parse a setting's notations and sort the keys of its tables; raises ValueError with field and rule.

    A text in brackets is read as TOML, the form of lists and tables in records.

    >>> read_setting("forward", '{skip = "Quantize(8)", hidden = "TopK(0.1)"}')
    {'hidden': TopK(0.1), 'skip': Quantize(8)}
    """
    if isinstance(value, str) and value.startswith(("{", "[")):
        value = _from_toml(field, value)
    if isinstance(value, Mapping) and not value:
        raise ValueError(f"`{field}` as a table must name one replica or one tensor, but the table is empty.")
    if not (isinstance(value, Mapping) and is_by_replica(value)):
        return _read_list(field, value)
    by_replica: dict[str, Setting] = {}
    for key, setting in sorted(value.items(), key=lambda item: (len(str(item[0])), str(item[0]))):
        name = f"{field}.{key}"
        if key != OTHERS and (len(str(key)) > 9 or str(key) != str(int(key))):
            raise ValueError(
                f"`{field}` by replica must have numbers of replicas and `{OTHERS}` as keys, but got {shown(key)}."
            )
        if not isinstance(setting, (str, list, tuple, Mapping, Codec, Compressor)):
            raise ValueError(
                f"`{name}` must be a compressor or a list with one per boundary, but got {shown(setting)}."
            )
        by_replica[str(key)] = _read_list(name, setting)
    return by_replica


def write_setting(value: ByReplica) -> Any:
    """Return a setting in canonical notation: a text, or lists and tables of texts."""
    if isinstance(value, tuple):
        return tuple(map(write_setting, value))
    return {key: write_setting(inner) for key, inner in value.items()} if isinstance(value, dict) else repr(value)


def check_numbers(field: str, value: ByReplica, num_boundaries: int, num_replicas: int) -> None:
    """Raise ValueError if a setting does not fit the number of boundaries or replicas."""
    if isinstance(value, dict) and is_by_replica(value):
        if num_replicas == 1:
            raise ValueError(
                f"`{field}` by replica has no effect with one replica. Name one compressor, or set `num_replicas`."
            )
        for key, setting in value.items():
            if key != OTHERS and int(key) >= num_replicas:
                raise ValueError(f"`{field}` by replica must name replicas 0 to {num_replicas - 1}, but got {key}.")
            check_numbers(f"{field}.{key}", setting, num_boundaries, num_replicas)
    elif isinstance(value, tuple) and len(value) != num_boundaries:
        raise ValueError(
            f"`{field}` must be one compressor or a list with one per boundary ({num_boundaries}), but got {len(value)}."
        )


def is_by_replica(value: Mapping[str, Any]) -> bool:
    """Return whether the keys of a table are replica numbers, not tensor names.

    >>> is_by_replica({"0": "TopK(0.1)", "others": "Identity"}), is_by_replica({"hidden": "TopK(0.1)"})
    (True, False)
    """
    return all(key == OTHERS or _is_number(key) for key in value)


def of_replica(value: ByReplica, replica: int) -> Setting:
    """Return the setting of a replica.

    >>> of_replica({"1": parse("TopK(0.05)")}, 1), of_replica({"1": parse("TopK(0.05)")}, 0)
    (TopK(0.05), Identity)
    """
    if isinstance(value, dict) and is_by_replica(value):
        return value.get(str(replica), value.get(OTHERS, UNCOMPRESSED))
    return value  # type: ignore[return-value]


def pairs_of(
    forward: Setting, backward: Setting, boundary: int, names: Iterable[str] | None, *, shared_indices: bool
) -> Pairs:
    """Return the compressors of a boundary for tensors of these `names`; by default of all tensors in tables, and of `OTHERS`.

    With shared indices, the gradients of uncompressed tensors are uncompressed too. Raises ValueError if the compressors of
    compressed tensors cannot share their positions.
    """
    ends = [value[boundary] if isinstance(value, tuple) else value for value in (forward, backward)]
    tables = [end if isinstance(end, dict) else {OTHERS: end} for end in ends]
    known = dict.fromkeys([*(name for table in tables for name in table if name != OTHERS), OTHERS])
    sending, returning = (
        {name: table.get(name, table.get(OTHERS, UNCOMPRESSED)) for name in (known if names is None else names)}
        for table in tables
    )
    if shared_indices:
        sparse = [name for name, method in sending.items() if not method.exact]
        for name in sparse if names is not None else sparse or [OTHERS]:
            returning[name] = share_indices(sending[name], returning[name], f" at boundary {boundary}")
    return {name: (method, returning[name]) for name, method in sending.items()}


def entries(value: ByReplica) -> Iterator[tuple[int | None, str, Compressor]]:
    """Yield boundary (None for all), tensor (`OTHERS` for all others) and compressor of each entry of a setting."""
    if isinstance(value, dict) and is_by_replica(value):
        for setting in value.values():
            yield from entries(setting)
        return
    for boundary, entry in enumerate(value) if isinstance(value, tuple) else [(None, value)]:
        table = entry if isinstance(entry, dict) else {OTHERS: entry}
        yield from ((boundary, name, compressor) for name, compressor in table.items())  # type: ignore[misc]


def _from_toml(field: str, text: str) -> Any:
    try:
        return parse_toml(f"value = {text}")["value"]
    except ValueError as error:
        raise ValueError(f"`{field}` in brackets must be TOML, but got {shown(text)}: {error}.") from None


def _read_list(field: str, value: Any) -> Setting:
    """Parse one entry for all boundaries, or a list with one per boundary."""
    if not isinstance(value, (list, tuple)):
        return _read(field, value)
    if len(value) > MOST_STAGES:
        raise ValueError(f"`{field}` must be a list of at most {MOST_STAGES} entries, but got {shown(value)}.")
    names = [f"{field}[{i}]" if isinstance(entry, Mapping) else f"{field}.{i}" for i, entry in enumerate(value)]
    return tuple(map(_read, names, value))


def _read(field: str, value: Any) -> OfBoundary:
    """Parse the entry of a boundary: a compressor, or a table of compressors by tensor."""
    if not isinstance(value, Mapping):
        return _read_compressor(field, value)
    names = [str(key) for key in value if key != OTHERS]
    for name in names:
        if _is_number(name) or not name:
            raise ValueError(
                f"`{field}` must be a table by replica, with numbers and `{OTHERS}` as keys, or by tensor, with names, "
                f"but has the keys {', '.join(map(shown, value))}."
            )
    for name, notation in value.items():
        if not isinstance(notation, (str, Codec, Compressor)):
            raise ValueError(f"`{field}.{name}` must be a compressor, but got {shown(notation)}.")
    if not names:
        raise ValueError(
            f"`{field}` as a table must name a tensor in addition to `{OTHERS}`. Name one, or write the compressor alone."
        )
    order = [*sorted(names), *([OTHERS] if OTHERS in value else [])]
    return {name: _read_compressor(f"{field}.{name}", value[name]) for name in order}


def _read_compressor(field: str, value: Any) -> Compressor:
    if isinstance(value, Compressor):
        return value
    if isinstance(value, Codec):
        return Plain(value)
    if not isinstance(value, str):
        raise ValueError(f"`{field}` must be a valid string, but got {shown(value)}.")
    return parse(value)


def _is_number(key: object) -> bool:
    name = str(key)
    return name.isascii() and name.isdecimal()
