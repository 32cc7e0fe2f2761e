"""The report of runs and studies: one HTML page that needs nothing but a browser, or Markdown with pictures for a paper.

`compose` makes a page of sections; `html` and `markdown` write it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from raysim.analysis.data import AnalysisError
from raysim.analysis.report.frontier import frontier_section, quality_section
from raysim.analysis.report.gather import gather
from raysim.analysis.report.html import write_html
from raysim.analysis.report.markdown import write_markdown
from raysim.analysis.report.material import NETWORKS, Job, Material
from raysim.analysis.report.one_step import links_section, timeline_section
from raysim.analysis.report.over_time import branches_section, curves_section, decisions_section, has_branches
from raysim.analysis.report.page import Block, Heading, Page, Section, Text
from raysim.analysis.report.parameters import importance_section
from raysim.analysis.report.probes import probes_section
from raysim.analysis.report.reuse import reproduce_section
from raysim.analysis.report.summary import summary_section
from raysim.analysis.report.tables import runs_section
from raysim.analysis.report.words import plural
from raysim.analysis.runs.loading import load
from raysim.network.presets import parse_network
from raysim.network.topology import Network
from raysim.plugins import from_record
from raysim.storage.files import output_file

__all__ = ["NETWORKS", "compose", "write_report"]


@from_record()
def compose(
    folder: Path | str,
    networks: Sequence[Network | str] | None = None,
    *,
    first: str | None = None,
    compute: str = "auto",
    profile: Path | str | None = None,
    transport: str | None = None,
) -> Page:
    """Return the report of the runs in a folder or bucket, at any depth, priced on networks.

    `networks` default to the presets of `NETWORKS` and the network on which the studies compare steps. `first` is the name of the
    initially chosen network: by default that of the studies, or the first of `networks` if these lack it. `compute` and
    `profile` are as for `Replay`; `transport` is that of the studies by default, else "ray". Raises AnalysisError if there is no
    such folder or no run in it, and ValueError for an unknown network.
    """
    results = load(folder)
    if not len(results):
        raise AnalysisError(" ".join(results.problems))
    own = results.network_of(results.runs["study"].dropna())
    if networks is None:
        networks = NETWORKS if own in NETWORKS else (own, *NETWORKS)
    parsed = [parse_network(network) if isinstance(network, str) else network for network in networks]
    material = gather(results, parsed, compute, profile, first=first or own, transport=transport)
    sections = _sections(material)  # adds problems as it reads tables
    jobs = (*material.jobs, *material.probes)
    settings = sum(len(job.settings) for job in jobs)
    return Page(
        title=f"Compressed pipelines: {results.folders[0].resolve().name}",
        subtitle=f"{plural(len(results), 'run')}, {plural(settings, 'setting')}, {plural(len(jobs), 'job')}.",
        problems=list(dict.fromkeys(results.problems)),
        sections=sections,
        networks=list(material.networks) if any(job.priced for job in jobs) else (),
        network=material.network,
        transport=material.transport,
    )


def _sections(material: Material) -> list[Section]:
    """Return all sections in the order of the page; several jobs have a section each."""
    topics = (
        frontier_section,
        quality_section,
        curves_section,
        links_section,
        decisions_section,
        timeline_section,
    )
    return [
        summary_section(material),
        *([probes_section(material)] if material.probes else []),
        *([branches_section(material)] if has_branches(material.results) else []),
        *(
            [_job_section(job, topics, material) for job in material.jobs]
            if len(material.jobs) > 1
            else [topic(material) for topic in topics]
        ),
        *(topic(material) for topic in (importance_section, runs_section, reproduce_section)),
    ]


def _job_section(job: Job, topics: Sequence[Callable[[Material], Section]], material: Material) -> Section:
    blocks: list[Block] = []
    for topic in topics:
        section = topic(replace(material, jobs=[job]))
        blocks += [Heading(section.title), *([Text(section.absent, "note")] if section.absent else []), *section.blocks]
    return Section(job.key, job.title, blocks)


def write_report(page: Page, out: Path, form: str = "html") -> None:
    """Write a report to `out`: a file for "html", a folder for "md"."""
    if form == "html":
        with output_file(out) as file:
            file.write(write_html(page).encode())
    else:
        write_markdown(page, out)
