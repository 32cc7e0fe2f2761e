"""Start and end Ray in a driver: keep the driver's signal handlers, and the cluster's token to its owner."""

from __future__ import annotations

import logging
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from raysim.engine.access import protect_token
from raysim.engine.delivery import NEAR_BYTES, RAY_SETTING
from raysim.engine.ray_internals import new_servers, no_sigterm_handler, silent_losses
from raysim.engine.watch import Connected, RayWatch, ServersWatch
from raysim.pipeline.errors import WorkerLostError

# Ray's own 15 leaves stages hardly any CPU beside other work: with three busy processes on two cores a start took 155 s.
OURS = {RAY_SETTING: NEAR_BYTES, "worker_niceness": 0}
# Settings of a Ray without a dashboard, whose metrics and task events would go unread.
UNWATCHED = {"enable_metrics_collection": False, "task_events_report_interval_ms": 0}
END_S = (
    10.0  # in which Ray's servers may end in order, then they are killed: for a stopped one Ray's core waits for ever
)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)


def init_ray(**options: Any) -> Any:
    """Return the context of `ray.init` with these options."""
    import ray

    with signals_after(), no_sigterm_handler(), silent_losses():
        context = ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    protect_token()
    return context


def start_ray(
    *, num_cpus: int | None, dashboard: bool, on_lost: Callable[[RayWatch], None], patience_s: float
) -> Connected:
    """Start a Ray of this process's own, on loopback, and watch its servers with `on_lost` and `patience_s`.

    Raises WorkerLostError if it does not start.
    """
    watch = ServersWatch(on_lost, patience_s)
    try:
        with new_servers(watch.adopt):
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


def end_ray(watch: RayWatch) -> None:
    """End the watch, shut Ray down, and kill what is left of a Ray of this process.

    Signal handlers are kept: Ray's core removes them at its end, and SIGTERM would kill the process.
    """
    import ray

    watch.end()
    impatience = threading.Timer(END_S, watch.kill)
    impatience.daemon = True
    impatience.start()
    try:
        with signals_after():
            ray.shutdown()
    finally:
        impatience.cancel()
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


@contextmanager
def signals_after() -> Iterator[None]:
    """Put off signals until the block ends, and restore the handlers from before it: for a block that starts or ends Ray.

    Ray ends the process on SIGTERM, with a stack dump once its core runs, and an interrupted start leaves processes behind.
    If Ray ends the process all the same, KeyboardInterrupt is raised instead. Signals arrive in the main thread only, so
    in other threads nothing happens.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def keep(number: int, _frame: Any) -> None:
        arrived.append(number)

    before = {number: signal.signal(number, keep) for number in SIGNALS}
    broken_off = False
    try:
        yield
    except SystemExit:
        broken_off = True
        arrived.append(signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
    for late in arrived:
        signal.raise_signal(late)
    if broken_off:
        raise KeyboardInterrupt
