"""Any module as a chain of layers: its forward is traced by torch.fx and split at the ends of its submodules.

A split is possible where all live values (computed before it and used after it) are tensors. A single tensor crosses as it is;
several cross as a dictionary, under the names of the submodules that computed them.

Each operation also runs on fake tensors while it is traced. Sizes are therefore plain integers, so a forward may branch, loop
or compute with them; only the number of samples stays a symbol.
"""

from __future__ import annotations

import inspect
import os
import pickle
import random
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from itertools import pairwise
from operator import attrgetter, getitem
from types import TracebackType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from raysim.workloads.options import reason_of
from raysim.workloads.splits import DataShape
from raysim.workloads.weightless import fake


def traced(model: nn.Module, shape: DataShape, cuts: Sequence[str] = (), num_stages: int = 1) -> nn.Sequential:
    """Return the layers of a module, each named after its last submodule (`encoder/3` for `encoder.3`).

    A layer ends wherever a submodule ends and just one tensor is alive, and at the submodules `cuts` even if several
    tensors are. For several stages, a layer `block+` also ends where the operations after a submodule leave one tensor, as in
    `x + block(x)`; inside a submodule that ends with one tensor, only if there are fewer layers than `num_stages`. If there
    still are, a layer ends at every submodule. Raises ValueError with the line of code that cannot be traced.

    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
    ...     def forward(self, x):
    ...         return self.head(self.body(x.flatten(1)).relu())
    >>> layers = traced(Net(), DataShape((1, 2, 2), "float32", 2))
    >>> [name for name, _ in layers.named_children()]
    ['body', 'head']
    """
    graph = _Operations(model, shape)
    last = len(graph.nodes) - 1
    layers = {0: ""}  # names of the layers by the index of their last operation
    with_several, joined = dict[int, str](), dict[int, str]()
    named = {cut.replace(".", "/") for cut in cuts}
    for name, i in graph.ends:
        alive = [graph.tensors.get(node) for node in graph.alive(i)]
        if i == last or not alive or None in alive:
            continue
        after = graph.joined(i) if len(alive) > 1 else None
        if after is not None:
            (layers if f"{name}+" in named else joined)[after] = f"{name}+"
        if name in named:
            layers[i] = name
        elif len(alive) == 1:
            layers.setdefault(i, name)
        elif any(dtype.is_floating_point for dtype in alive if dtype is not None):
            with_several.setdefault(i, name)
    if num_stages > 1:  # residual blocks cannot be split otherwise
        whole = tuple(f"{name}/" for name in layers.values())
        layers = {i: name for i, name in joined.items() if not name.startswith(whole)} | layers
    for others in (joined, with_several):
        if len(layers) < num_stages:
            layers = others | layers
    head = next((name for name, i in graph.ends if i == last), "output")
    layers[last] = head if head not in layers.values() else f"{head}_"
    parts = {layers[stop]: graph.part(start, stop) for start, stop in pairwise(sorted(layers)) if stop > 0}
    return nn.Sequential(OrderedDict(parts))


class _Operations:
    """The operations of a module's forward in order, the dtypes of their tensors, and the ends of its submodules."""

    def __init__(self, model: nn.Module, shape: DataShape) -> None:
        self.model = model
        self.graph, self.tensors = _trace(model, shape)
        self.nodes = [node for node in self.graph.nodes if node.op not in ("output", "get_attr")]  # the input first
        last: dict[str, int] = {}
        for i, node in enumerate(self.nodes):
            paths = [str(path) for path, _ in node.meta.get("nn_module_stack", {}).values()]
            for path in [*paths, *([str(node.target)] if node.op == "call_module" else [])]:
                if path:
                    last[path.replace(".", "/")] = i
        # each submodule and the index of its last operation; if several end together, the outer ones come first
        self.ends = sorted(last.items(), key=lambda item: (item[1], item[0].count("/")))

    def alive(self, index: int) -> list[fx.Node]:
        """Return the live nodes at an index: computed up to it and used after it."""
        early = set(self.nodes[: index + 1])
        return [node for node in self.nodes[: index + 1] if any(user not in early for user in node.users)]

    def joined(self, index: int) -> int | None:
        """Return the next index at which only one floating-point tensor is alive; None if the next submodule comes first."""
        ends = {end for _, end in self.ends}
        for after in range(index + 1, len(self.nodes) - 1):
            if self.nodes[after].op == "call_module" or after in ends:
                return None
            alive = self.alive(after)
            if len(alive) == 1 and alive[0] in self.tensors and self.tensors[alive[0]].is_floating_point:
                return after
        return None

    def part(self, start: int, stop: int) -> nn.Module:
        """Return a module of the operations after index `start` up to `stop`."""
        part = fx.Graph()
        received = part.placeholder("x")
        names = self._names(start)
        values = {node: part.call_function(getitem, (received, name)) for node, name in names.items() if len(names) > 1}
        if len(names) == 1:
            values[next(iter(names))] = received

        def value(node: fx.Node) -> fx.Node:
            if node.op == "get_attr" and node not in values:  # a parameter, copied into each layer that uses it
                values[node] = part.node_copy(node)
            return values[node]

        for node in self.nodes[start + 1 : stop + 1]:
            values[node] = part.node_copy(node, value)
        result = next(node for node in self.graph.nodes if node.op == "output").args[0]
        if stop < len(self.nodes) - 1:
            sent = {name: node for node, name in self._names(stop).items()}
            result = sent if len(sent) > 1 else next(iter(sent.values()))
        part.output(fx.map_arg(result, value))
        return fx.GraphModule(self.model, part)

    def _names(self, index: int) -> dict[fx.Node, str]:
        """Return the live tensors at an index, each named after the outermost submodule that returns it."""
        results: dict[fx.Node, str] = {}
        for name, end in self.ends:
            results.setdefault(self.nodes[end], name.replace("/", "_"))
        taken = {node.name: node for node in self.nodes}
        return {
            node: name if taken.get(name := results.get(node, node.name), node) is node else node.name
            for node in self.alive(index)
        }


def _trace(model: nn.Module, shape: DataShape) -> tuple[fx.Graph, dict[fx.Node, torch.dtype]]:
    """Return the graph of a module's forward, and the dtype of each tensor node.

    Raises ValueError with the line that cannot be traced.
    """
    name = type(model).__name__
    first, *others = inspect.signature(model.forward).parameters.values()
    needed = [each.name for each in others if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    if needed:
        raise ValueError(
            f"{name} cannot be cut: its forward needs more than one input, {first.name} and {', '.join(needed)}."
        )
    constants = {each.name: each.default for each in others if each.default is not each.empty}
    dtype = torch.int64 if shape.input_dtype == "int64" else torch.float32
    graphs = []
    training = model.training
    for mode, samples in ((True, SAMPLES), (False, SAMPLES), (False, OTHER_SAMPLES)):
        for constant in [each for each in vars(model) if each.startswith("_tensor_constant")]:
            delattr(model, constant)  # left by an earlier trace
        shaped, drawn = ShapedTracer(shape.input_shape, dtype, samples), _random_states()
        try:
            graphs.append((shaped.trace(model.train(mode), concrete_args=constants or None), shaped))
        except Exception as error:
            failure = f"failed on samples of shape {shape.input_shape}"
            problem = failure if isinstance(error, FailedError) else "cannot be cut"
            raise ValueError(f"{name} {problem}: {_line(error.__traceback__)}: {reason_of(error)}.") from error
        finally:
            model.train(training)
        if _random_states() != drawn:
            raise ValueError(
                f"{name} cannot be cut: its forward draws random numbers that would be the same in every step. Use modules such as "
                "nn.Dropout, or functions of a tensor such as torch.rand_like."
            )
    trained, evaluated, of_others = (_lines(graph, tracer) for graph, tracer in graphs)
    if trained != evaluated:
        raise ValueError(
            f"{name} cannot be cut: its forward does not do the same in training and evaluation ({_differing(trained, evaluated)}). "
            "Use modules such as nn.Dropout, which know the mode themselves."
        )
    if evaluated != of_others:
        raise ValueError(
            f"{name} cannot be cut: its forward computes a number from the number of samples, which would be the same for any "
            f"({_differing(evaluated, of_others)}). Compute with `x.shape[0]` of a tensor that has all samples, or with tensors."
        )
    graph, tracer = graphs[1]
    kept = tuple(f"{node.target}." for node in graph.nodes if node.op == "call_module")
    for path, module in model.named_modules():
        if _is_constrained(module) and not f"{path}.".startswith(kept):
            called = f"`{path}`" if path else "itself"
            raise ValueError(
                f"{name} cannot be cut: its forward does not call {called}, whose `constrain()` would be lost. Put the constrained "
                "weights into a submodule that the forward calls."
            )
    return graph, {node: x.dtype for node, x in tracer.values.items() if isinstance(x, Tensor)}


def _lines(graph: fx.Graph, tracer: ShapedTracer) -> list[str]:
    """Return the code of a graph, and the shapes of the constants in it."""
    constants = [f"{node.target}: {tuple(tracer.values[node].shape)}" for node in graph.nodes if node.op == "get_attr"]
    return [*graph.python_code("self").src.splitlines(), *constants]


def _differing(lines: Sequence[str], others: Sequence[str]) -> str:
    pairs = zip(lines, others, strict=False)
    return next((a.strip() for a, b in pairs if a != b), "its number of operations")


def _is_constrained(module: nn.Module) -> bool:
    """Return whether a module has a method to be called after each update."""
    return callable(getattr(module, "constrain", None))


def _random_states() -> bytes:
    """Return the states of the global generators of torch, numpy and Python."""
    return pickle.dumps((torch.get_rng_state().numpy(), np.random.get_state(), random.getstate()))


def _line(trace: TracebackType | None) -> str:
    """Return the last line of code in a traceback that belongs neither to torch nor to this module."""
    frames = traceback.extract_tb(trace)
    outside = [
        frame for frame in frames if f"{os.sep}torch{os.sep}" not in frame.filename and frame.filename != __file__
    ]
    if not outside:
        return "torch.fx cannot trace it"
    last = outside[-1]
    return f"{last.filename}:{last.lineno}, `{last.line}`"


SAMPLES, OTHER_SAMPLES = 1013, 1019  # primes, so that only sizes that they divide stay symbols
FACTORIES = ("arange", "empty", "eye", "full", "linspace", "ones", "zeros")  # functions without tensor arguments


class FailedError(Exception):
    """An operation failed on a sample of the data."""


class ShapedTracer(fx.Tracer):
    """Traces a module on samples of a given shape and dtype; `values` holds the fake value of each node."""

    proxy_buffer_attributes = True  # buffers are indexed at run time, on the device of the stage

    def __init__(self, input_shape: tuple[int, ...], dtype: torch.dtype, samples: int) -> None:
        super().__init__()
        self.samples = samples
        self.values: dict[fx.Node, Any] = {}
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._running = False  # whether an operation runs on fake tensors, which is not to be traced
        with self._mode:
            self._sample = torch.zeros((samples, *input_shape), dtype=dtype)

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        with _factories_traced(self), torch.enable_grad():
            graph = super().trace(root, concrete_args)
        self._ask_nearby(graph)
        for node in reversed(graph.nodes):
            if node.op == "call_method" and node.target == "size" and not node.users:  # an unused size
                graph.erase_node(node)
        return graph

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _ShapedProxy(node, self)

    def create_proxy(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        if any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):
            raise ValueError(
                "autocast in a forward would have no effect: set the run's `dtype`, or cast tensors by `to`"
            )
        proxy: fx.Proxy = super().create_proxy(*args, **kwargs)
        if proxy.node not in self.values:
            self.values[proxy.node] = self._run(proxy.node)
        computed = proxy.node.op.startswith("call_") and isinstance(self.values[proxy.node], Tensor)
        if computed and not torch.is_grad_enabled() and proxy.node.target != "detach":  # within `torch.no_grad()`
            return self.create_proxy("call_method", "detach", (proxy,), {})
        return proxy

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return _is_constrained(m) or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return forward(*args, **kwargs) if self._running else super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return attr_val if self._running else super().getattr(attr, attr_val, parameter_proxy_cache)

    def _ask_nearby(self, graph: fx.Graph) -> None:
        """Read the number of samples from the tensors of each operation, so that it need not cross a cut."""
        for node in list(graph.nodes):
            if node.op != "call_method" or node.target != "size" or self.values[node] != self.samples:
                continue
            for user in list(node.users):
                tensors = [x for x in user.all_input_nodes if x.op != "get_attr" and isinstance(self.values[x], Tensor)]
                source = next((x for x in tensors if self.values[x].shape[:1] == (self.samples,)), None)
                if source is not None and source is not node.args[0]:
                    with graph.inserting_before(user):
                        near = graph.call_method("size", (source, 0))
                    near.meta, self.values[near] = dict(user.meta), self.samples
                    user.replace_input_with(node, near)

    def _value(self, node: fx.Node) -> Any:
        if node not in self.values:  # a tensor that the forward made from plain numbers
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
    """A symbol with the known sizes of its tensor."""

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
        return tuple(self._size(value, axis) for axis in range(value.ndim))

    def _size(self, value: Tensor, axis: int) -> Any:
        size = value.shape[axis]
        return size if size % self.tracer.samples else self.tracer.create_proxy("call_method", "size", (self, axis), {})


@contextmanager
def _factories_traced(tracer: ShapedTracer) -> Iterator[None]:
    """Trace the functions that create tensors from numbers if one of the numbers is a symbol."""

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
