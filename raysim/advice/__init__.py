"""Answers without a run: steps priced from timings by hand, and the network that a model needs."""
