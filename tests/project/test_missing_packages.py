"""Packages that a command does not need may be missing, and one that it needs is named before anything starts."""

import subprocess
import sys

import pytest

CODE = """
import importlib.metadata as metadata, sys
for name in ("ray", "numcodecs", "optuna", "matplotlib", "plotly", "tensorboardX"):
    sys.modules[name] = None  # as if it were not installed
version = metadata.version
def known(name):
    if name in sys.modules and sys.modules[name] is None:
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = known

import raysim
from raysim import analysis
run = raysim.train("digits-cnn", "steps=2", "num_stages=2", "evaluate_samples=8", engine="inline", out=sys.argv[1])
assert run.status == "finished" and run.row["ray"] is None, run.row
assert len(raysim.Run(run.folder).steps) == 2
from raysim_benchmarks.bench.codecs import bench_codecs
assert bench_codecs([1 << 12], ["normal"], ["Quantize(4)"], others=False, rounds=(1, 1))["rows"]
for call in (lambda: raysim.train("digits-cnn", "steps=2"), lambda: bench_codecs([1 << 12], ["normal"], ["MX"])):
    try:
        call()
    except ValueError as error:
        print(error)
"""


@pytest.mark.slow
def test_optional_packages_may_be_missing_and_required_ones_are_named(tmp_path):
    words = [sys.executable, "-c", CODE, str(tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ray, numcodecs = done.stdout.splitlines()
    assert "`engine` = 'ray' needs the package ray" in ray
    assert "numcodecs, which" in numcodecs
