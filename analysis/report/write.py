"""A report as one HTML file that needs nothing but a browser, or as Markdown with pictures and their data.

The page comes from `page.html`, which escapes all texts. A content security policy with the hashes of the page's scripts keeps
the browser from running others, and from fetching anything. Plotly's script, 4.8 MB, is in the file, so that it can be sent alone.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysim.analysis.data.folders import over
from raysim.analysis.report.page import (
    BLACK,
    DASHES,
    NOTATIONS,
    SYMBOLS,
    Block,
    Chart,
    Page,
    Panel,
    Table,
    Text,
    Trace,
    on_network,
)
from raysim.storage.files import check_inside, output_file, write_whole

if TYPE_CHECKING:
    from markupsafe import Markup

FIGURES = "figures"


def write_report(page: Page, out: Path, form: str = "html") -> None:
    """Write a report to `out`: a file for "html", a folder for "md"."""
    if form == "html":
        with output_file(out) as file:
            file.write(to_html(page).encode())
    else:
        write_markdown(page, out)


# --- HTML ---------------------------------------------------------------------------------------------------------------------


def to_html(page: Page) -> str:
    """Return the page."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    loader = FileSystemLoader(Path(__file__).parent)
    templates = Environment(
        autoescape=True, loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    templates.filters |= {
        "prose": _prose,
        "hash": _hash,
        "figures": _figures,
        "kind": lambda block: type(block).__name__,
    }
    templates.filters["changing"] = partial(_changing, page.network)
    templates.filters["cell"] = partial(_cell, page.network)
    return templates.get_template("page.html").render(page=page, over=over(page.transport), plotly=get_plotlyjs())


def _prose(text: str) -> Markup:
    """Return text as HTML, with text in backticks as code."""
    from markupsafe import Markup

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text)))


def _changing(chosen: str, value: Any, write: Callable[[Any], Any] = _prose) -> Markup:
    """Return a value as HTML; values by network are all included, and hidden except for the chosen network's."""
    from markupsafe import Markup, escape

    if not isinstance(value, Mapping) or not value:
        return escape(write(value))
    span = Markup('<span data-network="{}"{}{}>{}</span>')
    return Markup().join(
        span.format(network, _sort_value(own), Markup("" if network == chosen else " hidden"), write(own))
        for network, own in value.items()
    )


def _cell(chosen: str, table: Table, column: str, value: Any, head: bool) -> Markup:
    """Return a cell of a table."""
    from markupsafe import Markup

    def write(own: Any) -> Markup:
        text = table.text(column, own)
        if column in NOTATIONS:
            return Markup("<code>{}</code>").format(text)
        return _prose(re.sub(" (?![(±])", "\N{NO-BREAK SPACE}", text) if number else text)

    number = table.is_number(column)
    tag = Markup('<th scope="row"{}{} data-head="{}">{}</th>' if head else '<td{}{} data-head="{}">{}</td>')
    attributes = Markup(' class="number"' if number else ""), _sort_value(value)
    return tag.format(*attributes, column, _changing(chosen, value, write))


def _sort_value(value: Any) -> Markup:
    """Return the attribute with the number by which a cell is sorted; nothing if it is sorted by its text."""
    from markupsafe import Markup

    value = value[0] if isinstance(value, tuple) else value
    is_number = isinstance(value, (int, float)) and math.isfinite(value)
    return Markup(f' data-value="{float(value):.6g}"' if is_number else "")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _figures(chart: Chart) -> Markup:
    """Return the plotly figure, and its layout for narrow screens, as JSON that cannot close its HTML element."""
    from markupsafe import Markup
    from plotly.io import to_json

    wide = {"data": chart.data(), "layout": chart.layout(chart.columns)}
    text = to_json({"wide": wide, "narrow": {"data": [], "layout": chart.layout(1)}}, validate=False)
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))


# --- Markdown -----------------------------------------------------------------------------------------------------------------


def write_markdown(page: Page, folder: Path) -> None:
    """Write report.md, figures/NAME.png and figures/NAME.csv into a folder, created if missing."""
    check_inside(folder / FIGURES, folder)
    (folder / FIGURES).mkdir(parents=True, exist_ok=True)
    for chart in page.blocks(Chart):
        write_whole(folder / FIGURES / f"{chart.key}.png", draw_png(chart, page.network))
        rows = chart.table().to_csv(index=False, lineterminator="\n")
        write_whole(folder / FIGURES / f"{chart.key}.csv", rows.encode())
    write_whole(folder / "report.md", ("\n\n".join(_lines(page)) + "\n").encode())


def _lines(page: Page) -> Iterator[str]:
    yield f"# {_plain(page.title)}"
    yield _plain(page.subtitle)
    if page.networks:
        yield (
            f"Times are for the network {page.network} {over(page.transport)} unless another one is named; the CSV files have all of "
            f"{', '.join(page.networks)}."
        )
    if page.problems:
        yield "## Not in this report"
        yield "\n".join(f"- {_marked(problem)}" for problem in page.problems)
    for section in page.sections:
        yield f"## {_plain(section.title)}"
        for block in section.blocks:
            yield from _block(block, page.network)


def _block(block: Block, network: str) -> Iterator[str]:
    if isinstance(block, Text):
        text = str(on_network(block.text, network))
        languages = {"code": "sh", "python": "python"}
        if block.kind in languages:
            yield f"```{languages[block.kind]}\n{text}\n```"
        elif block.kind == "details":
            yield from map(_marked, text.splitlines())
        else:
            forms = {"heading": "### {}", "headline": "**{}**"}
            yield forms.get(block.kind, "{}").format(_marked(text))
    elif isinstance(block, Table):
        yield _marked(block.caption)
        shown = block.on(network)
        columns = [str(column) for column in shown]
        heads = [_plain(column) for column in columns]
        lines = ["---:" if block.is_number(column) else "---" for column in columns]
        codes = [column in NOTATIONS for column in columns]
        rows = [[_md_cell(*cell) for cell in zip(row, codes, strict=True)] for row in shown.itertuples(index=False)]
        yield "\n".join(f"| {' | '.join(cells)} |" for cells in [heads, lines, *rows])
    else:
        yield f"### {_plain(block.title)}"
        yield f"![{_plain(block.title)}]({FIGURES}/{block.key}.png)"
        yield f"{_marked(block.caption)} Data: [{block.key}.csv]({FIGURES}/{block.key}.csv)."


def _md_cell(text: str, is_code: bool) -> str:
    text = text.replace("\n", " ")
    if is_code and text:
        return f"`{text.replace('`', chr(39))}`".replace("|", "\\|")
    return _marked(text)


def _marked(text: str) -> str:
    """Escape all Markdown except `code`."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(part.replace("|", "\\|") if re.fullmatch("`[^`]+`", part) else _plain(part) for part in parts)


def _plain(text: str) -> str:
    r"""Escape all Markdown.

    >>> print(_plain("<b>a|b</b> *c* [d]"))
    \<b\>a\|b\</b\> \*c\* \[d\]
    """
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", text)


# --- pictures by matplotlib, which needs no browser; values that depend on a network are drawn for one ------------------------


MARKERS = dict(zip((*SYMBOLS, "star"), "osD^PXv*", strict=True))
LINES: Mapping[str, Any] = dict(zip(DASHES, ("-", "--", ":", "-.", (0, (9, 3)), (0, (9, 3, 1, 3)), "-"), strict=True))
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e8eaee",
    "legend.frameon": False,
    "text.parse_math": False,  # names are not formulas
}


def draw_png(chart: Chart, network: str) -> bytes:
    """Return the PNG of a chart as it is on a network, at 200 dots an inch."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(chart.columns, len(chart.panels))
    rows = [chart.panels[i : i + columns] for i in range(0, len(chart.panels), columns)]
    heights = [max(panel.height for panel in row) / 110 for row in rows]  # inches
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(3.4 * max(columns, 2), sum(heights) + 0.5), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(len(rows), columns, squeeze=False, height_ratios=heights)
        handles: dict[str, Any] = {}
        for axes, panel in zip(grid.flat, chart.panels, strict=False):
            _draw(axes, panel, network, handles)
        for axes in [*grid.flat][len(chart.panels) :]:
            axes.set_axis_off()
        if len(handles) > 1:
            fitting = 15 * 3.4 * max(columns, 2) / (max(map(len, handles)) + 6)
            figure.legend(
                [*handles.values()], [*handles], loc="outside upper left", ncols=max(min(len(handles), int(fitting)), 1)
            )
        drawn = BytesIO()
        figure.savefig(drawn, format="png", dpi=200, metadata={"Software": None})
        return drawn.getvalue()


def _draw(axes: Any, panel: Panel, network: str, handles: dict[str, Any]) -> None:
    """Draw the traces of a panel, and add each new name to the handles of the legend."""
    axes.set_title(panel.title, loc="left")
    traces = [trace for trace in panel.traces if trace.get("meta") in (None, network)]
    bars = [trace for trace in traces if trace["type"] == "bar" and "base" not in trace]
    names = list(dict.fromkeys(html.unescape(name) for trace in bars for name in trace["x"]))
    if "categoryarray" in panel.y:
        axes.yaxis.update_units([html.unescape(lane) for lane in panel.y["categoryarray"]])
    for trace in traces:
        x, y = ([html.unescape(value) if isinstance(value, str) else value for value in trace[key]] for key in "xy")
        if trace["type"] == "scatter":
            handle = _scatter(axes, trace, x, y)
        else:
            hatch = 2 * trace["marker"]["pattern"]["shape"] or None
            fill = {"color": trace["marker"]["color"], "hatch": hatch, "edgecolor": "white", "linewidth": 0.0}
            if "base" in trace:
                handle = axes.barh(y, x, 0.7, left=trace["base"], **fill)
            else:
                shift = (bars.index(trace) - (len(bars) - 1) / 2) * 0.8 / len(bars)
                handle = axes.bar([names.index(name) + shift for name in x], y, 0.8 / len(bars), **fill)
        handles.setdefault(html.unescape(trace["name"]), handle)
    if panel.level is not None and math.isfinite(panel.level):
        axes.axhline(panel.level, color=BLACK, linewidth=0.8, linestyle="--", zorder=0)
    _axis(axes.xaxis, panel.x)
    _axis(axes.yaxis, panel.y)
    if names:
        axes.set_xticks(range(len(names)), names, rotation=25 if max(map(len, names)) > 12 else 0)
    if "categoryarray" in panel.y:
        axes.invert_yaxis()


def _scatter(axes: Any, trace: Trace, x: list[Any], y: list[Any]) -> Any:
    missing = float("nan")
    errors = trace["error_y"]["array"] if "error_y" in trace else ()
    x, y, errors = ([missing if v is None else v for v in values] for values in (x, y, errors))
    line, marker, texts = trace["line"], trace["marker"], trace.get("text", ())
    for text, *point in zip(texts, x, y, strict=bool(texts)):
        axes.annotate(text, point, (4, 4), textcoords="offset points", fontsize=7, color=line["color"])
    return axes.errorbar(
        x,
        y,
        errors or None,
        color=line["color"],
        alpha=trace["opacity"],
        linestyle=LINES[line["dash"]] if "lines" in trace["mode"] else "none",
        linewidth=line["width"] * 0.65,
        marker=MARKERS[marker["symbol"]] if "markers" in trace["mode"] else "none",
        markersize=marker["size"] * 0.65,
        elinewidth=0.8,
        drawstyle="steps-post" if line.get("shape") == "hv" else "default",
    )


def _axis(axis: Any, of: Mapping[str, Any]) -> None:
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter

    axis.set_label_text(of["title"])
    low, high = axis.get_data_interval()
    if "type" in of and high > 2 * low > 0:
        (axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale)("log")
        subs = (1, 1.5, 2, 3, 5, 7) if high / low < 8 else (1, 2, 5) if high / low < 160 else (1,)
        axis.set_major_locator(LogLocator(subs=subs))
        axis.set_minor_formatter(NullFormatter())
    elif "categoryarray" not in of:
        axis.set_major_locator(MaxNLocator(5))
    if "tickformat" in of:
        unit = of.get("ticksuffix")
        axis.set_major_formatter(EngFormatter(unit) if unit else PercentFormatter(1, decimals=None))
    elif "type" in of:
        axis.set_major_formatter(EngFormatter())
