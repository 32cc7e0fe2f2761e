"""The GPT that benches and predictions train, and the time of its steps."""

from __future__ import annotations

import time

from raysim.config import RunConfig, make_config
from raysim.engine.base import Engine

WARMUP_STEPS = 3


def bench_config(num_stages: int) -> RunConfig:
    """Return the bench's run: 8 blocks of width 256, 128 bytes of text a sample, 32 samples in 8 microbatches."""
    return make_config(
        {
            "name": "bench-pipeline",
            "model": {"name": "gpt", "num_blocks": 8, "width": 256, "num_heads": 8, "tied": False},
            "data": {"name": "topics", "length": 128},
            "num_stages": num_stages,
            "batch_size": 32,
            "num_microbatches": 8,
            "steps": 1_000_000,
            "optimizer": {"name": "adamw", "learning_rate": 3e-4},
        }
    )


def engine_step_s(engine: Engine, steps: int) -> float:
    """Return the mean seconds of a step of an engine, which is started, warmed up and closed."""
    try:
        engine.start()
        for step in range(WARMUP_STEPS):
            engine.step(step)
        start = time.perf_counter()
        for step in range(WARMUP_STEPS, WARMUP_STEPS + steps):
            engine.step(step)
        return (time.perf_counter() - start) / steps
    finally:
        engine.close()
