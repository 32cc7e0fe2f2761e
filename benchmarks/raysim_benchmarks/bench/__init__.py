"""Benchmarks, one file each: two or more things measured in turn."""
