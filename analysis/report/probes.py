"""Candidates of a probe: their bytes, errors and prices, and the training that would judge them."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from raysim.analysis.data.probe_candidates import LIMIT, cost_words, smaller_runs
from raysim.analysis.data.studies import over
from raysim.analysis.report.blocks import Block, Cell, Column, Section, Table, Text
from raysim.analysis.report.figures import ByNetwork
from raysim.analysis.report.material import Job, Material, SettingRuns
from raysim.analysis.report.tradeoff import priced
from raysim.analysis.report.words import bytes_of, seconds, speedup, step_time

COLUMNS = (
    Column("candidate"),
    Column("bytes a step", number=True),
    Column("factor", number=True),
    Column("fidelity, activations", number=True),
    Column("fidelity, gradients", number=True),
    Column("fidelity of the average", number=True),
    Column("step", number=True),
    Column("speed-up", number=True),
)
DIRECTIONS = ("forward", "backward", "replica_gradient")


def section(material: Material) -> Section:
    """Return a table of the candidates of every probe, and the commands that train them at a smaller size."""
    return Section("probes", "Probe", [block for job in material.probes for block in _blocks(job, material)])


def _blocks(job: Job, material: Material) -> Iterator[Block]:
    rows = job.runs.to_dict("records")
    if job.priced:
        yield Text(ByNetwork({network: _lead(job, network) for network in material.networks}), "lead")
    yield Text(f"{job.title}: {cost_words(rows[0])} {job.compute}")
    links = material.results.select(job.runs["run"]).table("links", ["direction", "fidelity"])
    yield Table(
        f"{job.key}-candidates",
        f"{job.title}: candidates, their errors as fidelity (1 where messages arrive exactly, 0 where they arrive as zeros), and "
        f"steps and speed-ups on the chosen network {over(job.transport)} with their 90 % intervals. Compute: {job.source}.",
        COLUMNS,
        [_row(setting, links) for setting in job.settings],
        live=True,
    )
    yield Text(LIMIT)
    runs = {str(row["run"]): row for row in rows}
    yield Text("\n".join(smaller_runs(runs[setting.runs[0]] for setting in job.settings)), "code")


def _lead(job: Job, network: str) -> str:
    faster = [one for one in job.priced if one.speedup and one.speedup[network].low > 1]
    best = max(faster, key=lambda one: one.speedup[network].value, default=None)
    limit = "A probe does not say whether training stays sound under it."
    if best is None:
        dense = f", which takes {seconds(job.dense.step_s[network].value)} a step" if job.dense is not None else ""
        return f"On {network} {over(job.transport)}, no candidate of the probe is faster than dense{dense}."
    value, low, high = best.speedup[network]
    return (
        f"On {network} {over(job.transport)}, the fastest candidate of the probe is `{best.name}`: {value:.2f} times as fast as "
        f"dense ({low:.2f} to {high:.2f}). {limit}"
    )


def _row(setting: SettingRuns, links: pd.DataFrame) -> list[Cell]:
    mine = links[links["run"].isin(setting.runs)]
    means = mine.groupby("direction", observed=True)["fidelity"].mean()
    errors = [float(means.get(direction, float("nan"))) for direction in DIRECTIONS]
    return [
        Cell(setting.name, code=True),
        Cell(bytes_of(setting.wire_bytes), setting.wire_bytes),
        Cell(f"{setting.factor:.2f}", setting.factor),
        *(Cell("none" if pd.isna(value) else f"{value:.4f}", value) for value in errors),
        priced(setting, step_time, setting.step_s),
        priced(setting, speedup, setting.speedup),
    ]
