"""Comparing recorded runs, and killing their workers."""

import os
import signal

import numpy as np

from raysim.records import Run
from raysim.training.checkpoint import load_weights

MEASURED = ["seconds", "update_s", "encode_s", "decode_s"]


def same_records(one: Run, other: Run) -> None:
    """Compare all tables but what is measured in seconds, and the weights, bit for bit."""
    same_tables(one, other)
    assert not one.steps["step"].duplicated().any()
    weights = [load_weights(run.folder) for run in (one, other)]
    assert all(np.array_equal(weights[0][name].float(), weights[1][name].float()) for name in weights[0])


def same_tables(one: Run, other: Run) -> None:
    """Compare all tables but what is measured in seconds, bit for bit."""
    for table in ("steps", "evals", "links"):
        frames = [getattr(run, table).drop(columns=MEASURED, errors="ignore") for run in (one, other)]
        assert frames[0].equals(frames[1]), table


def break_off(training, steps=1):
    """Take so many steps, and end the training as an interruption does."""
    events = training.events()
    while steps:
        steps -= next(events).kind == "step"
    events.close()


def kill_at(training, moments):
    """Train, killing one worker with SIGKILL while the step after each of `moments` is under way."""
    moments = dict(moments)
    engine = training.engine
    step = engine.step

    def disturbed(number, step_s=None):
        if number in moments:
            worker = moments.pop(number)
            pid = engine._fetch([engine._actors[worker].__ray_call__.remote(lambda _: os.getpid())])[0]
            fetch = engine._fetch

            def killing(refs):
                engine._fetch = fetch
                os.kill(pid, signal.SIGKILL)  # the step has been submitted, and is under way
                return fetch(refs)

            engine._fetch = killing
        return step(number, step_s)

    engine.step = disturbed
    executed = [event.row["step"] for event in training.events() if event.kind == "step"]
    assert not moments
    return executed
