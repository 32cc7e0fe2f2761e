"""The report of runs and studies: one HTML page that needs nothing but a browser, or Markdown with pictures for a paper.

`compose` makes a page of sections; `write_report` writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from raysim.analysis.comparison.carry import Asked
from raysim.analysis.data import AnalysisError
from raysim.analysis.data.folders import SCREEN
from raysim.analysis.report.frontier import frontier_blocks, link_blocks, quality_blocks
from raysim.analysis.report.gather import gather
from raysim.analysis.report.material import NETWORKS, JobRuns, Material
from raysim.analysis.report.over_time import curve_blocks, decision_blocks, timeline_blocks
from raysim.analysis.report.page import Block, Page, Section, Text
from raysim.analysis.report.reuse import reproduce_blocks
from raysim.analysis.report.screens import screen_page
from raysim.analysis.report.summary import summary_blocks
from raysim.analysis.report.tables import (
    branch_blocks,
    carried_section,
    has_branches,
    importance_charts,
    probe_blocks,
    runs_tables,
)
from raysim.analysis.report.write import write_report
from raysim.analysis.runs.loading import load
from raysim.network.costs import FleetCosts
from raysim.network.presets import parse_network
from raysim.network.topology import Network
from raysim.plugins import from_record
from raysim.records.packs import open_folder
from raysim.units import plural

__all__ = ["NETWORKS", "compose", "write_report"]

TOPICS: Sequence[
    tuple[str, str, Callable[[JobRuns, Material], list[Block]], str]
] = (  # of a job; and why there may be none
    ("frontier", "Frontier", frontier_blocks, "It needs two settings or more of a job, with profiled actions."),
    (
        "quality",
        "Quality against density and bits",
        quality_blocks,
        "It needs settings that differ in the density or the bits of a codec.",
    ),
    ("curves", "Learning curves", curve_blocks, "No run here has recorded its steps yet."),
    ("links", "Bytes per link", link_blocks, "No link sent anything: pipelines of one stage have none."),
    ("decisions", "Decisions over time", decision_blocks, "No run here used an adaptive method, such as GraVAC."),
    (
        "gantt",
        "A step of the pipeline",
        timeline_blocks,
        "It needs a run with profiled actions: train with `profile_every_steps` of at least 1.",
    ),
)


@from_record()
def compose(
    folder: Path | str,
    networks: Sequence[Network | str] | None = None,
    *,
    first: str | None = None,
    compute: str | None = None,
    profile: Path | str | None = None,
    transport: str | None = None,
    asked: Asked | None = None,
    costs: FleetCosts | None = None,
) -> Page:
    """Return the report of the runs in a folder or bucket, at any depth, priced on networks; or that of a screen's folder.

    `networks` default to the presets of `NETWORKS` and the network on which the studies compare steps. `first` is the name of the
    initially chosen network: by default that of the studies, or the first of `networks` if these lack it. `compute`,
    `profile` and `transport` are as for `Replay`, by default those of the studies. `asked`: a model of another size, to
    which the harms are carried. `costs`: costs and churn of hosts. Raises AnalysisError if there is no such folder or no run in it,
    or if `carry` raises it, and ValueError for an unknown network.
    """
    place = open_folder(folder)
    if (place / SCREEN).is_file():
        if asked is not None:
            raise AnalysisError(
                "A screen trains nothing, so no law carries its figures to another size: screen that model itself."
            )
        return screen_page(place)
    results = load(folder)
    if not len(results):
        raise AnalysisError(" ".join(results.problems))
    extra, sentences = ([], []) if asked is None else carried_section(results, asked)
    own = results.network_of(results.runs["study"].dropna())
    if networks is None:
        networks = NETWORKS if own in NETWORKS else (own, *NETWORKS)
    parsed = [parse_network(network) if isinstance(network, str) else network for network in networks]
    material = gather(results, parsed, compute, profile, first=first or own, transport=transport, costs=costs)
    summarised, *others = _sections(material)  # adds problems as it reads tables
    jobs = (*material.jobs, *material.probes)
    settings = sum(len(job.settings) for job in jobs)
    return Page(
        title=f"Compressed pipelines: {results.folders[0].resolve().name}",
        subtitle=f"{plural(len(results), 'run')}, {plural(settings, 'setting')}, {plural(len(jobs), 'job')}.",
        problems=list(dict.fromkeys(results.problems)),
        sections=[summarised, *extra, *others],
        networks=list(material.networks) if any(job.priced for job in jobs) else (),
        network=material.network,
        transport=material.options["transport"],
        carried=sentences,
    )


def _sections(material: Material) -> Iterator[Section]:
    """Yield all sections in the order of the page; several jobs have a section each."""
    if material.jobs or not material.probes:
        without = "No run here is finished yet, so there is nothing to recommend."
    else:
        without = "The runs here are candidates of a probe, which train nothing."
    yield _section("summary", "Summary", _of_jobs(material.jobs, summary_blocks, material), without)
    if material.probes:
        yield Section("probes", "Probe", [block for job in material.probes for block in probe_blocks(job, material)])
    if has_branches(material.results):
        title = "Where in training compression harms"
        yield _section("branches", title, branch_blocks(material), "No branch has a dense counterpart.")
    if len(material.jobs) > 1:
        for job in material.jobs:
            blocks = [
                block
                for _, title, topic, without in TOPICS
                for block in (Text(title, "heading"), *(topic(job, material) or [Text(without, "note")]))
            ]
            yield Section(job.key, job.title, blocks)
    else:
        for key, title, topic, without in TOPICS:
            yield _section(key, title, [block for job in material.jobs for block in topic(job, material)], without)
    without = "It needs a study of `raysim sweep` with more finished trials than there are here."
    yield _section("importance", "Importance of parameters", importance_charts(material), without)
    yield _section("runs", "Runs", runs_tables(material), "There is no run here, other than candidates of a probe.")
    reproduced = _of_jobs(material.jobs, reproduce_blocks, material)
    yield _section("reproduce", "Settings and versions", reproduced, "No run here is finished.")


def _section(key: str, title: str, blocks: Iterable[Block], without: str) -> Section:
    """Return a section of blocks, or with the reason why there are none."""
    return Section(key, title, [*blocks] or [Text(without, "note")])


def _of_jobs(
    jobs: Sequence[JobRuns], topic: Callable[[JobRuns, Material], Iterable[Block]], material: Material
) -> Iterator[Block]:
    """Yield the blocks of all jobs, each under its title if there are several."""
    for job in jobs:
        if len(jobs) > 1:
            yield Text(job.title, "heading")
        yield from topic(job, material)
