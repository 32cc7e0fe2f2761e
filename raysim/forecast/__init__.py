"""Prices of runs that were never made: compute, packets and memory worked out from a configuration."""
