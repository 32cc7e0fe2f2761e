"""Methods in records, parsed without their classes, since records may come from a raysim with other methods."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from raysim.notation import check_size, hide_paths


class Method(NamedTuple):
    """A name with its arguments, which may be methods; leading required arguments are positional."""

    name: str
    arguments: tuple[Any, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        written = [*map(_write, self.arguments), *(f"{name}={_write(value)}" for name, value in self.options)]
        return f"{self.name}({', '.join(written)})" if written else self.name

    @property
    def inner(self) -> Method | None:
        """The wrapped method: TopK(0.1) of ErrorFeedback(TopK(0.1))."""
        return next((argument for argument in self.arguments if isinstance(argument, Method)), None)

    @property
    def strength(self) -> float | None:
        """The number that orders methods of one name, strongest first: a density, bits or a rank."""
        first = self.arguments[0] if self.arguments else None
        return float(first) if isinstance(first, (int, float)) and not isinstance(first, bool) else None


def read_method(text: str) -> Method | None:
    """Return the method of a notation; None if it is invalid, too long, or a list with different ones for the boundaries.

    >>> read_method("ErrorFeedback(TopK(0.1))").inner.strength
    0.1
    >>> str(read_method("ErrorFeedback(mycodecs:Strided(4))"))
    'ErrorFeedback(mycodecs:Strided(4))'
    >>> read_method('["TopK(0.1)", "Identity"]') is None
    True
    """
    if text.startswith("["):
        try:
            each = set(json.loads(text))
        except (ValueError, TypeError, RecursionError):
            return None
        return read_method(str(each.pop())) if len(each) == 1 else None
    try:
        check_size(text)
        source, paths = hide_paths(text)
        method = _build(ast.parse(source, mode="eval").body, paths)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return method if isinstance(method, Method) else None


def _write(value: Any) -> str:
    return str(value) if isinstance(value, Method) else repr(value)


def _build(node: ast.expr, paths: Mapping[str, str]) -> Any:
    match node:
        case ast.Name(id=name):
            return Method(paths.get(name, name))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=keywords):
            options = tuple((str(keyword.arg), _build(keyword.value, paths)) for keyword in keywords)
            return Method(paths.get(name, name), tuple(_build(argument, paths) for argument in arguments), options)
        case ast.List() | ast.Tuple():
            return tuple(_build(element, paths) for element in node.elts)
    return ast.literal_eval(node)


def strength_of(method: Method | None, name: str) -> float | None:
    """Return the strength of a method that is this codec without options; None for any other method.

    >>> strength_of(read_method("TopK(0.1)"), "TopK"), strength_of(read_method("TopK(0.1, per='tensor')"), "TopK")
    (0.1, None)
    """
    return method.strength if method is not None and method.name == name and not method.options else None
