"""Training runs: steps, evaluations, checkpoints, the simulated clock and the tables of records."""
