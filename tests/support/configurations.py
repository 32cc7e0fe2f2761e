"""Configurations of small runs, which train in a second or two."""

from typing import Any

SMALL: dict[str, Any] = {
    "name": "small",
    "model": {"name": "cnn", "width": 4},
    "data": {"name": "digits", "train_samples": 64, "test_samples": 20},
    "num_stages": 3,
    "batch_size": 16,
    "num_microbatches": 4,
    "steps": 6,
    "optimizer": {"learning_rate": 0.1, "momentum": 0.9},
    "checkpoint_every_steps": 2,
    "profile_every_steps": 2,
    "timeout_s": 120,
}
