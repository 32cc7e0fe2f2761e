"""Format numbers, and the verdict on a job, in the same way for the report, the terminal and findings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from raysim.analysis.comparison.choice import divergence
from raysim.analysis.comparison.rule import MIN_SEEDS, MOST_SEEDS
from raysim.analysis.data.folders import over
from raysim.analysis.report.material import MODES, JobRuns, SettingRuns
from raysim.analysis.runs.estimates import Estimate
from raysim.network.prices import PAYS, times
from raysim.quality import Measure
from raysim.units import RATES, TIMES, decimals, format_bytes, plural, two_digits, unit_of

GAIN = f"{100 * (PAYS - 1):.0f} %"


def seconds(value: float) -> str:
    """Return a duration with three digits.

    >>> seconds(0.0456), seconds(12.34), seconds(7200)
    ('45.6 ms', '12.3 s', '2 h')
    """
    if math.isnan(value):
        return "none"
    unit, size = unit_of(value, TIMES)
    return f"{value / size:.3g} {unit.replace('u', 'µ')}"


def speedup(estimate: Estimate) -> str:
    """Return a speed-up with its interval, and "not distinguishable" if the interval allows either.

    >>> speedup(Estimate(1.31, 1.29, 1.34)), speedup(Estimate(1.01, 0.97, 1.05))
    ('1.31x (1.29 to 1.34)', '1.01x (0.97 to 1.05), not distinguishable')
    """
    alike = "" if estimate.verdict != "not distinguishable" else ", not distinguishable"
    return f"{times(estimate.value)}x ({times(estimate.low)} to {times(estimate.high)}){alike}"


def step_time(estimate: Estimate) -> str:
    """Return a duration with its interval.

    >>> step_time(Estimate(0.0456, 0.0451, 0.0466))
    '45.6 ms (45.1 to 46.6)'
    """
    whole = seconds(estimate.value)
    if math.isnan(estimate.value):
        return whole
    unit = whole.split()[1]
    ends = [seconds(end).split() for end in (estimate.low, estimate.high)]
    low, high = (number if its == unit else f"{number} {its}" for number, its in ends)
    return f"{whole} ({low} to {high})"


def bytes_of(value: float) -> str:
    """Return a size, or that there is none."""
    return "none" if math.isnan(value) else format_bytes(value)


def points(value: float | None, *limits: float) -> str:
    """Format a difference with about two digits, on its side of all `limits`, and a true minus.

    >>> points(0.456), points(-4.56), points(45.6)
    ('0.46', '\N{MINUS SIGN}4.6', '46')
    """
    if value is None or math.isnan(value):
        return "none"
    digits = 2 if abs(value) < 0.995 else 1 if abs(value) < 9.95 else 0
    return decimals(value, digits, *limits).replace("-", "\N{MINUS SIGN}")


def bandwidth(bps: float) -> str:
    """Return bits a second with three digits."""
    unit, size = unit_of(bps, RATES)
    return f"{bps / size:.3g} {unit}"


def measure_text(measure: Measure) -> str:
    """Return the name of a measure on axes and in table heads."""
    return {"f1": "F1", "r2": "R²", "mae": "mean absolute error"}.get(measure.name, measure.name.replace("_", " "))


def quality(measure: Measure, value: float | None, spread: float | None = None) -> str:
    """Return a quality, with its standard deviation over seeds.

    >>> from raysim.quality import MEASURES
    >>> quality(MEASURES["accuracy"], 0.9126, 0.004), quality(MEASURES["loss"], None)
    ('91.3 ± 0.4 %', 'none')
    """
    if value is None or math.isnan(value):
        return "none"
    scale, digits, unit = (100, 1, " %") if measure.counted else (1, 3, "")
    around = "" if spread is None or math.isnan(spread) else f" ± {spread * scale:.{digits}f}"
    return f"{value * scale:.{digits}f}{around}{unit}"


def quality_formats(measure: Measure) -> dict[str, Callable[[Any], str]]:
    """Return the formats of the columns with the quality in each mode, each a mean and its deviation over seeds."""
    return dict.fromkeys(MODES, lambda spread: quality(measure, *spread))


FORMATS: Mapping[str, Callable[[Any], str]] = {
    **dict.fromkeys(("step", "step, simulated"), step_time),
    **dict.fromkeys(("dense step", "recorded", "encode", "decode"), seconds),
    **dict.fromkeys(("bytes a step", "dense", "wire"), bytes_of),
    **dict.fromkeys(
        ("fidelity", "fidelity, activations", "fidelity, gradients", "fidelity of the average"), "{:.4f}".format
    ),
    **dict.fromkeys(("train loss", "mean gain"), "{:.3f}".format),
    **dict.fromkeys(("seed", "steps", "decisions"), "{:,.0f}".format),
    "speed-up": speedup,
    "factor": "{:.2f}".format,
    "mean factor": "{:.3g}".format,
}
"""How the values of columns are written in all tables of a report."""


def below(row: Mapping[Any, Any]) -> str:
    """Format the break-even bandwidth of a row of `raysim.analysis.settings`.

    >>> below({"pays": "below", "break_even_bps": 2.5e8, "break_even_low_bps": 2.4e8, "break_even_high_bps": 2.6e8})
    '250 Mbit/s (240 to 260)'
    >>> below({"pays": "below", "break_even_bps": math.inf, "break_even_low_bps": 9e10, "break_even_high_bps": math.inf})
    'always (90 Gbit/s to always)'
    """
    if row["pays"] != "below":
        return str(row["pays"] or "unknown")
    bandwidths = (float(row[f"break_even{name}_bps"]) for name in ("", "_low", "_high"))
    middle, low, high = ("always" if math.isinf(bps) else bandwidth(bps) for bps in bandwidths)
    unit = middle.partition(" ")[2] or " "
    return f"{middle} ({low.removesuffix(f' {unit}')} to {high.removesuffix(f' {unit}')})"


def point_label(setting: SettingRuns) -> str:
    """Return the label of a setting in a chart."""
    diverged = f", {setting.diverged} diverged" if setting.diverged else ""
    judged = f", {setting.verdict}" if setting.verdict else ""
    return (
        f"{setting.name} ({plural(setting.seeds, 'seed')}{diverged}{judged}): {bytes_of(setting.wire_bytes)} a step, "
        f"compression factor {setting.factor:.2f}"
    )


def against_dense(setting: SettingRuns, measure: Measure) -> str:
    """Return the difference of a setting's quality from dense with compression on, with its interval if it has one."""
    judged = setting.judged
    harm, low, high = (float(judged.get(name, math.nan)) for name in ("harm", "harm_low", "harm_high"))
    if math.isnan(harm):
        return "not compared with dense"
    if measure.higher:  # less of an accuracy is harm, and more of a loss
        harm, low, high = -harm, -high, -low
    name = measure.name.replace("_", " ")
    margin = float(judged.get("within", measure.margin))
    if float(points(abs(harm))) == 0:
        text = f"same {name} as dense"
    else:
        unit = "points" if measure.points else "%"
        text = f"{name} {points(abs(harm), margin)} {unit} {'higher' if harm > 0 else 'lower'} than dense"
    count = int(judged.get("seeds", 1))
    if count < MIN_SEEDS:  # their interval is too wide to show
        return f"{text} on {plural(count, 'seed')}"
    return f"{text} ({signed(low, margin, -margin)} to {signed(high, margin, -margin)})"


def signed(value: float, *limits: float) -> str:
    """Return a difference with its sign, as `points` writes it.

    >>> signed(0.456), signed(-4.56), signed(0.0)
    ('+0.46', '\N{MINUS SIGN}4.6', '0.00')
    """
    return f"+{points(value, *limits)}" if value > 0 else points(value + 0.0, *limits)


def listed(values: Iterable[Any]) -> str:
    """Return increasing values as a text, with three or more successive integers as a range.

    >>> listed([0, 1, 2, 5, 6]), listed([])
    ('0 to 2, 5, 6', 'none')
    """
    ranges: list[list[Any]] = []
    for value in values:
        if ranges and isinstance(value, int) and value == ranges[-1][-1] + 1:
            ranges[-1].append(value)
        else:
            ranges.append([value])
    texts = [[f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run) for run in ranges]
    return ", ".join(text for several in texts for text in several) or "none"


# --- the verdict on a job on one network ------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """The verdict on a network: in a few words, in a sentence with the price, and the reasons; `code` stands in back ticks."""

    headline: str
    sentence: str
    evidence: str = ""

    @property
    def text(self) -> str:
        """The sentence and the reasons, as one text."""
        return " ".join(filter(None, (self.sentence, self.evidence)))


def answer_for(job: JobRuns, network: str) -> Answer:
    """Return the verdict on a network in its parts."""
    if not job.priced:
        profiled = "train with `profile_every_steps` of at least 1"
        return Answer(
            "No step can be priced", f"No run here has profiled actions, so no step can be priced: {profiled}."
        )
    on = f"On {network} {over(job.transport)}"
    chosen = job.recommended(network)
    if chosen is None or job.dense is None:
        best = job.fastest(network)
        lacking = "there is no dense run" if job.dense is None else "no dense run has profiled actions"
        profiled = "" if job.dense is None else " profile_every_steps=10"
        return Answer(
            "No dense baseline",
            f"{on}, the fastest setting is `{best.name}`, but {lacking} to compare it with.",
            f"It takes {_facts(job, best, network)} Train the same job with `forward=Identity backward=Identity{profiled}`, once for "
            "each seed.",
        )
    facts = f"It takes {_facts(job, chosen, network)}"
    if len(job.settings) == 1:
        sentence = f"{on}, only dense was trained, so there is nothing to compare."
        return Answer("Only dense was trained", sentence, facts)
    if chosen.dense:
        training = chosen.name.removeprefix("dense").strip()  # of several dense settings
        where = f" with `{training}`" if training else ""
        sentence = f"{on}, stay dense{where}: {seconds(chosen.step_s[network].value)} a step."
        return Answer("Stay dense", sentence, _money(job, chosen, network) + _why_dense(job, chosen, network))
    gain = f"{_faster_than_dense(chosen, network)}, with {chosen.factor:.1f} times fewer bytes"
    return Answer(
        f"Use `{chosen.name}`: {times(chosen.speedup[network].value)} times as fast",
        f"{on}, use `{chosen.name}`: {gain}.",
        facts + sure(chosen),
    )


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


def wire_words(bytes_share: float, latency_share: float) -> str:
    """Return a sentence on the shares of bytes and latency in a dense step.

    >>> wire_words(0.0132, 0.61)
    'Of a dense step, bytes take 1.3 % and latency 61 %: compression can save the bytes alone.'
    >>> wire_words(0.997, 0.0)
    'Of a dense step, bytes take 100 %: compression can save no more.'
    """
    words = f"Of a dense step, bytes take {two_digits(100 * bytes_share)} %"
    if not latency_share:
        return f"{words}: compression can save no more."
    return f"{words} and latency {two_digits(100 * latency_share)} %: compression can save the bytes alone."


def _none_faster(job: JobRuns, network: str) -> str:
    """Return that no setting gains enough, how many were compared, and the fastest of them."""
    others = [setting for setting in job.priced if not setting.dense and setting.speedup]
    best = min(others, key=lambda setting: setting.step_s[network].value, default=None)
    if best is None:
        return "No other setting has a price."
    fastest = f"`{best.name}`, {speedup(best.speedup[network])}"
    if best.speedup[network].value >= PAYS:
        fastest += f" over dense in its own schedule, {seconds(best.dense_step_s[network])} a step"
    if len(others) == 1:
        return f"The only compressed setting is not at least {GAIN} faster: {fastest}."
    return f"None of {len(others)} compressed settings is at least {GAIN} faster. The fastest is {fastest}."


def _why_dense(job: JobRuns, chosen: SettingRuns, network: str) -> str:
    """Return why no compressed setting is recommended, the most promising one, and the seeds to decide about it."""
    faster = job.faster(network)
    if not faster:
        step_s = chosen.step_s[network].value
        return f"{_none_faster(job, network)} {wire_words(*(added_s / step_s for added_s in chosen.wire[network]))}"
    if all(setting.verdict == "harmful" for setting in faster):
        return f"{_counted(len(faster))} faster, but shown to be harmful."
    best, least = job.promising(network), job.least_harmful(network)
    reason = f"{_counted(len(faster))} faster, but none is shown to be safe."
    setting = best or least
    if setting is None:
        lacking = faster[0].judged.get("lacking")
        return f"{reason} No verdict: {lacking}." if lacking else reason
    difference = against_dense(setting, job.measure)
    if best is not None:
        chance = best.judged["chance"]
        share = "over 99" if chance > 0.99 else f"{100 * chance:.0f}"
        likely = "" if math.isnan(chance) else f", {share} % likely to be safe"
        reason += f" The most promising is `{best.name}`: {_faster_than_dense(best, network)}; {difference}{likely}."
    else:
        reason += f" None is promising. The least harmful is `{setting.name}`: {difference}."
    return f"{reason} {_seeds_words(job, setting)}".rstrip()


def _counted(count: int) -> str:
    return f"{plural(count, 'setting')} {'is' if count == 1 else 'are'}"


def _seeds_words(job: JobRuns, setting: SettingRuns) -> str:
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
    return f"{outcome}, but a study of {needed} would{f', {seconds(hours)} of training' if hours > 0 else ''}."


def _faster_than_dense(setting: SettingRuns, network: str) -> str:
    """Return the speed-up of a setting over its dense setting, with the interval and the dense step."""
    value, low, high = map(times, setting.speedup[network])
    dense = seconds(setting.dense_step_s[network])
    return f"{value} times as fast as dense ({low} to {high}; dense takes {dense})"


def _facts(job: JobRuns, setting: SettingRuns, network: str) -> str:
    """Return the seconds and bytes of a step and the quality, for a compressed setting next to dense."""
    dense = job.dense if job.dense is not setting else None
    reached = [
        f"{quality(job.measure, *setting.quality[mode])} with compression {mode} at inference"
        + (f" (dense {quality(job.measure, *dense.quality[mode])})" if dense is not None else "")
        for mode in MODES
    ]
    return (
        f"{seconds(setting.step_s[network].value)} a step, {bytes_of(setting.wire_bytes)} on the wire. {_money(job, setting, network)}"
        f"{measure_text(job.measure).capitalize()}: {', '.join(reached)}."
    )


def _money(job: JobRuns, setting: SettingRuns, network: str) -> str:
    """Return the expected step and money of a setting and of dense, with a space after it; empty without costs."""
    expected, dense = job.expected.get((network, setting.name)), job.fastest_dense(network)
    if job.costs is None or expected is None:
        return ""
    beside = None if dense is None or setting is dense else job.expected.get((network, dense.name))
    return f"{job.costs.sentence(expected, beside)} ".lstrip()
