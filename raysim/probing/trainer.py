"""The probe as a callback of the Hugging Face Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import distributed as dist
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from raysim.probing.probes import Probe, probe_module
from raysim.probing.station import Sampling


class ProbeCallback(TrainerCallback):
    """Probes a training of the Hugging Face Trainer without changing it.

    Give `cuts` and `candidates` for training in one process; on several ranks give `gradients`, or both. A step has
    `gradient_accumulation_steps` microbatches; shorter steps at the end of an epoch are not sampled. The other arguments
    are those of `raysim.probe`, whose errors are raised when the training begins.
    """

    def __init__(
        self,
        cuts: Sequence[str] = (),
        candidates: Sequence[str] = (),
        *,
        gradients: Sequence[str] = (),
        out: str | Path,
        steps: int = 20,
        every: int = 10,
        schedule: str = "1F1B",
        seed: int = 0,
    ) -> None:
        self.probe: Probe | None = None
        self._cuts, self._candidates, self._gradients = cuts, candidates, gradients
        self._sampling = {"out": Path(out), "steps": steps, "every": every, "schedule": schedule, "seed": seed}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model: nn.Module = kwargs["model"]
        sampling = Sampling(**self._sampling, num_microbatches=args.gradient_accumulation_steps)  # type: ignore[arg-type]
        if self._gradients and not dist.is_initialized():
            raise ValueError("`gradients` must be left out for a training in one process, which has no replicas.")
        if not self._gradients and not state.is_world_process_zero:
            return  # all replicas have the same links
        group = dist.group.WORLD if self._gradients else None
        self.probe = probe_module(model, self._cuts, self._candidates, self._gradients, sampling, group)
        self.probe.__enter__()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.probe is not None:
            self.probe.end_step()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.probe is not None:
            self.probe.__exit__(None, None, None)
            self.probe = None
