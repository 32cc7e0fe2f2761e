"""The settings of a job compared: step time against quality, quality against density and bits, and the bytes of each link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pandas as pd

from raysim.analysis.comparison.choice import divergence, price_of_pairs
from raysim.analysis.data.folders import over
from raysim.analysis.report.material import MODES, JobRuns, Material, SettingRuns
from raysim.analysis.report.page import (
    BLACK,
    COLOURS,
    DENSE,
    GREY,
    SYMBOLS,
    Block,
    Chart,
    Panel,
    Style,
    Table,
    axis,
    bar_trace,
    quality_axis,
    scatter_trace,
    style,
)
from raysim.analysis.report.words import (
    against_dense,
    below,
    measure_text,
    point_label,
    quality,
    quality_formats,
)
from raysim.analysis.runs.estimates import Estimate
from raysim.config.identity import IDENTITY, is_missing
from raysim.network.topology import Network
from raysim.notation import Method, read_method
from raysim.records import with_replicas

# --- step time against quality, with the dense baseline -----------------------------------------------------------------------


BREAK_EVEN = Network(1e9)  # a link without latency, whose bandwidth is varied


def frontier_blocks(job: JobRuns, material: Material) -> list[Block]:
    """Return a chart of step time against quality, and a table of the settings named in charts."""
    return [_frontier_chart(job, material), _settings_table(job, material)] if len(job.priced) > 1 else []


def _frontier_chart(job: JobRuns, material: Material) -> Chart:
    untrained = ", ".join(
        f"`{setting.name}` ({quality(job.measure, setting.quality['on'].mean)})"
        for setting in job.priced
        if setting not in job.trained
    )
    panels = [
        Panel(
            f"Compression {mode} at inference",
            axis("time of a step", "s", log=True),
            quality_axis(job.measure),
            [trace for network in material.networks for trace in _frontier(job, mode, network)],
            level=job.dense.quality[mode].mean if job.dense is not None else None,
            height=380,
        )
        for mode in MODES
    ]
    return Chart(
        f"{job.key}-frontier",
        f"{job.title}: step time against {measure_text(job.measure)}",
        f"Left is faster, {'up' if job.measure.higher else 'down'} is better. Each point is the mean of a setting over its seeds, with "
        "bars of one standard deviation. The star and the dashed line are dense; the dotted line is the Pareto front. Numbers refer to "
        "the table below. Hover over a point for its bytes and seeds."
        + (f" Settings that learned less than half as much as dense are not drawn: {untrained}." if untrained else ""),
        panels,
    )


def _frontier(job: JobRuns, mode: str, network: str) -> list[Any]:
    """Return the points of each kind of settings on a network, and their front."""
    traces = []
    for name, (look, settings) in grouped(job.trained).items():
        numbers = [str(job.named.index(setting) + 1) if setting in job.named else "" for setting in settings]
        traces.append(
            scatter_trace(
                name,
                [setting.step_s[network].value for setting in settings],
                [setting.quality[mode].mean for setting in settings],
                look,
                "markers+text",
                [point_label(setting) for setting in settings],
                [setting.quality[mode].sd for setting in settings],
                network,
                text=[f" {number} " for number in numbers],  # as in the table
                textposition=[SIDES[int(number or 0) % len(SIDES)] for number in numbers],
                textfont={"color": look.colour, "size": 11},
            )
        )
    front = job.fronts[network][mode]
    steps = [setting.step_s[network].value for setting in front]
    means = [setting.quality[mode].mean for setting in front]
    return [
        *traces,
        scatter_trace("front", steps, means, Style(BLACK, dash="dot", faint=True), "lines", network=network),
    ]


SIDES = ("middle right", "top right", "middle left", "bottom right")  # of a point: neighbours' numbers take turns


def _settings_table(job: JobRuns, material: Material) -> Table:
    """Return a table of the highlighted settings, with the bandwidth below which they pay off."""
    rows = []
    for i, setting in enumerate(job.named, start=1):
        judged = setting.judged
        pairs = [(run, material.partners[run]) for run in setting.runs if run in material.partners]
        even = "" if setting.dense else below(price_of_pairs(material.results, pairs, BREAK_EVEN, material.options))
        evidence = against_dense(setting, job.measure) if judged else ""
        rows.append(
            {
                "setting": setting.name,
                "point": i,
                "seeds": setting.seeds,
                "bytes a step": setting.wire_bytes,
                "factor": setting.factor,
                "step": setting.step_s or "not priced",
                "speed-up": faster(setting),
                "pays below": even,
                **{mode: setting.quality[mode] for mode in MODES},
                "verdict": setting.verdict or ("baseline" if setting.dense else "no dense run"),
                "quality": f"{evidence}; {divergence(judged)}" if setting.verdict == "safe" else evidence,
            }
        )
    return Table(
        f"{job.key}-settings",
        f"The settings of {job.title} that are named in figures. Step times and speed-ups over dense, with 90 % intervals, are for "
        f"the chosen network {over(job.transport)}. Pays below: the bandwidth below which a step is faster than dense, without "
        f"latency; within the interval the two are not distinguishable. Compute: {job.source}.",
        pd.DataFrame(rows),
        quality_formats(job.measure),
    )


def faster(setting: SettingRuns) -> Mapping[str, Estimate] | str:
    """Return the speed-ups of a setting by network; "1" for the dense setting."""
    if not setting.step_s:
        return "not priced"
    return "1" if setting.dense and setting.speedup else setting.speedup or "unknown"


def family(notation: str) -> str:
    """Return a notation without its numbers and options, common to codecs of one kind.

    >>> family("ErrorFeedback(TopK(0.1, values=Quantize(4)))"), family("Quantize(4, range='absmax')")
    ('ErrorFeedback(TopK(Quantize))', 'Quantize')
    """
    method = read_method(notation)
    return _kind(method) if method is not None else "each boundary its own"


def _kind(method: Method) -> str:
    parts = (*method.arguments, *(value for _, value in method.options))
    inner = ", ".join(_kind(part) for part in parts if isinstance(part, Method))
    return f"{method.name}({inner})" if inner else method.name


def grouped(settings: list[SettingRuns]) -> dict[str, tuple[Style, list[SettingRuns]]]:
    """Return settings by the kinds of their codecs, and the style of each kind; dense is drawn last, on top."""
    compressed = [setting for setting in settings if not setting.dense]
    kinds = {setting: f"{family(setting.forward)} / {family(setting.backward)}" for setting in compressed}
    if len(set(kinds.values())) > len(COLOURS):
        kinds = {setting: f"{family(setting.forward)} forward" for setting in compressed}
    named = [name for name, _ in Counter(kinds.values()).most_common(len(COLOURS))]
    groups = {
        name: (style(i), [setting for setting, kind in kinds.items() if kind == name]) for i, name in enumerate(named)
    }
    groups["others"] = Style(GREY), [setting for setting, kind in kinds.items() if kind not in named]
    groups["dense"] = DENSE, [setting for setting in settings if setting.dense]
    return {name: (look, members) for name, (look, members) in groups.items() if members}


# --- quality against density and bits, forward and backward separately, with compression on and off at inference --------------


STRENGTHS = {  # the meaning of a codec's first argument
    "density": ("TopK", "RandomK", "EstimatedTopK"),
    "bits": ("Quantize", "FixedPoint", "NonUniform", "QSGD"),
}


def strength(notation: str, kind: str) -> float | None:
    """Return the density or the bits in a notation; None without one.

    >>> strength("ErrorFeedback(TopK(0.1, values=Quantize(4)))", "density"), strength("Identity", "bits")
    (0.1, None)
    """
    method = read_method(notation)
    while method is not None and method.name not in STRENGTHS[kind]:
        method = method.inner
    return None if method is None else method.strength


def quality_blocks(job: JobRuns, material: Material) -> list[Block]:
    """Return a chart with panels for density and for bits in each direction that has at least two values."""
    panels = []
    for kind in STRENGTHS:
        for direction in ("forward", "backward"):
            each = {setting: strength(getattr(setting, direction), kind) for setting in job.settings}
            strengths = {setting: value for setting, value in each.items() if value is not None}
            if len(set(strengths.values())) > 1:
                panels.append(_quality_panel(job, kind, direction, strengths))
    caption = (
        "Lines join settings with one kind of codec that differ from dense in this direction alone. "
        "Points are means over seeds with bars of one standard deviation; the dashed line is dense."
    )
    title = f"{job.title}: {measure_text(job.measure)} by density and bits"
    return [Chart(f"{job.key}-quality", title, caption, panels)] if panels else []


def _quality_panel(job: JobRuns, kind: str, direction: str, strengths: Mapping[SettingRuns, float]) -> Panel:
    other = "backward" if direction == "forward" else "forward"
    alone = [
        setting
        for setting in strengths
        if getattr(setting, other) == IDENTITY and setting.name == f"{setting.forward} / {setting.backward}"
    ]
    mixed = [setting for setting in strengths if setting not in alone]
    traces = []
    for i, mode in reversed([*enumerate(MODES)]):  # `on` is drawn on top
        look = Style(COLOURS[i], SYMBOLS[i], "solid" if mode == "on" else "dash")
        for text, chosen in (("other changes too", mixed), ("this direction alone", alone)):
            if not chosen:
                continue
            ordered = sorted(chosen, key=lambda setting: strengths[setting])
            lines = chosen is alone and len({family(getattr(setting, direction)) for setting in chosen}) == 1
            traces.append(
                scatter_trace(
                    f"compression {mode}, {text}",
                    [strengths[setting] for setting in ordered],
                    [setting.quality[mode].mean for setting in ordered],
                    look._replace(faint=chosen is mixed and bool(alone)),
                    "lines+markers" if lines and len(chosen) > 1 else "markers",
                    [point_label(setting) for setting in ordered],
                    [setting.quality[mode].sd for setting in ordered],
                )
            )
    carried = "activations" if direction == "forward" else "gradients"
    return Panel(
        f"{kind.capitalize()} of {carried} ({direction})",
        axis("density (share kept)", "%", log=True) if kind == "density" else axis("bits a value"),
        quality_axis(job.measure),
        traces,
        level=job.dense.quality["on"].mean if job.dense is not None else None,
    )


# --- bytes of each setting on each link ---------------------------------------------------------------------------------------


ARROWS = {"forward": "→", "backward": "←"}
AMOUNTS = {"dense": "dense_bytes", "wire": "wire_bytes", "encode": "encode_s", "decode": "decode_s"}


def link_blocks(job: JobRuns, material: Material) -> list[Block]:
    """Return a chart and a table of the bytes on each link, of the highlighted settings."""
    rows = _links(job, material)
    return [_links_chart(job, rows), _links_table(job, rows)] if len(rows) else []


def _links(job: JobRuns, material: Material) -> pd.DataFrame:
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
    steps = groups[["run", "step"]].apply(lambda part: len(part.drop_duplicates()))
    means = groups[list(AMOUNTS.values())].sum().astype(float).div(steps, axis=0)  # of a step, over its replicas
    means["fidelity"] = groups["fidelity"].mean()
    means["codec"] = groups["codec"].agg(lambda values: " | ".join(dict.fromkeys(map(str, values))))
    means["factor"] = means["dense_bytes"] / means["wire_bytes"].where(means["wire_bytes"] > 0)
    names = {column: name for name, column in AMOUNTS.items()}
    return means.reset_index().rename(columns=names)


def name_of(boundary: Any, direction: str) -> str:
    """Return the label of a link: "0 → 1" forward, "0 ← 1" backward."""
    if direction not in ARROWS or is_missing(boundary):
        return direction
    return f"{int(boundary)} {ARROWS[direction]} {int(boundary) + 1}"


def _links_chart(job: JobRuns, rows: pd.DataFrame) -> Chart:
    panels = []
    forward = rows["link"].str.contains(ARROWS["forward"])
    for title, part in (("Activations (forward)", rows[forward]), ("Gradients (backward)", rows[~forward])):
        traces = [
            bar_trace(name, of_setting["link"], of_setting["wire"], look)
            for name, look in looks(job).items()
            if len(of_setting := part[part["setting"] == name])
        ]
        if traces:
            panels.append(Panel(title, axis("link"), axis("bytes of a step", "B"), traces))
    return Chart(
        f"{job.key}-links",
        f"{job.title}: wire bytes of a step by link",
        "Mean over steps and seeds, counted from the packets. A link is one direction of the boundary between two stages.",
        panels,
    )


def _links_table(job: JobRuns, rows: pd.DataFrame) -> Table:
    """Return the links of the settings recommended on some network, or else of the first compressed setting."""
    recommended = [setting for setting in job.on_some_network(job.recommended) if not setting.dense]
    compressed = [setting for setting in job.named if not setting.dense] or job.named
    shown = [setting.name for setting in recommended or compressed[:1]]
    rows = pd.concat([rows[rows["setting"] == name] for name in shown])
    return Table(
        f"{job.key}-link-table",
        f"Traffic per step of {job.title} by link, mean over steps and seeds, for the settings recommended on some network, or else "
        "for the first compressed setting. Factor: dense bytes over wire bytes. Fidelity: 1 if messages arrive exactly, 0 if they "
        "arrive as zeros.",
        rows[["setting", "link", "codec", "dense", "wire", "factor", "fidelity", "encode", "decode"]],
    )


def looks(job: JobRuns) -> Mapping[str, Style]:
    """Return the style of each highlighted setting."""
    others = [setting for setting in job.named if setting is not job.dense]
    dense = {job.dense.name: DENSE} if job.dense is not None else {}
    return dense | {setting.name: style(i) for i, setting in enumerate(others)}
