"""The start and end of Ray in a driver, with raysim's handlers of signals, a closed token, and no second word on losses."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from raysim.engine.delivery import NEAR_BYTES, RAY_SETTING
from raysim.engine.head import Connected, RayWatch, ServersWatch
from raysim.engine.signals import signals_after
from raysim.engine.token import protect_token
from raysim.pipeline.errors import WorkerLostError

# Ray's own 15 leaves stages hardly any CPU beside other work: with three busy processes on two cores a start took 155 s.
OURS = {RAY_SETTING: NEAR_BYTES, "worker_niceness": 0}
# Settings of a Ray without a dashboard, whose metrics and task events would go unread.
UNWATCHED = {"enable_metrics_collection": False, "task_events_report_interval_ms": 0}
LOSSES = (
    "worker_died",
    "node_removed",
    "raylet_died",
)  # kinds of messages: raysim names the stages and the node itself


def init_ray(**options: Any) -> Any:
    """Call `ray.init` with these options, and return its context."""
    import ray

    with signals_after(), _without_ray_on_sigterm(), _without_losses():
        context = ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    protect_token()
    return context


def start_ray(
    *, num_cpus: int | None, dashboard: bool, on_lost: Callable[[RayWatch], None], patience_s: float
) -> Connected:
    """Start a Ray of this process's own, which listens on loopback; raises WorkerLostError if it fails.

    `on_lost` and `patience_s`: of the watch on its servers.
    """
    watch = ServersWatch(on_lost, patience_s)
    try:
        with adopted_by(watch):
            context = init_ray(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=dashboard,
                dashboard_host="127.0.0.1",
                _system_config=OURS | ({} if dashboard else UNWATCHED),
            )
    except Exception as error:  # Ray's are bare: its servers take too long on a busy machine, or have no space
        end_ray(watch)
        raise WorkerLostError(f"Ray did not start: {first_reason(error)}") from None
    except BaseException:  # a signal that arrived while Ray started
        end_ray(watch)
        raise
    return Connected(context.dashboard_url, watch)


@contextmanager
def adopted_by(watch: ServersWatch) -> Iterator[None]:
    """Give each server that Ray starts in the block a process group of its own, and have it watched."""
    from ray._private import services

    module: Any = services
    popen = module.ConsolePopen

    class Server(popen):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, process_group=0, **options)
            watch.adopt(self)

    module.ConsolePopen = Server
    try:
        yield
    finally:
        module.ConsolePopen = popen


@contextmanager
def _without_ray_on_sigterm() -> Iterator[None]:
    """Keep Ray from having SIGTERM raise SystemExit in the middle of its start, which leaves a core that crashes at the end."""
    import ray

    utils: Any = ray._private.utils
    ours = getattr(utils, "set_sigterm_handler", None)
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        if ours is not None:
            utils.set_sigterm_handler = ours


@contextmanager
def _without_losses() -> Iterator[None]:
    """Have a driver that connects subscribe by `WithoutLosses`: a thread of Ray listens from that moment on."""
    import ray

    core: Any = ray._raylet
    subscriber = getattr(
        core, "GcsErrorSubscriber", None
    )  # of a Ray that keeps it elsewhere, and says its own word on losses
    if subscriber is None:
        yield
        return
    core.GcsErrorSubscriber = lambda *arguments, **options: WithoutLosses(subscriber(*arguments, **options))
    try:
        yield
    finally:
        core.GcsErrorSubscriber = subscriber


def end_ray(watch: RayWatch) -> None:
    """End the watch, call `ray.shutdown` and remove what a Ray of this process leaves.

    The handlers of signals are kept: Ray's core takes them away at its end, and SIGTERM would kill.
    """
    import ray

    watch.end()
    with signals_after():
        ray.shutdown()
    watch.kill()


def first_reason(error: BaseException) -> str:
    """Return the line of an error of Ray's that says why: the last of a traceback, the first of anything else."""
    lines = [line.strip() for line in plain_text(str(error)).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return (lines[-1] if "Traceback" in str(error) else lines[0]).rstrip(".")


def plain_text(text: str) -> str:
    """Return a text without the colours of a terminal."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


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
