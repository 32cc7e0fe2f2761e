"""The packages as a user finds them: names to complete, types, a user's own files beside them, and runs that say what they are."""

import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import raysim

ROOT = Path(__file__).parents[2]


def test_packages_list_their_exports():
    from raysim import analysis

    assert dir(raysim) == sorted(raysim.__all__)
    assert dir(analysis) == sorted(analysis.__all__)
    for package in (raysim, analysis):
        for name in package.__all__:
            assert getattr(package, name) is not None


@pytest.mark.parametrize(
    "room", ["codecs", "compressors", "replication", "schedules", "network", "workloads", "config", "records"]
)
def test_packages_define_their_exports(room):
    package = import_module(f"raysim.{room}")
    assert [name for name in getattr(package, "__all__", ()) if not hasattr(package, name)] == []


@pytest.mark.parametrize("package", ["analysis", "sweeps"])
def test_user_package_of_same_name_coexists(package, tmp_path):
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("mine = True")
    code = f"import {package}, raysim; assert {package}.mine; print(raysim.{package}.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).parts[-3:] == ("raysim", package, "__init__.py")


def test_analysis_is_importable_by_short_name_in_a_clone():
    assert import_module("analysis").load is raysim.analysis.load


def test_run_summary_has_setting_steps_status_and_quality(report_runs):
    run = raysim.Run(report_runs / "topk-s1")
    words = repr(run)
    for part in ("forward=TopK(0.1)", "6 steps", "finished", f"accuracy {run.row['final_accuracy_on']:.4f}"):
        assert part in words
    assert ": dense, " in repr(raysim.Run(report_runs / "dense-s1"))


def test_prices_have_bandwidth_and_latency_as_numbers(report_runs):
    frame = raysim.analysis.replay(report_runs / "topk-s1", ["100mbps", "1gbps+20ms"])
    assert frame["bandwidth_bps"].tolist() == [100e6, 1e9]
    assert frame["latency_s"].tolist() == [0.0, 0.02]


@pytest.mark.parametrize("within", ["1%", "one"])
def test_non_numeric_margin_gives_one_sentence_error(within, report_runs):
    results = raysim.analysis.load(report_runs)
    with pytest.raises(raysim.analysis.AnalysisError) as error:
        raysim.analysis.settings(results, within=within)
    assert str(error.value).startswith(
        "`within` must be a number, in points of accuracy or per cent of the loss, but got"
    )


def test_workflows_pin_their_actions_by_commit():
    """A tag can be moved to other code; a commit cannot."""
    files = list((ROOT / ".github" / "workflows").glob("*.yml"))
    used = [line.strip() for path in files for line in path.read_text().splitlines() if "uses:" in line]
    assert len(used) > 5
    assert [line for line in used if not re.fullmatch(r"- uses: [\w./-]+@[0-9a-f]{40} # v[\d.]+", line)] == []


def test_version_is_the_same_everywhere():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {version} " in (ROOT / "CHANGELOG.md").read_text()
    for plugin in ROOT.glob("*/pyproject.toml"):
        assert tomllib.loads(plugin.read_text())["project"]["version"] == version, plugin
