"""Names of models for headers and titles."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from raysim.files import read_text

_TYPE = re.compile(r"model_type\W+([\w-]+)")


def model_title(name: str, path: Any = None, config: Any = None) -> str:
    """Return a model's name; of `hf`, with the type of its configuration, or else the folder or name that holds it.

    `config` is a table, its text in TOML or JSON, or the path of a file.

    >>> model_title("gpt"), model_title("hf", config={"model_type": "qwen2"}), model_title("hf", "Qwen/Qwen2-0.5B")
    ('gpt', 'hf qwen2', 'hf Qwen2-0.5B')
    """
    if name != "hf":
        return name
    places = [Path(path).expanduser() / "config.json"] if isinstance(path, str) else []
    places += [Path(config).expanduser()] if isinstance(config, str) and config.endswith(".json") else []
    for text in (str(config), *map(_text, places)):
        if found := _TYPE.search(text):
            return f"hf {found[1]}"
    return f"hf {Path(path).name}" if isinstance(path, str) else name


def _text(place: Path) -> str:
    try:
        return read_text(place)
    except (OSError, ValueError):
        return ""
