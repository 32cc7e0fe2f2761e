"""Any module as a chain of layers: its forward is traced by torch.fx and split where one of its submodules ends.

A split is possible where tensors alone are alive: values that are computed before it and used after it. One tensor crosses
as it is, several cross as a dictionary, under the names of the submodules that computed them.

Each operation is also run on fake tensors while it is traced. Sizes are therefore plain integers, by which a forward may branch, loop
or compute, except for the number of samples, which stays a symbol.
"""

from __future__ import annotations

import inspect
import os
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from itertools import pairwise
from operator import attrgetter, getitem
from types import TracebackType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from raysim.workloads.options import reason_of
from raysim.workloads.splits import DataShape
from raysim.workloads.weightless import fake


def traced(model: nn.Module, shape: DataShape, cuts: Sequence[str] = (), num_stages: int = 1) -> nn.Sequential:
    """Return the layers of a module, named by the submodule with which each ends, `encoder/3` for `encoder.3`.

    A layer ends wherever a submodule ends and just one tensor is alive, and at the submodules of `cuts` if several
    tensors are. For several stages it also ends where the operations after a submodule leave one tensor, as the sum of
    `x + block(x)` does, and is named `block+`; within a submodule that ends with one tensor only if the layers are fewer
    than `num_stages`. If they still are, it ends wherever a submodule ends. Raises ValueError with the line of code that
    cannot be traced.

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
    graph, tensors = _trace(model, shape)
    nodes = [node for node in graph.nodes if node.op not in ("output", "get_attr")]  # the input, then all operations
    places = {0: ""}  # the place of the last operation of each layer, and its name
    with_several, joined = dict[int, str](), dict[int, str]()
    named = {cut.replace("/", ".") for cut in cuts}
    for name, place in _ends(nodes):
        alive = [tensors.get(node) for node in _alive(nodes, place)]
        if place == len(nodes) - 1 or not alive or None in alive:
            continue
        after = _joined(nodes, tensors, place) if len(alive) > 1 else None
        if after is not None:
            (places if f"{name}+" in named else joined)[after] = f"{name.replace('.', '/')}+"
        if name in named:
            places[place] = name.replace(".", "/")
        elif len(alive) == 1:
            places.setdefault(place, name.replace(".", "/"))
        elif any(dtype.is_floating_point for dtype in alive if dtype is not None):
            with_several.setdefault(place, name.replace(".", "/"))
    if num_stages > 1:  # nothing else divides such a row of blocks
        whole = tuple(f"{name}/" for name in places.values())
        places = {at: name for at, name in joined.items() if not name.startswith(whole)} | places
    for others in (joined, with_several):
        if len(places) < num_stages:
            places = others | places
    last = next((name for name, place in _ends(nodes) if place == len(nodes) - 1), "output").replace(".", "/")
    places[len(nodes) - 1] = last if last not in places.values() else f"{last}_"
    layers = [
        (places[stop], _part(model, graph, nodes, start, stop)) for start, stop in pairwise(sorted(places)) if stop > 0
    ]
    return nn.Sequential(OrderedDict(layers))


def _trace(model: nn.Module, shape: DataShape) -> tuple[fx.Graph, dict[fx.Node, torch.dtype]]:
    """Return the graph of a module's forward, and the type of each node that is a tensor.

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
    for mode in (True, False):
        for constant in [each for each in vars(model) if each.startswith("_tensor_constant")]:
            delattr(model, constant)  # of the trace before
        shaped = ShapedTracer(shape.input_shape, dtype)
        try:
            graphs.append(shaped.trace(model.train(mode), concrete_args=constants or None))
        except Exception as error:
            failed = f"failed on samples of shape {shape.input_shape}"
            what = failed if isinstance(error, FailedError) else "cannot be cut"
            raise ValueError(f"{name} {what}: {_line(error.__traceback__)}: {reason_of(error)}.") from error
        finally:
            model.train(training)
    first_code, second_code = (graph.python_code("self").src for graph in graphs)
    if first_code != second_code:
        lines = zip(first_code.splitlines(), second_code.splitlines(), strict=False)
        differs = next((a.strip() for a, b in lines if a != b), "its number of operations")
        raise ValueError(
            f"{name} cannot be cut: its forward does not do the same in training and evaluation ({differs}). "
            "Use modules such as nn.Dropout, which know the mode themselves."
        )
    return graphs[-1], {node: x.dtype for node, x in shaped.values.items() if isinstance(x, Tensor)}


def _line(trace: TracebackType | None) -> str:
    """Return the last line of code in a traceback that is neither of torch nor of raysim."""
    frames = traceback.extract_tb(trace)
    outside = [
        frame for frame in frames if f"{os.sep}torch{os.sep}" not in frame.filename and frame.filename != __file__
    ]
    if not outside:
        return "torch.fx cannot trace it"
    last = outside[-1]
    return f"{last.filename}:{last.lineno}, `{last.line}`"


def _ends(nodes: Sequence[fx.Node]) -> Iterable[tuple[str, int]]:
    """Return each submodule and the place of its last operation; of submodules that end together, outer ones come first."""
    last: dict[str, int] = {}
    for place, node in enumerate(nodes):
        paths = [str(path) for path, _ in node.meta.get("nn_module_stack", {}).values()]
        for path in [*paths, *([str(node.target)] if node.op == "call_module" else [])]:
            if path:
                last[path] = place
    return sorted(last.items(), key=lambda item: (item[1], item[0].count(".")))


def _alive(nodes: Sequence[fx.Node], place: int) -> list[fx.Node]:
    """Return the nodes up to a place whose values are used after it."""
    early = set(nodes[: place + 1])
    return [node for node in nodes[: place + 1] if any(user not in early for user in node.users)]


def _joined(nodes: Sequence[fx.Node], tensors: Mapping[fx.Node, torch.dtype], place: int) -> int | None:
    """Return the first place after `place`, and before the next submodule, where one tensor of floating-point numbers is alive."""
    ends = {end for _, end in _ends(nodes)}
    for after in range(place + 1, len(nodes) - 1):
        if nodes[after].op == "call_module" or after in ends:
            return None
        alive = _alive(nodes, after)
        if len(alive) == 1 and alive[0] in tensors and tensors[alive[0]].is_floating_point:
            return after
    return None


def _part(model: nn.Module, graph: fx.Graph, nodes: Sequence[fx.Node], start: int, stop: int) -> nn.Module:
    """Return the module that computes the operations after place `start` up to `stop`."""
    part = fx.Graph()
    received = part.placeholder("x")
    names = _names(nodes, start)
    values = {node: part.call_function(getitem, (received, name)) for node, name in names.items() if len(names) > 1}
    if len(names) == 1:
        values[next(iter(names))] = received

    def value(node: fx.Node) -> fx.Node:
        if node.op == "get_attr" and node not in values:  # a parameter, in whichever layers use it
            values[node] = part.node_copy(node)
        return values[node]

    for node in nodes[start + 1 : stop + 1]:
        values[node] = part.node_copy(node, value)
    output = next(node for node in graph.nodes if node.op == "output")
    result = output.args[0]
    if stop < len(nodes) - 1:
        sent = {name: node for node, name in _names(nodes, stop).items()}
        result = sent if len(sent) > 1 else next(iter(sent.values()))
    part.output(fx.map_arg(result, value))
    return fx.GraphModule(model, part)


def _names(nodes: Sequence[fx.Node], place: int) -> dict[fx.Node, str]:
    """Return the tensors that are alive at a place, each with the name of the outermost submodule that it is the result of."""
    results: dict[fx.Node, str] = {}
    for name, end in _ends(nodes):
        results.setdefault(nodes[end], name.replace(".", "_"))
    taken = {node.name: node for node in nodes}
    return {
        node: name if taken.get(name := results.get(node, node.name), node) is node else node.name
        for node in _alive(nodes, place)
    }


SAMPLES = 1013  # a prime: a size that it divides may depend on the number of samples
FACTORIES = ("arange", "empty", "eye", "full", "linspace", "ones", "zeros")  # no argument of these is a tensor


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
        with _factories_traced(self):
            graph = super().trace(root, concrete_args)
        self._ask_nearby(graph)
        for node in reversed(graph.nodes):
            if node.op == "call_method" and node.target == "size" and not node.users:  # a size that was not used
                graph.erase_node(node)
        return graph

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _ShapedProxy(node, self)

    def create_proxy(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        proxy: fx.Proxy = super().create_proxy(*args, **kwargs)
        if proxy.node not in self.values:
            self.values[proxy.node] = self._run(proxy.node)
        return proxy

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return forward(*args, **kwargs) if self._running else super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
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
    """Trace the functions that make tensors from numbers, if one of the numbers is a symbol."""

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
