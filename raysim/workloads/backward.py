"""A backward in two parts, as in zero-bubble pipelines (Qi et al. 2023, 2401.10241): for the input, and later for the weights.

The graph is cut where it branches off to a weight. The first part runs from the output to the input, and catches the gradients
that arrive at these branches. The second part runs the branches from the caught gradients. Every kernel has the same inputs as
in one backward, so the gradients are equal bit for bit.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node


class Branch(NamedTuple):
    """Operations that use weights: the edges at which gradients arrive, and the weights to which they lead."""

    edges: list[GradientEdge]
    leaves: list[Tensor]


class Caught(NamedTuple):
    """A branch and the gradients that arrived at it, from which `run_branches` computes gradients of weights."""

    branch: Branch
    gradients: list[Tensor | None]


def find_branches(y: Tensor, x: Tensor) -> list[Branch]:
    """Return where the graph from `y` branches off the way to `x`, a leaf; all weights are in just one branch.

    A weight that is used more than once is in a branch at `y` itself: its uses add up in one backward as they always do, at
    the price of going the way again. So is everything where no way leads to `x`.
    """
    if y.grad_fn is None:
        return []
    root = GradientEdge(y.grad_fn, y.output_nr)
    above: dict[Node, list[Node]] = {root.node: []}  # in the order found
    used: dict[Node, set[int]] = {root.node: {root.output_nr}}
    target: list[Node] = []
    unseen = [root.node]
    while unseen:
        node = unseen.pop()
        for below, output in node.next_functions:
            if below is None:
                continue
            if below not in above:
                above[below], used[below] = [], set()
                unseen.append(below)
                if _leaf(below) is x:
                    target = [below]
            above[below].append(node)
            used[below].add(output)
    way: set[Node] = set()
    while target:
        node = target.pop()
        if node not in way:
            way.add(node)
            target += above[node]
    if not way:
        return [Branch([root], [leaf for node in above if (leaf := _leaf(node)) is not None])]
    reached = {node: _leaves_off(node, way) for node in above if node in way}
    uses: dict[int, int] = {}
    for leaves in reached.values():
        for leaf in leaves:
            uses[id(leaf)] = uses.get(id(leaf), 0) + 1
    branches = []
    shared: dict[int, Tensor] = {}
    for node, leaves in reached.items():
        shared |= {id(leaf): leaf for leaf in leaves if uses[id(leaf)] > 1}
        alone = [leaf for leaf in leaves if uses[id(leaf)] == 1]
        if alone:
            branches.append(Branch([GradientEdge(node, output) for output in sorted(used[node])], alone))
    return branches + ([Branch([root], list(shared.values()))] if shared else [])


def input_gradient(y: Tensor, gradient: Tensor, x: Tensor) -> tuple[Tensor | None, list[Caught]]:
    """Return the gradient of `x`, None where no path leads to it, and the input of `run_branches`; the graph is kept."""
    branches = find_branches(y, x)
    edges = [edge for branch in branches for edge in branch.edges]
    wanted: list[Any] = [x, *edges]
    found, *caught = torch.autograd.grad(y, wanted, gradient, retain_graph=True, allow_unused=True)
    arrived = iter(caught)
    return found, [Caught(branch, [next(arrived) for _ in branch.edges]) for branch in branches]


def run_branches(caught: list[Caught]) -> None:
    """Add the gradients of the weights to their `.grad`, and free the graph."""
    while caught:
        (edges, leaves), gradients = caught.pop(0)
        arrived = [(edge, value) for edge, value in zip(edges, gradients, strict=True) if value is not None]
        if arrived:
            at, values = zip(*arrived, strict=True)
            torch.autograd.backward(at, values, inputs=leaves, retain_graph=True)  # branches may share what they save


def caught_bytes(y: Tensor, x: Tensor) -> int:
    """Return the bytes of the gradients that `input_gradient` would catch, counted on the graph of `y`."""
    arriving = [edge.node._input_metadata[edge.output_nr] for branch in find_branches(y, x) for edge in branch.edges]
    return sum(math.prod(one.shape) * one.dtype.itemsize for one in arriving)


def _leaf(node: Node) -> Tensor | None:
    """Return the tensor whose gradient a node accumulates, None of other nodes."""
    leaf: Tensor | None = getattr(node, "variable", None)
    return leaf


def _leaves_off(node: Node, way: set[Node]) -> list[Tensor]:
    """Return the leaves that a node on the way reaches by leaving it at once, each once."""
    leaves: dict[int, Tensor] = {}
    unseen = [below for below, _ in node.next_functions if below is not None and below not in way]
    seen = set(unseen)
    while unseen:
        below = unseen.pop()
        leaf = _leaf(below)
        if leaf is not None:
            leaves[id(leaf)] = leaf
        for further, _ in below.next_functions:
            if further is not None and further not in seen:
                seen.add(further)
                unseen.append(further)
    return list(leaves.values())
