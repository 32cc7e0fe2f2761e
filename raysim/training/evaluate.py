"""Evaluate a run: the same weights under each mode of the links and each kind of BatchNorm statistics."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from raysim.compressors import Compressor
from raysim.engine.engine import Engine
from raysim.pipeline.errors import DivergedError
from raysim.pipeline.plan import Plan
from raysim.records import Recorder
from raysim.training.events import Event, Interruption


class Evaluator:
    """Evaluates a run at the configured steps and at its end, and records the results in `evals`."""

    def __init__(self, plan: Plan, engine: Engine, recorder: Recorder, ending: Interruption) -> None:
        self._plan = plan
        self._engine = engine
        self._recorder = recorder
        self._ending = ending

    @property
    def passes(self) -> list[tuple[str, str]]:
        """The passes of an evaluation, in order: pairs of an evaluation mode and a kind of BatchNorm statistics."""
        known = [mode for method in self._forward for mode in method.evaluation_modes]
        modes = ["off"] if self._exact else [*dict.fromkeys(["on", *known]), "off"]
        statistics = ["running", "estimated"] if self._plan.config.evaluate_batchnorm_batches else ["running"]
        return [(mode, batchnorm) for batchnorm in statistics for mode in modes]

    @property
    def _forward(self) -> list[Compressor]:
        links = self._plan.compressors[self._plan.evaluated]
        return [method for pairs in links for method, _ in pairs.values()]

    @property
    def _exact(self) -> bool:
        """True if no activation is compressed: one pass gives the rows of both modes."""
        return all(method.exact for method in self._forward)

    def is_due(self, step: int) -> bool:
        """Return whether an evaluation is due after `step` steps."""
        every = self._plan.config.evaluate_every_steps
        if step == self._plan.end_step:
            return True
        return bool(every and step > self._plan.first_step and step % every == 0)

    def evaluate(self, step: int) -> Iterator[Event]:
        """Run every pass with the weights after `step` steps, and yield its progress and row.

        Raises DivergedError if the loss of a pass is not finite.
        """
        config = self._plan.config
        for turn, (mode, batchnorm) in enumerate(self.passes):
            before = time.perf_counter()
            where = {"step": step, "mode": mode, "batchnorm": batchnorm}
            yield Event("evaluating", where | {"turn": turn, "samples": 0})
            if batchnorm == "estimated":
                self._engine.batchnorm("estimate")
                self._engine.evaluate(mode, "train", min(config.evaluate_batchnorm_batches, self._plan.steps_per_epoch))
                self._engine.batchnorm("use")
            for total in self._engine.evaluating(mode):
                self._ending.check()
                yield Event("evaluating", where | {"turn": turn, "samples": total.samples})
            if batchnorm == "estimated":
                self._engine.batchnorm("restore")
            figures = self._plan.task.results(total.sums)
            if not math.isfinite(figures["loss"]):
                raise DivergedError(step, f"evaluation with compression {mode}", "loss")
            row = where | figures | {"samples": total.samples, "seconds": time.perf_counter() - before}
            for same in [row | {"mode": "on"}, row | {"seconds": 0.0}] if self._exact else [row]:
                self._recorder.add("evals", same)
                yield Event("eval", same, self._recorder.measures)
