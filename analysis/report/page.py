"""The parts of a report: sentences, tables (a frame each) and charts (a plotly figure each), in sections.

A sentence or a cell may be a mapping by network, and a trace may name its network in `meta`: the reader sees only the chosen
network's.
"""

from __future__ import annotations

import copy
import html
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import pandas as pd

from raysim.analysis.data.folders import USUAL_TRANSPORT
from raysim.analysis.report.words import FORMATS, measure_text
from raysim.quality import Measure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5C00")
"""Distinct for the colour-blind (Okabe and Ito 2008); the page brightens them, grey and black in dark mode."""
GREY, BLACK = "#8A8F98", "#1B1F24"
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "triangle-down")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid")
HATCHES = dict(zip(SYMBOLS, ("", "/", "x", "-", "\\", "+", "."), strict=True))  # of a bar
NOTATIONS = ("setting", "candidate", "forward", "backward", "codec", "method")  # columns of code


Trace = Mapping[str, Any]


def on_network(value: Any, network: str) -> Any:
    """Return a value on a network; a value that does not depend on the network is returned as it is."""
    return value[network] if isinstance(value, Mapping) and value else value


class Text(NamedTuple):
    """A paragraph. Text in `back ticks` is set as code; all other text is shown as it is."""

    text: str | Mapping[str, str]
    kind: str = "paragraph"
    """"heading", "headline" (the verdict in a few words, large), "lead" (the verdict in a sentence), "evidence" (its reasons),
    "paragraph", "note", "details" (notes behind a link, one a line), "code" (shell commands or TOML) or "python"."""


@dataclass(frozen=True)
class Table:
    """A table; `formats` turn the values of a column into text, where `FORMATS` do not suffice."""

    key: str
    caption: str
    frame: pd.DataFrame
    formats: Mapping[str, Callable[[Any], str]] = field(default_factory=dict)

    def text(self, column: str, value: Any) -> str:
        """Return a value on one network, as displayed."""
        if isinstance(value, str):
            return value
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return "none"
        return str({**FORMATS, **self.formats}.get(column, str)(value))

    def on(self, network: str) -> pd.DataFrame:
        """Return the table on a network, as displayed."""
        texts = {
            str(name): column.map(lambda value, name=name: self.text(str(name), on_network(value, network)))
            for name, column in self.frame.items()
        }
        return pd.DataFrame(texts)

    def is_number(self, column: str) -> bool:
        """Return whether a column is aligned to the right."""
        return column in FORMATS or column in self.formats or pd.api.types.is_numeric_dtype(self.frame[column])


class Panel(NamedTuple):
    """One pair of axes and its traces, as plotly's JSON; `level`: the height of a dashed line, the dense baseline."""

    title: str
    x: Mapping[str, Any]
    y: Mapping[str, Any]
    traces: Sequence[Trace]
    level: float | None = None
    height: int = 330


@dataclass(frozen=True)
class Chart:
    """Panels with a common legend: one plotly figure."""

    key: str
    """Its name on the page and in files."""
    title: str
    caption: str
    panels: Sequence[Panel]
    columns: int = 2

    def layout(self, columns: int) -> dict[str, Any]:
        """Return plotly's layout with the panels in rows of `columns`."""
        columns = min(columns, len(self.panels))
        rows = [self.panels[i : i + columns] for i in range(0, len(self.panels), columns)]
        heights = [max(panel.height for panel in row) for row in rows]
        layout = copy.deepcopy(_grid(tuple(plotly_text(panel.title) for panel in self.panels), columns, tuple(heights)))
        for title in layout.get("annotations", ()):
            title["font"] = {"size": 13}
        for number, panel in zip(self._numbers(), self.panels, strict=True):
            for name, of in (("xaxis", panel.x), ("yaxis", panel.y)):
                layout[f"{name}{number}"] |= {**of, "title": {"text": plotly_text(of["title"])}}
            if panel.traces and panel.level is not None and math.isfinite(panel.level):
                line = {"color": BLACK, "dash": "dash", "width": 1}
                ends = {"x0": 0, "x1": 1, "xref": f"x{number} domain", "y0": panel.level, "y1": panel.level}
                shape = {"layer": "below", "line": line, "type": "line", **ends, "yref": f"y{number}"}
                layout.setdefault("shapes", []).append(shape)
        traces = [trace for panel in self.panels for trace in panel.traces]
        return layout | {
            "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
            "height": sum(heights) + 60,
            "showlegend": len({trace["name"] for trace in traces}) > 1,
            "margin": {"t": 30, "b": 10, "l": 10, "r": 14},
            "barmode": "overlay" if any("base" in trace for trace in traces) else "group",
        }

    def data(self) -> list[dict[str, Any]]:
        """Return the traces of all networks with their axes, each name once in the legend of a network."""
        seen: set[tuple[str, Any]] = set()
        placed = []
        for number, panel in zip(self._numbers(), self.panels, strict=True):
            axes = {f"{name}axis": f"{name}{number}" for name in "xy"}
            for trace in panel.traces:
                name, network = trace["name"], trace.get("meta")
                placed.append({**trace, **axes, "showlegend": not {(name, None), (name, network)} & seen})
                seen.add((name, network))
        return placed

    def _numbers(self) -> list[str]:
        """Return plotly's numbers of the panels' axes: none for the first."""
        return ["", *map(str, range(2, len(self.panels) + 1))]

    def table(self, network: str | None = None) -> pd.DataFrame:
        """Return the drawn points as rows, for one network or for all; columns are named by the axes."""
        return pd.DataFrame([row for panel in self.panels for row in _points(panel, network)])


@lru_cache(maxsize=64)
def _grid(titles: Sequence[str], columns: int, heights: Sequence[int]) -> dict[str, Any]:
    """Return plotly's layout of titled panels in rows of `columns` with these heights, cached because plotly is slow."""
    from plotly.subplots import make_subplots

    spacing = 85 / sum(heights) if len(heights) > 1 else None
    figure = make_subplots(
        len(heights), columns, subplot_titles=titles, row_heights=list(heights), vertical_spacing=spacing
    )
    layout: dict[str, Any] = figure.layout.to_plotly_json()
    return layout


def _points(panel: Panel, network: str | None) -> Iterator[dict[str, Any]]:
    for trace in panel.traces:
        if network is not None and trace.get("meta") not in (None, network):
            continue
        xs, ys, base = trace["x"], trace["y"], trace.get("base")
        values: dict[str, Any] = {panel.x["title"]: xs if base is None else base, panel.y["title"] or "lane": ys}
        values |= {} if base is None else {"duration": xs}
        values |= {"sd": trace["error_y"]["array"]} if "error_y" in trace else {}
        labels = trace.get("hovertext")
        for i in range(len(ys)):
            row = {name: column[i] for name, column in values.items()}
            if None in (xs[i], ys[i]):
                continue
            label = labels if isinstance(labels, str) or labels is None else labels[i]
            first = {
                "panel": panel.title,
                "series": trace["name"],
                "network": trace.get("meta", ""),
                "label": label or "",
            }
            yield {name: html.unescape(v) if isinstance(v, str) else v for name, v in (first | row).items()}


Block = Text | Table | Chart


class Section(NamedTuple):
    """A part of the report."""

    key: str
    title: str
    blocks: Sequence[Block]


class Page(NamedTuple):
    """The whole report."""

    title: str
    subtitle: str
    problems: Sequence[str]
    """Unreadable records, one sentence each."""
    sections: Sequence[Section]
    networks: Sequence[str]
    network: str
    """The network chosen at first."""
    transport: str = USUAL_TRANSPORT
    """The transport of all its prices."""
    carried: Sequence[str] = ()
    """A sentence on each setting at another size."""

    def blocks(self, kind: type[Any]) -> list[Any]:
        """Return all texts, tables or charts."""
        return [block for section in self.sections for block in section.blocks if isinstance(block, kind)]

    def recommended(self, network: str) -> list[dict[str, str]]:
        """Return the table row of each job's recommended setting on a network."""
        tables = [table.on(network) for table in self.blocks(Table) if table.key.endswith("-recommended")]
        rows = [frame[frame["network"] == network] for frame in tables]
        return [
            {str(key): str(value) for key, value in row.items()} for each in rows for row in each.to_dict("records")
        ]

    def decisions(self, networks: Sequence[str]) -> list[str]:
        """Return the verdicts with their evidence, as plain text, on each of some networks."""
        verdicts: list[list[Text]] = []
        for text in self.blocks(Text):
            if text.kind == "lead":
                verdicts.append([text])
            elif text.kind == "evidence":
                verdicts[-1].append(text)
        sentences = [
            " ".join(filter(None, (str(on_network(text.text, network)) for text in parts)))
            for parts in verdicts
            for network in networks
        ]
        return [sentence.replace("`", "") for sentence in dict.fromkeys(sentences)]


# --- traces and axes in the report's style ------------------------------------------------------------------------------------


class Style(NamedTuple):
    """Style of a series, distinguishable without colour."""

    colour: str = GREY
    symbol: str = "circle"
    dash: str = "solid"
    faint: bool = False


DENSE = Style(BLACK, "star", "solid")


def style(number: int) -> Style:
    """Return the style of the n-th named series; grey beyond the palette."""
    if number >= len(COLOURS):
        return Style(faint=True)
    return Style(COLOURS[number], SYMBOLS[number], DASHES[number])


def axis(text: str, unit: str = "", *, log: bool = False) -> dict[str, Any]:
    """Return a plotly axis; `unit`: "s", "B", "bit/s" or "%" of a share."""
    common: dict[str, Any] = {"title": text} | ({"type": "log", "nticks": 3} if log else {})
    if unit == "%":
        common |= {"tickformat": ".2~%", "hoverformat": ".2%"}
    elif unit:
        common |= {"tickformat": "~s", "hoverformat": ".4s", "ticksuffix": unit}
    if unit not in ("", "%") and log:  # plotly puts no space before the unit, and leaves it out between powers of ten
        digits = [
            (f"{first}{zeros}", unit if first == 1 else "") for first in range(1, 10) for zeros in ("", "0", "00")
        ]
        common["labelalias"] = {
            f"{number}{prefix}{suffix}": f"{number}\N{NO-BREAK SPACE}{prefix}{unit}"
            for number, suffix in digits
            for prefix in SI
        }
    return common


SI = ("n", "µ", "m", "", "k", "M", "G", "T")


def quality_axis(measure: Measure) -> dict[str, Any]:
    """Return the axis of a measure of quality."""
    return axis(measure_text(measure), "%" if measure.counted else "")


def scatter_trace(
    name: str,
    x: Iterable[Any],
    y: Iterable[Any],
    look: Style,
    mode: str = "markers",
    labels: str | Sequence[str] = "",
    errors: Iterable[Any] | None = None,
    network: str | None = None,
    **options: Any,
) -> Trace:
    """Return a trace of points or lines; `labels` are shown over each point, `errors` are standard deviations."""
    size = 6 if look.faint else 13 if look.symbol == "star" else 9
    colour = {"color": look.colour}
    return _trace(
        "scatter",
        name,
        x,
        y,
        mode=mode,
        marker=colour | {"size": size, "symbol": look.symbol},
        line={**colour, "dash": look.dash, **options.pop("line", {}), "width": 1 if look.faint else 2},
        opacity=0.5 if look.faint else 1,
        error_y=None if errors is None else {"array": finite(errors), **colour, "thickness": 1, "width": 0},
        hovertext=plotly_text(labels) if isinstance(labels, str) else [plotly_text(label) for label in labels],
        hoverinfo="x+y+text" if labels else "x+y+name",
        meta=network,
        cliponaxis=False,
        **options,
    )


def bar_trace(
    name: str, x: Iterable[Any], y: Iterable[Any], look: Style, labels: Sequence[str] = (), **options: Any
) -> Trace:
    """Return a trace of bars; of spans from `base` with `orientation="h"`."""
    shape = HATCHES.get(look.symbol, "")
    pattern = {"bgcolor": look.colour, "fgcolor": "#FFFFFF", "shape": shape, "size": 6, "solidity": 0.2}
    return _trace(
        "bar",
        name,
        x,
        y,
        marker={"color": look.colour, "pattern": pattern},
        hovertext=[plotly_text(label) for label in labels] or None,
        hoverinfo="text" if labels else "x+y+name",
        **options,
    )


def _trace(kind: str, name: str, x: Iterable[Any], y: Iterable[Any], **options: Any) -> Trace:
    text = plotly_text(name)
    given = {"legendgroup": text, "name": text, "x": finite(x), "y": finite(y), **options}
    return {key: value for key, value in sorted(given.items()) if value is not None} | {"type": kind}


def plotly_text(text: str) -> str:
    """Escape text for plotly, which would read it as markup."""
    return html.escape(text, quote=False)


def finite(values: Iterable[Any]) -> list[Any]:
    """Return the coordinates of points; None for missing and infinite values, gaps in a line.

    >>> finite([1, float("nan"), None, float("inf"), "a"])
    [1.0, None, None, None, 'a']
    """
    known = [
        plotly_text(value) if isinstance(value, str) else math.nan if pd.isna(value) else float(value)
        for value in values
    ]
    return [value if isinstance(value, str) or math.isfinite(value) else None for value in known]
