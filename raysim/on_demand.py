"""torch, imported when it is first used: names and arguments of codecs are checked without it, in a tenth of the time."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


class OnDemand:
    """Stands for a module that is imported when one of its attributes is first asked for.

    >>> OnDemand("math").floor(1.5)
    1
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, value)  # found without this method from now on
        return value


if TYPE_CHECKING:
    import torch as torch
else:
    torch = OnDemand("torch")
