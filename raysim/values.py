"""Values that cross a boundary: one tensor, or a dictionary of named tensors.

Tensors of floating-point numbers are compressed, each by a compressor of its own, and have a gradient. Tensors of integers
and booleans, such as masks, positions and token types, are sent as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

Value: TypeAlias = "Tensor | dict[str, Tensor]"

EXACT = ("bool", "uint8", "int8", "int16", "int32", "int64")  # types of the tensors that are sent as they are
UNNAMED = ""
"""The name of a tensor that crosses a boundary alone, without a dictionary."""


class BoundaryTensors(NamedTuple):
    """The tensors that cross a boundary with one microbatch, by name."""

    shapes: dict[str, tuple[int, ...]]  # of the tensors of floating-point numbers
    exact_bytes: dict[str, int]  # of the tensors of integers and booleans, as they are sent

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the only tensor of floating-point numbers."""
        (shape,) = self.shapes.values()
        return shape

    @property
    def several(self) -> bool:
        """True if more than one tensor crosses."""
        return len(self.shapes) + len(self.exact_bytes) > 1


def split(value: Value) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of floating-point numbers by name, and the tensors of integers and booleans.

    A tensor without a dictionary is among the first, as `UNNAMED`, of any type. Raises ValueError if named tensors are not of
    the kinds that may cross a boundary.

    >>> import torch
    >>> split({"hidden": torch.ones(1), "mask": torch.tensor([True])})
    ({'hidden': tensor([1.])}, {'mask': tensor([True])})
    """
    if not isinstance(value, dict):
        return {UNNAMED: value}, {}
    exact = {name: x for name, x in value.items() if kind(x) in EXACT}
    floats = {name: x for name, x in value.items() if name not in exact}
    if not floats or not all(x.is_floating_point() for x in floats.values()):
        held = ", ".join(f"`{name}` ({kind(x)})" for name, x in value.items()) or "none"
        raise ValueError(
            f"Of the tensors that cross a boundary, one or more must hold floating-point numbers, and the others integers or "
            f"booleans, but got {held}."
        )
    if UNNAMED in value:
        raise ValueError("Tensors that cross a boundary together must have names, but one has an empty name.")
    return floats, exact


def join(floats: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> Value:
    """Return the value of which `split` returned the parts."""
    return floats.get(UNNAMED, {**floats, **exact})


def split_one(value: Value) -> tuple[Tensor, str, dict[str, Tensor]]:
    """Return the only tensor of floating-point numbers of a value, its name, and the tensors of integers and booleans."""
    floats, exact = split(value)
    ((name, x),) = floats.items()
    return x, name, exact


def only(value: Value) -> Tensor:
    """Return the tensor of a value that has no others beside it."""
    assert not isinstance(value, dict), f"one tensor is expected here, but got {', '.join(value)}"
    return value


def sent_bytes(x: Tensor) -> int:
    """Return the bytes that a tensor of integers or booleans takes on the wire: booleans are sent as bits."""
    return -(-x.numel() // 8) if kind(x) == "bool" else x.numel() * x.element_size()


def kind(x: Tensor) -> str:
    """Return the name of a tensor's type."""
    return str(x.dtype).removeprefix("torch.")
