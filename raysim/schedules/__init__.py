"""Schedules as data: which worker runs which action in which order. Written once, executed by engines and simulated alike.

`actions` holds actions and the rules of a valid schedule, `families` the schedules that can be named, `unflushed` a schedule
whose steps follow each other without a flush, `csv` torch's file format, and `arrays` a schedule as the flat arrays that the
simulator reads.
"""

from raysim.schedules.actions import Action, Row
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
from raysim.schedules.unflushed import PostValidatedSteps, StepsOnEnd, Unflushed

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
