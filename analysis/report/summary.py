"""The answer: which setting to use on each network, in a sentence, a curve and a table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pandas as pd

from raysim.analysis.comparison.choice import divergence
from raysim.analysis.comparison.rule import RULE
from raysim.analysis.data.folders import over
from raysim.analysis.report.material import MODES, JobRuns, Material, SettingRuns
from raysim.analysis.report.page import (
    COLOURS,
    DENSE,
    Block,
    Chart,
    Panel,
    Style,
    Table,
    Text,
    axis,
    scatter_trace,
    style,
)
from raysim.analysis.report.reuse import adoption
from raysim.analysis.report.words import (
    GAIN,
    against_dense,
    answer_for,
    listed,
    measure_text,
    quality_formats,
    seeds_of,
)
from raysim.network.topology import Network
from raysim.units import plural

BANDWIDTHS_BPS = (*(step * 10.0**decade for decade in range(6, 11) for step in (1, 2, 5)), 1e11)
MOST_WARNINGS = 5  # distinct warnings of runs
MOST_CURVES = 4  # settings


def summary_blocks(job: JobRuns, material: Material) -> Iterator[Block]:
    """Yield the recommended setting of a job on every network, as sentences and as a table."""
    of = f"{job.title}: " if len(material.jobs) > 1 else ""
    answers = {network: answer_for(job, network) for network in material.networks}
    yield Text({network: each.headline for network, each in answers.items()}, "headline")
    yield Text({network: f"{of}{each.sentence}" for network, each in answers.items()}, "lead")
    if any(each.evidence for each in answers.values()):
        yield Text({network: each.evidence for network, each in answers.items()}, "evidence")
    if job.priced:
        yield _curve(job, material)
    yield Text(_counts(job))
    if not job.priced:
        return
    yield Table(
        f"{job.key}-recommended",
        f"For each network, the fastest setting shown to be safe, or dense if compression gains less than {GAIN}; "
        f"without dense runs, the fastest setting. Steps are priced {over(job.transport)}, with 90 % intervals in brackets. "
        f"Columns on and off: {measure_text(job.measure)} of the last evaluation with compression on and off, mean ± standard "
        "deviation over seeds. A setting is written forward / backward.",
        pd.DataFrame([_row(job, network) for network in material.networks]),
        quality_formats(job.measure),
    )
    adoptions = {network: adoption(job, network) for network in material.networks}
    if any(each.code for each in adoptions.values()):
        yield Text({network: each.text for network, each in adoptions.items()})
        yield Text({network: each.code or "# dense" for network, each in adoptions.items()}, "python")
    yield Text("\n".join(_caveats(job, material)), "details")


def _curve(job: JobRuns, material: Material) -> Chart:
    """Return the seconds of a step against the bandwidth of each network, of dense and of the settings chosen on some network."""
    settings = _curve_settings(job)
    traces = []
    for name, network in material.networks.items():
        networks = [_with_slowest(network, bps) for bps in BANDWIDTHS_BPS]
        for i, setting in enumerate(settings):
            look = DENSE if setting.dense else style(i - 1 if settings[0].dense else i)
            steps_s = material.steps_s(setting.runs, networks)
            traces.append(scatter_trace(setting.name, BANDWIDTHS_BPS, steps_s, look, "lines", network=name))
        if math.isfinite(bps := network.slowest_bps):
            steps = [setting.step_s[name].value for setting in settings]
            labels = [f"{setting.name} on {name}" for setting in settings]
            look = Style(COLOURS[1])
            traces.append(
                scatter_trace("the chosen network", [bps] * len(steps), steps, look, labels=labels, network=name)
            )
    return Chart(
        f"{job.key}-bandwidth",
        "Step time by bandwidth",
        f"Lines: step time {over(job.transport)} against the bandwidth of the chosen network, or of its slowest link with the others "
        "in proportion, with its latency. A setting pays off if its line lies below dense. Points: the chosen network.",
        [Panel("", axis("bandwidth", "bit/s", log=True), axis("time of a step", "s", log=True), traces, height=270)],
    )


def _with_slowest(network: Network, bps: float) -> Network:
    """Return a network scaled so that its slowest link has this bandwidth."""
    slowest, bandwidth = network.slowest_bps, network.bandwidth_bps
    if not isinstance(bandwidth, tuple):
        return replace(network, bandwidth_bps=bps, name="")
    scaled = tuple(tuple(link * bps / slowest for link in row) for row in bandwidth)
    return replace(
        network, bandwidth_bps=scaled, port_bps=network.port_bps and network.port_bps * bps / slowest, name=""
    )


def _curve_settings(job: JobRuns) -> list[SettingRuns]:
    """Return dense and the settings to use or to try on some network; without any, the one with the greatest speed-up."""
    chosen = job.on_some_network(job.taken_home)
    if not chosen:
        compressed = [setting for setting in job.priced if not setting.dense and setting.speedup] or [
            job.fastest(job.networks[0])
        ]
        chosen = [max(compressed, key=lambda setting: max((s.value for s in setting.speedup.values()), default=0.0))]
    dense = [job.dense] if job.dense is not None and job.dense.step_s else []
    return list(dict.fromkeys([*dense, *chosen]))[:MOST_CURVES]


def _caveats(job: JobRuns, material: Material) -> Iterator[str]:
    """Yield how the figures of a job were made, their limits, and the rule of its verdicts."""
    yield f"Bytes are counted from the packets; step times are simulated on the network. {job.compute}"
    reference = job.dense if job.dense in job.priced and job.dense is not None else job.priced[0]
    yield from material.replay(reference.priced).notes
    if job.costs is not None:
        yield f"Money and churn: {job.costs.words()}."
    others = [material.replay(setting.priced).recording for setting in job.priced if setting is not reference]
    yield from sorted(filter(None, {recording.more_than_dense for recording in others}))
    for warning, runs in job.runs["warning"].dropna().value_counts().head(MOST_WARNINGS).items():
        yield f"{plural(runs, 'run')} warned: {warning}"
    if any(setting.judged for setting in job.settings):
        undecided = sum(setting.verdict == "undecided" for setting in job.settings)
        count = f" {plural(undecided, 'setting')} {'is' if undecided == 1 else 'are'} undecided." if undecided else ""
        yield f"{RULE} {_basis(job)}{count}"


def _basis(job: JobRuns) -> str:
    """Return the seeds that chose among settings, and the seeds that judge the choice."""
    confirmed = [setting for setting in job.settings if setting.judged.get("confirmed_on")]
    if not confirmed:
        return (
            "Settings are judged on the seeds that chose them, so the choice is unconfirmed. `raysim sweep --confirm 5` confirms it "
            "on held-out seeds."
        )
    chose, fresh = (
        sorted({seed for setting in confirmed for seed in setting.judged[name]})
        for name in ("chose_on", "confirmed_on")
    )
    return (
        f"{plural(len(confirmed), 'setting')} {'was' if len(confirmed) == 1 else 'were'} chosen on seeds {listed(chose)} and "
        f"judged on held-out seeds {listed(fresh)}. The other settings have no held-out runs: they can be ruled out, but not called "
        "safe."
    )


def _counts(job: JobRuns) -> str:
    runs = sum(len(setting.runs) for setting in job.settings)
    diverged = sum(setting.diverged for setting in job.settings)
    counts = sorted({setting.seeds for setting in job.settings})
    each = plural(counts[0], "seed") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"
    columns = {"steps": "steps_done", "seeds": "seed"}
    values = {word: job.runs[name].dropna().unique() for word, name in columns.items() if name in job.runs}
    texts = [f"{word} {listed(sorted(each.tolist()))}" for word, each in values.items() if len(each) > 1]
    varied = " and ".join(texts).removeprefix("seeds ")
    text = f"{job.title}: {plural(len(job.settings), 'setting')} x {each}{f' ({varied})' if varied else ''} = {plural(runs, 'run')}"
    return f"{text}{f', {diverged} diverged' if diverged else ''}."


def _short_why(job: JobRuns, network: str) -> str:
    faster = job.faster(network)
    counts = Counter(setting.verdict for setting in faster)
    if not faster:
        compared = sum(not setting.dense and bool(setting.speedup) for setting in job.priced)
        return f"none of {compared} is {GAIN} faster"
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if verdict)
    return f"{len(faster)} faster, none safe" + (f" ({verdicts})" if verdicts else "")


def _row(job: JobRuns, network: str) -> dict[str, Any]:
    recommended = job.recommended(network)
    chosen = recommended or job.fastest(network)
    if recommended is None:
        evidence = "no dense step"
    elif chosen.dense:
        evidence = _short_why(job, network)
    else:
        difference = against_dense(chosen, job.measure)
        evidence = f"{chosen.verdict}: {difference}, {seeds_of(chosen.judged)}; {divergence(chosen.judged)}"
    return {
        "network": network,
        "setting": chosen.name,
        "step": chosen.step_s[network],
        "dense step": chosen.dense_step_s.get(network, math.nan),
        "speed-up": "1" if chosen.dense else chosen.speedup.get(network, "unknown"),
        **({} if job.costs is None else job.costs.cells(job.expected[network, chosen.name])),
        "bytes a step": chosen.wire_bytes,
        **{mode: chosen.quality[mode] for mode in MODES},
        "evidence": evidence,
    }
