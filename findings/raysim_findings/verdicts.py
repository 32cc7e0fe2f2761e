"""Tests of the papers' claims on recorded runs: supported, contradicted or undecided, and the runs that would decide.

Differences are paired by seed, between runs equal in all but compression, and judged by `raysim.analysis.comparison.rule`. A
comparison decides if the one-sided bound next to its threshold lies beyond it. A claim is supported if, in each of its parts, all
comparisons with enough seeds support it, each at the stated confidence, which then also holds for the whole. It is contradicted if
one comparison contradicts it, with the comparisons of the claim as a family. Comparisons of models at chance do not count. Anything
else is undecided.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pandas as pd

from raysim.analysis.comparison.rule import CONFIDENCE, MOST_SEEDS, PairedSample, judge, looks_after, seeds_to_decide
from raysim.analysis.data import AnalysisError
from raysim.analysis.runs.estimates import Estimate
from raysim.analysis.runs.results import Results
from raysim.config.identity import Setting
from raysim.plugins import from_record
from raysim.quality import MEASURES
from raysim_findings.claim import Claim, Contrast
from raysim_findings.claimed_runs import ClaimedRuns, claimed_runs
from raysim_findings.finding import Comparison, Finding, Verdict
from raysim_findings.table import CLAIMS
from raysim_findings.train_commands import cost_of, train_commands


@from_record()
def findings(
    results: Results,
    claims: Iterable[Claim] = CLAIMS,
    *,
    quality: str = "auto",
    margin: float | None = None,
    confidence: float = CONFIDENCE,
    network: str | None = None,
    transport: str | None = None,
) -> list[Finding]:
    """Return one finding for each claim and context: the runs equal in all but compression and seed.

    `quality` is a measure of the runs, or "auto" for the measure that each is judged by. `margin` is the tolerated harm: by
    default half a point, or one per cent. Step times are compared on `network` over `transport`, by default those
    of the runs' study, see `Results.network_of`. Raises AnalysisError if one of these is invalid.
    """
    if not 0.5 <= confidence < 1:
        raise AnalysisError(f"`confidence` must be in [0.5, 1), but got {confidence!r}.")
    if margin is not None and not (math.isfinite(margin) and margin >= 0):
        raise AnalysisError(f"`margin` must be 0 or more, but got {margin!r}.")
    known = claimed_runs(results, quality=quality, margin=margin, network=network, transport=transport)
    tested = []
    for claim in claims:
        fitting = [context for context in known if context.language or not claim.language]
        chosen = [context for context in fitting if any(claim.contrasts(context, context.settings))]
        if not chosen:  # commands continue in the context with most runs
            fitting = [context for context in fitting if context.num_replicas >= claim.num_replicas]
            chosen = sorted(fitting, key=lambda context: -len(context.rows))[:1] or [_empty(claim, quality, margin)]
        tested += [_with_commands(verdict_on(claim, context, confidence), context, results) for context in chosen]
    return tested


def verdict_on(claim: Claim, context: ClaimedRuns, confidence: float = CONFIDENCE) -> Finding:
    """Return the finding on a claim by the runs of one context, without commands."""
    contrasts = list(claim.contrasts(context, context.settings))
    with_examples = claim.contrasts(context, [*context.settings, *claim.examples])
    parts = {contrast.part for contrast in contrasts}
    contrasts += [contrast for contrast in with_examples if contrast.part not in parts]
    tried = tuple(_compare(contrast, context, confidence) for contrast in contrasts)
    if not tried:
        return Finding(claim, "", "undecided", "No run bears on it.", (), None, confidence, ())
    counted = [comparison for part in dict.fromkeys(c.part for c in tried) for comparison in _counted(tried, part)]
    decisive = [_pool(counted, context, confidence)] if claim.pooled else counted
    against = [comparison for comparison in _as_family(decisive, confidence) if comparison.verdict == "contradicted"]
    unsupported = [comparison for comparison in decisive if comparison.verdict != "supported"]
    verdict: Verdict
    if against:
        verdict, shown = "contradicted", max(against, key=_distance)
        reason = f"{_sentence(shown)}, but the claim requires an effect {shown.side} {shown.threshold:g}."
    elif unsupported:
        verdict, shown = "undecided", unsupported[0]
        reason = _why_open(shown, len(unsupported), len(decisive))
    else:
        verdict, shown = "supported", min(decisive, key=_distance)
        closest = "" if len(decisive) == 1 else f"All {len(decisive)} comparisons say so; the closest: "
        reason = f"{closest}{_sentence(shown)}, {shown.side} {shown.threshold:g}."
    label = context.label if any(comparison.effects for comparison in tried) else ""
    return Finding(claim, label, verdict, reason, tried, shown, confidence, ())


def _compare(contrast: Contrast, context: ClaimedRuns, confidence: float) -> Comparison:
    no_runs = pd.DataFrame({"run": []})
    first, second = (context.settings.get(setting, no_runs) for setting in (contrast.one, contrast.other))
    effects: dict[int, float] = {}
    reaches, runs = [], []
    for seed in (seed for seed in first.index if seed in second.index):
        measured = contrast.measure.effect(context, first.loc[seed], second.loc[seed])
        effect, low, high = measured if isinstance(measured, Estimate) else (measured, measured, measured)
        if not math.isnan(effect):
            effects[int(seed)] = effect
            reaches.append((low - effect, high - effect))
            runs += [str(first.loc[seed, "run"]), str(second.loc[seed, "run"])]
    settings = tuple(dict.fromkeys((contrast.one, contrast.other)))
    sample = context.sample(effects, *settings, step=contrast.measure.step())
    for group in contrast.measure.trained(contrast.one, contrast.other):
        if not sample.lacking and not any(
            context.learned(setting, sample.seeds, mode, alpha=1 - confidence) for setting, mode in group
        ):
            names = " or ".join(dict.fromkeys(str(setting) for setting, _ in group))
            sample = sample._replace(lacking=f"{names} is not clearly above chance")
    comparison = Comparison(
        contrast.part,
        contrast.measure.words.format(one=contrast.one, other=contrast.other),
        *(math.nan, -math.inf, math.inf),
        contrast.measure.unit(context),
        contrast.side,
        contrast.threshold,
        confidence,
        "undecided",
        effects,
        sample,
        tuple(dict.fromkeys(runs)),
        settings,
        _mean_reach(reaches),
    )
    return _as_family([comparison], confidence)[0]


def _as_family(comparisons: Sequence[Comparison], confidence: float) -> list[Comparison]:
    """Return comparisons with their bounds and verdicts, judged as one family.

    An effect lies above its threshold if the lower end of its price does; likewise below.
    """
    if not comparisons:
        return []
    thresholds = [comparison.threshold for comparison in comparisons]
    plain, low, high = (
        judge(
            [_moved(comparison.sample, by) for comparison, by in zip(comparisons, moves, strict=True)],
            thresholds,
            1 - confidence,
        )
        for moves in zip(*((0.0, *comparison.price) for comparison in comparisons), strict=True)
    )
    judged = []
    for comparison, middle, lowest, highest in zip(comparisons, plain, low, high, strict=True):
        side = "above" if lowest.where == "above" else "below" if highest.where == "below" else None
        verdict: Verdict = "undecided" if side is None else "supported" if side == comparison.side else "contradicted"
        effect, low_bound, high_bound = middle.bounds.mean, lowest.bounds.low, highest.bounds.high
        judged.append(replace(comparison, effect=effect, low=low_bound, high=high_bound, verdict=verdict))
    return judged


def _moved(sample: PairedSample, by: float) -> PairedSample:
    return sample._replace(values=tuple(value + by for value in sample.values)) if by else sample


def _mean_reach(reaches: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the mean distances below and above the estimate; zero without any."""
    low, high = (sum(ends) / len(reaches) for ends in zip(*reaches, strict=True)) if reaches else (0.0, 0.0)
    return low, high


def _counted(comparisons: Sequence[Comparison], part: str) -> list[Comparison]:
    """Return the comparisons of a part with enough data; all of them if none has."""
    of_part = [comparison for comparison in comparisons if comparison.part == part]
    return [comparison for comparison in of_part if not comparison.lacking] or of_part


def _pool(comparisons: Sequence[Comparison], context: ClaimedRuns, confidence: float) -> Comparison:
    """Return the mean over comparisons, seed by seed, at the seeds that all of them have."""
    if len(comparisons) == 1:
        return comparisons[0]
    common = sorted(set.intersection(*(set(comparison.effects) for comparison in comparisons)))
    effects = {seed: sum(comparison.effects[seed] for comparison in comparisons) / len(comparisons) for seed in common}
    settings = tuple(dict.fromkeys(setting for comparison in comparisons for setting in comparison.settings))
    sample = context.sample(effects, *settings)
    lacking = next((comparison.lacking for comparison in comparisons if comparison.lacking), "")
    pooled = replace(
        comparisons[0],
        text=f"mean of {len(comparisons)} comparisons ({'; '.join(comparison.text for comparison in comparisons)})",
        effects=effects,
        sample=sample._replace(lacking=sample.lacking or lacking),
        runs=tuple(run for comparison in comparisons for run in comparison.runs),
        settings=settings,
        price=_mean_reach([comparison.price for comparison in comparisons]),
    )
    return _as_family([pooled], confidence)[0]


def _distance(comparison: Comparison) -> float:
    """Return the distance of the interval from the threshold, in its own widths."""
    above = (comparison.side == "above") == (comparison.verdict == "supported")
    edge = comparison.low if above else comparison.high
    return abs(edge - comparison.threshold) / max(comparison.high - comparison.low, 1e-12)


def _sentence(comparison: Comparison) -> str:
    low, high = f"{comparison.low:.3g}", f"{comparison.high:.3g}"
    return (
        f"{comparison.text}: {comparison.effect:.3g} {comparison.unit}, one-sided bounds {low} and {high} over "
        f"{comparison.seeds} seeds"
    )


def _why_open(comparison: Comparison, count: int, of: int) -> str:
    others = f" ({count} of {of} comparisons are open)" if of > 1 else ""
    if not comparison.effects:
        return f"{comparison.text}: there are no runs to compare{others}."
    if comparison.lacking:
        known = "" if math.isnan(comparison.effect) else f" {comparison.effect:.3g} {comparison.unit}, but"
        return f"{comparison.text}:{known} {comparison.lacking}{others}."
    edge = f"neither bound lies beyond {comparison.threshold:g}"
    if comparison.verdict == "contradicted":
        edge = "this speaks against the claim, but among so many comparisons it may be chance"
    return f"{_sentence(comparison)}: {edge}{others}."


def _with_commands(finding: Finding, context: ClaimedRuns, results: Results) -> Finding:
    """Return an undecided finding with the commands for its open comparisons, or why they would not help."""
    if finding.verdict != "undecided":
        return finding
    wanted: dict[Setting, set[int]] = {}
    hopeless = 0
    for comparison in finding.comparisons:
        if comparison.verdict == "supported" and not finding.claim.pooled:
            continue
        sample = comparison.sample
        looks = looks_after(sample.planned)
        count = seeds_to_decide(sample.values, comparison.threshold, 1 - finding.confidence, sample.known_step, looks)
        if count is None:
            hopeless += 1
            continue
        for setting, seeds in _lacking(comparison.settings, count, context).items():
            wanted.setdefault(setting, set()).update(seeds)
    reason = finding.reason
    if hopeless:
        which = "this comparison" if len(finding.comparisons) == 1 else f"{hopeless} of the comparisons"
        reason += f" More than {MOST_SEEDS} seeds would be needed for {which}: the effect is near the threshold for its spread."
    commands = train_commands(results, context, wanted, finding.claim.recipe)
    return replace(finding, reason=reason, commands=tuple(commands), cost=cost_of(results, context, wanted))


def _lacking(settings: Iterable[Setting], count: int, context: ClaimedRuns) -> dict[Setting, set[int]]:
    """Return the seeds that each setting lacks for `count` pairs: first seeds that other settings have, then new ones."""
    have = {s: {int(seed) for seed in context.settings[s].index} if s in context.settings else set() for s in settings}
    used = sorted(set().union(*have.values()), key=lambda seed: (-sum(seed in seeds for seeds in have.values()), seed))
    fresh = [seed for seed in range(len(used) + count) if seed not in used]
    chosen = set((used + fresh)[:count])
    return {setting: chosen - seeds for setting, seeds in have.items() if chosen - seeds}


def _empty(claim: Claim, quality: str, margin: float | None) -> ClaimedRuns:
    """Return a context without runs, of the kind of a claim."""
    name = quality if quality != "auto" else "loss" if claim.language else "accuracy"
    measure = MEASURES.get(name, MEASURES["accuracy"])
    rows = pd.DataFrame({"run": [], "setting": [], "seed": [], "confirms": [], "predictions": []})
    return ClaimedRuns("", rows, measure, measure.margin if margin is None else margin, language=claim.language)
