"""The folders that a probe leaves: one run's folder for each candidate, with the tables that raysim records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from raysim.probing.sample import Measured, Sample
from raysim.records import SCHEMA_VERSION, Recorder


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
