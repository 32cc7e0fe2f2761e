"""Display of a sweep in a terminal: a table while it goes, and the frontier at its end."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Container, Sequence
from functools import partial
from typing import TYPE_CHECKING

import pandas as pd
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

import analysis
from analysis.comparison.power import chance_of_safe, paired_spread
from analysis.comparison.rule import RULE, SKILL
from analysis.data.settings import COMPRESSION
from analysis.report.adopt import snippet
from analysis.report.words import listed, plural
from raysim.engine.token import dashboard_sentence
from raysim.network.memory import format_bytes
from raysim.places import Place
from raysim.quality import measures_of
from raysim.records import Run
from raysim.show.terminal import format_seconds
from sweeps.objectives import Figure, Objective
from sweeps.rows import Rows, TrialRow

if TYPE_CHECKING:
    from sweeps.runner import Sweep

SHOWN = 12  # trials in the live table: the last ones
STATUS_S = (10.0, 60.0)  # between two lines on the progress in a pipe: if a trial has ended, and if none has


def frontier(rows: Rows, objectives: Sequence[Objective], without: Container[int] = ()) -> list[TrialRow]:
    """Return the finished, feasible trials that no other beats in every objective, by the first objective.

    Trials whose numbers are in `without` are left out.
    """
    done = [row for row in rows if row.status == "finished" and row.same_as is None and row.trial not in without]
    found = [row for row in done if row.feasible is not False]
    if not found:
        return []
    values = [{one.name: _value(row, one.name) for one in objectives} for row in found]
    best = analysis.frontier(pd.DataFrame(values, dtype="float64"), {one.name: one.direction for one in objectives})
    return [found[index] for index in best.index]


def show_sweep(sweep: Sweep) -> None:
    """Run a sweep to its end, with a table that lives on a terminal, and a line a trial elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        console.width = 160
    view = _View(sweep)
    said: set[int] = set()
    told = time.monotonic()
    sweep.phases.say = partial(console.print, highlight=False, markup=False, soft_wrap=True)

    def begun() -> None:
        share, url, budget = sweep.share, sweep.dashboard_url, sweep.study.budget
        most, now = (min(jobs, budget) for jobs in (share.jobs, sweep.entry.now))
        at_once = f"{now} at once" + (f", up to {most} once there is room" if most > now else "")
        stage = "trial" if sweep.engine == "inline" else "stage"
        gpus = f" and {share.gpus:g} GPU" if share.gpus else ""
        console.print(
            f"{sweep.study.name}: {budget} trial{'s' * (budget != 1)}, {at_once}, {share.cpus:g} CPU{gpus} a {stage}; "
            f"results in {sweep.store.out}" + (f"; {dashboard_sentence(url)}" if url and sweep.dashboard else ""),
            highlight=False,
            soft_wrap=True,
        )
        said.update(row.trial for row in sweep.rows if row.ended)
        if sweep.began_with:
            console.print(f"{sweep.began_with} of {budget} trials were finished before", highlight=False)

    def say() -> None:
        nonlocal told
        ended = [row for row in sweep.rows if row.ended and row.trial not in said]
        for row in ended:
            said.add(row.trial)
            console.print(view.line(row), highlight=False, markup=False, soft_wrap=True)
        if hasattr(sweep, "search") and time.monotonic() - told >= STATUS_S[not ended]:
            told = time.monotonic()
            console.print(view.status(), highlight=False, markup=False, soft_wrap=True)

    if console.is_terminal:
        with Live(get_renderable=view.render, console=console, refresh_per_second=2, transient=True):
            sweep.run(begun)
    else:
        sweep.on_change = say
        sweep.run(begun)


class _View:
    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self._started = time.monotonic()

    def line(self, row: TrialRow) -> str:
        """Return a trial in a line."""
        name = f" {row.name}" if row.name else ""
        figures = ", ".join(f"{n} {_figure(n, f.value)}" for n, f in row.figures.items())
        same = f", as trial {row.same_as}" if row.same_as is not None else ""
        reason = f" ({row.error})" if row.error else ""
        return f"trial {row.trial}{name}: {row.status}{same}{reason}: {row.notation}{': ' if figures else ''}{figures}"

    def render(self) -> Group | Text:
        """Return the table as of now."""
        sweep = self._sweep
        if not hasattr(sweep, "search"):
            return Text(f"waiting for {sweep.phases.current or 'Ray'}")
        rows = list(sweep.rows)
        going, ended = [row for row in rows if row.status == "running"], [row for row in rows if row.ended]
        table = Table(box=None)
        for column in ("trial", "status", "configuration", *(one.name for one in sweep.study.objectives)):
            table.add_column(column, overflow="fold")
        best = {row.trial for row in frontier(sweep.rows, sweep.study.objectives)}
        for row in [*ended, *going][-SHOWN:]:
            status = f"{sweep.search.progress.get(row.trial, 0.0):.0%}" if row.status == "running" else row.status
            figures = [_figure(one.name, _value(row, one.name)) for one in sweep.study.objectives]
            style = "bold" if row.trial in best else "dim" if row.status in ("failed", "diverged", "pruned") else ""
            table.add_row(f"{row.trial} {row.name or ''}", status, row.notation, *figures, style=style)
        return Group(table, Text(self.status()))

    def status(self) -> str:
        """Return how far the sweep is, and the best values so far."""
        sweep = self._sweep
        going = [row for row in sweep.rows if row.status == "running"]
        fresh = sum(row.ended and row.same_as is None for row in sweep.rows)
        parts = sum(sweep.search.progress.get(row.trial, 0.0) for row in going)
        done = fresh + parts - sweep.began_with
        elapsed = time.monotonic() - self._started
        left = sweep.study.budget - fresh - parts
        text = f"{fresh} of {sweep.study.budget} trials, {_minutes(elapsed)} gone"
        if done > 0.5 and left > 0:
            text += f", about {_minutes(elapsed / done * left)} left"
        for one in sweep.study.objectives:
            values = [(value, row) for row in sweep.rows if (value := _value(row, one.name)) is not None and row.ended]
            if values:
                value, row = (min if one.minimize else max)(values, key=lambda pair: pair[0])
                text += f"; best {one.name} {_figure(one.name, value)} (trial {row.trial})"
        return text


def _minutes(seconds: float) -> str:
    """Return a duration for people who wait: whole seconds, minutes, or hours with a tenth."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


def show_result(sweep: Sweep) -> None:
    """Print the frontier with the baselines in it, the trials that did not finish, and the folder."""
    console = Console()
    if not console.is_terminal:
        console.width = 140
    objectives, rows, place = sweep.study.objectives, sweep.rows, sweep.store.place()
    failed = [row for row in rows if row.same_as is None and row.status == "finished" and _near_chance(row, place)]
    best = frontier(rows, objectives, {row.trial for row in failed})
    best = best if len(objectives) > 1 else best[:1]
    chosen = best + [row for row in rows if row.name and row not in best and row.status == "finished"]
    names = " against ".join(one.name for one in objectives)
    table = Table("trial", title=f"The frontier: {names}" if len(objectives) > 1 else f"The best by {names}")
    table.add_column("configuration", overflow="fold")
    for one in objectives:
        table.add_column(one.name, justify="right", no_wrap=True)
        if one.kind == "step_s":
            table.add_column("speed-up", justify="right", no_wrap=True)
    for row in chosen:
        label = f"{row.trial} {row.name or ''}".strip()
        cells = []
        for one in objectives:
            figure = row.figures.get(one.name, Figure(None))
            cells.append(_figure(one.name, figure.value) + _uncertain(one, figure))
            if one.kind == "step_s":
                cells.append(_speedup(figure))
        beaten = "" if row in best else " (beaten)" if row.feasible is not False else " (breaks constraints)"
        table.add_row(label, row.notation + beaten, *cells)
    console.print(table)
    words = ["±: standard deviation over seeds"] if len(sweep.study.seeds) > 1 else []
    sources = sorted({row.compute for row in chosen if row.compute})
    if sources:
        words.append(
            f"compute: {' and '.join(sources)}; in brackets the 90 % interval of prices, and speed-ups are over the dense trial"
        )
    if words:
        console.print(f"{'; '.join(words)}.", highlight=False, soft_wrap=True)
    for row in failed:
        said = f"Trial {row.trial} learned nothing: its accuracy is near chance, whatever its speed ({row.notation})."
        console.print(said, highlight=False, soft_wrap=True)
    counts = Counter("repeated" if row.same_as is not None else row.status for row in rows)
    ended = ", ".join(f"{count} {status}" for status, count in counts.items())
    console.print(f"{ended or 'no trials'}: {sweep.store.out}", highlight=False, soft_wrap=True)
    if best and not sweep.study.confirm:
        said = "The frontier is unconfirmed: the seeds that chose it also judge it. `--confirm 5 --resume` confirms it on others."
        console.print(said, highlight=False, soft_wrap=True)


def show_power(sweep: Sweep, confirmation: Sweep) -> None:
    """Print the chance that a confirmation calls a setting safe, by the spread over the seeds of the sweep that chose."""
    chosen = {
        int(one.name.removeprefix("trial-")) for one in confirmation.study.baselines if one.name.startswith("trial-")
    }
    runs = [name for row in sweep.rows if row.trial in chosen for name in row.runs]
    spread = paired_spread(analysis.load(sweep.store.out), runs)
    seeds, count = confirmation.study.seeds, len(chosen)
    said = f"{plural(count, 'setting')} will be judged beside dense on seeds {listed(seeds)}."
    if not math.isnan(spread.deviation):
        sound, near = (
            chance_of_safe(spread, len(seeds), settings=count, harm=share * spread.margin) for share in (0, 0.5)
        )
        said += (
            f" With the spread of the seeds that chose, {spread.deviation:.2f} {spread.unit}, a setting as good as dense is called "
            f"safe with a chance of {sound:.0%}, and one that is {0.5 * spread.margin:g} worse with {near:.0%}."
        )
    Console().print(said, highlight=False, soft_wrap=True)


def show_confirmation(sweep: Sweep | None) -> None:
    """Print the verdicts on a sweep's choice, by the fresh seeds alone; `None` says that nothing was worth confirming."""
    console = Console()
    if not console.is_terminal:
        console.width = 140
    if sweep is None:
        said = "Nothing on the frontier comes within the margin of dense on the seeds that chose: there is nothing to confirm."
        console.print(said, highlight=False, soft_wrap=True)
        return
    found = analysis.safe_set(analysis.load(sweep.store.out))
    table = Table("setting", title=f"The choice, judged on seeds {listed(sweep.study.seeds)}, which did not choose it")
    for name in ("harm", "at most", "margin", "verdict"):
        table.add_column(name, justify="right" if name != "verdict" else "left")
    for row in found.to_dict("records"):
        figures = [f"{row['harm']:+.2f}", f"{row['harm_high']:+.2f}", f"{row['within']:g} {row['unit']}"]
        table.add_row(row["setting"], *figures, f"{row['verdict']}{f' ({why})' if (why := row['lacking']) else ''}")
    console.print(table)
    console.print(RULE, highlight=False, soft_wrap=True)
    said, code = _taken_home(sweep, found)
    if code:
        console.print(said, highlight=False, soft_wrap=True)
        console.print(code, highlight=False, markup=False, soft_wrap=True)
    said = f"The choice for every network, with pictures: `raysim report {sweep.store.out.rsplit('/', 1)[0]}`."
    console.print(said, highlight=False, soft_wrap=True)


def _taken_home(sweep: Sweep, found: pd.DataFrame) -> tuple[str, str]:
    """Return the best of the judged settings in a sentence, and as lines for another training loop; empty where all are harmful.

    The best is the first by the study's first objective among the safe ones, or where there are none among the undecided ones.
    """
    for verdict, condition in (("safe", ""), ("undecided", ", once more seeds have shown it to be safe")):
        judged = found[found["verdict"] == verdict].to_dict("records")
        place = sweep.store.place()
        for row in frontier(sweep.rows, sweep.study.objectives) if judged else []:
            run = Run(place / row.runs[0]).row
            for one in judged:
                if all(run.get(key, one[key]) == one[key] for key in COMPRESSION) and (code := snippet(run)):
                    return f"{one['setting']} in your own training{condition}:", code
    return "", ""


def _near_chance(row: TrialRow, place: Place) -> bool:
    """Return whether the accuracy or another share of a trial, mean over its seeds, is near chance, compression on.

    `place`: the study's folder.
    """
    skills = []
    for name in row.runs:
        run = Run(place / name).row
        measure = next((one for one in measures_of(run).values() if one.points), None)
        if measure is not None:
            reached, chance = run.get(f"final_{measure.name}_on"), run.get(f"chance_{measure.name}")
            skills += [measure.skill(reached, chance)] if reached is not None and chance is not None else []
    return bool(skills) and sum(skills) / len(skills) < SKILL


def _uncertain(objective: Objective, figure: Figure) -> str:
    """Return the interval of a price, or the standard deviation over seeds."""
    if figure.low is not None and figure.high is not None:
        return f" ({_figure(objective.name, figure.low)} to {_figure(objective.name, figure.high)})"
    return f" ± {_figure(objective.name, figure.spread)}" if figure.spread is not None else ""


def _speedup(figure: Figure) -> str:
    if figure.speedup is None:
        return "-"
    found = analysis.Estimate(*figure.speedup)
    alike = "" if found.verdict != "not distinguishable" or found.low == found.high else ", not distinguishable"
    return f"{found.value:.2f}x ({found.low:.2f} to {found.high:.2f}){alike}"


def _value(row: TrialRow, name: str) -> float | None:
    figure = row.figures.get(name)
    return None if figure is None else figure.value


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name.startswith(("step_s", "time_to_target_s")):
        return format_seconds(value)
    return format_bytes(value) if name == "wire_bytes" else f"{value:.4f}"
