"""Run a few fixed samples forward and backward through the stages, with any candidate on the links, and record the messages."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raysim.codecs.groups import channels_last
from raysim.compressors import Context
from raysim.pipeline.link import DIRECTIONS
from raysim.pipeline.prepare import Workload
from raysim.pipeline.stage import Stage
from raysim.probing.candidates import LinkCandidate, Measured
from raysim.probing.stopwatch import Seconds
from raysim.random import derive_key
from raysim.replication.method import Gradients
from raysim.values import UNNAMED, Value, exact, floats
from raysim.workloads.losses import IGNORED, OwnLoss

Seen = Callable[[str, int, str, Tensor], None]
"""Gets the direction, boundary, name and values of each tensor to be sent."""


class Microbatch(NamedTuple):
    """Samples that go through the stages together, as those of one replica in training."""

    replica: int
    ids: NDArray[np.int64]
    inputs: Tensor
    targets: Tensor


class Outcome(NamedTuple):
    """The result of a candidate on all microbatches; its gradients stay in the stages' parameters."""

    sums: NDArray[np.float64]
    """By unit, the sums of `Task.sums`: a unit is a sample, or a microbatch if a custom loss is no mean over samples."""
    predictions: NDArray[np.int64] | None
    """The classes or tokens of highest score, by sample; None for a regression."""
    measured: Measured
    """Messages and links, as recorded by a probe."""
    seconds: Mapping[tuple[int, str], list[Seconds]]
    """Compute time of every pass by stage and op, "F" or "B"."""


class Passes:
    """The stages of a workload in evaluation mode, and the first `num_batches` batches of its test data.

    The forward of the first stage runs once, and its graph is kept for all candidates. Without `gradients` there are only forwards.
    """

    def __init__(self, workload: Workload, num_batches: int, device: torch.device, *, gradients: bool = True) -> None:
        self._backs = gradients
        self.classifies = workload.data.shape.classifies
        self.plan = plan = workload.plan
        config = plan.config
        torch.set_num_threads(config.threads_per_stage)
        self.device = device
        last = plan.num_stages - 1
        per = config.num_replicas * config.num_microbatches
        self.stages = [
            Stage(module, config, device, first=stage == 0, last=stage == last, delays=[0] * (num_batches * per))
            for stage, module in enumerate(workload.modules)
        ]
        for stage in self.stages:
            stage.module.eval()
        test, size = workload.data.test, config.microbatch_size
        self.microbatches = [
            Microbatch(
                i % per // config.num_microbatches,
                ids,
                test.inputs(ids, 0, config.seed, False).to(device),
                test.targets(ids).to(device),
            )
            for i in range(num_batches * per)
            for ids in [np.arange(i * size, (i + 1) * size)]
        ]
        self.links = [
            (direction, boundary, name)
            for boundary, tensors in enumerate(plan.boundaries)
            for direction in DIRECTIONS
            for name in tensors.shapes
        ]
        self._prefix: list[Value] = []

    def run(
        self,
        candidate: LinkCandidate,
        *,
        seen: Seen | None = None,
        after: Callable[[int], None] | None = None,
    ) -> Outcome:
        """Run all microbatches; `after` is called with the number of each when its gradients are in the parameters.

        Raises NonFiniteError if a tensor to send holds NaN or infinity.
        """
        seconds: dict[tuple[int, str], list[Seconds]] = defaultdict(list)
        self.clear()
        sums, predicted = [], []
        try:
            for i, microbatch in enumerate(self.microbatches):
                logits = self._forward(candidate, i, seconds, seen)[UNNAMED]
                sums += self._sums(logits, microbatch.targets)
                if self.classifies:
                    predicted.append(logits.detach().argmax(dim=-1).cpu())
                if self._backs:
                    self._backward(candidate, i, logits, seconds, seen)
                if after is not None:
                    after(i)
        finally:
            measured = candidate.end_step()
        predictions = torch.cat(predicted).numpy() if predicted else None
        return Outcome(np.array(sums, np.float64), predictions, measured, seconds)

    @property
    def counted(self) -> NDArray[np.bool_]:
        """True for targets counted by the loss, by sample."""
        return torch.cat([each.targets != IGNORED for each in self.microbatches]).cpu().numpy()

    def _forward(
        self, candidate: LinkCandidate, i: int, seconds: dict[tuple[int, str], list[Seconds]], seen: Seen | None
    ) -> Value:
        if i == len(self._prefix):
            with _timed(seconds[0, "F"]):
                self._prefix.append(self._through(0, i, {UNNAMED: self.microbatches[i].inputs}))
        value = self._prefix[i]
        for index in range(1, len(self.stages)):
            received = self._send(candidate, "forward", index - 1, i, value, seen)
            with _timed(seconds[index, "F"]):
                value = self._through(index, i, received)
        return value

    def _through(self, index: int, i: int, value: Value) -> Value:
        stage = self.stages[index]
        return stage.forward(i, value, self._key(index, i)) if self._backs else stage.infer(value)

    def _backward(
        self,
        candidate: LinkCandidate,
        i: int,
        logits: Tensor,
        seconds: dict[tuple[int, str], list[Seconds]],
        seen: Seen | None,
    ) -> None:
        config = self.plan.config
        with _timed(seconds[len(self.stages) - 1, "B"]):
            outputs = logits.detach().requires_grad_()
            loss = self.plan.task.loss(outputs, self.microbatches[i].targets, None)
            (loss * (config.gradient_scale / len(self.microbatches))).backward()  # type: ignore[no-untyped-call]
        assert outputs.grad is not None
        gradient: Value | None = {UNNAMED: outputs.grad}
        for index in reversed(range(len(self.stages))):
            with _timed(seconds[index, "B"]):
                gradient = self.stages[index].backward(i, gradient, keep=index == 0)
            if index > 0:
                assert gradient is not None
                gradient = self._send(candidate, "backward", index - 1, i, gradient, seen)
        first, second = seconds[len(self.stages) - 1, "B"][-2:]
        seconds[len(self.stages) - 1, "B"][-2:] = [first.plus(second)]

    def _send(
        self, candidate: LinkCandidate, direction: str, boundary: int, i: int, value: Value, seen: Seen | None
    ) -> Value:
        config, microbatch = self.plan.config, self.microbatches[i]
        # the keys of an evaluation, whose batches these are
        way = (boundary, "test", i) if direction == "forward" else (boundary, "test", i, direction)
        key = derive_key(config.seed, "evaluation", *way)
        received = {}
        for name, x in floats(value).items():
            if seen is not None:
                seen(direction, boundary, name, x)
            context = Context(
                direction=direction,
                step=0,
                epoch=0,
                microbatch=i,
                sample_ids=tuple(microbatch.ids.tolist()),
                key=derive_key(key, name) if name else key,
            )
            received[name] = candidate.send(x, boundary, context, name)
        return {**received, **exact(value)}

    def _key(self, stage: int, i: int) -> int:
        return derive_key(self.plan.config.seed, "screen", stage, i) % 2**63

    def _sums(self, logits: Tensor, targets: Tensor) -> list[tuple[float, ...]]:
        task = self.plan.task
        with torch.no_grad():
            if isinstance(task.loss, OwnLoss):  # which may not be a mean over samples
                return [task.sums(logits, targets, taught=True)]
            return [task.sums(logits[i : i + 1], targets[i : i + 1], taught=True) for i in range(len(targets))]

    def clear(self) -> None:
        """Clear the gradients in the parameters."""
        for stage in self.stages:
            stage.module.zero_grad(set_to_none=True)

    def gradients(self) -> list[Gradients]:
        """Return the gradients in the parameters, by stage; zeros where there are none."""
        return [
            {
                name: torch.zeros_like(p) if p.grad is None else p.grad
                for name, p in stage.module.named_parameters()
                if p.requires_grad
            }
            for stage in self.stages
        ]


@contextmanager
def _timed(seconds: list[Seconds]) -> Iterator[None]:
    start = Seconds(time.perf_counter(), time.process_time())
    yield
    seconds.append(Seconds(time.perf_counter() - start.wall, time.process_time() - start.cpu))


# --- statistics of the tensors at the cuts, and the groups of values that suit them -----------------------------------------


MASSIVE = 30.0
"""Largest magnitude over root mean square from which one range for a tensor wastes its levels: 8 bits of a range of +-30 root
mean squares have steps of a quarter of one."""
LARGEST = 1e-3  # share of values called the largest
MOST = 0.5  # share of the largest values whose channels and rows are counted


class TensorFacts(NamedTuple):
    """The dense messages of one link; shares are means over messages."""

    direction: str
    boundary: int
    tensor: str
    rms: float
    largest: float
    """Magnitude."""
    energy: float
    """Share of the squared norm held by the largest 0.1 % of the values."""
    channels: float
    """Share of channels that hold half of these values."""
    rows: float
    """Share of rows (tokens) that hold half of them."""

    @property
    def peak(self) -> float:
        """The largest magnitude over the root mean square."""
        return self.largest / self.rms if self.rms else 0.0

    @property
    def massive(self) -> bool:
        """True if one range for the tensor wastes its levels."""
        return self.peak >= MASSIVE


class TensorWatch:
    """Collects the facts of messages to be sent; call it with each."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int, str], list[tuple[float, int, float, float, float, float]]] = defaultdict(list)

    def __call__(self, direction: str, boundary: int, name: str, x: Tensor) -> None:
        flat = x.detach().reshape(-1).double()
        squares = flat.square()
        count = max(1, math.ceil(LARGEST * flat.numel()))
        top = squares.topk(count)
        total = float(squares.sum())
        shape = channels_last(tuple(x.shape))
        order = x.detach().reshape(-1)
        if len(shape) > 2 and shape != tuple(x.shape):  # images: channels are an inner axis
            order = x.detach().movedim(1, -1).reshape(-1)
        positions = order.abs().topk(count).indices
        width = shape[-1]
        channels = _holding(positions % width, width)
        rows = _holding(positions // width, max(1, flat.numel() // width))
        share = float(top.values.sum()) / total if total else 0.0
        entry = (total, flat.numel(), math.sqrt(float(top.values[0])), share, channels, rows)
        self._seen[direction, boundary, name].append(entry)

    def facts(self) -> list[TensorFacts]:
        """Return the facts of each link, forwards first."""
        facts = []
        for (direction, boundary, name), entries in sorted(
            self._seen.items(), key=lambda item: item[0][0] != "forward"
        ):
            totals, counts, largest, *shares = zip(*entries, strict=True)
            means = [sum(share) / len(share) for share in shares]
            rms = math.sqrt(sum(totals) / max(1, sum(counts)))
            facts.append(TensorFacts(direction, boundary, name, rms, max(largest), *means))
        return sorted(facts, key=lambda each: (each.direction != "forward", each.boundary))


def _holding(indices: Tensor, size: int) -> float:
    """Return the share of `size` groups, largest first, that hold half of the values at `indices`."""
    counts = torch.bincount(indices, minlength=size).sort(descending=True).values.cumsum(0)
    return (int((counts < MOST * int(counts[-1])).sum()) + 1) / size
