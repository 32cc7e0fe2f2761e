"""Measurements of raysim on this machine, one file each, as ratios of two things timed in turn."""
