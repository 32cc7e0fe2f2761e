"""Measurements of raysim on this machine, and its predictions beside real runs."""
