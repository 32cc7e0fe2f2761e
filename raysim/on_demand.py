"""torch, imported on first use: checking names and arguments of codecs without it takes a tenth of the time."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


class OnDemand:
    """A module imported on the first access to one of its attributes.

    >>> OnDemand("math").floor(1.5)
    1
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, value)  # later accesses skip this method
        return value


if TYPE_CHECKING:
    import torch as torch
else:
    torch = OnDemand("torch")
