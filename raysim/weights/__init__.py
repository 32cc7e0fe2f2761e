"""Weights: the versions that the passes of a stage read, and when and at which rate a stage updates.

Adding a policy is a class, and a line in `POLICIES`; the laws in the tests then ask for a variant of it.
"""

from raysim.notation import parse
from raysim.weights.base import WeightPolicy
from raysim.weights.double_buffered import DoubleBuffered
from raysim.weights.pipemare import PipeMare
from raysim.weights.predicted import Predicted
from raysim.weights.stashed import Stashed
from raysim.weights.synchronous import Synchronous

POLICIES: dict[str, type[WeightPolicy]] = {
    cls.name(): cls for cls in (Synchronous, Stashed, DoubleBuffered, PipeMare, Predicted)
}


def parse_weights(text: str) -> WeightPolicy:
    """Return the weight policy that `text` writes: the inverse of `repr`. Raises ValueError, with the known names.

    >>> parse_weights("Stashed"), parse_weights("PipeMare(steps=100)")
    (Stashed, PipeMare(100))
    """
    return parse(text, POLICIES, kind="weight policy")


__all__ = ["POLICIES", "WeightPolicy", "parse_weights"]
