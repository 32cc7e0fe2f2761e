"""A run's progress as lines of text, for files, pipes and notebooks, where lines cannot be overwritten."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from raysim.config.identity import Setting
from raysim.config.keys import as_row, model_title
from raysim.training.events import to_stderr
from raysim.units import format_bytes
from raysim.workloads.partition import cut_lines

if TYPE_CHECKING:
    from raysim.training.events import Event
    from raysim.training.run import Training

AT_LEAST_S = 2.0  # between two lines of steps
AT_MOST_S = 30.0
EVALUATION_S = 10.0  # between two lines of an evaluation
PARTS = 20  # lines of steps in a run, unless limited by time
LONG_S = 3600.0  # a run with more time left is long
WATCHED_S = 20.0  # seconds of training before the warning about a long run


def print_progress(training: Training) -> None:
    """Train to the end, and print a header and a limited number of progress lines on the error stream."""
    events = training.events()  # raises before anything is printed
    for line in header(training):
        to_stderr(line)
    pace, total, sent = Pace(training), training.plan.end_step, 0
    last_step, last_s = 0, float("-inf")  # of the last printed line
    for event in events:
        row, now = event.row, time.monotonic()
        if event.kind == "step":
            pace.add(row)
            sent += row["wire_bytes"]
            step, waited_s = row["step"] + 1, now - last_s
            far = (step - last_step) * PARTS >= total
            if step == total or (waited_s >= AT_LEAST_S and (far or waited_s >= AT_MOST_S)):
                last_step, last_s = step, now
                to_stderr(
                    f"step {step}/{total}: loss {row['loss']:.4f}, {pace.speed()}, {pace.left(step)} left, "
                    f"{format_bytes(sent)} sent"
                )
            if (warning := pace.warning(step)) is not None:
                to_stderr(warning)
        elif event.kind == "evaluating":
            if row["turn"] == row["samples"] == 0:
                last_step, last_s = row["step"], now
                samples = f"{training.plan.num_test_samples:,} samples"
                to_stderr(f"step {row['step']}: evaluating {samples} with compression {_modes(training)}")
            elif now - last_s >= EVALUATION_S:
                last_step, last_s = row["step"], now
                to_stderr(f"step {row['step']}: {evaluating(training, row)}")
        else:
            to_stderr(event_sentence(event))


def header(training: Training) -> list[str]:
    """Describe a run about to start in lines: model, stages, parameters, setting, samples, evaluations and folder."""
    config, plan, workload = training.config, training.plan, training.workload
    stages = "1 stage" if plan.num_stages == 1 else f"{plan.num_stages} stages"
    owners = max(config.schedule.workers(plan.num_stages)) + 1
    workers = f" on {owners} workers" if owners != plan.num_stages else ""
    replicas = f", {plan.num_replicas} replicas" if plan.num_replicas > 1 else ""
    epochs = plan.num_steps / plan.steps_per_epoch
    when = f"every {config.evaluate_every_steps} steps and at the end" if config.evaluate_every_steps else "at the end"
    model = model_title(config.model.name, config.model.options.get("path"), config.model.options.get("config"))
    part = "" if config.evaluate_samples else ". `evaluate_samples=N` takes the first N samples"
    origin = f" from step {plan.first_step:,} of {config.start.folder} on" if config.start is not None else ""
    return [
        f"{config.name}: {model}, {workload.num_parameters:,} parameters in {stages}{workers}"
        f"{replicas}, {Setting.of(as_row(config))}",
        *cut_lines(plan.cut_choices),
        f"Training: {plan.num_steps:,} steps of {config.batch_size} samples{origin}, {epochs:.3g} epochs of "
        f"{config.data.name} ({plan.num_samples:,} samples), {training.engine.kind} engine",
        f"Evaluation: {plan.num_test_samples:,} test samples, {when}, with compression {_modes(training)}{part}",
        *([] if training.clock.network is None else [f"Clock: {training.clock}"]),
        f"Folder: {training.folder}",
    ]


class Pace:
    """Moving average of the seconds per step, with the resulting speed and remaining time."""

    def __init__(self, training: Training) -> None:
        config, data = training.config, training.workload.data
        self._training = training
        self._total = training.plan.end_step
        self.language = data.shape.input_dtype == "int64"
        self._units = config.batch_size * (data.shape.input_shape[0] if self.language else 1)
        self._step_s: float | None = None
        self._first = True
        self._trained_s = 0.0
        self._told = False

    def add(self, row: Mapping[str, Any]) -> None:
        """Add the row of a step; the first step, which warms up, is replaced by the second."""
        seconds = float(row["seconds"])
        self._trained_s += seconds
        if self._step_s is None or self._first:
            self._first = self._step_s is None
            self._step_s = seconds
        else:
            self._step_s += 0.1 * (seconds - self._step_s)

    def left(self, step: int) -> timedelta:
        """Return the remaining time after `step` steps at this pace."""
        return timedelta(seconds=round((self._total - step) * (self._step_s or 0.0)))

    def warning(self, step: int) -> str | None:
        """Return a warning, once, if the run will take more than an hour; otherwise None."""
        if self._told or self._trained_s < WATCHED_S:
            return None
        self._told = True
        left, dtype, remedy = self.left(step), self._training.config.dtype, ""
        if left.total_seconds() <= LONG_S:
            return None
        if dtype != "float32" and self._training.engine.device_kind == "cpu":
            remedy = f" `dtype=float32` does too, many times over, on a CPU that has no instructions for {dtype}."
        return (
            f"warning: at this pace the {self._total - step:,} steps that are left will take about {left} here. "
            f"It can be stopped by Ctrl-C and resumed; `steps=N` or a smaller model makes it shorter.{remedy}"
        )

    def speed(self) -> str:
        """Return the seconds per step, and samples or tokens per second."""
        step_s = self._step_s or 0.0
        rate = self._units / step_s if step_s else 0.0
        per_second = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
        return f"{step_s:.3g} s a step, {per_second} {'tokens' if self.language else 'samples'}/s"


def evaluating(training: Training, row: Mapping[str, Any]) -> str:
    """Return the progress of an evaluation."""
    total = training.plan.num_test_samples
    turn = f"evaluation {row['turn'] + 1} of {len(training.evaluator.passes)}"
    return f"{turn}, compression {row['mode']}{_statistics(row)}: {row['samples']:,} of {total:,} samples"


def event_sentence(event: Event) -> str:
    """Return the sentence of an event: the result of an evaluation, the reason for a restart, or a warning."""
    row = event.row
    if event.kind == "warning":
        return f"warning: {row['reason']}"
    if event.kind == "restart":
        return f"step {row['step']}: stages start again ({row['reason']})"
    shown = ("loss", *(name for name in event.measures if name not in ("loss", "perplexity")))
    figures = ", ".join(f"{name} {row[name]:.4f}" for name in shown)
    return f"step {row['step']}: evaluated with compression {row['mode']}{_statistics(row)}: {figures}"


def _statistics(row: Mapping[str, Any]) -> str:
    return " and estimated BatchNorm statistics" if row["batchnorm"] == "estimated" else ""


def _modes(training: Training) -> str:
    """Return the modes of an evaluation in words: "on and off"."""
    modes = dict.fromkeys(mode for mode, _ in training.evaluator.passes)
    twice = ", again with estimated BatchNorm statistics" if training.config.evaluate_batchnorm_batches else ""
    return " and ".join(modes) + twice
