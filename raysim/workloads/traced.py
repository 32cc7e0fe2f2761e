"""Any module as a chain of layers: its forward is traced by torch.fx and split where one of its submodules ends.

A split is possible where tensors alone are alive: values that are computed before it and used after it. One tensor crosses
as it is, several cross as a dictionary, under the names of the submodules that computed them.
"""

from __future__ import annotations

import inspect
import os
import traceback
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import getitem
from types import TracebackType

import torch
from torch import Tensor, fx, nn

from raysim.workloads import tracer
from raysim.workloads.splits import DataShape
from raysim.workloads.tracer import FailedError, ShapedTracer


def traced(model: nn.Module, shape: DataShape, cuts: Sequence[str] = (), num_stages: int = 1) -> nn.Sequential:
    """Return the layers of a module, named by the submodule with which each ends, `encoder/3` for `encoder.3`.

    A layer ends wherever a submodule ends and just one tensor is alive, and at the submodules of `cuts` where several tensors are.
    Where these layers are fewer than `num_stages`, it also ends wherever a submodule ends and several tensors are alive. Raises
    ValueError with the line of code that cannot be traced.

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
    with_several: dict[int, str] = {}
    named = {cut.replace("/", ".") for cut in cuts}
    for name, place in _ends(nodes):
        alive = [tensors.get(node) for node in _alive(nodes, place)]
        if place == len(nodes) - 1 or not alive or None in alive:
            continue
        if name in named:
            places[place] = name.replace(".", "/")
        elif len(alive) == 1:
            places.setdefault(place, name.replace(".", "/"))
        elif any(dtype.is_floating_point for dtype in alive if dtype is not None):
            with_several.setdefault(place, name.replace(".", "/"))
    if len(places) < num_stages:
        places = with_several | places
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
            reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            where = _line(error.__traceback__)
            if isinstance(error, FailedError):
                raise ValueError(
                    f"{name} failed on samples of shape {shape.input_shape}: {where}: {reason}."
                ) from error
            raise ValueError(f"{name} cannot be cut: {where}: {reason}.") from error
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
        frame
        for frame in frames
        if f"{os.sep}torch{os.sep}" not in frame.filename and frame.filename not in (__file__, tracer.__file__)
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
