"""The answer of `raysim advise` in words and as a plot, and its assumptions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from raysim.config.identity import IDENTITY
from raysim.forecast.advise import Advice, Row
from raysim.forecast.bandwidth import LEVELS, Needed, free_s
from raysim.forecast.fleet import Proposal
from raysim.forecast.job import STATE_BYTES
from raysim.network.topology import Network
from raysim.notation import InputError
from raysim.storage.files import output_file
from raysim.units import apart, format_bandwidth, format_bytes, format_seconds, three_digits

MOST_LINES = 9
"""Most ways in the plot, one colour each."""
POINTS = 120


def answer(advice: Advice) -> list[str]:
    """Return the answer as sentences: utilisation, bandwidths, the fastest way, and a remedy if the job does not fit."""
    level = advice.dense.bandwidth(0.9)
    helped = _remedy(advice) if level is not None else ""
    if not advice.networks:
        clauses = [[f"This job needs {_bps(level)} between two hosts for 90 % utilisation", helped]]
        return [*map(_sentence, clauses), step_words(advice), *_too_large(advice)]
    clauses = [
        [
            f"On {on.network!r} this job runs at {percent(on.utilisation)} utilisation "
            f"(its GPUs compute {percent(on.busy)} of the time)"
        ]
        for on in advice.dense.networks
    ]
    clauses[0] += [f"{_bps(level)} would give 90 %" if level is not None else "", helped]
    return [
        *map(_sentence, clauses),
        step_words(advice),
        *_tied(advice),
        *_fastest(advice),
        *_cheapest(advice),
        *_too_large(advice),
    ]


def step_words(advice: Advice) -> str:
    """Describe the assumed step of the job's layout: its samples, and the microbatches in flight."""
    job, layout = advice.job, advice.layout
    count = job.num_microbatches(layout)
    pieces = f"{count} microbatches of {job.microbatch}" if count > 1 else "one microbatch"
    flight = f", at most {max(job.in_flight(layout))} in flight" if layout.workers > 1 else ""
    each = " for each replica" if layout.replicas > 1 else ""
    return (
        f"A step is {job.batch} {job.model.samples_name}, {pieces}{each}{flight}: the answer depends on `--batch`, `--microbatch` and "
        "`--schedule`."
    )


def _tied(advice: Advice) -> list[str]:
    """Return a sentence on the cost of a tied embedding and its remedies, if it takes the largest part of a step."""
    slowed = next((on for on in advice.dense.networks if on.limit == "tied"), None)
    if slowed is None:
        return []
    sent = advice.job.tied_transfers(advice.layout)
    own = sent[(sent["source_replica"] == 0) & (sent["source_stage"] == sent["stage"])]
    return [
        f"On {slowed.network!r} the tied embedding takes {format_seconds(slowed.parts.tied)} of a step of "
        f"{format_seconds(slowed.step_s)}: its two stages send each other {format_bytes(own['wire_bytes'].sum())}, uncompressed. "
        "Compress it by the key `tied_gradient` of a run, untie it (`tie_word_embeddings` = false), or keep both ends on one "
        "worker by a V-shaped schedule, as in --schedule ZBV."
    ]


def _sentence(clauses: Sequence[str]) -> str:
    return f"{'; '.join(filter(None, clauses))}."


def _remedy(advice: Advice) -> str:
    """Return, in words, the bandwidth needed with the best compression in the job's own layout."""
    remedies = advice.remedies()
    level = remedies[0].bandwidth(0.9) if remedies else None
    if level is None:
        return ""
    if math.isinf(level.bps):
        enough = math.isfinite(advice.dense.needed[0].bps)
        return "no compression tried here would" if enough else "latency takes too long at any bandwidth"
    return f"with {setting_words(remedies[0].way)} ({remedies[0].known}), {_bps(level)} would"


def percent(share: float) -> str:
    """Return a share in per cent, with two significant digits if it is small.

    >>> percent(0.384), percent(0.9999), percent(0.00123)
    ('38%', '100%', '0.12%')
    """
    return f"{share:.0%}" if share >= 0.095 else f"{100 * share:.2g}%"


def _fastest(advice: Advice) -> list[str]:
    best, on = advice.fastest(), _where(advice)
    if best is None:
        return []
    if best is advice.dense:
        return [f"No setting that is tried here, and fits, is faster{on}."]
    gain = best.networks[0].samples_per_s / advice.dense.networks[0].samples_per_s
    return [f"Fastest that fits{on}: {_way(best)}, with {three_digits(gain)} times as many samples a second."]


def _way(row: Row) -> str:
    """Return the layout, the setting and, unless it is dense, its verdict."""
    known = str(row.known)
    return f"{row.way.layout}, {row.way}{known and f' ({known})'}"


def _where(advice: Advice) -> str:
    """Return the network of the fastest and the cheapest way, if there are several."""
    return f" on {advice.networks[0]!r}" if len(advice.networks) > 1 else ""


def _cheapest(advice: Advice) -> list[str]:
    """Return a sentence on the cheapest way; nothing if no prices are given."""
    best, costs, on = advice.cheapest(), advice.costs, _where(advice)
    if best is None or costs is None or not costs.cost:
        return []
    own, other = advice.dense.networks[0].expected, best.networks[0].expected
    assert own is not None
    assert other is not None
    if best is advice.dense:
        return [
            f"No setting that is tried here, and fits, is cheaper{on}: 1,000 steps cost {costs.money_text(1000 * own.money)}."
        ]
    return [
        f"Cheapest that fits{on}: {_way(best)}, {costs.money_text(1000 * other.money)} for 1,000 steps instead of "
        f"{costs.money_text(1000 * own.money)}."
    ]


def _too_large(advice: Advice) -> list[str]:
    if advice.dense.fits:
        return []
    job = advice.job
    recomputing = replace(job, recompute=True).memory_bytes(advice.dense.way)
    remedy = (
        "--recompute makes it fit"
        if recomputing <= job.fleet.memory_bytes
        else "use more hosts, more stages or smaller microbatches"
    )
    need, have = apart(format_bytes, advice.dense.memory_bytes, job.fleet.memory_bytes)
    return [f"It does not fit: a host needs {need} and has {have}; {remedy}."]


def _bps(level: Needed | None) -> str:
    return "no bandwidth" if level is None or math.isinf(level.bps) else format_bandwidth(level.bps)


def setting_words(way: Proposal) -> str:
    """Describe the compression of a layout, and its schedule if it is not the job's.

    >>> from raysim.forecast.fleet import HostLayout
    >>> setting_words(Proposal(HostLayout(4, 2), "Quantize(4)", "Quantize(6)", "DiLoCo(10)"))
    'Quantize(4) activations and Quantize(6) gradients and DiLoCo(10) between replicas'
    """
    links = f"{way.forward} activations and {way.backward} gradients" if way.links_coded else ""
    replicas = f"{way.method} between replicas" if way.method != IDENTITY else ""
    schedule = f" in {way.schedule!r}" if way.schedule is not None else ""
    return " and ".join(filter(None, (links, replicas))) + schedule


def assumptions(advice: Advice) -> list[str]:
    """Return the assumptions behind the figures as sentences."""
    job, model = advice.job, advice.job.model
    layouts = dict.fromkeys(row.way.layout for row in advice.rows)
    counts = ", ".join(f"{layout}: {job.num_microbatches(layout)}" for layout in layouts)
    again = ", forwards computed again" if job.recompute else ""
    return [
        f"{model.name}: {model.num_parameters:,} parameters; {job.batch} {model.samples_name} a step, {job.schedule!r}, "
        f"microbatches of {job.microbatch} ({counts}).",
        f"Compute: counted operations at {job.efficiency:g} of the {job.fleet.name}'s dense 16-bit peak by its datasheet{again}. "
        "The share is an assumption: `--efficiency`. "
        "The host's time to launch kernels, which bounds small microbatches, is not counted.",
        f"Transport {job.transport}.",
        "Utilisation: the step without compression on a network without limits, as a share of the step. It charges the network "
        "and the codecs, not the schedule's bubble: compare layouts by samples a second.",
        f"Memory: {STATE_BYTES} bytes a parameter, and 34 bytes a value and block of activations (Korthikanti et al. 2022).",
        "Bandwidth: of one direction between two hosts. Intervals (90 %): the network model's error on real links "
        "(docs/measurements/validation.md).",
        "Known: the worst verdict of raysim's findings on the nearest model tried, which is named. Harm found by training counts "
        "for every model, other verdicts for models of the same kind, trained and sized alike. `--study FILE` writes the study "
        "that decides.",
        *([advice.costs.words()] if advice.costs is not None else []),
    ]


def draw(advice: Advice, path: Path) -> None:
    """Plot utilisation against bandwidth for the ways that fit, dense first; raises InputError if a network has several bandwidths."""
    if not advice.dense.needed:
        raise InputError("`--plot` draws over one bandwidth, but the network has several: give one such as 1gbps+20ms.")
    from matplotlib.figure import Figure

    rows = [row for row in advice.rows if row.fits or row is advice.dense]
    rows = sorted(rows, key=lambda row: (not row.way.dense, row.way.layout != advice.layout))[:MOST_LINES]
    ends = [level.bps for row in rows for level in (row.needed[0], row.needed[-1]) if np.isfinite(level.bps)]
    bandwidths = [network.bandwidth_bps for network in advice.networks]
    marked = [bps for bps in bandwidths if isinstance(bps, float) and np.isfinite(bps)]
    template = advice.networks[0] if advice.networks else Network(1e9)
    axis = np.geomspace(min([min(ends) / 10, *marked]), max([max(ends), *marked]), POINTS)
    networks = [replace(template, bandwidth_bps=float(bps), name="") for bps in axis]
    figure = Figure(figsize=(9, 5.2), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        job = advice.job.scheduled(row.way.schedule)
        shares = free_s(job, row.way.layout) / job.step(row.way).steps_s(networks)
        axes.plot(
            axis / 1e9,
            100 * shares,
            label=f"{row.way.layout}: {row.way}",
            linewidth=2.4 if row is advice.dense else 1.3,
        )
    for level in LEVELS[1:3]:
        axes.axhline(100 * level, color="0.8", linewidth=0.8, zorder=0)
    for bps in marked:
        axes.axvline(bps / 1e9, color="0.6", linestyle=":", zorder=0)
    axes.set_xscale("log")
    axes.set_ylim(0, 102)
    axes.set_xlabel("bandwidth between two hosts, Gbit/s")
    axes.set_ylabel("utilisation, %")
    axes.set_title(f"{advice.job.model.name} on {advice.job.fleet!r}")
    axes.legend(fontsize=8, loc="lower right")
    with output_file(path) as file:
        figure.savefig(file, dpi=120, format="png")
