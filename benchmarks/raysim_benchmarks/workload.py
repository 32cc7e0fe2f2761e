"""The GPT of benchmarks and validation, and the timing of its steps."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from raysim.config import RunConfig, make_config
from raysim.engine.engine import Engine
from raysim.units import format_seconds
from raysim_benchmarks.processes import by_kind, cpu_seconds, per

WARMUP_STEPS = 3


def bench_config(num_stages: int) -> RunConfig:
    """Return the benchmarks' run: 8 blocks of width 256, 128 bytes of text a sample, 32 samples in 8 microbatches."""
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


class Timing(NamedTuple):
    """Mean seconds of some steps, and CPU seconds by kind of process."""

    seconds: float
    cpu_s: dict[str, float]

    def __str__(self) -> str:
        """Return both for a progress line."""
        return f"{format_seconds(self.seconds)} a step ({sum(self.cpu_s.values()):.3f} CPU seconds)"


def time_engine(engine: Engine, steps: int) -> Timing:
    """Start, warm up, time and close an engine; return its timing."""
    try:
        engine.start()
        for step in range(WARMUP_STEPS):
            engine.step(step)
        before, start = cpu_seconds(os.getpid()), time.perf_counter()
        for step in range(WARMUP_STEPS, WARMUP_STEPS + steps):
            engine.step(step)
        seconds = time.perf_counter() - start
        return Timing(seconds / steps, per(by_kind(before, cpu_seconds(os.getpid())), steps))
    finally:
        engine.close()
