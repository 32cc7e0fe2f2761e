"""The result of a sweep in the terminal: its frontier, the report's verdict, and the confirmation of the choice."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from raysim import analysis
from raysim.analysis.comparison.branches import ASSUMPTION, branch_harms
from raysim.analysis.comparison.choice import divergence
from raysim.analysis.comparison.contexts import paired_spread
from raysim.analysis.comparison.rule import RULE, SKILL, chance_of_safe
from raysim.analysis.data.folders import over
from raysim.analysis.report.gather import gather
from raysim.analysis.report.reuse import adoption
from raysim.analysis.report.tables import branch_frame, safe_from
from raysim.analysis.report.words import answer_for, listed
from raysim.console import PlainConsole
from raysim.network.presets import parse_network
from raysim.network.prices import times
from raysim.quality import Measure, measures_of
from raysim.records import Run
from raysim.sweeps.confirm import chosen_trials
from raysim.sweeps.objectives import Figure, Objective, Pricing
from raysim.sweeps.progress import format_figure
from raysim.sweeps.trial_rows import TrialRow, best_trials
from raysim.units import decimals, plural

if TYPE_CHECKING:
    from raysim.sweeps.runner import Sweep

WIDTH = 140  # of tables in a file or a pipe


def show_result(sweep: Sweep) -> None:
    """Print the frontier with the baselines in it, the verdict of the report, the trials that did not finish, and the folder."""
    console = PlainConsole(WIDTH)
    say = partial(console.print, soft_wrap=True)
    if sweep.study.branches is not None:
        show_branches(sweep)
        return
    objectives, rows = sweep.study.objectives, sweep.rows
    failed = [row for row in rows if row.same_as is None and row.status == "finished" and _near_chance(row, sweep)]
    best = best_trials(rows, objectives, {row.trial for row in failed})
    best = best if len(objectives) > 1 else best[:1]
    shown = best + [row for row in rows if row.name and row not in best and row.status == "finished"]
    console.print(_table(shown, best, failed, objectives))
    legend = ["±: standard deviation over seeds"] if len(sweep.study.seeds) > 1 else []
    sources = sorted({row.compute for row in shown if row.compute})
    if sources:
        transports = " and ".join(dict.fromkeys(over(each.transport) for each in objectives if each.transport))
        legend.append(
            f"prices {transports}, with 90 % intervals in brackets; speed-ups are over the dense trial; "
            f"compute: {' and '.join(sources)}"
        )
    if legend:
        say(f"{'; '.join(legend)}.")
    if failed:
        say(_learned_nothing(failed, sweep))
    if sweep.results is not None:
        _show_verdicts(console, sweep.results, sweep.study.pricing)
    say(_counts(sweep))
    for line in sweep.search.summary():
        say(line)
    if best and not sweep.study.confirm and sweep.study.race is None:
        say(
            "The frontier is unconfirmed: the seeds that chose it also judge it. `--confirm 5 --resume` judges it on held-out seeds."
        )


def sweep_figures(sweep: Sweep) -> dict[str, Any]:
    """Return the trials of a sweep and its verdicts, for JSON; of a confirmed one, the verdicts on held-out seeds."""
    objectives = sweep.study.objectives
    trials = [
        {
            name: getattr(row, name)
            for name in ("trial", "name", "status", "notation", "params", "seeds", "error", "same_as")
        }
        | {"figures": {name: figure._asdict() for name, figure in row.figures.items()}}
        for row in sweep.rows
    ]
    best = {row.trial for row in best_trials(sweep.rows, objectives)}
    results = analysis.load(sweep.store.out)
    verdicts = []
    if len(results) and sweep.study.branches is None:
        network = parse_network(results.network_of(results.runs["study"].dropna()))
        for job in gather(results, [network], **sweep.study.pricing).jobs:
            settings = [
                {"setting": setting.name, "verdict": setting.verdict or None, "seeds": setting.seeds}
                for setting in job.settings
            ]
            verdicts.append(
                {
                    "job": job.title,
                    "network": repr(network),
                    "answer": answer_for(job, repr(network)).text,
                    "settings": settings,
                }
            )
    return {
        "study": sweep.study.name,
        "out": sweep.store.out,
        "objectives": [objective.name for objective in objectives],
        "trials": trials,
        "frontier": sorted(best),
        "verdicts": verdicts,
        "race": sweep.search.summary(),
    }


def show_branches(sweep: Sweep) -> None:
    """Print each setting's harm by the compressed part of training, and the steps from which on it is safe."""
    console = PlainConsole(WIDTH)
    say = partial(console.print, soft_wrap=True)
    harms = branch_harms(sweep.results) if sweep.results is not None else None
    if harms is None or not len(harms):
        say("No branch can be judged: it needs a setting and dense with the same seed, both finished.")
    else:
        unit, within = harms["unit"].iloc[0], harms["within"].iloc[0]
        table = Table(title=f"Harm in {unit}, margin {within:g}, by the steps that are compressed")
        frame = branch_frame(harms)
        for column in frame:
            table.add_column(str(column))
        for row in frame.itertuples(index=False):
            table.add_row(*row)
        console.print(table)
        for _, of_setting in harms.groupby("setting", sort=False):
            say(safe_from(of_setting).replace("`", ""))
        say(ASSUMPTION)
    say(_counts(sweep))


def _counts(sweep: Sweep) -> str:
    """Return the trials by status, and the study's folder."""
    counts = Counter("repeated" if row.same_as is not None else row.status for row in sweep.rows)
    return f"{', '.join(f'{count} {status}' for status, count in counts.items()) or 'no trials'}: {sweep.store.out}"


def _table(
    shown: Sequence[TrialRow], best: Sequence[TrialRow], failed: Sequence[TrialRow], objectives: Sequence[Objective]
) -> Table:
    names = " against ".join(objective.name for objective in objectives)
    table = Table("trial", title=f"The frontier: {names}" if len(objectives) > 1 else f"The best by {names}")
    table.add_column("configuration", overflow="fold")
    for objective in objectives:
        table.add_column(objective.name, justify="right", no_wrap=True)
        if objective.kind == "step_s":
            table.add_column("speed-up", justify="right", no_wrap=True)
    for row in shown:
        label = f"{row.trial} {row.name or ''}".strip()
        cells = []
        for objective in objectives:
            figure = row.figures.get(objective.name, Figure(None))
            cells.append(format_figure(objective.name, figure.value) + _uncertain(objective, figure))
            if objective.kind == "step_s":
                cells.append(_speedup(figure))
        table.add_row(label, row.notation + ("" if row in best else _mark(row, failed, objectives)), *cells)
    return table


def _mark(row: TrialRow, failed: Sequence[TrialRow], objectives: Sequence[Objective]) -> str:
    """Return why a baseline is not on the frontier."""
    if row in failed:
        return " (learned nothing)"
    if row.feasible is False:
        return " (breaks constraints)"
    missing = next((objective.name for objective in objectives if row.value(objective.name) is None), None)
    return " (beaten)" if missing is None else f" (without {missing})"


def _learned_nothing(failed: Sequence[TrialRow], sweep: Sweep) -> str:
    """Return a sentence on the trials near chance."""
    count = sum(row.same_as is None and row.status == "finished" for row in sweep.rows)
    name = sweep.study.dense.name if sweep.study.dense is not None else None
    dense = ""
    if name is not None and any(row.name == name for row in failed):
        dense = " Dense is among them, so no setting can be called safe: train longer, or at another learning rate."
    return (
        f"{len(failed)} of {plural(count, 'trial')} learned nothing: by {_measure(failed[0], sweep).name} less than {SKILL:g} % "
        f"better than chance (trial {listed([row.trial for row in failed])}).{dense}"
    )


def _show_verdicts(console: Console, results: analysis.Results, pricing: Pricing, *, code: bool = False) -> None:
    """Print the verdict of the report on each job, on the network and transport of the study; `code`: with lines to adopt it."""
    say = partial(console.print, soft_wrap=True)
    network = parse_network(results.network_of(results.runs["study"].dropna()))
    name = repr(network)
    jobs = gather(results, [network], **pricing).jobs
    for job in jobs:
        title = f"{job.title}: " if len(jobs) > 1 else ""
        say(f"{title}{answer_for(job, name).text}".replace("`", ""))
        home = adoption(job, name) if code else None
        if home is not None and home.code:
            say(home.text.replace("`", ""))
            say(home.code)


def show_power(sweep: Sweep, confirmation: Sweep) -> None:
    """Print the chance that a confirmation calls a setting safe, from the spread over seeds in the sweep."""
    chosen = chosen_trials(confirmation.study)
    runs = [name for row in sweep.rows if row.trial in chosen for name in row.runs]
    spread = paired_spread(analysis.load(sweep.store.out), runs)
    seeds, count = confirmation.study.seeds, len(chosen)
    text = f"{plural(count, 'setting')} will be compared with dense on held-out seeds {listed(seeds)}."
    if not math.isnan(spread.deviation):
        sound, near = (
            chance_of_safe(spread, len(seeds), settings=count, harm=share * spread.margin) for share in (0, 0.5)
        )
        text += (
            f" With the spread of the seeds that chose, {spread.deviation:.2f} {spread.unit}, a setting as good as dense is called "
            f"safe with a chance of {sound:.0%}, and one that is {0.5 * spread.margin:g} worse with {near:.0%}."
        )
    PlainConsole().print(text, soft_wrap=True)


def show_confirmation(sweep: Sweep | None) -> None:
    """Print the verdicts on a sweep's choice, from the held-out seeds only; `None` if no trial was worth confirming."""
    console = PlainConsole(WIDTH)
    say = partial(console.print, soft_wrap=True)
    if sweep is None:
        say("Nothing to confirm: no trial on the frontier comes within the margin of dense on the seeds that chose.")
        return
    out = sweep.store.out.rsplit("/", 1)[0]  # the folder of the confirmed study
    results = analysis.load(out)
    judged = analysis.settings(results)
    table = Table("setting", title=f"The choice, judged on held-out seeds {listed(sweep.study.seeds)}")
    for name in ("harm", "at most", "margin", "verdict"):
        table.add_column(name, justify="right" if name != "verdict" else "left")
    for row in judged[judged["confirmed_on"].map(bool)].to_dict("records"):
        harms = [decimals(row[name], 2, row["within"], sign="+") for name in ("harm", "harm_high")]
        figures = [*harms, f"{row['within']:g} {row['unit']}"]
        why = row["lacking"] or (divergence(row) if row["verdict"] == "safe" else "")
        table.add_row(row["setting"], *figures, f"{row['verdict']}{f' ({why})' if why else ''}")
    console.print(table)
    say(RULE)
    _show_verdicts(console, results, sweep.study.pricing, code=True)
    say(f"The choice for every network, with figures: `{shlex.join(['raysim', 'report', out])}`.")


def _near_chance(row: TrialRow, sweep: Sweep) -> bool:
    """Return whether the quality of a trial, averaged over its seeds with compression on, is near chance."""
    measure, skills = _measure(row, sweep), []
    for name in row.runs:
        run = Run(sweep.store.place() / name).row
        reached, chance = run.get(f"final_{measure.name}_on"), run.get(f"chance_{measure.name}")
        skills += [measure.skill(reached, chance)] if reached is not None and chance is not None else []
    return bool(skills) and sum(skills) / len(skills) < SKILL


def _measure(row: TrialRow, sweep: Sweep) -> Measure:
    """Return the measure by which the study chooses: its first objective of quality, or else the run's first measure."""
    qualities = (objective.quality for objective in sweep.study.objectives)
    chosen = next((quality for quality in qualities if quality is not None), None)
    return chosen or next(iter(measures_of(Run(sweep.store.place() / row.runs[0]).row).values()))


def _uncertain(objective: Objective, figure: Figure) -> str:
    """Return the interval of a price, or the standard deviation over seeds."""
    if figure.low is not None and figure.high is not None:
        return f" ({format_figure(objective.name, figure.low)} to {format_figure(objective.name, figure.high)})"
    return f" ± {format_figure(objective.name, figure.spread)}" if figure.spread is not None else ""


def _speedup(figure: Figure) -> str:
    if figure.speedup is None:
        return "-"
    speedup = analysis.Estimate(*figure.speedup)
    exact = speedup.low == speedup.high
    mark = ", not distinguishable" if speedup.verdict == "not distinguishable" and not exact else ""
    return f"{times(speedup.value)}x ({times(speedup.low)} to {times(speedup.high)}){mark}"
