"""Training over time: learning curves, decisions of adaptive methods, and a step of the pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from raysim.analysis.data.folders import over
from raysim.analysis.report.frontier import looks
from raysim.analysis.report.material import JobRuns, Material, SettingRuns
from raysim.analysis.report.page import (
    COLOURS,
    GREY,
    SYMBOLS,
    Block,
    Chart,
    Panel,
    Style,
    Table,
    Text,
    axis,
    bar_trace,
    quality_axis,
    scatter_trace,
    style,
)
from raysim.analysis.report.words import seconds
from raysim.analysis.runs.step import Replay
from raysim.network.simulate import simulate
from raysim.network.timeline import Timeline
from raysim.network.topology import Network
from raysim.schedules.arrays import OPS

MOST_CURVE_POINTS = 120  # of a setting with its own style
MOST_FAINT_POINTS = 30  # of a line for comparison

# --- learning curves against steps, bytes and simulated seconds ---------------------------------------------------------------


def curve_blocks(job: JobRuns, material: Material) -> list[Block]:
    """Return a chart of evaluations with compression on and off, and of the training loss."""
    runs = material.results.select(job.runs["run"])
    steps = runs.table("steps", ["step", "loss", "wire_bytes"]).sort_values(["run", "step"])
    steps["sent_bytes"] = steps["wire_bytes"].fillna(0).groupby(steps["run"].astype(str)).cumsum().astype("int64")
    evals = runs.table("evals", ["step", "mode", "batchnorm", job.measure.name])
    evals = evals[evals["batchnorm"] == "running"]
    sent = steps[["run", "step", "sent_bytes"]].assign(step=steps["step"] + 1)  # evaluations count the steps done
    steps, evals, sent = (frame.assign(run=frame["run"].astype(str)) for frame in (steps, evals, sent))
    begun = steps.groupby("run")["step"].min()  # above 0 for a branch
    steps, evals = (frame.assign(done=frame["step"] - frame["run"].map(begun)) for frame in (steps, evals))
    evals = evals.merge(sent, on=["run", "step"], how="left")
    rows = [
        (f"Evaluation, compression {mode}", quality_axis(job.measure), evals[evals["mode"] == mode], job.measure.name)
        for mode in ("on", "off")
    ]
    rows.append(("Training loss", axis("training loss"), steps, "loss"))
    panels = [
        Panel(title, x, y, [*_curve_traces(job, _curves(job, frame, column), quantity, material)], height=270)
        for title, y, frame, column in rows
        if len(frame)
        for quantity, x in (
            ("step", axis("steps")),
            ("sent_bytes", axis("bytes sent", "B")),
            ("time", axis("time, simulated", "s")),
        )
    ]
    caption = (
        "The same curves against steps, against bytes sent so far, and against seconds on the chosen network "
        f"{over(job.transport)} (steps times the simulated step time). A branch counts its own bytes and seconds. "
        "Means over seeds. Black is dense; grey lines are settings without a colour of their own."
    )
    return [Chart(f"{job.key}-curves", f"{job.title}: learning curves", caption, panels, columns=3)] if panels else []


def _curves(job: JobRuns, frame: pd.DataFrame, column: str) -> dict[SettingRuns, pd.DataFrame]:
    """Return the means of settings over seeds, by step; named settings come first, in reverse order."""
    owners = {run: setting.name for setting in job.settings for run in setting.runs}
    groups = frame.assign(setting=frame["run"].map(owners)).groupby(["setting", "step"])
    means = groups[["sent_bytes", "done"]].mean().assign(value=groups[column].mean(), sd=groups[column].std())
    by_name = {str(name): rows.reset_index("step") for name, rows in means.groupby(level="setting", sort=False)}
    order = [*reversed(job.named), *(setting for setting in job.settings if setting not in job.named)]
    return {setting: by_name[setting.name] for setting in order if setting.name in by_name}


def _curve_traces(
    job: JobRuns, means: Mapping[SettingRuns, pd.DataFrame], quantity: str, material: Material
) -> Iterator[Any]:
    """Yield one faint trace of all settings without a style of their own, then a line for each of the others."""
    chosen = looks(job)
    for network in material.networks if quantity == "time" else (None,):
        faint, named = [], []
        for setting, rows in means.items():
            if network is not None and not setting.step_s:
                continue
            is_named = setting.name in chosen
            rows = rows.iloc[thinned(len(rows), MOST_CURVE_POINTS if is_named else MOST_FAINT_POINTS)]
            x = rows["done"] * setting.step_s[network].value if network is not None else rows[quantity]
            if is_named:
                few = len(rows) <= 20
                mode, spread = ("lines+markers", rows["sd"]) if few else ("lines", None)
                look = chosen[setting.name]
                named.append(scatter_trace(setting.name, x, rows["value"], look, mode, "", spread, network))
            else:
                faint.append((x, rows["value"], setting.name))
        if faint:
            xs, ys, labels = with_gaps(faint)
            yield scatter_trace("other settings", xs, ys, Style(GREY, faint=True), "lines", labels, None, network)
        yield from named


def with_gaps(curves: Iterable[tuple[Iterable[Any], Iterable[Any], str]]) -> tuple[list[Any], list[Any], list[str]]:
    """Join lines (x, y, label) into one with gaps, so that hundreds draw as fast as one."""
    x: list[Any] = []
    y: list[Any] = []
    labels: list[str] = []
    for xs, ys, label in curves:
        x += [*xs, None]
        y += [*ys, None]
        labels += [label] * (len(x) - len(labels))
    return x, y, labels


def thinned(count: int, most: int) -> list[int]:
    """Return at most `most` of `count` positions, evenly spread, with the first and the last.

    >>> thinned(9, 5), thinned(3, 5)
    ([0, 2, 4, 6, 8], [0, 1, 2])
    """
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


# --- decisions of adaptive methods, step by step ------------------------------------------------------------------------------


MOST_RUNS = 4  # with charts of their decisions; the table has all runs
MOST_LINES = 6  # places with lines of their own; the other layers share one
MOST_DECISIONS = 400  # points of a line


def decision_blocks(job: JobRuns, material: Material) -> list[Block]:
    """Return a chart for the first runs with decisions, and a table of all."""
    rows = material.results.select(job.runs["run"]).decisions
    if not len(rows):
        return []
    rows = rows.assign(run=rows["run"].astype(str), place=_places(rows))
    runs = [*rows.groupby("run", sort=False)][:MOST_RUNS]
    charts = [_decisions_chart(job, str(run), of_run, i) for i, (run, of_run) in enumerate(runs, start=1)]
    caption = f"The decisions of {job.title}, by run and place."
    return [*charts, Table(f"{job.key}-decision-table", caption, _decisions_by_place(rows))]


def _places(rows: pd.DataFrame) -> list[str]:
    places = []
    for row in rows[["where", "stage", "boundary", "layer", "replica"]].to_dict("records"):
        parts = [str(row["where"]).replace("_", " ")]
        parts += [f"{name} {row[name]}" for name in ("stage", "boundary", "replica") if not pd.isna(row[name])]
        parts += [str(row["layer"])] if not pd.isna(row["layer"]) else []
        places.append(", ".join(parts))
    return places


def _decisions_chart(job: JobRuns, run: str, rows: pd.DataFrame, i: int) -> Chart:
    panels = [Panel("Factor sent", axis("step"), axis("factor sent", log=True), [*_decision_lines(rows, "factor")])]
    text = (
        "The compression factor chosen for each step, counted in values for sparse codecs, else in bytes; "
        "1 is dense. Points mark events."
    )
    if rows["gain"].notna().any():  # methods with a budget of errors measure none
        panels.append(Panel("Gain", axis("step"), axis("gain of the sent messages"), [*_decision_lines(rows, "gain")]))
        text = f"Left: {text[0].lower()}{text[1:]} Right: its gain, the share of the squared norm that arrived."
    return Chart(f"{job.key}-decisions{i}", f"Decisions of {run}", text, panels)


def _decision_lines(rows: pd.DataFrame, column: str) -> Iterator[Any]:
    by_place = {str(place): of_place.sort_values("step") for place, of_place in rows.groupby("place", sort=False)}
    rest = [(of_place["step"], of_place[column], place) for place, of_place in [*by_place.items()][MOST_LINES:]]
    steps = {"shape": "hv"}
    if rest:
        x, y, labels = with_gaps(rest)
        yield scatter_trace("other places", x, y, Style(faint=True), "lines", labels, line=steps)
    for i, (place, of_place) in enumerate([*by_place.items()][:MOST_LINES]):
        shown = of_place.iloc[thinned(len(of_place), MOST_DECISIONS)]
        labels = [
            ": ".join(str(part) for part in (row["branch"], row["reason"]) if not pd.isna(part) and str(part))
            for row in shown.to_dict("records")
        ]
        yield scatter_trace(place, shown["step"], shown[column], style(i), "lines", labels, line=steps)
    for i, (event, of_event) in enumerate(rows[rows["event"].notna()].groupby("event", sort=True, observed=True)):
        look = Style(COLOURS[(len(by_place) + i) % len(COLOURS)], SYMBOLS[(i + 2) % len(SYMBOLS)])
        labels = [f"{event} at {row['place']}: {row['reason']}" for row in of_event.to_dict("records")]
        yield scatter_trace(str(event), of_event["step"], of_event[column], look, labels=labels)


def _decisions_by_place(rows: pd.DataFrame) -> pd.DataFrame:
    groups = rows.groupby(["run", "place"], sort=False)
    frame = groups.agg(
        **{
            "method": ("method", lambda methods: str(methods.iloc[0])),
            "decisions": ("step", "size"),
            "by branch": ("branch", lambda names: _counted(names, "{1:.0%} {0}")),
            "mean factor": ("factor", "mean"),
            "mean gain": ("gain", "mean"),
            "events": ("event", lambda names: _counted(names, "{2} {0}") or "none"),
        }
    )
    return frame.reset_index()


def _counted(names: pd.Series[Any], form: str) -> str:
    """Return how often each name occurs, most frequent first: `form` takes the name, its share and its count."""
    counts = names.dropna().value_counts()
    return ", ".join(form.format(name, count / len(names), count) for name, count in counts.items() if count)


# --- a step of the pipeline on the chosen network, dense and compressed on one axis of time ------------------------------


MOST_ACTIONS = 600  # in one figure; for longer steps there is `raysim replay --trace`
KINDS = {
    "forward": Style(COLOURS[0]),
    "backward": Style(COLOURS[4]),
    "backward for weights": Style(COLOURS[2], SYMBOLS[3]),
    "codec": Style(COLOURS[1], SYMBOLS[1]),
    "calls": Style(GREY),
    "bytes": Style(COLOURS[5]),
    "latency": Style(COLOURS[5], SYMBOLS[1]),
    "collective": Style(COLOURS[3], SYMBOLS[2]),
    "latency of a collective": Style(COLOURS[3], SYMBOLS[1]),
    "end of the step": Style(GREY, SYMBOLS[2]),
}
OP_KINDS = dict(zip(OPS, ("forward", "backward", "backward for weights"), strict=True))
LANES = {"replica_gradient": "average of", "tied": "tied, from"}


class Span(NamedTuple):
    """An interval of a step, with a label."""

    kind: str
    lane: str
    start_s: float
    duration_s: float
    label: str


def timeline_blocks(job: JobRuns, material: Material) -> list[Block]:
    """Return a chart of a step, dense and with the recommended setting, or else the first compressed one."""
    recommended = job.recommended(material.network)
    candidates = [*([recommended] if recommended else []), *job.named]
    compressed = [setting for setting in candidates if setting.step_s and not setting.dense]
    dense = [job.dense] if job.dense is not None and job.dense.step_s else []
    replays = {setting: material.replay(setting.priced) for setting in [*dense, *compressed[:1]]}
    if any(sum(map(len, replay.rows)) > MOST_ACTIONS for replay in replays.values()):
        text = f"A step has more than {MOST_ACTIONS} actions: `raysim replay RUN_DIR --trace step.json` draws it."
        return [Text(text, "note")]
    caption = (
        f"This is the mean of the recorded steps of the first seed, simulated on the chosen network {over(job.transport)}, on the same "
        "axis of time: stages, then the packets on each link, each with its bytes and then its latency, then the collectives at the "
        "end of the step. Gaps are bubbles, or the wait for a packet. Then stages update, and the driver goes on."
    )
    steps = {
        setting.name: {name: [*_spans(replay, network)] for name, network in material.networks.items()}
        for setting, replay in replays.items()
    }
    panels = [_timeline_panel(name, spans) for name, spans in steps.items()]
    panels[1:] = [panel._replace(x={**panel.x, "matches": "x"}) for panel in panels[1:]]
    return [Chart(f"{job.key}-gantt", f"{job.title}: where a step's time goes", caption, panels, 1)] if panels else []


def _timeline_panel(name: str, by_network: Mapping[str, Iterable[Span]]) -> Panel:
    lanes = list(dict.fromkeys(span.lane for spans in by_network.values() for span in spans))
    traces = []
    for network, spans in by_network.items():
        for kind, look in KINDS.items():
            of_kind = [span for span in spans if span.kind == kind]
            if of_kind:
                _, lane, start, width, label = zip(*of_kind, strict=True)
                ends = [f"{seconds(span.start_s)} to {seconds(span.start_s + span.duration_s)}" for span in of_kind]
                labels = [f"{kind} {text}: {when}" for text, when in zip(label, ends, strict=True)]
                options = {"base": start, "orientation": "h", "width": 0.7, "meta": network}
                traces.append(bar_trace(kind, width, lane, look, labels, **options))
    y = axis("") | {"categoryorder": "array", "categoryarray": lanes, "autorange": "reversed", "dtick": 1}
    return Panel(name, axis("time", "s"), y, traces, height=90 + 19 * len(lanes))


def _spans(replay: Replay, network: Network) -> Iterator[Span]:
    """Yield everything in a mean step, to its end."""
    timeline = simulate(replay.schedule, replay.mean_profile, network, placement=replay.placement(network))
    yield from _first_replica(timeline)
    for exchange in timeline.collectives:
        collective = exchange.collective
        lane = f"{LANES[collective.direction]} {', '.join(map(str, collective.stages))}"
        if exchange.codec_s:
            yield Span("codec", lane, exchange.start_s, exchange.codec_s, "")
        for (turn, start, end), latency_s in zip(exchange.spans(), exchange.latency_s, strict=True):
            for kind, low, high in (
                ("collective", start, end - latency_s),
                ("latency of a collective", end - latency_s, end),
            ):
                if high > low:
                    yield Span(kind, lane, low, high - low, f"round {turn}")
    if timeline.outside_s > 0:
        yield Span(
            "end of the step", "all stages", timeline.collectives_end_s, timeline.outside_s, "(update, and the driver)"
        )


def _first_replica(timeline: Timeline) -> list[Span]:
    """Return everything on the first replica, then its packets."""
    table = timeline.table
    spans, packets = [], []
    for worker in range(table.num_workers):
        lane = f"stage {', '.join(str(stage) for stage in np.flatnonzero(table.owner == worker))}"
        for index in timeline.visible(0, worker):
            stage, op, microbatch = int(table.stage[index]), int(table.op[index]), int(table.microbatch[index])
            name = f"{stage}{OPS[op]}{microbatch % table.per_step}"
            for phase, low, high in timeline.phases(0, index):
                start, end = max(low, 0.0), min(high, timeline.pipeline_s)
                kind = {"overhead": "calls", "codec": "codec"}.get(phase, OP_KINDS[OPS[op]])
                if end > start:
                    spans.append(Span(kind, lane, start, end - start, name))
            begin, sent, arrive = (
                min(max(float(times[0, stage, op, microbatch]), 0.0), timeline.pipeline_s)
                for times in (timeline.begin_s, timeline.arrive_s - timeline.latency_s, timeline.arrive_s)
            )
            neighbour = {0: stage + 1, 1: stage - 1}.get(op, -1)
            if 0 <= neighbour < table.num_stages:
                link = f"{stage} → {neighbour}"
                for kind, low, high in (("bytes", begin, sent), ("latency", sent, arrive)):
                    if high > low:
                        packets.append(Span(kind, link, low, high - low, f"of the packet of {name}"))
    return spans + sorted(packets, key=lambda packet: packet.start_s)
