"""Evaluation at one worker: whole batches go forward through its stages, and leave no trace in any memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from raysim.codecs import NonFiniteError, derive_key
from raysim.codecs.message import Message
from raysim.pipeline.errors import DivergedError, StageError
from raysim.pipeline.links import Links
from raysim.pipeline.messages import OutgoingMessage, Receive, Send, Turns
from raysim.pipeline.plan import Plan
from raysim.pipeline.reports import Evaluated, Failure
from raysim.pipeline.stage import Stage
from raysim.pipeline.state import mean_of, unpack_tensors
from raysim.values import Value, only
from raysim.workloads.splits import Data, Split


class Inference:
    """Evaluates the stages of one worker, with its own or mean parameters and a choice of BatchNorm statistics.

    `data`: held by the workers of the first and of the last stage.
    """

    def __init__(
        self,
        plan: Plan,
        replica: int,
        stages: Mapping[int, Stage],
        links: Links,
        data: Data | None,
        device: torch.device,
    ) -> None:
        self._plan = plan
        self._replica = replica
        self._stages = stages
        self._links = links
        self._data = data
        self._device = device
        self._aside: dict[int, dict[str, Tensor]] = {}  # own parameters, while a mean is evaluated

    def run(self, step: int, split: str, batches: Sequence[int], mode: str) -> Turns[list[Evaluated] | Failure]:
        """Take batches of a split through the stages of this worker, one stage after another.

        `mode` is an evaluation mode of links, see `Link.send_evaluation`. The worker of the last stage returns the sums over
        each batch, others return an empty list.
        """
        found: list[Evaluated] = []
        try:
            for index, stage in self._stages.items():
                for batch in batches:
                    message = None
                    if not stage.first:
                        (message,) = yield Receive(self._plan.worker(self._replica, index - 1), (index - 1, batch))
                    outcome = self._infer(step, index, split, batch, mode, message)
                    if isinstance(outcome, Evaluated):
                        found.append(outcome)
                    else:
                        target = self._plan.worker(self._replica, index + 1)
                        yield Send((OutgoingMessage(target, (index, batch), outcome),))
        except (DivergedError, StageError) as error:
            return Failure(None, error)
        return found

    def _infer(
        self, step: int, index: int, split: str, batch: int, mode: str, message: Message | None
    ) -> Message | Evaluated:
        """Return the message of a stage's activation, or the sums over a batch after the last stage."""
        stage, seed = self._stages[index], self._plan.config.seed
        ids = self._plan.evaluation_ids(split, batch)
        if message is None:
            x: Value = self._split(split).inputs(ids, 0, seed, False).to(self._device)
        else:
            x = self._links.ends[index - 1, "forward", False].receive_evaluation(message)
        y = stage.infer(x)
        if not stage.last:
            key = derive_key(seed, "evaluation", index, split, batch)
            try:
                return self._links.ends[index, "forward", True].send_evaluation(y, mode, key)
            except NonFiniteError:
                where = f"activation at boundary {index}, forward"
                raise DivergedError(step, f"evaluation with compression {mode}", where) from None
        targets = self._split(split).targets(ids).to(self._device)
        return Evaluated(len(targets), self._plan.task.sums(only(y), targets))

    def _split(self, name: str) -> Split:
        assert self._data is not None, "only workers with the first or the last stage hold data"
        return self._data.train if name == "train" else self._data.test

    def take_mean(self, *replicas: np.ndarray) -> None:
        """Replace this replica's parameters by the mean of the `parameters` of all; without arguments, put its own back."""
        if replicas:
            self._aside = {s: {name: x.clone() for name, x in stage.parameters()} for s, stage in self._stages.items()}
            held = [unpack_tensors(part) for part in replicas]
        for index, stage in self._stages.items():
            if replicas:
                names = [name for name, _ in stage.parameters()]
                stage.place({name: mean_of([tensors[f"{index}.{name}"] for tensors in held]) for name in names})
            else:
                stage.place(self._aside.pop(index))

    def batchnorm(self, change: str) -> None:
        """Change the BatchNorm statistics of all stages: "estimate" new ones, "use" them, or "restore" the ones of training."""
        for stage in self._stages.values():
            changes = {
                "estimate": stage.estimate_batchnorm,
                "use": stage.use_estimate,
                "restore": stage.restore_batchnorm,
            }
            changes[change]()
