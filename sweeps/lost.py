"""Losses of trials' processes that Ray Tune does not expect."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray.air.execution._internal.actor_manager import RayActorManager
from ray.exceptions import RayActorError, RayError, RayTaskError

from raysim.engine.init import first_reason


@contextmanager
def losses_are_retried() -> Iterator[None]:
    """Have Tune treat every error of Ray itself as the loss of the trial's process, until the block ends.

    Tune 2.60 tries a trial again after `RayActorError` only. Any other error of Ray ends the whole experiment, such as
    `OutOfMemoryError`, which Ray raises after it has killed a process because its node ran out of memory. None of Tune's
    settings, callbacks and schedulers sees such an error before, so the method that receives it is wrapped.
    """
    manager: Any = RayActorManager
    receive = manager._actor_task_failed

    def receive_as_loss(self: Any, tracked_actor_task: Any, exception: Exception) -> None:
        if isinstance(exception, RayError) and not isinstance(exception, (RayActorError, RayTaskError)):
            exception = RayActorError(error_msg=first_reason(exception))
        receive(self, tracked_actor_task, exception)

    manager._actor_task_failed = receive_as_loss
    try:
        yield
    finally:
        manager._actor_task_failed = receive


def last_reason(text: str) -> str:
    r"""Return why a trial's process was lost the last time, by the error file that Tune writes.

    >>> last_reason("Failure # 1\nThe actor died.\nFailure # 2\n1 worker(s) were killed due to the node running low on memory. See ...")
    '1 worker(s) were killed due to the node running low on memory'
    """
    last = text.rpartition("Failure # ")[2]
    if (found := re.search(r"[^.\n]*running low on memory", last)) is not None:
        return found[0].strip()
    line = next((line.strip() for line in reversed(last.splitlines()) if line.strip()), "")
    return re.sub(r"^[\w.]+Error: ", "", line)
