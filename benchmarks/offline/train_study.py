"""Train a study's runs on one machine without Ray, several at a time, so that `raysim report` can read them.

    python benchmarks/offline/train_study.py plan STUDY runs.json       # where raysim is installed with Ray and Optuna
    python train_study.py train runs.json OUT --processes 12 --minutes 10   # on the machine without

Runs are trained seed by seed, so that whatever is finished in time compares all settings. A finished run is not trained again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any


def plan(study: str, file: Path, overrides: list[str]) -> None:
    """Write the runs of every seed and configuration of a study, and its `study.toml` beside them."""
    from raysim.sweeps.study_file import read_study

    read = read_study(study, overrides)
    configs = {json.dumps(_values(config), sort_keys=True): config for config in read.configs}
    runs = [
        {"folder": f"trials/{number}-s{seed}", "config": _values(config.model_copy(update={"seed": seed}))}
        for seed in read.seeds
        for number, config in enumerate(configs.values())
    ]
    file.write_text(json.dumps(runs))
    read.write(file.parent)
    print(f"{file}: {len(runs)} runs of {len(configs)} settings")


def _values(config: Any) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(config.model_dump_json())
    return values


def train(file: Path, out: Path, processes: int, seconds: float, overrides: list[str]) -> None:
    """Train the runs of a plan in `processes` processes, and start none after `seconds`."""
    end = time.monotonic() + seconds
    context = multiprocessing.get_context("spawn")
    queue: Any = context.Queue()
    queue.cancel_join_thread()  # runs that nobody takes do not hold up the end
    runs = json.loads(file.read_text())
    for run in runs:
        queue.put(run)
    workers = [context.Process(target=_work, args=(queue, out, end, overrides)) for _ in range(processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(max(1.0, end - time.monotonic()))
        if worker.is_alive():
            worker.kill()
    finished = sum((out / run["folder"] / "run.parquet").is_file() for run in runs)
    print(f"{finished} of {len(runs)} runs in {out}")


def _work(queue: Any, out: Path, end: float, overrides: list[str]) -> None:
    import torch

    import raysim
    from raysim.config import apply_override, make_config

    torch.set_num_threads(1)
    while time.monotonic() < end:
        try:
            run = queue.get(timeout=1)
        except Exception:  # the queue is empty
            return
        folder, start = out / run["folder"], time.monotonic()
        if (folder / "run.parquet").is_file():
            continue
        try:
            for override in overrides:
                apply_override(run["config"], override)
            trained = raysim.train(make_config(run["config"]), out=folder, engine="inline")
            outcome = trained.status
        except Exception as error:  # the other runs go on
            outcome = f"{type(error).__name__}: {error}"
        print(f"{run['folder']}: {outcome} after {time.monotonic() - start:.1f} s", flush=True)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    planning = commands.add_parser("plan", help="write the runs of a study")
    planning.add_argument("study")
    planning.add_argument("file", type=Path)
    training = commands.add_parser("train", help="train the runs of a plan")
    training.add_argument("file", type=Path)
    training.add_argument("out", type=Path)
    training.add_argument("--processes", type=int, default=4)
    training.add_argument("--minutes", type=float, default=60.0)
    for each in (planning, training):
        each.add_argument(
            "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="a change of every run"
        )
    given = parser.parse_args()
    if given.command == "plan":
        plan(given.study, given.file, given.overrides)
    else:
        train(given.file, given.out, given.processes, 60 * given.minutes, given.overrides)


if __name__ == "__main__":
    main()
