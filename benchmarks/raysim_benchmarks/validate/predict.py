"""Predict step times over shaped links from unshaped steps only, as `raysim replay` prices a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from raysim.limits import usable_cpus
from raysim.network.collectives import transfers_from_columns
from raysim.network.prices import BOUNDS, DRAWS, spread_as_of_many, with_model_error
from raysim.network.profile import Profile
from raysim.network.recorded import profiles_from_actions
from raysim.network.simulate import step_seconds
from raysim.network.topology import FREE, Network, Placement
from raysim.network.transport import RAY
from raysim.plugins import from_record
from raysim.records import Run
from raysim.schedules.families import parse_schedule
from raysim_benchmarks.validate.overheads import read_overheads

Floats = NDArray[np.float64]

SLOPE = 0.02  # relative change of pace for the derivative of a step
FIT_ROUNDS = 24  # of bisection: far finer than a measurement


def typical(seconds: Sequence[float]) -> float:
    """Return the mean of the middle half: nearly as steady as a mean, but robust to outliers of a shared machine.

    >>> typical([1.0, 2.0, 3.0, 100.0])
    2.5
    """
    cut = len(seconds) // 4
    middle = sorted(seconds)[cut : len(seconds) - cut]
    return float(np.mean(middle))


class Prediction:
    """Predicts steps over other links from the `steps` of a run between unshaped links, with a worker on each host.

    If more workers compute in parallel than the machine has cores, all hosts share the cores. The number of cores left to the
    workers by Ray and the links is then also fitted to the unshaped steps.
    """

    def __init__(self, run: Run, steps: Sequence[int]) -> None:
        row = run.row
        with from_record():
            self.schedule = parse_schedule(row["schedule"])
        num_stages, threads = int(row["num_stages"]), int(row["threads_per_stage"])
        rows = self.schedule.rows(num_stages, int(row["num_microbatches"]))
        self.num_replicas = int(row["num_replicas"])
        self.num_hosts = self.num_replicas * len(rows)
        actions = run.actions
        actions = actions[actions["step"].isin(list(steps))]
        columns = {str(name): actions[name].to_numpy() for name in actions}
        seconds = run.steps.set_index("step")["seconds"].loc[list(steps)]
        overheads = read_overheads(columns, rows, dict(zip(steps, seconds.tolist(), strict=True)))
        recorded = profiles_from_actions(columns, **overheads._asdict())
        self.profiles = [
            _with_collectives(replace(profile, transport=RAY), run, step) for step, profile in recorded.items()
        ]
        self.placement = Placement(tuple(range(self.num_hosts)), threads=threads)
        cores = usable_cpus()
        self.oversubscribed = self.num_hosts * threads > cores
        if self.oversubscribed:
            self._fit_cores(typical(seconds.tolist()), float(cores))

    def step_s(self, network: Network, pace: float = 1.0) -> float:
        """Return the `typical` seconds that the unshaped steps would have taken on `network`.

        `pace` stretches the machine's own work (compute, codecs and Ray), but not the time of wires.
        """
        return typical(self._steps_s(network, pace))

    def interval_s(self, network: Network, unshaped_s: Sequence[float], num_steps: int) -> tuple[float, float]:
        """Return the 90 % interval of `typical` of `num_steps` steps on `network`, from the spread of recorded steps.

        `unshaped_s` are seconds of unshaped steps of the predicted run. Their spread gives the uncertainty of the run's pace and
        the deviation of a few steps from it; the spread of the calibration steps gives the uncertainty of the costs. The error of
        the network model is added.
        """
        random = np.random.default_rng(0)

        def strays(seconds: Sequence[float], size: int) -> Floats:
            """Return `typical` of `size` drawn steps, divided by `typical` of all."""
            wider = spread_as_of_many(np.array(seconds) / typical(seconds))
            return np.array([typical(random.choice(wider, size).tolist()) for _ in range(DRAWS)])

        pace = self.pace(typical(unshaped_s))
        center = self.step_s(network, pace)
        stretched = (self.step_s(network, pace * (1 + SLOPE)) - center) / SLOPE  # seconds added by twice the pace
        moved = strays(unshaped_s, len(unshaped_s)) * strays(unshaped_s, num_steps) - 1
        costs = np.array(self._steps_s(network, pace)) / np.array(self._steps_s(FREE, pace))
        drawn = (center + stretched * moved) * strays(costs.tolist(), len(costs))
        drawn = with_model_error(drawn, drawn * self.step_s(FREE, pace) / center)
        low, high = np.quantile(drawn, BOUNDS).tolist()
        return min(low, center), max(high, center)

    def _steps_s(self, network: Network, pace: float) -> list[float]:
        profiles = [profile.at_pace(pace) for profile in self.profiles]
        seconds: list[float] = step_seconds(self.schedule, profiles, [network], placement=self.placement)[0].tolist()
        return seconds

    def pace(self, step_s: float) -> float:
        """Return the pace at which an unshaped step takes `step_s`, such as the machine's during another run."""
        return step_s / self.step_s(FREE)

    def _fit_cores(self, step_s: float, most: float) -> None:
        """Let the hosts share the number of cores, at most `most`, for which unshaped steps take `step_s`."""
        low, high = 0.0, most
        for _ in range(FIT_ROUNDS):
            middle = (low + high) / 2
            self.placement = replace(self.placement, cores=(middle,), machines=(0,) * self.num_hosts)
            low, high = (middle, high) if self.step_s(FREE) > step_s else (low, middle)


def _with_collectives(profile: Profile, run: Run, step: int) -> Profile:
    """Return a step's profile with its replicas' transfers; their codec work is in the seconds outside actions."""
    rows = run.collectives[run.collectives["step"] == step]
    return replace(profile, transfers=transfers_from_columns({str(name): rows[name].to_numpy() for name in rows}))
