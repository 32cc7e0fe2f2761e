"""Measuring the effect of compression on the messages of a training that already runs, without changing it."""

from raysim.probing.probes import Probe, probe

__all__ = ["Probe", "probe"]
