"""Schedules as data: the order of actions on each worker, shared by the engines and the simulator.

`actions` has actions, the rules of a valid schedule and torch's file format; `families` the named schedules; `arrays` the flat arrays
read by the simulator, and schedules without a flush; `weights` the policies by which stages update.
"""

from raysim.schedules.actions import Action, Row
from raysim.schedules.arrays import PostValidatedSteps, StepsOnEnd, Unflushed
from raysim.schedules.families import (
    SCHEDULES,
    ZB,
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
    "ZB",
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
