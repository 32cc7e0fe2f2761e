"""Exchanges of replicas that go on under the steps that follow: the seconds that a step still waits for them.

Two assumptions are made: the steps that hide an exchange last as long as the step that sends it, and their packets do not slow the
packets of the exchange down, nor the other way round.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import numpy as np

from raysim.network.collectives import DIRECTIONS, Floats
from raysim.network.profile import Profile

Seconds = TypeVar("Seconds", float, Floats)


def without_exchange(profile: Profile) -> Profile:
    """Return a step's profile in which replicas exchange nothing."""
    left = profile.transfers[profile.transfers["direction"] != DIRECTIONS[0]]
    return replace(
        profile, transfers=left, method_s=np.zeros_like(profile.method_s), gradient_bytes=0 * profile.gradient_bytes
    )


def hidden(step_s: Seconds, quiet_s: Seconds, codec_s: Seconds, num_steps: int) -> Seconds:
    """Return the seconds of a step whose exchange the next `num_steps` steps hide, as far as they last.

    `step_s`: with the exchange waited for at once. `quiet_s`: without an exchange. `codec_s`: of its codecs, which compute and are
    not hidden.

    >>> hidden(10.0, 2.0, 1.0, 3), hidden(10.0, 2.0, 1.0, 4)
    (4.0, 3.0)
    """
    waited = step_s - quiet_s - codec_s - num_steps * quiet_s
    return quiet_s + codec_s + waited * (waited > 0)
