"""Seconds of steps whose exchange goes on under later steps, against counts by hand."""

import numpy as np
import pytest

from raysim.network.prices import overlapped
from raysim.network.profile import Profile
from raysim.network.timed_step import TimedStep
from raysim.network.topology import FREE
from raysim.schedules import Interleaved1F1B

QUIET, CODEC, BUSY, LATENCY = 2.0, 0.5, 7.0, 4.0


def seconds(exchanging: bool, latent: bool) -> float:
    """A step of 2 s; its exchange adds codecs of 0.5 s, transfers of 7 s, and 4 s of latency."""
    return QUIET + exchanging * (CODEC + BUSY + latent * LATENCY)


@pytest.mark.parametrize(
    ("num_steps", "interval", "added"),
    [
        (0, 1, 11.0),  # waited for at once
        (1, 4, 9.0),  # under one step of 2 s; over before the next exchange
        (4, 4, 3.0),
        (5, 4, 1.0),  # under five steps; transfers of 7 s fit into the four steps to the next exchange
        (6, 4, 0.0),
        (6, 3, 1.0),  # all is hidden, but the next exchange leaves after 6 s and waits until 7 s
        (9, 1, 5.0),
        (9, 2, 3.0),
        (4, 1, 5.0),  # the wait for the transfers before is longer than that for the exchange
    ],
)
def test_exchange_is_hidden_until_next_exchange(num_steps: int, interval: int, added: float) -> None:
    expected = QUIET + CODEC + added
    assert overlapped(seconds, CODEC, num_steps, interval) == pytest.approx(expected)


def test_no_later_step_hides_the_codecs_of_all_stages_of_a_worker() -> None:
    profile = Profile.uniform(num_stages=4, forward_s=1.0, backward_s=2.0, method_s=np.array([5.0, 6.0, 3.0, 4.0]))
    waiting, hidden = (
        TimedStep([(1.0, profile)], Interleaved1F1B(2), num_microbatches=4, num_replicas=2, averaging_delay=delay)
        for delay in (0, 1)
    )
    assert hidden.step_s(FREE) == pytest.approx(waiting.step_s(FREE))  # transfers take no time
