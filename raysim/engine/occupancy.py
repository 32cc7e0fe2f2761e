"""Drivers that share a cluster: the CPUs that each holds and waits for, and the messages of a driver that waits."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

SHOWN = 80  # characters of another driver's command
FIRST_S = 10.0  # of waiting, after which the first words come
EVERY_S = 30.0  # between further words


class Holder(NamedTuple):
    """Resources of the cluster that a driver holds or waits for, in CPUs."""

    job: str
    command: str
    address: str
    held: float
    waiting: float
    user: str = ""
    """Name of the user and of the machine that the driver or its job was started on."""

    def __str__(self) -> str:
        command = re.sub(r"^.*?(/raysim|-m raysim\.cli)(?= )", "raysim", self.command)  # without the path of Python
        command = command if len(command) <= SHOWN else f"{command[:SHOWN]}..."
        return f"{f'{self.user}: ' if self.user else ''}`{command}` on {self.address} ({self.held:g} CPU)"


def holders() -> list[Holder]:
    """Return the drivers that hold CPUs of the cluster or wait for CPUs, this one among them, by the time of their start."""
    from ray._private.state import state

    gcs_pb2: Any = import_module("ray.core.generated.gcs_pb2")
    accessor = state._connect_and_get_accessor()
    held: dict[str, float] = {}
    waiting: dict[str, float] = {}
    groups = gcs_pb2.PlacementGroupTableData
    for packed in accessor.get_placement_group_table():
        group = groups.FromString(packed)
        cpus = sum(bundle.unit_resources.get("CPU", 0.0) for bundle in group.bundles)
        to = {groups.CREATED: held, groups.PREPARED: held, groups.PENDING: waiting, groups.RESCHEDULING: waiting}.get(
            group.state
        )
        if to is not None and cpus:
            job = group.creator_job_id.hex()
            to[job] = to.get(job, 0.0) + cpus
    for packed in accessor.get_actor_table(None, None):
        actor = gcs_pb2.ActorTableData.FromString(packed)
        cpus = actor.required_resources.get("CPU", 0.0)  # of a placement group's the names are others
        if actor.state == gcs_pb2.ActorTableData.ALIVE and cpus:
            held[actor.job_id.hex()] = held.get(actor.job_id.hex(), 0.0) + cpus
    found = []
    for packed in accessor.get_job_table(skip_submission_job_info_field=True, skip_is_running_tasks_field=True):
        job = gcs_pb2.JobTableData.FromString(packed)
        name = job.job_id.hex()
        if not job.is_dead and (name in held or name in waiting):
            here, user = job.driver_address.ip_address, job.config.metadata.get("user", "")
            cpus = (held.get(name, 0.0), waiting.get(name, 0.0))
            found.append((job.start_time, Holder(name, job.entrypoint, here, *cpus, user)))
    return [holder for _, holder in sorted(found)]


def is_starting() -> bool:
    """Return True if Ray is creating an actor of this driver: it has its room, but its process takes a while to start."""
    import ray
    from ray._private.state import state

    job = ray.JobID.from_hex(ray.get_runtime_context().get_job_id())
    return any(state.actor_table(None, job, name) for name in ("DEPENDENCIES_UNREADY", "PENDING_CREATION"))


def room_sentence(needed: str) -> str:
    """Return the sentence of a driver without room, with the CPUs that are free and the drivers that hold the others."""
    import ray

    me = ray.get_runtime_context().get_job_id()
    total = ray.cluster_resources().get("CPU", 0.0)  # type: ignore[no-untyped-call]
    free = ray.available_resources().get("CPU", 0.0)  # type: ignore[no-untyped-call]
    others = [holder for holder in holders() if holder.held and holder.job != me]
    by = f"; the rest is held by {' and '.join(map(str, others))}: `--wait SECONDS` waits for it" if others else ""
    return f"{needed}; {free:g} of {total:g} CPU are free{by}"


class Waiting:
    """Prints the reason of a wait after `FIRST_S`, and then every `EVERY_S`.

    >>> waiting = Waiting(print)
    >>> waiting.tell(lambda: "nothing is said at once")
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self._say = say or _to_stderr
        self.restart()

    def restart(self) -> None:
        """Start the wait again from zero."""
        self._began = time.monotonic()
        self._next_s = FIRST_S

    @property
    def seconds(self) -> float:
        """Seconds waited so far."""
        return time.monotonic() - self._began

    def tell(self, sentence: Callable[[], str]) -> None:
        """Say the sentence, if it is time for it."""
        if self.seconds >= self._next_s:
            self._next_s = self.seconds + EVERY_S
            self._say(f"waiting for room since {self.seconds:.0f} s: {sentence()}")


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
