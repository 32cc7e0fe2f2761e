"""The verdict on a job on one network, in a sentence or two: the same in the report, in a sweep's terminal and in findings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from raysim.analysis.comparison.statistics import MIN_SEEDS, MOST_SEEDS
from raysim.analysis.data.studies import over
from raysim.analysis.report.material import MODES, WORTH, Job, SettingRuns
from raysim.analysis.report.words import against_dense, bytes_of, plural, seconds

GAIN = f"{100 * (WORTH - 1):.0f} %"


def verdict(job: Job, network: str) -> str:
    """Return the setting to use on a network, with its price and its quality; `code` stands in back ticks."""
    if not job.priced:
        return "No run here has profiled actions, so no step can be priced: train with `profile_every_steps` of at least 1."
    on = f"On {network} {over(job.transport)}"
    chosen = job.recommended(network)
    if chosen is None or job.dense is None:
        best = fastest(job, network)
        return (
            f"{on}, the fastest setting is `{best.name}`: {_facts(job, best, network)} There is no dense run to compare "
            "with, so none is recommended: train the same job with `forward=Identity backward=Identity`, once for each seed."
        )
    if len(job.settings) == 1:
        return f"{on}, dense: {_facts(job, chosen, network)} Nothing else was trained, so nothing is compared."
    if chosen.dense:
        return f"{on}, stay dense: {seconds(chosen.step_s[network].value)} a step. {_why_dense(job, network)}"
    return (
        f"{on}, use `{chosen.name}`: {_faster_than_dense(chosen, network)}, with {chosen.factor:.1f} times "
        f"fewer bytes. It takes {_facts(job, chosen, network)}{sure(chosen)}"
    )


def fastest(job: Job, network: str) -> SettingRuns:
    """Return the fastest setting on a network, safe or not."""
    return min(job.priced, key=lambda one: one.step_s[network].value)


def sure(setting: SettingRuns) -> str:
    """Return how sure it is that a setting does no harm, where that was judged."""
    judged = setting.judged
    if not judged:
        return ""
    return (
        f" At {judged['confidence']:.0%} confidence, over {seeds_of(judged)}, it is at most "
        f"{judged['within']:g} {judged['unit']} worse than dense."
    )


def seeds_of(judged: Mapping[str, Any]) -> str:
    """Return the number of seeds that a verdict rests on, and whether they chose nothing."""
    return f"{judged['seeds']}{' fresh' if judged.get('confirmed_on') else ''} seeds"


def _why_dense(job: Job, network: str) -> str:
    """Return why no compressed setting is recommended, the most promising one, and the seeds that would decide about it."""
    faster = job.faster(network)
    if not faster:
        return f"No other setting is at least {GAIN} faster."
    if all(one.verdict == "harmful" for one in faster):
        return f"{_counted(len(faster))} faster, but shown to be harmful."
    best, least = job.promising(network), job.least_harmful(network)
    said = f"{_counted(len(faster))} faster, but none is shown to be safe."
    setting = best or least
    if setting is None:
        return said
    quality = against_dense(setting, job.metric.measure)
    if best is not None:
        chance = (
            "" if math.isnan(best.judged["chance"]) else f", safe with a chance of {100 * best.judged['chance']:.0f} %"
        )
        said += f" The most promising is `{best.name}`: {_faster_than_dense(best, network)}; {quality}{chance}."
    else:
        said += f" None is promising. The least harmful is `{setting.name}`: {quality}."
    return f"{said} {_seeds_words(job, setting)}".rstrip()


def _counted(count: int) -> str:
    return f"{plural(count, 'setting')} {'is' if count == 1 else 'are'}"


def _seeds_words(job: Job, setting: SettingRuns) -> str:
    """Return the reason for which a setting is undecided, and the seeds and hours that would decide."""
    have, lacking = int(setting.judged["seeds"]), setting.judged["lacking"]
    if setting.verdict != "undecided":
        return ""
    if lacking and have >= MIN_SEEDS:
        return f"No verdict: {lacking}."
    needed = job.seeds_for(setting)
    told = f"{plural(have, 'seed')} cannot decide" if have < MIN_SEEDS else f"{plural(have, 'seed')} did not decide"
    if needed is None and not math.isnan(setting.judged["deviation"]):
        return f"{told}, nor would {MOST_SEEDS}: the difference is too near the margin for its spread."
    needed = max(needed or MIN_SEEDS, MIN_SEEDS if have < MIN_SEEDS else have + 1)
    hours = job.cost_s(needed)
    return f"{told}: {needed} would{f', {seconds(hours)} of training' if hours > 0 else ''}."


def _faster_than_dense(setting: SettingRuns, network: str) -> str:
    """Return the speed-up of a setting over its dense setting, with the interval and the dense step."""
    value, low, high = setting.speedup[network]
    dense = seconds(setting.dense_step_s[network])
    return f"{value:.2f} times as fast as dense ({low:.2f} to {high:.2f}; dense takes {dense})"


def _facts(job: Job, setting: SettingRuns, network: str) -> str:
    """Return the seconds and bytes of a step and the quality, beside dense where the setting is not dense."""
    dense = job.dense if job.dense is not setting else None
    reached = [
        f"{job.metric.write(*setting.quality[mode][:2])} with compression {mode} at inference"
        + (f" (dense {job.metric.write(*dense.quality[mode][:2])})" if dense is not None else "")
        for mode in MODES
    ]
    return (
        f"{seconds(setting.step_s[network].value)} a step, {bytes_of(setting.wire_bytes)} on the wire. "
        f"{job.metric.text.capitalize()}: {', '.join(reached)}."
    )
