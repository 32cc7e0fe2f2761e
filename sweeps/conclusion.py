"""The text of a decision: why nothing gains enough, other remedies, and the results of a race."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from raysim.analysis.report.gather import gather
from raysim.analysis.report.reuse import adoption
from raysim.analysis.report.words import GAIN, against_dense, answer_for, speedup
from raysim.config.identity import METHOD_KEYS, Setting
from raysim.forecast.gains import Alternative
from raysim.network.prices import PAYS, times
from raysim.network.profile import Profile
from raysim.network.timed_step import Parts
from raysim.network.topology import Network
from raysim.screening.screen import words
from raysim.sweeps.budget import duration
from raysim.sweeps.contenders import SET_ASIDE, Candidate
from raysim.sweeps.decide import COMPUTE, DecisionState
from raysim.units import format_bytes, format_seconds, plural

if TYPE_CHECKING:
    from raysim.analysis.report.material import JobRuns
    from raysim.sweeps.runner import Sweep
    from raysim.sweeps.search import RaceSearch

CAUSES = {
    "latency": "Latency takes the time, not bytes",
    "compute": "Compute takes the time, not the network",
    "bubble": "Waiting for the schedule and for the host takes the time, not the network",
    "tied": "The sum of tied parameters takes the time",
    "links": "Codecs take as long as the bytes that they save",
    "averaging": "Codecs take as long as the bytes that they save",
}
NAMES = {
    "compute": "compute",
    "bubble": "waiting for the schedule and the host",
    "links": "bytes of links",
    "tied": "bytes of tied parameters",
    "averaging": "bytes of replicas",
    "latency": "latency",
}
SEEN = 0.005
"""Share of a step from which a cause is named."""


def step_causes(parts: Parts, step_s: float, network: Network) -> str:
    """Return dense's step on a network and its causes, largest first."""
    shares = sorted(
        ((seconds / step_s, NAMES.get(name, name)) for name, seconds in parts._asdict().items()), reverse=True
    )
    causes = ", ".join(f"{name} {share:.0%}" for share, name in shares if share >= SEEN)
    return f"On {network!r} a dense step takes {format_seconds(step_s)}: {causes}."


def way_words(way: Alternative) -> str:
    """Return another way to run the training in a line, with its keys."""
    keys = " ".join(f"{key}={value}" for key, value in way.changes.items() if value is not None and key != "steps")
    return (
        f"{way.name}: {times(way.speedup)} times as many samples a second, {format_seconds(way.step_s)} a step, "
        f"{format_bytes(way.worker_bytes)} for the fullest worker ({keys})"
    )


def stay_priced(decision: DecisionState) -> list[str]:
    """Return the decision if no setting can gain enough by its price."""
    assert decision.parts is not None
    causes = decision.parts._asdict()
    largest = max(causes, key=lambda name: causes[name])
    network, count = decision.question.network, plural(len(decision.candidates), "setting")
    fastest = max(
        (each for each in decision.candidates if each.step_s is not None),
        key=lambda each: each.speedup or 0.0,
        default=None,
    )
    gain = f"none of {count} can gain {GAIN}"
    if fastest is not None:
        gain = f"the fastest of {count}, {words(fastest.setting)}, {times(fastest.speedup or 0.0)} times"
    other = next((way for way in decision.ways if way.speedup >= PAYS), None)
    better = (
        f"What helps: {other.name}, with {times(other.speedup)} times as many samples a second."
        if other is not None
        else f"No other layout tried gains {GAIN} either."
    )
    return [
        f"Stay dense on {network!r}. {CAUSES[largest]}: {causes[largest] / decision.dense_s:.0%} of a step of "
        f"{format_seconds(decision.dense_s)}. Messages of links that weigh nothing would make it {times(decision.limit)} times "
        f"as fast, and {gain}. {better}{decision.money and ' '}{decision.money}",
        _compute(decision),
    ]


def stay_screened(decision: DecisionState) -> list[str]:
    """Return the decision if the screen leaves nothing that is worth training."""
    ruled = [each for each in decision.candidates if each.reason]
    reasons = ", ".join(f"{count} {name}" for name, count in _counts(ruled).items())
    return [
        f"Stay dense on {decision.question.network!r}: none of {len(decision.candidates)} settings is left ({reasons}), before "
        "training.",
        _compute(decision),
    ]


def _compute(decision: DecisionState) -> str:
    """Return the source of the compute seconds in prices, as a sentence."""
    decision.store.fetch_file(COMPUTE)
    return f"Compute: {Profile.load(decision.store.local / COMPUTE).source}."


def _counts(candidates: list[Candidate]) -> Mapping[str, int]:
    counts: dict[str, int] = {}
    for each in candidates:
        counts[each.outcome] = counts.get(each.outcome, 0) + 1
    return counts


def conclude(decision: DecisionState, sweep: Sweep) -> None:
    """Store the race's results, and write the decision: setting, bounds, code, and the cost of more certainty."""
    question, network = decision.question, repr(decision.question.network)
    reasons = {
        _setting(sweep.study.config(sweep.study.overrides_at(row.params, row.name)).flat()): row.error
        for row in sweep.rows
    }
    results = sweep.results
    material = partial(gather, networks=[question.network], **sweep.study.pricing)
    jobs = [] if results is None else material(results, costs=question.costs).jobs
    if not jobs:
        decision.end([f"No decision: no run of the race ended. It lies in {sweep.store.out}."])
        return
    job = max(jobs, key=lambda each: len(each.runs))
    trained = {_setting(job.runs[job.runs["run"] == each.runs[0]].iloc[0].to_dict()): each for each in job.settings}
    for candidate in decision.left:
        ran = trained.get(candidate.setting)
        verdict = "not trained to its end"
        if ran is not None:
            verdict = ": ".join(filter(None, (ran.verdict, ran.judged.get("lacking"))))
        candidate.verdict = reasons.get(candidate.setting) or verdict  # the race's own, if it has dropped the setting
        if ran is not None:
            candidate.harm = against_dense(ran, job.measure)
            candidate.faster = speedup(ran.speedup[network]) if network in ran.speedup else ""
    decision.sentences = [_verdict(decision, job, sweep), *sweep.search.summary(decision.spent_s), job.compute]
    home = adoption(job, network)
    decision.code = f"# {home.text.replace('`', '')}\n{home.code}" if home.code else ""
    rounds = cast("RaceSearch", sweep.search).rounds
    decision.settled = not rounds.running and not rounds.undecided
    decision.ended = "raced"
    decision.write()


def _verdict(decision: DecisionState, job: JobRuns, sweep: Sweep) -> str:
    """Return the decision in a line: setting, speed-up and harm with their bounds, or what more would decide."""
    network = repr(decision.question.network)
    if len(job.settings) == 1:
        settings = plural(len(decision.left), "setting")
        return (
            f"On {network}, stay dense for now: the budget ended before one of {settings} was trained to its end."
            f"{fastest_words(decision.left)}{_cost(decision, sweep)}"
        )
    chosen, verdict = job.recommended(network), answer_for(job, network)
    sentence, evidence = verdict.sentence.replace("`", ""), verdict.evidence.replace("`", "")
    if chosen is not None and not chosen.dense:
        return f"{sentence} Beside dense: {against_dense(chosen, job.measure)}. {evidence}"
    aside = sum(each.outcome == SET_ASIDE for each in decision.candidates)
    untried = f" {plural(aside, 'setting')} set aside before training: `--try` trains one." if aside else ""
    return f"{sentence} {evidence}{untried}"


def fastest_words(candidates: Sequence[Candidate]) -> str:
    """Return the fastest setting, as priced and screened, as a sentence; nothing if none is priced."""
    priced = [each for each in candidates if each.speedup is not None]
    if not priced:
        return ""
    fastest = max(priced, key=lambda each: each.speedup or 0.0)
    harm = "" if fastest.difference is None else f" and changes the loss by {fastest.difference:+.2g} at once"
    return f" The fastest, {words(fastest.setting)}, is {times(fastest.speedup or 0.0)} times as fast{harm}."


def _cost(decision: DecisionState, sweep: Sweep) -> str:
    """Return the budget that would train the next setting to its end, as a sentence; nothing if it is unknown."""
    rounds = cast("RaceSearch", sweep.search).rounds
    if rounds.budget is None or not rounds.running:
        return ""
    spending = rounds.budget.spending
    needed_s = min(map(rounds.budget.finish_s, rounds.running))
    total_s = decision.spent_s + spending.elapsed_s + spending.elapsing_s(needed_s)
    return f" `--resume` with a `--budget` of {duration(1.1 * total_s)} would train the next one to its end."


def _setting(row: Mapping[Any, Any]) -> Setting:
    """Return the methods of a run's row."""
    return Setting.of({key: row.get(key) for key in METHOD_KEYS})
