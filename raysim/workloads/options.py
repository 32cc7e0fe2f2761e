"""Options of models and data sets, checked without importing torch; errors name the full key (`model.width`).

Options are checked against the signature of the function that takes them; numbers of layers are derived from the options.
"""

from __future__ import annotations

import importlib
import inspect
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from raysim.notation import shown, suggestion, text_of
from raysim.plugins import import_object

HUB_S = 5.0  # timeout of the hub's first answer


def bind_options(
    section: str, name: str, function: Callable[..., object], options: Mapping[str, object]
) -> dict[str, Any]:
    """Return `options` as keyword arguments of `function`; raises ValueError for an unknown or missing option."""
    parameters = options_of(function)
    known = {parameter.name for parameter in parameters}
    takes_any = any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in inspect.signature(function).parameters.values()
    )
    for option in options:
        if option not in known and not takes_any:
            keys = ", ".join(f"{section}.{each}" for each in sorted(known)) or "none"
            near = suggestion(option, known).replace("`", f"`{section}.", 1)
            raise ValueError(f"Unknown option `{section}.{option}` of `{name}`. Known: {keys}.{near}")
    for parameter in parameters:
        if parameter.default is parameter.empty and parameter.name not in options:
            raise ValueError(f"`{section}.{parameter.name}` must be given with `{section} = {name!r}`.")
    return dict(options)


def options_of(function: Callable[..., object]) -> list[inspect.Parameter]:
    """Return the options of a function: its keyword arguments except `shape`, which the caller provides."""
    return [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD) and parameter.name != "shape"
    ]


def check_boolean(field: str, value: object) -> bool:
    """Return `value` if it is a boolean; raises ValueError naming field and value."""
    if not isinstance(value, bool):
        raise ValueError(f"`{field}` must be true or false, but got {value!r}.")
    return value


def check_path(field: str, value: object) -> Path:
    """Return `value` as the path of an existing file or folder; raises ValueError naming field and value."""
    if not isinstance(value, (str, Path)) or not str(value):
        raise ValueError(f"`{field}` must be the path of a file or folder, but got {shown(value)}.")
    try:
        path = Path(value).expanduser()
        if path.is_file() or path.is_dir():
            return path
        reason = "" if not path.exists() else ", which is neither"
    except (OSError, RuntimeError, ValueError) as error:  # path too long, or the home of an unknown user
        reason = f": {getattr(error, 'strerror', None) or error}"
    raise ValueError(f"`{field}` must be a file or folder that exists, but got {shown(str(value))}{reason}.")


def local_or_hub(field: str, value: object) -> str:
    """Return the local folder `value`, or else `value` as a hub name ("gpt2", "owner/name").

    Raises ValueError if it is neither.
    """
    if isinstance(value, (str, Path)) and str(value):
        try:
            path = Path(value).expanduser()
            if path.is_dir():
                return str(path)
            there = path.exists()
        except (OSError, RuntimeError, ValueError):
            there = True
        text = str(value)
        if not there and not text.startswith((".", "/", "~")) and text.count("/") <= 1:
            return text
    raise ValueError(f"`{field}` must be a folder that exists or a hub name, but got {shown(value)}.")


def check_hub(what: str, repository: str, file: str) -> None:
    """Raise ValueError if a hub file is neither cached on this machine nor reachable.

    Checked here because the hub's own client retries for half a minute.
    """
    hub = import_hub("huggingface_hub")
    if isinstance(hub.try_to_load_from_cache(repository, file), str):
        return
    try:
        urllib.request.urlopen(hub.constants.ENDPOINT, timeout=HUB_S).close()
    except urllib.error.HTTPError:  # the hub answered
        return
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise ValueError(
            f"{what} is a name on the hub, which does not answer ({reason}). Give the path of a folder that holds {file} instead."
        ) from None


def reason_of(error: BaseException) -> str:
    """Return the first line of an error, or else its type, for use in a sentence."""
    return (text_of(error) or type(error).__name__).splitlines()[0].rstrip(".")


def import_hub(library: str) -> Any:
    """Return an optional library; raises ValueError naming the extra that installs it."""
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise ValueError(f"`{library}` is needed and cannot be imported: `pip install raysim[hub]`.") from error


def import_function(kind: str, name: str) -> Callable[..., Any]:
    """Return the function `package.module:function`, also searching the current folder.

    Raises ValueError, whose sentence calls it a `kind` ("Model").
    """
    try:
        return import_object(name, "function")  # type: ignore[no-any-return]
    except ValueError as error:
        raise ValueError(f"{kind} {error}") from error


class Depth(NamedTuple):
    """A number of layers: `fixed` plus the value of an option, which defaults to `default`."""

    fixed: int
    option: str | None = None
    default: int = 0


DEPTHS = {
    "cnn": Depth(7),
    "gpt": Depth(2, "num_blocks", 4),
    "lstm": Depth(2, "num_layers", 2),
    "mlp": Depth(0, "num_layers", 4),
    "resnet18": Depth(6),
    "resnet101": Depth(6),
    "vgg16": Depth(8),
}


def num_layers(name: str, options: Mapping[str, object]) -> int | None:
    """Return the number of layers of a model; None if it is not known before the model is made.

    >>> num_layers("cnn", {}), num_layers("gpt", {"num_blocks": 6}), num_layers("my_package:model", {})
    (7, 8, None)
    """
    depth = DEPTHS.get(name)
    if depth is None or options.get("subspace") is not None:  # a subspace joins layers
        return None
    given = options.get(depth.option, depth.default) if depth.option else 0
    return depth.fixed + given if isinstance(given, int) and given >= 0 else None


def check_num_stages(num_stages: int, layers: int) -> None:
    """Raise ValueError for more stages than layers."""
    if num_stages > layers:
        raise ValueError(f"`num_stages` must be at most the number of layers ({layers}), but got {num_stages}.")
