"""Lines that a run prints while it goes; an evaluation that is broken off loses no step."""

import re
import threading

import pandas as pd
import pytest

from raysim.pipeline.prepare import prepare
from raysim.records import Run
from raysim.training.checkpoint import checkpoints
from raysim.training.events import Phases
from raysim.training.progress import Pace
from raysim.training.run import Training
from raysim.training.train import train


def test_progress_lines_cover_header_to_evaluation(small, tmp_path, capsys):
    config = small(forward="TopK(0.1)", num_replicas=2, replica_gradient="PowerSGD(2)", evaluate_every_steps=3)
    run = train(config, engine="inline", out=tmp_path / "run", progress=True)
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    first_step = next(place for place, line in enumerate(lines) if line.startswith("step "))
    header = "\n".join(lines[:first_step])
    parameters = sum(
        p.numel() for module in Training(config, engine="inline").workload.modules for p in module.parameters()
    )
    for words in (
        f"{parameters:,} parameters",
        "3 stages, 2 replicas, forward=TopK(0.1) replica_gradient=PowerSGD(2)\n",
        "6 steps",
        "64 samples",
        "20 test samples",
        str(run.folder),
    ):
        assert words in header
    assert "every 3 steps and at the end, with compression on and off" in header
    last = run.steps.iloc[-1]
    assert re.search(
        rf"step 6/6: loss {last['loss']:.4f}, \S+ s a step, \S+ samples/s, 0:00:00 left, \S+ \S+ sent", said.err
    )
    for row in run.evals.to_dict("records"):
        words = f"step {row['step']}: evaluated with compression {row['mode']}: loss {row['loss']:.4f}, accuracy"
        assert words in said.err


def test_tokens_are_counted_for_text(tmp_path, capsys):
    changes = ["steps=1", "data.train_samples=32", "data.test_samples=8", "data.length=8"]
    run = train("topics-gpt", *changes, engine="inline", out=tmp_path / "run", progress=True)
    found = re.search(r"step 1/1: loss \S+ (\S+) s a step, (\S+) tokens/s", capsys.readouterr().err)
    tokens = float(found[2].replace(",", "")) * run.steps["seconds"].iloc[0]
    assert tokens == pytest.approx(8 * run.row["batch_size"], rel=0.01)


def test_long_run_is_announced_once(small):
    training = Training(small(steps=6_000), engine="inline")
    pace = Pace(training)
    said = []
    for step in range(60):
        pace.add({"seconds": 1.0})
        said.append(pace.warning(step + 1))
    (line,) = [line for line in said if line is not None]
    assert "the 5,980 steps that are left will take about 1:39:40 here" in line
    assert said.index(line) < 60
    assert "dtype" not in line
    emulated = Pace(Training(small(steps=6_000, dtype="bfloat16"), engine="inline"))
    emulated.add({"seconds": 30.0})
    assert "makes it shorter. `dtype=float32` does too" in emulated.warning(1)
    short = Pace(Training(small(steps=3_000), engine="inline"))
    for step in range(60):
        short.add({"seconds": 1.0})
        assert short.warning(step + 1) is None


def test_checkpoints_are_written_by_time(small, tmp_path, monkeypatch):
    """With steps of three minutes each, a kill loses one at most; and the bits are those of a run that keeps fewer."""
    config = small(checkpoint_every_steps=100)
    whole = train(config, engine="inline", out=tmp_path / "whole")
    now = [0.0]
    monkeypatch.setattr("raysim.training.run.time.monotonic", lambda: now[0])
    training = Training(config, out=tmp_path / "slow", engine="inline")
    lost = []
    for event in training.events():
        if event.kind == "step":
            kept = checkpoints(tmp_path / "slow" / "checkpoints")
            lost.append(event.row["step"] - (kept[-1].step if kept else 0))
            now[0] += 180.0
    assert max(lost) == 1
    slow = Run(tmp_path / "slow")
    assert slow.steps["loss"].tolist() == whole.steps["loss"].tolist()


def test_interruption_prints_resume_command(small, tmp_path, monkeypatch):
    def interrupt(self, *arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as changed:
        changed.setattr("raysim.engine.inline.InlineEngine.step", interrupt)
        with pytest.raises(KeyboardInterrupt) as caught:
            train(small(), engine="inline", out=tmp_path / "run")
    assert caught.value.__notes__ == [
        f"To continue, train with the same arguments and out={str(tmp_path / 'run')!r}, resume=True."
    ]
    assert train(small(), engine="inline", out=tmp_path / "run", resume=True).status == "finished"


def test_training_from_python_is_silent_unless_asked(small, tmp_path, capsys):
    train(small(steps=1), engine="inline", out=tmp_path / "run")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("forward", "modes"), [("TopK(0.5)", ["on", "off"]), ("Identity", ["off"])])
def test_evaluation_reports_progress_and_one_pass_is_enough_without_compression(small, tmp_path, forward, modes):
    config = small(steps=1, batch_size=4, num_microbatches=2, forward=forward)
    training = Training(config, out=tmp_path / "run", engine="inline")
    seen = []
    for event in training.events():
        if event.kind == "evaluating":
            seen.append((event.row["turn"], event.row["mode"], event.row["samples"]))
        elif event.kind == "eval":
            again = training.engine.evaluate(event.row["mode"])
            assert training.plan.task.results(again.sums)["loss"] == event.row["loss"]
    window = 2 * 3 * 4  # two batches a stage
    assert seen == [(turn, mode, samples) for turn, mode in enumerate(modes) for samples in (0, min(window, 20))]
    assert Run(tmp_path / "run").evals["mode"].tolist() == ["on", "off"]


def test_interrupted_evaluation_loses_no_step(small, tmp_path):
    """Steps are kept before their evaluation, which is done again when the run goes on."""
    config = small(forward="EF21(TopK(0.3))", checkpoint_every_steps=100, evaluate_every_steps=3)
    whole = train(config, engine="inline", out=tmp_path / "whole")
    for broken_at in (3, 6):
        folder = tmp_path / str(broken_at)
        events = Training(config, out=folder, engine="inline").events()
        for event in events:
            if event.kind == "eval" and event.row["step"] == broken_at:  # links on are evaluated, links off are not
                events.close()
                break
        assert checkpoints(folder / "checkpoints")[-1].step == broken_at
        again = train(config, engine="inline", out=folder, resume=True)
        for table in ("steps", "evals"):
            frames = [
                getattr(run, table).drop(columns=["seconds", "update_s"], errors="ignore") for run in (whole, again)
            ]
            pd.testing.assert_frame_equal(*frames)


def test_an_evaluation_on_a_part_of_the_test_data_reads_its_first_samples(small, tmp_path):
    whole = train(small(steps=2), engine="inline", out=tmp_path / "whole")
    data = {"name": "digits", "train_samples": 64, "test_samples": 7}
    less = train(small(steps=2, data=data), engine="inline", out=tmp_path / "less")
    part = train(small(steps=2, evaluate_samples=7), engine="inline", out=tmp_path / "part")
    columns = ["loss", "accuracy", "predictions"]
    pd.testing.assert_frame_equal(part.evals[columns], less.evals[columns])
    assert part.evals["predictions"].tolist() == [7, 7]
    assert whole.evals["predictions"].tolist() == [20, 20]
    assert part.steps["loss"].tolist() == whole.steps["loss"].tolist()


def test_run_seconds_include_all_parts(small, tmp_path):
    run = train(small(), engine="inline", out=tmp_path / "run")
    parts = run.row["start_s"] + run.steps["seconds"].sum() + run.evals["seconds"].sum()
    assert 0 < run.row["start_s"] < parts <= run.row["seconds"]


def test_slow_start_reports_what_it_waits_for(small, tmp_path, monkeypatch):
    monkeypatch.setattr("raysim.training.events.FIRST_S", 0.01)
    said, spoken = [], threading.Event()

    def say(line):
        said.append(line)
        spoken.set()

    def late(function):
        def wait_first(*arguments):
            spoken.clear()
            assert spoken.wait(60)
            return function(*arguments)

        return wait_first

    monkeypatch.setattr("raysim.training.run.prepare", late(prepare))
    with Phases(say) as told:
        training = Training(small(), engine="inline", out=tmp_path / "run", phases=told)
        training.engine.step = late(training.engine.step)
        events = training.events()
        next(events)
        assert told.current is None  # the first step is done
        events.close()
    words = [re.sub(r" since \d+ s$", "", line) for line in said]
    assert list(dict.fromkeys(words)) == ["waiting for the data and the model", "waiting for the first step"]
