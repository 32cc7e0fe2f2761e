"""Benchmarks of raysim on this machine, and validation of its predictions against real runs."""
