"""Commands that raysim prints are accepted as printed: their words are parsed, and their keys, studies and networks read."""

import re
import shlex
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
from studies import write_study
from typer.testing import CliRunner

from raysim.analysis import load
from raysim.analysis.report.gather import gather
from raysim.analysis.report.page import Text
from raysim.analysis.report.reuse import reproduce_blocks
from raysim.analysis.report.tables import smaller_runs
from raysim.cli import app
from raysim.config import read_config
from raysim.network.presets import parse_network
from raysim.records import Run
from raysim.sweeps.study_checks import check_here
from raysim.sweeps.study_file import read_study

COMMAND = re.compile(r"\braysim (?:train|sweep|screen|report|advise|findings|simulate|replay) [^`\n]*")
LOOP = re.compile(r"for s in ([\d ]+); do (.*); done$")


@pytest.fixture
def called(tmp_path, monkeypatch):
    """The command line in this process, in an empty folder with a blank in its name."""
    folder = tmp_path / "my folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "160")
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


def printed(text):
    """Return the commands in a text; of a loop over seeds, that of the first."""
    lines = [
        loop[2].replace("$s", loop[1].split()[0]) if (loop := LOOP.search(line)) else line for line in text.splitlines()
    ]
    return [found[0].strip() for line in lines for found in COMMAND.finditer(line)]


def accept(command, file=None):
    """Check a command up to where it would train; `file` stands for the FILE that the user fills in. Return what it read."""
    name, *words = [
        word.replace("FILE", str(file)) if word.endswith("=FILE") else word for word in shlex.split(command)[1:]
    ]
    group = typer.main.get_group(app)
    context = group.make_context("raysim", [name, *words])
    options = {}
    if name in group.list_commands(context):
        options = group.get_command(context, name).make_context(name, list(words), parent=context).params
    if name == "screen":  # its keys are a run's
        at = words.index("--network")
        assert all(parse_network(network) for network in words[at + 1 :: 2])
        return read_config(words[0], words[1:at])
    if name == "train":
        return read_config(options["recipe"], options["overrides"] or [])
    if name == "sweep":
        limits = {key: options[key] for key in ("trials", "seeds", "jobs", "confirm", "transport", "budget")}
        study = read_study(options["study"], options["overrides"] or [], race=options["race"], **limits)
        check_here(study)
        return study
    assert options, command
    return options


def made_folder(folder, kind="llama", *, weights=True):
    """Save a tiny model of transformers and a text; return the folder and the text."""
    import transformers
    from hf_variants import CAUSAL

    values: dict[str, Any] = {**CAUSAL[kind], "vocab_size": 256}
    config = transformers.CONFIG_MAPPING[values.pop("model_type")](**values)
    if weights:
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    text = folder.parent / "my text.txt"
    text.write_text("a text of one's own, " * 2000)
    return folder, text


def advised(called, *words):
    """Return the output of `raysim advise` and the commands in it, and in the study's file if there is one."""
    done = called("advise", *words)
    assert done.exit_code == 0, done.output
    return done.output, printed(done.output)


def test_study_named_study_is_swept_by_printed_command(called):
    output, commands = advised(
        called, "topics-gpt", "--devices", "4xT4", "--network", "100mbps", "--study", "study.toml"
    )
    assert commands == ["raysim sweep study.toml"]
    study = accept(commands[0])
    assert study.name == "topics-gpt-on-100mbps"
    headline = re.search(r"Fastest that fits: .*?, (DiLoCo\(\d+\))", output)[1]
    assert any(
        config.replica_gradient == headline or str(config.replica_gradient) == headline for config in study.configs
    )
    assert printed(Path("study.toml").read_text()) == commands


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        ("llama tied", True),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (("gpt2", False), ("llama tied", False), ("gpt2", True))
        ),
    ],
)
def test_advice_study_of_a_folder_has_hosts_and_headline(called, tmp_path, kind, weights):
    folder, text = made_folder(tmp_path / "my folder" / "my model", kind, weights=weights)
    words = [folder, "--length", "12", "--devices", "2xT4", "--network", "1mbps+30ms", "--study", "my study.toml"]
    output, commands = advised(called, *words)
    *screens, sweep = commands
    assert len(screens) == weights  # only trained weights can be screened
    for command in screens:
        assert accept(command, text).num_stages == 2
    assert sweep == "raysim sweep 'my study.toml' data.path=FILE"
    study = accept(sweep, text)
    assert study.name == "my-study"
    for config in study.configs:
        assert config.num_replicas * config.stages == 2
        assert config.batch_size == 16
        assert config.microbatch_size == 1
    headline = re.search(r"Fastest that fits: .*?, (\S+) \(", output)[1]
    assert headline in {str(config.replica_gradient) for config in study.configs}


@pytest.mark.parametrize("read", [1, pytest.param(None, marks=pytest.mark.slow)])
def test_each_profitable_layout_gets_a_study(called, tmp_path, read):
    folder, text = made_folder(tmp_path / "my folder" / "model")
    words = [folder, "--length", "12", "--devices", "4xT4", "--network", "1mbps", "--study", "s.toml"]
    output, _ = advised(called, *words)
    others = re.search(r"Other layouts have their own studies: (.*?)\. Train", output)[1].split("; ")
    assert len(others) > 2
    for other in others[:read]:
        options = shlex.split(other.partition(" by ")[2])
        _, commands = advised(called, *words, *options)
        study = accept(commands[-1], text)
        assert {(config.stages, config.num_replicas) for config in study.configs} == {
            (int(options[1]), int(options[3]))
        }


def test_study_listing_names_omitted_settings(called):
    words = ["topics-gpt", "--devices", "4xT4", "--network", "100mbps", "--local-steps", "10,100,300,500"]
    output, _ = advised(called, *words, "--study", "s.toml")
    assert "Left out, since they do not exchange after the last of 500 steps: DiLoCo(300)." in output
    assert "Left out as known to do harm: " in output
    assert "DiLoCo(10) (harmful: gpt, 0.87 M)" in output


def cut(training):
    """End a training by Ctrl-C after a step."""
    events = training.events()
    for event in events:
        if event.kind == "step":
            events.throw(KeyboardInterrupt())


def test_interrupted_run_resumes_by_printed_command(called, monkeypatch):
    keys = ["steps=3", "num_stages=2", "forward=TopK(0.1, values=Quantize(8, per='row'))", "data.train_samples=64"]
    with monkeypatch.context() as patched:
        patched.setattr("raysim.training.progress.print_progress", cut)
        done = called("train", "digits-cnn", *keys, "batch_size=32", "--engine", "inline", "--out", "a run")
    assert done.exit_code == 130, done.output
    (command,) = printed(done.output)
    accept(command)
    assert called(*shlex.split(command)[1:]).exit_code == 0
    assert Run("a run").status == "finished"


def test_interrupted_sweep_resumes_by_printed_command(called, monkeypatch):
    write_study(Path())

    class Begun:
        begun, address = True, None
        halt = None

        def __init__(self, study, *, out, **_):
            self.study, self.store = study, type("Store", (), {"out": out})

    def stop(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("raysim.sweeps.runner.Sweep", Begun)
    monkeypatch.setattr("raysim.sweeps.progress.show_sweep", stop)
    words = [
        "small.toml",
        "optimizer={name = 'adam', learning_rate = 0.01}",
        "--trials",
        "3",
        "--seeds",
        "5",
        "--race",
        "--budget",
        "2 GPU hours",
    ]
    done = called("sweep", *words, "--out", "results/my sweep")
    assert done.exit_code == 130, done.output
    (command,) = printed(done.output)
    assert "--resume" in shlex.split(command)
    assert (
        accept(command).as_mapping()
        == read_study("small.toml", words[1:2], trials=3, seeds=5, race=True, budget="2 GPU hours").as_mapping()
    )


def test_commands_of_findings_and_reports_are_accepted_as_printed(called, report_runs):
    shutil.copytree(report_runs, "my runs")
    done = called("findings", "my runs", "--untested")
    assert done.exit_code == 0, done.output
    claims = printed(done.output)
    assert len(claims) > 10
    material = gather(load("my runs"), [parse_network("1gbps")])
    texts = [block.text for block in reproduce_blocks(material.jobs[0], material) if isinstance(block, Text)]
    for lead, recipe in pairwise(texts):
        if name := re.search(r"as a recipe: `([^`]+)`", str(lead)):
            Path(name[1]).write_text(str(recipe))
    commands = printed("\n".join(map(str, texts)))
    assert len(commands) >= 4
    for command in {*claims, *commands}:
        accept(command)


@pytest.mark.parametrize("model", ["GPT", "GPT2LMHeadModel"])
def test_commands_of_a_probe_are_accepted_as_printed(called, model):
    rows = [
        {"forward": "TopK(0.1, values=Quantize(8, per='row'))", "num_stages": 2, "num_replicas": 1, "model": model},
        {"replica_gradient": "PowerSGD(4)", "num_stages": 1, "num_replicas": 8, "model": model},
    ]
    for command in printed("\n".join(smaller_runs(rows))):
        accept(command)


def test_the_examples_of_all_commands_are_accepted(called):
    group = typer.main.get_group(app)
    context = group.make_context("raysim", ["keys"])
    for name in group.list_commands(context):
        for line in (group.get_command(context, name).help or "").splitlines():
            for command in printed(line.partition("For example: ")[2]):
                if "results" not in command:  # runs of an earlier example
                    accept(command)
