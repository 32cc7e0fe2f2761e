"""What the steps of a run should take over shaped links, by its unshaped steps alone: as `raysim replay` prices a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from raysim.network.calibrate import read_overheads
from raysim.network.network import FREE, Network
from raysim.network.placement import Placement
from raysim.network.profile import profiles_from_actions
from raysim.network.schedule import parse_schedule
from raysim.network.simulate import step_seconds
from raysim.records import Run

FIT_ROUNDS = 24  # of halving: far finer than a measurement


def typical(seconds: Sequence[float]) -> float:
    """Return the mean of the middle half: nearly as steady as a mean, and strays of a shared machine do not move it.

    >>> typical([1.0, 2.0, 3.0, 100.0])
    2.5
    """
    cut = len(seconds) // 4
    middle = sorted(seconds)[cut : len(seconds) - cut]
    return float(np.mean(middle))


class Prediction:
    """A run with a stage on each host, its `steps` between unshaped links, and what they say of other links.

    Where more stages compute at once than the machine has cores, all hosts share them. How many are left to stages, beside
    Ray and the links, is then fitted to the unshaped steps too.
    """

    def __init__(self, run: Run, steps: Sequence[int]) -> None:
        self.schedule = parse_schedule(run.row["schedule"])
        self.num_hosts, threads = int(run.row["num_stages"]), int(run.row["threads_per_stage"])
        rows = self.schedule.rows(self.num_hosts, int(run.row["num_microbatches"]))
        actions = run.actions
        actions = actions[actions["step"].isin(list(steps))]
        columns = {str(name): actions[name].to_numpy() for name in actions}
        seconds = run.steps.set_index("step")["seconds"].loc[list(steps)]
        overheads = read_overheads(columns, rows, dict(zip(steps, seconds.tolist(), strict=True)))
        found = profiles_from_actions(columns, **overheads._asdict())
        self.profiles = [profile.with_ray_messages() for profile in found.values()]
        self.placement = Placement(tuple(range(self.num_hosts)), threads=threads, driver=0)
        cores = os.cpu_count() or 1
        self.oversubscribed = self.num_hosts * threads > cores
        if self.oversubscribed:
            self._fit_cores(typical(seconds.tolist()), float(cores))

    def step_s(self, network: Network) -> float:
        """Return the seconds that the unshaped steps would have taken on `network`, see `typical`."""
        return typical(step_seconds(self.schedule, self.profiles, [network], placement=self.placement)[0].tolist())

    def _fit_cores(self, step_s: float, most: float) -> None:
        """Share between the hosts as many cores, at most as there are, as unshaped steps of `step_s` leave them."""
        low, high = 0.0, most
        for _ in range(FIT_ROUNDS):
            middle = (low + high) / 2
            self.placement = replace(self.placement, cores=(middle,), machines=(0,) * self.num_hosts)
            low, high = (middle, high) if self.step_s(FREE) > step_s else (low, middle)
