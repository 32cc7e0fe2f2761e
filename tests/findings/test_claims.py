"""Verdicts on constructed runs of known truth: intervals cover, verdicts are right, few seeds decide nothing."""

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tomli_w
from raysim_findings.claim import HARM, Claim, Contrast
from raysim_findings.claimed_runs import ClaimedRuns, Quantities, claimed_runs
from raysim_findings.finding import findings_frame
from raysim_findings.table import CLAIMS
from raysim_findings.train_commands import _folder
from raysim_findings.verdicts import findings, verdict_on
from records_made import write_run
from typer.testing import CliRunner

from raysim import train
from raysim.analysis import AnalysisError, Estimate, in_company, load
from raysim.analysis.data.settings import COMPRESSION, NO_SETTING
from raysim.cli import app
from raysim.config import make_config, read_config
from raysim.config.identity import Setting
from raysim.notation import read_method
from raysim.quality import MEASURES

BY_NAME = {claim.name: claim for claim in CLAIMS}
DENSE = Setting()


def context_of(
    accuracies, *, off=None, measures=None, spread=0.05, seeds=5, metric="accuracy", language=False, rng=None
):
    """Return a context of runs whose accuracy with compression on (and `off`) has these means, in points; a seed's luck is shared.

    With estimated BatchNorm statistics, the accuracy with compression off is that with compression on.
    """
    rng = rng if rng is not None else np.random.default_rng(0)
    luck = rng.normal(0, 2, 100)
    rows = []
    for place, (setting, mean) in enumerate(accuracies.items()):
        count = seeds[setting] if isinstance(seeds, dict) else seeds
        for seed in range(count):
            on, other = mean + luck[seed], (off or {}).get(setting, mean) + luck[seed]
            values = {
                "accuracy_on": (on + rng.normal(0, spread)) / 100,
                "accuracy_off": (other + rng.normal(0, spread)) / 100,
                "accuracy_on_estimated": (on + rng.normal(0, spread)) / 100,
                "accuracy_off_estimated": (on + rng.normal(0, spread)) / 100,
            }
            values |= {name.replace("accuracy", "loss"): 2 - value for name, value in values.items()}
            values |= {"chance_accuracy": 0.1, "chance_loss": 1.9, "predictions": 36_000}
            origin = {"study": None, "confirms": False}
            rows.append({"run": f"{place}-s{seed}", "setting": setting, "seed": seed, **values, **origin})
    margin = {"accuracy": 0.5, "loss": 1.0}[metric]
    return ClaimedRuns(
        "made", pd.DataFrame(rows), MEASURES[metric], margin, language, quantities=measures or Quantities()
    )


def both(text):
    return Setting(text, text)


AB, BA = Setting("TopK(0.1)", "TopK(0.5)"), Setting("TopK(0.5)", "TopK(0.1)")
EF, PLAIN = both("ErrorFeedback(TopK(0.1))"), both("TopK(0.1)")
MINMAX, MINMAX_SWAPPED = Setting("Quantize(6)", "Quantize(2)"), Setting("Quantize(2)", "Quantize(6)")
ABSMAX = Setting("Quantize(6, range='absmax')", "Quantize(2, range='absmax')")
ABSMAX_SWAPPED = Setting(ABSMAX.backward, ABSMAX.forward)
AQ = Setting("AQSGD(TopK(0.1))", "TopK(0.1)")
BY_SAMPLE = Setting("ErrorFeedback(TopK(0.1), key='sample')", "ErrorFeedback(TopK(0.1))")
FORWARD_EF = Setting("ErrorFeedback(TopK(0.1))", "TopK(0.1)")
FORWARD_BY_SAMPLE = Setting(BY_SAMPLE.forward, "TopK(0.1)")
SHARED = Setting("TopK(0.1)", shared_indices=True)
BACKWARD_EF = Setting("TopK(0.1)", "ErrorFeedback(TopK(0.1))")
NOISE = both("NoiseFeedback(TopK(0.1))")
AQ_30 = Setting("AQSGD(TopK(0.3))", "TopK(0.3)")
TAH = both("TAHQuant(tile=64)")
LEP, LOW = Setting(backward="LazyErrorPropagation(LowRank(4))"), Setting(backward="LowRank(4)")
EPILOGUE = Setting(backward="Epilogue(LowRank(4))")
FUSED = Setting(fused_embedding=True)
BUFFERED = Setting(weights="DoubleBuffered")


def replicas(text):
    return Setting(replica_gradient=text)


GRAVAC, STATIC = replicas("GraVAC(10.0, 1000.0)"), replicas("ErrorFeedback(TopK(0.1))")
ACCORDION, MILD = replicas("Accordion(LowRank(4), LowRank(1))"), replicas("PowerSGD(4)")
LOCAL = replicas("DiLoCo(30, codec=Quantize(4))")
CODED_LINKS = Setting("Quantize(8)", "Quantize(8)")
ENTROPY = CODED_LINKS._replace(replica_gradient="EDGC(8)")
RAMP, AT_ONCE = replicas("DGC(0.01, ramp=4)"), replicas("DGC(0.01)")
EARLY, ALL_STAGES = replicas('["PowerSGD(8)", "Identity"]'), replicas("PowerSGD(8)")


def measures(values=100.0, slowdown=1.0, factors=(), reach=0.0, sent=()):
    """Return what is measured besides quality; `factors` and `sent` bytes by the place of a setting in its context."""
    return Quantities(
        lambda run, direction: factors[int(run.partition("-")[0])],
        lambda run: sent[int(run.partition("-")[0])],
        lambda run: values,
        lambda run, than: Estimate(slowdown, slowdown - reach, slowdown + reach),
        "1gbps",
    )


# Claim; accuracies in points, with compression on, then off where that differs; what is measured besides.
SUPPORTED: dict[str, Any] = {
    "gradients-milder": ({AB: 90, BA: 85}, {}, None),
    "asymmetry-of-range": ({MINMAX: 80, MINMAX_SWAPPED: 90, ABSMAX: 89, ABSMAX_SWAPPED: 89}, {}, None),
    "ten-per-cent": ({DENSE: 90, both("TopK(0.1)"): 88, both("TopK(0.05)"): 70, both("TopK(0.02)"): 60}, {}, None),
    "inference-compressed": ({PLAIN: 90}, {PLAIN: 80}, None),
    "batchnorm-explains": ({PLAIN: 90}, {PLAIN: 80}, None),
    "feedback-no-better": ({PLAIN: 90, EF: 90, BACKWARD_EF: 89}, {}, None),
    "feedback-frees": ({PLAIN: 90, EF: 90, BACKWARD_EF: 90}, {PLAIN: 80}, None),
    "feedback-is-noise": ({PLAIN: 90, NOISE: 90}, {PLAIN: 80}, None),
    "slots-mix-samples": ({PLAIN: 95, BACKWARD_EF: 90, EF: 80, BY_SAMPLE: 90}, {}, None),
    "aq-sgd-topk": ({DENSE: 90, AQ: 80, AQ_30: 90}, {}, None),
    "tah-quant": ({DENSE: 90, TAH: 90}, {}, None),
    "separate-indices": ({PLAIN: 80, SHARED: 90}, {}, None),
    "gravac": ({DENSE: 90, GRAVAC: 90}, {}, measures()),
    "gravac-speed": ({DENSE: 90, GRAVAC: 90, STATIC: 90}, {}, measures(slowdown=-20.0)),
    "accordion": ({DENSE: 90, ACCORDION: 90, MILD: 90}, {}, measures(factors=(1.0, 8.0, 4.0))),
    "diloco": ({DENSE: 90, LOCAL: 90}, {}, measures(factors=(1.0, 230.0))),
    "edgc": ({CODED_LINKS: 90, ENTROPY: 90}, {}, None),
    "warm-up": ({DENSE: 90, RAMP: 90, AT_ONCE: 85}, {}, None),
    "lazy-error-propagation": ({DENSE: 90, LEP: 90, LOW: 80}, {}, None),
    "epilogue-only": ({DENSE: 90, EPILOGUE: 90, LOW: 80}, {}, measures()),
    "selective-stages": ({DENSE: 90, EARLY: 90, ALL_STAGES: 80}, {}, measures()),
    "fused-embedding": ({DENSE: 90, FUSED: 90}, {}, measures(sent=(4.0, 3.0))),
    "double-buffered": ({DENSE: 90, BUFFERED: 90}, {}, measures(slowdown=-20.0)),
}
CONTRADICTED: dict[str, Any] = {
    "gradients-milder": [({AB: 85, BA: 90}, {}, None)],
    "asymmetry-of-range": [
        ({MINMAX: 80, MINMAX_SWAPPED: 90, ABSMAX: 80, ABSMAX_SWAPPED: 90}, {}, None),
        ({MINMAX: 90, MINMAX_SWAPPED: 90, ABSMAX: 90, ABSMAX_SWAPPED: 90}, {}, None),
    ],
    "ten-per-cent": [
        ({DENSE: 90, both("TopK(0.1)"): 80, both("TopK(0.05)"): 70}, {}, None),
        ({DENSE: 90, both("TopK(0.1)"): 90, both("TopK(0.05)"): 88}, {}, None),
    ],
    "inference-compressed": [({PLAIN: 90}, {}, None)],
    "batchnorm-explains": [({PLAIN: 90}, {}, None)],
    "feedback-no-better": [({PLAIN: 90, EF: 92}, {}, None), ({PLAIN: 90, BACKWARD_EF: 92}, {}, None)],
    "feedback-frees": [
        ({PLAIN: 90, EF: 90}, {PLAIN: 80, EF: 88}, None),
        ({PLAIN: 90, BACKWARD_EF: 90}, {PLAIN: 80, BACKWARD_EF: 80}, None),
    ],
    "feedback-is-noise": [({PLAIN: 90, NOISE: 90}, {PLAIN: 80, NOISE: 82}, None)],
    "slots-mix-samples": [
        ({BACKWARD_EF: 90, EF: 90, BY_SAMPLE: 90}, {}, None),
        ({BACKWARD_EF: 90, EF: 80, BY_SAMPLE: 85}, {}, None),
        ({PLAIN: 85, FORWARD_EF: 80, FORWARD_BY_SAMPLE: 80}, {}, None),
    ],
    "aq-sgd-topk": [({DENSE: 90, AQ: 90, AQ_30: 90}, {}, None), ({DENSE: 90, AQ: 80, AQ_30: 85}, {}, None)],
    "tah-quant": [({DENSE: 90, TAH: 85}, {}, None)],
    "separate-indices": [({PLAIN: 90, SHARED: 90}, {}, None)],
    "gravac": [({DENSE: 90, GRAVAC: 85}, {}, measures()), ({DENSE: 90, GRAVAC: 90}, {}, measures(values=8.0))],
    "gravac-speed": [({DENSE: 90, GRAVAC: 90, STATIC: 90}, {}, measures(slowdown=20.0))],
    "accordion": [
        ({DENSE: 90, ACCORDION: 85, MILD: 90}, {}, measures(factors=(1.0, 8.0, 4.0))),
        ({DENSE: 90, ACCORDION: 90, MILD: 90}, {}, measures(factors=(1.0, 3.0, 4.0))),
    ],
    "diloco": [
        ({DENSE: 90, LOCAL: 80}, {}, measures(factors=(1.0, 230.0))),
        ({DENSE: 90, LOCAL: 90}, {}, measures(factors=(1.0, 60.0))),
    ],
    "edgc": [({DENSE: 80, CODED_LINKS: 90, ENTROPY: 85}, {}, None)],
    "warm-up": [({DENSE: 90, RAMP: 85, AT_ONCE: 80}, {}, None), ({DENSE: 90, RAMP: 90, AT_ONCE: 92}, {}, None)],
    "lazy-error-propagation": [({DENSE: 90, LEP: 80, LOW: 80}, {}, None), ({DENSE: 90, LEP: 90, LOW: 90}, {}, None)],
    "epilogue-only": [
        ({DENSE: 90, EPILOGUE: 80, LOW: 80}, {}, measures()),
        ({DENSE: 90, EPILOGUE: 90, LOW: 80}, {}, measures(slowdown=30.0)),
    ],
    "selective-stages": [
        ({DENSE: 90, EARLY: 80, ALL_STAGES: 80}, {}, measures()),
        ({DENSE: 90, EARLY: 90, ALL_STAGES: 80}, {}, measures(slowdown=30.0)),
    ],
    "fused-embedding": [
        ({DENSE: 90, FUSED: 80}, {}, measures(sent=(4.0, 3.0))),
        ({DENSE: 90, FUSED: 90}, {}, measures(sent=(4.0, 5.0))),
    ],
    "double-buffered": [
        ({DENSE: 90, BUFFERED: 80}, {}, measures(slowdown=-20.0)),
        ({DENSE: 90, BUFFERED: 90}, {}, measures(slowdown=20.0)),
    ],
}


@pytest.mark.parametrize(
    ("name", "part", "whole"),
    [
        ("lazy-error-propagation", LEP, LEP._replace(replica_gradient="PowerSGD(8)")),
        ("epilogue-only", EPILOGUE, EPILOGUE._replace(replica_gradient="PowerSGD(8)")),
        ("selective-stages", EARLY, EARLY._replace(backward="LowRank(4)")),
        ("gravac", GRAVAC, GRAVAC._replace(forward="TopK(0.1)")),
        ("accordion", ACCORDION, ACCORDION._replace(backward="TopK(0.1)")),
        ("warm-up", RAMP, RAMP._replace(backward="TopK(0.1)")),
    ],
)
def test_claim_on_one_part_ignores_harm_of_others(name, part, whole):
    claim = BY_NAME[name]
    assert list(claim.contrasts(context_of({DENSE: 90, part: 90}), [DENSE, part]))
    assert not list(claim.contrasts(context_of({DENSE: 90, whole: 60}), [DENSE, whole]))


@pytest.mark.parametrize("name", ["gravac", "gravac-speed"])
def test_gravac_with_another_gain_or_a_lower_floor_than_the_papers_is_no_test_of_its_claims(name):
    def contrasts(text):
        return list(BY_NAME[name].contrasts(context_of({DENSE: 90, STATIC: 90, replicas(text): 90}), [replicas(text)]))

    assert contrasts("GraVAC(10.0, 1000.0)")
    assert contrasts("GraVAC(10.0, 1000.0, epsilon=0.9)")
    assert not contrasts("GraVAC(10.0, 1000.0, epsilon=0.3)")
    assert not contrasts("GraVAC(10.0, 1000.0, gain='raw')")


def test_every_claim_has_supporting_and_contradicting_tests():
    assert set(SUPPORTED) == set(CONTRADICTED) == set(BY_NAME)
    assert len(BY_NAME) == len(CLAIMS)


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
@pytest.mark.parametrize("name", BY_NAME)
def test_a_true_claim_is_supported(name, metric):
    accuracies, off, given = SUPPORTED[name]
    context = context_of(accuracies, off=off, measures=given, metric=metric, language=BY_NAME[name].language)
    finding = verdict_on(BY_NAME[name], context)
    assert finding.verdict == "supported", finding.reason
    assert finding.seeds == 5
    assert finding.runs
    assert finding.low <= finding.effect <= finding.high
    assert (finding.low > finding.threshold) if finding.side == "above" else (finding.high < finding.threshold)


@pytest.mark.parametrize(("name", "made"), [(name, made) for name, cases in CONTRADICTED.items() for made in cases])
def test_a_false_claim_is_contradicted(name, made):
    accuracies, off, given = made
    finding = verdict_on(BY_NAME[name], context_of(accuracies, off=off, measures=given))
    assert finding.verdict == "contradicted", finding.reason
    assert "but the claim requires an effect" in finding.reason


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
@pytest.mark.parametrize("name", BY_NAME)
def test_models_at_chance_bear_on_no_claim(name, metric):
    """Runs that say the same of a claim, their qualities moved to chance: nothing is supported, nothing contradicted."""
    for accuracies, off, given in [SUPPORTED[name], *CONTRADICTED[name]]:
        best = max([*accuracies.values(), *off.values()])
        on, unlike = ({one: mean - best + 10 for one, mean in each.items()} for each in (accuracies, off))
        context = context_of(on, off=unlike, measures=given, metric=metric, language=BY_NAME[name].language)
        finding = verdict_on(BY_NAME[name], context)
        harms = [one for one in finding.comparisons if one.effects and one.text.startswith("harm")]
        assert harms
        assert all("is not clearly above chance" in one.lacking for one in harms)
        if given is None:
            assert finding.verdict == "undecided"
        assert finding.verdict != "supported"


@pytest.mark.parametrize("name", BY_NAME)
def test_two_seeds_decide_nothing(name):
    for accuracies, off, given in [SUPPORTED[name], *CONTRADICTED[name]]:
        finding = verdict_on(BY_NAME[name], context_of(accuracies, off=off, measures=given, seeds=2))
        assert finding.verdict == "undecided"
        assert "2 of at least 3 seeds" in finding.reason


@pytest.mark.parametrize("name", sorted(set(BY_NAME) - {"gravac"}))
def test_wide_spread_is_undecided_for_any_mean(name):
    accuracies, off, given = SUPPORTED[name]
    finding = verdict_on(BY_NAME[name], context_of(accuracies, off=off, measures=given, spread=40))
    assert finding.verdict == "undecided"


@pytest.mark.parametrize(
    ("slowdown", "reach", "verdict"),
    [(-20, 10, "supported"), (-20, 30, "undecided"), (20, 10, "contradicted"), (20, 30, "undecided")],
)
def test_the_interval_of_a_price_is_in_the_bounds_of_a_claim_about_time(slowdown, reach, verdict):
    accuracies, off, _ = SUPPORTED["gravac-speed"]
    found = verdict_on(
        BY_NAME["gravac-speed"], context_of(accuracies, off=off, measures=measures(slowdown=slowdown, reach=reach))
    )
    assert found.verdict == verdict, found.reason
    (price,) = [one for one in found.comparisons if "of a step" in one.unit]
    assert (price.low, price.effect, price.high) == pytest.approx((slowdown - reach, slowdown, slowdown + reach))


def test_models_without_batchnorm_do_not_bear_on_the_claim_about_its_statistics():
    context = context_of({PLAIN: 90}, off={PLAIN: 80})
    for mode in ("on", "off"):
        context.rows[f"accuracy_{mode}_estimated"] = context.rows[f"accuracy_{mode}"]
    finding = verdict_on(BY_NAME["batchnorm-explains"], context)
    assert finding.verdict == "undecided"
    assert "no runs to compare" in finding.reason


def test_every_claim_cites_its_source():
    for claim in CLAIMS:
        assert claim.text.endswith(".")
        assert claim.reading.endswith(".")
        assert "upported" in claim.reading
        assert claim.quote or "not" in claim.reading  # where nothing is quoted, the reading says why


def test_insignificant_difference_is_not_called_safe():
    """Three seeds that scatter by points: no test finds a difference, and no harm is not shown either."""
    rng = np.random.default_rng(1)
    context = context_of({DENSE: 90, PLAIN: 90, both("TopK(0.01)"): 50}, spread=2, seeds=3, rng=rng)
    finding = verdict_on(BY_NAME["ten-per-cent"], context)
    (comparison,) = (one for one in finding.comparisons if one.part == "10 % does no severe harm")
    assert comparison.low < 0 < comparison.high
    assert finding.verdict == "undecided"


def test_claim_with_missing_runs_stays_undecided():
    context = context_of({DENSE: 90, PLAIN: 90})
    finding = verdict_on(BY_NAME["ten-per-cent"], context)
    assert finding.verdict == "undecided"
    assert (
        "harm of forward=TopK(0.05) backward=TopK(0.05) against dense: there are no runs to compare" in finding.reason
    )
    assert [one.verdict for one in finding.comparisons] == ["supported", "undecided"]


def test_single_seed_trial_keeps_claim_supported():
    accuracies, off, _ = SUPPORTED["ten-per-cent"]
    extra = both("TopK(0.03)")
    seeds = dict.fromkeys(accuracies, 5) | {extra: 1}
    finding = verdict_on(BY_NAME["ten-per-cent"], context_of(accuracies | {extra: 90}, off=off, seeds=seeds))
    assert finding.verdict == "supported"


def rates(claim, accuracies, tries, **options):
    """Return how often a claim is supported, contradicted and left open over many draws of the same truth."""
    rng = np.random.default_rng(1)
    drawn = [verdict_on(claim, context_of(accuracies, rng=rng, **options)).verdict for _ in range(tries)]
    return tuple(drawn.count(verdict) / tries for verdict in ("supported", "contradicted", "undecided"))


@pytest.mark.slow
def test_at_the_threshold_either_verdict_is_rare():
    """A harm of just the margin: at five seeds, three tenths of 5 % are spent on either error."""
    claim = BY_NAME["inference-compressed"]
    supported, contradicted, _ = rates(claim, {PLAIN: 90}, 200, off={PLAIN: 89.5}, spread=0.5)
    assert supported < 0.015 + 3 * 0.0086
    assert contradicted < 0.015 + 3 * 0.0086


@pytest.mark.slow
def test_many_comparisons_do_not_contradict_by_chance():
    """Eight settings at the margin: each errs in one draw of 67 by itself, and the claim is hurt no more often."""
    many = {Setting(f"TopK({density})"): 90 for density in (0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1)}
    off = dict.fromkeys(many, 89.5)
    supported, contradicted, _ = rates(BY_NAME["inference-compressed"], many, 80, off=off, spread=0.5)
    assert contradicted < 0.015 + 3 * 0.0136
    assert supported < 0.015


@pytest.mark.parametrize("tries", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_clear_harm_is_detected(tries):
    supported, _, _ = rates(BY_NAME["inference-compressed"], {PLAIN: 90}, tries, off={PLAIN: 86}, spread=0.5)
    assert supported > 0.95


def test_pooled_claims_test_mean_of_pairs():
    """One pair speaks for the claim, a weaker one faintly against it: seed by seed, their mean is what is tested."""
    other_ab, other_ba = Setting("Quantize(4)", "Quantize(8)"), Setting("Quantize(8)", "Quantize(4)")
    context = context_of({AB: 90, BA: 85, other_ab: 89.9, other_ba: 90})
    finding = verdict_on(BY_NAME["gradients-milder"], context)
    assert finding.verdict == "supported"
    assert finding.effect == pytest.approx(np.mean([one.effect for one in finding.comparisons]))
    assert len(finding.runs) == 20


def made(folder, accuracies, seeds=5, diverged=(), **changes):
    for place, (setting, (on, off)) in enumerate(accuracies.items()):
        for seed in range(seeds):
            noise = 0.0005 * ((seed * 7 + place * 3) % 5)
            finals = {
                "accuracy_on": on + noise,
                "accuracy_off": off + noise,
                "loss_on": 1.5 - on,
                "loss_off": 1.5 - off,
            }
            lost = setting in diverged
            status = "diverged" if lost else "finished"
            write_run(
                folder / f"{place}-s{seed}",
                seed=seed,
                status=status,
                finals={} if lost else finals,
                extra=setting.changes(),
                **{"tables": bool(diverged), **changes},
            )


def test_findings_name_runs_and_what_to_run(tmp_path):
    made(tmp_path, {DENSE: (0.9, 0.9), PLAIN: (0.9, 0.8), both("TopK(0.05)"): (0.7, 0.5), AB: (0.9, 0.8)})
    results = load(tmp_path)
    found = {finding.claim.name: finding for finding in findings(results)}
    assert list(found) == [claim.name for claim in CLAIMS]
    assert found["ten-per-cent"].verdict == found["inference-compressed"].verdict == "supported"
    assert found["ten-per-cent"].context == "cnn on digits"
    assert set(found["ten-per-cent"].runs) == {f"{place}-s{seed}" for place in (0, 1, 2) for seed in range(5)}
    assert found["ten-per-cent"].commands == ()
    assert found["ten-per-cent"].cost is None
    (command,) = found["gradients-milder"].commands
    assert str(found["gradients-milder"].cost) == "3 runs, of unknown duration"
    assert found["gradients-milder"].runs == ()
    assert command.startswith("for s in 0 1 2; do raysim train digits-cnn ")
    assert command.endswith(f"seed=$s --out {tmp_path}/TopK-0.5-TopK-0.1-s$s; done")
    gravac = found["gravac"].commands
    assert [shlex.split(command)[7:12] for command in gravac] == [
        ["raysim", "train", "digits-cnn", "num_stages=1", "num_replicas=2"],
        ["raysim", "train", "digits-cnn", "num_stages=1", "num_replicas=2"],
    ]  # of one replica, none could do
    frame = findings_frame(found.values())
    assert frame["claim"].tolist() == list(found)
    assert str(frame["effect"].dtype) == "float64"
    assert frame.set_index("claim").loc["gradients-milder", "commands"] == [command]
    assert all("\n" not in finding.reason for finding in found.values())


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 7, "num_stages": 2, "optimizer": {"name": "adamw", "betas": [0.8, 0.9], "learning_rate": 1e-4}},
        {
            "epochs": 1,
            "steps": None,
            "data": {"name": "digits", "train_samples": 64},
            "model": {"name": "cnn", "width": 8},
        },
        {"name": "resnet18-cifar10", "cuts": ["layer1"], "num_stages": None, "model": "resnet18", "data": "cifar10"},
    ],
)
def test_a_command_gives_the_recorded_configuration(tmp_path, changes):
    made(tmp_path, {DENSE: (0.9, 0.9), AB: (0.9, 0.8)}, seeds=1, tables=False, **changes)
    results = load(tmp_path)
    finding = next(one for one in findings(results) if one.claim.name == "gradients-milder")
    for command in finding.commands:
        line = command.partition("do ")[2].removesuffix("; done") or command
        words = shlex.split(line.replace("$s", "5"))
        assert words[:2] == ["raysim", "train"]
        config = read_config(words[2], [word for word in words[3:] if "=" in word])
        recorded = make_config({key: v for key, v in {"steps": 4, "num_stages": 3, **changes}.items() if v is not None})
        ours, theirs = config.flat(), recorded.flat()
        skipped = {*COMPRESSION, *NO_SETTING, "seed", "num_stages"}
        assert {k: v for k, v in ours.items() if k not in skipped} == {
            k: v for k, v in theirs.items() if k not in skipped
        }
        assert config.stages == recorded.stages


@pytest.mark.slow
def test_the_command_of_one_run_adds_it_to_the_comparison(tmp_path):
    from configurations import SMALL

    kinds = {"dense": {}, "ab": {"forward": AB.forward, "backward": AB.backward}}
    for name, kind in kinds.items():
        train(make_config({**SMALL, **kind, "name": "digits-cnn", "steps": 2}), engine="inline", out=tmp_path / name)

    def gradients():
        return next(one for one in findings(load(tmp_path)) if one.claim.name == "gradients-milder")

    assert gradients().seeds == 0
    swapped = next(command for command in gradients().commands if "TopK(0.5)' 'backward=TopK(0.1)" in command)
    line = swapped.partition("do ")[2].removesuffix("; done").replace("$s", "0")
    done = CliRunner().invoke(app, [*shlex.split(line)[1:], "--engine", "inline"])
    assert done.exit_code == 0, done.output
    assert gradients().seeds == 1


def test_other_measures_are_those_of_the_records(tmp_path):
    from configurations import SMALL

    for name, kind in {"dense": {}, "sparse": {"forward": "TopK(0.1)"}}.items():
        train(make_config({**SMALL, **kind, "steps": 4}), engine="inline", out=tmp_path / name)
    results = load(tmp_path)
    (context,) = claimed_runs(results, quality="auto", margin=None, network="10mbps")
    links = results.links[(results.links["run"] == "sparse") & (results.links["direction"] == "forward")]
    expected = links["dense_bytes"].sum() / links["wire_bytes"].sum()
    assert context.quantities.factor("sparse", "forward") == pytest.approx(expected)
    from raysim.network.presets import parse_network

    one, dense = in_company([tmp_path / "sparse", tmp_path / "dense"])
    (speedup,) = one.speedup(dense, [parse_network("10mbps")])
    value, low, high = context.quantities.slowdown("sparse", "dense")
    assert value == pytest.approx(100 * (1 / speedup.value - 1))
    assert (low, high) == pytest.approx((100 * (1 / speedup.high - 1), 100 * (1 / speedup.low - 1)))
    assert low < value < high
    assert context.quantities.slowdown("dense", "dense") == (0, 0, 0)


def test_steps_are_compared_on_the_first_network_of_the_study(tmp_path):
    made(tmp_path / "study" / "trials", {DENSE: (0.9, 0.9)}, seeds=1)
    cases: list[tuple[Any, str]] = [
        ([{"name": "loss_on"}, {"name": "step_s@20mbps"}, {"name": "step_s@10gbps"}], "20mbps"),
        (["loss_on", "step_s@20mbps"], "20mbps"),
        (["loss_on"], "1gbps"),
        (["step_s@gone.toml"], "1gbps"),
        ([{"names": 3}], "1gbps"),
        (3, "1gbps"),
    ]
    for objectives, network in cases:
        (tmp_path / "study" / "study.toml").write_text(tomli_w.dumps({"name": "study", "objectives": objectives}))
        (context,) = claimed_runs(load(tmp_path), quality="auto", margin=None)
        assert context.quantities.network == network, objectives
    (context,) = claimed_runs(load(tmp_path), quality="auto", margin=None, network="10mbps")
    assert context.quantities.network == "10mbps"


def test_studies_that_differ_in_their_network_are_compared_on_the_usual_one(tmp_path):
    for name in ("10mbps", "20mbps"):
        made(tmp_path / name / "trials", {DENSE: (0.9, 0.9)}, seeds=1)
        (tmp_path / name / "study.toml").write_text(tomli_w.dumps({"objectives": [{"name": f"step_s@{name}"}]}))
    (context,) = claimed_runs(load(tmp_path), quality="auto", margin=None)
    assert context.quantities.network == "1gbps"


def test_a_diverged_run_counts_as_untrained(tmp_path):
    bad = both("TopK(0.05)")
    made(tmp_path, {DENSE: (0.9, 0.9), PLAIN: (0.9, 0.8), bad: (0, 0)}, diverged={bad})
    results = load(tmp_path)
    finding = next(one for one in findings(results) if one.claim.name == "ten-per-cent")
    assert finding.verdict == "supported"
    (harm,) = (one for one in finding.comparisons if one.part == "less than 10 % does severe harm")
    assert harm.effect == pytest.approx(90, abs=1)
    assert results.problems[0] == "The run 2-s0 diverged, and counts as untrained: accuracy 0."
    losses = next(one for one in findings(results, quality="loss") if one.claim.name == "ten-per-cent")
    (harm,) = (one for one in losses.comparisons if one.part == "less than 10 % does severe harm")
    assert harm.effect == pytest.approx(100 * (2.3 / 0.6 - 1))  # by chance, which is more than the first step's


@pytest.mark.slow
def test_language_models_are_judged_separately_by_loss(tmp_path):
    made(tmp_path / "digits", {DENSE: (0.9, 0.9), PLAIN: (0.9, 0.8), SHARED: (0.9, 0.9)}, seeds=3)
    topics = {"data": {"name": "topics", "length": 8}, "model": {"name": "gpt"}}
    made(tmp_path / "topics", {PLAIN: (0.2, 0.2), SHARED: (0.3, 0.3)}, seeds=3, **topics)
    found = [one for one in findings(load(tmp_path)) if one.claim.name == "separate-indices"]
    assert [one.verdict for one in found] == ["supported"]
    assert found[0].unit == "% of loss"
    assert found[0].context == "gpt on topics"
    inference = [one.context for one in findings(load(tmp_path)) if one.claim.name == "inference-compressed"]
    assert inference == ["cnn on digits", "gpt on topics"]


def test_claim_is_added_in_one_place(tmp_path):
    made(tmp_path, {DENSE: (0.9, 0.9), PLAIN: (0.9, 0.9)})

    def contrasts(context, settings):
        for setting in settings:
            if setting.forward == "TopK(0.1)":
                yield Contrast("mine", setting, DENSE, HARM, "below", 5.0)

    mine = Claim("mine", "Mine.", "", "me", "Not quoted.", contrasts, (PLAIN,))
    (finding,) = findings(load(tmp_path), [mine])
    assert finding.verdict == "supported"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"quality": "beauty"}, "`quality` must be one of auto, accuracy, perplexity, loss, but got 'beauty'."),
        ({"confidence": 1.0}, "`confidence` must be in [0.5, 1), but got 1.0."),
        ({"margin": -1.0}, "`margin` must be 0 or more, but got -1.0."),
    ],
)
def test_invalid_queries_are_refused(tmp_path, options, sentence):
    write_run(tmp_path / "a", finals={"accuracy_on": 0.5})
    with pytest.raises(AnalysisError) as error:
        findings(load(tmp_path), **options)
    assert str(error.value) == sentence


def test_unknown_networks_are_refused(tmp_path):
    write_run(tmp_path / "a", finals={"accuracy_on": 0.5})
    with pytest.raises(AnalysisError) as error:
        findings(load(tmp_path), network="warp")
    assert str(error.value).startswith("`network`: ")


def test_the_command_prints_verdicts_and_writes_them(tmp_path):
    made(tmp_path / "runs", {DENSE: (0.9, 0.9), PLAIN: (0.9, 0.8)})
    file = tmp_path / "found.json"
    done = CliRunner().invoke(app, ["findings", str(tmp_path / "runs"), "--json", str(file)])
    assert done.exit_code == 0, done.output
    assert "supported    Models trained under strong TopK (10 % or less) need compression at inference." in done.output
    others = f"{len(CLAIMS) - 2} not tested by these runs"
    assert (
        f"1 supported, 0 contradicted, 1 undecided, {others} (`--untested` lists them, with the runs to make). A"
        in (done.output)
    )
    assert sum(line.startswith("undecided  ") for line in done.output.splitlines()) == 1
    assert done.output.count("to decide: for s in") == 1
    whole = CliRunner().invoke(app, ["findings", str(tmp_path / "runs"), "--untested"])
    assert whole.output.count("to decide: for s in 0 1 2; do raysim train") > 10
    assert sum(line.startswith("undecided  ") for line in whole.output.splitlines()) == len(CLAIMS) - 1
    assert f"1 undecided, {others}. A comparison decides if its one-sided bound" in whole.output
    assert done.output.endswith(f"Figures: {file}\n")
    written = json.loads(file.read_text())
    assert [one["claim"] for one in written["findings"]] == [claim.name for claim in CLAIMS]


def test_folder_without_results_gives_one_sentence_error(tmp_path):
    for folder, sentence in (
        (tmp_path, f"There is no run in {tmp_path}: no folder there has a run.parquet."),
        (tmp_path / "none", f"There is no folder {tmp_path / 'none'}."),
        (Path(__file__), f"{__file__} is a file, not a folder."),
    ):
        done = CliRunner().invoke(app, ["findings", str(folder)])
        assert done.exit_code == 2
        assert done.output == f"raysim: {sentence}\n"
    write_run(tmp_path / "going", status="running")
    done = CliRunner().invoke(app, ["findings", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "None of the 1 runs is finished (1 running)" in done.output
    assert f"0 supported, 0 contradicted, 0 undecided, {len(CLAIMS)} not tested by these runs" in done.output


@pytest.mark.parametrize(
    "text",
    ["Identity", "TopK(0.1, values=Quantize(8))", "Gathered(ErrorFeedback(TopK(0.01)), warmup=100)", "1F1B", "f(", ""],
)
def test_notations_are_read_without_their_classes(text):
    method = read_method(text)
    assert method is None or str(method) == text
    assert (method is None) is (text in ("1F1B", "f(", ""))


def test_missing_runs_folder_has_valid_name(tmp_path):
    settings = [Setting(forward="Entropy(" * depth + "Quantize(4)" + ")" * depth) for depth in (40, 41)]
    context = ClaimedRuns("digits-cnn, steps=" + "7" * 300, pd.DataFrame())
    folders = [f"{_folder(tmp_path, setting, context, [0])}-s0" for setting in settings]
    assert folders[0] != folders[1]
    for folder in folders:
        Path(folder).mkdir()
    assert f"{_folder(tmp_path, settings[0], context, [0])}-s0" not in folders
