"""One step of the pipeline: bytes on each link, and a timeline of dense and compressed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from raysim.analysis.data.folders import over
from raysim.analysis.report.material import Job, Material, SettingRuns
from raysim.analysis.report.over_time import looks
from raysim.analysis.report.page import (
    COLOURS,
    GREY,
    SYMBOLS,
    Axis,
    Block,
    ByNetwork,
    Cell,
    Figure,
    Panel,
    Section,
    Series,
    Style,
    Table,
    code,
    finite,
    number,
)
from raysim.analysis.report.words import bytes_of, seconds
from raysim.analysis.runs.step import Replay
from raysim.config.identity import is_missing
from raysim.network.simulate import simulate
from raysim.network.timeline import Timeline
from raysim.network.topology import Network
from raysim.records import with_replicas
from raysim.schedules.arrays import OPS

ARROWS = {"forward": "→", "backward": "←"}
AMOUNTS = ("wire_bytes", "dense_bytes", "packets", "encode_s", "decode_s")

MOST_ACTIONS = 600  # in one figure; for longer steps there is `raysim replay --trace`
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
KindSpans = list[tuple[str, Span]]


# --- bytes of each setting on each link ---------------------------------------------------------------------------------------


def links_section(material: Material) -> Section:
    """Return a figure and a table per job, of the highlighted settings."""
    blocks: list[Block] = []
    for job in material.jobs:
        links = _links(job, material)
        if len(links):
            blocks += [_links_figure(job, links), _links_table(job, links)]
    without = "No run here has links that sent anything: pipelines of one stage have none."
    return Section.of("links", "Bytes per link", blocks, without)


def _links(job: Job, material: Material) -> pd.DataFrame:
    owners = {run: setting.name for setting in job.named for run in setting.runs}
    rows = material.results.select(list(owners)).links
    if not len(rows):
        return rows
    rows = rows.assign(setting=[owners[str(run)] for run in rows["run"]])
    rows = pd.concat([with_replicas(of_setting) for _, of_setting in rows.groupby("setting", sort=False)])
    columns = (rows[name] for name in ("boundary", "direction", "tensor", "replicas"))
    rows = rows.assign(
        link=[
            ", ".join(filter(None, (name_of(boundary, str(direction)), str(tensor), replicas)))
            for boundary, direction, tensor, replicas in zip(*columns, strict=True)
        ]
    )
    groups = rows.groupby(["setting", "link"], sort=False, observed=True)
    counts = groups[["run", "step"]].apply(lambda part: len(part.drop_duplicates()))
    links = groups[list(AMOUNTS)].sum().astype(float).div(counts, axis=0)  # of a step, over its replicas
    links["fidelity"] = groups["fidelity"].mean()
    links["codec"] = groups["codec"].agg(lambda values: " | ".join(dict.fromkeys(map(str, values))))
    return links.reset_index()


def name_of(boundary: Any, direction: str) -> str:
    """Return a link in words: "0 → 1" forward, "0 ← 1" backward."""
    if direction not in ARROWS or is_missing(boundary):
        return direction
    return f"{int(boundary)} {ARROWS[direction]} {int(boundary) + 1}"


def _links_figure(job: Job, links: pd.DataFrame) -> Figure:
    panels = []
    forward = links["link"].str.contains(ARROWS["forward"])
    for title, rows in (("Activations (forward)", links[forward]), ("Gradients (backward)", links[~forward])):
        series = [
            Series(name, of_setting["link"].tolist(), finite(of_setting["wire_bytes"]), look, kind="bars")
            for name, look in looks(job).items()
            if len(of_setting := rows[rows["setting"] == name])
        ]
        if series:
            panels.append(Panel(title, Axis("link", "link"), Axis("wire_bytes", "bytes of a step", unit="B"), series))
    return Figure(
        f"{job.key}-links",
        f"{job.title}: wire bytes of a step by link",
        "Mean over steps and seeds, counted from the packets. A link is one direction of the boundary between two stages.",
        panels,
    )


def _links_table(job: Job, links: pd.DataFrame) -> Table:
    """Return the links of the settings recommended on some network, or else of the first compressed setting."""
    recommended = [setting for setting in job.on_some_network(job.recommended) if not setting.dense]
    compressed = [setting for setting in job.named if not setting.dense] or job.named
    shown = recommended or compressed[:1]
    rows = [row for setting in shown for row in links[links["setting"] == setting.name].to_dict("records")]
    return Table(
        f"{job.key}-link-table",
        f"Traffic per step of {job.title} by link, mean over steps and seeds, for the settings recommended on some network, or else "
        "for the first compressed setting. Factor: dense bytes over wire bytes. Fidelity: 1 if messages arrive exactly, 0 if they "
        "arrive as zeros.",
        [
            [
                code("setting", row["setting"]),
                Cell("link", row["link"]),
                code("codec", row["codec"]),
                number("dense", bytes_of(row["dense_bytes"]), row["dense_bytes"]),
                number("wire", bytes_of(row["wire_bytes"]), row["wire_bytes"]),
                number("factor", f"{row['dense_bytes'] / row['wire_bytes']:.2f}" if row["wire_bytes"] else "none"),
                number(
                    "fidelity",
                    "not measured" if pd.isna(row["fidelity"]) else f"{row['fidelity']:.4f}",
                    row["fidelity"],
                ),
                number("encode", seconds(row["encode_s"]), row["encode_s"]),
                number("decode", seconds(row["decode_s"]), row["decode_s"]),
            ]
            for row in rows
        ],
        live=True,
    )


# --- a timeline on the chosen network, dense and compressed on one axis of time -----------------------------------------------


def timeline_section(material: Material) -> Section:
    """Return a figure per job, and name the steps that are too large to draw."""
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
        absent = "It needs a run with profiled actions: train with `profile_every_steps` of at least 1."
    return Section("gantt", "A step of the pipeline", figures, absent)


def _pair(job: Job, material: Material) -> list[SettingRuns]:
    """Return dense and the compressed setting to show with it: the recommended one, else the first of the page."""
    recommended = job.recommended(material.network)
    candidates = [*([recommended] if recommended else []), *job.named]
    compressed = [setting for setting in candidates if setting.step_s and not setting.dense]
    dense = [job.dense] if job.dense is not None and job.dense.step_s else []
    return [*dense, *compressed[:1]]


def _timeline_figure(job: Job, settings: list[SettingRuns], material: Material) -> Figure | None:
    spans: list[Mapping[str, KindSpans]] = []
    for setting in settings:
        replay = material.replay(setting.priced)
        if sum(map(len, replay.rows)) > MOST_ACTIONS:
            return None
        spans.append({name: _step(replay, network) for name, network in material.networks.items()})
    longest = ByNetwork.of(
        material.networks, lambda network: 1.02 * max(setting.step_s[network].value for setting in settings)
    )
    panels = [_timeline_panel(setting, steps, longest) for setting, steps in zip(settings, spans, strict=True)]
    return Figure(
        f"{job.key}-gantt",
        f"{job.title}: where a step's time goes",
        f"This is the mean of the recorded steps of the first seed, simulated on the chosen network {over(job.transport)}, on the same "
        "axis of time: stages, then the packets on each link, then the collectives at the end of the step. Gaps are bubbles, or the "
        "wait for a packet. Then stages update, and the driver goes on.",
        panels,
        columns=1,
    )


def _step(replay: Replay, network: Network) -> KindSpans:
    """Return the kind and span of everything in a mean step, to its end."""
    timeline = simulate(replay.schedule, replay.mean_profile, network, placement=replay.placement(network))
    end = ("end of the step", ("all stages", timeline.collectives_end_s, timeline.outside_s, "update, and the driver"))
    return [*_first_replica(timeline), *_collectives(timeline), *([end] if timeline.outside_s > 0 else [])]


def _first_replica(timeline: Timeline) -> KindSpans:
    """Return the kind and span of everything on the first replica, then of its packets."""
    table = timeline.table
    spans: KindSpans = []
    packets: KindSpans = []
    for worker in range(table.num_workers):
        lane = f"stage {', '.join(str(stage) for stage in np.flatnonzero(table.owner == worker))}"
        for index in timeline.visible(0, worker):
            stage, op, microbatch = int(table.stage[index]), int(table.op[index]), int(table.microbatch[index])
            name = f"{stage}{OPS[op]}{microbatch % table.per_step}"
            for phase, low, high in timeline.phases(0, index):
                start, end = max(low, 0.0), min(high, timeline.pipeline_s)
                kind = {"overhead": "calls", "codec": "codec"}.get(phase, OP_KINDS[OPS[op]])
                if end > start:
                    spans.append((kind, (lane, start, end - start, name)))
            begin, arrive = (
                min(max(float(times[0, stage, op, microbatch]), 0.0), timeline.pipeline_s)
                for times in (timeline.begin_s, timeline.arrive_s)
            )
            neighbour = {0: stage + 1, 1: stage - 1}.get(op, -1)
            if 0 <= neighbour < table.num_stages and arrive > begin:
                packets.append(("on the wire", (f"{stage} → {neighbour}", begin, arrive - begin, f"packet of {name}")))
    return spans + sorted(packets, key=lambda packet: packet[1][0])


def _collectives(timeline: Timeline) -> Iterator[tuple[str, Span]]:
    """Yield the kind and span of each round of the collectives, and of their codecs."""
    for exchange in timeline.collectives:
        collective = exchange.collective
        lane = f"{LANES[collective.direction]} {', '.join(map(str, collective.stages))}"
        if collective.codec_s:
            yield "codec", (lane, exchange.start_s, collective.codec_s, "codec")
        for turn, start, end in exchange.spans():
            if end > start:
                yield "collective", (lane, start, end - start, f"round {turn}")


def _timeline_panel(setting: SettingRuns, steps: Mapping[str, KindSpans], longest: ByNetwork) -> Panel:
    lanes = list(dict.fromkeys(lane for spans in steps.values() for _, (lane, *_) in spans))
    series = []
    for kind, look in KINDS.items():
        of_kind = {network: [span for name, span in spans if name == kind] for network, spans in steps.items()}
        if any(of_kind.values()):
            lane, start, width, label = (
                ByNetwork({network: [span[part] for span in spans] for network, spans in of_kind.items()})
                for part in range(4)
            )
            series.append(Series(kind, start, lane, look, kind="spans", widths=width, labels=label))
    time = Axis("start_s", "time", unit="s", high=longest)
    return Panel(setting.name, time, Axis("lane", "", order=lanes), series, height=70 + 19 * len(lanes))
