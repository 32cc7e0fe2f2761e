"""Many runs in one process leave it as it was: no memory, descriptors or threads of ours stay behind."""

import subprocess
import sys

import pytest

RUNS = """
import contextlib, gc, json, os, sys, tempfile, threading
from pathlib import Path

import psutil
import pyarrow

pyarrow.set_cpu_count(1)  # its pools start threads when they are first busy, in any run
pyarrow.set_io_thread_count(1)

from raysim import train
from raysim.config import make_config

sys.path.insert(0, {support!r})
from configurations import SMALL

GRPC = {{"event_engine", "default-executo", "resolver-execut"}}  # pools of gRPC, under Ray, which grow when they are busy


def native_threads():
    names = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            names.append(Path("/proc/self/task", thread, "comm").read_text().strip())
    return sum(name not in GRPC for name in names)


engine, process, found = {engine!r}, psutil.Process(), []
if engine == "ray":
    import ray
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
compressions = ["Identity", "EF21(TopK(0.3))", "ErrorFeedback(Quantize(4))", "TopK(0.1)"]
for number in range({count}):
    config = make_config({{**SMALL, "steps": 4, "num_stages": 2, "forward": compressions[number % len(compressions)]}})
    with tempfile.TemporaryDirectory() as out:
        run = train(config, engine=engine, out=Path(out) / "run")
        assert len(run.steps) == 4
    gc.collect()
    names = sorted(thread.name for thread in threading.enumerate())
    found.append([process.memory_info().rss, process.num_fds(), native_threads(), names])
json.dump(found, open({file!r}, "w"))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("engine", "count"), [("inline", 50), ("ray", 15)])
def test_many_runs_leave_nothing_behind(tmp_path, engine, count):
    import json
    from pathlib import Path

    file = tmp_path / "found.json"
    support = str(Path(__file__).parents[1] / "support")
    code = RUNS.format(support=support, engine=engine, count=count, file=str(file))
    subprocess.run([sys.executable, "-c", code], check=True, timeout=800)
    found = json.loads(file.read_text())
    (early_bytes, early_fds, early_threads, early_names), (bytes_, *_, names) = found[4], found[-1]
    fds = min(run[1] for run in found[-5:])  # a socket of Ray's comes and goes; what we left behind would stay
    threads = max(run[2] for run in found[4:])
    print(
        f"{engine}: {early_bytes / 2**20:.1f} to {bytes_ / 2**20:.1f} MiB, {early_fds} to {fds} descriptors, "
        f"{early_threads} to {threads} threads"
    )
    assert names == early_names
    assert threads <= early_threads
    assert fds <= early_fds
    assert bytes_ - early_bytes < 24 << 20  # data and models of a run take a megabyte, those of 50 twice this bound
