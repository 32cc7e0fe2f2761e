"""A user's code that ends the process, or whose errors have no text: the run fails, and says at which stage and step."""

import pytest
from typer.testing import CliRunner

from raysim.cli import app
from raysim.pipeline.errors import StageError
from raysim.records import Run
from raysim.training.train import train

MODULE = """
import sys
from torch import nn


class UnspeakableError(ValueError):
    def __str__(self):
        raise RuntimeError("no words")


ERRORS = {
    "exit": lambda: sys.exit(0),
    "exit_words": lambda: sys.exit("enough"),
    "silent": lambda: (_ for _ in ()).throw(UnspeakableError()),
    "long": lambda: (_ for _ in ()).throw(ValueError("x" * 10_000_000)),
    "surrogate": lambda: (_ for _ in ()).throw(ValueError("a\\udcffb")),
    "empty": lambda: (_ for _ in ()).throw(ValueError()),
}


class Layer(nn.Module):
    def __init__(self, kind, when):
        super().__init__()
        self.layer, self.kind, self.when, self.calls = nn.Linear(64, 64), kind, when, 0

    def forward(self, x):
        self.calls += x.device.type != "meta" and len(x) > 1
        if (self.when == "training" and self.calls > 6) or (self.when == "evaluation" and not self.training and self.calls > 6):
            ERRORS[self.kind]()
        return self.layer(x)


def model(shape, kind, when):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), Layer(kind, when), nn.Linear(64, 10))
"""

SAID = {
    "exit": "SystemExit: 0",
    "exit_words": "SystemExit: enough",
    "silent": "UnspeakableError",
    "long": "ValueError: xxx",
    "surrogate": "ValueError: a",
    "empty": "ValueError",
}


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "failing_layers.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def arguments(kind, when):
    model = ["model=failing_layers:model", f"model.kind={kind}", f"model.when={when}"]
    return [
        *model,
        "num_stages=2",
        "steps=12",
        "checkpoint_every_steps=1",
        "evaluate_every_steps=2",
        "evaluate_samples=64",
    ]


@pytest.mark.parametrize("kind", SAID)
def test_failing_layer_is_located_in_the_error(tmp_path, kind):
    folder = tmp_path / "run"
    with pytest.raises(StageError) as error:
        train("digits-cnn", *arguments(kind, "training"), out=folder, engine="inline")
    assert f", step 1: {SAID[kind]}" in str(error.value)
    assert str(error.value).startswith("stage 1, ")
    assert len(str(error.value)) < 5000
    run = Run(folder)
    assert run.status == "failed"
    assert SAID[kind] in run.row["error"]


def test_layer_failing_in_evaluation_is_located_in_the_error(tmp_path):
    with pytest.raises(StageError, match=r"^stage 1, evaluation after 2 steps: UnspeakableError$"):
        train("digits-cnn", *arguments("silent", "evaluation"), out=tmp_path / "run", engine="inline")
    assert Run(tmp_path / "run").status == "failed"


@pytest.mark.parametrize("when", ["training", "evaluation"])
def test_exit_call_in_a_run_gives_nonzero_exit_code(tmp_path, when):
    words = ["train", "digits-cnn", *arguments("exit", when), "--engine", "inline", "--out", str(tmp_path / "run")]
    outcome = CliRunner().invoke(app, words)
    assert outcome.exit_code == 1
    assert "SystemExit: 0" in outcome.stderr
    again = CliRunner().invoke(app, [*words, "--resume"])
    assert "othing to resume" not in again.stderr


def test_exit_outside_a_stage_is_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr("raysim.training.run.Training._steps", lambda self, step: exit(0))
    with pytest.raises(StageError, match="SystemExit: 0, by a call of the user's code"):
        train("digits-cnn", "steps=2", out=tmp_path / "run", engine="inline")
    monkeypatch.setattr("raysim.config.read_config", lambda *_: exit(0))
    outcome = CliRunner().invoke(app, ["train", "digits-cnn"])
    assert outcome.exit_code == 1
