"""Measuring the effect of compression on the messages of a training that already runs, without changing it."""

from raysim.probing.branching import Branch, Snapshot, branches
from raysim.probing.probes import Probe, probe

__all__ = ["Branch", "Probe", "Snapshot", "branches", "probe"]
