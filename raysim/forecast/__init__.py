"""Forecasts of a run's compute, packets and memory from its configuration."""
