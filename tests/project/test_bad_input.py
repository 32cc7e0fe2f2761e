"""Bad input of one's own: model, data, loss, weights and plug-ins are refused in one sentence, with exit code 2."""

import logging

import pytest
from hf_variants import CAUSAL
from typer.testing import CliRunner

from raysim.cli import app
from raysim.workloads.hf_model import load_model
from raysim.workloads.splits import DataShape

MODULES = """
from torch import nn
from torch.nn import functional as F


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        if x.sum() > 0:
            x = -x
        return self.head(x.flatten(1))


class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 8), nn.Linear(8, 8), nn.Linear(8, 10)

    def forward(self, x):
        x = self.first(x.flatten(1))
        return self.head(x + self.second(x))


class Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(63, 10)

    def forward(self, x):
        return self.head(x.flatten(1))


def row():
    return nn.Sequential(nn.Flatten(), nn.Linear(63, 10))


def widest(outputs, targets):
    return outputs.sum(2)


widest.higher_is_better = True


def words():
    return [("a word", 0)] * 64, [("a word", 0)] * 64
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with modules, a table, a text, and weights that know a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("bad")
    (folder / "of_mine.py").write_text(MODULES)
    (folder / "no_device.py").write_text("raise RuntimeError('no such device')\n")
    (folder / "houses.csv").write_text("size,price\n" + "".join(f"{i},{2 * i}\n" for i in range(80)))
    (folder / "text.txt").write_text("the quick brown fox\n" * 60)
    load_model(DataShape((12,), "int64", 300, (12,)), config=CAUSAL["llama"]).save_pretrained(folder / "weights")
    for name, count in (("weights", 300), ("larger", 400)):
        tokenizer = Tokenizer(models.WordLevel({f"t{index}": index for index in range(count)}, unk_token="t0"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        (folder / name).mkdir(exist_ok=True)
        tokenizer.save(str(folder / name / "tokenizer.json"))
    return folder


TEXT = ["hf", "data=text", "data.path=text.txt", "data.length=8"]
BAD = {
    "a forward that goes by values": (
        ["digits-cnn", "model=of_mine:Branching"],
        "of_mine.py:12, `if x.sum() > 0:`: symbolically traced variables cannot be used",
    ),
    "no such submodule": (
        ["digits-cnn", "model=of_mine:Skipping", 'cuts=["third"]'],
        "`cuts` must name layers of the model (first, head), but got 'third'.",
    ),
    "layers that do not fit": (
        ["digits-cnn", "model=of_mine:row", "num_stages=2"],
        "Layer `1` failed on a tensor of shape (8, 64): a and b must have same reduction dim, but got [8, 64] X [63, 10].",
    ),
    "layers of a forward that do not fit": (
        ["digits-cnn", "model=of_mine:Narrow", "num_stages=1"],
        "a and b must have same reduction dim",
    ),
    "an unknown column": (
        ["digits-cnn", "model=mlp", "data=table", "data.path=houses.csv", "data.target=cost"],
        "`data.target` must be a column of houses.csv (size, price), but got 'cost'.",
    ),
    "a tokenizer and another vocabulary": (
        [*TEXT, "model.path=weights", "data.tokenizer=larger"],
        "The data has 400 tokens, but 'weights' knows 300.",
    ),
    "no tokenizer for weights that know one": (
        [*TEXT, "model.path=weights"],
        "read as bytes, but 'weights'",
    ),
    "a loss of one's own that fails": (
        ["digits-cnn", "loss=of_mine:widest"],
        "Loss `of_mine:widest` failed on outputs of shape (8, 10) and targets of shape (8,): Dimension out of range",
    ),
    "an option that a loss of one's own does not have": (
        ["digits-cnn", "loss=of_mine:widest", "loss.gamma=2"],
        "Unknown option `loss.gamma` of `of_mine:widest`. Known: none.",
    ),
    "a metric of one's own that fails": (
        ["digits-cnn", "metrics=of_mine:widest"],
        "Metric `widest` must return one number, but failed on outputs of shape (8, 10) and targets of shape (8,): Dimension",
    ),
    "samples that are no tensors": (
        ["digits-cnn", "data=of_mine:words"],
        "The input of sample 0 of `of_mine:words`, training split must be a tensor, an array, or numbers of one shape, but is str.",
    ),
    "weights that do not match": (
        [*TEXT, "model.path=weights", "data.tokenizer=weights", "model.config.num_hidden_layers=6"],
        "lacks the weights",
    ),
    "a codec whose module raises": (["digits-cnn", "forward=no_device:Codec(1)"], "no such device"),
    "a model whose module raises": (["digits-cnn", "model=no_device:build"], "no such device"),
    "data whose module raises": (["digits-cnn", "data=no_device:build"], "no such device"),
    "a loss whose module raises": (["digits-cnn", "loss=no_device:loss"], "no such device"),
    "a module that is not there": (["digits-cnn", "forward=nowhere_at_all:Codec"], "nowhere_at_all"),
}


class Heard(logging.Handler):
    """Keeps the records of torch's log of fake tensors, which would be printed."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)


@pytest.fixture
def logged():
    log, heard = logging.getLogger("torch._subclasses.fake_tensor"), Heard()
    log.addHandler(heard)
    yield heard.records
    log.removeHandler(heard)


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_refused_before_start(folder, logged, monkeypatch, case):
    monkeypatch.chdir(folder)
    arguments, sentence = BAD[case]
    done = CliRunner().invoke(app, ["train", *arguments, "--engine", "inline", "--out", "run"])
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("raysim: ")
    assert sentence in line
    assert not logged
    assert not (folder / "run").exists()
