"""A report as Markdown with pictures, for papers and repositories; the data of each figure as CSV beside it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

from raysim.analysis.data.folders import over
from raysim.analysis.report.page import (
    BLACK,
    PATTERNS,
    Axis,
    Block,
    Cell,
    Details,
    Figure,
    Heading,
    Page,
    Panel,
    Section,
    Series,
    Table,
    Text,
    on_network,
)
from raysim.storage.files import check_inside, write_whole

FIGURES = "figures"


def write_markdown(page: Page, folder: Path) -> None:
    """Write report.md, figures/NAME.png and figures/NAME.csv into a folder, created if missing."""
    check_inside(folder / FIGURES, folder)
    (folder / FIGURES).mkdir(parents=True, exist_ok=True)
    for section in page.sections:
        for block in section.blocks:
            if isinstance(block, Figure):
                write_whole(folder / FIGURES / f"{block.key}.png", draw_png(block, page.network))
                rows = block.table().to_csv(index=False, lineterminator="\n")
                write_whole(folder / FIGURES / f"{block.key}.csv", rows.encode())
    write_whole(folder / "report.md", ("\n\n".join(_lines(page)) + "\n").encode())


def _lines(page: Page) -> Iterator[str]:
    yield f"# {_plain(page.title)}"
    yield _plain(page.subtitle)
    if page.networks:
        others = ", ".join(page.networks)
        yield (
            f"Times are for the network {page.network} {over(page.transport)} unless another one is named; the CSV files have all of "
            f"{others}."
        )
    if page.problems:
        yield "## Not in this report"
        yield "\n".join(f"- {_prose(problem)}" for problem in page.problems)
    for section in page.sections:
        yield from _section(section, page.network)


def _section(section: Section, network: str) -> Iterator[str]:
    yield f"## {_plain(section.title)}"
    if section.absent:
        yield _prose(section.absent)
    for block in section.blocks:
        yield from _block(block, network)


def _block(block: Block, network: str) -> Iterator[str]:
    if isinstance(block, Heading):
        yield f"### {_plain(block.text)}"
    elif isinstance(block, Text):
        text = str(on_network(block.text, network))
        language = {"code": "sh", "python": "python"}.get(block.kind)
        yield (
            f"```{language}\n{text}\n```"
            if language
            else f"**{_prose(text)}**"
            if block.kind == "headline"
            else _prose(text)
        )
    elif isinstance(block, Details):
        yield f"### {_plain(block.title)}"
        for paragraph in block.texts:
            yield from _block(paragraph, network)
    elif isinstance(block, Table):
        yield _prose(block.caption)
        yield "\n".join(_table(block, network))
    else:
        yield f"### {_plain(block.title)}"
        yield f"![{_plain(block.title)}]({FIGURES}/{block.key}.png)"
        yield f"{_prose(block.caption)} Data: [{block.key}.csv]({FIGURES}/{block.key}.csv)."


def _table(table: Table, network: str) -> Iterator[str]:
    yield _row(_plain(cell.column) for cell in table.heads)
    yield _row("---:" if cell.kind == "number" else "---" for cell in table.heads)
    for row in table.rows:
        yield _row(_cell(cell, network) for cell in row)


def _row(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: Cell, network: str) -> str:
    text = str(on_network(cell.text, network)).replace("\n", " ")
    if cell.kind == "code" and text:
        return f"`{text.replace('`', chr(39))}`".replace("|", "\\|")
    return _prose(text)


def _prose(text: str) -> str:
    """Escape all Markdown except `code`."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(
        part.replace("|", "\\|") if part.startswith("`") and len(part) > 2 else _plain(part) for part in parts
    )


def _plain(text: str) -> str:
    """Escape all Markdown."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", text)


# --- pictures by matplotlib: no browser, no screen; values that depend on a network are drawn for one -------------------------


MARKERS = {
    "circle": "o",
    "square": "s",
    "diamond": "D",
    "triangle-up": "^",
    "triangle-down": "v",
    "cross": "P",
    "x": "X",
    "star": "*",
}
LINES: dict[str, Any] = {
    "solid": "-",
    "dash": (0, (5, 2.5)),
    "dot": (0, (1.2, 1.8)),
    "dashdot": (0, (5, 1.8, 1.2, 1.8)),
    "longdash": (0, (9, 3)),
    "longdashdot": (0, (9, 2.5, 1.2, 2.5)),
}
PANEL_WIDTH = 3.4  # inches
POINTS_PER_INCH = 110.0  # of a panel's height on the page
SIDES = (
    (5, 0, "left"),
    (4, 6, "left"),
    (-5, 0, "right"),
    (4, -6, "left"),
)  # of a point: neighbours' numbers take turns
CHARACTERS_PER_INCH = 15.0  # of the legend
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e8eaee",
    "legend.frameon": False,
    "lines.linewidth": 1.3,
    "lines.markersize": 5,
    "text.parse_math": False,  # names are not formulas
}


def draw_png(figure: Figure, network: str) -> bytes:
    """Return the PNG of a figure as it is on a network, at 200 dots an inch."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    columns = min(figure.columns, len(figure.panels))
    rows = math.ceil(len(figure.panels) / columns)
    heights = [max(p.height for p in figure.panels[row * columns : (row + 1) * columns]) for row in range(rows)]
    width = PANEL_WIDTH * max(columns, 2)
    with mpl.rc_context(STYLE):
        canvas = Canvas(figsize=(width, sum(heights) / POINTS_PER_INCH + 0.5), layout="constrained")
        FigureCanvasAgg(canvas)
        grid = canvas.subplots(rows, columns, squeeze=False, height_ratios=heights)
        handles: dict[str, Any] = {}
        for i, axes in enumerate(grid.flat):
            if i < len(figure.panels):
                _draw(axes, figure.panels[i], network, handles)
            else:
                axes.set_axis_off()
        if figure.legend and len(handles) > 1:
            fitting = int(width * CHARACTERS_PER_INCH / (max(map(len, handles)) + 6))
            ncols = max(min(len(handles), fitting), 1)
            canvas.legend([*handles.values()], [*handles], loc="outside upper left", ncols=ncols)
        drawn = BytesIO()
        canvas.savefig(drawn, format="png", dpi=200, metadata={"Software": None})
        return drawn.getvalue()


def _draw(axes: Any, panel: Panel, network: str, handles: dict[str, Any]) -> None:
    axes.set_title(panel.title, loc="left")
    bars = [series for series in panel.series if series.kind == "bars"]
    names = list(dict.fromkeys(name for series in bars for name in series.x)) if bars else []
    for series in panel.series:
        x, y = on_network(series.x, network), on_network(series.y, network)
        if series.kind == "bars":
            share = 0.8 / len(bars)
            shift = (bars.index(series) - (len(bars) - 1) / 2) * share
            handle = axes.bar([names.index(name) + shift for name in x], y, share, **_fill(series))
        elif series.kind == "spans":
            lanes = [panel.y.order.index(lane) for lane in y]
            handle = axes.barh(lanes, on_network(series.widths, network), 0.7, left=x, **_fill(series))
        else:
            handle = _scatter(axes, series, x, y)
            for text, *point in zip(series.texts, x, y, strict=bool(series.texts)):
                if text and None not in point:
                    *offset, side = SIDES[int(text) % len(SIDES)]
                    look = {"ha": side, "va": "center", "fontsize": 7, "color": series.style.colour}
                    axes.annotate(text, point, offset, textcoords="offset points", **look)
        handles.setdefault(series.name, handle)
    if panel.level is not None:
        axes.axhline(panel.level, color=BLACK, linewidth=0.8, linestyle=LINES["dash"], zorder=0)
    if names:
        axes.set_xticks(range(len(names)), names, rotation=25 if max(map(len, names)) > 12 else 0)
    if panel.y.order:
        axes.set_yticks(range(len(panel.y.order)), panel.y.order)
        axes.invert_yaxis()
    _axis(axes.xaxis, axes.set_xlim, panel.x, network, named=bool(names))
    _axis(axes.yaxis, axes.set_ylim, panel.y, network)


def _fill(series: Series) -> dict[str, Any]:
    hatch = 2 * PATTERNS.get(series.style.symbol, "") or None
    return {"color": series.style.colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.0}


def _scatter(axes: Any, series: Series, x: Any, y: Any) -> Any:
    look = series.style
    missing = float("nan")
    return axes.errorbar(
        [missing if number is None else number for number in x],
        [missing if number is None else number for number in y],
        [0.0 if number is None else number for number in series.errors] if series.errors is not None else None,
        color=look.colour,
        alpha=0.45 if look.faint else 1.0,
        linestyle="none" if series.kind == "points" else LINES[look.dash],
        linewidth=0.7 if look.faint else 1.3,
        marker=MARKERS[look.symbol] if series.kind in ("points", "marked") else "none",
        markersize=9 if look.symbol == "star" else 4 if look.faint else 5.5,
        elinewidth=0.8,
        drawstyle="steps-post" if series.kind == "steps" else "default",
    )


def _axis(axis: Any, limit: Any, of: Axis, network: str, *, named: bool = False) -> None:
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter

    axis.set_label_text(of.text)
    ticks = on_network(of.ticks, network)
    if ticks:
        axis.set_ticks(list(ticks.values()), list(ticks))
        return
    if of.order:
        return
    low, high = axis.get_data_interval()
    if of.log and high > 2 * low > 0:
        axis.axes.set_xscale("log") if axis.axis_name == "x" else axis.axes.set_yscale("log")
        subs = (1, 1.5, 2, 3, 5, 7) if high / low < 8 else (1, 2, 5) if high / low < 160 else (1,)
        axis.set_major_locator(LogLocator(subs=subs))
        axis.set_minor_formatter(NullFormatter())
        axis.set_major_formatter(EngFormatter(of.unit))
    elif not named:
        axis.set_major_locator(MaxNLocator(5))
    if of.unit == "%":
        axis.set_major_formatter(PercentFormatter(1, decimals=None))
    elif of.unit:
        axis.set_major_formatter(EngFormatter(of.unit))
    if of.high is not None:
        limit(0, on_network(of.high, network))
