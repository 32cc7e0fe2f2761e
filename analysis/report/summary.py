"""The summary: the setting to use on each network, and the evidence."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from analysis.comparison.rule import RULE
from analysis.report.adopt import adoption
from analysis.report.blocks import Block, Cell, Column, Heading, Section, Table, Text
from analysis.report.figures import ByNetwork
from analysis.report.material import MODES, WORTH, Job, Material, SettingRuns
from analysis.report.words import against_dense, bytes_of, listed, plural, seconds, speedup, step_time

GAIN = f"{100 * (WORTH - 1):.0f} %"
COLUMNS = (
    Column("network"),
    Column("setting"),
    Column("step", number=True),
    Column("dense step", number=True),
    Column("speed-up", number=True),
    Column("bytes a step", number=True),
    Column("with compression", number=True),
    Column("switched off", number=True),
    Column("evidence", long=True),
)


def section(material: Material) -> Section:
    """Return the recommended setting of every job and network, in words and as a table."""
    if not material.jobs and material.probes:
        return Section("summary", "Summary", absent="The runs here are candidates of a probe, which train nothing.")
    if not material.jobs:
        return Section("summary", "Summary", absent="No run here is finished yet, so there is nothing to recommend.")
    return Section("summary", "Summary", [block for job in material.jobs for block in _blocks(job, material)])


def _blocks(job: Job, material: Material) -> Iterator[Block]:
    if len(material.jobs) > 1:
        yield Heading(job.title)
    of = f"{job.title}: " if len(material.jobs) > 1 else ""
    yield Text(ByNetwork({network: f"{of}{_lead(job, network)}" for network in material.networks}), "lead")
    yield Text(_what(job))
    if not job.priced:
        return
    yield Table(
        f"{job.key}-recommended",
        f"{job.title}: the fastest setting that is shown to be safe, by network; dense where that is not at least {GAIN} "
        f"faster; without dense runs, the fastest setting. {job.metric.text.capitalize()} is from the last evaluation, "
        "mean ± standard deviation over seeds; a setting is written forward / backward. Steps and speed-ups have their 90 % "
        f"intervals in brackets. Compute: {job.source}.",
        COLUMNS,
        [_row(job, network) for network in material.networks],
        current=0,
    )
    yield from _adoption(job, material)
    reference = job.dense if job.dense in job.priced and job.dense is not None else job.priced[0]
    yield from (Text(f"Of the recording of `{reference.name}`: {note}", "note") for note in reference.notes)
    judged = next((one.judged for one in job.settings if one.judged), None)
    if judged is not None:
        undecided = sum(one.verdict == "undecided" for one in job.settings)
        text = f"{RULE} {_basis(job)}"
        if undecided:
            text += f" {plural(undecided, 'setting')} {'is' if undecided == 1 else 'are'} undecided."
        yield Text(text, "note")


def _adoption(job: Job, material: Material) -> Iterator[Block]:
    """Yield the recommended or most promising setting of each network as lines for the reader's own training loop."""
    found = {network: adoption(job, network) for network in material.networks}
    if any(one.code for one in found.values()):
        yield Text(ByNetwork({network: one.text for network, one in found.items()}))
        yield Text(ByNetwork({network: one.code or "# dense" for network, one in found.items()}), "python")


def _basis(job: Job) -> str:
    """Return which seeds chose among settings, and which judge the choice."""
    confirmed = [one for one in job.settings if one.judged.get("confirmed_on")]
    if not confirmed:
        said = "The seeds that chose a setting also judge it here: the choice is unconfirmed."
        return f"{said} `raysim sweep --confirm 5` confirms it on others."
    chose, fresh = (
        sorted({seed for one in confirmed for seed in one.judged[name]}) for name in ("chose_on", "confirmed_on")
    )
    return (
        f"{plural(len(confirmed), 'setting')} {'was' if len(confirmed) == 1 else 'were'} chosen on seeds {listed(chose)} and "
        f"judged on seeds {listed(fresh)} alone, which chose nothing. Of the others, only harm can be shown."
    )


def _what(job: Job) -> str:
    """Return a description of the runs."""
    runs = sum(len(one.runs) for one in job.settings)
    diverged = sum(one.diverged for one in job.settings)
    seeds = sorted({one.seeds for one in job.settings})
    spread = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    each = f"{spread} seed{'s' if seeds[-1] > 1 else ''} each"
    text = f"{job.title}: {plural(runs, 'run')} of {plural(len(job.settings), 'setting')}, {each}"
    if diverged:
        text += f"; {diverged} diverged"
    varied = [f"{name} {listed(values)}" for name, values in _varied(job) if len(values) > 1]
    if varied:
        text += f"; of different {' and '.join(varied)}"
    return f"{text}. Bytes are counted on the packets; steps are simulated on the network. {job.compute}"


def _varied(job: Job) -> list[tuple[str, list[Any]]]:
    """Return the numbers of steps and the seeds of a job's runs."""
    columns = (("steps", "steps_done"), ("seeds", "seed"))
    return [(word, sorted(job.runs[name].dropna().unique().tolist())) for word, name in columns if name in job.runs]


def _lead(job: Job, network: str) -> str:
    if not job.priced:
        return "No run here has profiled actions, so no step can be priced: train with `profile_every_steps` of at least 1."
    chosen = job.recommended(network)
    if chosen is None or job.dense is None:
        fastest = _fastest(job, network)
        return (
            f"On {network}, the fastest setting is `{fastest.name}`: {_facts(job, fastest, network)} There is no dense run to compare "
            "with, so none is recommended: train the same job with `forward=Identity backward=Identity`, once for each seed."
        )
    if len(job.settings) == 1:
        return f"On {network}, dense: {_facts(job, chosen, network)} Nothing else was trained, so nothing is compared."
    if chosen.dense:
        return f"On {network}, stay dense: {seconds(chosen.step_s[network].value)} a step. {_why_dense(job, network)}"
    return (
        f"On {network}, use `{chosen.name}`: {_faster_than_dense(chosen, network)}, with {chosen.factor:.1f} times "
        f"fewer bytes. It takes {_facts(job, chosen, network)}{_sure(chosen)}"
    )


def _sure(setting: SettingRuns) -> str:
    """Return how sure it is that a setting does no harm, where that was judged."""
    judged = setting.judged
    if not judged:
        return ""
    return (
        f" At {judged['confidence']:.0%} confidence, over {_seeds_of(judged)}, it is at most "
        f"{judged['within']:g} {judged['unit']} worse than dense."
    )


def _seeds_of(judged: Mapping[str, Any]) -> str:
    """Return the number of seeds that a verdict rests on, and whether they chose nothing."""
    return f"{judged['seeds']}{' fresh' if judged.get('confirmed_on') else ''} seeds"


def _faster_than_dense(setting: SettingRuns, network: str) -> str:
    """Return the speed-up of a setting over its dense setting, with the interval and the dense step."""
    value, low, high = setting.speedup[network]
    dense = seconds(setting.dense_step_s[network])
    return f"{value:.2f} times as fast as dense ({low:.2f} to {high:.2f}; dense takes {dense})"


def _facts(job: Job, setting: SettingRuns, network: str) -> str:
    """Return the seconds and bytes of a step and the quality, beside dense where the setting is not dense."""
    dense = job.dense if job.dense is not setting else None
    reached = [
        f"{job.metric.write(*setting.quality[mode][:2])} with compression {mode} at inference"
        + (f" (dense {job.metric.write(*dense.quality[mode][:2])})" if dense is not None else "")
        for mode in MODES
    ]
    return (
        f"{seconds(setting.step_s[network].value)} a step, {bytes_of(setting.wire_bytes)} on the wire. "
        f"{job.metric.text.capitalize()}: {', '.join(reached)}."
    )


def _fastest(job: Job, network: str) -> SettingRuns:
    return min(job.priced, key=lambda one: one.step_s[network].value)


def _why_dense(job: Job, network: str) -> str:
    faster = job.faster(network)
    if not faster:
        return f"No setting that was tried is {GAIN} faster or more here."
    best = job.promising(network)
    if best is None:
        return f"Of {plural(len(faster), 'faster setting')} none is shown to be safe."
    return (
        f"Of {plural(len(faster), 'faster setting')} none is shown to be safe. The most promising is `{best.name}`: "
        f"{_faster_than_dense(best, network)}; {against_dense(best)}."
    )


def _short_why(job: Job, network: str) -> str:
    faster = job.faster(network)
    counts = Counter(one.verdict for one in faster)
    if not faster:
        return f"nothing tried is {GAIN} faster or more"
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if verdict)
    return f"{len(faster)} faster, none shown to be safe" + (f" ({told})" if told else "")


def _row(job: Job, network: str) -> list[Cell]:
    recommended = job.recommended(network)
    chosen = recommended or _fastest(job, network)
    dense_s = chosen.dense_step_s[network] if chosen.dense_step_s else math.nan
    if recommended is None:
        evidence = "no dense run"
    elif chosen.dense:
        evidence = _short_why(job, network)
    else:
        evidence = f"{chosen.verdict}: {against_dense(chosen)}, {_seeds_of(chosen.judged)}"
    faster = speedup(chosen.speedup[network]) if chosen.speedup else "unknown"
    return [
        Cell(network),
        Cell(chosen.name, code=True),
        Cell(step_time(chosen.step_s[network])),
        Cell(seconds(dense_s)),
        Cell("1" if chosen.dense else faster),
        Cell(bytes_of(chosen.wire_bytes)),
        Cell(job.metric.write(*chosen.quality["on"][:2])),
        Cell(job.metric.write(*chosen.quality["off"][:2])),
        Cell(evidence),
    ]
