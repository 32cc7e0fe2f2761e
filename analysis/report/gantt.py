"""One step of the pipeline as it would run on the chosen network, dense and compressed, on one axis of time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from raysim.analysis.data.studies import over
from raysim.analysis.pricing.step import Replay
from raysim.analysis.report.blocks import Section
from raysim.analysis.report.figures import COLOURS, GREY, SYMBOLS, Axis, ByNetwork, Figure, Panel, Series, Style
from raysim.analysis.report.material import Job, Material, SettingRuns
from raysim.network.simulate import simulate
from raysim.network.timeline import Timeline
from raysim.network.topology import Network
from raysim.schedules.arrays import OPS

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


def section(material: Material) -> Section:
    """Return a figure a job, and say which steps are too large for one."""
    figures, large = [], []
    for job in material.jobs:
        pair = _pair(job, material)
        figure = _figure(job, pair, material) if pair else None
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


def _figure(job: Job, settings: list[SettingRuns], material: Material) -> Figure | None:
    spans: list[Spans] = []
    for setting in settings:
        assert setting.priced is not None
        replay = material.results.replay(setting.priced, **material.options)
        if sum(map(len, replay.rows)) > MOST_ACTIONS:
            return None
        spans.append({name: _step(replay, network) for name, network in material.networks.items()})
    longest = {network: 1.02 * max(one.step_s[network].value for one in settings) for network in material.networks}
    panels = [_panel(setting, of, longest) for setting, of in zip(settings, spans, strict=True)]
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


def _panel(setting: SettingRuns, spans: Spans, longest: Mapping[str, float]) -> Panel:
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
