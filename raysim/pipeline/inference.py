"""Evaluation at one worker: forwards through its stages that do not change any memory."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from raysim.codecs import NonFiniteError, derive_key
from raysim.codecs.message import Message, bundle, unbundle
from raysim.pipeline.errors import DivergedError, StageError, blamed
from raysim.pipeline.local_stages import LocalStages
from raysim.pipeline.messages import OutgoingMessage, Receive, Send, Turns
from raysim.pipeline.reports import Evaluated, Failure
from raysim.pipeline.stage import Stage
from raysim.pipeline.state import mean_of, unpack_tensors
from raysim.values import UNNAMED
from raysim.workloads.losses import IGNORED


class Inference:
    """Evaluates the stages of one worker, with its own or averaged parameters and a choice of BatchNorm statistics."""

    def __init__(self, local: LocalStages) -> None:
        self._local = local
        self._plan = local.plan
        self._stages = local.stages
        self._own: dict[int, dict[str, Tensor]] = {}  # parameters by stage, while averaged ones are evaluated
        self._statistics = {index: BatchNormStatistics(stage.module) for index, stage in self._stages.items()}

    def run(self, step: int, split: str, batches: Sequence[int], mode: str) -> Turns[list[Evaluated] | Failure]:
        """Run batches of a split through the stages of this worker, one stage after another.

        `mode`: the links' mode, see `Link.send_evaluation`. The worker of the last stage returns the sums over each batch,
        others return an empty list. If the task has a metric on generated tokens, test batches also run once for each generated
        token.
        """
        evaluated: list[Evaluated] = []
        try:
            for index, stage in self._stages.items():
                for batch in batches:
                    message = None
                    if not stage.first:
                        (message,) = yield Receive(self._local.worker(index - 1), (index - 1, batch))
                    with blamed(f"stage {index}, evaluation after {step} steps"):
                        outcome = self._infer(step, index, split, batch, mode, message)
                    if isinstance(outcome, Evaluated):
                        evaluated.append(outcome)
                    else:
                        yield Send((OutgoingMessage(self._local.worker(index + 1), (index, batch), outcome),))
            if split == "test" and self._plan.task.generates:
                evaluated += yield from self._generate(step, batches, mode)
        except (DivergedError, StageError) as error:
            return Failure(None, error)
        return evaluated

    def _infer(
        self, step: int, index: int, split: str, batch: int, mode: str, message: Message | None
    ) -> Message | Evaluated:
        """Return the message of a stage's activation, or, after the last stage, the sums over the batch."""
        ids, seed = self._plan.evaluation_ids(split, batch), self._plan.config.seed
        x = message if message is not None else self._local.split(split).inputs(ids, 0, seed, False)
        outcome = self._forward(step, index, mode, derive_key(seed, "evaluation", index, split, batch), x)
        if not isinstance(outcome, Tensor):
            return outcome
        targets = self._local.split(split).targets(ids).to(self._local.device)
        return Evaluated(len(targets), self._plan.task.sums(outcome, targets))

    def _forward(self, step: int, index: int, mode: str, key: int, x: Message | Tensor) -> Message | Tensor:
        """Return the message of a stage's activation, or the outputs of the last stage.

        `x`: the previous stage's message, or the data at the first stage. `key` seeds the link's random draws.
        """
        stage, boundaries = self._stages[index], self._local.boundaries
        received = (
            {UNNAMED: x.to(self._local.device)}
            if isinstance(x, Tensor)
            else boundaries[index - 1, index].receive_evaluation(x)
        )
        y = stage.infer(received, self._statistics[index].estimated)
        if stage.last:
            return y[UNNAMED]
        try:
            return boundaries[index, index].send_evaluation(y, mode, key)
        except NonFiniteError:
            where = f"activation at boundary {index}, forward"
            raise DivergedError(step, f"evaluation with compression {mode}", where) from None

    def _generate(self, step: int, batches: Sequence[int], mode: str) -> Turns[list[Evaluated]]:
        """Generate the answers of test batches greedily; the worker of the last stage returns the sums over each batch.

        For each token the whole text so far goes through all stages, and the last stage returns the token with the highest score
        to the first. Ignored positions keep the token of the data.
        """
        plan, worker, last = self._plan, self._local.worker, self._plan.num_stages - 1
        ids = {batch: plan.evaluation_ids("test", batch) for batch in batches}
        targets, texts = {}, {}
        if {0, last} & self._stages.keys():
            test = self._local.split("test")
            targets = {batch: test.targets(ids[batch]) for batch in batches}
            texts = {batch: test.inputs(ids[batch], 0, plan.config.seed, False).clone() for batch in batches}
        generated = {batch: each.clone() for batch, each in targets.items()}
        for position in range(*plan.answer):
            for index in self._stages:
                for batch in batches:
                    x: Message | Tensor | None
                    if index > 0:
                        (x,) = yield Receive(worker(index - 1), ("generating", index - 1, batch, position))
                    else:
                        if position > plan.answer[0]:
                            (message,) = yield Receive(worker(last), ("generated", batch, position))
                            assert message is not None
                            counted = targets[batch][:, position - 1] != IGNORED
                            tokens = unbundle(message, len(counted))[1]["tokens"]
                            texts[batch][counted, position] = tokens[counted]
                        x = texts[batch][:, : position + 1]
                    assert x is not None
                    draws = derive_key(plan.config.seed, "generation", index, batch, position)
                    with blamed(f"stage {index}, generation after {step} steps"):
                        outcome = self._forward(step, index, mode, draws, x)
                    if not isinstance(outcome, Tensor):
                        key = ("generating", index, batch, position)
                        yield Send((OutgoingMessage(worker(index + 1), key, outcome),))
                        continue
                    tokens = generated[batch][:, position] = outcome[:, -1].argmax(dim=-1).cpu()
                    if position + 1 < plan.answer[1]:
                        message = bundle({}, {"tokens": tokens})
                        yield Send((OutgoingMessage(worker(0), ("generated", batch, position + 1), message),))
        if last not in self._stages:
            return []
        return [Evaluated(0, plan.task.generated_sums(generated[batch], targets[batch])) for batch in batches]

    def take_mean(self, *replicas: np.ndarray) -> None:
        """Replace the parameters by the mean over all replicas; without arguments, restore the replica's own."""
        loaded = [unpack_tensors(part) for part in replicas]
        for index, stage in self._stages.items():
            if replicas:
                names = self._own[index] = {name: x.clone() for name, x in stage.parameters()}
                placed = {name: mean_of([tensors[f"{index}.{name}"] for tensors in loaded]) for name in names}
            else:
                placed = self._own.pop(index)
            Stage.place(stage, placed)  # no update: a subclass keeps nothing

    def batchnorm(self, change: str) -> None:
        """Switch the BatchNorm statistics of all stages: "estimate" new ones, "use" them, or "restore" the ones from training."""
        for statistics in self._statistics.values():
            getattr(statistics, change)()


class BatchNormStatistics:
    """The running statistics of a module's BatchNorm layers: from training, or newly estimated for an evaluation."""

    def __init__(self, module: nn.Module) -> None:
        self._layers = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
        self._of_training: list[tuple[float | None, dict[str, Tensor]]] = []
        self.estimated: list[_BatchNorm] = []
        """The layers with statistics being estimated."""

    def estimate(self) -> None:
        """Set the statistics of training aside, and average new ones in the forwards until `use`."""
        self._of_training = [(layer.momentum, copy.deepcopy(dict(layer.named_buffers()))) for layer in self._layers]
        self.estimated = self._layers
        for layer in self._layers:
            layer.reset_running_stats()
            layer.momentum = None  # a plain average over batches

    def use(self) -> None:
        """Use the new statistics in forwards until `restore`."""
        self.estimated = []

    def restore(self) -> None:
        for layer, (momentum, buffers) in zip(self._layers, self._of_training, strict=True):
            layer.momentum = momentum
            for name, buffer in layer.named_buffers():
                buffer.copy_(buffers[name])
        self._of_training = []
