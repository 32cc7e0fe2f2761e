"""Any module as a chain of layers: its forward is traced by torch.fx and split where one of its submodules ends.

A split is possible where tensors alone are alive: values that are computed before it and used after it. One tensor crosses
as it is, several cross as a dictionary.
"""

from __future__ import annotations

import inspect
import os
import traceback
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from raysim.workloads.splits import DataShape


def traced(model: nn.Module, shape: DataShape) -> nn.Sequential:
    """Return the layers of a module, named by the submodule with which each ends, `encoder/3` for `encoder.3`.

    A layer ends wherever a submodule ends and just one tensor is alive. Raises ValueError with the line of code that
    cannot be traced, or where no such place is found.

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
    graph = _trace(model)
    nodes = [node for node in graph.nodes if node.op not in ("output", "get_attr")]  # the input, then all operations
    tensors = _tensors(model, graph, shape)
    places = {0: ""}  # the place of the last operation of each layer, and its name
    for name, place in _ends(nodes):
        alive = _alive(nodes, place)
        if place < len(nodes) - 1 and len(alive) == 1 and alive[0] in tensors:
            places.setdefault(place, name.replace(".", "/"))
    last = next((name for name, place in _ends(nodes) if place == len(nodes) - 1), "output").replace(".", "/")
    places[len(nodes) - 1] = last if last not in places.values() else f"{last}_"
    layers = [
        (places[stop], _part(model, graph, nodes, start, stop)) for start, stop in pairwise(sorted(places)) if stop > 0
    ]
    return nn.Sequential(OrderedDict(layers))


def _trace(model: nn.Module) -> fx.Graph:
    """Return the graph of a module's forward; raises ValueError with the line that cannot be traced."""
    name = type(model).__name__
    first, *others = inspect.signature(model.forward).parameters.values()
    needed = [each.name for each in others if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    if needed:
        raise ValueError(
            f"{name} cannot be cut: its forward needs more than one input, {first.name} and {', '.join(needed)}."
        )
    constants = {each.name: each.default for each in others if each.default is not each.empty}
    graphs = []
    training = model.training
    for mode in (True, False):
        try:
            graphs.append(fx.Tracer().trace(model.train(mode), concrete_args=constants or None))
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            raise ValueError(f"{name} cannot be cut: {_line(error.__traceback__)}: {reason}.") from error
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
    return graphs[0]


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


def _tensors(model: nn.Module, graph: fx.Graph, shape: DataShape) -> set[fx.Node]:
    """Return the nodes whose value is a tensor, found by a run that computes nothing."""
    found: set[fx.Node] = set()

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            if isinstance(value, Tensor):
                found.add(n)
            return value

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    dtype = torch.int64 if shape.input_dtype == "int64" else torch.float32
    with mode, torch.no_grad():
        try:
            Recorder(model, graph=graph).run(torch.zeros((2, *shape.input_shape), dtype=dtype))
        except Exception as error:
            reason = (str(error.__cause__ or error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            raise ValueError(
                f"{type(model).__name__} failed on a sample of shape {shape.input_shape}: {reason}."
            ) from error
    return found


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
    (received,) = _alive(nodes, start)
    values = {received: part.placeholder("x")}

    def value(node: fx.Node) -> fx.Node:
        if node.op == "get_attr" and node not in values:  # a parameter, in whichever layers use it
            values[node] = part.node_copy(node)
        return values[node]

    for node in nodes[start + 1 : stop + 1]:
        values[node] = part.node_copy(node, value)
    output = next(node for node in graph.nodes if node.op == "output")
    result = output.args[0] if stop == len(nodes) - 1 else _alive(nodes, stop)[0]
    part.output(fx.map_arg(result, value))
    return fx.GraphModule(model, part)
