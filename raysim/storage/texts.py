"""Parse TOML and JSON that a stranger may have written: bounded in size, depth and time, with one kind of error."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from typing import Any

from raysim.storage.files import LARGEST_BYTES

LARGEST_TOML = 4 * 2**20  # characters; tomllib reads about a million a second
DEEPEST = (
    50  # tables and lists in each other, and parts of a dotted key: tomllib's time grows with the square of the parts
)

_SKIPPED = r'"(?:[^"\\\n]|\\.)*"' + r"|'[^'\n]*'"
_BRACKETS = re.compile(rf"{_SKIPPED}|[][{{}}]")
_LONG_KEY = re.compile(rf"(?:\.[ \t]*[\w-]+[ \t]*){{{DEEPEST}}}")


def parse_toml(text: str) -> dict[str, Any]:
    """Return the values of a text in TOML; raises ValueError, with the reason, if it is invalid or exceeds a bound.

    >>> parse_toml("a.b = [1, 2]")
    {'a': {'b': [1, 2]}}
    """
    if "." in text and _LONG_KEY.search(re.sub(_SKIPPED, "_", text)):
        raise ValueError(f"a key has more than {DEEPEST} parts")
    values: dict[str, Any] = _parsed(text, tomllib.loads, LARGEST_TOML)
    return values


def parse_json(text: str) -> Any:
    """Return the value of a text in JSON; raises ValueError, with the reason, if it is invalid or exceeds a bound."""
    return _parsed(text, json.loads, LARGEST_BYTES)


def _parsed(text: str, parse: Callable[[str], Any], largest: int) -> Any:
    if len(text) > largest:
        raise ValueError(f"it has more than {largest:,} characters")
    if _most_brackets(text) > DEEPEST:
        raise ValueError(f"its brackets are nested more than {DEEPEST} deep")
    try:
        value = parse(text)
    except RecursionError:
        raise ValueError("its brackets are nested too deep") from None
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > DEEPEST:
            raise ValueError(f"its tables and lists are nested more than {DEEPEST} deep")
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, (dict, list)))
        level = [each for values in inner for each in values if isinstance(each, (dict, list))]
    return value


def _most_brackets(text: str) -> int:
    """Return how many brackets are open at once, outside of texts in quotes."""
    depth = deepest = 0
    for found in _BRACKETS.finditer(text):
        sign = found[0]
        if sign in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif sign in "]}":
            depth = max(depth - 1, 0)
    return deepest
