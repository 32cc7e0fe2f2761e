"""A report as Markdown with pictures, for papers and repositories; every figure's data lies beside it as CSV."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raysim.analysis.data.studies import over
from raysim.analysis.report.blocks import Block, Cell, Heading, Page, Section, Table, Text
from raysim.analysis.report.figures import Figure, on_network
from raysim.analysis.report.figures_png import draw_png
from raysim.files import write_whole

FIGURES = "figures"


def write_markdown(page: Page, folder: Path) -> None:
    """Write report.md, figures/NAME.png and figures/NAME.csv into a folder, which is made where there is none."""
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
            f"Times are for the network {page.network} {over(page.transport)} where no other is named; the CSV files have all of "
            f"{others}."
        )
    if page.problems:
        yield "## Not in this report"
        yield "\n".join(f"- {_prose(one)}" for one in page.problems)
    for section in page.sections:
        if not section.interactive:
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
        yield f"```{language}\n{text}\n```" if language else _prose(text)
    elif isinstance(block, Table):
        yield _prose(block.caption)
        yield "\n".join(_table(block, network))
    else:
        yield f"### {_plain(block.title)}"
        yield f"![{_plain(block.title)}]({FIGURES}/{block.key}.png)"
        yield f"{_prose(block.caption)} Data: [{block.key}.csv]({FIGURES}/{block.key}.csv)."


def _table(table: Table, network: str) -> Iterator[str]:
    yield _row(_plain(column.text) for column in table.columns)
    yield _row("---:" if column.number else "---" for column in table.columns)
    for row in table.rows:
        yield _row(_cell(cell, network) for cell in row)


def _row(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: Cell, network: str) -> str:
    text = str(on_network(cell.text, network)).replace("\n", " ")
    if cell.code and text:
        return f"`{text.replace('`', chr(39))}`".replace("|", "\\|")
    return _prose(text)


def _prose(text: str) -> str:
    """Return text of which Markdown sets nothing but `code`."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(
        part.replace("|", "\\|") if part.startswith("`") and len(part) > 2 else _plain(part) for part in parts
    )


def _plain(text: str) -> str:
    """Return text of which Markdown sets nothing."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", text)
