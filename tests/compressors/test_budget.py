"""A common error budget over links (ours): how it is shared out, and that a pipeline keeps to it."""

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from link_ends import Sender, same

from raysim.compressors import parse
from raysim.compressors.controller import Way, floors, spend
from raysim.config import ConfigError
from raysim.engine.inline import InlineEngine
from raysim.network.topology import Network
from raysim.pipeline.link import LinkAccount
from raysim.pipeline.prepare import prepare
from raysim.pipeline.reports import StepFeedback, StepReport, link_name
from raysim.training.feedback import Budgets

fidelity = st.floats(0.05, 1.0)


@st.composite
def ladders(draw):
    """Ways of a link from mild to strong: each faster than the one before, and keeping less."""
    seconds, kept = draw(st.floats(0.1, 100)), 1.0
    ways = [Way(1.0, seconds)]
    for _ in range(draw(st.integers(0, 3))):
        seconds *= draw(st.floats(0.1, 0.9))
        kept *= draw(st.floats(0.3, 0.99))
        ways.append(Way(kept, seconds))
    return ways


@given(st.lists(ladders(), min_size=1, max_size=4), fidelity)
def test_the_product_of_floors_is_the_budget_and_what_is_taken_passes_its_own(links, budget) -> None:
    named = dict(enumerate(links))
    shares, taken = floors(named, budget), spend(named, budget)
    assert math.prod(shares.values()) == pytest.approx(budget, rel=1e-9)
    assert all(0 < shares[link] <= taken[link].fidelity <= 1 for link in named)
    for link, ways in named.items():  # and nothing stronger does
        stronger = [way for way in ways if way.seconds < taken[link].seconds]
        assert all(way.fidelity < shares[link] or math.isclose(way.fidelity, shares[link]) for way in stronger)


@given(st.lists(ladders(), min_size=1, max_size=4), fidelity)
def test_budget_choice_is_optimal_for_slowest_message(links, budget) -> None:
    taken = spend(dict(enumerate(links)), budget)
    within = [
        choice
        for choice in itertools.product(*links)
        if math.prod(way.fidelity for way in choice) >= budget * (1 - 1e-12)
    ]
    best = min(max(way.seconds for way in choice) for choice in within)
    assert max(way.seconds for way in taken.values()) == best


def test_budget_spending_example() -> None:
    """Of a product of 0.5 the slow link takes 0.6, and what is left, 0.833, is too little for the others' 0.8."""
    fast, slow = [Way(1, 2.0), Way(0.8, 1.0)], [Way(1, 20.0), Way(0.8, 10.0), Way(0.6, 5.0)]
    assert spend({"a": fast, "b": slow, "c": fast}, 0.5) == {"a": fast[0], "b": slow[2], "c": fast[0]}
    shares = floors({"a": fast, "b": slow, "c": fast}, 0.5)
    rest = (0.5 / 0.6) ** (1 / 3)
    assert shares == pytest.approx({"a": rest, "b": 0.6 * rest, "c": rest})
    assert floors({"a": fast, "c": fast}, 0.7) == pytest.approx({"a": 0.8 * (7 / 8) ** 0.5, "c": (7 / 8) ** 0.5})
    assert floors({}, 0.5) == {}
    assert spend({"a": [Way(1, 2.0), Way(-0.3, 1.0)]}, 0.1) == {
        "a": Way(1, 2.0)
    }  # of a codec that adds more than it sends


def test_budget_is_met_up_to_rounding() -> None:
    ways = [Way(1.0, 1.0), Way(1 / 3, 0.5), Way(1 / 3 * 0.3, 0.25), Way(0.05, 0.125)]
    assert ways[2].fidelity < 0.1
    assert spend({"a": ways}, 0.1) == {"a": ways[2]}
    assert floors({"a": ways}, 0.1) == {"a": ways[2].fidelity}


def test_floor_replaces_epsilon() -> None:
    sender = Sender(parse("GraVAC(cf_min=2, cf_max=16, budget=0.25, window=100, ewma_alpha=1.0)"), stages=3)  # type: ignore[arg-type]
    first = sender.step(0, x=same)
    assert first.reason.split("; ")[1].startswith("0.5 must")  # equal shares of two links
    assert [offer.fidelity for offer in first.offers] == pytest.approx([first.gain_minimum, first.gain_candidate])
    assert all(offer.factor > 1 for offer in first.offers)
    sent = []
    for step, floor in enumerate([1.0, first.gain_minimum * 0.99, first.gain_candidate * 0.99], start=1):
        sender.step(step, x=same, floor=floor)
        sent.append(sender.step(step, x=same, floor=floor).branch)
    assert sent == ["dense", "minimum", "candidate"]


BUDGET = "GraVAC(budget={}, window=4, promote='passing', throughput='link')"


def test_the_slowest_link_is_compressed_first(small) -> None:
    """The last of three hosts is far away: what all messages offer alike is taken where they go there."""
    far = Network(tuple(tuple(1e6 if 2 in (a, b) else 1e9 for b in range(3)) for a in range(3)))
    decision = Sender(parse(BUDGET.format(0.4)), stages=3).step(0, x=same)  # type: ignore[arg-type]
    least = min(offer.fidelity for offer in decision.offers)
    for direction in ("forward", "backward"):
        plan = prepare(small(num_stages=3, **{direction: BUDGET.format(least)})).plan
        accounts = [
            LinkAccount(boundary, direction, True, packets=2, dense_bytes=10**6, decisions=(decision,))
            for boundary in (0, 1)
        ]
        report = StepReport(0, [], accounts, [], [], None)
        found = Budgets(plan, far).floors([report])
        assert found == pytest.approx({link_name(0, 0, direction): 1.0, link_name(0, 1, direction): least})
        even = Budgets(plan, None).floors([report])  # by bytes alone, the links are alike: both take the milder way
        assert math.prod(even.values()) == pytest.approx(least)


def test_a_pipeline_keeps_to_its_budget(small) -> None:
    """The product of what the levels keep that a step goes by, as seen in the step before, never falls below it."""
    budget, factors = 0.5, set()
    workload = prepare(small(num_stages=3, forward=BUDGET.format(budget)))
    engine, budgets, signals = InlineEngine(workload), Budgets(workload.plan, None), StepFeedback()
    engine.start()
    seen: list[dict[float, float]] = []
    for step in range(24):
        reports = engine.step(step, signals)
        signals = StepFeedback(None, budgets.floors(reports))
        assert math.prod(signals.floors.values()) == pytest.approx(budget)
        decisions = [d for report in reports for link in report.links for d in link.decisions]
        if seen:
            arrived = [1.0 if d.branch == "dense" else kept[d.factor] for kept, d in zip(seen, decisions, strict=True)]
            assert math.prod(arrived) >= budget * (1 - 1e-9)
        seen = [{d.minimum: d.gain_minimum, d.candidate: d.gain_candidate} for d in decisions]
        factors.add(tuple(d.factor for d in decisions))
    assert len(factors) > 1


def test_signals_are_the_same_after_a_checkpoint() -> None:
    signals = StepFeedback(0.25, {link_name(1, 0, "backward"): 0.7}, {link_name(0, 1, "forward"): 1 / 3})
    assert StepFeedback(**json.loads(json.dumps(signals._asdict()))) == signals


def test_links_of_a_direction_share_one_budget(small) -> None:
    plan = prepare(small(num_stages=4, forward=[BUDGET.format(0.8), "Identity", BUDGET.format(0.7)])).plan
    with pytest.raises(ConfigError, match=r"`forward` must give its links one `budget`.* but got 0.7 and 0.8"):
        Budgets(plan, None)
