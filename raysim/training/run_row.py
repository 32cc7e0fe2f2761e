"""The row of `runs`: a run's configuration and software when it begins, and its results when it ends."""

from __future__ import annotations

import platform
import socket
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from raysim.config import RunConfig, as_row
from raysim.engine.engine import Engine
from raysim.records import SCHEMA_VERSION, Run


def first_row(config: RunConfig, run_id: str) -> dict[str, Any]:
    """Return the row of a run that begins now on this machine."""
    return as_row(config) | {
        "schema_version": SCHEMA_VERSION,
        "run_id": run_id,
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "cpu": _cpu(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),  # of torch's kernels; sums depend on it
        "python": platform.python_version(),
        **{name: version(name) for name in ("raysim", "torch", "ray", "numpy")},
        "status": "running",
        "restarts": 0,
        "resumed": 0,
        "diverged_step": None,
        "diverged_at": None,
        "warning": None,
        "error": None,
        "seconds": 0.0,
        "start_s": 0.0,  # of `seconds`, before the first step of each start
    }


def _cpu() -> str:
    """Return the name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def device_columns(engine: Engine) -> dict[str, Any]:
    """Return the columns on the GPU that computes, none of a CPU; raises ConfigError if it does not do for the run."""
    facts = engine.check_devices()
    if facts is None:
        return {}
    return {
        "device_name": facts.name,
        "device_capability": facts.capability,
        "driver": facts.driver,
        "cuda": facts.cuda,
        "device_forecast_bytes": engine.device_forecast_bytes(),
    }


def result_columns(run: Run, measures: Iterable[str]) -> dict[str, Any]:
    """Return the columns that a run adds at its end: bytes, steps, the last training loss and the last evaluations."""
    steps, evals = run.steps, run.evals
    columns: dict[str, Any] = {
        "wire_bytes": int(steps["wire_bytes"].sum()),
        "dense_bytes": int(steps["dense_bytes"].sum()),
        "steps_done": len(steps),
    }
    if len(steps):
        columns["final_train_loss"] = float(steps["loss"].iloc[-1])
    end = int(run.row.get("first_step") or 0) + len(steps)
    for row in evals[evals["step"] == end].to_dict("records"):
        suffix = row["mode"] if row["batchnorm"] == "running" else f"{row['mode']}_estimated"
        columns |= {f"final_{name}_{suffix}": row[name] for name in measures}
    return columns
