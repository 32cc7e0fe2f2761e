"""A sweep sent to a cluster as a job: refusals before anything is sent, and jobs of a real Ray that the test starts."""

import asyncio
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pandas as pd
import pytest
import yaml
from studies import BASE, write_study
from typer.testing import CliRunner

from raysim.cli import app
from raysim.engine.connection import user_here
from raysim.sweeps import submit

SUBMIT = [sys.executable, "-m", "raysim.cli", "submit"]
MODEL = """
from math import prod

from torch import nn


def build(shape, width=4):
    sizes = [prod(shape.input_shape), width, width, shape.num_classes]
    return nn.Sequential(nn.Flatten(), *[nn.Linear(*pair) for pair in zip(sizes, sizes[1:])])
"""


@pytest.fixture(scope="module")
def dashboard(buckets, tmp_path_factory):
    """Start a Ray with a token that takes jobs, and return the URL of its dashboard; the token lies in a home of its own."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    head, jobs, agent = (one.getsockname()[1] for one in sockets)
    for one in sockets:
        one.close()
    words = ["start", "--head", "--block", "--num-cpus=4", f"--port={head}", f"--dashboard-port={jobs}"]
    words += [f"--dashboard-agent-listen-port={agent}"]  # another Ray of this machine may have the usual one
    home = tmp_path_factory.mktemp("home")
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text("0" * 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_AUTH_MODE", raising=False)
        patch.setenv("HOME", str(home))
        patch.setenv("RAY_TMPDIR", "/tmp/raysim-submit")
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        server = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", *words],
            env={**os.environ, "RAY_AUTH_MODE": "token"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + 60
        while not _answers(jobs):
            assert server.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.5)
        yield f"http://127.0.0.1:{jobs}"
        server.terminate()  # of `ray start --block`, which ends what it has started
        server.wait(timeout=60)


def _answers(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def shell(words):
    return subprocess.run(words, shell=True, capture_output=True, text=True, timeout=120)


def test_a_cluster_that_has_just_started_is_waited_for(monkeypatch):
    answers = ["No available agent to submit job, please try again later.", None, "No space left."]
    asked = []

    class Client:
        def submit_job(self, **job):
            asked.append(job)
            answer = answers[len(asked) - 1]
            if answer is not None:
                raise RuntimeError(f"Request failed with status code 500: {answer}")
            return "job-1"

    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert submit._send(Client(), "raysim sweep small", {}) == "job-1"
    assert asked == [{"entrypoint": "raysim sweep small", "runtime_env": {}, "metadata": {"user": user_here()}}] * 2
    with pytest.raises(RuntimeError, match="No space left"):
        submit._send(Client(), "raysim sweep small", {})


@pytest.fixture
def falling_silent():
    """Return the URL of a dashboard that answers twice, and then accepts connections without an answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer_twice():
            for _ in range(2):
                connection, _ = server.accept()
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                connection.close()

        threading.Thread(target=answer_twice, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_silent_head_is_named_and_then_given_up(falling_silent, monkeypatch, capsys):
    for name, seconds in {"ASK_S": 0.05, "ANSWER_S": 0.2, "LOST_S": 0.5}.items():
        monkeypatch.setattr(submit, name, seconds)

    class Client:
        async def tail_job_logs(self, job):
            yield "step 1\n"
            await asyncio.sleep(60)

    with pytest.raises(OSError, match=r"no answer for \d s"):
        asyncio.run(submit._follow(Client(), "job-1", falling_silent))
    printed = capsys.readouterr()
    assert printed.out == "step 1\n"
    assert printed.err == "The cluster's head does not answer: waiting for up to 0.5 s\n"


@pytest.mark.slow
def test_a_study_is_sent_with_its_modules_and_its_results_are_fetched(dashboard, buckets, tmp_path):
    base = BASE | {"model": {"name": "mymodel:build", "width": 5}}
    path, out = write_study(tmp_path, trials=2, base=base), f"{buckets.make()}/sweep"
    (tmp_path / "mymodel.py").write_text(MODEL)
    words = [str(path), "--address", dashboard, "--out", out, "--fetch", str(tmp_path / "fetched")]
    done = subprocess.run([*SUBMIT, *words], capture_output=True, text=True, timeout=240, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "small: 2 trials" in done.stdout  # the sweep's output
    assert f"results in {tmp_path / 'fetched'}" in done.stderr
    assert pd.read_parquet(tmp_path / "fetched" / "trials.parquet")["status"].tolist() == ["finished"] * 2


@pytest.mark.parametrize("option", ["--screen", "--no-screen"])
def test_a_job_screens_as_it_was_told(monkeypatch, option):
    sent = []
    monkeypatch.setattr("raysim.cli.sweep.run_job", lambda words, *rest, **options: sent.append(words))
    words = ["submit", "quickstart", "--out", "/srv/x", "--address", "http://127.0.0.1:1"]
    for given in ([], [option]):
        assert CliRunner().invoke(app, [*words, *given]).exit_code == 0
    assert [[word for word in each if "screen" in word] for each in sent] == [[], [option]]


@pytest.mark.slow
def test_a_job_that_fails_gives_its_exit_code(dashboard, tmp_path):
    words = [str(write_study(tmp_path)), "num_stagez=2", "--address", dashboard, "--out", str(tmp_path / "out")]
    done = subprocess.run([*SUBMIT, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "num_stagez" in done.stdout  # the sentence of the job


@pytest.mark.slow
def test_ctrl_c_leaves_the_job_and_says_how_to_follow_and_end_it(dashboard, tmp_path):
    path, log = write_study(tmp_path, base=BASE | {"steps": 100_000, "evaluate_every_steps": 0}), tmp_path / "log"
    words = [str(path), "--address", dashboard, "--out", str(tmp_path / "out"), "--jobs", "1"]
    with log.open("w") as file:
        sent = subprocess.Popen([*SUBMIT, *words], stdout=file, stderr=file, preexec_fn=as_on_a_terminal)
        deadline = time.monotonic() + 120
        while not list((tmp_path / "out").glob("trials/*/parts")):
            assert sent.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        sent.send_signal(signal.SIGINT)
        assert sent.wait(timeout=30) == 130
    said = re.search(r"The job continues. To follow it: (.*). To end it: (.*)\.\n", log.read_text())
    assert said is not None, log.read_text()
    follow, stop = said.groups()
    status = follow.replace("logs --follow", "status")
    assert status != follow
    assert "RUNNING" in shell(status).stdout
    assert shell(stop).returncode == 0
    assert "was stopped" in shell(status).stdout


def as_on_a_terminal():
    """Have Ctrl-C end a process, as a shell's background process does not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


MAIN = """
import sys
from raysim.sweeps import submit

submit.PORT, submit.TUNNEL_S = int(sys.argv.pop(1)), float(sys.argv.pop(1))
from raysim.cli import main

main()
"""


@pytest.fixture
def cluster_file(tmp_path, monkeypatch):
    """Return the file of a cluster whose head is this machine, reached by an SSH server at the other end of a pipe."""
    if not (shutil.which("rsync") and shutil.which("ssh") and Path("/run/sshd").is_dir()):
        pytest.skip("needs an SSH server and rsync")
    for key in ("hostkey", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / key], check=True)
    server = f"HostKey {tmp_path}/hostkey\nAuthorizedKeysFile {tmp_path}/key.pub\nStrictModes no\nUsePAM no\n"
    (tmp_path / "sshd_config").write_text(server)
    (tmp_path / "ssh_config").write_text(f"UserKnownHostsFile {tmp_path}/known_hosts\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {tmp_path}/ssh_config "$@"\n')
    (tmp_path / "bin" / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    auth = {"ssh_user": getpass.getuser(), "ssh_private_key": str(tmp_path / "key")}
    auth |= {"ssh_proxy_command": f"/usr/sbin/sshd -i -f {tmp_path}/sshd_config"}
    values = {"cluster_name": "x", "provider": {"type": "local", "head_ip": "10.0.0.1", "worker_ips": []}, "auth": auth}
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def submitted(port, *words, seconds=12.0, **options):
    arguments = [sys.executable, "-c", MAIN, str(port), str(seconds), "submit", *map(str, words)]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=240, **options)


def test_responding_head_prevents_ray_up(cluster_file, tmp_path):
    words = ["quickstart", "--cluster", cluster_file, "--out", "/srv/x"]
    with socket.create_server(("127.0.0.1", 0)) as nothing:
        port = nothing.getsockname()[1]
    done = submitted(port, *words, seconds=3.0)
    assert done.returncode == 2, done.stderr
    assert (
        f"@10.0.0.1 answers by SSH, but no dashboard of Ray on its port {port}. If no cluster is up there,"
        in done.stderr
    )
    (tmp_path / "key.pub").write_text("")
    done = submitted(port, *words)
    assert done.returncode == 2, done.stderr
    assert "cannot be reached by SSH: " in done.stderr
    assert "Permission denied (publickey" in done.stderr
    assert done.stderr.endswith("Check `provider.head_ip` and `auth` in it.\n")
    assert "ray up" not in done.stderr


def test_failed_fetch_gives_reason_of_ssh_and_command(cluster_file, tmp_path):
    (tmp_path / "key.pub").write_text("")
    with pytest.raises(submit.JobError) as refused:
        submit._fetch("/srv/x", submit.Cluster.named(str(cluster_file), None), tmp_path / "fetched")
    assert "could not be fetched: " in str(refused.value)
    assert "Permission denied (publickey" in str(refused.value)
    command = str(refused.value).rpartition("To fetch them: ")[2]
    (tmp_path / "key.pub").write_text(
        subprocess.run(["ssh-keygen", "-y", "-f", tmp_path / "key"], capture_output=True, text=True, check=True).stdout
    )
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "trials.parquet").touch()
    assert shell(command.replace("/srv/x", str(tmp_path / "results"))).returncode == 0
    assert (tmp_path / "fetched" / "trials.parquet").is_file()


@pytest.mark.slow
def test_second_machine_submits_and_fetches_without_locks(dashboard, cluster_file, tmp_path):
    out, fetched = tmp_path / "out", tmp_path / "fetched"
    words = [write_study(tmp_path, trials=2), "--cluster", cluster_file, "--out", out, "--fetch", fetched]
    files = tmp_path / "files"
    files.mkdir()
    words[0] = words[0].rename(files / "small.toml")
    done = submitted(dashboard.rpartition(":")[2], *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert pd.read_parquet(fetched / "trials.parquet")["status"].tolist() == ["finished"] * 2
    again = tmp_path / "again"
    (out / ".lock").touch()  # as a killed sweep leaves it
    submit._fetch(str(out), submit.Cluster.named(str(cluster_file), None), again)
    assert (again / "trials.parquet").is_file()
    assert not [path for folder in (fetched, again) for path in folder.rglob(".lock")]
    assert not [path for path in fetched.rglob("*") if path.is_dir() and not any(path.iterdir())]
