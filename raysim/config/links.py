"""Compressors of links as they are configured.

A setting is one compressor for all boundaries, or a list of one each. The entry of a boundary may be a table by the names of
the tensors that cross it, and the whole may be a table by replica.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from raysim.compressors import Compressor, share_indices
from raysim.compressors import parse as parse_compressor
from raysim.config.fields import MOST_STAGES
from raysim.notation import shown

Notations = str | Annotated[tuple[str, ...], Field(max_length=MOST_STAGES)]
ByTensor: TypeAlias = dict[str, str]
"""A table holds the compressors of some tensors by name, and of all `others`, which by default are sent uncompressed."""
Setting: TypeAlias = str | ByTensor | Annotated[tuple[str | ByTensor, ...], Field(max_length=MOST_STAGES)]
ByReplica: TypeAlias = Setting | dict[str, Setting]
"""A table holds the setting of some replicas by number, and of all `others`, which by default send uncompressed."""
Pairs: TypeAlias = dict[str, tuple[Compressor, Compressor]]
"""The compressors of a boundary, of activations and of gradients: by the name of a tensor, and of all `OTHERS`."""

OTHERS = "others"


def checked_setting(field: str, value: Any) -> Any:
    """Return a setting with the keys of its tables in order; raises ValueError by field and rule.

    A text in brackets is read as TOML, the form in which records hold lists and tables.

    >>> checked_setting("forward", '{skip = "Quantize(8)", hidden = "TopK(0.1)"}')
    {'hidden': 'TopK(0.1)', 'skip': 'Quantize(8)'}
    """
    if isinstance(value, str) and value.startswith(("{", "[")):
        value = _from_toml(field, value)
    if not isinstance(value, Mapping):
        return _checked_list(field, value)
    if not value:
        raise ValueError(f"`{field}` as a table must name one replica or one tensor, but the table is empty.")
    by_tensor = [key for key in value if key != OTHERS and not _is_number(key)]
    if by_tensor:
        return _checked_by_tensor(field, value)
    found: dict[str, Any] = {}
    for key, setting in sorted(value.items(), key=lambda item: (len(str(item[0])), str(item[0]))):
        name = f"{field}.{key}"
        if key != OTHERS and (len(str(key)) > 9 or str(key) != str(int(key))):
            raise ValueError(
                f"`{field}` by replica must have numbers of replicas and `{OTHERS}` as keys, but got {shown(key)}."
            )
        if isinstance(setting, Mapping):
            found[str(key)] = _checked_by_tensor(name, setting)
        elif isinstance(setting, (str, list, tuple)):
            found[str(key)] = _checked_list(name, setting)
        else:
            raise ValueError(f"`{name}` must be a compressor or a list of one a boundary, but got {shown(setting)}.")
    return found


def canonical(value: ByReplica) -> ByReplica:
    """Return the same setting in canonical notations; raises ValueError where one cannot be read."""
    if isinstance(value, str):
        return repr(parse_compressor(value))
    if isinstance(value, tuple):
        return tuple(map(canonical, value))  # type: ignore[arg-type]
    return {key: canonical(inner) for key, inner in value.items()}  # type: ignore[return-value]


def check_numbers(field: str, value: ByReplica, num_boundaries: int, num_replicas: int) -> None:
    """Raise ValueError where a setting does not fit the number of boundaries or of replicas."""
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
            f"`{field}` must be one compressor or a list of one a boundary ({num_boundaries}), but got {len(value)}."
        )


def is_by_replica(value: Mapping[str, Any]) -> bool:
    """Return whether the keys of a table are numbers of replicas, and not names of tensors.

    >>> is_by_replica({"0": "TopK(0.1)", "others": "Identity"}), is_by_replica({"hidden": "TopK(0.1)"})
    (True, False)
    """
    return all(key == OTHERS or _is_number(key) for key in value)


def of_replica(value: ByReplica, replica: int, num_boundaries: int) -> Sequence[str | ByTensor]:
    """Return the settings of a replica's boundaries.

    >>> of_replica({"1": "TopK(0.05)"}, 1, 2), of_replica({"1": "TopK(0.05)"}, 0, 2)
    (('TopK(0.05)', 'TopK(0.05)'), ('Identity', 'Identity'))
    """
    if isinstance(value, dict) and is_by_replica(value):
        value = value.get(str(replica), value.get(OTHERS, "Identity"))
    return value if isinstance(value, tuple) else (value,) * num_boundaries  # type: ignore[return-value]


def pairs_of(forward: str | ByTensor, backward: str | ByTensor, *, shared_indices: bool, boundary: int) -> Pairs:
    """Return the compressors of a boundary.

    With shared indices, the gradients of tensors that are sent whole go back whole. Raises ValueError where others cannot
    share them.
    """
    names = [*(name for each in (forward, backward) if isinstance(each, dict) for name in each), OTHERS]
    pairs: Pairs = {}
    for name in dict.fromkeys(names):
        pairs[name] = (parse_compressor(_of_tensor(forward, name)), parse_compressor(_of_tensor(backward, name)))
    if shared_indices:
        sparse = [name for name, (method, _) in pairs.items() if not method.exact] or [OTHERS]
        for name in sparse:
            method, gradients = pairs[name]
            pairs[name] = method, share_indices(method, gradients, f" at boundary {boundary}")
    return pairs


def of_tensor(pairs: Pairs, name: str) -> tuple[Compressor, Compressor]:
    """Return the compressors of a tensor that crosses a boundary."""
    return pairs.get(name, pairs[OTHERS])


def named(value: ByReplica) -> Iterator[tuple[int | None, str, str]]:
    """Yield the boundary, None for all, the name of a tensor and its notation for each entry of the tables by tensor."""
    if isinstance(value, dict) and is_by_replica(value):
        for setting in value.values():
            yield from named(setting)
        return
    for boundary, one in enumerate(value) if isinstance(value, tuple) else [(None, value)]:
        if isinstance(one, dict):
            yield from ((boundary, name, str(notation)) for name, notation in one.items() if name != OTHERS)


def _of_tensor(setting: str | ByTensor, name: str) -> str:
    return setting if isinstance(setting, str) else setting.get(name, setting.get(OTHERS, "Identity"))


def _from_toml(field: str, text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"`{field}` as a text in brackets must be TOML, but got {shown(text)}: {error}.") from None


def _checked_list(field: str, value: Any) -> Any:
    """Return a list of settings of boundaries as a tuple; other values, and lists of other things, as they are."""
    if not isinstance(value, (list, tuple)):
        return value
    return tuple(
        _checked_by_tensor(f"{field}[{place}]", one) if isinstance(one, Mapping) else one
        for place, one in enumerate(value)
    )


def _checked_by_tensor(field: str, value: Mapping[Any, Any]) -> ByTensor:
    names = [str(key) for key in value if key != OTHERS]
    for name in names:
        if _is_number(name) or not name:
            raise ValueError(
                f"`{field}` must be a table by replica, with numbers and `{OTHERS}` as keys, or by tensor, with names, "
                f"but has the keys {', '.join(map(shown, value))}."
            )
    for name, notation in value.items():
        if not isinstance(notation, str):
            raise ValueError(f"`{field}.{name}` must be a compressor, but got {shown(notation)}.")
    if not names:
        raise ValueError(
            f"`{field}` as a table must name a tensor beside `{OTHERS}`. Name one, or write the compressor alone."
        )
    return {name: value[name] for name in [*sorted(names), *([OTHERS] if OTHERS in value else [])]}


def _is_number(key: object) -> bool:
    name = str(key)
    return name.isascii() and name.isdecimal()
