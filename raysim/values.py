"""Values that cross a boundary: dictionaries of named tensors. A tensor without a name is a dictionary of one, `UNNAMED`.

Floating-point tensors are compressed, each by its own compressor, and have a gradient. Integer and boolean tensors, such as
masks, positions and token types, are sent unchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

Value: TypeAlias = "dict[str, Tensor]"
ModuleValue: TypeAlias = "Tensor | dict[str, Tensor]"  # as modules take and return it

EXACT = ("bool", "uint8", "int8", "int16", "int32", "int64")  # types of tensors sent unchanged
UNNAMED = ""
"""The name of a tensor that a module takes or returns without a dictionary."""


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


def value_of(output: ModuleValue) -> Value:
    """Return the output of a module as a value.

    Raises ValueError if named tensors are not of the types that may cross a boundary.
    """
    if not isinstance(output, dict):
        return {UNNAMED: output}
    sent = floats(output)
    if not sent or not all(x.is_floating_point() for x in sent.values()):
        held = ", ".join(f"`{name}` ({kind(x)})" for name, x in output.items()) or "none"
        raise ValueError(
            f"At least one tensor that crosses a boundary must hold floating-point numbers, and the others integers or "
            f"booleans, but got {held}."
        )
    if UNNAMED in output:
        raise ValueError("Tensors that cross a boundary together must have names, but one has an empty name.")
    return output


def argument_of(value: Value) -> ModuleValue:
    """Return a value as the argument of a module, which may write to it: the inverse of `value_of`."""
    return value.get(UNNAMED, {**value})


def floats(value: Value) -> Value:
    """Return the floating-point tensors, and an unnamed tensor of any type."""
    return {name: x for name, x in value.items() if name == UNNAMED or kind(x) not in EXACT}


def exact(value: Value) -> Value:
    """Return the named tensors of integers and booleans.

    >>> import torch
    >>> exact({"hidden": torch.ones(1), "mask": torch.tensor([True])})
    {'mask': tensor([True])}
    """
    return {name: x for name, x in value.items() if name != UNNAMED and kind(x) in EXACT}


def only_float(value: Value) -> tuple[str, Tensor]:
    """Return the name of the only floating-point tensor, and the tensor."""
    (entry,) = floats(value).items()
    return entry


def sent_bytes(x: Tensor) -> int:
    """Return the wire bytes of an integer or boolean tensor; booleans are sent as bits."""
    return -(-x.numel() // 8) if kind(x) == "bool" else x.numel() * x.element_size()


def kind(x: Tensor) -> str:
    """Return the name of a tensor's type."""
    return str(x.dtype).removeprefix("torch.")
