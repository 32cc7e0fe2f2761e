"""A report as data: sections of text, tables and figures, from which a page, pictures and CSV files are made.

`html` writes it for a browser, `markdown` for a paper. Values that depend on a network are held for every network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from raysim.analysis.data.folders import USUAL_TRANSPORT
from raysim.analysis.report.words import measure_text
from raysim.quality import Measure

Values = Sequence[Any]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5C00")
"""Distinct for the colour-blind (Okabe and Ito 2008); their yellow, too light on white, is darkened."""
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "triangle-down")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid")
PATTERNS = dict(zip(SYMBOLS, ("", "/", "x", "-", "\\", "+", "."), strict=True))
"""The pattern of a bar, by the symbol of a point of the same series."""
GREY = "#8A8F98"
BLACK = "#1B1F24"


class ByNetwork(NamedTuple):
    """A value for every network: a list of numbers, a sentence, a cell."""

    values: Mapping[str, Any]

    @classmethod
    def of(cls, networks: Iterable[str], value: Callable[[str], Any]) -> ByNetwork:
        """Return the values of a function of a network's name."""
        return cls({network: value(network) for network in networks})


class Scaled(NamedTuple):
    """Values multiplied by a factor per network, such as steps by the seconds of one."""

    values: Sequence[float | None]
    factors: Mapping[str, float]


def on_network(value: Any, network: str) -> Any:
    """Return a value on a network; a value that does not depend on the network is returned as it is.

    >>> on_network(Scaled([1, 2], {"100mbps": 0.5}), "100mbps"), on_network([1, 2], "100mbps")
    ([0.5, 1.0], [1, 2])
    """
    if isinstance(value, ByNetwork):
        return value.values[network]
    if isinstance(value, Scaled):
        factor = value.factors[network]
        return [None if number is None else number * factor for number in value.values]
    return value


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


@dataclass(frozen=True)
class Series:
    """A series: points drawn in one style.

    `kind`: "points", "line", "marked" (a line and its points), "steps", "bars" (a value over a name) or "spans" (from `x`,
    `widths` long, in lane `y`).
    """

    name: str
    x: Values | ByNetwork | Scaled
    y: Values | ByNetwork
    style: Style
    kind: str = "points"
    errors: Values | None = None
    """Standard deviation of `y`, over seeds."""
    widths: Values | ByNetwork | None = None
    labels: Values | ByNetwork = ()
    """The label of each point; a single label holds for all."""
    texts: Sequence[str] = ()
    """Short texts beside the points."""


class Axis(NamedTuple):
    """`name` is the column in the CSV file, with its unit; `text` is its label."""

    name: str
    text: str
    log: bool = False
    unit: str = ""
    """"s", "B" or "%" (of a share): how numbers are written."""
    high: float | ByNetwork | None = None
    """The end of an axis from 0; by default the end of its data."""
    ticks: Mapping[str, float] | ByNetwork | None = None
    """Tick labels at the given positions."""
    order: Sequence[str] = ()
    """Of names: the first is on the left, or on top."""


def quality_axis(measure: Measure, suffix: str = "") -> Axis:
    """Return the axis of a measure of quality; `suffix` of its name."""
    return Axis(measure.name + suffix, measure_text(measure), unit="%" if measure.counted else "")


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    height: int = 320
    level: float | None = None
    """Height of a dashed line: the value of the dense baseline."""


@dataclass(frozen=True)
class Figure:
    """Panels side by side with a shared legend."""

    key: str
    """Its name on the page and in files."""
    title: str
    caption: str
    """Instructions for reading the figure."""
    panels: Sequence[Panel]
    columns: int = 2
    legend: bool = True

    def table(self, network: str | None = None) -> pd.DataFrame:
        """Return the drawn points as rows, for one network or for all; the network is empty for a series that depends on none."""
        return pd.DataFrame(
            [row for panel in self.panels for series in panel.series for row in _rows(panel, series, network)]
        )


def _rows(panel: Panel, series: Series, network: str | None) -> Iterable[dict[str, Any]]:
    parts = (series.x, series.y, series.widths)
    by_network = [
        part.values if isinstance(part, ByNetwork) else part.factors
        for part in parts
        if isinstance(part, (ByNetwork, Scaled))
    ]
    networks = list(by_network[0]) if by_network else []
    for chosen in [network] if network is not None and networks else networks or [""]:
        x, y, labels, widths = (on_network(part, chosen) for part in (series.x, series.y, series.labels, series.widths))
        for i, (left, up) in enumerate(zip(x, y, strict=True)):
            if left is None or up is None:
                continue
            row: dict[str, Any] = {"panel": panel.title, "series": series.name}
            if labels:
                row["label"] = labels[i] if len(labels) > 1 else labels[0]
            if networks:
                row["network"] = chosen
            row |= {panel.x.name: left, panel.y.name: up}
            if widths is not None:
                row["duration_s"] = widths[i]
            if series.errors is not None:
                row[f"{panel.y.name}_sd"] = series.errors[i]
            yield row


def finite(values: Iterable[Any]) -> list[float | None]:
    """Return numbers, with None for missing and infinite values: gaps in a line.

    >>> finite([1, float("nan"), None, float("inf"), 2.5])
    [1.0, None, None, None, 2.5]
    """
    numbers = [math.nan if pd.isna(value) else float(value) for value in values]
    return [number if math.isfinite(number) else None for number in numbers]


def joined(curves: Iterable[tuple[Sequence[Any], Sequence[Any], str]]) -> tuple[list[Any], list[Any], list[str]]:
    """Join lines (x, y, label) into one with gaps, so that hundreds draw as fast as one."""
    x: list[Any] = []
    y: list[Any] = []
    labels: list[str] = []
    for xs, ys, label in curves:
        x += [*xs, None]
        y += [*ys, None]
        labels += [label] * (len(xs) + 1)
    return x, y, labels


def thinned(count: int, most: int) -> list[int]:
    """Return at most `most` of `count` positions, evenly spread, with the first and the last.

    >>> thinned(9, 5), thinned(3, 5)
    ([0, 2, 4, 6, 8], [0, 1, 2])
    """
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


# --- blocks of a page, its sections, and the page ------------------------------------------------------------------------------


class Text(NamedTuple):
    """A paragraph. Text in `back ticks` is set as code; all other text is shown as it is."""

    text: str | ByNetwork
    kind: str = "paragraph"
    """"headline" (the verdict in a few words, large), "lead" (the verdict in a sentence), "evidence" (its reasons), "paragraph",
    "note" (limits of figures), "code" (shell commands) or "python"."""


class Cell(NamedTuple):
    """A cell; the heading of its column has the unit."""

    column: str
    text: str | ByNetwork
    value: Any = None
    """The value to sort by, if the text is another."""
    kind: str = "word"
    """"word", "code", "number" (aligned to the right) or "long" (sentences)."""


def code(column: str, text: str) -> Cell:
    """Return a cell with a notation."""
    return Cell(column, text, kind="code")


def number(column: str, text: str | ByNetwork, value: Any = None) -> Cell:
    """Return a cell of a column of numbers."""
    return Cell(column, text, value, "number")


@dataclass(frozen=True)
class Table:
    """A table. A `live` table can be sorted and filtered on the page. The rows of a table of `networks` have a network in the first
    column."""

    key: str
    caption: str
    rows: Sequence[Sequence[Cell]]
    """All with the same columns."""
    live: bool = False
    networks: bool = False

    @property
    def heads(self) -> Sequence[Cell]:
        """A cell of each column."""
        return self.rows[0] if self.rows else ()


class Heading(NamedTuple):
    """A heading within a section."""

    text: str


class Details(NamedTuple):
    """Paragraphs behind a link: how figures were made, and their limits."""

    title: str
    texts: Sequence[Text]


Block = Text | Table | Figure | Heading | Details


@dataclass(frozen=True)
class Section:
    """A part of the report."""

    key: str
    title: str
    blocks: Sequence[Block] = ()
    absent: str = ""
    """Why it lacks figures; empty if it lacks none."""

    @classmethod
    def of(cls, key: str, title: str, blocks: Sequence[Block], without: str) -> Section:
        """Return a section of blocks, or with the reason why there are none."""
        return cls(key, title, blocks, "" if blocks else without)


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

    def decisions(self, networks: Sequence[str]) -> list[str]:
        """Return the verdicts with their evidence, as plain text, on each of some networks."""
        texts = [block for section in self.sections for block in section.blocks if isinstance(block, Text)]
        verdicts: list[list[Text]] = []
        for text in texts:
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
