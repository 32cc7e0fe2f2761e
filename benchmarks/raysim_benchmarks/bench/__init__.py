"""Benchmarks, one file each, which measure two or more sides in turn."""
