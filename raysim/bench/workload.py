"""The GPT that benches and predictions train, and what is common to their figures."""

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


def median_interval(ordered: list[float]) -> tuple[float, float]:
    """Return an interval of the median of at least 95 %, from order statistics: no assumption on the distribution.

    >>> median_interval([1, 2, 3, 4, 5, 6, 7, 8, 9])
    (2, 8)
    """
    count = len(ordered)
    cut, tail, term = 0, 0.0, 0.5**count
    for k in range(count // 2):  # P(fewer than k+1 of count lie below the median)
        tail += term
        if 2 * tail > 0.05:
            break
        cut = k + 1
        term *= (count - k) / (k + 1)
    return ordered[max(0, cut - 1)], ordered[min(count - 1, count - cut)]
