"""Parts of a report, independent of its format: sections of text, tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from raysim.analysis.data.folders import USUAL_TRANSPORT
from raysim.analysis.report.figures import ByNetwork, Figure, on_network
from raysim.analysis.runs.estimates import Estimate


class Text(NamedTuple):
    """A paragraph. Text in `back ticks` is set as code; all other text is shown as it is."""

    text: str | ByNetwork
    kind: str = "paragraph"
    """"headline" (the verdict in a few words, large), "lead" (the verdict in a sentence), "evidence" (its reasons), "paragraph",
    "note" (limits of figures), "code" (shell commands) or "python"."""


class Nodes(NamedTuple):
    """Prices of a setting at the nodes of a grid of networks, latency by latency within each bandwidth."""

    step_s: Sequence[Estimate]
    speedup: Sequence[Estimate]
    """Over `dense_step_s`; empty without a dense setting."""
    dense_step_s: Sequence[float]


class Typed(NamedTuple):
    """A price on the reader's typed network, interpolated by the page: the "step" or the "speedup" of a setting."""

    nodes: Nodes
    part: str


class Cell(NamedTuple):
    """A cell: its text, and the value to sort by if that differs."""

    text: str | ByNetwork | Typed
    value: Any = None
    code: bool = False


class Column(NamedTuple):
    """A column's heading, with its unit; numbers are aligned to the right."""

    text: str
    number: bool = False
    long: bool = False
    """True if it holds sentences."""


@dataclass(frozen=True)
class Table:
    """A table. A `live` table can be sorted and filtered on the page. `current` is the column of a row's network, `verdict` the
    column with "supported", "contradicted" or "undecided". A `typed` table is filled in on the page for the reader's typed network,
    under a sentence with the setting to use there."""

    key: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    live: bool = False
    current: int | None = None
    verdict: int | None = None
    typed: bool = False


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
    interactive: bool = False
    """True if it means nothing without a browser."""

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
