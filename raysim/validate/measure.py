"""Runs the cases on hosts of this machine, and sets what steps took beside what was predicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from raysim.config import ConfigError
from raysim.validate.cases import Pipeline, pipelines, rates_by_step
from raysim.validate.hosts import Hosts, check_machine, network
from raysim.validate.predict import Prediction, typical
from raysim.validate.runs import Driver, driving, link


class Case(NamedTuple):
    """A pipeline at a rate: means of the middle half of its steps, none of which was used to predict."""

    hosts: int
    codec: str
    schedule: str
    rate: str
    steps: int
    measured_s: float
    predicted_s: float
    error: float
    """Of the prediction: above 0 where it is too slow."""
    oversubscribed: bool
    """More stages compute at once than the machine has cores."""


def validate(out: Path, hosts: Sequence[int], rounds: int) -> Iterator[list[Case]]:
    """Return an iterator over pipelines, each with its cases; their runs are in `out`, a folder each.

    Raises ConfigError at once where the machine cannot make hosts, or `out` holds files; the iteration raises FailedError.
    """
    check_machine()
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"The folder {out} is not empty. Give another `--out`.")
    return _validate(out, hosts, rounds)


def _validate(out: Path, hosts: Sequence[int], rounds: int) -> Iterator[list[Case]]:
    for count in hosts:
        with Hosts.made(count) as made, driving(made) as driver:
            for pipeline in pipelines(count):
                yield _measure(pipeline, driver, out / pipeline.name, rounds)


def _measure(pipeline: Pipeline, driver: Driver, folder: Path, rounds: int) -> list[Case]:
    rates = rates_by_step(rounds)
    run = driver.train(pipeline.config(), folder, rates)
    seconds = dict(zip(run.steps["step"].tolist(), run.steps["seconds"].tolist(), strict=True))
    prediction = Prediction(run, [step for step, rate in rates.items() if rate is None])
    cases = []
    for rate in dict.fromkeys(rate for rate in rates.values() if rate is not None):
        measured = [seconds[step] for step, at in rates.items() if at == rate]
        measured_s = typical(measured)
        predicted_s = prediction.step_s(network("pairs", *link(rate)))
        error = predicted_s / measured_s - 1
        cases.append(Case(*pipeline, rate, len(measured), measured_s, predicted_s, error, prediction.oversubscribed))
    return cases
