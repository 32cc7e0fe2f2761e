"""Schedules as data: which worker runs which action in which order. Written once, executed by engines and simulated alike.

`actions` holds actions, the rules of a valid schedule and torch's file format, `families` the schedules that can be named, `arrays` a
schedule as the flat arrays that the simulator reads, and schedules without a flush, and `weights` the policies by which stages update.
"""

from raysim.schedules.actions import Action, Row
from raysim.schedules.arrays import PostValidatedSteps, StepsOnEnd, Unflushed
from raysim.schedules.families import (
    SCHEDULES,
    ZBH1,
    ZBH2,
    ZBV,
    Custom,
    DualPipeV,
    GPipe,
    Interleaved1F1B,
    OneFOneB,
    Schedule,
    parse_schedule,
)

__all__ = [
    "SCHEDULES",
    "ZBH1",
    "ZBH2",
    "ZBV",
    "Action",
    "Custom",
    "DualPipeV",
    "GPipe",
    "Interleaved1F1B",
    "OneFOneB",
    "PostValidatedSteps",
    "Row",
    "Schedule",
    "StepsOnEnd",
    "Unflushed",
    "parse_schedule",
]
