"""A run from end to end: its records, its resumption after any death, and the effect of every setting."""

import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from config_fields import FIELD_CHANGES
from configurations import SMALL
from engines import losses_of, start
from pipelines import DROPOUT, RUNS
from runs import break_off, same_records
from typer.testing import CliRunner

from raysim import Run, load_weights, train
from raysim.cli import app
from raysim.cli.train import show_run
from raysim.codecs import TopK
from raysim.compressors import ErrorFeedback
from raysim.config import ConfigError, make_config
from raysim.engine.inline import InlineEngine
from raysim.schedules.actions import rows_to_csv
from raysim.schedules.families import GPipe, OneFOneB
from raysim.training.checkpoint import checkpoints
from raysim.training.run import Training

COMMAND = [sys.executable, "-m", "raysim.cli", "train"]


def test_run_writes_its_tables(small, tmp_path):
    run = train(small(forward="TopK(0.1)", evaluate_every_steps=3), engine="inline", out=tmp_path / "run")
    assert run.status == "finished"
    assert run.steps["step"].tolist() == list(range(6))
    assert run.steps["epoch"].tolist() == [0, 0, 0, 0, 1, 1]
    assert run.evals[["step", "mode"]].values.tolist() == [[3, "on"], [3, "off"], [6, "on"], [6, "off"]]
    links = run.links
    assert len(links) == 6 * 2 * 2
    assert (links["packets"] == 4).all()
    assert links.groupby("step")["wire_bytes"].sum().tolist() == run.steps["wire_bytes"].tolist()
    sparse = links[links["codec"] == "TopK(0.1)"]
    assert set(sparse["direction"]) == {"forward"}
    assert (sparse["wire_bytes"] * 7 < sparse["dense_bytes"]).all()
    measured = sparse[sparse["fidelity"].notna()]
    assert sorted(measured["step"].unique()) == [0, 2, 4]
    assert ((measured["fidelity"] > 0) & (measured["fidelity"] < 1)).all()
    np.testing.assert_allclose(measured["fidelity"], measured["gain"], rtol=1e-12)  # a projection's are equal
    row = run.row
    assert row["final_loss_on"] == run.evals["loss"].iloc[-2]
    assert row["wire_bytes"] == run.steps["wire_bytes"].sum()
    assert not (run.folder / "parts").exists()  # type: ignore[union-attr]
    assert {path.name for path in run.folder.iterdir()} == {  # type: ignore[union-attr]
        *(f"{name}.parquet" for name in ("run", "steps", "evals", "links", "actions")),
        "checkpoints",
    }


def test_the_same_seed_gives_the_same_run(small, tmp_path):
    config = small(**RUNS["stochastic"])
    one, other = (train(config, engine="inline", out=tmp_path / name) for name in "ab")
    same_records(one, other)


def test_random_state_of_caller_is_kept(small, tmp_path):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    train(small(**RUNS["gpt-dropout"], steps=2), engine="inline", out=tmp_path / "run")
    assert torch.equal(torch.rand(3), expected)


def test_runs_of_several_threads_have_the_losses_of_runs_in_turn(small, tmp_path):
    """With dropout and weights drawn from the random state that all threads share."""
    configs = [small(**DROPOUT, seed=seed, steps=2, num_stages=2) for seed in range(2)]
    alone = [train(config, engine="inline", out=tmp_path / f"alone{i}") for i, config in enumerate(configs)]
    with ThreadPoolExecutor(2) as pool:
        runs = pool.map(lambda i: train(configs[i], engine="inline", out=tmp_path / f"at-once{i}"), range(2))
    assert [run.steps["loss"].tolist() for run in runs] == [run.steps["loss"].tolist() for run in alone]


def test_a_diverged_run_is_recorded_as_such(small, tmp_path):
    run = train(
        small(model={"name": "tests.support.models:exploding"}, num_stages=None, cuts=["2"]),
        engine="inline",
        out=tmp_path / "run",
    )
    row = run.row
    assert (row["status"], row["diverged_step"]) == ("diverged", 0)
    assert row["diverged_at"] == "0F0: activation at boundary 0, forward"
    assert len(run.steps) == 0
    with pytest.raises(ConfigError, match="is diverged: there is nothing to resume"):
        train(small(), out=tmp_path / "run", resume=True)


def test_divergence_by_a_high_learning_rate_keeps_the_steps_before(small, tmp_path):
    run = train(small(optimizer={"learning_rate": 1e30}), engine="inline", out=tmp_path / "run")
    assert run.status == "diverged"
    assert len(run.steps) == run.row["diverged_step"] > 0


def test_divergence_in_last_step_is_found_by_evaluation(small, tmp_path):
    run = train(small(optimizer={"learning_rate": 1e30}, steps=1), engine="inline", out=tmp_path / "run")
    row = run.row
    assert (row["status"], row["diverged_step"]) == ("diverged", 1)
    assert row["diverged_at"].startswith("evaluation with compression off: ")


def test_an_interrupted_run_resumes_to_the_same_bits(small, tmp_path):
    config = small(**RUNS["feedback"], steps=6, evaluate_every_steps=2)
    whole = train(config, engine="inline", out=tmp_path / "whole")
    for stop_after in (1, 4):
        folder = tmp_path / str(stop_after)
        break_off(Training(config, engine="inline", out=folder), stop_after)
        broken = Run(folder)
        assert broken.status == "interrupted"
        assert broken.steps["step"].tolist() == list(range(stop_after))
        resumed = train(config, engine="inline", out=folder, resume=True)
        assert resumed.row["resumed"] == 1
        same_records(resumed, whole)


@pytest.mark.parametrize("recorded", ["AVX2", None])
def test_resume_with_changed_options_is_reported(small, tmp_path, monkeypatch, recorded):
    """Sums of other instructions differ in their last bits; records of older versions do not tell."""
    training = Training(small(), engine="inline", out=tmp_path / "run")
    if recorded is None:
        del training._row["cpu_capability"]
    else:
        training._row |= {"cpu_capability": recorded, "cpu": "Xeon"}
    break_off(training)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    resumed = Training(small(), engine="inline", out=tmp_path / "run", resume=True)
    warnings = [event.row["reason"] for event in resumed.events() if event.kind == "warning"]
    row = Run(tmp_path / "run").row
    if recorded is None:
        assert (warnings, row["warning"]) == ([], None)
    else:
        start = "The run was recorded with AVX2 (Xeon) and resumes with AVX512 ("
        assert [sentence.startswith(start) for sentence in warnings] == [True]
        assert row["warning"] == warnings[0]
    assert (row["cpu_capability"], bool(row["cpu"])) == ("AVX512", True)


def test_another_configuration_is_not_resumed(small, tmp_path):
    break_off(Training(small(), engine="inline", out=tmp_path / "run"))
    with pytest.raises(ConfigError) as caught:
        train(small(seed=1), engine="inline", out=tmp_path / "run", resume=True)
    assert str(caught.value) == "`seed` must be 0, as in the run to resume, but got 1."
    for change, sentence in (
        ({"forward": "TopK(0.1)"}, "`forward` must be 'Identity', as in the run to resume"),
        ({"model": {"name": "cnn"}}, r"`model\.width` must be 4, as in the run to resume, but got None"),
        ({"data": {"name": "digits", "train_samples": 64}}, r"`data\.test_samples` must be 20"),
        ({"num_stages": 4}, "`cuts` must be "),
        ({"num_stages": None}, "`cuts` must be "),
    ):
        with pytest.raises(ConfigError, match=sentence):
            train(small(**change), engine="inline", out=tmp_path / "run", resume=True)
    assert train(small(), engine="inline", out=tmp_path / "run", resume=True).status == "finished"


def test_run_killed_during_stage_start_resumes(small, tmp_path):
    training = Training(small(), engine="inline", out=tmp_path / "run")
    training.recorder.open()
    training.recorder.write_run(training._row)
    training.recorder.close()  # and then the process was gone
    assert train(small(), engine="inline", out=tmp_path / "run", resume=True).status == "finished"


def test_non_empty_folder_is_refused(small, tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(ConfigError, match="is not empty"):
        train(small(), engine="inline", out=tmp_path)
    with pytest.raises(ConfigError, match="Nothing to resume: there is no run in"):
        train(small(), engine="inline", out=tmp_path, resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_weights_load_into_the_uncut_model(small, tmp_path):
    from raysim.pipeline.prepare import prepare
    from raysim.workloads.models import build_model

    config = small()
    run = train(config, engine="inline", out=tmp_path / "run")
    data = prepare(config).data
    model = build_model("cnn", {"width": 4}, data.shape, seed=9)
    model.load_state_dict(load_weights(run.folder))
    ids = np.arange(len(data.test))
    logits = model.eval()(data.test.inputs(ids, 0, 0, False))
    accuracy = (logits.argmax(-1) == data.test.targets(ids)).float().mean()
    assert accuracy.item() == pytest.approx(run.row["final_accuracy_off"])


@pytest.mark.parametrize("mode", ["on", "off"])
def test_estimated_batchnorm_is_that_of_the_mode(small, tmp_path, mode):
    run = train(small(**RUNS["batchnorm"], forward="TopK(0.2)"), engine="inline", out=tmp_path / "run")
    frame = run.evals.set_index(["batchnorm", "mode"])["loss"]
    assert frame["running", mode] != frame["estimated", mode]
    assert frame["estimated", "on"] != frame["estimated", "off"]


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    """Return a function that trains with some values, each once, and returns what is seen of the run."""
    known: dict[str, dict[str, Any]] = {}

    def of(values, kind):
        key = json.dumps([kind == "loss", values], sort_keys=True)
        if key not in known:
            config = make_config({**SMALL, **values})
            known[key] = {"loss": losses(config)} if kind == "loss" else observe(config, tmp_path_factory.mktemp("run"))
        return known[key][kind]

    return of


def losses(config):
    """Return the losses of the steps alone: records, checkpoints and evaluations take most of a run's time."""
    engine = start(config)
    return [loss for step in range(engine.plan.num_steps) for loss in losses_of(engine, step)]


def observe(config, folder):
    training = Training(config, engine="inline", out=folder)
    list(training.events())
    run, plan = Run(training.folder), training.plan
    records = (
        [len(getattr(run, table)) for table in ("steps", "evals", "links", "actions")],
        run.decisions["throughput"].dropna().tolist(),
        run.actions["step"].tolist(),
        run.row["name"],
        run.evals["predictions"].tolist(),
        run.evals.columns.tolist(),
        checkpoints(run.folder / "checkpoints")[0].step,  # type: ignore[arg-type]
        sorted(path.name for path in run.folder.iterdir()),  # type: ignore[union-attr]
    )
    cost = (run.links[["boundary", "packets", "wire_bytes"]].values.tolist(), plan.memories, plan.rows)
    return {"cost": cost, "records": records}


@pytest.mark.parametrize(
    "field", [field for field, change in FIELD_CHANGES.items() if change.changes in ("loss", "cost", "records")]
)
def test_every_field_changes_the_run(observed, field):
    """A setting that did nothing would be a lie in `run.parquet`."""
    change = FIELD_CHANGES[field]
    base = {"profile_every_steps": 2, "checkpoint_every_steps": 0, "steps": 3, **change.base}
    assert observed(base, change.changes) != observed({**base, **change.values}, change.changes)


def test_an_interrupted_command_prints_how_to_resume(tmp_path, monkeypatch):
    step, folder = InlineEngine.step, tmp_path / "run"

    def interrupted(engine, number, *signals):
        if number == 3:
            raise KeyboardInterrupt
        return step(engine, number, *signals)

    monkeypatch.setattr(InlineEngine, "step", interrupted)
    words = ["digits-cnn", "steps=100000", "checkpoint_every_steps=2", "--engine", "inline", "--out", str(folder)]
    done = CliRunner().invoke(app, ["train", *words])
    assert done.exit_code == 130
    assert f"raysim train {' '.join(words)} --resume" in done.output
    assert Run(folder).status == "interrupted"
    assert checkpoints(folder / "checkpoints")


@pytest.mark.slow
def test_ctrl_c_ends_cleanly_and_prints_resume_command(tmp_path):
    folder = tmp_path / "run"
    process = subprocess.Popen(
        [
            *COMMAND,
            "digits-cnn",
            "steps=100000",
            "checkpoint_every_steps=5",
            "--engine",
            "inline",
            "--out",
            str(folder),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a suite in the background ignores it
    )
    while not checkpoints(folder / "checkpoints"):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (
        f"raysim train digits-cnn steps=100000 checkpoint_every_steps=5 --engine inline --out {folder} --resume"
        in errors
    )
    assert "Traceback" not in errors
    assert Run(folder).status == "interrupted"


def test_another_schedule_in_the_same_file_is_not_resumed(small, tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text(rows_to_csv(OneFOneB().rows(3, 4)))
    changes = {"schedule": f"Custom({str(file)!r})"}  # a configuration reads its file once, when it is made
    training = Training(small(**changes), engine="inline", out=tmp_path / "run")
    events = training.events()
    for _ in range(3):
        next(events)
    events.close()
    assert Run(tmp_path / "run").row["schedule_rows"] == file.read_text()
    file.write_text(rows_to_csv(GPipe().rows(3, 4)))
    with pytest.raises(ConfigError, match=r"^`schedule` must have the rows of the run to resume, but Custom\(.*others"):
        train(small(**changes), engine="inline", out=tmp_path / "run", resume=True)
    file.write_text(rows_to_csv(OneFOneB().rows(3, 4)))
    resumed = train(small(**changes), engine="inline", out=tmp_path / "run", resume=True)
    same_records(resumed, train(small(), engine="inline", out=tmp_path / "whole"))


def test_warning_suggests_key_of_its_direction():
    remedies = {
        (direction, key): ErrorFeedback(TopK(0.1), key=key).remedy(direction)
        for direction in ("forward", "backward")
        for key in ("slot", "sample", "link")
    }
    assert {where for where, text in remedies.items() if "key='sample'" in text} == {
        ("forward", "slot"),
        ("forward", "link"),
    }
    assert {where for where, text in remedies.items() if "key='slot'" in text} == {
        ("backward", "sample"),
        ("backward", "link"),
    }


def test_evaluations_state_the_kind_of_their_statistics(small, tmp_path, capsys):
    show_run(train(small(), engine="inline", out=tmp_path / "plain"))
    assert "batchnorm" not in capsys.readouterr().out
    show_run(train(small(**RUNS["batchnorm"]), engine="inline", out=tmp_path / "both"))
    assert "estimated" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("direction", "method", "link", "remedy"),
    [
        ("forward", "ErrorFeedback(TopK(0.05))", "1 -> 2", "`key='sample'`"),
        ("backward", "Quantize(1)", "1 <- 2", "milder"),
    ],
)
def test_negative_link_fidelity_warns_once(small, tmp_path, direction, method, link, remedy):
    config = small(**{direction: ["Identity", method]}, steps=20, optimizer={"name": "adamw", "learning_rate": 3e-3})
    training = Training(config, out=tmp_path / "run", engine="inline")
    warned = [event.row for event in training.events() if event.kind == "warning"]
    run = Run(tmp_path / "run")
    below = run.links[run.links["fidelity"] < 0]
    assert len(below) > 1
    assert [row["step"] for row in warned] == [below["step"].min()]
    assert run.row["warning"] == warned[0]["reason"]
    first = below[below["step"] == below["step"].min()].iloc[0]
    assert run.row["warning"].startswith(
        f"Step {first['step']}: link {link} with {method} has a fidelity of {first['fidelity']:.2f}: the decoded tensor is further"
    )
    assert remedy in run.row["warning"]


def test_good_fidelity_gives_no_warning(small, tmp_path):
    training = Training(small(forward="TopK(0.1)", backward="Quantize(4)"), out=tmp_path / "run", engine="inline")
    assert not [event for event in training.events() if event.kind == "warning"]
    assert Run(tmp_path / "run").row["warning"] is None
