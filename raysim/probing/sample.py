"""Rows that a probe takes of one step, and how the parts of several stations and ranks are put together."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from raysim.probing.stopwatch import Seconds


class Sent(NamedTuple):
    """The measured figures of one message of a candidate."""

    encode_s: float
    decode_s: float
    wire_bytes: int
    dense_bytes: int


class Measured(NamedTuple):
    """The figures of one candidate in one step."""

    messages: Mapping[tuple[int, str, int, int], Sent] = {}
    """By replica, direction, boundary and microbatch."""
    links: Sequence[Mapping[str, Any]] = ()
    """Rows of `links`, without the step."""
    transfers: Sequence[Mapping[str, Any]] = ()
    """Rows of `collectives`, without the step."""


class Sample(NamedTuple):
    """The figures of one step."""

    seconds: Mapping[tuple[int, int, str, int], Seconds]
    """Of the compute, by replica, stage, "F", "B" or "W", and microbatch."""
    measured: Sequence[Measured]
    """Of every candidate."""


Samples = Mapping[int, Sample]
"""By step of the training."""


def together(parts: Iterable[Samples]) -> list[Sample]:
    """Return the steps of which every part has a sample, each put together from all parts."""
    every = list(parts)
    steps = set.intersection(*(set(part) for part in every))
    return [_joined([part[step] for part in every]) for step in sorted(steps)]


def joined(parts: Sequence[Measured]) -> Measured:
    """Return the figures of one candidate that were measured in several places."""
    return Measured(
        {key: sent for one in parts for key, sent in one.messages.items()},
        [row for one in parts for row in one.links],
        [row for one in parts for row in one.transfers],
    )


def has_halves(samples: Iterable[Sample]) -> bool:
    """Return whether some backward was timed in two parts, of inputs and of weights."""
    return any(op == "W" for sample in samples for _, _, op, _ in sample.seconds)


def in_parts(sample: Sample, halves: Container[tuple[int, int]]) -> Sample:
    """Return a sample in which the backwards of `halves`, stages and microbatches, alone are in two parts.

    The seconds of both parts of the others are added.
    """
    seconds: dict[tuple[int, int, str, int], Seconds] = {}
    for (replica, stage, op, microbatch), spent in sample.seconds.items():
        whole = op == "W" and (stage, microbatch) not in halves
        key = (replica, stage, "B" if whole else op, microbatch)
        seconds[key] = seconds.get(key, Seconds()).plus(spent)
    return sample._replace(seconds=seconds)


def _joined(parts: Sequence[Sample]) -> Sample:
    seconds = {key: spent for part in parts for key, spent in part.seconds.items()}
    return Sample(seconds, [joined(each) for each in zip(*(part.measured for part in parts), strict=True)])
