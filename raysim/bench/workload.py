"""The GPT that benches and predictions train."""

from __future__ import annotations

from raysim.config import RunConfig, make_config

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
