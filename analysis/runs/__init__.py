"""Runs loaded together: their frames, packs of them, and their prices."""
