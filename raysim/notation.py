"""Notation: the `repr` of a codec, compressor or schedule, its parser, checks of arguments, and errors in user input.

A name may also be the user's own class, see `raysim.plugins`.

>>> from raysim.codecs import CODECS
>>> parse_notation("TopK(1)", CODECS)
TopK(1.0)
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

from raysim import plugins

T = TypeVar("T")

SHOWN = 200  # characters of a value quoted in a sentence
LONGEST_REASON = 4000  # characters of the text of somebody else's error
MAX_LENGTH = 1000  # characters of a text to parse: real notations are much shorter
MAX_DEPTH = 20  # nested brackets
CONTROL = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
"""Characters that control a terminal: control characters except tab and line break, and changes of text direction."""
REPLACED = "\ufffd"


class InputError(ValueError):
    """Bad user input (configuration, record or folder); one sentence with field, value and rule, printed before exit code 2."""


class Notation:
    """Base of frozen dataclasses whose `repr` is their notation: required arguments positional, defaults left out."""

    notation: ClassVar[str | None] = None  # the name, if not the class name
    variants: ClassVar[tuple[str, ...]] = ()  # of a plug-in's class, for docs, benchmarks and laws: an example first

    @classmethod
    def name(cls) -> str:
        """Return the name of the class in the notation."""
        if cls.notation is None and cls.__module__.partition(".")[0] not in ("raysim", "__main__"):
            return plugins.written_name(cls)
        return cls.notation or cls.__name__

    def __repr__(self) -> str:
        arguments = []
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        for field in sorted(fields, key=lambda field: bool(field.kw_only)):  # a base's options come last
            value = getattr(self, field.name)
            if field.default is dataclasses.MISSING:
                arguments.append(repr(value))
            elif value != field.default:
                arguments.append(f"{field.name}={value!r}")
        return f"{self.name()}({', '.join(arguments)})" if arguments else self.name()

    def _coerce(self, **values: object) -> None:
        """Replace fields by checked values, in `__post_init__` of a frozen dataclass."""
        for field, value in values.items():
            object.__setattr__(self, field, value)


def check_real(field: str, value: object, low: float, high: float, *, open_low: bool = False) -> float:
    """Return `value` as a float in [low, high], or (low, high] with `open_low`; raises ValueError with field and value."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not (low <= value <= high) or (open_low and value == low):  # type: ignore[operator]
        interval = f"{'(' if open_low else '['}{low:g}, {high:g}]"
        raise ValueError(f"`{field}` must be in {interval}, but got {value!r}.")
    return float(value)  # type: ignore[arg-type]


def check_integer(field: str, value: object, low: int, high: int | None = None) -> int:
    """Return `value` as an int in low..high (unbounded if `high` is None); raises ValueError with field and value."""
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole or value < low or (high is not None and value > high):  # type: ignore[operator]
        limits = f"from {low} to {high}" if high is not None else f"of at least {low}"
        raise ValueError(f"`{field}` must be an integer {limits}, but got {value!r}.")
    return int(value)  # type: ignore[call-overload, no-any-return]


def check_choice(field: str, value: object, choices: Iterable[str]) -> str:
    """Return `value` if it is one of `choices`; raises ValueError with field and value."""
    known = list(choices)
    if value not in known:
        raise ValueError(f"`{field}` must be one of {', '.join(known)}, but got {value!r}.")
    return str(value)


def check_flag(field: str, value: object) -> None:
    """Raise ValueError, with field and value, unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"`{field}` must be True or False, but got {value!r}.")


def shown(value: object) -> str:
    """Return the `repr` of a value for a sentence, with the middle cut out if it is long.

    >>> len(shown([7] * 1000))
    200
    """
    return cut_middle(repr(value), SHOWN)


def cut_middle(text: str, most: int) -> str:
    """Return a text with its middle cut out if it has more than `most` characters.

    >>> cut_middle("abcdefghijklmnopqrstuvwxyz", 16)
    'abcdefghi ... yz'
    """
    kept = most - 5
    return text if len(text) <= most else f"{text[: kept - kept // 4]} ... {text[len(text) - kept // 4 :]}"


def text_of(error: BaseException) -> str:
    """Return the text of an error, shortened; empty if it has none, or making it fails."""
    try:
        return cut_middle(str(error).strip(), LONGEST_REASON)
    except Exception:
        return ""


def described(error: BaseException) -> str:
    """Return an error's type and text, or its type alone.

    >>> described(ValueError("no")), described(SystemExit())
    ('ValueError: no', 'SystemExit')
    """
    return ": ".join(filter(None, (type(error).__name__, text_of(error))))


def printable(text: str) -> str:
    """Replace characters that control a terminal in a recorded text, for display.

    >>> printable("a\\x1b[31mb")
    'a\ufffd[31mb'
    """
    return re.sub(CONTROL, REPLACED, text)


def check_size(text: str, kind: str = "notation") -> None:
    """Raise ValueError if a notation is too long, or its brackets too deeply nested, for a parser."""
    if len(text) > MAX_LENGTH:
        raise ValueError(f"A {kind} is written in at most {MAX_LENGTH} characters, but got {len(text)}.")
    depth = deepest = 0
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise ValueError(f"A {kind} has at most {MAX_DEPTH} nested brackets, but got {deepest}.")


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return " Did you mean ...?" with the known name closest to a mistyped `word`; "" if none is close.

    >>> suggestion("stpes", ["steps", "epochs"]), suggestion("x", ["steps"])
    (' Did you mean `steps`?', '')
    """
    if len(word) > MAX_LENGTH:
        return ""
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.7)
    return f" Did you mean `{names[near[0]]}`?" if near else ""


def known_words(word: str, known: Iterable[str], prefix: str = "", rest: str = "") -> str:
    """Return a sentence, after a space, with the name closest to an unknown `word`, or all names if none is close.

    `prefix` precedes each name. `rest`: alternatives to the names, in words.

    >>> known_words("stpes", ["steps", "epochs"], "run."), known_words("x", ["steps", "epochs"])
    (' Did you mean `run.steps`?', ' Known: steps, epochs.')
    """
    names = list(known)
    near = suggestion(word, names).replace("`", f"`{prefix}", 1)
    return near or f" Known: {', '.join(prefix + name for name in names)}{rest}."


class Method(NamedTuple):
    """A notation as read, without its class: a name and its arguments, which may be methods themselves."""

    name: str
    arguments: tuple[Any, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    def __repr__(self) -> str:
        written = [*map(repr, self.arguments), *(f"{name}={value!r}" for name, value in self.options)]
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
    """Return a recorded notation, whose class need not be installed; None if it is not one method.

    >>> read_method("ErrorFeedback(mycodecs:Strided(4))").inner.strength, read_method('["TopK(0.1)", "Identity"]')
    (4.0, None)
    """
    try:
        method = _read(text)
    except ValueError:
        return None
    return method if isinstance(method, Method) else None


def parse_notation(text: str, names: Mapping[str, type[T]], kind: str = "codec") -> T:
    """Parse a notation into its object: the inverse of `repr`, by syntax tree and never by evaluation.

    `names`: the known classes; a user's own must derive from a base of these. Raises ValueError naming the wrong part.
    """

    def construct(value: Any) -> Any:
        if not isinstance(value, Method):
            return tuple(map(construct, value)) if isinstance(value, tuple) else value
        named = {name: construct(option) for name, option in value.options}
        return _construct(value.name, list(map(construct, value.arguments)), named, text, names, kind)

    result: T = construct(_read(text, names, kind))
    if not isinstance(result, (*names.values(), *_bases(names))):
        raise ValueError(f"{text!r} is not a {kind}: expected one of {', '.join(sorted(names))}.")
    return result


def _read(text: str, names: Iterable[str] = (), kind: str = "codec") -> Any:
    """Return the methods, tuples and values of a notation, by its syntax alone; raises ValueError naming the wrong part."""
    if not isinstance(text, str):
        raise ValueError(f"A {kind} is written as text such as 'TopK(0.1)', but got {shown(text)}.")
    check_size(text, kind)
    aliases = {f"_{name}": name for name in names if not name.isidentifier()}
    source = text.strip()
    for alias, name in aliases.items():
        source = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", alias, source)
    source, paths = _hide_paths(source)
    written = aliases | paths
    example = "1F1B" if "1F1B" in names else "TopK(0.1)"
    malformed = f"{text!r} is not a {kind}: expected a name with arguments, such as '{example}'."
    if any(alias in text for alias in written):
        raise ValueError(malformed)

    def build(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int() | float() | str() | None as value):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
                return -value
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                return tuple(build(element) for element in elements)
            case ast.Name(id=name):
                return Method(written.get(name, name))
            case ast.Call(func=ast.Name(id=name), args=positional, keywords=keywords):
                if any(isinstance(argument, ast.Starred) for argument in positional):
                    raise ValueError(f"{text!r} is not a {kind}: `*` is not allowed in it.")
                options = tuple((keyword.arg, build(keyword.value)) for keyword in keywords if keyword.arg)
                if len(dict(options)) != len(keywords):
                    raise ValueError(f"{text!r} is not a {kind}: `**` or an argument given twice is not allowed in it.")
                return Method(written.get(name, name), tuple(map(build, positional)), options)
        raise ValueError(f"{text!r} is not a {kind}: `{ast.get_source_segment(source, node)}` is not allowed in it.")

    try:
        tree = ast.parse(source, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(malformed) from None
    try:
        return build(tree.body)
    except RecursionError:
        raise ValueError(malformed) from None


def _construct(
    name: str, positional: list[Any], named: dict[str, Any], text: str, names: Mapping[str, type[T]], kind: str
) -> T:
    """Construct an object from its class name and arguments; raises ValueError, quoting the notation `text`."""
    path = name if ":" in name else plugins.entry_points().get(name)
    if name not in names and path is None:
        if name in plugins.contrib():
            raise ValueError(
                f"`{name}` in {text!r} needs the plug-in raysim-contrib: `pip install ./contrib` in a clone of raysim."
            )
        near = suggestion(name, [*names, *plugins.entry_points()])
        raise ValueError(f"Unknown {kind} `{name}` in {text!r}.{near or known_words(name, sorted(names))}")
    cls = names[name] if name in names else _own_class(str(path), names, kind)
    signature = inspect.signature(cls)
    try:
        signature.bind(*positional, **named)
    except TypeError as error:
        bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        takes = str(inspect.Signature(bare)) if bare else "no arguments"
        raise ValueError(f"`{name}` in {text!r} takes {takes}: {error}.") from None
    try:
        return cls(*positional, **named)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{str(error).rstrip('.')} (in {text!r}).") from None


_QUOTED_OR_PATH = re.compile(rf"""'[^']*'|"[^"]*"|(?<![\w.]){plugins.PATH.pattern}""")


def _hide_paths(text: str) -> tuple[str, dict[str, str]]:
    """Replace import paths in a notation by identifiers, and return it with the paths by identifier.

    >>> _hide_paths("ErrorFeedback(mine:Half(2), key='a:b')")
    ("ErrorFeedback(_own0(2), key='a:b')", {'_own0': 'mine:Half'})
    """
    paths: dict[str, str] = {}

    def hidden(match: re.Match[str]) -> str:
        if match.group()[0] in "'\"":
            return match.group()
        alias = f"_own{len(paths)}"
        paths[alias] = match.group()
        return alias

    return _QUOTED_OR_PATH.sub(hidden, text), paths


def _own_class(path: str, names: Mapping[str, type[T]], kind: str) -> type[T]:
    """Return the user's own class; raises ValueError if it cannot be used in a notation."""
    cls = plugins.import_object(path)
    bases = _bases(names)
    if not isinstance(cls, type) or not issubclass(cls, bases):
        of = " or ".join(f"{base.__module__.rpartition('.')[0]}.{base.__name__}" for base in bases)
        raise ValueError(f"`{path}` is not a {kind}: it must be a class that derives from {of}.")
    if not dataclasses.is_dataclass(cls) or cls.__repr__ is not Notation.__repr__:
        raise ValueError(
            f"`{path}` must be declared with `@dataclass(frozen=True, repr=False)`, so that it can be written."
        )
    own: Any = cls  # `is_dataclass` narrowed the type
    return own  # type: ignore[no-any-return]


def _bases(names: Mapping[str, type[T]]) -> tuple[type[Any], ...]:
    """Return the abstract base classes of the named ones, such as Codec."""
    bases: dict[type[Any], None] = {}
    for named in names.values():
        derived = [cls for cls in named.__mro__ if issubclass(cls, Notation) and cls is not Notation]
        bases.setdefault(derived[-1])
    return tuple(bases)
