"""A backward split in two, as in zero-bubble pipelines (Qi et al. 2023, 2401.10241): for the input, then for the weights.

The graph is cut where it branches off to a weight. The first part runs from the output to the input, and catches the gradients
that arrive at these branches. The second part runs the branches from the caught gradients. Every kernel gets the same inputs as
in a single backward, so the gradients are equal bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node


class WeightBranch(NamedTuple):
    """A branch of the graph: the edges at which gradients arrive, and the weights that they lead to.

    `edges` is None for a branch at the outputs themselves, which starts from the gradients of the outputs.
    """

    edges: list[GradientEdge] | None
    leaves: list[Tensor]


class Caught(NamedTuple):
    """Edges, the gradients that arrived there, and the weights left to `run_branches`."""

    edges: list[GradientEdge]
    gradients: list[Tensor | None]
    leaves: list[Tensor]


def find_branches(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[WeightBranch]:
    """Return the branches where the graph of `outputs` leaves the paths to `inputs` (leaves); each weight is in one branch.

    A weight used more than once is in a branch at the outputs, so that its uses are summed in one backward as usual, at the
    cost of a second pass over the same path. The same holds for all weights if no path leads to an input.
    """
    above: dict[Node, list[Node]] = {}  # in the order found
    used: dict[Node, set[int]] = {}
    for edge in _roots(outputs):
        above.setdefault(edge.node, [])
        used.setdefault(edge.node, set()).add(edge.output_nr)
    target: list[Node] = []
    unseen = list(above)
    while unseen:
        node = unseen.pop()
        for below, output in node.next_functions:
            if below is None:
                continue
            if below not in above:
                above[below], used[below] = [], set()
                unseen.append(below)
                leaf = _leaf(below)
                target += [below] if any(leaf is x for x in inputs) else []
            above[below].append(node)
            used[below].add(output)
    way: set[Node] = set()
    while target:
        node = target.pop()
        if node not in way:
            way.add(node)
            target += above[node]
    if not way:
        leaves = [leaf for node in above if (leaf := _leaf(node)) is not None]
        return [WeightBranch(None, leaves)] if above else []
    reached = {
        node: _leaves_from([below for below, _ in node.next_functions if below is not None and below not in way])
        for node in above
        if node in way
    }
    off = _leaves_from([node for node in dict.fromkeys(edge.node for edge in _roots(outputs)) if node not in way])
    uses = Counter(id(leaf) for leaves in (off, off, *reached.values()) for leaf in leaves)  # `off`: in no branch
    branches = []
    shared: dict[int, Tensor] = {id(leaf): leaf for leaf in off}
    for node, leaves in reached.items():
        shared |= {id(leaf): leaf for leaf in leaves if uses[id(leaf)] > 1}
        alone = [leaf for leaf in leaves if uses[id(leaf)] == 1]
        if alone:
            branches.append(WeightBranch([GradientEdge(node, output) for output in sorted(used[node])], alone))
    return branches + ([WeightBranch(None, list(shared.values()))] if shared else [])


def input_gradients(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[list[Tensor | None], list[Caught]]:
    """Return the gradients of `inputs` (None if unreachable) and the argument of `run_branches`; the graph is kept."""
    if not outputs:
        return [None] * len(inputs), []
    branches = find_branches(outputs, inputs)
    edges = [edge for branch in branches for edge in branch.edges or ()]
    wanted: list[Any] = [*inputs, *edges]
    computed = torch.autograd.grad(outputs, wanted, gradients, retain_graph=True, allow_unused=True)
    arrived = iter(computed[len(inputs) :])
    at_outputs = [gradient for y, gradient in zip(outputs, gradients, strict=True) if y.grad_fn is not None]
    caught = [
        Caught(_roots(outputs), list(at_outputs), leaves)
        if at is None
        else Caught(at, [next(arrived) for _ in at], leaves)
        for at, leaves in branches
    ]
    return list(computed[: len(inputs)]), caught


def run_branches(caught: list[Caught]) -> None:
    """Add the gradients of the weights to their `.grad`, and free the graph."""
    while caught:
        edges, gradients, leaves = caught.pop(0)
        arrived = [(edge, value) for edge, value in zip(edges, gradients, strict=True) if value is not None]
        if arrived:
            at, values = zip(*arrived, strict=True)
            torch.autograd.backward(at, values, inputs=leaves, retain_graph=True)  # branches may share saved tensors


def _roots(outputs: Sequence[Tensor]) -> list[GradientEdge]:
    """Return the graph edges at which the gradients of outputs arrive; outputs without a graph have none."""
    return [GradientEdge(y.grad_fn, y.output_nr) for y in outputs if y.grad_fn is not None]


def _leaf(node: Node) -> Tensor | None:
    """Return the tensor whose gradient a node accumulates, None for other nodes."""
    leaf: Tensor | None = getattr(node, "variable", None)
    return leaf


def _leaves_from(nodes: Sequence[Node]) -> list[Tensor]:
    """Return the leaves reachable from nodes, each once."""
    leaves: dict[int, Tensor] = {}
    unseen = list(nodes)
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
