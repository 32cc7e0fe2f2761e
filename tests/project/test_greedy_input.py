"""Input without end or measure is refused in one sentence, before memory or time is spent on it."""

import os

import pytest
from typer.testing import CliRunner

from raysim.cli import app

LONG = "x" * 5000
LIST = str(["Identity"] * 100_000)
TRAIN = ["train", "digits-cnn", "--engine", "inline"]
ON_A100 = ["simulate", "digits-cnn", "--device", "A100", "--network"]

FILES = {
    "exits.py": "import sys\nsys.exit(3)\n",
    "exits_when_called.py": "import sys\ndef model(shape): sys.exit(3)\n",
    "exits_when_run.py": """
import sys
from torch import nn
class Layer(nn.Module):
    def forward(self, x): sys.exit(3)
def model(shape): return nn.Sequential(Layer(), nn.Linear(64, 10))
""",
    "far.csv": "source,target,bandwidth_bps,latency_s\n0,1000000000,1e6,0\n",
    "deep.toml": "bandwidth_bps = " + "[" * 100_000,
    "deep.json": "[" * 1_000_000,
}


@pytest.fixture
def called(tmp_path, monkeypatch):
    """The command line in a folder with odd files, devices and a pipe among them."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    for ending in ("toml", "csv", "json", "txt"):
        (tmp_path / f"endless.{ending}").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe.toml")
    os.mkfifo(tmp_path / "pipe.csv")
    return lambda *arguments: CliRunner().invoke(app, arguments)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([*TRAIN, "num_stages=100000"], "`num_stages` must be at most 1024"),
        ([*TRAIN, f"forward={LIST}"], "`forward` must be a list of at most 1024 entries"),
        ([*TRAIN, f"cuts={LIST}"], "`cuts` must be a list of at most 1023 entries"),
        ([*TRAIN, "forward=" + "[" * 100_000], "`forward` in brackets must be TOML"),
        ([*TRAIN, "forward=" + "TopK(" * 20_000], "A compressor is written in at most 1000 characters"),
        ([*TRAIN, "steps=" + "9" * 5000], "`steps` must be an integer of fewer digits"),
        ([*TRAIN, "batch_size=2147483647"], "`num_microbatches` must divide"),
        ([*TRAIN, "model.width=100000000000000000000"], "`model.width` must be from -2147483647 to 2147483647"),
        ([*TRAIN, "model.width=2000000000"], "Model `cnn` cannot be made with model.width="),
        (["train", "topics-gpt", "model.num_blocks=1000000"], "`model.num_blocks` must be an integer from 1 to 1024"),
        ([*TRAIN, f"name={LONG}"], "`name` must be the name of a folder, of at most 200 letters"),
        ([*TRAIN, f"model={LONG}:model"], "Model `xxx"),
        ([*TRAIN, "model=exits:model"], "cannot be imported: SystemExit: 3"),
        ([*TRAIN, "model=exits_when_called:model"], "failed: SystemExit: 3"),
        ([*TRAIN, "num_stages=2", "model=exits_when_run:model"], "Layer `0` failed"),
        ([*TRAIN, "schedule=Custom('endless.csv')"], "it is not a regular file"),
        ([*TRAIN, "schedule=Custom('pipe.csv')"], "it is not a regular file"),
        ([*TRAIN, "clock=far.csv"], "Every pair of hosts must have a link, but got none between 0 and 1"),
        ([*TRAIN, "clock=100mbps", "profile=endless.json"], "`profile` must be a device"),
        ([*TRAIN, "--out", LONG], "File name too long"),
        ([*TRAIN, "--resume", "--out", LONG], "File name too long"),
        (["train", "topics-gpt", "data=text", "data.path=endless.txt"], "a file or folder that exists"),
        (["train", "topics-gpt", "data=text", f"data.path={LONG}"], "File name too long"),
        (["train", "endless.toml"], "it is not a regular file"),
        (["train", "pipe.toml"], "it is not a regular file"),
        (["train", "deep.toml"], "is not TOML"),
        (["train", f"{LONG}.toml"], "File name too long"),
        ([*ON_A100, "far.csv"], "Every pair of hosts must have a link"),
        ([*ON_A100, "endless.csv"], "it is not a regular file"),
        ([*ON_A100, "deep.toml"], "its brackets are nested more than 50 deep (in 'deep.toml')"),
        ([*ON_A100, LONG], "A network is a preset"),
        ([*ON_A100, "1gbps", "model.width=2000000000"], "cannot be made with model.width="),
        ([*ON_A100, "1gbps", "--json", LONG], "File name too long"),
        (["simulate", "digits-cnn", "--profile", "deep.json", "--network", "1gbps"], "is not valid JSON"),
        (["simulate", "digits-cnn", "--profile", "endless.json", "--network", "1gbps"], "it is not a regular file"),
        (["replay", LONG, "--network", "1gbps"], "File name too long"),
        (["report", LONG], "File name too long"),
        (["sweep", "endless.toml"], "it is not a regular file"),
        (["sweep", "exits.py"], "cannot be imported: SystemExit: 3"),
        (["sweep", "quickstart", "--trials", "99999999999999999999"], "`trials` must be at most 1000000"),
        (["sweep", "quickstart", "--seeds", "1000000000"], "`seeds` must be at most 10000"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_huge_input_gives_one_sentence_error(called, arguments, sentence):
    done = called(*arguments)
    assert done.exit_code == 2, done.output
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert sentence in done.stderr
    assert len(done.stderr) < 5000
