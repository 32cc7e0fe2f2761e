"""Callbacks of Tune into a running sweep: they end it, and tell why trials wait."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import tune
from ray.tune.experiment import Trial

from raysim.engine.occupancy import Waiting, is_starting, room_sentence
from raysim.sweeps.lost import last_reason
from raysim.sweeps.nodes import NodeWatch

if TYPE_CHECKING:
    from raysim.sweeps.runner import Sweep

LOOK_S = 1.0  # between two looks whether a trial's process is starting, and between two words to the display
START_S = 600.0  # within which, beyond the wait for room, a process must have started


class Stop(tune.Stopper):
    """Ends the experiment: at Ctrl-C, where the study cannot go on, or where nothing has had room for long."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep

    def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        sweep = self._sweep
        if sweep.reason is None:
            gone = None if sweep.begun else f"The study's folder {sweep.folder} is not there any more."
            sweep.reason = sweep.search.refused or sweep.ledger.lacking() or gone
        stopping = sweep.reason is not None or sweep.signal is not None
        sweep.search.stopping |= stopping
        return stopping

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return tune.stopper.NoopStopper, ()  # see LedgerSearch


class Watch(tune.Callback):
    """Callback of Tune that records why a trial was given up, and whether any goes on."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self._limit_s = sweep.wait_s or sweep.study.config({}).timeout_s
        self._waiting = Waiting()  # for room: no trial goes on or starts
        self._idle = Waiting()  # no trial goes on
        self._looked = self._told = time.monotonic()
        self._nodes = NodeWatch(partial(print, file=sys.stderr, flush=True)) if sweep.address else None

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        self._sweep.phases.enter(None)

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        if self._nodes is not None:
            self._nodes.tell()
        if time.monotonic() - self._told >= LOOK_S:
            self._told = time.monotonic()
            self._sweep.on_change()
        if any(trial.status == Trial.RUNNING for trial in reversed(trials)):
            self._waiting.restart()
            self._idle.restart()
            return
        if time.monotonic() - self._looked >= LOOK_S:
            self._looked = time.monotonic()
            if is_starting():
                self._waiting.restart()
        lacks = f"{self._sweep.entry.trial_words} needs room"
        if self._nodes is not None:  # a Ray of its own has room, and takes a while to start
            self._waiting.tell(partial(room_sentence, lacks))
        if self._waiting.seconds > self._limit_s and self._sweep.reason is None:
            self._sweep.reason = f"No trial has had room for {self._limit_s:g} s: {room_sentence(lacks)}"
        elif self._idle.seconds > self._limit_s + START_S and self._sweep.reason is None:
            self._sweep.reason = (
                f"No trial has started for {self._idle.seconds:.0f} s, although its processes have room"
            )

    def on_trial_recover(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        row = self._sweep.search.row(trial.trial_id)
        if row is not None:
            print(f"trial {row.trial} starts again from its checkpoint: {_reason(trial)}", file=sys.stderr, flush=True)

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        lost = self._sweep.search.lost
        if lost is not None:
            lost.error = f"{lost.error}: {_reason(trial)}"
            self._sweep.rows.write()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return tune.Callback, ()  # see LedgerSearch


def _reason(trial: Trial) -> str:
    """Return why a trial's process was lost the last time."""
    file = trial.error_file
    return last_reason(Path(file).read_text(encoding="utf-8")) if file and Path(file).is_file() else "its process ended"
