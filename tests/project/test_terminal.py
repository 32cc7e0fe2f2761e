"""Texts of strangers on a terminal: nothing in them is markup, an emoji or a control character."""

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from records_made import write_run
from rich.table import Table
from typer.testing import CliRunner

from raysim.cli import app
from raysim.console import PlainConsole

ROOT = Path(__file__).parents[2]
ODD = [
    "[/x]",
    "a[/x]",
    "[bold]x",
    ":smile:",
    "\x1b[31mred",
    "a\x1b]0;title\x07b",
    "\u202ereversed",
    "[link=http://x]y[/link]",
]


@pytest.mark.parametrize("text", ODD)
def test_terminal_text_loses_only_control_characters(text):
    out = io.StringIO()
    console = PlainConsole(200, file=out)
    table = Table("column", title=text)
    table.add_row(text)
    for shown in (text, table):
        console.print(shown, soft_wrap=True)
        console.print(shown, markup=True, highlight=True)
    plain = re.sub("[\x00-\x08\x0b-\x1f\x7f\u202e]", "\ufffd", text)
    assert out.getvalue().count(plain) == 6
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize("command", ["report", "findings", "replay"])
def test_commands_read_folders_of_any_name(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    name = "[/x]\x1b[31m\u202e:smile:"
    for seed in (0, 1):
        write_run(tmp_path / name / f"{name}-{seed}", seed=seed, finals={"loss_on": 1.0, "accuracy_on": 0.5})
    words = [command, name, *(["--network", "1gbps"] if command == "replay" else [])]
    outcome = CliRunner().invoke(app, words)
    assert outcome.exception is None or isinstance(outcome.exception, SystemExit), outcome.exception
    assert "\x1b" not in outcome.output
    assert "\u202e" not in outcome.output


def test_all_consoles_are_plain():
    made = [
        path
        for folder in ("raysim", "analysis", "sweeps", "benchmarks", "findings")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"(?<!Plain)\bConsole\(", path.read_text(encoding="utf-8")) and path.name != "console.py"
    ]
    assert made == []


def test_help_into_a_closed_pipe_prints_no_error():
    command = f"'{sys.executable}' -m raysim.cli train --help | true"
    ended = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert (ended.stdout, ended.stderr) == ("", "")
