"""The stages of one worker, with their boundaries, data, device and clock."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from raysim.pipeline.boundary import Boundary
from raysim.pipeline.device import DeviceClock
from raysim.pipeline.plan import Plan
from raysim.pipeline.stage import Stage, stage_class
from raysim.workloads.splits import Data, Split


class LocalStages:
    """The stages of one worker, their sides of the boundaries, its data, device and clock.

    `row`: the worker's number within its replica. `boundaries`: by boundary and stage. `data`: for workers with the first or the
    last stage.
    """

    def __init__(
        self, plan: Plan, worker: int, modules: Mapping[int, nn.Module], data: Data | None, device: torch.device
    ) -> None:
        self.plan = plan
        self.replica, self.row = divmod(worker, len(plan.rows))
        self.data = data
        self.device = device
        self.clock = DeviceClock(device)
        self.stages: dict[int, Stage] = {
            index: stage_class(plan.config)(
                module,
                plan.config,
                device,
                first=index == 0,
                last=index == plan.num_stages - 1,
                loss=plan.task.loss,
                elementwise=plan.elementwise[index],
                delays=plan.weight_delays[index],
            )
            for index, module in modules.items()
        }
        self.boundaries = {
            (index, stage): Boundary(plan, self.replica, index, stage, device, self.clock)
            for index in range(plan.num_stages - 1)
            for stage in (index, index + 1)
            if stage in self.stages
        }

    def worker(self, stage: int) -> int:
        return self.plan.worker(self.replica, stage)

    def split(self, name: str) -> Split:
        """Return the "train" or the "test" data."""
        assert self.data is not None, "only workers with the first or the last stage hold data"
        return self.data.train if name == "train" else self.data.test
