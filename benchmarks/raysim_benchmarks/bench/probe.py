"""The cost of a probe: the same training with and without one around it, in turn.

A GPT is trained in one process by a plain loop. A turn is some steps without a probe, as many with a probe that samples every
tenth step, and as many with one that samples every step.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raysim.pipeline.optimizer import make_optimizer
from raysim.pipeline.prepare import Workload, prepare
from raysim.probing import probe
from raysim.workloads.losses import CrossEntropy
from raysim_benchmarks.harness import Comparison, alternate, print_comparisons, seconds_of, torch_threads
from raysim_benchmarks.workload import WARMUP_STEPS, bench_config

CANDIDATES = ("TopK(0.05)", "Quantize(4)")
EVERY = (10, 1)


def bench_probe(*, turns: int = 5, steps: int = 10, threads: int = 1) -> dict[str, Any]:
    """Measure and print; return the figures, seconds a step of every turn among them."""
    with torch_threads(threads):
        loop = PlainLoop(prepare(bench_config(4)))
        for every in (None, 1):
            loop.step_s(every, WARMUP_STEPS)
        sides = {"without": partial(loop.step_s, None, steps)}
        sides |= {str(every): partial(loop.step_s, every, steps) for every in EVERY}
        turned = alternate(sides, turns)
    comparisons = [
        Comparison(
            {"every": every},
            "without",
            "with",
            [{"without": run["without"], "with": run[str(every)]} for run in turned],
        )
        for every in EVERY
    ]
    probes = f"a probe of {' and '.join(CANDIDATES)} at 3 cuts, which samples one step in `every`"
    print_comparisons(f"A step of a GPT without and with {probes}, median of {turns} turns", comparisons)
    results = [comparison.figures() for comparison in comparisons]
    return {"torch": torch.__version__, "threads": threads, "steps": steps, "turns": turns, "results": results}


class PlainLoop:
    """A plain torch loop that trains all stages of a workload in one process."""

    def __init__(self, workload: Workload) -> None:
        self.plan, self.data = workload.plan, workload.data.train
        self.model = nn.Sequential(*workload.modules)
        optimizer = make_optimizer(self.plan.config.optimizer, self.model.named_parameters())
        assert optimizer is not None
        self.optimizer = optimizer
        self._step = 0

    def step_s(self, every: int | None, steps: int) -> float:
        """Return the mean seconds of `steps` steps, with a probe that samples one step in `every` (None: no probe)."""
        cuts = [str(i) for i in range(len(self.model) - 1)]
        microbatches = self.plan.config.num_microbatches
        with tempfile.TemporaryDirectory() as folder, ExitStack() as around:
            if every is not None:
                around.enter_context(
                    probe(
                        self.model,
                        cuts,
                        CANDIDATES,
                        out=Path(folder),
                        steps=steps,
                        every=every,
                        num_microbatches=microbatches,
                    )
                )
            return seconds_of(lambda: self._train(steps)) / steps

    def _train(self, steps: int) -> None:
        """Train for `steps` steps."""
        config = self.plan.config
        for _ in range(steps):
            for microbatch in range(config.num_microbatches):
                epoch, ids = self.plan.microbatch(self._step, microbatch)
                x, targets = self.data.inputs(ids, epoch, config.seed, True), self.data.targets(ids)
                loss = CrossEntropy()(self.model(x), targets) / config.num_microbatches
                loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad()
            self._step += 1
