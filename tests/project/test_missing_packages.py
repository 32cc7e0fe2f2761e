"""Packages that a command does not need may be missing, and one that it needs is named before anything starts."""

import subprocess
import sys

import pytest

RUNS = """
import importlib.metadata as metadata, sys
for name in ("ray", "numcodecs", "optuna", "matplotlib", "plotly", "tensorboardX"):
    sys.modules[name] = None  # as if it were not installed
version = metadata.version
def known(name):
    if name in sys.modules and sys.modules[name] is None:
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = known
"""

INLINE = """
import raysim
from raysim import analysis
run = raysim.train("digits-cnn", "steps=2", "num_stages=2", "evaluate_samples=8", engine="inline", out=sys.argv[1])
assert run.status == "finished" and run.row["ray"] is None, run.row
assert len(raysim.Run(run.folder).steps) == 2
"""

CODECS = """
from raysim_benchmarks.bench.codecs import bench_codecs
assert bench_codecs([1 << 12], ["normal"], ["Quantize(4)"], others=False, rounds=(1, 1))["rows"]
"""


def python(code, *arguments):
    return subprocess.run([sys.executable, "-c", RUNS + code, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("code", [INLINE, CODECS], ids=["inline", "codecs"])
def test_optional_packages_may_be_missing(tmp_path, code):
    done = python(code, str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr


SAID = {
    'raysim.train("digits-cnn", "steps=2")': "`engine` = 'ray' needs the package ray",
    '__import__("raysim_benchmarks.bench.codecs").bench.codecs.bench_codecs([1 << 12], ["normal"], ["MX"])': "numcodecs, which",
}


def test_missing_required_package_is_named(tmp_path):
    tried = "\n".join(f"tell(lambda: {call})" for call in SAID)
    done = python(
        f"import raysim\ndef tell(call):\n    try: call()\n    except ValueError as error: print(error)\n{tried}"
    )
    assert done.returncode == 0, done.stderr
    for line, sentence in zip(done.stdout.splitlines(), SAID.values(), strict=True):
        assert sentence in line
