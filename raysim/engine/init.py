"""The start and end of Ray in a driver, with raysim's handlers of signals, a closed token, and no second word on losses."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

from raysim.engine.signals import signals_after
from raysim.engine.token import protect_token

LOSSES = (
    "worker_died",
    "node_removed",
    "raylet_died",
)  # kinds of messages: raysim names the stages and the node itself


def init_ray(**options: Any) -> Any:
    """Call `ray.init` with these options, and return its context."""
    import ray

    with signals_after():
        context = ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    protect_token()
    with suppress(AttributeError):  # of a Ray that keeps it elsewhere, and says its own word on losses
        worker: Any = ray._private.worker.global_worker
        worker.gcs_error_subscriber = WithoutLosses(worker.gcs_error_subscriber)  # read by the thread that prints them
    return context


def end_ray() -> None:
    """Call `ray.shutdown`, and keep the handlers of signals: Ray's core takes them away at its end, and SIGTERM would kill."""
    import ray

    with signals_after():
        ray.shutdown()


class WithoutLosses:
    """A subscriber to Ray's messages that leaves out losses: Ray prints its messages on the driver's standard output."""

    def __init__(self, subscriber: Any) -> None:
        self._subscriber = subscriber

    def poll(self) -> tuple[Any, Any]:
        """Return the next key and message, no message for a loss."""
        key, message = self._subscriber.poll()
        return key, None if message is not None and message["type"] in LOSSES else message

    def __getattr__(self, name: str) -> Any:
        return getattr(self._subscriber, name)
