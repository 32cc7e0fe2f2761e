"""A cluster as a user makes it: `ray up` with the shipped file on machines with SSH, jobs, other users, lost nodes, `ray down`.

`make test-cluster` runs this. It needs root, an SSH server and rsync, and says so where it skips.
"""

import re
import subprocess
import time

import pandas as pd
import pytest
import ssh_hosts
from ssh_hosts import ROOT, SshHosts, make_wheel
from studies import BASE, write_study

from raysim.records import Run

HEAD, FIRST, SECOND, DESK, OTHER_DESK = range(5)  # the desks are outside of the cluster; `ray up` runs on the first
FILE = "cluster.yaml"
TOKEN = {"RAY_AUTH_MODE": "token"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(ssh_hosts.missing() is not None, reason=str(ssh_hosts.missing())),
]


def within(seconds, done, every=2.0):
    """Return the seconds until `done()`, or fail with what it returned last."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        if done():
            return time.monotonic() - began
        time.sleep(every)
    raise AssertionError(f"{done.__name__}: not within {seconds} s")


def shipped(hosts, wheel):
    """Return the shipped cluster file with addresses, key and package changed, and nothing else."""
    text = (ROOT / "sweeps" / "cluster" / "on-premises.yaml").read_text()
    for old, new in {
        "head_ip: 10.0.0.1": f"head_ip: {hosts.address(HEAD)}",
        "worker_ips: [10.0.0.2, 10.0.0.3, 10.0.0.4, 10.0.0.5]": f"worker_ips: [{hosts.address(FIRST)}, {hosts.address(SECOND)}]",
        "ssh_private_key: ~/.ssh/raysim_cluster": f"ssh_private_key: {hosts.shared / 'key'}",
        "https://example.org/raysim-0.2.0-py3-none-any.whl": f"file://{wheel}",
    }.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def ray_processes(hosts, host):
    return [line for line in hosts.processes(host) if "ray" in line.lower().replace("/home/raysim", "")]


@pytest.fixture(scope="module")
def hosts():
    with SshHosts.made(5) as made:
        wheel = make_wheel(made.shared)
        for host in range(5):
            made.give_environment(host)
        installed = made.run(DESK, f"pip install -q {wheel} && ray get-auth-token --generate")
        assert installed.returncode == 0, installed.stderr
        (made.home(DESK) / FILE).write_text(shipped(made, wheel))
        yield made


@pytest.fixture(scope="module")
def cluster(hosts):
    up = hosts.run(DESK, f"ray up -y {FILE}", timeout=180)
    assert up.returncode == 0, up.stdout + up.stderr

    def three_nodes():
        found = hosts.run(HEAD, "ray status", **TOKEN).stdout
        return re.search(r"/6\.0 CPU", found)  # two cores each

    print(f"three nodes {within(90, three_nodes):.0f} s after `ray up` had returned")
    return hosts


def test_the_job_of_the_docs_runs(cluster):
    tunnel = subprocess.Popen(cluster.words(DESK, f"exec ray dashboard {FILE}"), stdout=subprocess.DEVNULL)
    try:
        url = "http://127.0.0.1:8265"
        within(30, lambda: cluster.run(DESK, f"curl -s {url} || wget -qO- {url}").stdout)
        done = cluster.run(DESK, f"ray job submit --address {url} -- raysim recipes", **TOKEN)
    finally:
        tunnel.terminate()
        tunnel.wait()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "digits-cnn" in done.stdout


def test_second_machine_submits_with_file_and_token(cluster, tmp_path):
    """Ray's own commands find no head there: its state is on the desk that ran `ray up`."""
    there = cluster.home(OTHER_DESK)
    assert cluster.run(OTHER_DESK, f"pip install -q {cluster.shared}/*.whl && mkdir -m 700 .ray").returncode == 0
    for name in (FILE, ".ray/auth_token"):
        (there / name).write_text((cluster.home(DESK) / name).read_text())
    (there / "study").mkdir()
    (there / "study" / "small.toml").write_text(write_study(tmp_path, trials=2, engine="inline").read_text())
    found = cluster.run(OTHER_DESK, f"ray exec {FILE} 'ray status'")
    assert "not found" in found.stdout + found.stderr
    out = cluster.shared / "of-another-desk"
    done = cluster.run(
        OTHER_DESK, f"raysim submit study/small.toml --cluster {FILE} --out {out} --fetch fetched", timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(pd.read_parquet(there / "fetched" / "trials.parquet")["status"]) == {"finished"}
    assert not list((there / "fetched").rglob(".lock"))
    assert re.search(r"/6\.0 CPU", cluster.run(HEAD, "ray status", **TOKEN).stdout)  # nobody stopped Ray


def refusal(cluster, command, **environment):
    """Return the sentence by which a command on the desk is refused; where nothing else runs, after about five seconds."""
    began = time.monotonic()
    done = cluster.run(DESK, command, **environment)
    seconds = time.monotonic() - began
    print(f"{seconds:.1f} s: {done.stderr.strip()}")
    assert done.returncode == 2, done.stderr
    assert seconds < 60
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not (cluster.home(DESK) / "run").exists()
    return done.stderr


def test_driver_outside_cluster_gets_instructions(cluster):
    train = "raysim train digits-cnn steps=2 --out run"
    head = f"{cluster.address(HEAD)}:6379"
    sentence = refusal(cluster, train, RAY_ADDRESS=head)
    assert "but this machine is not a node of that cluster. Send a job with `raysim submit`, or make" in sentence
    assert f"`ray start --address={head} --num-cpus=0`" in sentence
    assert "`raysim submit`" in refusal(cluster, train, RAY_ADDRESS=f"ray://{cluster.address(HEAD)}:10001")
    assert "`raysim submit`" in refusal(cluster, f"raysim sweep quickstart --address {head} --out run")
    sentence = refusal(cluster, f"raysim submit quickstart --cluster {FILE} --out /srv/run", RAY_AUTH_MODE="disabled")
    assert "asks for its token, and this process showed none, since RAY_AUTH_MODE is not `token`. Set" in sentence


def test_driver_may_run_on_a_new_node(cluster):
    """The way in that the sentence names; without the token and with another one a sentence says so."""
    head = f"{cluster.address(HEAD)}:6379"
    started = cluster.run(DESK, f"ray start --address={head} --num-cpus=0", **TOKEN)
    assert started.returncode == 0, started.stderr
    train = f"raysim train digits-cnn num_stages=3 steps=4 --out {cluster.shared}/driven"
    try:
        wrong = {**TOKEN, "RAY_AUTH_TOKEN": "x" * 64}
        for environment, has in (({}, "this process showed none, since"), (wrong, "that of RAY_AUTH_TOKEN")):
            assert f"asks for its token, and {has}" in refusal(cluster, train, RAY_ADDRESS=head, **environment)
        done = cluster.run(DESK, train, timeout=200, RAY_ADDRESS=head, **TOKEN)
        assert done.returncode == 0, done.stderr
        assert Run(cluster.shared / "driven").status == "finished"
    finally:
        cluster.run(DESK, "ray stop --force")


def test_a_submitted_sweep_outlives_a_node(cluster, tmp_path):
    """A study's file is sent along, its stages run on all nodes, one is powered off, and the results come back."""
    base = BASE | {"num_stages": 3, "steps": 150, "checkpoint_every_steps": 10, "evaluate_every_steps": 50}
    base |= {"placement": "spread"}
    text = write_study(tmp_path, trials=4, base=base, engine="ray").read_text()
    (cluster.home(DESK) / "studies").mkdir()
    (cluster.home(DESK) / "studies" / "small.toml").write_text(text)
    out = cluster.shared / "sweep"
    command = f"raysim submit studies/small.toml --cluster {FILE} --out {out} --fetch fetched"
    log = tmp_path / "job.log"
    with log.open("w") as file:
        job = subprocess.Popen(cluster.words(DESK, command), stdout=file, stderr=subprocess.STDOUT)

        def stages_everywhere():
            assert job.poll() is None, log.read_text()
            stages = [line for host in (HEAD, FIRST, SECOND) for line in [cluster.processes(host)]]
            return all(any("ray::StageActor" in line for line in lines) for lines in stages)

        within(120, stages_everywhere)
        within(60, lambda: list(out.glob("trials/*/checkpoints/step-*")))
        cluster.power_off(SECOND)

        def loss_said():
            return f"node {cluster.address(SECOND)} is lost" in log.read_text()

        print(f"the lost node is named {within(60, loss_said):.0f} s after its cable was pulled")
        job.wait(timeout=400)
    said = log.read_text()
    assert job.returncode == 0, said
    assert "(raylet)" not in said
    rows = pd.read_parquet(out / "trials.parquet")
    assert set(rows["status"]) == {"finished"}, rows["error"].tolist()
    assert rows["same_as"].isna().sum() == 4  # beside repetitions
    assert pd.read_parquet(cluster.home(DESK) / "fetched" / "trials.parquet").equals(rows)


def test_cluster_down_removes_everything(cluster):
    down = cluster.run(DESK, f"ray down -y {FILE}")
    assert down.returncode == 0, down.stderr

    def nothing_left():
        return not any(ray_processes(cluster, host) for host in (HEAD, FIRST))

    print(f"no process of Ray is left {within(90, nothing_left):.0f} s after `ray down`")

    def no_secrets():
        places = [
            cluster.home(host) / name for host in (HEAD, FIRST) for name in (".ray/auth_token", "ray_bootstrap_key.pem")
        ]
        return not any(place.exists() for place in places)

    within(40, no_secrets)


def test_lost_head_gives_one_sentence_error(cluster, tmp_path):
    """A second cluster on the same machines, without the one that was powered off; its drivers are on the desk."""
    up = cluster.run(DESK, f"ray up -y {FILE}", timeout=180)
    assert up.returncode == 0, up.stdout + up.stderr

    def two_nodes():
        return re.search(r"/4\.0 CPU", cluster.run(HEAD, "ray status", **TOKEN).stdout)

    print(f"two nodes {within(90, two_nodes):.0f} s after the second `ray up` had returned")
    head = f"{cluster.address(HEAD)}:6379"
    cluster.run(DESK, f"ray start --address={head} --num-cpus=0", **TOKEN)
    base = BASE | {"steps": 5000, "checkpoint_every_steps": 10, "evaluate_every_steps": 0}
    (cluster.home(DESK) / "long.toml").write_text(
        write_study(tmp_path, base=base, engine="ray", jobs=1, objectives=["loss_on", "wire_bytes"]).read_text()
    )
    places = {name: cluster.shared / f"headless-{name}" for name in ("train", "sweep")}
    commands = {
        "train": f"raysim train digits-cnn num_stages=2 steps=5000 checkpoint_every_steps=10 --out {places['train']}",
        "sweep": f"raysim sweep long.toml --out {places['sweep']}",
    }
    logs, drivers = {name: tmp_path / f"{name}.log" for name in commands}, {}
    try:
        for name, command in commands.items():
            with logs[name].open("w") as log:
                words = cluster.words(DESK, command, RAY_ADDRESS=head, **TOKEN)
                drivers[name] = subprocess.Popen(words, stdout=log, stderr=log)

        def both_have_checkpoints():
            assert all(driver.poll() is None for driver in drivers.values()), [log.read_text() for log in logs.values()]
            return all(list(place.rglob("manifest.json")) for place in places.values())

        within(120, both_have_checkpoints)
        cluster.power_off(HEAD)
        began = time.monotonic()
        for name, driver in drivers.items():
            driver.wait(timeout=90)
            print(
                f"{name} ended {time.monotonic() - began:.0f} s after the head was lost: {logs[name].read_text().splitlines()[-1]}"
            )

        def worker_left():
            return not ray_processes(cluster, FIRST)

        within(120, worker_left)
        print(f"the worker that is left has ended Ray {time.monotonic() - began:.0f} s after its head was lost")
    finally:
        cluster.run(DESK, "ray stop --force")
    for name, driver in drivers.items():
        said = logs[name].read_text().strip().splitlines()[-1]
        assert driver.returncode == 1
        assert f"the head of the cluster, {head}, is lost" in said
        assert re.search(rf"[Tt]o continue.*: raysim {name} .*--resume", said)
    assert Run(places["train"]).status == "failed"
    assert set(pd.read_parquet(places["sweep"] / "trials.parquet")["status"]) == {"waiting"}
