"""A report as one HTML file that needs nothing but a browser: no network, no server, no other file.

Texts from runs are escaped here for HTML, and by the page's script for plotly's markup. A content security policy with
the hashes of our scripts keeps the browser from running other scripts, and from fetching anything.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib import resources
from string import Template
from typing import Any

from raysim.analysis.data.folders import over
from raysim.analysis.report.page import (
    PATTERNS,
    Axis,
    Block,
    ByNetwork,
    Cell,
    Details,
    Figure,
    Heading,
    Page,
    Scaled,
    Section,
    Series,
    Table,
    Text,
)

FEW_ROWS = 12  # need no filter
MOST_LINES = 32  # of code shown at once: a recipe is shorter
LONGEST_WORD = 32  # characters of a notation in a table that is not broken into lines


def write_html(page: Page) -> str:
    """Return the page."""
    from plotly.offline import get_plotlyjs

    return _Writer(page).write(get_plotlyjs())


class _Writer:
    def __init__(self, page: Page) -> None:
        self.page = page
        self.strings: dict[str, int] = {}  # texts that occur often, such as the label of a point, are written once
        self.spans: list[list[str]] = []  # texts by network, in the order of its networks
        self.values: list[list[Any]] = []
        self.figures: dict[str, Any] = {}

    def write(self, plotly: str) -> str:
        page = self.page
        body = "\n".join(self._section(section) for section in page.sections)
        data = {
            "networks": list(page.networks),
            "network": page.network,
            "texts": self.spans,
            "values": self.values,
            "figures": self.figures,
            "strings": list(self.strings),
        }
        script = _own("page.js")
        policy = "; ".join(
            [
                "default-src 'none'",
                f"script-src {_hash(plotly)} {_hash(script)}",
                "style-src 'unsafe-inline'",  # plotly's, and ours
                "img-src data: blob:",
                "base-uri 'none'",
                "form-action 'none'",
            ]
        )
        return Template(_own("page.html")).substitute(
            policy=policy,
            title=escape(page.title),
            css=_own("page.css"),
            control=self._control(),
            contents="".join(f'<li><a href="#{s.key}">{escape(s.title)}</a></li>' for s in page.sections),
            subtitle=escape(page.subtitle),
            network=escape(page.network),
            problems=self._problems(),
            body=body,
            data=_json(data),
            plotly=plotly,
            script=script,
        )

    def _control(self) -> str:
        if not self.page.networks:
            return ""
        options = "".join(
            f'<option value="{escape(n)}"{" selected" if n == self.page.network else ""}>{escape(n)}</option>'
            for n in self.page.networks
        )
        return (
            '<p class="control"><label for="network">Times on the network</label> '
            f'<select id="network" autocomplete="off">{options}</select> {over(self.page.transport)} '
            '<span id="said" class="unseen" role="status"></span></p>'
        )

    def _problems(self) -> str:
        if not self.page.problems:
            return ""
        items = "".join(f"<li>{_prose(problem)}</li>" for problem in self.page.problems)
        return (
            '<section class="problem" aria-labelledby="problems"><h2 id="problems">Not in this report</h2>'
            f"<ul>{items}</ul></section>"
        )

    def _section(self, section: Section) -> str:
        blocks = "\n".join(self._block(block) for block in section.blocks)
        absent = f'<p class="absent">{_prose(section.absent)}</p>' if section.absent else ""
        key = section.key
        return f'<section aria-labelledby="{key}"><h2 id="{key}">{escape(section.title)}</h2>\n{absent}{blocks}\n</section>'

    def _block(self, block: Block) -> str:
        if isinstance(block, Heading):
            return f"<h3>{escape(block.text)}</h3>"
        if isinstance(block, Text):
            return self._text(block)
        if isinstance(block, Details):
            texts = "".join(map(self._text, block.texts))
            return f'<details class="more"><summary>{escape(block.title)}</summary>{texts}</details>'
        return self._table(block) if isinstance(block, Table) else self._figure(block)

    def _text(self, block: Text) -> str:
        inner = self._changing(block.text)
        if block.kind in ("code", "python"):
            lines = str(block.text).count("\n") + 1
            code = f'<pre tabindex="0"><code>{inner}</code></pre>'
            return f"<details><summary>{lines} lines</summary>{code}</details>" if lines > MOST_LINES else code
        return f'<p class="{block.kind}">{inner}</p>'

    def _changing(self, text: str | ByNetwork, kind: str = "") -> str:
        """Return a text of a kind of cells as HTML. Texts that depend on the network are marked, and a script changes them."""
        write = _figure_text if kind == "number" else _prose
        if not isinstance(text, ByNetwork):
            return f"<code>{escape(text)}</code>" if kind == "code" else write(text)
        self.spans.append([write(text.values[network]) for network in self.page.networks])
        return f'<span data-text="{len(self.spans) - 1}">{write(text.values[self.page.network])}</span>'

    def _table(self, table: Table) -> str:
        heads = []
        for cell in table.heads:
            name = escape(cell.column)
            inner = f'<button type="button">{name}<span aria-hidden="true"></span></button>' if table.live else name
            heads.append(f'<th scope="col"{_class(cell.kind)}>{inner}</th>')
        rows = "\n".join(self._row(table, row) for row in table.rows)
        filter_ = ""
        if table.live and len(table.rows) > FEW_ROWS:
            filter_ = (
                f'<p class="filter"><label for="{table.key}-filter">Show rows with</label> '
                f'<input id="{table.key}-filter" type="search" data-filter="{table.key}" autocomplete="off" spellcheck="false"> '
                f'<span role="status" data-count="{table.key}">{len(table.rows)} of {len(table.rows)}</span></p>'
            )
        live = " data-live" if table.live else ""
        return (
            f'{filter_}<div class="scroll" tabindex="0" role="region" aria-labelledby="{table.key}-caption">'
            f'<table id="{table.key}"{live}><caption id="{table.key}-caption"><span>{_prose(table.caption)}</span></caption>'
            f"<thead><tr>{''.join(heads)}</tr></thead>\n<tbody>{rows}</tbody></table></div>"
        )

    def _row(self, table: Table, row: Sequence[Cell]) -> str:
        cells = []
        for i, cell in enumerate(row):
            notation = cell.kind == "code" and len(str(cell.text)) > LONGEST_WORD  # long enough to be broken
            attributes = f'{_class("notation" if notation else cell.kind)} data-head="{escape(cell.column)}"'
            if table.live and isinstance(cell.value, ByNetwork):
                self.values.append([_number(cell.value.values[network]) for network in self.page.networks])
                attributes += f' data-values="{len(self.values) - 1}"'
            elif table.live and cell.value is not None:
                attributes += f' data-value="{escape(str(_number(cell.value)))}"'
            inner = self._changing(cell.text, cell.kind)
            cells.append(f'<th scope="row"{attributes}>{inner}</th>' if i == 0 else f"<td{attributes}>{inner}</td>")
        current = ""
        if table.networks:
            current = f' data-network="{escape(str(row[0].text))}"'
        return f"<tr{current}>{''.join(cells)}</tr>"

    def _figure(self, figure: Figure) -> str:
        self.figures[figure.key] = {
            "panels": [
                {
                    "title": panel.title,
                    "height": panel.height,
                    "level": _number(panel.level),
                    "x": self._axis(panel.x),
                    "y": self._axis(panel.y),
                    "series": [self._series(series) for series in panel.series],
                }
                for panel in figure.panels
            ]
        }
        key = figure.key
        # A panel's name is for screen readers; its data is in a table below.
        panels = "".join(
            f'<div class="panel"><h4>{escape(panel.title)}</h4><div class="plot" role="img" style="height:{panel.height}px" '
            f'aria-label="{escape(f"{figure.title}, {panel.title}: {panel.y.text} by {panel.x.text}")}"></div></div>'
            for panel in figure.panels
        )
        legend = '<div class="legend" role="group" aria-label="Series shown"></div>' if figure.legend else ""
        return (
            f'<figure id="{key}" data-columns="{figure.columns}"><h3>{escape(figure.title)}</h3>'
            f'{legend}<div class="panels">{panels}</div><figcaption>{_prose(figure.caption)}</figcaption>'
            f'<details class="data"><summary>Data</summary><p><button type="button" data-csv="{key}">Save {key}.csv</button></p>'
            f'<div class="scroll" tabindex="0" role="region" aria-label="Data of this figure"></div></details></figure>'
        )

    def _series(self, series: Series) -> dict[str, Any]:
        drawn: dict[str, Any] = {
            "name": series.name,
            "kind": series.kind,
            "x": self._values(series.x),
            "y": self._values(series.y),
            **series.style._asdict(),
        }
        if series.kind in ("bars", "spans"):
            drawn["pattern"] = PATTERNS.get(series.style.symbol, "")
        if series.errors is not None:
            drawn["errors"] = _numbers(series.errors)
        if series.widths is not None:
            drawn["widths"] = self._values(series.widths)
        if series.labels:
            drawn["labels"] = self._by_network(series.labels, self._numbered)
        if series.texts:
            drawn["texts"] = list(series.texts)
        return drawn

    def _axis(self, axis: Axis) -> dict[str, Any]:
        ticks, high = self._by_network(axis.ticks or {}, dict), self._by_network(axis.high, _number)
        return axis._asdict() | {"ticks": ticks, "high": high, "order": list(axis.order)}

    def _values(self, values: Any) -> Any:
        if isinstance(values, Scaled):
            return {"times": _numbers(values.values)} | self._by_network(ByNetwork(values.factors), _number)
        return self._by_network(values, _numbers)

    def _numbered(self, labels: Iterable[str]) -> list[int]:
        return [self.strings.setdefault(label, len(self.strings)) for label in labels]

    def _by_network(self, value: Any, write: Callable[[Any], Any]) -> Any:
        """Return a value for JSON; a value by network becomes a list in the order of the page's networks."""
        if isinstance(value, ByNetwork):
            return {"by": [write(value.values[network]) for network in self.page.networks]}
        return write(value)


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind in ("number", "long", "notation") else ""


def _own(name: str) -> str:
    return resources.files("raysim.analysis.report").joinpath(name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _prose(text: str) -> str:
    """Return text as HTML, `code` set as such."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _figure_text(text: str) -> str:
    """Return a figure as HTML that breaks lines only before and after its interval or spread.

    >>> _figure_text("1.01x (0.97 to 1.05), alike")
    '<span class="whole">1.01x</span> <span class="whole">(0.97 to 1.05),</span> <span class="whole">alike</span>'
    """
    return " ".join(f'<span class="whole">{_prose(part)}</span>' for part in re.split(r" (?=[(±])|(?<=,) ", text))


def _json(data: Any) -> str:
    """Return JSON that cannot close its HTML element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _numbers(values: Iterable[Any]) -> list[Any]:
    return [_number(value) for value in values]


def _number(value: Any) -> Any:
    """Return a value for JSON: with six digits, more than a figure shows, and null for missing values."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    number = float(value)
    if not math.isfinite(number):
        return None
    return int(number) if number.is_integer() and abs(number) < 1e15 else float(f"{number:.6g}")
