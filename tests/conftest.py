"""One Ray for the whole suite, on CPUs that are only counted."""

import functools
import gc
import logging
import os
import re
import signal
from pathlib import Path

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = (
    "1"  # clusters of tests have several nodes, see raysim.engine.connection
)
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
if not os.path.exists("/dev/nvidiactl"):  # noqa: PTH110
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels for GPUs run on the CPU; read when they are first imported

import hypothesis
import pytest
from configurations import SMALL

collect_ignore = ["support"]  # programs and lists that tests use
collect_ignore_glob = ["*conftest.py"]  # no doctests there, and as modules all have one name
os.fsync = lambda fd: None  # no test loses power, and a small run would wait fifty times for the disk
gc.disable()  # what is imported and collected stays: an eighth of the collection went into looking through it
STARTS_RAY = re.compile(r'def \w+\([^)]*\bray\b|[^"]ray\.(init|scripts)|"-m", "raysim\.cli|Sweep\(|\bsweep\(')

# other work on the machine is no failure, and laws that are drawn anew in every run find in many what 40 examples leave
hypothesis.settings.register_profile("raysim", deadline=None, max_examples=40)
hypothesis.settings.load_profile("raysim")

for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:  # in the background, and so would be in what tests start
        signal.signal(number, handler)


@functools.cache
def starts_ray(file: str) -> bool:
    """Return whether a test that is not slow may start a Ray, by the file's text."""
    parts = (Path(__file__).parents[1] / file).read_text().split("\n\n\n")
    fast = [part for part in parts if "@pytest.mark.slow" not in part]
    return file.startswith("tests/engine/") or any(map(STARTS_RAY.search, fast))


def pytest_collection_finish():
    """Keep what is there by now out of all later garbage collections."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items):
    """Begin with the tests that start a Ray, which one process runs while the other runs the rest."""
    items.sort(key=lambda item: not starts_ray(item.nodeid.partition("::")[0]))


def pytest_xdist_make_scheduler(config, log):
    """Give each process whole files, and one of them all that start a Ray: two that start at once may take the same port.

    The marks of `--dist loadgroup` would do, but pytest-xdist 3.8 writes them where pytest 9.2 does not read.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            if starts_ray(file):
                return "ray"
            return "ranks" if file.startswith(("tests/distributed/", "tests/probing/test_probe.py")) else file

    config.option.loadscopereorder = False  # the longest, those of Ray, come first
    return ByFile(config, log)


@pytest.fixture(scope="session")
def ray():
    import ray

    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="session")
def buckets():
    from buckets import Buckets

    served = Buckets()
    yield served
    served.close()


@pytest.fixture(scope="session")
def results_of_ranks(tmp_path_factory):
    """Return what two ranks return of the jobs of each file: the start of a pair takes ten seconds of the CPU."""
    from importlib import import_module

    from ranks import run_ranks

    files = ("test_ddp", "test_fsdp", "test_pipelining")
    folder = tmp_path_factory.mktemp("ranks")
    jobs = {file: import_module(file).jobs_of_ranks() for file in files}
    jobs["test_probe"] = ("probe_jobs:everything", folder / "probes")
    return run_ranks("ranks:in_turn", 2, folder, jobs)


@pytest.fixture(autouse=True, scope="session")
def cache(tmp_path_factory):
    """Keep what is worked out of data files out of the user's own cache."""
    os.environ["RAYSIM_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def one_thread():
    """Compare with plain torch on the threads that a stage has: another number gives other gradient bits."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small():
    """Return a configuration of the small run, changed by nested values."""
    from raysim.config import make_config

    def build(**changes):
        return make_config({**SMALL, **changes})

    return build


@pytest.fixture(scope="session")
def report_runs(tmp_path_factory):
    """Return a folder of four settings with three seeds each."""
    from report_runs import train_settings

    return train_settings(tmp_path_factory.mktemp("report") / "runs")


@pytest.fixture(scope="session")
def report_of_study(tmp_path_factory, report_runs):
    """Return a function that reports a study of so many runs: its page, and that as HTML."""
    from report_runs import SPITE, copy_run, make_study, slow_but_small

    from raysim.analysis.report import compose
    from raysim.analysis.report.write import to_html

    def report(runs):
        study = make_study(report_runs, tmp_path_factory.mktemp("reported") / "study", runs - 2)
        copy_run(report_runs / "dense-s1", study / "trials" / f"999-{SPITE}", forward="RandomK(0.5)")
        slow_but_small(copy_run(report_runs / "dense-s1", study / "trials" / "998-s1", forward="Nonzero"))
        page = compose(study, ("10kbps", "100mbps", "1gbps", "free"))
        return page, to_html(page)

    return report
