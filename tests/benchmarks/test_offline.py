"""The check of a GPU machine without a network, tried on the CPU."""

import subprocess
import sys
from pathlib import Path

import pytest

OFFLINE = Path(__file__).parents[2] / "benchmarks" / "offline"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_step_of_the_check_ends_well_on_a_cpu(tmp_path):
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    bundle = [sys.executable, OFFLINE / "bundle.py", tmp_path / "bundle", "--python", python]
    subprocess.run(bundle, check=True, capture_output=True, timeout=300)
    check = [sys.executable, tmp_path / "bundle" / "check.py", "--device", "cpu", "--out", tmp_path / "out"]
    done = subprocess.run(check, check=True, capture_output=True, text=True, timeout=900)
    outcomes = done.stdout.partition("\n\n== ")[0]
    assert "laws: ended well" in outcomes
    assert "ended with" not in outcomes
    assert (tmp_path / "out" / "summary.txt").read_text() in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_runs_of_a_study_are_trained_without_ray_and_read_as_one_study(tmp_path):
    from raysim.analysis import load

    study = tmp_path / "mine.toml"
    study.write_text(
        'base = "digits-cnn"\nseeds = [0, 1]\nsampler = "grid"\nengine = "inline"\nobjectives = ["loss_on"]\n'
        '[[baselines]]\nname = "dense"\nset = { forward = "Identity" }\n[space]\nforward = ["TopK(0.1)"]\n'
    )
    program = [sys.executable, str(OFFLINE / "train_study.py")]
    out = tmp_path / "out"
    out.mkdir()
    subprocess.run([*program, "plan", str(study), str(out / "runs.json")], check=True, timeout=120)
    train = [*program, "train", str(out / "runs.json"), str(out), "--processes", "2", "--set", "steps=3"]
    subprocess.run(train, check=True, timeout=400)
    results = load(out)
    assert set(results.runs["status"]) == {"finished"}
    assert len(results.runs) == 4
