"""Evaluation at one worker: batches go forward through its stages, without a change to any memory."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from raysim.codecs import NonFiniteError, derive_key
from raysim.codecs.message import Message
from raysim.pipeline.boundary import Boundary
from raysim.pipeline.errors import DivergedError, StageError
from raysim.pipeline.generation import generate
from raysim.pipeline.messages import OutgoingMessage, Receive, Send, Turns
from raysim.pipeline.plan import Plan
from raysim.pipeline.reports import Evaluated, Failure
from raysim.pipeline.stage import Stage
from raysim.pipeline.state import mean_of, unpack_tensors
from raysim.values import Value, only
from raysim.workloads.splits import Data, Split


class Inference:
    """Evaluates the stages of one worker, with its own or mean parameters and a choice of BatchNorm statistics.

    `data`: of the workers with the first or the last stage.
    """

    def __init__(
        self,
        plan: Plan,
        replica: int,
        stages: Mapping[int, Stage],
        boundaries: Mapping[tuple[int, int], Boundary],
        data: Data | None,
        device: torch.device,
    ) -> None:
        self._plan = plan
        self._replica = replica
        self._stages = stages
        self._boundaries = boundaries
        self._data = data
        self._device = device
        self._own: dict[int, dict[str, Tensor]] = {}  # parameters by stage, while a mean is evaluated
        self._statistics = {index: BatchNormStatistics(stage.module) for index, stage in stages.items()}

    def run(
        self, step: int, split: str, batches: Sequence[int], mode: str, each: bool = False
    ) -> Turns[list[Evaluated] | Failure]:
        """Run batches of a split through the stages of this worker, one stage after another.

        `mode`: of the links, see `Link.send_evaluation`. `each`: with the scores of each sample. The worker of the last stage
        returns the sums over each batch, others return an empty list. If the task has a metric on generated tokens, test batches go
        through once for each token, too.
        """
        evaluated: list[Evaluated] = []
        try:
            for index, stage in self._stages.items():
                for batch in batches:
                    message = None
                    if not stage.first:
                        (message,) = yield Receive(self._plan.worker(self._replica, index - 1), (index - 1, batch))
                    outcome = self._infer(step, index, split, batch, mode, message, each)
                    if isinstance(outcome, Evaluated):
                        evaluated.append(outcome)
                    else:
                        target = self._plan.worker(self._replica, index + 1)
                        yield Send((OutgoingMessage(target, (index, batch), outcome),))
            if split == "test" and self._plan.task.generates:
                evaluated += yield from self._generate(step, batches, mode)
        except (DivergedError, StageError) as error:
            return Failure(None, error)
        return evaluated

    def _infer(
        self, step: int, index: int, split: str, batch: int, mode: str, message: Message | None, each: bool
    ) -> Message | Evaluated:
        """Return the message of a stage's activation, or, after the last stage, the sums over the batch."""
        ids, seed = self._plan.evaluation_ids(split, batch), self._plan.config.seed
        x = message if message is not None else self._split(split).inputs(ids, 0, seed, False)
        outcome = self._forward(step, index, mode, derive_key(seed, "evaluation", index, split, batch), x)
        if not isinstance(outcome, Tensor):
            return outcome
        targets = self._split(split).targets(ids).to(self._device)
        task = self._plan.task
        scores = task.each(outcome, targets) if each else None
        return Evaluated(len(targets), task.sums(outcome, targets), () if scores is None else (scores,))

    def _forward(self, step: int, index: int, mode: str, key: int, x: Message | Tensor) -> Message | Tensor:
        """Return the message of a stage's activation, or the outputs of the last stage.

        `x`: the message of the stage before, or at the first stage the data. `key`: of the link's random draws.
        """
        stage = self._stages[index]
        received: Value = (
            x.to(self._device) if isinstance(x, Tensor) else self._boundaries[index - 1, index].receive_evaluation(x)
        )
        y = stage.infer(received, self._statistics[index].estimated)
        if stage.last:
            return only(y)
        try:
            return self._boundaries[index, index].send_evaluation(y, mode, key)
        except NonFiniteError:
            where = f"activation at boundary {index}, forward"
            raise DivergedError(step, f"evaluation with compression {mode}", where) from None

    def _generate(self, step: int, batches: Sequence[int], mode: str) -> Turns[list[Evaluated]]:
        """Generate the answers of test batches, over links in an evaluation mode."""

        def forward(index: int, batch: int, position: int, x: Message | Tensor) -> Message | Tensor:
            key = derive_key(self._plan.config.seed, "generation", index, batch, position)
            return self._forward(step, index, mode, key, x)

        test = None if self._data is None else self._data.test
        return generate(self._plan, self._replica, tuple(self._stages), test, batches, forward)

    def _split(self, name: str) -> Split:
        assert self._data is not None, "only workers with the first or the last stage hold data"
        return self._data.train if name == "train" else self._data.test

    def take_mean(self, *replicas: np.ndarray) -> None:
        """Replace the parameters by the mean over all replicas; without arguments, restore the replica's own."""
        if replicas:
            self._own = {s: {name: x.clone() for name, x in stage.parameters()} for s, stage in self._stages.items()}
            loaded = [unpack_tensors(part) for part in replicas]
        for index, stage in self._stages.items():
            if replicas:
                names = [name for name, _ in stage.parameters()]
                stage.place({name: mean_of([tensors[f"{index}.{name}"] for tensors in loaded]) for name in names})
            else:
                stage.place(self._own.pop(index))

    def batchnorm(self, change: str) -> None:
        """Change the BatchNorm statistics of all stages: "estimate" new ones, "use" them, or "restore" the ones of training."""
        for statistics in self._statistics.values():
            getattr(statistics, change)()


class BatchNormStatistics:
    """The running statistics of a module's BatchNorm layers, of training or estimated anew for an evaluation."""

    def __init__(self, module: nn.Module) -> None:
        self._layers = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
        self._of_training: list[tuple[float | None, dict[str, Tensor]]] = []
        self.estimated: list[_BatchNorm] = []
        """The layers whose statistics are being estimated."""

    def estimate(self) -> None:
        """Set the statistics of training aside; until `use`, forwards average new ones."""
        self._of_training = [(layer.momentum, copy.deepcopy(dict(layer.named_buffers()))) for layer in self._layers]
        self.estimated = self._layers
        for layer in self._layers:
            layer.reset_running_stats()
            layer.momentum = None  # a plain average over batches

    def use(self) -> None:
        """Let forwards use the new statistics, until `restore`."""
        self.estimated = []

    def restore(self) -> None:
        """Put the statistics of training back."""
        for layer, (momentum, buffers) in zip(self._layers, self._of_training, strict=True):
            layer.momentum = momentum
            for name, buffer in layer.named_buffers():
                buffer.copy_(buffers[name])
        self._of_training = []
