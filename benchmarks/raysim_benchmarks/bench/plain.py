"""The cost of raysim in one process: its inline engine against a plain torch loop.

Both train ResNet-18 on random images of CIFAR-10's shape, cut after the same layers, with the same weights, batches,
optimiser and threads. The loop runs the stages in sequence. An autograd function at each cut compresses the activation and
its gradient by `torch.topk` or by rounding between minimum and maximum, and sends nothing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raysim.codecs import Codec, Identity, Quantize, TopK
from raysim.config import RunConfig, make_config
from raysim.engine.inline import InlineEngine
from raysim.pipeline.optimizer import make_optimizer
from raysim.pipeline.prepare import Workload, prepare
from raysim.workloads.data import Data, DataShape, ImageSplit
from raysim_benchmarks.harness import Comparison, alternate, print_comparisons, seconds_of, torch_threads

Compression = Callable[[Tensor], Tensor]


def keep_greatest(x: Tensor, density: float) -> Tensor:
    """Return a batch that keeps the largest magnitudes of each sample, with zeros elsewhere."""
    flat = x.flatten(1)
    kept = flat.abs().topk(math.ceil(density * flat.shape[1]), dim=1, sorted=False).indices
    return torch.zeros_like(flat).scatter_(1, kept, flat.gather(1, kept)).view_as(x)


def round_between(x: Tensor, bits: int) -> Tensor:
    """Return a tensor rounded to equal steps between its minimum and its maximum."""
    low, high = x.aminmax()
    step = (high - low) / (2**bits - 1)
    return x.sub(low).div_(step).round_().mul_(step).add_(low)


CODECS: tuple[tuple[Codec, Compression | None], ...] = (
    (Identity(), None),
    (TopK(0.1), lambda x: keep_greatest(x, 0.1)),
    (Quantize(4), lambda x: round_between(x, 4)),
)
SAMPLES = 512
WARMUP_STEPS = 2


def bench_plain(*, pairs: int = 5, steps: int = 3, threads: int = 1, batch_size: int = 128) -> dict[str, Any]:
    """Measure and print; return the figures, seconds a step of every run among them."""
    comparisons = []
    for codec, compression in CODECS:
        workload = prepare(plain_config(codec, threads=threads, batch_size=batch_size), random_images())
        steps_of = {"plain": PlainLoop(workload, compression).step, "raysim": inline_step(workload)}
        sides = {name: partial(_step_s, step, count(WARMUP_STEPS), steps) for name, step in steps_of.items()}
        with torch_threads(threads):
            for step in steps_of.values():
                for number in range(WARMUP_STEPS):
                    step(number)
            runs = alternate(sides, pairs, progress=repr(codec))
        comparisons.append(Comparison({"codec": repr(codec), "steps": steps}, "plain", "raysim", runs))
    print_comparisons(f"A step of ResNet-18, median of {pairs} pairs", comparisons)
    results = [comparison.figures() for comparison in comparisons]
    return {"torch": torch.__version__, "threads": threads, "batch_size": batch_size, "results": results}


def _step_s(step: Callable[[int], float], numbers: Iterator[int], steps: int) -> float:
    """Return the mean seconds of the next `steps` steps."""
    return seconds_of(lambda: [step(number) for number in islice(numbers, steps)]) / steps


def plain_config(codec: Codec, *, threads: int, batch_size: int) -> RunConfig:
    """Return the benchmark's run: the ResNet-18 recipe with a codec in both directions, and nothing recorded."""
    return make_config(
        {
            "name": "bench-plain",
            "model": "resnet18",
            "data": "cifar10",
            "cuts": ["layer1", "layer2", "layer3"],
            "num_microbatches": 1,
            "batch_size": batch_size,
            "steps": 1_000_000,
            "forward": repr(codec),
            "backward": repr(codec),
            "threads_per_stage": threads,
            "profile_every_steps": 0,
            "optimizer": {"name": "sgd", "learning_rate": 0.01, "momentum": 0.9, "weight_decay": 5e-4},
        }
    )


def random_images() -> Data:
    """Return random images and labels of CIFAR-10's shape."""
    chance = np.random.default_rng(0)
    images = chance.integers(0, 256, (SAMPLES, 3, 32, 32), np.uint8)
    split = ImageSplit(images, chance.integers(0, 10, SAMPLES), mean=(0.5,) * 3, std=(0.25,) * 3)
    return Data(split, split, DataShape((3, 32, 32), "float32", 10))


def inline_step(workload: Workload) -> Callable[[int], float]:
    """Return a function that runs a step of the inline engine and returns its loss."""
    engine = InlineEngine(workload)
    engine.start()

    def step(number: int) -> float:
        reports = engine.step(number)
        return float(np.mean([loss for report in reports for loss in report.losses]))

    return step


class _Compressed(torch.autograd.Function):
    """The identity with compressed output and gradient."""

    @staticmethod
    def forward(context: Any, x: Tensor, compression: Compression) -> Tensor:
        context.compression = compression
        return compression(x)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return context.compression(gradients[0]), None


class _Cut(nn.Module):
    """The cut between two stages."""

    def __init__(self, compression: Compression) -> None:
        super().__init__()
        self._compression = compression

    def forward(self, x: Tensor) -> Tensor:
        compressed: Tensor = _Compressed.apply(x, self._compression)  # type: ignore[no-untyped-call]
        return compressed


class PlainLoop:
    """A training loop in plain torch, with the stages' weights and a compression at each cut."""

    def __init__(self, workload: Workload, compression: Compression | None) -> None:
        self._plan, self._data = workload.plan, workload.data
        layers: list[nn.Module] = []
        for stage in copy.deepcopy(workload.modules):
            layers += [_Cut(compression), stage] if layers and compression else [stage]
        self.model = nn.Sequential(*layers).train()
        optimizer = make_optimizer(workload.plan.config.optimizer, self.model.named_parameters())
        assert optimizer is not None
        self._optimizer = optimizer

    def step(self, number: int) -> float:
        """Train one batch and return its loss."""
        epoch, ids = self._plan.microbatch(number, 0)
        train = self._data.train
        loss = self._plan.task.loss(self.model(train.inputs(ids, epoch, 0, True)), train.targets(ids))
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())
