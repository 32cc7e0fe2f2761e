"""The command line as typed: what it prints, lists and suggests, and how it ends."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raysim.cli import app
from raysim.cli.exits import ELSEWHERE
from raysim.cli.options import check_writable
from raysim.records import Run


@pytest.fixture
def called(tmp_path, monkeypatch):
    """The command line in this process, in an empty folder: what is refused there needs no process of its own."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, arguments)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("bench codecs --device cuda", "`--device` = cuda needs a GPU, and torch finds none here."),
        ("bench pipeline --device cuda", "`--device` = cuda needs a GPU, and torch finds none here."),
        ("train digits-cnn device=cuda --engine inline", "`device` = 'cuda' needs a GPU, and torch finds none here."),
        (
            "train digits-cnn device=cuda gpus_per_stage=0",
            "`gpus_per_stage` must be more than 0 with `device` = 'cuda'",
        ),
    ],
)
def test_missing_gpu_is_refused(called, monkeypatch, words, sentence):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = called(*words.split())
    assert done.exit_code == 2, done.output
    assert sentence in " ".join(done.output.split())


@pytest.mark.parametrize(("command", "folder"), list(ELSEWHERE.items()))
def test_a_command_of_a_distribution_that_is_not_installed_says_how_to_get_it(called, monkeypatch, command, folder):
    monkeypatch.setattr("raysim.cli.exits.entry_points", lambda group: ())
    done = called(command, "results")
    assert done.exit_code == 2
    assert f"is in raysim-{folder}, which is not installed: run `pip install ./{folder}` in a clone" in done.stderr


def test_training_prints_links_and_evaluations(called, tmp_path):
    done = called(
        *["train", "digits-cnn", "steps=5", "forward=TopK(0.1)", "backward=Quantize(8)"],
        *["--engine", "inline", "--out", "run"],
    )
    assert done.exit_code == 0, done.stderr
    assert "Sent over 5 steps" in done.stdout
    assert "0 -> 1" in done.stdout
    assert "TopK(0.1)" in done.stdout
    assert "2 <- 3" in done.stdout
    assert "Evaluated after 5 steps" in done.stdout
    assert "finished in" in done.stdout
    assert Run(tmp_path / "run").status == "finished"


def test_divergence_is_reported_and_exits_with_1(called):
    done = called("train", "digits-cnn", "steps=9", "optimizer.learning_rate=1e30", "--engine", "inline")
    assert done.exit_code == 1
    assert "raysim: the run diverged: step" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["recipes", "studies"])
def test_recipes_and_studies_are_listed_with_one_line_descriptions(called, command):
    from raysim.config import recipe_names
    from raysim.sweeps.study_file import study_names

    done = called(command)
    assert done.exit_code == 0
    names = recipe_names() if command == "recipes" else study_names()
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == names
    for line in lines:
        assert len(line) <= 80
        assert line.endswith(".")
        assert line.partition(" ")[2].strip().count(". ") == 0


def test_version_matches_package(called):
    from importlib.metadata import version

    assert called("--version").stdout == f"raysim {version('raysim')}\n"


def test_no_default_is_lost_in_a_help_text(called):
    """Rich takes words in square brackets for markup."""
    for command in ("sweep", "train", "report", "findings"):
        text = " ".join(called(command, "-h").stdout.split())
        assert "(default:" in text
        assert " ." not in text.replace("...", "").replace(" .toml", "").replace(" .csv", "").replace(" .py", "")


def test_options_of_models_and_data_sets_are_listed(called):
    done = called("keys", "model", "cnn")
    assert done.exit_code == 0
    assert "model.width" in done.stdout
    assert "lstm" not in done.stdout
    assert "sdpa` (the default if the model supports it) or `eager`" in " ".join(
        called("keys", "model", "hf").stdout.split()
    )
    assert "data.test_samples" in called("keys", "data").stdout
    assert "sampler" in called("keys", "study").stdout


def test_every_config_key_is_listed_with_help(called):
    from raysim.config import OptimizerConfig, RunConfig

    done = called("keys")
    assert done.exit_code == 0
    assert max(map(len, done.stdout.splitlines())) <= 110
    for prefix, model in (("", RunConfig), ("optimizer.", OptimizerConfig)):
        for name, field in model.model_fields.items():
            assert name == "optimizer" or field.description, name
            assert name == "optimizer" or f" {prefix}{name} " in done.stdout


@pytest.mark.parametrize("stages", ["1", "9"])
def test_bench_of_a_pipeline_has_two_to_eight_stages(called, stages):
    done = called("bench", "pipeline", "--stages", stages)
    assert done.exit_code == 2
    assert "Invalid value for '--stages'" in done.stderr


def test_full_stdout_gives_one_sentence_error(tmp_path):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "raysim.cli", "recipes"],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert done.stderr == "raysim: No space left on device.\n"


def test_second_sigterm_does_not_interrupt_clean_up():
    """As `timeout` sends it: to the command, and to its process group."""
    code = (
        "import os, signal, time\n"
        "from raysim.cli.exits import end_on_sigterm\n"
        "end_on_sigterm()\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(5)\n"
        "except KeyboardInterrupt:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(0.1)\n"
        "    print('cleaned up')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "cleaned up\n"), done.stderr


def test_a_signal_after_the_end_does_not_change_the_exit_code():
    late = "import atexit, os, signal; atexit.register(lambda: os.kill(os.getpid(), signal.SIGHUP))"
    words = f"{late}; import sys; from raysim.cli import main; sys.argv = ['raysim', 'recipes']; main()"
    assert subprocess.run([sys.executable, "-c", words], capture_output=True, timeout=60, check=False).returncode == 0


def test_output_check_keeps_files_of_other_processes(tmp_path, monkeypatch):
    file = tmp_path / "report.html"
    exists = Path.exists

    def written_meanwhile(path):
        found = exists(path)
        if path == file:
            file.write_text("a report")
        return found

    monkeypatch.setattr(Path, "exists", written_meanwhile)
    check_writable("--out", file)
    assert file.read_text() == "a report"
    check_writable("--out", tmp_path / "new.html")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
