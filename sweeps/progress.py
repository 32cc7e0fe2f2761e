"""A running sweep in the terminal: its plan, a live table or a line per trial, and the time left."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from raysim.analysis.comparison.rule import MIN_SEEDS
from raysim.console import PlainConsole
from raysim.engine.connection import dashboard_sentence
from raysim.notation import printable
from raysim.sweeps.allocation import full_disk
from raysim.sweeps.budget import duration
from raysim.sweeps.trial_rows import TrialRow, best_trials
from raysim.units import format_bytes, format_seconds, plural

if TYPE_CHECKING:
    from raysim.sweeps.runner import Sweep
    from raysim.sweeps.study import Study

SHOWN = 12  # latest trials in the live table
STATUS_S = (10.0, 60.0)  # between two progress lines in a pipe: if a trial has ended, and if none has


def show_sweep(sweep: Sweep) -> None:
    """Run a sweep to its end, with a live table on a terminal, and a line per trial elsewhere."""
    console = PlainConsole(160, stderr=True)
    say = partial(console.print, soft_wrap=True)
    view = _View(sweep)
    shown: set[int] = set()
    status_at = time.monotonic()
    sweep.phases.say = sweep.say = say

    def begun() -> None:
        for line in _plan(sweep):
            say(line)
        shown.update(row.trial for row in sweep.rows if row.ended)

    def update() -> None:
        nonlocal status_at
        ended = [row for row in sweep.rows if row.ended and row.trial not in shown]
        for row in ended:
            shown.add(row.trial)
            say(_trial_line(row))
        if hasattr(sweep, "search") and time.monotonic() - status_at >= STATUS_S[not ended]:
            status_at = time.monotonic()
            say(view.status())

    if console.is_terminal:
        with Live(get_renderable=view.render, console=console, refresh_per_second=2, transient=True):
            sweep.run(begun)
    else:
        sweep.on_change = update
        sweep.run(begun)


def _plan(sweep: Sweep) -> list[str]:
    """Return the plan of a sweep, one line each: trials, resources, folder, and notes on the study."""
    allocation, study = sweep.allocation, sweep.study
    share, budget, seeds = allocation.share, study.most_trials, len(study.seeds)
    now, most = (min(jobs, budget) for jobs in (allocation.now, share.jobs))
    trials = plural(budget, "trial") + (f" x {seeds} seeds" if seeds > 1 else "")
    at_once = f"{now} at once" + (f", up to {most} when more resources are free" if most > now else "")
    gpus = f" and {share.gpus:g} GPU" if share.gpus else ""
    process = "trial" if allocation.engine == "inline" else "stage"
    lines = [f"{study.name}: {trials}, {at_once}, {share.cpus:g} CPU{gpus} per {process}; results in {sweep.store.out}"]
    if sweep.dashboard and sweep.dashboard_url:
        lines[0] += f"; {dashboard_sentence(sweep.dashboard_url)}"
    if sweep.began_with:
        lines.append(f"{sweep.began_with} of {budget} trials had ended before")
    unplanned = study.budget is not None and study.planned_seeds is None
    full = None if unplanned else full_disk(study, allocation.checkpoint_bytes, sweep.folder)
    return lines + ([full] if full else []) + beforehand(study)


def beforehand(study: Study) -> list[str]:
    """Return notes to show before a study's first run, one sentence each."""
    sentences = []
    drawn = study.most_trials - len(study.baselines)
    if drawn < len(study.grid):
        sentences.append(f"{drawn} of {len(study.grid)} grid points, drawn with seed {study.sampler_seed}.")
    if study.early_stopping == "asha":
        sentences.append('ASHA stops poor trials early; `early_stopping = "none"` trains all to their end.')
    judged = any(objective.quality for objective in study.objectives)
    if len(study.seeds) < MIN_SEEDS and not study.confirm and judged:
        sentences.append(
            f"{plural(len(study.seeds), 'seed')} cannot support a verdict. Train at least {MIN_SEEDS}, better 5, by `--seeds 5`, or "
            "judge the choice by `--confirm 5`."
        )
    return sentences


class _View:
    """The live table and the status line of a sweep."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self._started = time.monotonic()

    def render(self) -> Group | Text:
        sweep, objectives = self._sweep, self._sweep.study.objectives
        if not hasattr(sweep, "search"):
            return Text(f"waiting for {sweep.phases.current or 'Ray'}")
        rows = list(sweep.rows)
        running, ended = [row for row in rows if row.status == "running"], [row for row in rows if row.ended]
        table = Table(box=None)
        for column in ("trial", "status", "configuration", *(objective.name for objective in objectives)):
            table.add_column(column, overflow="fold")
        best = {row.trial for row in best_trials(sweep.rows, objectives)}
        for row in [*ended, *running][-SHOWN:]:
            status = f"{sweep.search.progress.get(row.trial, 0.0):.0%}" if row.status == "running" else row.status
            figures = [format_figure(each.name, row.value(each.name)) for each in objectives]
            style = "bold" if row.trial in best else "dim" if row.status in ("failed", "diverged", "pruned") else ""
            table.add_row(f"{row.trial} {row.name or ''}", status, row.notation, *figures, style=style)
        return Group(table, Text(printable(self.status())))

    def status(self) -> str:
        """Return the progress of the sweep, the time left unless it is a race, and the best values so far."""
        sweep = self._sweep
        running = [row for row in sweep.rows if row.status == "running"]
        fresh = sum(row.ended and row.same_as is None for row in sweep.rows)
        parts = sum(sweep.search.progress.get(row.trial, 0.0) for row in running)
        done = fresh + parts - sweep.began_with
        elapsed = time.monotonic() - self._started
        left = sweep.study.most_trials - fresh - parts
        text = f"{fresh} of {sweep.study.most_trials} trials after {duration(elapsed)}"
        if standing := sweep.search.standing():  # a race trains its trials side by side
            text = f"after {duration(elapsed)}: {standing}"
        elif sweep.study.race is None and done > 0.5 and left > 0:
            text += f", about {duration(elapsed / done * left)} left"
        for objective in sweep.study.objectives:
            name = objective.name
            values = [(value, row) for row in sweep.rows if row.ended and (value := row.value(name)) is not None]
            if values:
                value, row = (min if objective.minimize else max)(values, key=lambda pair: pair[0])
                text += f"; best {name}: {format_figure(name, value)} (trial {row.trial})"
        return text


def _trial_line(row: TrialRow) -> str:
    name = f" {row.name}" if row.name else ""
    figures = "".join(
        f", {objective} {format_figure(objective, each.value)}" for objective, each in row.figures.items()
    )
    same = f", as trial {row.same_as}" if row.same_as is not None else ""
    reason = f" ({row.error})" if row.error else ""
    return f"trial {row.trial}{name}: {row.status}{same}{reason}{figures}: {row.notation}"


def format_figure(name: str, value: float | None) -> str:
    """Return the value of an objective with its unit."""
    if value is None:
        return "-"
    if name.startswith(("step_s", "time_to_target_s")):
        return format_seconds(value)
    return format_bytes(value) if name == "wire_bytes" else f"{value:.4f}"
