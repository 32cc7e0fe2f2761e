"""One sweep against a `raysim train` call for each of its configurations."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tomli_w
from rich.table import Table

from raysim.console import PlainConsole
from raysim.records import Run
from raysim.sweeps.trial_rows import Rows
from raysim_benchmarks.harness import FailedError

DENSITIES = (0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.08, 0.06, 0.04, 0.02, 0.01)
BASE = "digits-cnn"


def bench_sweep(
    *, trials: int = 12, steps: int = 75, jobs: int | None = None, engine: str | None = None
) -> dict[str, Any]:
    """Measure and print; return the seconds of both ways, and of each trial and its own training.

    `engine` applies to both; with None each uses its default: one process for trials that fit, Ray for calls.
    A trial's own training is its steps and evaluations; the rest of its time is start-up, or the overhead of a warm trial.
    Raises FailedError if one of the commands fails.
    """
    console = PlainConsole(stderr=True)
    with tempfile.TemporaryDirectory(prefix="raysim-bench-") as name:
        folder = Path(name)
        densities = DENSITIES[:trials]
        study = {
            "base": BASE,
            "set": {"steps": steps, "evaluate_every_steps": 0},
            "sampler": "grid",
            **({"engine": engine} if engine else {}),
            "objectives": ["accuracy_on", "step_s@100mbps"],
            "space": {"forward": [f"TopK({density})" for density in densities]},
        }
        (folder / "bench.toml").write_text(tomli_w.dumps(study), encoding="utf-8")
        console.print(f"one sweep of {len(densities)} trials")
        words = ["sweep", "bench.toml", "--out", "sweep", *(["--jobs", str(jobs)] if jobs else [])]
        sweep_s = _timed(folder, words)
        rows = Rows(folder / "sweep", "bench")
        rows.read()
        warm = [Run(folder / "sweep" / row.runs[0]) for row in rows]
        separate = []
        for density in densities:
            out = f"train-{density}"
            console.print(f"raysim train of TopK({density})")
            words = ["train", BASE, f"steps={steps}", "evaluate_every_steps=0", f"forward=TopK({density})"]
            seconds = _timed(folder, [*words, *(["--engine", engine] if engine else []), "--out", out])
            separate.append((seconds, Run(folder / out)))
        own_warm = [_own_s(run) for run in warm]
        own_cold = [_own_s(run) for _, run in separate]
        first_s = [row.started_at.timestamp() for row in rows if row.started_at is not None]
        gaps = [later - earlier - own for earlier, later, own in zip(first_s, first_s[1:], own_warm, strict=False)]
    separate_s = sum(seconds for seconds, _ in separate)
    figures = {
        "trials": len(densities),
        "steps": steps,
        "engine": engine,
        "sweep_s": sweep_s,
        "separate_s": separate_s,
        "ratio": separate_s / sweep_s,
        "trials_per_hour": 3600 * len(densities) / sweep_s,
        "own_training_s": {"sweep": own_warm, "separate": own_cold},
        "startup_saved_s": statistics.median(
            seconds - own for (seconds, _), own in zip(separate, own_cold, strict=True)
        ),
        "overhead_per_warm_trial_s": statistics.median(gaps[1:]) if jobs == 1 and len(gaps) > 1 else None,
    }
    _show(figures)
    return figures


def _timed(folder: Path, words: list[str]) -> float:
    """Return the seconds of a command."""
    before = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "raysim.cli", *words], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise FailedError(f"raysim {' '.join(words)} failed: {done.stderr.strip()}")
    return time.perf_counter() - before


def _own_s(run: Run) -> float:
    """Return the seconds of a run's steps and evaluations."""
    return float(run.steps["seconds"].sum() + run.evals["seconds"].sum())


def _show(figures: dict[str, Any]) -> None:
    table = Table(
        "",
        "seconds",
        "trials an hour",
        title=f"{figures['trials']} trials of {figures['steps']} steps"
        + (f", engine {figures['engine']}" if figures["engine"] else ""),
    )
    for name, seconds in (("one sweep", figures["sweep_s"]), ("separate calls", figures["separate_s"])):
        table.add_row(name, f"{seconds:.1f}", f"{3600 * figures['trials'] / seconds:.0f}")
    console = PlainConsole()
    console.print(table)
    own = {name: statistics.median(values) for name, values in figures["own_training_s"].items()}
    overhead = figures["overhead_per_warm_trial_s"]
    console.print(
        f"{figures['ratio']:.2f} times the trials an hour. A trial's own training: {own['sweep']:.2f} s in the sweep, "
        f"{own['separate']:.2f} s alone. Start-up of a separate call: {figures['startup_saved_s']:.2f} s. "
        + (f"A warm trial takes {overhead:.2f} s beside its own training." if overhead is not None else ""),
        highlight=False,
        soft_wrap=True,
    )
