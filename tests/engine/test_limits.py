"""The memory and the CPUs of this process, by control groups of either version, `ulimit`, affinity, and the machine."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch import nn

from raysim.config import ConfigError
from raysim.limits import MemoryLimit, node_memory, release_memory, usable_cpus
from raysim.training.start import check_least_memory

V1_NONE = 9223372036854771712  # cgroup v1 has no word for it
TOTAL = psutil.virtual_memory().total
CPUS = len(os.sched_getaffinity(0))
GIB = 2**30

V1 = """\
35 31 0:32 {top} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
33 31 0:30 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
"""
V2 = "30 23 0:26 {top} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"

TREES: dict[str, Any] = {
    "version 2": (V2, "/", "0::/\n", {"memory.max": GIB, "cpu.max": "150000 100000"}, GIB, 2),
    "version 2 without limits": (V2, "/", "0::/\n", {"memory.max": "max", "cpu.max": "max 100000"}, TOTAL, CPUS),
    "version 2, an outer group": (
        V2,
        "/",
        "0::/pod/run/job\n",
        {
            "pod/run/job/memory.max": "max",
            "pod/memory.max": GIB,
            "pod/run/memory.max": 2 * GIB,
            "pod/cpu.max": "1000 2000",
        },
        GIB,
        1,
    ),
    "version 2, a part is mounted": (V2, "/pod/run", "0::/pod/run/job\n", {"job/memory.max": GIB}, GIB, CPUS),
    "version 2, a group of another namespace": (V2, "/", "0::/../run\n", {"memory.max": GIB}, GIB, CPUS),
    "version 1": (
        V1,
        "/",
        "4:memory:/\n3:cpu,cpuacct:/\n",
        {
            "memory/memory.limit_in_bytes": GIB,
            "cpu,cpuacct/cpu.cfs_quota_us": 50000,
            "cpu,cpuacct/cpu.cfs_period_us": 100000,
        },
        GIB,
        1,
    ),
    "version 1 without limits": (
        V1,
        "/",
        "4:memory:/\n3:cpu,cpuacct:/\n",
        {
            "memory/memory.limit_in_bytes": V1_NONE,
            "cpu,cpuacct/cpu.cfs_quota_us": -1,
            "cpu,cpuacct/cpu.cfs_period_us": 100000,
        },
        TOTAL,
        CPUS,
    ),
    "version 1, of a container": (
        V1,
        "/docker/1f",
        "4:memory:/docker/1f\n",
        {"memory/memory.limit_in_bytes": GIB},
        GIB,
        CPUS,
    ),
    "version 1, an outer group": (
        V1,
        "/",
        "4:memory:/a b/job\n3:cpu,cpuacct:/a b/job\n",
        {
            "memory/a b/job/memory.limit_in_bytes": V1_NONE,
            "memory/a b/memory.limit_in_bytes": GIB,
            "cpu,cpuacct/a b/job/cpu.cfs_quota_us": -1,
            "cpu,cpuacct/a b/job/cpu.cfs_period_us": 100000,
            "cpu,cpuacct/a b/cpu.cfs_quota_us": 100000,
            "cpu,cpuacct/a b/cpu.cfs_period_us": 100000,
        },
        GIB,
        1,
    ),
    "both versions": (
        V1 + V2.replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified "),
        "/",
        "4:memory:/job\n3:cpu,cpuacct:/job\n1:name=systemd:/job\n0::/job\n",
        {"memory/job/memory.limit_in_bytes": GIB, "unified/job/cpu.max": "100000 100000"},
        GIB,
        1,
    ),
}


@pytest.mark.parametrize("tree", TREES)
def test_all_enclosing_cgroups_limit_resources(tree, tmp_path):
    mounts, top, groups, files, size, cpus = TREES[tree]
    found = {
        "proc/self/cgroup": groups,
        "proc/self/mountinfo": mounts.format(top=top) + "23 1 0:5 / /tmp rw - tmpfs tmpfs rw\n",
        **{f"sys/fs/cgroup/{name}": f"{text}\n" for name, text in files.items()},
    }
    for name, text in found.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert node_memory(tmp_path).size == size
    assert usable_cpus(tmp_path) == min(cpus, CPUS)
    if size < TOTAL:
        assert str(node_memory(tmp_path)) == "this container may use 1.1 GB"


@pytest.mark.parametrize(("mounts", "file"), [(V1, "memory/pod/memory.limit_in_bytes"), (V2, "pod/memory.max")])
def test_a_container_too_small_for_an_engine_is_refused(mounts, file, tmp_path):
    """The kernel would kill the command while it imports torch, or Ray's servers, without a word."""

    def refusal(engine, size):
        files = {
            "proc/self/cgroup": "4:memory:/pod/job\n" if mounts is V1 else "0::/pod/job\n",
            "proc/self/mountinfo": mounts.format(top="/"),
            f"sys/fs/cgroup/{file}": f"{size}\n",
        }
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        try:
            check_least_memory(engine, tmp_path)
        except ConfigError as error:
            return str(error)
        return None

    assert refusal("inline", 256 << 20) == (
        "The inline engine needs at least 0.4 GB of memory, but this container may use 0.3 GB. Give it more."
    )
    assert refusal("inline", 512 << 20) is None
    assert refusal("ray", 512 << 20) == (
        "The ray engine needs at least 1.1 GB of memory, but this container may use 0.5 GB. Give it more, or choose the inline "
        "engine, which needs 0.4 GB."
    )
    assert refusal("ray", GIB) is None


def test_without_control_groups_the_machine_limits(tmp_path):
    assert node_memory(tmp_path) == MemoryLimit(TOTAL, "this machine has")
    assert usable_cpus(tmp_path) == CPUS


def python(code, **options):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, **options)
    return done.stdout.strip().splitlines()[-1]


def test_ulimit_limits_a_process_and_not_its_node():
    code = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30, 3 * 2**30))
from raysim.limits import node_memory, process_memory
print(process_memory(), "|", node_memory())
"""
    own, node = python(code).split(" | ")
    assert own == ("`ulimit -v` lets this process use 3.2 GB" if TOTAL > 3 * GIB else node)
    assert node == str(node_memory())


def test_affinity_limits_the_cpus():
    first = min(os.sched_getaffinity(0))
    code = (
        f"import os; os.sched_setaffinity(0, {{{first}}}); from raysim.limits import usable_cpus; print(usable_cpus())"
    )
    assert python(code) == "1"


@pytest.fixture
def group():
    """Return a control group of 1 GiB, for a process to join."""
    place = Path("/sys/fs/cgroup")
    place, file = (place / "memory", "memory.limit_in_bytes") if (place / "memory").is_dir() else (place, "memory.max")
    made = place / f"raysim-{os.getpid()}"
    try:
        made.mkdir()
    except OSError:
        pytest.skip("control groups cannot be made here")
    try:
        (made / file).write_text(str(GIB))
    except OSError:
        made.rmdir()
        pytest.skip("control groups have no memory controller here")
    yield made
    made.rmdir()


@pytest.mark.slow
def test_a_model_beyond_its_container_is_refused_in_a_sentence(group, tmp_path):
    """It would end by the kernel's OOM killer, without a word."""
    join = f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()));"
    words = ["raysim", "train", "digits-cnn", "model=mlp", "model.width=16000", "--engine", "inline"]
    code = f"{join} import sys; sys.argv = {words!r}; from raysim.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=tmp_path, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "GB for its parameters and their copies in stages, but this container may use 1.1 GB." in done.stderr


def test_memory_of_unreachable_modules_is_returned():
    def fill():
        module = nn.ModuleList(nn.Linear(256, 256) for _ in range(800))  # 210 MB, in blocks that malloc keeps
        module.itself = [module]

    process, before = psutil.Process(), psutil.Process().memory_info().rss
    fill()
    held = process.memory_info().rss - before
    release_memory()
    assert held > 150e6
    assert process.memory_info().rss - before < held / 4
