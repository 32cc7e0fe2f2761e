"""Screen compression without training: the immediate effect of each candidate on a model's loss and gradients."""

from raysim.screening.screen import Screen, screen

__all__ = ["Screen", "screen"]
