"""Values that cross a boundary: one tensor, or a dictionary of named tensors.

Floating-point tensors are compressed, each by its own compressor, and have a gradient. Integer and boolean tensors, such as
masks, positions and token types, are sent unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

Value: TypeAlias = "Tensor | dict[str, Tensor]"

EXACT = ("bool", "uint8", "int8", "int16", "int32", "int64")  # types of tensors sent unchanged
UNNAMED = ""
"""The name of a tensor that is sent alone, without a dictionary."""


class BoundaryTensors(NamedTuple):
    """The tensors sent across a boundary for one microbatch, by name."""

    shapes: dict[str, tuple[int, ...]]  # of floating-point tensors
    exact_bytes: dict[str, int]  # wire bytes of integer and boolean tensors

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the only floating-point tensor."""
        (shape,) = self.shapes.values()
        return shape

    @property
    def several(self) -> bool:
        """True if more than one tensor is sent."""
        return len(self.shapes) + len(self.exact_bytes) > 1


def split(value: Value) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the floating-point tensors by name, and the integer and boolean tensors.

    A tensor without a dictionary, of any type, is among the former, as `UNNAMED`. Raises ValueError if named tensors are not of
    the types that may cross a boundary.

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
            f"At least one tensor that crosses a boundary must hold floating-point numbers, and the others integers or "
            f"booleans, but got {held}."
        )
    if UNNAMED in value:
        raise ValueError("Tensors that cross a boundary together must have names, but one has an empty name.")
    return floats, exact


def join(floats: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> Value:
    """Join the parts returned by `split`."""
    return floats.get(UNNAMED, {**floats, **exact})


def split_one(value: Value) -> tuple[Tensor, str, dict[str, Tensor]]:
    """Return the only floating-point tensor of a value, its name, and the integer and boolean tensors."""
    floats, exact = split(value)
    ((name, x),) = floats.items()
    return x, name, exact


def only(value: Value) -> Tensor:
    """Return the tensor of a value with a single tensor."""
    assert not isinstance(value, dict), f"one tensor is expected here, but got {', '.join(value)}"
    return value


def sent_bytes(x: Tensor) -> int:
    """Return the wire bytes of an integer or boolean tensor; booleans are sent as bits."""
    return -(-x.numel() // 8) if kind(x) == "bool" else x.numel() * x.element_size()


def kind(x: Tensor) -> str:
    """Return the name of a tensor's type."""
    return str(x.dtype).removeprefix("torch.")
