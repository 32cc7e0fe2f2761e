"""Values that cross a boundary: one tensor, or a dictionary of named tensors.

Just one of the named tensors holds floating-point numbers: it is compressed, and has a gradient. The others are masks,
positions, token types and the like, of integers or booleans, and are sent as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

Value: TypeAlias = "Tensor | dict[str, Tensor]"

EXACT = ("bool", "uint8", "int8", "int16", "int32", "int64")  # types of the tensors beside the compressed one


def split(value: Value) -> tuple[Tensor, str, dict[str, Tensor]]:
    """Return the tensor that is compressed, its name ("" where it is the only one), and the tensors beside it.

    Raises ValueError where named tensors are not of the kinds that may cross a boundary together.

    >>> import torch
    >>> split({"hidden": torch.ones(1), "mask": torch.tensor([True])})
    (tensor([1.]), 'hidden', {'mask': tensor([True])})
    """
    if not isinstance(value, dict):
        return value, "", {}
    names = [name for name, x in value.items() if _kind(x) not in EXACT]
    if len(names) != 1 or not value[names[0]].is_floating_point():
        held = ", ".join(f"`{name}` ({_kind(x)})" for name, x in value.items()) or "none"
        raise ValueError(
            f"Of the tensors that cross a boundary, just one may hold floating-point numbers, beside those of integers "
            f"and booleans, but got {held}."
        )
    return value[names[0]], names[0], {name: x for name, x in value.items() if name != names[0]}


def join(x: Tensor, name: str, beside: Mapping[str, Tensor]) -> Value:
    """Return the value of which `split` returned the parts."""
    return {name: x, **beside} if name else x


def only(value: Value) -> Tensor:
    """Return the tensor of a value that has no others beside it."""
    assert not isinstance(value, dict), f"one tensor is expected here, but got {', '.join(value)}"
    return value


def sent_bytes(x: Tensor) -> int:
    """Return the bytes that a tensor of integers or booleans takes on the wire: booleans are sent as bits."""
    return -(-x.numel() // 8) if _kind(x) == "bool" else x.numel() * x.element_size()


def _kind(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
