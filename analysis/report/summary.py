"""The summary: the setting to use on each network, and the evidence."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from raysim.analysis.comparison.rule import RULE
from raysim.analysis.data.studies import over
from raysim.analysis.report.adopt import adoption
from raysim.analysis.report.blocks import Block, Cell, Column, Heading, Section, Table, Text
from raysim.analysis.report.figures import ByNetwork
from raysim.analysis.report.material import Job, Material
from raysim.analysis.report.verdict import GAIN, fastest, seeds_of, verdict
from raysim.analysis.report.words import against_dense, bytes_of, listed, plural, seconds, speedup, step_time

COLUMNS = (
    Column("network"),
    Column("setting"),
    Column("step", number=True),
    Column("dense step", number=True),
    Column("speed-up", number=True),
    Column("bytes a step", number=True),
    Column("on", number=True),
    Column("off", number=True),
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
    yield Text(ByNetwork({network: f"{of}{verdict(job, network)}" for network in material.networks}), "lead")
    yield Text(_what(job))
    if not job.priced:
        return
    yield Table(
        f"{job.key}-recommended",
        f"{job.title}: for each network, the fastest setting shown to be safe, or dense if compression gains less than {GAIN}; "
        f"without dense runs, the fastest setting. Steps are priced {over(job.transport)}, with 90 % intervals in brackets. "
        f"{job.metric.text.capitalize()} is that of the last evaluation, with compression on and off: mean ± standard deviation "
        f"over seeds. A setting is written forward / backward. Compute: {job.source}.",
        COLUMNS,
        [_row(job, network) for network in material.networks],
        current=0,
    )
    yield from _adoption(job, material)
    reference = job.dense if job.dense in job.priced and job.dense is not None else job.priced[0]
    yield from (Text(note, "note") for note in reference.notes)
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
        return f"{said} `raysim sweep --confirm 5` confirms it on held-out seeds."
    chose, fresh = (
        sorted({seed for one in confirmed for seed in one.judged[name]}) for name in ("chose_on", "confirmed_on")
    )
    return (
        f"{plural(len(confirmed), 'setting')} {'was' if len(confirmed) == 1 else 'were'} chosen on seeds {listed(chose)} and "
        f"judged on held-out seeds {listed(fresh)}. The other settings were not confirmed: they can be ruled out, but not called "
        "safe."
    )


def _what(job: Job) -> str:
    """Return a description of the runs."""
    runs = sum(len(one.runs) for one in job.settings)
    diverged = sum(one.diverged for one in job.settings)
    counts = sorted({one.seeds for one in job.settings})
    each = plural(counts[0], "seed") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"
    varied = " and ".join(f"{name} {listed(values)}" for name, values in _varied(job) if len(values) > 1).removeprefix(
        "seeds "
    )
    text = f"{job.title}: {plural(len(job.settings), 'setting')} x {each}{f' ({varied})' if varied else ''} = {plural(runs, 'run')}"
    if diverged:
        text += f", {diverged} diverged"
    return f"{text}. Bytes are counted on the packets; steps are simulated on the network. {job.compute}"


def _varied(job: Job) -> list[tuple[str, list[Any]]]:
    """Return the numbers of steps and the seeds of a job's runs."""
    columns = (("steps", "steps_done"), ("seeds", "seed"))
    return [(word, sorted(job.runs[name].dropna().unique().tolist())) for word, name in columns if name in job.runs]


def _short_why(job: Job, network: str) -> str:
    faster = job.faster(network)
    counts = Counter(one.verdict for one in faster)
    if not faster:
        return f"none is {GAIN} faster"
    told = ", ".join(f"{count} {named}" for named, count in counts.items() if named)
    return f"{len(faster)} faster, none safe" + (f" ({told})" if told else "")


def _row(job: Job, network: str) -> list[Cell]:
    recommended = job.recommended(network)
    chosen = recommended or fastest(job, network)
    dense_s = chosen.dense_step_s[network] if chosen.dense_step_s else math.nan
    if recommended is None:
        evidence = "no dense run"
    elif chosen.dense:
        evidence = _short_why(job, network)
    else:
        evidence = f"{chosen.verdict}: {against_dense(chosen, job.metric.measure)}, {seeds_of(chosen.judged)}"
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
