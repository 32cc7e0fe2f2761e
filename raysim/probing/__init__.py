"""Measure how compression would affect the messages of a running training, without changing it."""

from raysim.probing.branching import Branch, TrainingSnapshot, branches
from raysim.probing.probes import Probe, probe

__all__ = ["Branch", "Probe", "TrainingSnapshot", "branches", "probe"]
