"""How often the rule calls settings safe in simulated jobs: in error at the margin, and rightly of settings that equal dense.

`python tests/support/verdict_rates.py` prints the tables of docs/analysis.md.
"""

from __future__ import annotations

import math

import numpy as np

from raysim.analysis.comparison.rule import CONFIDENCE, planned_share
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
    rows = []
    for spread in (0.22, 0.39, 0.6):
        for name, rule in (("before", before), ("now", {})):
            shares = [safe_share(spread, *case, tries // case[0], **rule) for case in cases]
            rows.append([f"{spread:g}, {name}", *(f"{100 * share:.0f}" for share in shares)])
    _table(["called safe, %", *head], rows)


if __name__ == "__main__":
    main()
