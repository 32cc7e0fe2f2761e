"""The verdict on a job on one network, in a sentence or two: the same in the report, in a terminal and in findings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from raysim.analysis.comparison.choice import divergence
from raysim.analysis.comparison.rule import MIN_SEEDS, MOST_SEEDS
from raysim.analysis.data.folders import over
from raysim.analysis.report.material import MODES, WORTH, Job, SettingRuns
from raysim.analysis.report.words import against_dense, bytes_of, plural, seconds

GAIN = f"{100 * (WORTH - 1):.0f} %"


def verdict(job: Job, network: str) -> str:
    """Return the setting to use on a network, with its price and its quality; `code` stands in back ticks."""
    return " ".join(filter(None, answer_and_evidence(job, network)))


def answer_and_evidence(job: Job, network: str) -> tuple[str, str]:
    """Return the verdict in two parts: one sentence with the setting to use, and the reasons."""
    if not job.priced:
        profiled = "train with `profile_every_steps` of at least 1"
        return f"No run here has profiled actions, so no step can be priced: {profiled}.", ""
    on = f"On {network} {over(job.transport)}"
    chosen = job.recommended(network)
    if chosen is None or job.dense is None:
        best = fastest(job, network)
        return (
            f"{on}, the fastest setting is `{best.name}`, but there is no dense run to compare it with.",
            f"It takes {_facts(job, best, network)} Train the same job with `forward=Identity backward=Identity`, once for each seed.",
        )
    if len(job.settings) == 1:
        return (
            f"{on}, only dense was trained, so there is nothing to compare.",
            f"It takes {_facts(job, chosen, network)}",
        )
    if chosen.dense:
        return f"{on}, stay dense: {seconds(chosen.step_s[network].value)} a step.", _why_dense(job, network)
    gain = f"{_faster_than_dense(chosen, network)}, with {chosen.factor:.1f} times fewer bytes"
    return f"{on}, use `{chosen.name}`: {gain}.", f"It takes {_facts(job, chosen, network)}{sure(chosen)}"


def headline(job: Job, network: str) -> str:
    """Return the verdict on a network in a few words."""
    chosen = job.recommended(network) if job.priced else None
    if not job.priced:
        return "No step can be priced"
    if chosen is None:
        return "No dense baseline"
    if chosen.dense:
        return "Stay dense" if len(job.settings) > 1 else "Only dense was trained"
    return f"Use `{chosen.name}`: {chosen.speedup[network].value:.2f} times as fast"


def fastest(job: Job, network: str) -> SettingRuns:
    """Return the fastest setting on a network, safe or not."""
    return min(job.priced, key=lambda setting: setting.step_s[network].value)


def sure(setting: SettingRuns) -> str:
    """Return a sentence on the confidence that a setting does no harm; empty if it was not judged."""
    judged = setting.judged
    if not judged:
        return ""
    return (
        f" At {judged['confidence']:.0%} confidence, over {seeds_of(judged)}, it is at most "
        f"{judged['within']:g} {judged['unit']} worse than dense; {divergence(judged)}."
    )


def seeds_of(judged: Mapping[str, Any]) -> str:
    """Return the number of seeds behind a verdict, called fresh if they did not choose the setting."""
    return f"{judged['seeds']}{' fresh' if judged.get('confirmed_on') else ''} seeds"


def _why_dense(job: Job, network: str) -> str:
    """Return why no compressed setting is recommended, the most promising one, and the seeds to decide about it."""
    faster = job.faster(network)
    if not faster:
        return f"No other setting is at least {GAIN} faster."
    if all(setting.verdict == "harmful" for setting in faster):
        return f"{_counted(len(faster))} faster, but shown to be harmful."
    best, least = job.promising(network), job.least_harmful(network)
    reason = f"{_counted(len(faster))} faster, but none is shown to be safe."
    setting = best or least
    if setting is None:
        return reason
    quality = against_dense(setting, job.metric.measure)
    if best is not None:
        chance = best.judged["chance"]
        share = "over 99" if chance > 0.99 else f"{100 * chance:.0f}"
        likely = "" if math.isnan(chance) else f", {share} % likely to be safe"
        reason += f" The most promising is `{best.name}`: {_faster_than_dense(best, network)}; {quality}{likely}."
    else:
        reason += f" None is promising. The least harmful is `{setting.name}`: {quality}."
    return f"{reason} {_seeds_words(job, setting)}".rstrip()


def _counted(count: int) -> str:
    return f"{plural(count, 'setting')} {'is' if count == 1 else 'are'}"


def _seeds_words(job: Job, setting: SettingRuns) -> str:
    """Return why a setting is undecided, and the seeds and hours that would decide."""
    have, lacking = int(setting.judged["seeds"]), setting.judged["lacking"]
    if setting.verdict != "undecided":
        return ""
    if lacking and have >= MIN_SEEDS:
        return f"No verdict: {lacking}."
    needed = job.seeds_for(setting)
    outcome = f"{plural(have, 'seed')} cannot decide" if have < MIN_SEEDS else f"{plural(have, 'seed')} did not decide"
    if needed is None and not math.isnan(setting.judged["deviation"]):
        return f"{outcome}, and {MOST_SEEDS} would not either: the difference is too close to the margin for its spread over seeds."
    needed = max(needed or MIN_SEEDS, MIN_SEEDS if have < MIN_SEEDS else have + 1)
    hours = job.cost_s(needed)
    return f"{outcome}, but {needed} would{f', {seconds(hours)} of training' if hours > 0 else ''}."


def _faster_than_dense(setting: SettingRuns, network: str) -> str:
    """Return the speed-up of a setting over its dense setting, with the interval and the dense step."""
    value, low, high = setting.speedup[network]
    dense = seconds(setting.dense_step_s[network])
    return f"{value:.2f} times as fast as dense ({low:.2f} to {high:.2f}; dense takes {dense})"


def _facts(job: Job, setting: SettingRuns, network: str) -> str:
    """Return the seconds and bytes of a step and the quality, of a compressed setting with that of dense."""
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
