"""The papers' claims tested on the runs at hand: supported, contradicted or undecided, and what would decide.

Differences are paired by seed, between runs alike in all but compression. A comparison speaks where the whole interval of the
mean difference lies on one side of its threshold, at three seeds or more. A claim is supported where all comparisons that
have so many seeds say so, in each of its parts: each at the stated confidence, which the whole then has too. It is
contradicted where one speaks against it with its interval widened for the number of comparisons (Bonferroni), so that many
comparisons do not contradict by chance. Anything else is undecided.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from analysis.claims import CLAIMS, Claim, Contrast
from analysis.commands import train_commands
from analysis.errors import AnalysisError
from analysis.evidence import MARGINS, Context, Setting, contexts
from analysis.results import Results
from analysis.statistics import MIN_SEEDS, MOST_SEEDS, Interval, Side, Verdict, paired_interval, seeds_to_decide


@dataclass(frozen=True)
class Comparison:
    """A contrast as it came out on the runs at hand."""

    part: str
    """Of the claim."""
    text: str
    """What was compared."""
    effect: float
    """Mean over seeds, in `unit`; not a number without any."""
    low: float
    high: float
    unit: str
    side: Side
    """Where the claim says that the effect lies: above or below `threshold`."""
    threshold: float
    confidence: float
    """Of the interval from `low` to `high`."""
    verdict: Verdict
    effects: dict[int, float]
    """By seed."""
    runs: tuple[str, ...]
    settings: tuple[Setting, ...]

    @property
    def seeds(self) -> int:
        """Seeds at which both settings were run."""
        return len(self.effects)

    def __str__(self) -> str:
        if not self.effects:
            return f"{self.text}: not run"
        where = f"{self.low:.3g} to {self.high:.3g}" if math.isfinite(self.low) else "no interval"
        return f"{self.text}: {self.effect:.3g} {self.unit} ({where}, {self.seeds} seeds)"


@dataclass(frozen=True)
class Finding:
    """What the runs of one context say of a claim."""

    claim: Claim
    context: str
    """Which runs: what they have in common; empty where none bear on the claim."""
    verdict: Verdict
    reason: str
    """A sentence."""
    comparisons: tuple[Comparison, ...]
    decisive: Comparison | None
    """The one that the verdict hangs on: against the claim, undecided, or the closest; of a pooled claim the mean."""
    confidence: float
    commands: tuple[str, ...]
    """What would decide it, for a shell; none where that is decided, or would take too many seeds."""

    @property
    def effect(self) -> float | None:
        """Mean of the decisive comparison, in `unit`; None where nothing was compared."""
        return self.decisive.effect if self.decisive and self.decisive.effects else None

    @property
    def low(self) -> float | None:
        """Lower end of its interval; None where there is none."""
        return self.decisive.low if self.decisive and math.isfinite(self.decisive.low) else None

    @property
    def high(self) -> float | None:
        """Upper end of its interval; None where there is none."""
        return self.decisive.high if self.decisive and math.isfinite(self.decisive.high) else None

    @property
    def unit(self) -> str:
        """What the effect is in."""
        return self.decisive.unit if self.decisive else ""

    @property
    def side(self) -> Side | None:
        """Where of `threshold` the claim says that it lies."""
        return self.decisive.side if self.decisive else None

    @property
    def threshold(self) -> float | None:
        """What the effect is held against, in `unit`."""
        return self.decisive.threshold if self.decisive else None

    @property
    def seeds(self) -> int:
        """Seeds of the decisive comparison."""
        return self.decisive.seeds if self.decisive else 0

    @property
    def runs(self) -> tuple[str, ...]:
        """The runs that it rests on, by their names in `Results.runs`."""
        return tuple(dict.fromkeys(run for comparison in self.comparisons for run in comparison.runs))


def findings(
    results: Results,
    claims: Iterable[Claim] = CLAIMS,
    *,
    quality: str = "auto",
    margin: float | None = None,
    confidence: float = 0.95,
    network: str = "1gbps",
) -> list[Finding]:
    """Return what the runs say of each claim: one finding a claim and context, runs alike in all but compression and seed.

    `quality` is "accuracy", "loss" or "auto" (the loss of language models, else the accuracy), `margin` what of it does no
    harm: half a point, or one per cent of the loss. `network` is where step times are compared. Raises AnalysisError where one
    of these cannot be.
    """
    if not 0.5 <= confidence < 1:
        raise AnalysisError(f"`confidence` must be in [0.5, 1), but got {confidence!r}.")
    if margin is not None and not (math.isfinite(margin) and margin >= 0):
        raise AnalysisError(f"`margin` must be 0 or more, but got {margin!r}.")
    places = contexts(results, quality=quality, margin=margin, network=network)
    found = []
    for claim in claims:
        fitting = [place for place in places if place.language or not claim.language]
        told = [place for place in fitting if any(claim.contrasts(place, place.settings))]
        if not told:  # the context of most runs is the one to go on in
            fitting = [place for place in fitting if place.num_replicas >= claim.num_replicas]
            told = sorted(fitting, key=lambda place: -len(place.rows))[:1] or [_nothing(claim, quality, margin)]
        for place in told:
            tested = judge(claim, place, confidence)
            found.append(_with_commands(tested, place, results))
    return found


def judge(claim: Claim, context: Context, confidence: float = 0.95) -> Finding:
    """Return what the runs of one context say of a claim; commands are left out."""
    contrasts = list(claim.contrasts(context, context.settings))
    asked = list(claim.contrasts(context, [*context.settings, *claim.examples]))
    have = {contrast.part for contrast in contrasts}
    contrasts += [contrast for contrast in asked if contrast.part not in have]
    tried = tuple(_compare(contrast, context, confidence) for contrast in contrasts)
    if not tried:
        return Finding(claim, "", "undecided", "No run bears on it.", (), None, confidence, ())
    counted = [one for part in dict.fromkeys(c.part for c in tried) for one in _counted(tried, part)]
    decisive = [_pool(counted, confidence)] if claim.pooled else counted
    level = 1 - (1 - confidence) / len(decisive)
    against = [one for one in (_at(one, level) for one in decisive) if one.verdict == "contradicted"]
    open_ones = [one for one in decisive if one.verdict != "supported"]
    verdict: Verdict
    if against:
        verdict, shown = "contradicted", against[0]
        reason = f"{_sentence(shown)}, where the claim needs {shown.side} {shown.threshold:g}."
    elif open_ones:
        verdict, shown = "undecided", open_ones[0]
        reason = _why_open(shown, len(open_ones), len(decisive))
    else:
        verdict, shown = "supported", min(decisive, key=_distance)
        closest = "" if len(decisive) == 1 else f"All {len(decisive)} comparisons say so; the closest: "
        reason = f"{closest}{_sentence(shown)}, {shown.side} {shown.threshold:g}."
    label = context.label if any(one.effects for one in tried) else ""
    return Finding(claim, label, verdict, reason, tried, shown, confidence, ())


def findings_frame(found: Iterable[Finding]) -> pd.DataFrame:
    """Return a row a finding, flat: claim, verdict, effect with its interval, and what it rests on."""
    names = (
        "context",
        "verdict",
        "effect",
        "low",
        "high",
        "unit",
        "side",
        "threshold",
        "confidence",
        "seeds",
        "reason",
    )
    rows: list[dict[str, Any]] = [
        {"claim": one.claim.name, "text": one.claim.text, "source": one.claim.source}
        | {name: getattr(one, name) for name in names}
        | {"runs": list(one.runs), "commands": list(one.commands)}
        for one in found
    ]
    columns = ["claim", "text", "source", *names, "runs", "commands"]
    return pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(("effect", "low", "high", "threshold"), "float64"))


def _compare(contrast: Contrast, context: Context, confidence: float) -> Comparison:
    empty = pd.DataFrame({"run": []})
    one, other = (context.settings.get(setting, empty) for setting in (contrast.one, contrast.other))
    effects, runs = {}, []
    for seed in (seed for seed in one.index if seed in other.index):
        effect = contrast.measure(context, one.loc[seed], other.loc[seed])
        if not math.isnan(effect):
            effects[int(seed)] = effect
            runs += [str(one.loc[seed, "run"]), str(other.loc[seed, "run"])]
    comparison = Comparison(
        contrast.part,
        contrast.measure.text(str(contrast.one), str(contrast.other)),
        *(math.nan, -math.inf, math.inf),
        contrast.measure.unit(context),
        contrast.side,
        contrast.threshold,
        confidence,
        "undecided",
        effects,
        tuple(dict.fromkeys(runs)),
        tuple(dict.fromkeys((contrast.one, contrast.other))),
    )
    return _at(comparison, confidence)


def _at(comparison: Comparison, confidence: float) -> Comparison:
    """Return a comparison with its interval, and what that says, at another confidence."""
    interval = paired_interval(list(comparison.effects.values()), confidence)
    enough = comparison.seeds >= MIN_SEEDS
    verdict: Verdict = interval.verdict(comparison.threshold, comparison.side) if enough else "undecided"
    return _replaced(comparison, interval, confidence, verdict)


def _replaced(comparison: Comparison, interval: Interval, confidence: float, verdict: Verdict) -> Comparison:
    mean, low, high = interval
    return replace(comparison, effect=mean, low=low, high=high, confidence=confidence, verdict=verdict)


def _counted(comparisons: Sequence[Comparison], part: str) -> list[Comparison]:
    """Return those of a part that have seeds enough; all of them where none has."""
    mine = [one for one in comparisons if one.part == part]
    return [one for one in mine if one.seeds >= MIN_SEEDS] or mine


def _pool(comparisons: Sequence[Comparison], confidence: float) -> Comparison:
    """Return the mean over comparisons, seed by seed, at the seeds that all of them have."""
    if len(comparisons) == 1:
        return comparisons[0]
    common = sorted(set.intersection(*(set(one.effects) for one in comparisons)))
    pooled = replace(
        comparisons[0],
        text=f"mean of {len(comparisons)} comparisons ({'; '.join(one.text for one in comparisons)})",
        effects={seed: sum(one.effects[seed] for one in comparisons) / len(comparisons) for seed in common},
        runs=tuple(run for one in comparisons for run in one.runs),
        settings=tuple(dict.fromkeys(setting for one in comparisons for setting in one.settings)),
    )
    return _at(pooled, confidence)


def _distance(comparison: Comparison) -> float:
    """Return how far the interval keeps from the threshold, in its own halves: the least is the closest."""
    edge = comparison.low if comparison.side == "above" else comparison.high
    return abs(edge - comparison.threshold) / max(comparison.high - comparison.low, 1e-12)


def _sentence(comparison: Comparison) -> str:
    low, high = f"{comparison.low:.3g}", f"{comparison.high:.3g}"
    return (
        f"{comparison.text}: {comparison.effect:.3g} {comparison.unit}, {100 * comparison.confidence:.4g} % interval "
        f"{low} to {high} over {comparison.seeds} seeds"
    )


def _why_open(comparison: Comparison, count: int, of: int) -> str:
    others = f" ({count} of {of} comparisons are open)" if of > 1 else ""
    if not comparison.effects:
        return f"{comparison.text}: there are no runs to compare{others}."
    if comparison.seeds < MIN_SEEDS:
        got = f"{comparison.seeds} of at least {MIN_SEEDS} seeds"
        return f"{comparison.text}: {comparison.effect:.3g} {comparison.unit}, but of {got}{others}."
    edge = f"the interval does not lie on one side of {comparison.threshold:g}"
    if comparison.verdict == "contradicted":
        edge = "this speaks against the claim, but among so many comparisons it may be chance"
    return f"{_sentence(comparison)}: {edge}{others}."


def _with_commands(finding: Finding, context: Context, results: Results) -> Finding:
    """Return an undecided finding with what to run for its open comparisons, or why that would not help."""
    if finding.verdict != "undecided":
        return finding
    wanted: dict[Setting, set[int]] = {}
    hopeless = 0
    for one in finding.comparisons:
        if one.verdict == "supported" and not finding.claim.pooled:
            continue
        count = seeds_to_decide(list(one.effects.values()), one.threshold, finding.confidence)
        if count is None:
            hopeless += 1
            continue
        for setting, seeds in _lacking(one.settings, count, context).items():
            wanted.setdefault(setting, set()).update(seeds)
    reason = finding.reason
    if hopeless:
        what = "this comparison" if len(finding.comparisons) == 1 else f"{hopeless} of the comparisons"
        reason += f" More than {MOST_SEEDS} seeds would be needed for {what}: the effect is near the threshold for its spread."
    commands = train_commands(results, context, wanted, finding.claim.recipe)
    return replace(finding, reason=reason, commands=tuple(commands))


def _lacking(settings: Iterable[Setting], count: int, context: Context) -> dict[Setting, set[int]]:
    """Return the seeds that each setting lacks for `count` pairs: those that others have first, then new ones."""
    have = {s: {int(seed) for seed in context.settings[s].index} if s in context.settings else set() for s in settings}
    some = sorted(set().union(*have.values()), key=lambda seed: (-sum(seed in mine for mine in have.values()), seed))
    fresh = (seed for seed in range(len(some) + count) if seed not in some)
    chosen = set((some + list(fresh))[:count])
    return {setting: chosen - mine for setting, mine in have.items() if chosen - mine}


def _nothing(claim: Claim, quality: str, margin: float | None) -> Context:
    """Return a context without runs, of the kind that a claim is about."""
    metric = quality if quality != "auto" else "loss" if claim.language else "accuracy"
    rows = pd.DataFrame({"run": [], "setting": [], "seed": []})
    return Context("", rows, metric, MARGINS[metric] if margin is None else margin, claim.language)
