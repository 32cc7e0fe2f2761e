"""Actions of a profiled step, while their moments cannot be read yet."""

from __future__ import annotations

from typing import NamedTuple

from raysim.pipeline.reports import ActionRecord
from raysim.pipeline.stopwatch import Moment, Stopwatch
from raysim.schedules.actions import Action


class Profiled(NamedTuple):
    """An action of a profiled step, whose moments are read when the step has ended."""

    action: Action
    start: Moment
    decoded: Moment
    computed: Moment
    end: Moment
    cpu_s: float
    code: Moment
    coded: Moment
    wire_bytes: int
    dense_bytes: int
    work: str | None

    def record(self, stopwatch: Stopwatch) -> ActionRecord:
        """Return the record of the action."""
        moments = (self.start, self.decoded, self.computed, self.end, self.code, self.coded)
        start, decoded, computed, end, code, coded = map(stopwatch.seconds, moments)
        times = (start, end, decoded - start, computed - decoded, self.cpu_s, coded - code)
        return ActionRecord(*self.action, *times, self.wire_bytes, self.dense_bytes, self.work)
