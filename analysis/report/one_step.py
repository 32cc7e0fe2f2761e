"""One step of the pipeline: bytes on each link, and a timeline of dense and compressed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from raysim.analysis.data.studies import over
from raysim.analysis.pricing.step import Replay
from raysim.analysis.report.blocks import Cell, Column, Section, Table
from raysim.analysis.report.figures import COLOURS, GREY, SYMBOLS, Axis, ByNetwork, Figure, Panel, Series, Style, finite
from raysim.analysis.report.material import Job, Material, SettingRuns
from raysim.analysis.report.over_time import looks
from raysim.analysis.report.words import bytes_of, seconds
from raysim.network.simulate import simulate
from raysim.network.timeline import Timeline
from raysim.network.topology import Network
from raysim.records import with_replicas
from raysim.schedules.arrays import OPS

# --- bytes on each link: the wire bytes of each setting at each boundary and direction ----------------------------------------


COLUMNS = (
    Column("setting"),
    Column("link"),
    Column("codec"),
    Column("dense", number=True),
    Column("wire", number=True),
    Column("factor", number=True),
    Column("fidelity", number=True),
    Column("encode", number=True),
    Column("decode", number=True),
)
ARROWS = {"forward": "→", "backward": "←"}
AMOUNTS = ("wire_bytes", "dense_bytes", "packets", "encode_s", "decode_s")


def links_section(material: Material) -> Section:
    """Return a figure and a table a job, of the settings with a look of their own."""
    blocks: list[Figure | Table] = []
    for job in material.jobs:
        links = _links(job, material)
        if len(links):
            blocks += [_links_figure(job, links), _table(job, links, material)]
    if not blocks:
        return Section(
            "links",
            "Bytes per link",
            absent="No run here has links that sent anything: pipelines of one stage have none.",
        )
    return Section("links", "Bytes per link", blocks)


def _links(job: Job, material: Material) -> pd.DataFrame:
    """Return one row for each setting and link, means over steps and seeds."""
    named = {run: setting.name for setting in job.named for run in setting.runs}
    rows = material.results.select(list(named)).links
    if not len(rows):
        return rows
    rows = rows.assign(setting=[named[str(run)] for run in rows["run"]])
    rows = pd.concat([with_replicas(mine) for _, mine in rows.groupby("setting", sort=False)])
    rows = rows.assign(
        link=[
            ", ".join(filter(None, (name_of(boundary, str(direction)), str(tensor), replicas)))
            for boundary, direction, tensor, replicas in zip(
                rows["boundary"], rows["direction"], rows["tensor"], rows["replicas"], strict=True
            )
        ]
    )
    groups = rows.groupby(["setting", "link"], sort=False, observed=True)
    counts = rows.groupby(["setting", "link"], sort=False, observed=True)[["run", "step"]].apply(
        lambda part: len(part.drop_duplicates())
    )
    found = groups[list(AMOUNTS)].sum().astype(float).div(counts, axis=0)  # a step's, over its replicas
    found["fidelity"] = groups["fidelity"].mean()
    found["codec"] = groups["codec"].agg(lambda values: " | ".join(dict.fromkeys(map(str, values))))
    return found.reset_index()


def name_of(boundary: Any, direction: str) -> str:
    """Return a link in words: "0 → 1" forward, "0 ← 1" backward."""
    if direction not in ARROWS or boundary is None or repr(boundary) in ("<NA>", "nan"):
        return direction
    stage = int(boundary)
    return f"{stage} {ARROWS[direction]} {stage + 1}"


def _links_figure(job: Job, links: pd.DataFrame) -> Figure:
    chosen = looks(job)
    order = list(dict.fromkeys(links["link"]))
    panels = []
    for title, names in (
        ("Activations (forward)", [name for name in order if ARROWS["forward"] in name]),
        ("Gradients (backward)", [name for name in order if ARROWS["forward"] not in name]),
    ):
        rows = links[links["link"].isin(names)]
        series = []
        for name, look in chosen.items():
            mine = rows[rows["setting"] == name]
            if len(mine):
                series.append(Series(name, mine["link"].tolist(), finite(mine["wire_bytes"]), look, kind="bars"))
        if series:
            panels.append(Panel(title, Axis("link", "link"), Axis("wire_bytes", "bytes of a step", unit="B"), series))
    return Figure(
        f"{job.key}-links",
        f"{job.title}: wire bytes of a step by link",
        "Bytes counted on the packets, mean over steps and seeds. A link is one direction of the boundary between two stages.",
        panels,
    )


def _table(job: Job, links: pd.DataFrame, material: Material) -> Table:
    """Return the links of the settings that are recommended on some network, or else of the first compressed setting."""
    recommended = [
        one for network in material.networks if (one := job.recommended(network)) is not None and not one.dense
    ]
    compressed = recommended or [one for one in job.named if not one.dense] or list(job.named)
    order = {one.name: place for place, one in enumerate(dict.fromkeys(recommended) or compressed[:1])}
    rows = [row for row in links.to_dict("records") if row["setting"] in order]
    rows.sort(key=lambda row: order[row["setting"]])
    return Table(
        f"{job.key}-link-table",
        f"{job.title}: a step's traffic by link, means over steps and seeds. Factor is dense over wire bytes; "
        "fidelity is 1 where messages arrive exactly, and 0 where they arrive as zeros. Shown are the settings that are recommended "
        "on some network, or else the first compressed one.",
        COLUMNS,
        [
            [
                Cell(row["setting"], code=True),
                Cell(row["link"]),
                Cell(row["codec"], code=True),
                Cell(bytes_of(row["dense_bytes"]), row["dense_bytes"]),
                Cell(bytes_of(row["wire_bytes"]), row["wire_bytes"]),
                Cell(f"{row['dense_bytes'] / row['wire_bytes']:.2f}" if row["wire_bytes"] else "none"),
                Cell(f"{row['fidelity']:.4f}" if pd.notna(row["fidelity"]) else "not measured", row["fidelity"]),
                Cell(seconds(row["encode_s"]), row["encode_s"]),
                Cell(seconds(row["decode_s"]), row["decode_s"]),
            ]
            for row in rows
        ],
        live=True,
    )


# --- a timeline on the chosen network, dense and compressed on one axis of time -----------------------------------------------


MOST_ACTIONS = 600  # of one step: more are no picture; `raysim replay --trace` has them

KINDS = {
    "forward": Style(COLOURS[0]),
    "backward": Style(COLOURS[4]),
    "backward for weights": Style(COLOURS[2], SYMBOLS[3]),
    "codec": Style(COLOURS[1], SYMBOLS[1]),
    "calls": Style(GREY),
    "on the wire": Style(COLOURS[5]),
    "collective": Style(COLOURS[3], SYMBOLS[2]),
    "end of the step": Style(GREY, SYMBOLS[2]),
}
OP_KINDS = dict(zip(OPS, ("forward", "backward", "backward for weights"), strict=True))
LANES = {"replica_gradient": "average of", "tied": "tied, from"}

Span = tuple[str, float, float, str]  # lane, start_s, duration_s, label
Spans = Mapping[str, list[tuple[str, Span]]]  # by network, with their kinds


def timeline_section(material: Material) -> Section:
    """Return a figure a job, and say which steps are too large for one."""
    figures, large = [], []
    for job in material.jobs:
        pair = _pair(job, material)
        figure = _timeline_figure(job, pair, material) if pair else None
        if figure is not None:
            figures.append(figure)
        elif pair:
            large.append(job.title)
    absent = ""
    if large:
        absent = (
            f"A step of {', '.join(large)} has more than {MOST_ACTIONS} actions: "
            "`raysim replay RUN_DIR --trace step.json` draws it."
        )
    elif not figures:
        absent = (
            "It needs a run with profiled actions; there is none here: train with `profile_every_steps` of at least 1."
        )
    return Section("gantt", "A step of the pipeline", figures, absent)


def _pair(job: Job, material: Material) -> list[SettingRuns]:
    """Return the dense setting and the compressed setting to show beside it: the recommended one, else the first of the page."""
    recommended = job.recommended(material.network)
    compressed = [one for one in ([recommended] if recommended else []) + job.named if one.step_s and not one.dense]
    dense = [job.dense] if job.dense is not None and job.dense.step_s else []
    return [*dense, *compressed[:1]]


def _timeline_figure(job: Job, settings: list[SettingRuns], material: Material) -> Figure | None:
    spans: list[Spans] = []
    for setting in settings:
        assert setting.priced is not None
        replay = material.results.replay(setting.priced, **material.options)
        if sum(map(len, replay.rows)) > MOST_ACTIONS:
            return None
        spans.append({name: _step(replay, network) for name, network in material.networks.items()})
    longest = {network: 1.02 * max(one.step_s[network].value for one in settings) for network in material.networks}
    panels = [_timeline_panel(setting, of, longest) for setting, of in zip(settings, spans, strict=True)]
    return Figure(
        f"{job.key}-gantt",
        f"{job.title}: where a step's time goes",
        f"The mean of the recorded steps of the first seed, simulated on the chosen network {over(job.transport)}, on the same axis of "
        "time: stages, then the packets on each link, then the collectives that end the step. Gaps are bubbles, or the "
        "wait for a packet that is under way. Then stages update, and the driver goes on.",
        panels,
        columns=1,
    )


def _step(replay: Replay, network: Network) -> list[tuple[str, Span]]:
    """Return the kind and span of all that happens in a mean step, to its end."""
    timeline = simulate(replay.schedule, replay.mean_profile, network, placement=replay.placement(network))
    end = ("end of the step", ("all stages", timeline.collectives_end_s, timeline.outside_s, "update, and the driver"))
    return [*_spans(timeline), *_collectives(timeline), *([end] if timeline.outside_s > 0 else [])]


def _collectives(timeline: Timeline) -> Iterator[tuple[str, Span]]:
    """Yield the kind and span of each round of the collectives, and of their codecs."""
    for exchange in timeline.collectives:
        one = exchange.collective
        lane = f"{LANES[one.direction]} {', '.join(map(str, one.stages))}"
        if one.codec_s:
            yield "codec", (lane, exchange.start_s, one.codec_s, "codec")
        for turn, start, end in exchange.spans():
            if end > start:
                yield "collective", (lane, start, end - start, f"round {turn}")


def _timeline_panel(setting: SettingRuns, spans: Spans, longest: Mapping[str, float]) -> Panel:
    lanes = list(dict.fromkeys(lane for of in spans.values() for _, (lane, *_) in of))
    series = []
    for kind, look in KINDS.items():
        of_kind = {network: [span for one, span in of if one == kind] for network, of in spans.items()}
        if any(of_kind.values()):
            lane, start, width, label = (
                ByNetwork({n: [s[part] for s in of] for n, of in of_kind.items()}) for part in range(4)
            )
            series.append(Series(kind, start, lane, look, kind="spans", widths=width, labels=label))
    time = Axis("start_s", "time", unit="s", high=ByNetwork(longest))
    return Panel(setting.name, time, Axis("lane", "", order=lanes), series, height=70 + 19 * len(lanes))


def _spans(timeline: Timeline) -> list[tuple[str, Span]]:
    """Return the kind and span of all that happens on the first replica."""
    table = timeline.table
    found: list[tuple[str, Span]] = []
    wires: list[tuple[str, Span]] = []
    for worker in range(table.num_workers):
        stages = ", ".join(str(stage) for stage in np.flatnonzero(table.owner == worker))
        lane = f"stage {stages}"
        for index in timeline.visible(0, worker):
            stage, op, microbatch = int(table.stage[index]), int(table.op[index]), int(table.microbatch[index])
            name = f"{stage}{OPS[op]}{microbatch % table.per_step}"
            for phase, low, high in timeline.phases(0, index):
                start, end = max(low, 0.0), min(high, timeline.pipeline_s)
                kind = {"overhead": "calls", "codec": "codec"}.get(phase, OP_KINDS[OPS[op]])
                if end > start:
                    found.append((kind, (lane, start, end - start, name)))
            begin, arrive = (
                min(max(float(part[0, stage, op, microbatch]), 0.0), timeline.pipeline_s)
                for part in (timeline.begin_s, timeline.arrive_s)
            )
            neighbour = {0: stage + 1, 1: stage - 1}.get(op, -1)
            if 0 <= neighbour < table.num_stages and arrive > begin:
                wires.append(("on the wire", (f"{stage} → {neighbour}", begin, arrive - begin, f"packet of {name}")))
    return found + sorted(wires, key=lambda wire: wire[1][0])
