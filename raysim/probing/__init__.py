"""Measuring the effect of compression on the messages of a training that already runs, without changing it."""

from raysim.probing.candidates import Probe

probe = Probe  # a context manager, written as a function is

__all__ = ["Probe", "probe"]
