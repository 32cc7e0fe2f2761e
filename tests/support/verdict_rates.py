"""How often the rule calls settings safe in simulated jobs: in error at the margin, and rightly of settings that equal dense.

`python tests/support/verdict_rates.py` prints the tables of docs/measurements/verdicts.md.
"""

from __future__ import annotations

import math

import numpy as np

from raysim.analysis.comparison.rule import CONFIDENCE, looks_after, planned_share
from raysim.analysis.comparison.statistics import at_threshold, prior_of, skewness_of, studentise, variance_of

LEVEL = 1 - CONFIDENCE
FAMILIES, SEEDS = (1, 5, 20), (3, 5, 8)


def skewed(skewness):
    """Return a source of differences that are gamma distributed: rare large harm."""
    shape = 4 / skewness**2
    return lambda rng, size: (rng.gamma(shape, size=size) - shape) / math.sqrt(shape)


SHAPES = {
    "normal": lambda rng, size: rng.standard_normal(size),
    "t(3)": lambda rng, size: rng.standard_t(3, size) / math.sqrt(3),
    "skewness 1": skewed(1),
    "skewness 2": skewed(2),
    "one run in ten 7.5 deviations worse": lambda rng, size: (
        (rng.standard_normal(size) + 7.5 * (rng.random(size) < 0.1) - 0.75) / math.sqrt(1 + 0.09 * 7.5**2)
    ),
}
"""Differences of mean 0 and standard deviation 1, harm upwards."""


def job(rng, shape, tries, settings, seeds, *, shared, varied):
    """Return differences (tries, settings, seeds) of mean 0, the median setting's standard deviation about 1.

    `shared`: half of the variance is the noise of the dense run, which all settings of a seed have in common. `varied`: the
    variances of settings are scaled inverse chi-squares of three degrees of freedom, as recorded ones are.
    """
    own = SHAPES[shape](rng, (tries, settings, seeds))
    if varied:
        own = own * np.sqrt(3 / rng.chisquare(3, (tries, settings, 1)))
    return math.sqrt(0.5) * (own - SHAPES[shape](rng, (tries, 1, seeds))) if shared else own


def p_values(harms, margin, side="below", *, moderated=True, guarded=True):
    """Return the least error level (tries, settings) at which each setting lies on a side of the margin."""
    seeds = harms.shape[-1]
    if not guarded:  # Student's t, the rule until 2026-11-25
        from scipy import stats

        alternative = "less" if side == "below" else "greater"
        return stats.ttest_1samp(harms, margin, axis=-1, alternative=alternative).pvalue
    freedom = np.array(seeds - 1.0)
    variances = at_threshold(variance_of(harms, 0.0), freedom, harms.mean(axis=-1), margin)
    prior = prior_of(variances, freedom, skewness_of(harms, 0.0))
    found = studentise(harms, 0.0, prior) if moderated else studentise(harms)
    return found.p_value(margin, side)


def rejected(p, level):
    """Return which hypotheses of each family (the last axis) Holm's method rejects."""
    order = np.argsort(p, axis=-1)
    passing = np.take_along_axis(p, order, axis=-1) < level / np.arange(p.shape[-1], 0, -1)
    passing = np.logical_and.accumulate(passing, axis=-1)
    out = np.empty_like(passing)
    np.put_along_axis(out, order, passing, axis=-1)
    return out


def false_rate(shape, settings, seeds, tries, *, side="below", spread=0.5, shared=False, varied=False, **rule):
    """Return how often some setting of a job is put on a side of the margin, at which all lie, after a plan of these seeds."""
    rng = np.random.default_rng([settings, seeds, *shape.encode()])
    harms = 1 + spread * job(rng, shape, tries, settings, seeds, shared=shared, varied=varied)
    p = p_values(harms, 1.0, side, **rule)
    return float((p.min(axis=-1) < LEVEL * planned_share(seeds) / settings).mean())


def diverging_rate(settings, seeds, tries, rate=0.1):
    """Return how often some setting of a job is called safe if each of its runs diverges at a `rate`, and else equals dense."""
    rng = np.random.default_rng([settings, seeds])
    harms = 0.22 * job(rng, "normal", tries, settings, seeds, shared=True, varied=False)
    harms[rng.random(harms.shape) < rate] = 60.0
    return float(rejected(p_values(harms, 1.0), LEVEL * planned_share(seeds)).any(axis=-1).mean())


def looked_rate(shape, settings, planned, tries, *, varied=False):
    """Return `false_rate` over a plan and all looks after it; over all looks without a plan (0)."""
    shares = ({planned: planned_share(planned)} if planned else {}) | looks_after(planned)
    rng = np.random.default_rng([settings, planned, *shape.encode()])
    harms = 1 + 0.5 * job(rng, shape, tries, settings, max(shares), shared=False, varied=varied)
    least = {seeds: p_values(harms[..., :seeds], 1.0).min(axis=-1) for seeds in shares}
    called = [least[seeds] < LEVEL * share / settings for seeds, share in shares.items()]
    return float(np.logical_or.reduce(called).mean())


def safe_share(spread, settings, seeds, tries, *, shared=True, varied=False, **rule):
    """Return the share of settings equal to dense that are called safe; `spread`: their deviation, in margins."""
    rng = np.random.default_rng([settings, seeds])
    harms = spread * job(rng, "normal", tries, settings, seeds, shared=shared, varied=varied)
    return float(rejected(p_values(harms, 1.0, **rule), LEVEL * planned_share(seeds)).mean())


def _table(head, rows):
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def main(tries=40_000):
    """Print the tables."""
    cases = [(settings, seeds) for settings in FAMILIES for seeds in SEEDS]
    head = [f"{settings} x {seeds}" for settings, seeds in cases]
    before = {"moderated": False, "guarded": False}
    for text, options in (("own noise", {}), ("shared", {"shared": True}), ("varied", {"varied": True})):
        rows = []
        for shape in SHAPES:
            for name, rule in (("before", before), ("now", {})):
                rates = [false_rate(shape, *case, tries // case[0], **options, **rule) for case in cases]  # type: ignore[misc]
                rows.append([f"{shape}, {name}", *(f"{100 * rate:.1f}" for rate in rates)])
        _table([f"false safe, % ({text})", *head], rows)
    seeds = (3, 5, 8, 13, 16, 21)
    rows = [[str(n), *(f"{100 * diverging_rate(n, count, tries // n):.0f}" for count in seeds)] for n in (1, 5)]
    _table(["one run in ten diverges: called safe, %", *map(str, seeds)], rows)
    plans = (0, 3, 5, 8)
    rows = [
        [f"{shape}, {settings} settings{', varied' * varied}"]
        + [f"{100 * looked_rate(shape, settings, plan, tries // settings, varied=varied):.1f}" for plan in plans]
        for shape in ("normal", "skewness 1", "skewness 2")
        for settings in (1, 5)
        for varied in (False, True)
    ]
    _table(["false safe over all looks, %; planned:", *map(str, plans)], rows)
    rows = []
    for spread in (0.22, 0.39, 0.6):
        for name, rule in (("before", before), ("now", {})):
            shares = [safe_share(spread, *case, tries // case[0], **rule) for case in cases]
            rows.append([f"{spread:g}, {name}", *(f"{100 * share:.0f}" for share in shares)])
    _table(["called safe, %", *head], rows)


if __name__ == "__main__":
    main()
