"""The cost of a probe: the same training with and without one around it, in turn.

A GPT is trained in one process by a plain loop. A turn is some steps without a probe, and as many with probes that sample every
tenth step and every step. The figure is the ratio of seconds, turn by turn, with the interval of its median.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from raysim.bench.intervals import median_interval
from raysim.bench.workload import WARMUP_STEPS, bench_config
from raysim.pipeline.optimizer import make_optimizer
from raysim.pipeline.plan import Workload, prepare
from raysim.probing import probe
from raysim.workloads.losses import CrossEntropy

CANDIDATES = ("TopK(0.05)", "Quantize(4)")
EVERY = (10, 1)


def bench_probe(*, turns: int = 5, steps: int = 10, threads: int = 1) -> dict[str, Any]:
    """Measure and print; return the figures, seconds a step of every turn among them."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        loop = PlainLoop(prepare(bench_config(4)))
        loop.seconds(None, WARMUP_STEPS)
        loop.seconds(1, WARMUP_STEPS)
        sides: list[int | None] = [None, *EVERY]
        seconds = [
            {every: loop.seconds(every, steps) for every in (sides if turn % 2 == 0 else sides[::-1])}
            for turn in range(turns)
        ]
    finally:
        torch.set_num_threads(before)
    title = f"Seconds a step of a GPT with a probe of {' and '.join(CANDIDATES)} at 3 cuts, median of {turns} turns"
    table = Table("sampled", title=title)
    for name in ("without", "with", "ratio", "interval (covers)"):
        table.add_column(name, justify="right")
    results = []
    for every in EVERY:
        ratios = sorted(one[every] / one[None] for one in seconds)
        interval = median_interval(ratios)
        without_s, with_s = (statistics.median(one[side] for one in seconds) for side in (None, every))
        results.append(
            {
                "every": every,
                "without_s": without_s,
                "with_s": with_s,
                "ratio": statistics.median(ratios),
                **{f"ratio_{name}": value for name, value in interval._asdict().items()},
            }
        )
        cells = [f"{without_s:.3f}", f"{with_s:.3f}", f"{statistics.median(ratios):.3f}", str(interval)]
        table.add_row("every step" if every == 1 else f"one step in {every}", *cells)
    Console().print(table)
    return {"torch": torch.__version__, "threads": threads, "steps": steps, "turns": turns, "results": results}


class PlainLoop:
    """A training of all stages of a workload in one process, as one would write it in plain torch."""

    def __init__(self, workload: Workload) -> None:
        self.plan, self.data = workload.plan, workload.data.train
        self.model = nn.Sequential(*workload.modules)
        optimizer = make_optimizer(self.plan.config.optimizer, self.model.named_parameters())
        assert optimizer is not None
        self.optimizer = optimizer
        self._step = 0

    def seconds(self, every: int | None, steps: int) -> float:
        """Return the seconds of a step, over so many, with a probe that samples one step in `every`; None for no probe."""
        with tempfile.TemporaryDirectory() as folder:
            around = (
                probe(
                    self.model,
                    [str(place) for place in range(len(self.model) - 1)],
                    CANDIDATES,
                    out=Path(folder),
                    steps=steps,
                    every=every,
                    num_microbatches=self.plan.config.num_microbatches,
                )
                if every is not None
                else nullcontext()
            )
            with around:
                start = time.perf_counter()
                for _ in range(steps):
                    self._train()
                return (time.perf_counter() - start) / steps

    def _train(self) -> None:
        """Train one step."""
        config = self.plan.config
        for microbatch in range(config.num_microbatches):
            epoch, ids = self.plan.microbatch(self._step, microbatch)
            loss = CrossEntropy()(self.model(self.data.inputs(ids, epoch, config.seed, True)), self.data.targets(ids))
            (loss / config.num_microbatches).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._step += 1
