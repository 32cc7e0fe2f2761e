"""A screen: exact for dense, equal to an evaluation and to a probe, right about massive activations, and ready to train."""

import json
import math
from contextlib import closing
from shutil import copytree
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tomli_w
import torch
from hf_variants import CAUSAL, TEXT
from massive import KEYS
from scipy import stats
from typer.testing import CliRunner

from raysim.analysis.report import compose
from raysim.analysis.report.page import Chart, Table, Text
from raysim.cli import app
from raysim.cli.screen import _beside
from raysim.compressors import Plain, parse
from raysim.config import ConfigError, make_config
from raysim.config.identity import DENSE, Setting
from raysim.engine.inline import InlineEngine
from raysim.forecast.gains import coded
from raysim.network.presets import parse_network
from raysim.network.profile import END_COSTS
from raysim.pipeline.prepare import prepare
from raysim.probing import probe
from raysim.probing.candidates import LinkCandidate
from raysim.records import Run
from raysim.screening import screen
from raysim.screening.bench import Bench
from raysim.screening.findings import findings
from raysim.screening.outputs import study_of
from raysim.screening.passes import Passes
from raysim.screening.prices import Prices
from raysim.screening.verdicts import (
    HOPELESS,
    NO_GAIN,
    WORTH,
    Difference,
    changed,
    differences,
    verdict,
    why_hopeless,
)
from raysim.sweeps.study_file import read_study
from raysim.training.events import HopelessError
from raysim.training.rows import breaks
from raysim.training.run import Training
from raysim.workloads.hf_model import load_model
from raysim.workloads.splits import DataShape
from raysim.workloads.task import make_task

TENSOR = Setting("Quantize(8)", "Quantize(8)")
BLOCK = Setting("Quantize(8, per='block', block=8)", "Quantize(8, per='block', block=8)")
TOPK = Setting("TopK(0.005)", "Identity")
TWO_SHOT = Setting(replica_gradient="TwoShot(Quantize(8))")
SPARSE = Setting(replica_gradient="ErrorFeedback(TopK(0.01))")


def config(**changes):
    return make_config(KEYS | changes)


def bench(*, num_batches=1, by_replica=False, **changes):
    workload = prepare(config(**changes))
    return Bench(Passes(workload, num_batches, torch.device("cpu")), by_replica=by_replica)


@pytest.fixture(scope="module")
def screened():
    return screen(config(), [parse_network("1mbps")], tried=[TENSOR, BLOCK, TOPK])


def found(done, setting):
    return next(each for each in done.settings if each.setting == setting)


def test_dense_has_zero_difference_from_itself(screened):
    """A candidate whose packets are exact goes the whole way through links, and changes no bit."""
    one = bench()
    exact = LinkCandidate((Plain(parse("Nonzero").codec),) * 2, one.passes.links)
    outcome = one.passes.run(exact)
    again = differences(one.passes.plan.task, outcome.sums, one._sums)
    assert all((each.difference, each.bound) == (0, 0) for each in again.values())
    for directions in (one._reference.compare(one.passes.gradients()), screened.dense.result.directions):
        assert [(each.cosine, each.norm_ratio, each.error) for each in directions] == [(1.0, 1.0, 0.0)] * 3
    assert all(each.difference == 0 for each in screened.dense.result.measures.values())


def test_massive_activations_break_one_range_for_a_tensor_and_not_one_for_each_block(screened):
    broken, kept = found(screened, TENSOR), found(screened, BLOCK)
    assert screened.dense.result.measures["loss"].value < 0.2 < 2 < screened.chance["loss"]
    assert broken.verdict == HOPELESS
    assert broken.result.measures["loss"].low > 1
    assert kept.verdict == WORTH
    assert abs(kept.result.measures["loss"].difference) < 0.05
    facts = {each.direction: each for each in screened.facts}
    assert facts["forward"].massive
    assert facts["forward"].energy > 0.99


def test_high_fidelity_setting_may_harm_loss(screened):
    """TopK keeps the massive value and so nearly all energy, and drops most of what the model reads."""
    topk = found(screened, TOPK)
    assert min(topk.fidelities("forward")) > 0.99
    assert any(
        "Fidelity misleads here: Quantize(8) / Quantize(8)" in line and "and 1 more" in line
        for line in findings(screened)
    )


@pytest.mark.parametrize("forward", ["Quantize(8)", "TopK(0.1)", "QSGD(4)"])
def test_the_loss_is_that_of_an_evaluation_with_compression_on(forward):
    keys = {"num_microbatches": 1, "batch_size": 8, "evaluate_samples": 16}
    measured = bench(num_batches=2, **keys).measure(Setting(forward, "Identity"))
    workload = prepare(config(**keys, forward=forward))
    engine = InlineEngine(workload)
    engine.start()
    with closing(engine):
        results = workload.plan.task.results(engine.evaluate("on").sums)
    for name in ("loss", "accuracy"):
        assert measured.measures[name].value == pytest.approx(results[name], rel=1e-6)


def test_fidelity_and_bytes_are_those_of_a_probe(tmp_path):
    """On the first activations and the last gradients, which no other link has changed."""
    one = bench()
    own = one.measure(Setting("Quantize(8)", "Quantize(8)")).measured.links
    workload = prepare(config())
    layers = torch.nn.Sequential(*workload.modules)
    with probe(layers, ["0", "1"], ["Quantize(8)"], out=tmp_path / "p", steps=1, every=1, num_microbatches=2):
        for microbatch in one.passes.microbatches:
            loss = workload.plan.task.loss(layers(microbatch.inputs), microbatch.targets, None)
            (loss / 2).backward()
    (folder,) = (tmp_path / "p").glob("1-*")
    probed = Run(folder).links.set_index(["direction", "boundary"])
    ours = {(row["direction"], row["boundary"]): row for row in own}
    assert ours.keys() == set(probed.index)
    for key, row in ours.items():
        assert row["wire_bytes"] == probed.loc[key, "wire_bytes"]
    assert ours["forward", 0]["fidelity"] == pytest.approx(probed.loc[("forward", 0), "fidelity"], rel=1e-12)
    alone = {
        (row["direction"], row["boundary"]): row
        for row in one.measure(Setting("Identity", "Quantize(8)")).measured.links
    }
    assert alone["backward", 1]["fidelity"] == pytest.approx(probed.loc[("backward", 1), "fidelity"], rel=1e-12)


def test_the_noise_is_the_spread_of_the_gradients_of_microbatches():
    one = bench(num_batches=2)
    passes, gradients = one.passes, []
    for microbatch in passes.microbatches:
        modules = torch.nn.Sequential(*(stage.module for stage in passes.stages))
        modules.zero_grad()
        passes.plan.task.loss(modules(microbatch.inputs), microbatch.targets, None).backward()
        gradients.append(torch.cat([p.grad.flatten().double() for p in passes.stages[2].module.parameters()]))
    each = torch.stack(gradients)
    mean = each.mean(0)
    spread = math.sqrt(float((each - mean).square().sum()) / 3 / 2) / float(mean.norm())  # steps of 2 microbatches
    assert one.dense.directions[2].noise == pytest.approx(spread, rel=1e-4)


def test_a_bound_is_students_interval_of_the_paired_differences():
    one = bench()
    task, dense = one.passes.plan.task, one._sums
    sums = dense.copy()
    sums[:, 0] += dense[:, 1] * np.linspace(0.1, 0.9, len(sums))
    loss = differences(task, sums, dense)["loss"]
    each = np.linspace(0.1, 0.9, len(sums))
    half = stats.t.ppf(0.975, len(each) - 1) * each.std(ddof=1) / math.sqrt(len(each))
    assert loss.difference == pytest.approx(0.5)
    assert loss.bound == pytest.approx(half)


def test_replica_gradients_are_averaged_by_the_methods_themselves():
    one = bench(by_replica=True, num_replicas=2)
    mild, strong = one.measure(TWO_SHOT), one.measure(SPARSE)
    assert mild.measures["loss"].difference == strong.measures["loss"].difference == 0
    assert min(each.cosine for each in mild.directions) > 0.99
    assert max(each.error for each in strong.directions) > 0.1
    for each in (mild, strong):
        rows = [row for row in each.measured.links if row["direction"] == "replica_gradient"]
        assert [row["stage"] for row in rows] == [0, 1, 2]
        # a fidelity is 1 - (norm of the error / norm of the dense mean) squared
        errors = [direction.error for direction in each.directions]
        assert [1 - row["fidelity"] for row in rows] == pytest.approx(np.square(errors), abs=1e-5)
    both = one.measure(Setting("TopK(0.5)", "Identity", TWO_SHOT.replica_gradient))
    alone = one.measure(Setting("TopK(0.5)", "Identity"))
    assert both.measures["loss"] == alone.measures["loss"]
    assert both.directions[0].cosine == pytest.approx(alone.directions[0].cosine, abs=1e-3)


def test_screen_changes_no_state():
    torch.manual_seed(3)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    screen(config(), tried=[BLOCK], only_tried=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


@pytest.mark.slow
def test_a_screen_on_ray_has_the_figures_of_one_inline(ray):
    """Two processes, each with a bench of its own, and a replica method."""
    keys: dict[str, Any] = {"num_replicas": 2, "num_microbatches": 1, "cpus_per_stage": 4}
    keys |= {name: f"tests.support.{KEYS[name]}" for name in ("model", "data")}  # as workers on Ray find them
    tried = [TENSOR, TWO_SHOT]
    inline, on_ray = (
        screen(config(**keys), tried=tried, only_tried=True, engine=engine) for engine in ("inline", "ray")
    )
    times = {"encode_s", "decode_s", "codec_s"}
    for ours, theirs in zip(inline.settings, on_ray.settings, strict=True):
        assert ours.setting == theirs.setting
        assert (ours.result.measures, ours.verdict) == (theirs.result.measures, theirs.verdict)
        assert ours.result.directions == theirs.result.directions
        links, others = (
            [{k: v for k, v in row.items() if k not in times} for row in each.result.measured.links]
            for each in (ours, theirs)
        )
        assert links == others
    assert inline.facts == on_ray.facts


def test_forwards_alone_have_the_measures_of_whole_passes():
    forward = Setting(TENSOR.forward)
    whole, alone = (
        bench(),
        Bench(Passes(prepare(config()), 1, torch.device("cpu"), gradients=False), by_replica=False, gradients=False),
    )
    assert alone.dense.measures == whole.dense.measures
    assert alone.measure(forward).measures == whole.measure(forward).measures
    assert not alone.measure(forward).directions


def test_forwards_alone_are_priced_with_dense_gradients():
    """Gradients that were not sent have no measured bytes."""
    done = screen(
        config(),
        [parse_network("1mbps")],
        tried=[Setting(TENSOR.forward)],
        only_tried=True,
        gradients=False,
        device="T4",
    )
    (price,) = done.settings[1].prices.values()
    assert price.speedup > 1


def test_changed_predictions_are_counted_where_targets_count():
    dense = np.array([[0, 1], [2, 3], [4, 5]])
    counted = np.array([[True, True], [True, False], [True, True]])
    assert changed(dense, dense, counted) == Difference(0.0, 0.0, 0.0)
    assert changed(dense + np.array([[0, 1], [0, 1], [0, 0]]), dense, counted).value == pytest.approx(1 / 5)
    assert math.isnan(changed(dense[:1], dense[:1], counted[:1]).bound)


def test_answers_are_matched_after_the_right_tokens():
    shape = DataShape((3,), "int64", 4, target_shape=(3,), has_ignored=True, given=1)
    task = make_task(None, {}, ["exact_match"], shape)
    targets = torch.tensor([[-100, 1, 2], [-100, 1, 2]])
    scores = torch.nn.functional.one_hot(torch.tensor([[0, 1, 2], [1, 1, 3]]), 4).float()
    assert task.results(task.sums(scores, targets, taught=True))["exact_match"] == 0.5
    assert math.isnan(task.results(task.sums(scores, targets))["exact_match"])


def test_verdicts_follow_their_rules():
    known = 2.7  # chance
    assert verdict(None, known, {})[0] == HOPELESS
    assert verdict(Difference(2.5, 2.4, 0.5), known, {"a": 9.0})[0] == HOPELESS
    assert verdict(Difference(2.5, 2.4, 2.0), known, {"a": 9.0})[0] == WORTH  # the bound reaches down to a sixth
    assert verdict(Difference(2.5, 2.4, math.nan), known, {"a": 9.0})[0] == WORTH  # one unit has no bound
    assert verdict(Difference(3.5, 0.6, 0.1), known, {"a": 9.0})[0] == WORTH  # dense knows nothing
    assert verdict(Difference(3.5, 1.0, 0.1), known, {"a": 9.0})[0] == WORTH  # dense is 7 % better than chance
    assert verdict(Difference(0.1, 0.0, 0.0), known, {"a": 1.04, "b": 1.01})[0] == NO_GAIN
    assert verdict(Difference(0.1, 0.0, 0.0), known, {"a": 1.04, "b": 1.06})[0] == WORTH


def test_settings_are_priced_with_their_measured_bytes(screened):
    tensor, dense = found(screened, TENSOR), screened.dense
    assert dense.prices["1mbps"].speedup == 1
    assert tensor.prices["1mbps"].speedup > 1
    assert tensor.wire_bytes < dense.wire_bytes / 3


def test_an_exchange_of_replicas_is_priced_as_in_a_forecast():
    """Also in buckets during the last backward, if the method may."""
    two = {"num_replicas": 2}
    made = bench(by_replica=True, **two)
    prices = Prices(config(**two), made.passes.plan, device="T4", profile=None, transport="nccl")
    for setting in (TWO_SHOT, SPARSE, Setting(replica_gradient="PowerSGD(4)")):
        result = made.measure(setting)
        plans = prices.priced(setting, result.measured, result.accounts), coded(setting, prices.dense)
        for name in END_COSTS[1:]:
            own, its = (getattr(plan.endings[0][1], name) for plan in plans)
            np.testing.assert_allclose(own, its, rtol=1e-3, err_msg=f"{name} of {setting}")


@pytest.mark.parametrize(("error", "noise"), [(0.5021, 0.5023), (0.5023, 0.5021), (0.3, 0.5)])
def test_an_error_stands_on_its_side_of_the_noise(error, noise):
    first, sign, second = _beside(error, noise).split()
    assert sign == ("<" if error < noise else ">")
    assert (float(first) < float(second)) is (error < noise)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The files of a screen by the command line."""
    folder = tmp_path_factory.mktemp("screen")
    (folder / "run.toml").write_text(tomli_w.dumps(KEYS))
    files = {"--out": "records", "--study": "s.toml", "--plot": "p.png", "--json": "f.json"}
    options = [text for option, name in files.items() for text in (option, str(folder / name))]
    tries = ["--try", "forward=Quantize(8)", "--try", "forward=Quantize(8, per='block', block=8)", "--only-tried"]
    result = CliRunner().invoke(app, ["screen", str(folder / "run.toml"), "--network", "1mbps", *tries, *options])
    assert result.exit_code == 0, result.output
    return folder, result.output


def test_the_command_prints_a_verdict_for_each_setting(written):
    folder, output = written
    assert "hopeless at once" in output
    assert "worth training" in output
    assert "one range for a tensor wastes its levels" in output.replace("\n", " ")
    figures = json.loads((folder / "f.json").read_text())
    assert [each["verdict"] for each in figures["settings"]] == ["dense", HOPELESS, WORTH]
    assert (folder / "p.png").read_bytes().startswith(b"\x89PNG")


def test_report_of_a_screen_shows_its_table_and_verdicts(written):
    folder, _ = written
    out = folder / "report.html"
    result = CliRunner().invoke(app, ["report", str(folder / "records"), "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert "1 of 2 settings are worth training" in result.output
    page = compose(folder / "records")
    (table,) = (each for each in page.blocks(Table) if each.key == "settings")
    assert list(table.frame["verdict"]) == ["dense", HOPELESS, WORTH]
    (chart,) = page.blocks(Chart)
    assert {trace["name"] for panel in chart.panels for trace in panel.traces} == {HOPELESS, WORTH}
    assert any("one range for a tensor wastes its levels" in text.text for text in page.blocks(Text))


@pytest.mark.parametrize(
    ("table", "damage", "reason"),
    [
        ("settings", None, "Parquet"),
        ("settings", lambda rows: rows.drop_columns(["reason"]), "cannot be read: there is no column 'reason'."),
        ("screen", lambda rows: rows.slice(0, 0), "cannot be read: screen.parquet must have one row, but has 0."),
        ("tensors", lambda rows: pa.table({"rms": pa.nulls(1_000_001)}), "it has 1,000,001 rows, but"),
    ],
)
def test_a_damaged_screen_is_refused(written, tmp_path, table, damage, reason):
    copytree(written[0] / "records", tmp_path / "records")
    file = tmp_path / "records" / f"{table}.parquet"
    if damage is None:
        file.write_bytes(b"none")
    else:
        pq.write_table(damage(pq.read_table(file)), file)
    result = CliRunner().invoke(app, ["report", str(tmp_path / "records")])
    assert result.exit_code == 2
    assert f"The screen in {tmp_path / 'records'} cannot be read: " in result.output
    assert reason in result.output


def test_screen_records_match_figures(written):
    folder, _ = written
    figures = json.loads((folder / "f.json").read_text())
    settings = pq.read_table(folder / "records" / "settings.parquet").to_pylist()
    assert [row["verdict"] for row in settings] == [each["verdict"] for each in figures["settings"]]
    measures = pq.read_table(folder / "records" / "measures.parquet").to_pylist()
    losses = [row["value"] for row in measures if row["measure"] == "loss"]
    assert losses == [each["measures"]["loss"]["value"] for each in figures["settings"]]
    links = pq.read_table(folder / "records" / "links.parquet").to_pylist()
    assert len(links) == 3 * 4
    assert pq.read_table(folder / "records" / "screen.parquet").to_pylist()[0]["samples"] == 8


@pytest.mark.parametrize("metric", ["accuracy", "perplexity", "massive:surest"])
def test_a_study_judges_settings_as_the_screened_run_does(tmp_path, metric):
    plan = prepare(config(metrics=[metric])).plan
    values = study_of(plan, [parse_network("1gbps")], [BLOCK], KEYS | {"metrics": [metric]}, "ray")
    (file := tmp_path / "s.toml").write_text(tomli_w.dumps({"name": "s", **values}))
    study = read_study(file)
    assert study.objectives[0].quality == plan.task.measures[0]
    assert study.constraints[0].objective == study.objectives[0].name
    assert 100 * study.constraints[0].within == study.objectives[0].measure.margin


def test_screen_study_has_promising_settings_and_trains(written):
    folder, _ = written
    study = read_study(folder / "s.toml")
    assert study.most_trials == 2
    assert study.base["model"] == "massive:model"
    drawn = study.overrides_at({"variant": "x"})
    assert drawn["forward"] == BLOCK.forward
    assert study.config(drawn).batch_size == 8


def test_a_folder_of_transformers_is_screened_and_is_in_the_study(tmp_path, monkeypatch):
    load_model(TEXT._replace(num_classes=256), config=CAUSAL["llama"]).save_pretrained(tmp_path / "weights")
    monkeypatch.chdir(tmp_path)
    keys = ["num_stages=2", "batch_size=4", "num_microbatches=2", "data.length=12", "steps=10"]
    options = [
        "--only-tried",
        "--try",
        "forward=Quantize(8)",
        "--network",
        "1mbps",
        "--device",
        "T4",
        "--study",
        "s.toml",
    ]
    result = CliRunner().invoke(app, ["screen", "weights", *keys, *options])
    assert result.exit_code == 0, result.output
    study = read_study(tmp_path / "s.toml")
    assert study.base["model"] == {"name": "hf", "path": str(tmp_path / "weights")}
    assert study.config({"forward": "Quantize(8)"}).data.options["length"] == 12


def test_dense_is_no_candidate():
    assert Setting() == DENSE
    done = screen(config(), tried=[DENSE, BLOCK, BLOCK], only_tried=True)
    assert [each.setting for each in done.settings] == [DENSE, BLOCK]


@pytest.mark.parametrize(
    "changes",
    [
        {"recompute": True},
        {"schedule": "ZBH1"},
        {"weights": "Stashed"},
        {"num_replicas": 2},
    ],
    ids=str,
)
def test_the_loss_does_not_depend_on_how_the_run_is_trained(screened, changes):
    """Microbatches of the same size hold the same samples; the sum over more of them rounds differently."""
    other = screen(
        config(**changes | {"num_microbatches": 2 // changes.get("num_replicas", 1)}), tried=[BLOCK], only_tried=True
    )
    ours, theirs = (found(done, BLOCK).result for done in (screened, other))
    assert ours.measures["loss"] == theirs.measures["loss"]
    assert [each.cosine for each in ours.directions] == pytest.approx(
        [each.cosine for each in theirs.directions], abs=1e-9
    )


def test_every_tensor_of_a_cut_is_measured():
    done = screen(config(model="own_modules:UNet", data="digits", num_stages=4), tried=[BLOCK], only_tried=True)
    tensors = {(row["boundary"], row["tensor"] or "") for row in found(done, BLOCK).result.measured.links}
    assert tensors == {(i, name) for i, crossing in enumerate(done.plan.boundaries) for name in crossing.shapes}
    assert len(tensors) > 2
    assert {(each.boundary, each.tensor) for each in done.facts} == tensors


def test_default_candidates_fit_the_tensors(screened):
    plain = screen(config(model={"name": "massive:model", "massive": 1.0}, num_replicas=2, num_microbatches=1))
    outliers = "Outliers(Quantize(4, per='row'))"
    assert outliers in {each.setting.forward for each in screened.settings}
    assert outliers not in {each.setting.forward for each in plain.settings}
    assert not any(each.massive for each in plain.facts)
    assert {each.setting.replica_gradient for each in screened.settings} == {"Identity"}
    assert "PowerSGD(4)" in {each.setting.replica_gradient for each in plain.settings}


def test_an_overflow_without_compression_is_an_error():
    with pytest.raises(ConfigError, match="without compression, the gradient of stage 0 holds NaN or infinity"):
        screen(config(dtype="float16", loss_scale=32768), tried=[BLOCK], only_tried=True)


def test_a_branch_is_screened_with_the_weights_of_its_checkpoint(tmp_path):
    run = Training(config(checkpoint_at_steps=[10]), out=tmp_path / "run", engine="inline")
    for _ in run.events():
        pass
    changes = {"evaluate_samples": 16, "num_microbatches": 1}
    done = screen(config(**changes, start=f"{tmp_path / 'run'}@10"), tried=[BLOCK], only_tried=True, num_batches=2)
    evals = Run(tmp_path / "run").evals
    trained = evals[(evals["step"] == 10) & (evals["mode"] == "off")]["loss"].item()
    assert done.dense.result.measures["loss"].value == pytest.approx(trained, rel=1e-6)
    assert trained != pytest.approx(
        screen(config(**changes), tried=[BLOCK], only_tried=True).dense.result.measures["loss"].value
    )


def test_a_run_is_refused_before_its_first_step_if_compression_breaks_trained_weights(tmp_path):
    def outcome(out, **changes):
        still = {"name": "sgd", "learning_rate": 1e-9}
        keys = {"steps": 2, "optimizer": still, "evaluate_every_steps": 0, **changes}
        run = Training(config(**keys), out=tmp_path / out, engine="inline", refuse=why_hopeless)
        try:
            return sum(event.kind == "step" for event in run.events())
        except HopelessError as error:
            assert not (tmp_path / out).exists()
            return str(error)

    assert outcome("dense", checkpoint_at_steps=[2]) == 2
    assert outcome("scratch", forward="Quantize(8)") == 2
    start = {"start": str(tmp_path / "dense")}
    assert outcome("broken", **start, forward="Quantize(8)").startswith("hopeless at once: loss 0.0")
    assert outcome("kept", **start, forward=BLOCK.forward) == 2
    assert outcome("gradients", **start, backward="Quantize(8)") == 2
    assert outcome("later", **start, forward="Quantize(8)", compress_from=3) == 2
    assert outcome("dense-first", **start, forward="AQSGD(Quantize(2))") == 2


@pytest.mark.parametrize(
    ("backward", "changes", "broken"),
    [
        ("Quantize(2)", {}, True),
        ("QSGD(2)", {}, False),  # random, and right on average
        ("Quantize(2)", {"trained": False}, False),
        ("Quantize(2)", {"first_step": -1}, False),
        ("Quantize(8)", {"loss": 9.0}, True),
    ],
)
def test_first_step_of_trained_weights_shows_what_breaks_them(backward, changes, broken):
    facts: dict[str, Any] = {"first_step": 0, "trained": True, "compresses": True, "loss": 1.0} | changes
    facts["compressor"] = lambda *link: parse(backward)
    fidelity = -2.7 if backward != "Quantize(8)" else 0.99
    link = {"replica": 0, "boundary": 0, "direction": "backward", "tensor": None, "fidelity": fidelity}
    plan: Any = SimpleNamespace(**facts)
    assert breaks(plan, 0, facts["loss"], 2.7, [link]) is broken


def test_a_run_whose_compression_breaks_trained_weights_says_so_after_its_first_step(tmp_path):
    def warnings(out, **changes):
        still = {"name": "sgd", "learning_rate": 1e-9}
        run = Training(config(steps=3, optimizer=still, **changes), out=tmp_path / out, engine="inline")
        return [(event.row["step"], event.row["reason"]) for event in run.events() if event.kind == "warning"]

    assert warnings("dense", checkpoint_at_steps=[3]) == []
    start = {"start": str(tmp_path / "dense"), "forward": "QSGD(2)"}
    ((step, reason),) = warnings("broken", **start)
    assert step == 3
    assert "the loss is" in reason
    assert "`raysim screen`" in reason
    assert warnings("kept", **start | {"forward": BLOCK.forward}) == []
