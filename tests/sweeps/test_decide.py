"""A decision: it ends as soon as it can, says what takes the time, goes on where it was, and refuses bad input in a sentence."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from raysim import limits, train
from raysim.analysis import Replay
from raysim.cli import app
from raysim.cli.decide import show_candidates
from raysim.config import ConfigError, make_config
from raysim.config.identity import IDENTITY, Setting
from raysim.forecast.forecast import forecast
from raysim.forecast.gains import coded, limit, other_ways, priced
from raysim.network.costs import Expected, FleetCosts, load_costs
from raysim.network.presets import parse_network
from raysim.network.step_times import Lognormal
from raysim.network.topology import FREE
from raysim.pipeline.prepare import prepare
from raysim.records import Run
from raysim.replication.local import LocalSteps
from raysim.screening.candidates import SUMS, canonical, every
from raysim.sweeps.budget import Budget
from raysim.sweeps.conclusion import fastest_words
from raysim.sweeps.contenders import MOST, Candidate, by_promise, choose
from raysim.sweeps.decide import DecisionState, Question, evaluated
from raysim.sweeps.trial import step_costs, trial_figures

KEYS = {"name": "small", "data": "digits", "model": "mlp", "num_stages": 3, "num_microbatches": 2, "batch_size": 16}
RUN = ["digits-cnn", "model=mlp", "num_stages=3", "num_microbatches=2", "steps=4", "evaluate_every_steps=4"]
SLOW, FAR = "200kbps", "10gbps+30ms"


def decide(*words):
    return CliRunner().invoke(app, ["decide", *words])


@pytest.fixture(scope="module")
def dense():
    return forecast(make_config({**KEYS, "steps": 100, "num_replicas": 2}), device="T4")


@pytest.mark.parametrize("network", [SLOW, FAR, "20mbps+5ms", "free"])
def test_causes_add_up_to_the_step(dense, network):
    wire = parse_network(network)
    parts = dense.timed().parts(wire)
    assert sum(parts) == pytest.approx(dense.step_s(wire), rel=1e-9)
    assert min(parts) >= -1e-12
    assert parts.latency == pytest.approx(dense.step_s(wire) - dense.step_s(wire.without_latency))


def test_no_codec_of_links_exceeds_the_limit(dense):
    for network in (SLOW, FAR):
        wire = parse_network(network)
        settings = [each for each in every(3, 1, None) if each.replica_gradient == "Identity"]
        gains = [each.speedup for each in priced(settings[:6], dense, wire)]
        assert len(gains) == 6
        assert max(gains) <= limit(dense, wire) * (1 + 1e-9)
    assert limit(dense, FREE) == pytest.approx(1, abs=1e-3)  # what hosts add to each byte


def test_price_of_a_setting_is_that_of_its_own_forecast(dense):
    """Without building the model again; also of a replica method, whose transfers replace dense's."""
    wire, costs = parse_network(SLOW), FleetCosts(gpu_hour=2.0, egress_gb=0.1, step_times=Lognormal(0.1))
    for setting in (Setting("TopK(0.1)", "Quantize(8)"), Setting(replica_gradient="PowerSGD(2)")):
        (price,) = priced([setting], dense, wire, costs)
        own = forecast(dense.config.changed(**setting._asdict()), device="T4")
        assert price.step_s == pytest.approx(own.step_s(wire), rel=1e-12)
        assert price.expected[:4] == pytest.approx(own.expected(costs, wire)[:4], rel=1e-12)
        assert price.step_s < price.expected.step_s


def test_way_without_a_network_takes_the_same_time_on_every_network():
    alone = forecast(make_config({**KEYS, "steps": 100}), device="T4")
    ways = [
        {way.name: way for way in other_ways(alone, parse_network(network), device="T4")} for network in (SLOW, FAR)
    ]
    steps = [each["one machine, without a network"].step_s for each in ways]
    assert steps[0] == steps[1] < alone.step_s(parse_network(FAR))
    for way in ways[0].values():
        own = forecast(alone.config.changed(**way.changes), device="T4")
        assert way.step_s == pytest.approx(own.step_s(parse_network(SLOW)), rel=1e-12)
    for each in ways:
        assert [way.speedup for way in each.values()] == sorted((way.speedup for way in each.values()), reverse=True)


def test_decision_ends_with_prices_where_latency_takes_the_time(tmp_path, monkeypatch):
    out, figures = tmp_path / "out", tmp_path / "figures.json"
    words = [*RUN, "--network", FAR, "--device", "T4", "--out", str(out)]
    done = decide(*words, "--json", str(figures))
    assert done.exit_code == 0, done.output
    last = done.stdout.splitlines()[-2]
    assert last.startswith(f"Decision: Stay dense on {FAR}. Latency takes the time, not bytes:")
    assert "one machine, without a network" in done.stdout
    assert "Compute: analytic, T4 at 0.4 of its datasheet's dense 16-bit peak.\n" in done.stdout
    assert sorted(path.name for path in out.iterdir()) == ["compute.json", "decision.json"]
    written = json.loads(figures.read_text())
    assert written == json.loads((out / "decision.json").read_text())
    assert all(each["outcome"] == "no gain on this network" for each in written["candidates"])
    assert math.fsum(written["parts"].values()) == pytest.approx(written["dense_step_s"])
    monkeypatch.setattr("raysim.sweeps.decide.forecast", None)  # nothing is priced again
    again = decide(*words, "--resume")
    assert again.exit_code == 0, again.output
    assert again.stdout.splitlines()[-1] == last
    other = decide(*["steps=8" if word == "steps=4" else word for word in words], "--resume")
    assert other.exit_code == 2
    assert "`base.steps` must be 4, as in the study to resume, but got 8." in " ".join(other.output.split())


def test_a_decision_has_the_money_of_a_simulated_step(tmp_path):
    file, figures = tmp_path / "costs.toml", tmp_path / "figures.json"
    file.write_text('currency = "EUR"\ngpu_hour = 2.0\negress_gb = 0.1\n')
    words = [*RUN, "--network", FAR, "--device", "T4", "--out", str(tmp_path / "out"), "--costs", str(file)]
    done = decide(*words)
    assert done.exit_code == 0, done.output
    simulated = CliRunner().invoke(
        app, ["simulate", *RUN, "--network", FAR, "--device", "T4", "--costs", str(file), "--json", str(figures)]
    )
    assert simulated.exit_code == 0, simulated.output
    (row,) = json.loads(figures.read_text())["networks"]
    money = load_costs(file).sentence(Expected(**row["expected"]))
    assert money.startswith("1,000 steps: ")
    printed = " ".join(done.stdout.split())
    assert f"{money} ({load_costs(file).words()}.)" in printed
    assert printed.endswith(f"times as many samples a second. {money}")
    file.write_text("gpu_hour = 3.0\n")
    again = decide(*words, "--resume")
    assert again.exit_code == 2
    assert "`costs" in again.output


def test_counted_exchange_is_that_of_the_method_itself(dense, monkeypatch):
    """Float32 averages of local steps are priced by one exchange of zeros; run with drawn values, they send the same."""
    config = dense.config.changed(replica_gradient="DiLoCo(10)")
    counted = forecast(config, device="T4")
    monkeypatch.setattr(LocalSteps, "exact", False)
    drawn = forecast(config, device="T4")
    assert counted.averages
    for one, other in zip(counted.averages, drawn.averages, strict=True):
        assert one._replace(transfers=None) == other._replace(transfers=None)
        assert one.transfers.tolist() == other.transfers.tolist()


def test_sums_of_tied_parameters_are_priced_and_the_fastest_goes_with_every_other_setting():
    values = {"steps": 100, "num_stages": 2, "schedule": "GPipe"}
    tied = forecast("topics-gpt", "model.tied=true", *(f"{key}={value}" for key, value in values.items()), device="T4")
    wire = parse_network("20mbps")
    alone, both = Setting(tied_gradient="PowerSGD(8)"), Setting("TopK(0.1)", "Quantize(8)", tied_gradient="PowerSGD(8)")
    plan = coded(alone, tied)
    for setting, beside in ((alone, tied), (both, tied), (both, plan)):
        (price,) = priced([setting], beside, wire)
        own = forecast(tied.config.changed(**setting._asdict()), device="T4")
        assert price.step_s == pytest.approx(own.step_s(wire), rel=1e-12)
    assert [each for each in every(2, 1, 100, tied=True) if each.tied_gradient != IDENTITY] == [
        canonical(Setting(tied_gradient=method)) for method in SUMS
    ]


HARMS = st.lists(st.tuples(*[st.integers(0, 5)] * 3), max_size=20)


@given(figures=HARMS, by_loss=st.booleans())
def test_who_races_is_beaten_by_nobody_in_speed_and_harm(figures, by_loss):
    candidates = [
        Candidate(Setting(f"TopK({i})"), 1 + speed, difference=loss - 2, error=error)
        for i, (speed, loss, error) in enumerate(figures)
    ]
    choose(candidates, by_loss=by_loss)
    left = [each for each in candidates if each.open]
    assert len(left) <= MOST
    assert bool(left) == bool(candidates)
    keys = [(-each.speedup, each.error, max(each.difference, 0.0) if by_loss else 0.0) for each in left]
    for key in keys:
        assert not any(other != key and all(a <= b for a, b in zip(other, key, strict=True)) for other in keys)
    if left and not by_loss:
        assert min(each.error for each in left) == min(each.error for each in candidates)


def test_race_begins_with_fastest_settings_whose_loss_at_once_is_within_margin():
    prices = {"a": (2.0, 0.005), "b": (9.0, 0.5), "c": (4.0, None), "d": (5.0, -0.3), "e": (3.0, 0.02)}
    candidates = [Candidate(Setting(name), speedup, difference=gap) for name, (speedup, gap) in prices.items()]
    assert "".join(each.setting.forward for each in by_promise(candidates, 1.0)) == "dcabe"
    assert "".join(each.setting.forward for each in by_promise(candidates, math.nan)) == "bdcea"  # without a screen


def test_priced_candidates_have_their_money_in_files_and_in_the_table(tmp_path, capsys):
    costs = FleetCosts(currency="EUR", gpu_hour=3.6)
    question = Question(KEYS | {"steps": 4}, parse_network(SLOW), device="T4", costs=costs)
    begun = DecisionState.begin(question, str(tmp_path / "out"), resume=False)
    with begun.locked():
        begun.price(lambda text: None)
    again = DecisionState.begin(question, str(tmp_path / "out"), resume=True)
    assert again.candidates == begun.candidates
    own = [each for each in again.candidates if each.step_s is not None]
    assert [each.expected.money for each in own] == pytest.approx([3 * each.step_s * 3.6 / 3600 for each in own])
    assert all(each.expected is None for each in again.candidates if each.step_s is None)
    show_candidates(again)
    assert capsys.readouterr().out.count(" EUR ") == len(own) > 3


def test_a_race_without_a_trained_setting_names_the_fastest_one():
    mild, strong = Candidate(Setting("Quantize(8)"), 2.0, difference=0.01), Candidate(Setting("TopK(0.1)"), 4.26)
    assert (
        fastest_words([mild, strong, Candidate(Setting("Sign"))])
        == " The fastest, TopK(0.1) / Identity, is 4.26 times as fast."
    )
    assert fastest_words([mild]).endswith("is 2.00 times as fast and changes the loss by +0.01 at once.")
    assert not fastest_words([Candidate(Setting("Sign"))])


def test_race_of_a_decision_is_priced_on_its_device_on_any_machine(tmp_path, buckets, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "one"))
    tried = Setting("TopK(0.1)", "TopK(0.1)")
    question = Question({**KEYS, "steps": 4}, parse_network(SLOW), device="T4", tried=(tried,))
    out = f"{buckets.make()}/decision"
    decision = DecisionState.begin(question, out, resume=False)
    with decision.locked():
        decision.price(lambda _: None)
        decision.screen(lambda _: None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "other"))
    study = DecisionState.begin(question, out, resume=True).study(Budget.parse("1h"))
    run = train(study.config(study.overrides_at(study.grid[0])), engine="inline", out=tmp_path / "run")
    objective = next(each for each in study.objectives if each.kind == "step_s")
    (step,) = Replay(run, profile=decision.compute, transport=objective.transport).step_s([objective.network])
    (own,) = Replay(run, transport=objective.transport).step_s([objective.network])
    assert step.value != own.value
    assert step_costs(study.objectives, [run], study.pricing, ()) == [step.value]
    assert trial_figures(study.objectives, [run], study.pricing, ())[objective.name].value == step.value


def test_a_decision_ends_with_its_screen_if_dense_has_no_loss_to_take_a_share_of(tmp_path):
    run = {**KEYS, "steps": 4, "loss": "tests.support.tasks:below_zero", "metrics": ["loss"]}
    question = Question(run, parse_network(SLOW), device="T4", tried=(Setting("TopK(0.1)", "TopK(0.1)"),))
    decision = DecisionState.begin(question, str(tmp_path / "decision"), resume=False)
    with decision.locked():
        decision.price(lambda _: None)
        with pytest.raises(
            ConfigError, match=r"dense has a loss of -7\.\d+, and harm is a share of it, .* this one\.$"
        ):
            decision.screen(lambda _: None)
    assert decision.ended == "priced"


def test_evaluations_of_a_race_by_the_loss_take_a_third_of_its_training_at_most():
    """A training takes three forwards of each sample, and an evaluation two, one for each mode; it has at least 128 samples."""
    text = {
        "data": {"name": "topics", "length": 16},
        "model": {"name": "gpt", "width": 8, "num_heads": 1},
        "num_stages": 1,
        "batch_size": 8,
    }
    for steps, own in ((4, 128), (60, 240), (10**6, None)):
        plan = prepare(make_config(text | {"steps": steps})).plan
        assert evaluated(plan) == (own or plan.num_test_samples) <= plan.num_test_samples
    given = prepare(make_config(text | {"steps": 4, "evaluate_samples": 200})).plan
    by_accuracy = prepare(make_config({**KEYS, "steps": 4})).plan
    assert [evaluated(plan) for plan in (given, by_accuracy)] == [200, by_accuracy.num_test_samples]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("ray")
def test_decision_prices_screens_races_and_concludes(tmp_path, monkeypatch):
    released: list[bool] = []
    monkeypatch.setattr(limits, "release_memory", lambda: released.append(True))
    out = tmp_path / "out"
    words = [*RUN, "--network", SLOW, "--out", str(out)]
    done = decide(*words, "--budget", "8min")
    assert done.exit_code == 0, done.output
    assert "At initial weights a screen says little about training" in done.stdout
    assert "What became of each setting" in done.stdout
    assert "\nCompute: pooled over " in done.stdout
    assert done.stdout.splitlines()[-1].startswith(f"Decision: On {SLOW}")
    assert {"screen", "study.toml", "race", "decision.json"} <= {path.name for path in out.iterdir()}
    written = json.loads((out / "decision.json").read_text())
    assert written["ended"] == "raced"
    assert released  # the screen's, for the trials
    kept = {path.parents[1] for path in out.glob("race/trials/*/checkpoints/step-*")}
    assert all(Run(folder).status != "finished" for folder in kept)
    assert all(each["outcome"] or each["verdict"] for each in written["candidates"])
    again = decide(*words, "--budget", "20min", "--resume")
    assert again.stdout.splitlines()[-1] == done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        (None, "[", "Expecting value"),
        (None, "[]", "it holds no object."),
        (None, "[" * 100_000, "its brackets are nested more than 50 deep."),
        ("question", [1], "`question` must be a valid dictionary, but got [1]."),
        ("ended", "soon", "`ended` must be '', 'priced', 'screened' or 'raced', but got 'soon'."),
        ("ended", "priced", "`dense_step_s` and `parts` must be given once prices are done."),
        ("decision", 3, "`decision` must be a valid list, but got 3."),
        ("code", [1], "`code` must be a valid string, but got [1]."),
        ("dense_step_s", None, "`dense_step_s` must be a valid number, but got None."),
        ("dense_step_s", 10**400, "`dense_step_s`"),
        ("most_speedup", math.nan, "`most_speedup` must be a finite number, but got nan."),
        ("parts", {"compute": "x"}, "`parts.compute` must be a valid number"),
        ("ways", [{"name": "none"}], "`ways.0.changes` must be given."),
        ("candidates", "none", "`candidates` must be a valid list, but got 'none'."),
        ("candidates", [3], "`candidates.0`"),
        ("candidates", [{"forward": 3, "speedup": 1.0}], "`candidates.0.setting.forward` must be a valid string"),
        ("spent_s", "long", "`spent_s` must be a valid number"),
    ],
)
def test_a_damaged_decision_is_not_resumed(tmp_path, key, value, sentence):
    question = Question(KEYS | {"steps": 4}, parse_network(SLOW))
    begun = DecisionState.begin(question, str(tmp_path / "out"), resume=False)
    with begun.locked():
        pass
    assert DecisionState.begin(question, str(tmp_path / "out"), resume=True).ended == ""
    file = tmp_path / "out" / "decision.json"
    file.write_text(value if key is None else json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(ConfigError) as error:
        DecisionState.begin(question, str(tmp_path / "out"), resume=True)
    assert sentence in str(error.value)
    assert str(error.value).startswith(f"Nothing to resume: {file} cannot be read: ")
