"""Samples of a probe: rows recorded in one step, merged across stations and ranks, and the folders that hold them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from raysim.probing.stopwatch import Seconds
from raysim.records import SCHEMA_VERSION, Recorder


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


# --- folders: one run for each candidate, with the tables that raysim records -------------------------------------------------


def write_candidate(folder: Path, facts: Mapping[str, Any], samples: Sequence[Sample], place: int) -> None:
    """Write the samples of the candidate at a place as a run would have recorded them; `facts` are of `run.parquet`."""
    recorder = Recorder(folder)
    recorder.open()
    wire = dense = 0
    for step, sample in enumerate(samples):
        measured = sample.measured[place]
        actions = _actions(sample, measured)
        sent = [sum(int(row[name]) for row in measured.links) for name in ("wire_bytes", "dense_bytes")]
        for row in actions:
            recorder.add("actions", {"step": step, **row})
        for table, rows in (("links", measured.links), ("collectives", measured.transfers)):
            for one in rows:
                recorder.add(table, {"step": step, **one})
        seconds = actions[-1]["end_s"]
        recorder.add(
            "steps", {"step": step, "epoch": 0, "seconds": seconds, "wire_bytes": sent[0], "dense_bytes": sent[1]}
        )
        wire, dense = wire + sent[0], dense + sent[1]
    row = {
        "schema_version": SCHEMA_VERSION,
        "run_id": f"probe-{folder.name}",
        "name": "probe",
        "probe": True,
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **facts,
        "steps": len(samples),
        "steps_done": len(samples),
        "wire_bytes": wire,
        "dense_bytes": dense,
        **{name: version(name) for name in ("raysim", "torch")},
        "status": "finished",
        "start_s": 0.0,
    }
    recorder.write_run(row)
    recorder.compact()
    recorder.drop_parts()
    recorder.close()


def _actions(sample: Sample, measured: Measured) -> list[dict[str, Any]]:
    """Return the rows of `actions`, one after another, as one process would have them."""
    rows, now = [], 0.0
    for (replica, stage, op, microbatch), spent in sample.seconds.items():
        here, before = (
            (("forward", stage), ("forward", stage - 1))
            if op == "F"
            else (("backward", stage - 1), ("backward", stage))
        )
        alone = op == "W"  # sends and receives nothing
        sent = None if alone else measured.messages.get((replica, *here, microbatch))
        received = None if alone else measured.messages.get((replica, *before, microbatch))
        encode_s, decode_s = sent.encode_s if sent else 0.0, received.decode_s if received else 0.0
        end = now + decode_s + spent.wall + encode_s
        rows.append(
            {
                "replica": replica,
                "stage": stage,
                "op": op,
                "microbatch": microbatch,
                "start_s": now,
                "end_s": end,
                "decode_s": decode_s,
                "compute_wall_s": spent.wall,
                "compute_cpu_s": spent.cpu,
                "encode_s": encode_s,
                "wire_bytes": sent.wire_bytes if sent else 0,
                "dense_bytes": sent.dense_bytes if sent else 0,
            }
        )
        now = end
    return rows
