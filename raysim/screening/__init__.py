"""Screen compression without training: what each candidate does to a model's loss and gradients at once."""

from raysim.screening.screen import Screen, screen

__all__ = ["Screen", "screen"]
