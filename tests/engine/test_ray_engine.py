"""The Ray engine: the same bits as inline, and the same again after workers die, wherever and whenever."""

import dataclasses
import importlib
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import start as start_inline
from pipelines import RUNS
from ray import util
from runs import kill_at, same_records

from raysim.config import ConfigError
from raysim.engine.actor import StageActor
from raysim.engine.connection import node_address
from raysim.engine.delivery import Limits
from raysim.engine.nodes import assign
from raysim.engine.ray import RayEngine
from raysim.engine.resources import equal_share, stages_that_fit
from raysim.pipeline.errors import DivergedError, StageError, WorkerLostError
from raysim.pipeline.prepare import prepare
from raysim.pipeline.state import unpack_tensors
from raysim.records import Run
from raysim.training.run import Training
from raysim.training.train import train

engines = importlib.import_module("tests.support.engines")  # as workers on Ray find it


@pytest.fixture
def engine(ray):
    """Return a started Ray engine; its actors are killed at the end, Ray stays."""
    started = []

    def start(config):
        started.append(RayEngine(prepare(config)))
        started[-1].start()
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.mark.parametrize(
    "run",
    [
        "gpt-tied-clip",
        *(
            pytest.param(run, marks=pytest.mark.slow)
            for run in (
                "feedback",
                "replicas-gravac",
                "batchnorm",
                "zero-bubble-gpt",
                "post-validated",
                "dual-pipe-v",
                "custom-tied-clip",
                "interleaved-tied-clip",
                "shared",
                "answers",
                "replicas-gossip",
                "replicas-apart",
                "predicted",
                "replicas-differ",
                "replicas-subspace",
            )
        ),
    ],
)
def test_engines_agree_bit_for_bit_and_name_a_model_that_fails(engine, small, monkeypatch, run):
    """Messages go within calls, in pieces and through the store, by their sizes."""
    monkeypatch.setattr("raysim.engine.ray.find_limits", lambda *_, **__: Limits(4_000, 8_000))
    config, sizes = small(**RUNS[run]), set()
    inline = start_inline(config)
    on_ray = engine(config)
    answers, calls = on_ray._fetch, []
    monkeypatch.setattr(on_ray, "_fetch", lambda refs: (calls.extend(refs), answers(refs))[1])
    for step in range(3):
        one, other = inline.step(step), on_ray.step(step)
        assert len(calls) == 2 * on_ray.num_workers * (step + 1)  # whatever the schedule
        for mine, theirs in zip(one, other, strict=True):
            assert mine.losses == theirs.losses
            sizes |= {link.wire_bytes / link.packets for link in mine.links if link.packets}
            sizes |= {transfer.wire_bytes for group in mine.groups for transfer in group.transfers}
            for accounts in ("links", "groups"):
                assert [dataclasses.replace(a, codec_s=0) for a in getattr(mine, accounts)] == [
                    dataclasses.replace(a, codec_s=0) for a in getattr(theirs, accounts)
                ]
    assert all(np.array_equal(a, b) for a, b in zip(inline.state(), on_ray.state(), strict=True))
    for mode in ("on", "off", "on_direct"):
        assert inline.evaluate(mode) == on_ray.evaluate(mode)
    for each in (inline, on_ray):
        each.load(3, inline.state())
    assert [one.losses for one in inline.step(3)] == [one.losses for one in on_ray.step(3)]
    if run == "gpt-tied-clip":
        assert min(sizes) < 5_500 < 6_500 < max(sizes), sizes  # an argument adds 2 kB
    named = {name.partition(" (")[0] for name in util.list_named_actors()}
    assert any(name.startswith(f"{config.name}: replica 0, stage") for name in named)  # as Ray's dashboard lists it
    on_ray._fetch([on_ray._actors[0].__ray_call__.remote(lambda actor: engines.fail(actor._worker))])
    with pytest.raises(StageError, match=r"^stage 0, 0F0, step 4: RuntimeError: no luck$"):
        on_ray.step(4)


@pytest.mark.slow
def test_divergence_error_is_equal_on_both_engines(engine, small):
    config = small(model={"name": "tests.support.models:exploding"}, num_stages=None, cuts=["2"])
    with pytest.raises(DivergedError) as caught:
        engine(config).step(0)
    assert str(caught.value) == "step 0, 0F0: NaN or infinity in the activation at boundary 0, forward"


def broken_together(running, places):
    """Return what is said of a step that breaks at places of rows, by worker; all workers are mended after it."""
    ray_calls = [actor.__ray_call__ for actor in running._actors]
    for worker, place in places:
        running._fetch([ray_calls[worker].remote(lambda actor, place: engines.break_at(actor._worker, place), place)])
    with pytest.raises(StageError) as caught:
        running.step(0)
    running._fetch([ray_calls[worker].remote(lambda actor: engines.mend(actor._worker)) for worker, _ in places])
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("run", ["identity", "zero-bubble", "custom", "replicas"])
def test_step_updates_all_stages_or_none(engine, small, run):
    """An action that fails anywhere leaves every worker before its update, whichever worker it is; the last one too, when nobody
    awaits its packet."""
    running = engine(small(**RUNS[run]))
    before = running.state()
    rows = running.plan.rows
    for worker, place in [(w, p) for w, row in enumerate(rows) for p in (3, len(row) - 1)]:
        said = broken_together(running, [(worker, place)])
        assert said == f"{rows[worker][place]} of worker {worker} is broken on purpose"
        for old, new in zip(before, running.state(), strict=True):
            tensors, found = unpack_tensors(old), unpack_tensors(new)
            assert all(torch.equal(x, found[name]) for name, x in tensors.items() if name.startswith("stage."))
        running.load(0, before)


@pytest.mark.slow
def test_first_of_several_errors_is_reported_on_both_engines(engine, small):
    """Whichever comes first by the clock: a worker runs as far as its messages come."""
    config = small()
    running, inline = engine(config), start_inline(config)
    before = running.state()
    chance = random.Random(3)
    for _ in range(5):
        places = [(worker, chance.randrange(len(row))) for worker, row in enumerate(running.plan.rows)]
        for worker, place in places:
            engines.break_at(inline.workers[worker], place)
        with pytest.raises(StageError) as caught:
            inline.step(0)
        assert broken_together(running, places) == str(caught.value)
        for worker, _ in places:
            engines.mend(inline.workers[worker])
        for each in (inline, running):
            each.load(0, before)


@pytest.mark.slow
def test_nodes_that_cannot_reach_one_another_are_named(engine, small, monkeypatch):
    running = engine(small())
    pid = running._fetch([running._actors[1].__ray_call__.remote(lambda _: os.getpid())])[0]
    monkeypatch.setattr("raysim.engine.ray.GREET_S", 1.0)
    answers = running._fetch  # of a worker that does not run there is none
    monkeypatch.setattr(running, "_fetch", lambda calls: answers(calls[:1]))
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(ConfigError) as caught:
            running._greet()
    finally:
        os.kill(pid, signal.SIGCONT)
    node = node_address(running._nodes[0])
    assert str(caught.value) == (
        f"Node {node} must take calls of node {node}, but worker 1 there did not answer worker 0 within 1 s. "
        "Open Ray's ports between all nodes."
    )


@pytest.mark.slow
def test_hanging_stage_is_abandoned(engine, small):
    running = engine(small())
    running.plan = dataclasses.replace(running.plan, config=small(timeout_s=2.0))  # a start takes longer than that
    pid = running._fetch([running._actors[1].__ray_call__.remote(lambda worker: os.getpid())])[0]
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(WorkerLostError, match="no answer within `timeout_s` = 2 s"):
            running.step(0)
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.parametrize("run", ["identity", "custom"])
def test_a_killed_stage_resumes_to_the_same_bits(ray, small, tmp_path, run):
    codecs = {"forward": "AQSGD(TopK(0.3), warmup=0)", "backward": "ErrorFeedback(TopK(0.2))"}
    config = small(**{**RUNS[run], **codecs, "steps": 7})
    undisturbed = train(config, out=tmp_path / "whole")
    training = Training(config, out=tmp_path / "killed")
    executed = kill_at(training, {5: 1})
    run = Run(training.folder)
    assert run.row["restarts"] == 1
    assert executed == [0, 1, 2, 3, 4, 4, 5, 6]  # the checkpoint at 4 stands, step 4 is run again
    same_records(run, undisturbed)


@pytest.mark.slow
def test_stage_killed_between_exchanges_resumes_to_same_bits(ray, small, tmp_path):
    config = small(**RUNS["replicas-apart"])
    undisturbed = train(config, out=tmp_path / "whole", engine="inline")
    training = Training(config, out=tmp_path / "killed")
    assert kill_at(training, {5: 1}) == [0, 1, 2, 3, 4, 4, 5]  # exchanges at 1 to 5, and one under way at 4
    same_records(Run(training.folder), undisturbed)


@pytest.mark.slow
def test_stage_lost_at_start_is_restarted(ray, small, tmp_path):
    config = small()
    training: Any = Training(config, out=tmp_path / "run")
    fetch, lost = training.engine._fetch, []

    def kill_first(refs):
        if not lost:
            lost.append(training.engine._actors[1])
            ray.kill(lost[0])
        return fetch(refs)

    training.engine._fetch = kill_first
    restarts = [event for event in training.events() if event.kind == "restart"]
    assert len(restarts) == Run(training.folder).row["restarts"] == 1
    same_records(Run(training.folder), train(config, engine="inline", out=tmp_path / "whole"))


@pytest.mark.slow
def test_a_stage_killed_for_memory_starts_again_to_the_same_bits(ray, small, tmp_path, monkeypatch):
    """Ray's monitor of memory kills processes of a node that runs out of it; their calls then raise this error."""
    config = small(forward="EF21(TopK(0.3))", checkpoint_every_steps=2)
    training = Training(config, out=tmp_path / "killed", engine="ray")
    get, step, killed = ray.get, training.engine.step, []

    def disturbed(number, *arguments):
        if number == 3 and not killed:
            killed.append(number)

            def fail(refs, **options):
                monkeypatch.setattr(ray, "get", get)
                raise ray.exceptions.OutOfMemoryError("Task was killed due to the node running low on memory.\nMore.")

            monkeypatch.setattr(ray, "get", fail)
        return step(number, *arguments)

    training.engine.step = disturbed
    reasons = [event.row["reason"] for event in training.events() if event.kind == "restart"]
    assert reasons == ["Task was killed due to the node running low on memory"]
    same_records(Run(tmp_path / "killed"), train(config, engine="inline", out=tmp_path / "whole"))


OWN_RAY = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from configurations import SMALL
from raysim.config import make_config
from raysim.training.run import Training
from runs import kill_at

training = Training(make_config({**SMALL, "num_stages": 4, "forward": "TopK(0.3)"}), out=sys.argv[1])
print(kill_at(training, {3: 1, 5: 2}))
"""


@pytest.mark.slow
def test_own_ray_without_spare_cpu_survives_kills(small, tmp_path):
    """As on a newcomer's machine: as many CPUs as stages, so the dead ones' must come back first."""
    done = subprocess.run(
        [sys.executable, "-c", OWN_RAY, str(tmp_path / "run"), str(Path(__file__).parents[1] / "support")],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "(raylet)" not in done.stdout + done.stderr
    run = Run(tmp_path / "run")
    assert (run.status, run.row["restarts"]) == ("finished", 2)
    same_records(run, train(small(num_stages=4, forward="TopK(0.3)"), engine="inline", out=tmp_path / "inline"))


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["state", "load", "infer"])
def test_run_survives_worker_lost_between_steps(ray, small, tmp_path, moment):
    """While it loads a checkpoint, saves one, or evaluates."""
    config = small(forward="EF21(TopK(0.3))", evaluate_every_steps=3)
    training: Any = Training(config, out=tmp_path / "run")
    engine = training.engine
    submit, perform, seen = engine._submit, engine._perform, []

    def at(worker, method, *arguments):
        if method == "run" and moment == "load" and arguments[0] == 3 and not seen:
            seen.append("step")
            ray.kill(engine._actors[1])  # the restart after it loads the checkpoint
        if method == moment and moment not in seen:
            seen.append(moment)
            ray.kill(engine._actors[worker])

    def deadly(worker, *call):
        at(worker, *call)
        return submit(worker, *call)

    def deadly_together(workers, *call):
        at(workers[-1], *call)
        return perform(workers, *call)

    engine._submit, engine._perform = deadly, deadly_together
    list(training.events())
    assert moment in seen
    run = Run(tmp_path / "run")
    assert run.row["restarts"] >= 1
    same_records(run, train(config, engine="inline", out=tmp_path / "inline"))


@pytest.mark.slow
def test_a_step_that_always_kills_its_workers_fails(ray, small, tmp_path):
    training: Any = Training(small(), out=tmp_path / "run")
    step = training.engine.step

    def deadly(number, step_s=None):
        if number == 3:
            ray.kill(training.engine._actors[0])
        return step(number, step_s)

    training.engine.step = deadly
    with pytest.raises(WorkerLostError):
        list(training.events())
    row = Run(tmp_path / "run").row
    assert (row["status"], row["restarts"]) == ("failed", 2)


@pytest.mark.slow
def test_stages_exceeding_capacity_are_refused(ray, small, tmp_path):
    with pytest.raises(ConfigError) as caught:
        train(small(cpus_per_stage=5), out=tmp_path / "run")
    assert re.fullmatch(
        r"3 workers of 5 CPU each do not fit: there is capacity for [01]; [\d.]+ of 8 CPU are free\. "
        "Lower `cpus_per_stage` or `gpus_per_stage`, or use fewer stages.",
        str(caught.value),
    )
    assert not (tmp_path / "run").exists()


def test_unreachable_cluster_is_refused(small, tmp_path, monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(
        ConfigError, match=r"`RAY_ADDRESS` must be a running cluster's, but '127.0.0.1:1' does not answer"
    ):
        train(small(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_model_that_workers_cannot_import_is_named(engine, small, monkeypatch):
    class Unmakeable(StageActor):
        def take(self, *_):
            raise ModuleNotFoundError("No module named 'mine'")

    monkeypatch.setattr("raysim.engine.actor.StageActor", Unmakeable)
    with pytest.raises(StageError, match="a stage could not be made: ModuleNotFoundError: No module named 'mine'"):
        engine(small())


def test_missing_gpu_is_refused(ray, small, tmp_path):
    with pytest.raises(ConfigError, match="`device` = 'cuda' needs a GPU, and Ray has none free"):
        train(small(device="cuda"), out=tmp_path / "run")


@pytest.mark.parametrize(
    ("room", "count", "placement", "expected"),
    [
        ({"a": 8, "b": 8}, 4, "spread", "aabb"),
        ({"a": 8, "b": 8}, 5, "spread", "aaabb"),
        ({"a": 1, "b": 8}, 4, "spread", "abbb"),
        ({"a": 8, "b": 8}, 4, "pack", "aaaa"),
        ({"a": 3, "b": 8}, 6, "pack", "aaabbb"),
        ({"a": 2, "b": 8, "c": 4}, 10, "pack", "aabbbbbbbb"),
    ],
)
def test_neighbours_are_placed_side_by_side(room, count, placement, expected):
    assert "".join(assign(room, count, placement, first="a")) == expected


@pytest.mark.parametrize("count", range(1, 17))
def test_equal_shares_fit_on_a_gpu_as_ray_rounds_them(count):
    share = equal_share(count)
    assert count * round(10_000 * share) <= 10_000
    assert stages_that_fit({"CPU": 64.0, "GPU": 1.0}, 1.0, share) == count
    assert stages_that_fit({"CPU": 64.0, "GPU": 1.0}, 1.0, 1 / count) * round(10_000 / count) <= 10_000


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["ZBH1", "1F1B", "Interleaved1F1B(3)"])
def test_every_action_of_a_profiled_step_is_recorded(ray, small, tmp_path, schedule):
    run = train(small(forward="TopK(0.1)", schedule=schedule), out=tmp_path / "run")
    actions = run.actions
    assert sorted(actions["step"].unique()) == [1, 2, 3, 5]  # two after the warm-up, then every second
    for _, step in actions.groupby("step"):
        assert sorted(step["op"].unique()) == (["B", "F", "W"] if schedule == "ZBH1" else ["B", "F"])
        assert len(step) == 3 * step["op"].nunique() * 4
        forward = step[(step["op"] == "F") & (step["stage"] < 2)]
        assert (forward["wire_bytes"] > 0).all()
        ends = step.set_index(["stage", "op", "microbatch"])
        made = ends[["start_s", "decode_s", "compute_wall_s", "encode_s"]].sum(axis=1)
        for stage in (1, 2):
            for m in range(4):  # a packet is not received before it was made, by clocks that agree
                assert ends.loc[(stage, "F", m), "start_s"] > made.loc[(stage - 1, "F", m)]
        spent = step[["decode_s", "compute_wall_s", "encode_s"]].sum(axis=1)
        assert (spent <= step["end_s"] - step["start_s"] + 1e-9).all()
