"""The report of runs and studies: one HTML page that needs nothing but a browser, or Markdown with pictures for a paper.

`compose` makes a page of sections, each of one file here and of one purpose; `html` and `markdown` write it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from raysim.analysis.data import AnalysisError
from raysim.analysis.report.blocks import Block, Heading, Page, Section, Text
from raysim.analysis.report.gather import gather
from raysim.analysis.report.material import NETWORKS, Job, Material
from raysim.analysis.report.words import plural
from raysim.analysis.runs.loading import load
from raysim.files import write_whole
from raysim.network.presets import parse_network
from raysim.network.topology import Network
from raysim.plugins import from_record

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

    `networks` default to the presets of `NETWORKS`, and the network on which the studies compare steps. `first` is the name of the
    network that is chosen at first: by default that of the studies, or the first where it is not among `networks`. `compute` and
    `profile` are as for `Replay`; `transport` is that of the studies by default, else "ray". Raises AnalysisError where there is no
    such folder, or no run in it, and ValueError for a network that is none.
    """
    from raysim.analysis.report import (
        curves,
        decisions,
        findings,
        gantt,
        importance,
        links,
        parallel,
        probes,
        quality,
        reproduce,
        runs,
        summary,
        tradeoff,
        typed,
    )

    results = load(folder)
    if not len(results):
        raise AnalysisError(" ".join(results.problems))
    own = results.network_of(results.runs["study"].dropna())
    if networks is None:
        networks = NETWORKS if own in NETWORKS else (own, *NETWORKS)
    known = [parse_network(one) if isinstance(one, str) else one for one in networks]
    material = gather(
        results, {repr(one): one for one in known}, compute, profile, first=first or own, transport=transport
    )
    topics = (tradeoff, quality, curves, links, decisions, gantt, parallel)
    sections = [
        summary.section(material),
        typed.section(material),
        *([probes.section(material)] if material.probes else []),
        *(
            [_of_job(job, topics, material) for job in material.jobs]
            if len(material.jobs) > 1
            else [topic.section(material) for topic in topics]
        ),
        *(module.section(material) for module in (importance, findings, runs, reproduce)),
    ]
    jobs = (*material.jobs, *material.probes)
    priced = any(job.priced for job in jobs)
    return Page(
        title=f"Compressed pipelines: {results.folders[0].resolve().name}",
        subtitle=_counts(material),
        problems=list(dict.fromkeys(material.results.problems)),
        sections=sections,
        networks=list(material.networks) if priced else (),
        network=material.network,
        transport=material.transport,
    )


def _of_job(job: Job, topics: Sequence[ModuleType], material: Material) -> Section:
    """Return one section of all topics of a job, where a folder holds several jobs."""
    blocks: list[Block] = []
    for topic in topics:
        found = topic.section(replace(material, jobs=[job]))
        blocks += [Heading(found.title), *([Text(found.absent, "note")] if found.absent else []), *found.blocks]
    return Section(job.key, job.title, blocks)


def write_report(
    folder: Path | str,
    out: Path,
    *,
    form: str = "html",
    networks: Sequence[Network | str] | None = None,
    first: str | None = None,
    compute: str = "auto",
    profile: Path | str | None = None,
    transport: str | None = None,
) -> Page:
    """Write the report of a folder to `out`: a file for "html", a folder for "md"; returns it."""
    page = compose(folder, networks, first=first, compute=compute, profile=profile, transport=transport)
    if form == "html":
        from raysim.analysis.report.html import write_html

        write_whole(out, write_html(page).encode())
    else:
        from raysim.analysis.report.markdown import write_markdown

        write_markdown(page, out)
    return page


def _counts(material: Material) -> str:
    runs = len(material.results)
    jobs = (*material.jobs, *material.probes)
    settings = sum(len(job.settings) for job in jobs)
    return f"{plural(runs, 'run')}, {plural(settings, 'setting')}, {plural(len(jobs), 'job')}."
