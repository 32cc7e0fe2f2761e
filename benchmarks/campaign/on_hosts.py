"""Mixed faults in a run over several hosts, which are network namespaces of this machine (Linux, root)."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil
from commands import Outcome
from disks import SmallDisk
from raysim_benchmarks.hosts.cluster import Cluster
from raysim_benchmarks.hosts.namespaces import Hosts, check_machine
from runs import same_records

from raysim.config import ConfigError
from raysim.records import Run
from raysim.training.train import train

KEYS = ["steps=60", "checkpoint_every_steps=10", "evaluate_every_steps=30", "forward=EF21(TopK(0.2))", "timeout_s=60"]
LAYERS = 7  # of digits-cnn
FEWEST_FAULTS, MOST_FAULTS = 4, 10  # of a run
SESSIONS = 3 + MOST_FAULTS  # after which a run must have finished
SESSION_S = 900.0  # of a session, on a busy machine
GONE_S = 20.0  # within which no stage may be left
DISK_KIB = 64 * 1024
MOST_HOSTS = 8
WARM_DRIVER = Path(__file__).with_name("warm_driver.py")


class Session:
    """A driver on the first host, and the cluster and the disk that faults hit."""

    def __init__(
        self, cluster: Cluster, disk: SmallDisk, drivers: subprocess.Popen[str], errors: Path, arguments: list[str]
    ) -> None:
        self.cluster, self.disk = cluster, disk
        self._drivers, self._errors = drivers, errors
        self._code: int | None = None
        errors.write_text("")
        print(json.dumps([arguments, str(errors)]), file=drivers.stdin, flush=True)
        self.driver = psutil.Process(int(drivers.stdout.readline()))

    @property
    def said(self) -> str:
        """The driver's errors up to now."""
        return self._errors.read_text(encoding="utf-8", errors="replace")

    @property
    def code(self) -> int | None:
        """The driver's exit code, None while it runs."""
        if self._code is None and not _lives(self.driver):
            self._code = int(self._drivers.stdout.readline())
        return self._code

    def wait(self, begun: Callable[[], bool], limit_s: float) -> bool:
        """Wait until the driver has ended, or something has begun; return whether the driver still runs."""
        deadline = time.monotonic() + limit_s
        while self.code is None and not begun() and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.code is None


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def server(cluster: Cluster, host: int, name: str) -> psutil.Process | None:
    """Return a server of Ray on a host, None if it has ended."""
    with suppress(psutil.Error):
        for process in psutil.Process(cluster.nodes[host].pid).children():
            if process.name() == name and _lives(process):
                return process
    return None


def stages(cluster: Cluster) -> list[psutil.Process]:
    """Return the processes of stages on all hosts."""
    processes = []
    for host in cluster.nodes:
        raylet = server(cluster, host, "raylet")
        with suppress(psutil.Error):
            processes += (
                [process for process in raylet.children() if process.name().startswith("ray::Stage")] if raylet else []
            )
    return processes


class Fault(NamedTuple):
    """A fault, its seconds after the start of the run or after its first step in a session, and its duration."""

    name: str
    in_start: bool
    after_s: float
    lasts_s: float
    host: int

    def __str__(self) -> str:
        when = "begin" if self.in_start else "first step"
        return f"{self.name} of host {self.host}, {self.after_s} s after the {when}, for {self.lasts_s} s"


def _signal(process: psutil.Process | None, number: int, lasts_s: float | None = None) -> bool:
    if process is None:
        return False
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)
        if lasts_s is not None:
            time.sleep(lasts_s)
            process.send_signal(signal.SIGCONT)
        return True
    return False


def _stage(session: Session, fault: Fault) -> psutil.Process | None:
    found = stages(session.cluster)
    return found[fault.host % len(found)] if found else None


def _partition(session: Session, fault: Fault) -> bool:
    """Pull a host's cable out of the switch, and plug it in again."""
    bridge = f"{session.cluster.hosts.name}-switch"
    for words in (["nomaster"], ["master", "bridge"]):
        subprocess.run(["ip", "-netns", bridge, "link", "set", f"host{fault.host}", *words], check=True)
        time.sleep(fault.lasts_s if words == ["nomaster"] else 0)
    return True


def _full_disk(session: Session, fault: Fault) -> bool:
    used = sum(file.stat().st_blocks for file in session.disk.folder.rglob("*") if file.is_file()) // 2
    session.disk.resize(f"{max(used, 4)}k")
    time.sleep(fault.lasts_s)
    session.disk.resize(f"{DISK_KIB}k")
    return True


FAULTS: dict[str, Callable[[Session, Fault], bool]] = {
    "a stage killed": lambda session, fault: _signal(_stage(session, fault), signal.SIGKILL),
    "a stage stopped": lambda session, fault: _signal(_stage(session, fault), signal.SIGSTOP, fault.lasts_s),
    "the raylet killed": lambda session, fault: _signal(server(session.cluster, fault.host, "raylet"), signal.SIGKILL),
    "the raylet stopped": lambda session, fault: _signal(
        server(session.cluster, fault.host, "raylet"), signal.SIGSTOP, fault.lasts_s
    ),
    "the head killed": lambda session, fault: _signal(server(session.cluster, 0, "gcs_server"), signal.SIGKILL),
    "the head stopped": lambda session, fault: _signal(
        server(session.cluster, 0, "gcs_server"), signal.SIGSTOP, fault.lasts_s
    ),
    "the cable pulled": _partition,
    "the driver killed": lambda session, fault: _signal(session.driver, signal.SIGKILL),
    "the driver asked to end": lambda session, fault: _signal(session.driver, signal.SIGTERM),
    "the disk full": _full_disk,
}
"""Carries a fault out; False if there was nothing to hit."""


def mixed_faults(count: int, folder: Path, engine: str, chance: random.Random) -> Outcome:
    """Let some faults in turn hit each run on a cluster, which is mended after each session, and resume it to its end."""
    try:
        check_machine()
    except ConfigError as error:
        return Outcome(0, [str(error)])
    tried, harm, hosts = 0, list[str](), chance.randint(2, MOST_HOSTS)
    num_stages = min(LAYERS, chance.randint(2, hosts))  # the fewer, the more hosts can take over
    keys = [f"num_stages={num_stages}", *KEYS]
    whole = train("digits-cnn", *keys, engine="inline", out=folder / "whole")
    with (
        SmallDisk(folder / "disk", DISK_KIB) as disk,  # drivers see no later mount
        Hosts.made(hosts, "switch") as made,
        Cluster.started(made) as cluster,
        cluster.driver(str(WARM_DRIVER)) as drivers,
        suppress(ConfigError),  # a node that does not start again ends the round
    ):
        while tried < count and not harm:
            faults = [
                _draw(chance, hosts) for _ in range(min(chance.randint(FEWEST_FAULTS, MOST_FAULTS), count - tried))
            ]
            session = partial(Session, cluster, disk, drivers, folder / "errors")
            hit, found = _run(session, disk.folder / "run", keys, faults, whole)
            shutil.rmtree(disk.folder / "run", ignore_errors=True)
            tried += hit
            harm += [f"{hosts} hosts, {num_stages} stages, {'; '.join(map(str, faults))}: {one}" for one in found]
            if tried < count and not harm:
                _mend(cluster)
    return Outcome(tried, harm)


def _draw(chance: random.Random, hosts: int) -> Fault:
    name = chance.choice([*FAULTS])
    lasts_s = chance.uniform(1, 70 if chance.random() < 0.2 else 8)  # `timeout_s` is between
    host = chance.randrange(1 if name == "the cable pulled" else 0, hosts)
    return Fault(name, chance.random() < 0.4, round(chance.uniform(0, 6), 1), round(lasts_s, 1), host)


def _run(
    begin: Callable[[list[str]], Session], out: Path, keys: list[str], faults: list[Fault], whole: Run
) -> tuple[int, list[str]]:
    """Train through faults; return how many have hit, and the harm."""
    left, hit = list(faults), 0
    for _ in range(SESSIONS):
        resume = ["--resume"] if out.exists() else []
        session = begin(["train", "digits-cnn", *keys, "--out", str(out), *resume])
        struck = _strike(session, left)
        hit += len(struck)
        if session.wait(lambda: False, SESSION_S):
            session.driver.kill()
            return hit, [f"a session does not end: {session.said[-2000:]}"]
        if found := _disorder(session, struck) + _orphans(session):
            return hit, found
        if session.code == 0:
            break
        _mend(session.cluster)
    else:
        return hit, [f"not finished after {SESSIONS} sessions: {session.said[-1000:]}"]
    try:
        same_records(Run(out), whole)
    except AssertionError as error:
        return hit, [f"other records: {str(error).splitlines()[:1]}"]
    return hit, []


def _is_past(due: float) -> bool:
    return time.monotonic() > due


def _strike(session: Session, left: list[Fault]) -> list[str]:
    """Carry out faults, taken from those that are left, until the driver ends; return the names of those that hit."""
    struck = []
    while left:
        if not left[0].in_start and not session.wait(lambda: "\nstep " in session.said, SESSION_S):
            break
        due = time.monotonic() + left[0].after_s
        if not session.wait(partial(_is_past, due), SESSION_S):
            break
        fault = left.pop(0)
        if FAULTS[fault.name](session, fault):
            struck.append(fault.name)
        if struck and struck[-1].startswith("the driver "):
            break
    return struck


def _disorder(session: Session, struck: list[str]) -> list[str]:
    """Return the harm where a session ended otherwise than with success or a sentence that says how to go on."""
    code, last = session.code, (session.said.strip().splitlines() or [""])[-1]
    allowed = {0, 1}
    allowed |= {2} if struck and last.startswith("raysim: ") and "RAY_ADDRESS" in last else set()  # before it joined
    allowed |= {143} if "the driver asked to end" in struck else set()
    allowed |= {-signal.SIGKILL} if "the driver killed" in struck else set()
    says = "o continue" in last or "before anything began" in last
    if code not in allowed or (code in (1, 143) and not says):
        return [f"ended with {code}: {session.said[-2000:]}"]
    if "Traceback" in session.said or "***" in session.said:
        return [f"more than a sentence: {session.said[-3000:]}"]
    return []


def _orphans(session: Session) -> list[str]:
    """Return the harm where stages outlive the driver on hosts whose Ray lives."""
    deadline = time.monotonic() + GONE_S
    while (found := stages(session.cluster)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return [f"left {len(found)} stages"] if found else []


def _mend(cluster: Cluster) -> None:
    """Start the nodes again that were lost: all of them, if the head was."""
    lost = [host for host in cluster.nodes if server(cluster, host, "raylet") is None]
    if 0 in lost or server(cluster, 0, "gcs_server") is None:
        lost = [*cluster.nodes]
    cluster.stop(lost)
    for host in lost:
        cluster.start(host)
