"""A tracer of torch.fx that knows the shapes of tensors, so that a forward may ask for them.

Each operation also runs on fake tensors, which have a shape and no values. Sizes are therefore plain integers, by which a forward
may branch, loop or compute, except for the number of samples, which stays a symbol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from operator import attrgetter
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from raysim.workloads.fake import fake

SAMPLES = 1013  # a prime: a size that it divides may depend on the number of samples
FACTORIES = (
    "arange",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "zeros",
)  # functions that no tensor is an argument of


class FailedError(Exception):
    """An operation failed on a sample of the data."""


class ShapedTracer(fx.Tracer):
    """Traces a module on samples of a shape and a type; `values` holds the fake value of each node."""

    proxy_buffer_attributes = True  # a part of a buffer is taken where it is used, on whichever device that is

    def __init__(self, input_shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.values: dict[fx.Node, Any] = {}
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._running = False  # an operation on fake tensors, which is not traced itself
        with self._mode:
            self._sample = torch.zeros((SAMPLES, *input_shape), dtype=dtype)

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """Return the graph of a module's forward."""
        with _factories_traced(self):
            graph = super().trace(root, concrete_args)
        self._ask_nearby(graph)
        for node in reversed(graph.nodes):
            if node.op == "call_method" and node.target == "size" and not node.users:  # a size that was not used
                graph.erase_node(node)
        return graph

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return the symbol of a node's value."""
        return _ShapedProxy(node, self)

    def create_proxy(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        """Return the symbol of an operation's result, and run the operation."""
        proxy: fx.Proxy = super().create_proxy(*args, **kwargs)
        if proxy.node not in self.values:
            self.values[proxy.node] = self._run(proxy.node)
        return proxy

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Trace a submodule, or run it."""
        return forward(*args, **kwargs) if self._running else super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Return the symbol of a parameter, or the parameter where an operation runs."""
        return attr_val if self._running else super().getattr(attr, attr_val, parameter_proxy_cache)

    def _ask_nearby(self, graph: fx.Graph) -> None:
        """Let operations on tensors ask these for the number of samples, so that it need not cross a cut."""
        for node in list(graph.nodes):
            if node.op != "call_method" or node.target != "size" or self.values[node] != SAMPLES:
                continue
            for user in list(node.users):
                tensors = [x for x in user.all_input_nodes if x.op != "get_attr" and isinstance(self.values[x], Tensor)]
                source = next((x for x in tensors if self.values[x].shape[:1] == (SAMPLES,)), None)
                if source is not None and source is not node.args[0]:
                    with graph.inserting_before(user):
                        near = graph.call_method("size", (source, 0))
                    near.meta, self.values[near] = dict(user.meta), SAMPLES
                    user.replace_input_with(node, near)

    def _value(self, node: fx.Node) -> Any:
        if node not in self.values:  # a tensor that the forward made of plain numbers
            self.values[node] = self._run(node)
        return self.values[node]

    def _run(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return node.args[0] if self.values and node.args else self._sample
        if node.op == "output":
            return None
        args: Any = fx.node.map_arg(node.args, self._value)
        kwargs: Any = fx.node.map_arg(node.kwargs, self._value)
        before, self._running = self._running, True
        try:
            with fake(self._mode), torch.no_grad():
                if node.op == "get_attr":
                    return attrgetter(str(node.target))(self.root)
                if node.op == "call_module":
                    return self.root.get_submodule(str(node.target)).forward(*args, **kwargs)
                if node.op == "call_method":
                    return getattr(args[0], str(node.target))(*args[1:], **kwargs)
                assert callable(node.target)
                return node.target(*args, **kwargs)
        except Exception as error:
            raise FailedError(str(error).strip() or type(error).__name__) from error
        finally:
            self._running = before


class _ShapedProxy(fx.Proxy):
    """A symbol that answers with the sizes of its tensor."""

    tracer: ShapedTracer

    @property
    def shape(self) -> Any:
        return self.size()

    @property
    def ndim(self) -> Any:
        return self.dim()

    def dim(self) -> Any:
        value = self.tracer.values[self.node]
        return value.ndim if isinstance(value, Tensor) else self.tracer.create_proxy("call_method", "dim", (self,), {})

    def size(self, dim: Any = None) -> Any:
        value = self.tracer.values[self.node]
        if not isinstance(value, Tensor):
            return self.tracer.create_proxy("call_method", "size", (self,) if dim is None else (self, dim), {})
        if dim is not None:
            return self._size(value, dim)
        return tuple(self._size(value, place) for place in range(value.ndim))

    def _size(self, value: Tensor, place: int) -> Any:
        size = value.shape[place]
        return size if size % SAMPLES else self.tracer.create_proxy("call_method", "size", (self, place), {})


@contextmanager
def _factories_traced(tracer: ShapedTracer) -> Iterator[None]:
    """Trace the functions that make tensors of numbers, where one of these is a symbol."""

    def traced(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(leaf, fx.Proxy) for leaf in pytree.tree_leaves((args, kwargs))):
                return tracer.create_proxy("call_function", function, args, kwargs)
            return function(*args, **kwargs)

        return run

    with ExitStack() as stack:
        for name in FACTORIES:
            stack.enter_context(mock.patch.object(torch, name, traced(getattr(torch, name))))
        yield
