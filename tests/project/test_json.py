"""`--json`: every command with a result prints it as one JSON object, with the documented fields and nothing else."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from raysim.cli import app

ROOT = Path(__file__).parents[2]
STREAMS = {"submit"}  # prints the output of a job
ON_RAY = ("sweep", "calibrate")

SITES = '[sites.home]\nhosts = 2\nbandwidth = "1gbps"\n'
COMMANDS = {
    "advise": "--layers 4 --width 64 --length 32 --vocabulary 100 --devices 2xT4 --network 1gbps+30ms",
    "screen": "digits-cnn num_stages=2 --only-tried --try forward=TopK(0.1)",
    "train": "digits-cnn steps=4 num_stages=2 evaluate_samples=8 forward=TopK(0.1) --engine inline --out fresh",
    "sweep": "quickstart steps=10 --trials 2 --out study",
    "studies": "",
    "replay": "run --network 100mbps+30ms --network free",
    "simulate": "digits-cnn --device T4 --network 100mbps+30ms",
    "place": "digits-cnn num_stages=2 --device T4 --network sites.toml",
    "profile": "digits-cnn num_stages=2 --steps 1 --out profile.json",
    "calibrate": "",
    "report": "run --network 100mbps+30ms --only",
    "export": "run model",
    "recipes": "",
    "sites": "sites.toml",
    "pack": "run packed",
    "keys": "model gpt",
}


def documented():
    """Return the fields of each command in docs/records.md."""
    table = (ROOT / "docs" / "records.md").read_text(encoding="utf-8").partition("## JSON of commands")[2]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE)
    return {command: fields_of(text) for command, text in rows}


def fields_of(text):
    first = text.partition(": ")[0]  # what follows are the fields of its entries
    return re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", first))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("json")
    (folder / "sites.toml").write_text(SITES)
    words = ["digits-cnn", "steps=4", "num_stages=2", "evaluate_samples=8", "profile_every_steps=1"]
    done = CliRunner().invoke(app, ["train", *words, "--engine", "inline", "--out", str(folder / "run"), "--json"])
    assert json.loads(done.stdout)["status"] == "finished"
    return folder


def test_every_command_with_a_result_has_a_documented_json():
    group: Any = get_command(app)
    commands = {name: group.get_command(None, name) for name in group.commands}
    having = {name for name, command in commands.items() if "--json" in {o for p in command.params for o in p.opts}}
    assert having == set(commands) - STREAMS
    assert set(documented()) <= having
    assert set(COMMANDS) == set(documented())


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ON_RAY])
def test_the_output_is_one_object_with_the_documented_fields(folder, command, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr("raysim.training.export.save_pretrained", lambda run, folder, adapter: None)  # of `hf` alone
    done = CliRunner().invoke(app, [command, *COMMANDS[command].split(), "--json", "-"])
    assert done.exit_code == 0, done.output
    assert list(json.loads(done.stdout)) == documented()[command]


@pytest.mark.slow
@pytest.mark.parametrize("command", ON_RAY)
def test_the_output_on_ray_is_one_object_with_the_documented_fields(folder, command):
    words = [sys.executable, "-m", "raysim.cli", command, *COMMANDS[command].split(), "--json"]
    environment = os.environ | {"RAYSIM_CACHE": str(folder / "cache")}
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr
    assert list(json.loads(done.stdout)) == documented()[command]


def test_a_file_is_written_beside_the_tables(folder, monkeypatch):
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(app, ["keys", "study", "--json", "keys.json"])
    assert "Figures: keys.json" in done.stdout
    assert "meaning" in done.stdout
    assert list(json.loads(Path("keys.json").read_text())) == ["keys"]
