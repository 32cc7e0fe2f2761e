"""Signals: a run that is asked to end does so at its next step, with a checkpoint, and goes on to the same bits."""

from __future__ import annotations

import signal
import time

import pytest
from configurations import SMALL
from runs import same_records

from raysim.cli.exits import end_on_sigterm
from raysim.config import make_config
from raysim.engine.connection import signals_after
from raysim.records import Run
from raysim.signals import SIGNALS
from raysim.sweeps.tuning import Halt
from raysim.sweeps.tuning import on_signals as signals_of_a_sweep
from raysim.training.checkpoint import checkpoints
from raysim.training.events import Interruption
from raysim.training.run import Training
from raysim.training.train import train


@pytest.fixture(autouse=True)
def nothing_ignored():
    """End on signals even if the suite was started by `nohup` or in the background, which ignore them."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def interrupted(config, folder, number, moment):
    """Train in this process, and send it a signal at a moment; return the exit code."""
    ending = Interruption()
    with ending.on_signals():
        training = Training(config, engine="inline", out=folder, ending=ending)
        arrange, done = moment
        arrange(training, lambda: done() or signal.raise_signal(number))
        with pytest.raises(KeyboardInterrupt):
            list(training.events())
    return ending.exit_code


def once():
    """Return a function that is true from its second call on."""
    calls = []

    def done():
        calls.append(None)
        return len(calls) > 1

    return done


def before_call(name, nth):
    """Arrange a signal just before the n-th call of a method of the engine."""

    def arrange(training, send):
        method, calls = getattr(training.engine, name), []

        def call(*arguments, **options):
            calls.append(None)
            if len(calls) == nth:
                send()
            return method(*arguments, **options)

        setattr(training.engine, name, call)

    return arrange


MOMENTS = {
    "start": (before_call("start", 1), []),
    "step": (before_call("step", 4), [4]),  # which is finished, and kept
    "checkpoint": (before_call("state_of", 4), [4]),  # of the second one, which is finished
    "evaluation": (before_call("evaluating", 1), [4]),  # which is dropped; its checkpoint came before it
}


LONG = {**SMALL, "steps": 6, "checkpoint_every_steps": 2, "evaluate_every_steps": 4, "forward": "EF21(TopK(0.3))"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train(make_config(LONG), engine="inline", out=tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        *((signal.SIGTERM, moment) for moment in MOMENTS),
        (signal.SIGINT, "step"),
        pytest.param(signal.SIGHUP, "step", marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_a_run_in_order_and_it_resumes_to_the_same_bits(tmp_path, whole, number, moment):
    config = make_config(LONG)
    arrange, kept = MOMENTS[moment]
    folder = tmp_path / "run"
    assert interrupted(config, folder, number, (arrange, once())) == 128 + number
    assert Run(folder).status == "interrupted"
    assert [found.step for found in checkpoints(folder / "checkpoints")][-1:] == kept
    resumed = train(config, engine="inline", out=folder, resume=True)
    same_records(resumed, whole)


def test_step_longer_than_grace_period_is_dropped(small, tmp_path):
    config = small(grace_s=0.2, checkpoint_every_steps=2, timeout_s=60)

    def arrange(training, send):
        step = training.engine.step

        def slow(number, signals):
            if number == 3:
                send()
                time.sleep(30)
            return step(number, signals)

        training.engine.step = slow

    began = time.monotonic()
    assert interrupted(config, tmp_path / "run", signal.SIGTERM, (arrange, once())) == 143
    assert time.monotonic() - began < 30
    assert [found.step for found in checkpoints(tmp_path / "run" / "checkpoints")] == [2]
    assert Run(tmp_path / "run").steps["step"].tolist() == [0, 1, 2]


def test_signals_that_come_while_the_records_are_ended_change_nothing(small, tmp_path):
    ending = Interruption()
    with ending.on_signals():
        training = Training(small(), engine="inline", out=tmp_path / "run", ending=ending)
        compact = training.recorder.compact
        training.recorder.compact = lambda: (signal.raise_signal(signal.SIGTERM), compact())[1]
        list(training.events())
    assert Run(tmp_path / "run").status == "finished"


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_the_process_ignores_stays_ignored(number):
    before = signal.signal(number, signal.SIG_IGN)  # as `nohup` leaves SIGHUP
    ending = Interruption()
    halt = Halt()
    try:
        with ending.on_signals(), signals_of_a_sweep(halt), signals_after():
            ending.begin(grace_s=60.0)
            signal.raise_signal(number)
        assert signal.getsignal(number) is signal.SIG_IGN
        end_on_sigterm()
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert not ending.wanted
    assert not halt.wanted


def test_alarm_of_caller_is_kept(small, tmp_path):
    rung = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    signal.alarm(1000)
    try:
        train(small(), engine="inline", out=tmp_path / "run")
        with Interruption().on_signals():
            signal.raise_signal(signal.SIGALRM)
        left_s = signal.alarm(0)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert left_s > 900
    assert rung == [signal.SIGALRM]


def test_signal_handlers_are_restored_after_a_run(small, tmp_path):
    before = [signal.getsignal(number) for number in (*SIGNALS, signal.SIGALRM)]
    with Interruption().on_signals():
        pass
    assert [signal.getsignal(number) for number in (*SIGNALS, signal.SIGALRM)] == before
