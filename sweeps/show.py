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

from raysim import analysis
from raysim.analysis.comparison.power import chance_of_safe, paired_spread
from raysim.analysis.comparison.rule import RULE, SKILL
from raysim.analysis.comparison.statistics import MIN_SEEDS
from raysim.analysis.data.studies import over
from raysim.analysis.report.adopt import adoption
from raysim.analysis.report.gather import gather
from raysim.analysis.report.verdict import verdict
from raysim.analysis.report.words import listed, plural
from raysim.engine.token import dashboard_sentence
from raysim.network.memory import format_bytes
from raysim.network.presets import parse_network
from raysim.quality import Measure, measures_of
from raysim.records import Run
from raysim.show.terminal import format_seconds
from raysim.sweeps.objectives import Figure, Objective
from raysim.sweeps.rows import Rows, TrialRow

if TYPE_CHECKING:
    from raysim.sweeps.runner import Sweep
    from raysim.sweeps.study import Study

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
        for sentence in beforehand(sweep.study):
            console.print(sentence, highlight=False, markup=False, soft_wrap=True)

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


def beforehand(study: Study) -> list[str]:
    """Return what to know of a study before its first run, a sentence each."""
    said = []
    drawn = study.budget - len(study.baselines)
    if drawn < len(study.grid):
        said.append(f"{drawn} of {len(study.grid)} grid points, drawn with seed {study.sampler_seed}.")
    if study.early_stopping == "asha":
        said.append('ASHA stops poor trials early; `early_stopping = "none"` trains all to their end.')
    if len(study.seeds) < MIN_SEEDS and not study.confirm and any(one.quality for one in study.objectives):
        said.append(
            f"{plural(len(study.seeds), 'seed')} cannot support a verdict. Train at least {MIN_SEEDS}, better 5, by `--seeds 5`, or "
            "judge the choice by `--confirm 5`."
        )
    return said


def show_result(sweep: Sweep) -> None:
    """Print the frontier with the baselines in it, the verdict of the report, the trials that did not finish, and the folder."""
    console = Console()
    if not console.is_terminal:
        console.width = 140
    objectives, rows = sweep.study.objectives, sweep.rows
    failed = [row for row in rows if row.same_as is None and row.status == "finished" and _near_chance(row, sweep)]
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
        table.add_row(label, row.notation + ("" if row in best else _mark(row, failed, objectives)), *cells)
    console.print(table)
    words = ["±: standard deviation over seeds"] if len(sweep.study.seeds) > 1 else []
    sources = sorted({row.compute for row in chosen if row.compute})
    if sources:
        transports = " and ".join(dict.fromkeys(over(one.transport) for one in objectives if one.transport))
        words.append(
            f"prices {transports}, with 90 % intervals in brackets; speed-ups are over the dense trial; "
            f"compute: {' and '.join(sources)}"
        )
    if words:
        console.print(f"{'; '.join(words)}.", highlight=False, soft_wrap=True)
    if failed:
        console.print(_learned_nothing(failed, sweep), highlight=False, soft_wrap=True)
    if sweep.results is not None:
        _show_verdicts(console, sweep.results, sweep.study.compute)
    counts = Counter("repeated" if row.same_as is not None else row.status for row in rows)
    ended = ", ".join(f"{count} {status}" for status, count in counts.items())
    console.print(f"{ended or 'no trials'}: {sweep.store.out}", highlight=False, soft_wrap=True)
    if best and not sweep.study.confirm:
        said = "The frontier is unconfirmed: the seeds that chose it also judge it. `--confirm 5 --resume` judges it on held-out seeds."
        console.print(said, highlight=False, soft_wrap=True)


def _mark(row: TrialRow, failed: Sequence[TrialRow], objectives: Sequence[Objective]) -> str:
    """Return why a baseline is not on the frontier."""
    if row in failed:
        return " (learned nothing)"
    if row.feasible is False:
        return " (breaks constraints)"
    missing = next((one.name for one in objectives if _value(row, one.name) is None), None)
    return " (beaten)" if missing is None else f" (without {missing})"


def _learned_nothing(failed: Sequence[TrialRow], sweep: Sweep) -> str:
    """Return the trials that are near chance in a sentence."""
    count = sum(row.same_as is None and row.status == "finished" for row in sweep.rows)
    dense = ""
    if any(
        row.name is not None and sweep.study.dense is not None and row.name == sweep.study.dense.name for row in failed
    ):
        dense = " Dense is among them, so no setting can be called safe: train longer, or at another learning rate."
    return (
        f"{len(failed)} of {plural(count, 'trial')} learned nothing: by {_measure(failed[0], sweep).name} less than {SKILL:g} % "
        f"better than chance (trial {listed([row.trial for row in failed])}).{dense}"
    )


def _show_verdicts(console: Console, results: analysis.Results, compute: str, *, code: bool = False) -> None:
    """Print the verdict of the report on each job, on the network and transport of the study; `code`: with lines to take home."""
    network = parse_network(results.network_of(results.runs["study"].dropna()))
    name = repr(network)
    jobs = gather(results, {name: network}, compute).jobs
    for job in jobs:
        of = f"{job.title}: " if len(jobs) > 1 else ""
        console.print(f"{of}{verdict(job, name)}".replace("`", ""), highlight=False, markup=False, soft_wrap=True)
        home = adoption(job, name) if code else None
        if home is not None and home.code:
            for text in (home.text.replace("`", ""), home.code):
                console.print(text, highlight=False, markup=False, soft_wrap=True)


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
    out = sweep.store.out.rsplit("/", 1)[0]  # of the study whose choice this is
    results = analysis.load(out)
    judged = analysis.safe_set(results)
    table = Table("setting", title=f"The choice, judged on held-out seeds {listed(sweep.study.seeds)}")
    for name in ("harm", "at most", "margin", "verdict"):
        table.add_column(name, justify="right" if name != "verdict" else "left")
    for row in judged[judged["confirmed_on"].map(bool)].to_dict("records"):
        figures = [f"{row['harm']:+.2f}", f"{row['harm_high']:+.2f}", f"{row['within']:g} {row['unit']}"]
        table.add_row(row["setting"], *figures, f"{row['verdict']}{f' ({why})' if (why := row['lacking']) else ''}")
    console.print(table)
    console.print(RULE, highlight=False, soft_wrap=True)
    _show_verdicts(console, results, sweep.study.compute, code=True)
    said = f"The choice for every network, with pictures: `raysim report {out}`."
    console.print(said, highlight=False, soft_wrap=True)


def _near_chance(row: TrialRow, sweep: Sweep) -> bool:
    """Return whether the quality of a trial, mean over its seeds, is near chance, compression on."""
    measure, skills = _measure(row, sweep), []
    for name in row.runs:
        run = Run(sweep.store.place() / name).row
        reached, chance = run.get(f"final_{measure.name}_on"), run.get(f"chance_{measure.name}")
        skills += [measure.skill(reached, chance)] if reached is not None and chance is not None else []
    return bool(skills) and sum(skills) / len(skills) < SKILL


def _measure(row: TrialRow, sweep: Sweep) -> Measure:
    """Return the measure by which the study chooses settings: its first objective of quality, or else the run's first measure."""
    chosen = next((one.quality for one in sweep.study.objectives if one.quality is not None), None)
    return chosen or next(iter(measures_of(Run(sweep.store.place() / row.runs[0]).row).values()))


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
