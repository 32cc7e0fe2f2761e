"""A training run around the engine: steps, evaluations, checkpoints, the simulated clock and the tables of records."""
