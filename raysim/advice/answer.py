"""The answer of `raysim advise` in words, and its assumptions."""

from __future__ import annotations

import math
from dataclasses import replace

from raysim.advice.advise import Advice
from raysim.advice.bandwidth import Needed
from raysim.advice.job import SAME, STATE_BYTES, Way
from raysim.units import format_bandwidth, format_bytes


def answer(advice: Advice) -> list[str]:
    """Return the answer, a sentence each: utilisation and bandwidths, the fastest way, and a remedy if the job does not fit."""
    level = advice.dense.bandwidth(0.9)
    helped = _remedy(advice) if level is not None else ""
    if not advice.networks:
        start = f"This job needs {_bps(level)} between two hosts for 90 % utilisation"
        return ["; ".join([start, *([helped] if helped else [])]) + ".", *_too_large(advice)]
    sentences: list[str] = []
    for on in advice.dense.networks:
        busy = f"its GPUs compute {percent(on.busy)} of the time"
        start = f"On {on.network!r} this job runs at {percent(on.utilisation)} utilisation ({busy})"
        needs = [f"{_bps(level)} would give 90 %"] if level is not None else []
        first = not sentences
        sentences.append("; ".join([start, *(needs if first else []), *([helped] if first and helped else [])]) + ".")
    return [*sentences, *_fastest(advice), *_too_large(advice)]


def _remedy(advice: Advice) -> str:
    """Return the bandwidth that the best compression of the job's own layout needs, in words."""
    remedies = advice.remedies()
    level = remedies[0].bandwidth(0.9) if remedies else None
    if level is None:
        return ""
    if math.isinf(level.bps):
        enough = math.isfinite(advice.dense.needed[0].bps)
        return "no compression tried here would" if enough else "latency takes too long at any bandwidth"
    return f"with {setting_words(remedies[0].way)} ({remedies[0].known}), {_bps(level)} would"


def percent(share: float) -> str:
    """Return a share in per cent, with two digits if it is small.

    >>> percent(0.384), percent(0.9999), percent(0.00123)
    ('38%', '100%', '0.12%')
    """
    return f"{share:.0%}" if share >= 0.095 else f"{100 * share:.2g}%"


def _fastest(advice: Advice) -> list[str]:
    best = advice.fastest()
    if best is None:
        return []
    if best is advice.dense:
        return ["No setting that is tried here, and fits, is faster."]
    gain = best.networks[0].samples_per_s / advice.dense.networks[0].samples_per_s
    known = f" ({best.known})" if best.known else ""
    return [
        f"Fastest of those that fit: {best.way.layout}, {best.way}{known}, with {gain:.3g} times as many samples a second."
    ]


def _too_large(advice: Advice) -> list[str]:
    if advice.dense.fits:
        return []
    job = advice.job
    again = not job.recompute and replace(job, recompute=True).fits(advice.dense.way)
    remedy = "--recompute makes it fit" if again else "use more hosts, more stages or smaller microbatches"
    need, have = format_bytes(advice.dense.memory_bytes), format_bytes(job.fleet.memory_bytes)
    return [f"It does not fit: a host needs {need} and has {have}; {remedy}."]


def _bps(level: Needed | None) -> str:
    return "no bandwidth" if level is None or math.isinf(level.bps) else format_bandwidth(level.bps)


def setting_words(way: Way) -> str:
    """Return a way's compression in words.

    >>> from raysim.advice.job import Layout
    >>> setting_words(Way(Layout(4, 2), "Quantize(4)", "Quantize(6)", "DiLoCo(10)"))
    'Quantize(4) activations and Quantize(6) gradients and DiLoCo(10) between replicas'
    """
    links = (
        [f"{way.forward} activations and {way.backward} gradients"]
        if (way.forward, way.backward) != (SAME, SAME)
        else []
    )
    return " and ".join([*links, *([f"{way.method} between replicas"] if way.method != SAME else [])])


def assumptions(advice: Advice) -> list[str]:
    """Return the assumptions behind the figures, a sentence each."""
    job, model = advice.job, advice.job.model
    layouts = dict.fromkeys(row.way.layout for row in advice.rows)
    counts = ", ".join(f"{layout}: {job.num_microbatches(layout)}" for layout in layouts)
    again = ", forwards computed again" if job.recompute else ""
    return [
        f"{model.name}: {model.num_parameters:,} parameters; {job.batch} {model.samples_name} a step, {job.schedule!r}, "
        f"microbatches of {job.microbatch} ({counts}).",
        f"Compute: counted operations at {job.efficiency:g} of the {job.fleet.name}'s dense 16-bit peak by its datasheet{again}. "
        "The share is an assumption: `--efficiency`.",
        f"Transport {job.transport}.",
        "Utilisation: the step without compression on a network without limits, as a share of the step. It charges the network "
        "and the codecs, not the schedule's bubble: compare layouts by samples a second.",
        f"Memory: {STATE_BYTES} bytes a parameter, and 34 bytes a value and block of activations (Korthikanti et al. 2022).",
        "Bandwidth: of one direction between two hosts. Intervals (90 %): the network model's error on real links "
        "(docs/validation.md).",
        "Known: the worst verdict of raysim's findings, on small models that are not yours. `--study FILE` writes the study "
        "that decides.",
    ]
