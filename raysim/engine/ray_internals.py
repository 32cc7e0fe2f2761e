"""Ray's internals without a public counterpart, each with a fallback. No other module uses a private name of Ray."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

LOSSES = ("worker_died", "node_removed", "raylet_died")  # messages in whose place raysim names stages and nodes
OWN_MACHINE = "local.cluster.node"  # type of the nodes of `provider: local`
ENDED_IDLE = 4  # AUTOSCALER_DRAIN_IDLE of a node's reasons for its death
PROBE_S = 11.0  # for a head to say who its nodes are

# Asks a head for its nodes in a process of its own: Ray's core prints what it thinks of a token, and may end the process.
_PROBE = """
import sys
try:
    from ray._raylet import GcsClient
except ImportError:
    sys.exit()
try:
    GcsClient(address=sys.argv[1]).get_all_node_info(timeout=8)
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


def _internal(module: str, name: str = "") -> Any:
    """Return a module of Ray, or a private object in it by its dotted name; None if this version has none."""
    try:
        value: Any = import_module(module)
        for part in filter(None, name.split(".")):
            value = getattr(value, part)
    except (ImportError, AttributeError):
        return None
    return value


@contextmanager
def _replaced(module: str, name: str, replacement: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a private object by one made of it until the block ends; do nothing if this version has none."""
    original = _internal(module, name)
    if original is None:
        yield
        return
    outer, _, attribute = name.rpartition(".")
    holder = _internal(module, outer)
    setattr(holder, attribute, replacement(original))
    try:
        yield
    finally:
        setattr(holder, attribute, original)


@contextmanager
def new_servers(adopt: Callable[[subprocess.Popen[bytes]], None]) -> Iterator[None]:
    """Put each server that Ray starts in the block into a process group of its own, and hand it to `adopt`.

    Fallback: servers stay in the driver's process group, and nobody watches them.
    """

    def adopting(popen: Any) -> Any:
        class Server(popen):  # type: ignore[misc]
            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, process_group=0, **options)
                adopt(self)

        return Server

    with _replaced("ray._private.services", "ConsolePopen", adopting):
        yield


@contextmanager
def no_sigterm_handler() -> Iterator[None]:
    """Keep Ray from raising SystemExit on SIGTERM in the middle of its start, which leaves a core that crashes at the end.

    Fallback: Ray's handler stays until the caller puts its own back.
    """
    with _replaced("ray._private.utils", "set_sigterm_handler", lambda _: lambda handler: None):
        yield


@contextmanager
def silent_losses() -> Iterator[None]:
    """Have a driver that connects in the block leave out Ray's own messages on lost workers and nodes.

    Fallback: Ray prints them beside raysim's.
    """
    with _replaced(
        "ray._raylet", "GcsErrorSubscriber", lambda make: lambda *args, **options: _Silent(make(*args, **options))
    ):
        yield


class _Silent:
    """A subscriber to Ray's messages without those on losses: Ray prints its messages on the driver's standard output."""

    def __init__(self, subscriber: Any) -> None:
        self._subscriber = subscriber

    def poll(self) -> tuple[Any, Any]:
        """Return the next key and message, no message for a loss."""
        key, message = self._subscriber.poll()
        return key, None if message is not None and message["type"] in LOSSES else message

    def __getattr__(self, name: str) -> Any:
        return getattr(self._subscriber, name)


@contextmanager
def task_errors_as(convert: Callable[[Exception], Exception]) -> Iterator[None]:
    """Have Tune receive each error of a trial's task as `convert` of it, until the block ends.

    Tune 2.60 tries a trial again after `RayActorError` only; any other error of Ray ends the whole experiment, and no setting,
    callback or scheduler sees it first. Fallback: Tune's own treatment.
    """

    def converting(receive: Any) -> Any:
        def converted(
            manager: Any, tracked_actor_task: Any, exception: Exception
        ) -> None:  # Ray calls it by these names
            receive(manager, tracked_actor_task, convert(exception))

        return converted

    with _replaced("ray.air.execution._internal.actor_manager", "RayActorManager._actor_task_failed", converting):
        yield


def local_address() -> str | None:
    """Return the address of the cluster that this machine is a node of, "" if of none; fallback: None, not known."""
    find = _internal("ray._private.services", "canonicalize_bootstrap_address")
    if find is None:
        return None
    try:
        return find("auto") or ""
    except ConnectionError:
        return ""


def local_nodes() -> set[str] | None:
    """Return the ids of the Ray nodes on this machine; fallback: None, not known."""
    find = _internal("ray._private.services", "find_node_ids")
    return None if find is None else set(find())


def complaint_of(head: str) -> str:
    """Return what goes wrong if a process of this environment asks a head, host:port, for its nodes; "" if nothing does.

    Fallback: "", and the driver's own connection shows it.
    """
    command = [sys.executable, "-c", _PROBE, head]
    try:
        probe = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, check=False)
    except subprocess.TimeoutExpired as error:
        return error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else "no answer"
    return probe.stderr if probe.returncode else ""


def free_by_node() -> dict[str, dict[str, float]]:
    """Return the free resources of each node by its id; fallback: all that is free, as the driver's node's."""
    import ray

    read = _internal("ray._private.state", "available_resources_per_node")
    if read is not None:
        return dict(read())
    return {ray.get_runtime_context().get_node_id(): dict(ray.available_resources())}  # type: ignore[no-untyped-call]


def draining_nodes() -> set[str]:
    """Return the nodes that are about to leave the cluster, as spot machines with notice; fallback: none."""
    read = _internal("ray._private.state", "state.get_draining_nodes")
    return set() if read is None else set(read())


def idle_nodes() -> set[str]:
    """Return the ended nodes that an autoscaler ended because nothing ran on them; fallback: none."""
    import ray

    return {node["NodeID"] for node in ray.nodes() if node.get("DeathReason") == ENDED_IDLE}  # type: ignore[no-untyped-call]


class Scaling(NamedTuple):
    """Report of a cluster's autoscaler: the nodes on their way by type, and why others failed to start since a given time."""

    starting: Mapping[str, int]
    failures: tuple[str, ...]


def scaling(since_s: float = 0.0) -> Scaling | None:
    """Return the report of the cluster's autoscaler, with failures since a Unix time; None without one; fallback: None.

    Ray 2 has two autoscalers with a report each. In both, the type of a node that was started by hand is named after the node. A
    cluster of the user's own machines has one type, of which there are no more to start.
    """
    import ray

    status, read = (
        _internal("ray.autoscaler.v2.sdk", "get_cluster_status"),
        _internal("ray.experimental.internal_kv", "_internal_kv_get"),
    )
    if status is None or read is None:
        return None
    starting: Counter[str] = Counter()
    try:
        report = status(ray.get_runtime_context().gcs_address)
        if report.stats.autoscaler_version not in (None, "0"):
            types = {node.ray_node_type_name for node in (*report.active_nodes, *report.idle_nodes)}
            for launch in report.pending_launches:
                starting[launch.ray_node_type_name] += launch.count
            starting.update(node.ray_node_type_name for node in report.pending_nodes)
            failed = [(launch.failed_ts_s, launch.details) for launch in report.failed_launches]
        else:
            old = json.loads(read(b"__autoscaling_status") or b"{}")["autoscaler_report"]
            types, starting = set(old["active_nodes"]), Counter(old["pending_launches"])
            starting.update(kind for _, kind, _ in old["pending_nodes"])
            tried = old["node_availability_summary"]["node_availabilities"].values()
            failed = [
                (kind["last_checked_timestamp"], kind["unavailable_node_information"]["description"])
                for kind in tried
                if not kind["is_available"]
            ]
    except Exception:  # a head that does not answer, or a report of another shape
        return None
    by_hand = {f"node_{node['NodeID']}" for node in ray.nodes()}  # type: ignore[no-untyped-call]
    if types <= by_hand | {OWN_MACHINE}:
        return None
    return Scaling(starting, tuple(dict.fromkeys(str(why) for when, why in failed if (when or 0) >= since_s)))


class DriverCpus(NamedTuple):
    """The CPUs of a cluster that a driver's actors and placement groups hold and wait for."""

    job: str
    command: str
    address: str
    held: float
    waiting: float
    user: str
    """Name of the user and machine that started the driver, as its job's metadata have it; "" if they have none."""


def cpus_by_driver() -> list[DriverCpus]:
    """Return the living drivers that hold CPUs or wait for CPUs, by the time of their start; fallback: none."""
    connect = _internal("ray._private.state", "state._connect_and_get_accessor")
    tables = _internal("ray.core.generated.gcs_pb2")
    if connect is None or tables is None:
        return []
    accessor = connect()
    held: dict[str, float] = {}
    waiting: dict[str, float] = {}
    groups = tables.PlacementGroupTableData
    totals = {groups.CREATED: held, groups.PREPARED: held, groups.PENDING: waiting, groups.RESCHEDULING: waiting}
    for packed in accessor.get_placement_group_table():
        group = groups.FromString(packed)
        cpus = sum(bundle.unit_resources.get("CPU", 0.0) for bundle in group.bundles)
        if group.state in totals and cpus:
            total, job = totals[group.state], group.creator_job_id.hex()
            total[job] = total.get(job, 0.0) + cpus
    for packed in accessor.get_actor_table(None, None):
        actor = tables.ActorTableData.FromString(packed)
        cpus = actor.required_resources.get("CPU", 0.0)  # a placement group's actors ask for resources of other names
        if actor.state == tables.ActorTableData.ALIVE and cpus:
            held[actor.job_id.hex()] = held.get(actor.job_id.hex(), 0.0) + cpus
    drivers = []
    for packed in accessor.get_job_table(skip_submission_job_info_field=True, skip_is_running_tasks_field=True):
        job = tables.JobTableData.FromString(packed)
        name = job.job_id.hex()
        if not job.is_dead and (name in held or name in waiting):
            address, user = job.driver_address.ip_address, job.config.metadata.get("user", "")
            cpus = (held.get(name, 0.0), waiting.get(name, 0.0))
            drivers.append((job.start_time, DriverCpus(name, job.entrypoint, address, *cpus, user)))
    return [driver for _, driver in sorted(drivers)]


def is_starting() -> bool:
    """Return True if Ray is creating an actor of this driver, whose process takes a while to start; fallback: False."""
    import ray

    read = _internal("ray._private.state", "state.actor_table")
    if read is None:
        return False
    job = ray.JobID.from_hex(ray.get_runtime_context().get_job_id())
    return any(read(None, job, state) for state in ("DEPENDENCIES_UNREADY", "PENDING_CREATION"))
