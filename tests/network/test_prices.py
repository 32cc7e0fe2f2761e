"""Seconds of steps whose exchange goes on under later steps, against counts by hand."""

import pytest

from raysim.network.prices import overlapped

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
