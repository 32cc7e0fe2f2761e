"""Copies of a model with some modules replaced by placeholders, so that its own forward runs only the rest."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class Call:
    """The last call of a placeholder, and the tensor to return instead of its input.

    A plain object, because setting an attribute of a module costs more than the call itself.
    """

    def __init__(self) -> None:
        self.given: Tensor | None = None
        self.forget()

    def forget(self) -> None:
        """Drop the tensors of the last call."""
        self.arrived: Any = None
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})


class Hole(nn.Module):
    """A placeholder for a module: keeps the arguments of its last call, and returns its input, or a given tensor.

    Other attributes are looked up on the replaced module, with tensors on the meta device, since models read types and
    sizes from them.
    """

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        self._replaced = _Replaced(replaced)
        self.call = Call()

    def forward(self, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return the given tensor, or else `x`."""
        call = self.call
        call.arrived, call.arguments = x, (args, kwargs)
        return x if call.given is None else call.given

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
            return getattr(self._replaced.module, name)


class _Replaced:
    """A module without its memory, which is no submodule of a hole and is not copied with it."""

    def __init__(self, module: nn.Module) -> None:
        state: dict[int, Any] = {id(x): x.detach().to("meta") for x in [*module.parameters(), *module.buffers()]}
        self.module = copy.deepcopy(module, state)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Replaced:
        return self


def without(model: nn.Module, names: Iterable[str]) -> nn.Module:
    """Return a copy of `model` with a `Hole` for each named submodule that exists.

    The copy shares the parameters that are left, and has buffers of its own.
    """
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    for name in names:
        module = _submodule(model, name)
        if module is not None:
            memo[id(module)] = Hole(module)
    return copy.deepcopy(model, memo)


def holes(model: nn.Module) -> tuple[Hole, ...]:
    """Return the holes of a model in the order of its modules."""
    return tuple(module for module in model.modules() if isinstance(module, Hole))


@contextmanager
def filled(some: Iterable[Hole], x: Tensor | None = None) -> Iterator[None]:
    """Let holes return `x` if it is given; at the end they forget the arguments of their calls."""
    calls = [hole.call for hole in some]
    for call in calls:
        call.given = x
    try:
        yield
    finally:
        for call in calls:
            call.given = None
            call.forget()


def _submodule(model: nn.Module, name: str) -> nn.Module | None:
    """Return a submodule by its dotted name; None if it is absent."""
    found: Any = model
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, nn.Module) else None
