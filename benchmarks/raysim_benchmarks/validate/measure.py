"""Run pipelines on hosts of this machine, and compare measured with predicted steps."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq

from raysim.config import ConfigError
from raysim.records import Run
from raysim_benchmarks.hosts.driver import CABLES, Driver, driving
from raysim_benchmarks.hosts.namespaces import Hosts, check_machine, network, parse_link
from raysim_benchmarks.validate.cases import CALIBRATION_STEPS, Pipeline, links_by_step
from raysim_benchmarks.validate.predict import Prediction, typical
from raysim_benchmarks.workload import WARMUP_STEPS

WIRE_BOUND = 1.05  # least ratio of a shaped to an unshaped step if the wire matters


class Case(NamedTuple):
    """A pipeline over one kind of link; seconds of a step are means of the middle half, see `typical`.

    The prediction uses the calibration run, with unshaped links, and the pace of the test run's unshaped steps. The test run's
    shaped steps are used only for comparison.
    """

    hosts: int
    replicas: int
    codec: str
    schedule: str
    recipe: str
    link: str
    steps: int
    """Shaped steps of the test run."""
    calibration_s: float
    """Seconds of the calibration run's steps."""
    unshaped_s: float
    """Seconds of the test run's unshaped steps: the prediction without a model of the network."""
    measured_s: float
    """Seconds of the test run's shaped steps."""
    predicted_s: float
    low_s: float
    """The 90 % interval of the prediction, from `low_s` to `high_s`."""
    high_s: float
    unpaced_s: float
    """The prediction at the calibration run's own pace."""
    wire_bytes: float
    """Bytes of packets in a shaped step."""
    cable_bytes: float
    """Bytes between all hosts in a shaped step, including Ray's own messages."""
    oversubscribed: bool
    """True if more workers compute at once than the machine has cores."""

    @property
    def error(self) -> float:
        """Relative error of the prediction, positive if it is too slow."""
        return self.predicted_s / self.measured_s - 1

    @property
    def inside(self) -> bool:
        """True if the measured step lies in the interval of the prediction."""
        return self.low_s <= self.measured_s <= self.high_s

    @property
    def baseline_error(self) -> float:
        """Relative error of the unshaped step as a prediction."""
        return self.unshaped_s / self.measured_s - 1

    @property
    def wire_bound(self) -> bool:
        """True if the links made the step at least 5 % longer."""
        return self.measured_s >= WIRE_BOUND * self.unshaped_s

    @property
    def distant(self) -> bool:
        """True if the links have a latency."""
        return parse_link(self.link)[1] > 0


def validate(out: Path, pipelines: Sequence[Pipeline], rounds: int) -> Iterator[list[Case]]:
    """Return an iterator over the pipelines' cases, of `rounds` steps each; their runs are kept in `out`.

    Runs already in `out` are not repeated. Raises ConfigError immediately if runs are missing and this machine cannot make
    hosts, or if `out` holds runs over other links; the iteration raises FailedError.
    """
    missing = [pipeline for pipeline in pipelines if not _is_measured(pipeline, out, rounds)]
    if missing:
        check_machine()
    return _validate(out, pipelines, rounds)


def _validate(out: Path, pipelines: Sequence[Pipeline], rounds: int) -> Iterator[list[Case]]:
    for (count, wiring), group in groupby(pipelines, key=lambda pipeline: (pipeline.hosts, pipeline.wiring)):
        together = list(group)
        missing = [pipeline for pipeline in together if not _is_measured(pipeline, out, rounds)]
        for pipeline in together:
            if pipeline not in missing:
                yield cases_of(pipeline, out / pipeline.name)
        if missing:
            with Hosts.made(count, wiring) as hosts, driving(hosts) as driver:
                for pipeline in missing:
                    _measure(pipeline, driver, out / pipeline.name, rounds)
                    yield cases_of(pipeline, out / pipeline.name)


def _is_measured(pipeline: Pipeline, out: Path, rounds: int) -> bool:
    """Return whether both runs of a pipeline are in `out`; raises ConfigError if their links or rounds differ."""
    cables = out / pipeline.name / "test" / CABLES
    if not cables.exists():
        return False
    if _links_of(cables) != links_by_step(pipeline.links, rounds):
        raise ConfigError(
            f"The run in {cables.parent} must have {rounds} rounds over {', '.join(pipeline.links)}, but has others. "
            "Give another `--out`."
        )
    return True


def _links_of(cables: Path) -> dict[int, str | None]:
    """Return the link of every step."""
    rows = pq.read_table(cables, columns=["step", "link"]).to_pylist()
    return {row["step"]: row["link"] for row in rows}


def _measure(pipeline: Pipeline, driver: Driver, folder: Path, rounds: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # left by a killed campaign
    unshaped = dict.fromkeys(range(WARMUP_STEPS, WARMUP_STEPS + CALIBRATION_STEPS))
    for name, links in (("calibration", unshaped), ("test", links_by_step(pipeline.links, rounds))):
        driver.train(pipeline.config(len(links)), folder / name, links)


def cases_of(pipeline: Pipeline, folder: Path) -> list[Case]:
    """Return the cases of a pipeline with runs in `folder`: a prediction for every link of its test run."""
    calibration, test = Run(folder / "calibration"), Run(folder / "test")
    calibration_steps = list(_links_of(folder / "calibration" / CABLES))
    prediction = Prediction(calibration, calibration_steps)
    links = _links_of(folder / "test" / CABLES)
    steps = test.steps.set_index("step")
    cables = pq.read_table(folder / "test" / CABLES).to_pandas().groupby("step")["sent_bytes"].sum()

    def seconds(chosen: str | None) -> list[float]:
        return [float(steps["seconds"][step]) for step, at in links.items() if at == chosen]

    unshaped_s = typical(seconds(None))
    pace = prediction.pace(unshaped_s)
    calibrated = calibration.steps.set_index("step")["seconds"]
    cases = []
    for text in pipeline.links:
        here = [step for step, at in links.items() if at == text]
        shaped = network(pipeline.wiring, *parse_link(text))
        low_s, high_s = prediction.interval_s(shaped, seconds(None), len(here))
        cases.append(
            Case(
                hosts=pipeline.hosts,
                replicas=pipeline.replicas,
                codec=pipeline.codec,
                schedule=pipeline.schedule,
                recipe=pipeline.recipe,
                link=text,
                steps=len(here),
                calibration_s=typical(calibrated[calibration_steps].tolist()),
                unshaped_s=unshaped_s,
                measured_s=typical(seconds(text)),
                predicted_s=prediction.step_s(shaped, pace),
                low_s=low_s,
                high_s=high_s,
                unpaced_s=prediction.step_s(shaped),
                wire_bytes=float(steps["wire_bytes"][here].mean()),
                cable_bytes=float(cables[here].mean()),
                oversubscribed=prediction.oversubscribed,
            )
        )
    return cases
