"""Measuring what compression would do to a training that already runs, without changing it."""

from raysim.probing.candidates import Probe, probe

__all__ = ["Probe", "probe"]
