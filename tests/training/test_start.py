"""Imports that the start of a run does without: each takes a second, and every stage is a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from raysim.workloads.data import load_data


def test_workers_digits_and_trials_need_few_libraries_and_neither_home_nor_user_name(tmp_path):
    code = """
import pwd, sys
known = pwd.getpwuid, pwd.getpwnam
def unknown(*_): raise KeyError("no such user")
pwd.getpwuid = pwd.getpwnam = unknown
import raysim.pipeline.worker
from raysim.workloads.data import load_data
load_data("digits", {}, 0)
print([name for name in ("sklearn", "scipy", "pandas", "ray", "numba") if name in sys.modules])
import raysim.cli, raysim.training.run
from raysim.engine.connection import user_here, _token_file
from raysim.storage.files import cache_folder
from raysim.config.keys import model_title
print(user_here(), _token_file(), cache_folder(), model_title("hf", "~nobody-here/x"))
pwd.getpwuid, pwd.getpwnam = known  # which Ray needs
import raysim.sweeps.trial, raysim.probing, raysim.nn
print("torch._dynamo" in sys.modules)
"""
    named = ("HOME", "USER", "LOGNAME", "RAYSIM_CACHE")
    environment = {name: value for name, value in os.environ.items() if name not in named} | {"TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    imported, places, compiler = done.stdout.splitlines()
    assert (imported, compiler) == ("[]", "False")
    assert str(tmp_path) in places


def test_digits_equal_scikit_learn():
    from sklearn.datasets import load_digits

    bunch, data = load_digits(), load_data("digits", {}, 0)
    ours = np.concatenate([split.images.reshape(len(split), -1) for split in (data.train, data.test)])  # type: ignore[attr-defined]
    labels = np.concatenate([split.labels for split in (data.train, data.test)])  # type: ignore[attr-defined]
    order = np.lexsort(np.column_stack([ours, labels]).T)
    theirs = np.lexsort(np.column_stack([bunch.data, bunch.target]).T)
    assert np.array_equal(ours[order], bunch.data[theirs])
    assert np.array_equal(labels[order], bunch.target[theirs])


def test_kernel_cache_falls_back_to_private_folder():
    """Numba would refuse to import them; processes that it starts share the folder, and it goes with the process."""
    code = """
import os, subprocess, sys
os.access = lambda *arguments, **options: False
import raysim
print(os.environ["NUMBA_CACHE_DIR"], os.path.isdir(os.environ["NUMBA_CACHE_DIR"]))
child = "import os, raysim; print(os.environ['NUMBA_CACHE_DIR'])"
print(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout)
"""
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    folder, there, inherited = done.stdout.split()
    assert there == "True"
    assert inherited == folder
    assert not Path(folder).exists()
