"""Access to Ray's private API, each with a fallback. No other module uses a private name of Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

LOSSES = ("worker_died", "node_removed", "raylet_died")  # raysim's own messages name stages and nodes
OWN_MACHINE = "local.cluster.node"  # node type of `provider: local`
ENDED_IDLE = 4  # AUTOSCALER_DRAIN_IDLE, among the death reasons of nodes
PROBE_S = 11.0  # for a head to list its nodes, once Ray is imported
RAY_SETTING = "max_direct_call_object_size"
RAY_DEFAULT_BYTES = 100 * 1024  # of this setting

# Asks a head for its nodes in a separate process: Ray's core prints errors about a token, and may end the process.
_PROBE = """
import sys
try:
    from ray._raylet import GcsClient
except ImportError:
    sys.exit()
print(flush=True)
try:
    GcsClient(address=sys.argv[1]).get_all_node_info(timeout=8)
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


def _internal(module: str, name: str = "") -> Any:
    """Return a Ray module, or a private object in it by its dotted name; None if this version lacks it."""
    try:
        value: Any = import_module(module)
        for part in filter(None, name.split(".")):
            value = getattr(value, part)
    except (ImportError, AttributeError):
        return None
    return value


@contextmanager
def _replaced(module: str, name: str, replacement: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a private object by `replacement` of it within the block; do nothing if this version lacks it."""
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
    """Start each of Ray's servers in its own process group within the block, and pass it to `adopt`.

    Fallback: servers stay in the driver's process group, unwatched.
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
    """Keep Ray from raising SystemExit on SIGTERM during its start: its core would later crash at the end.

    Fallback: Ray's handler stays until the caller restores its own.
    """
    with _replaced("ray._private.utils", "set_sigterm_handler", lambda _: lambda handler: None):
        yield


@contextmanager
def silent_losses() -> Iterator[None]:
    """Suppress Ray's own messages on lost workers and nodes in a driver that connects within the block.

    Fallback: Ray prints them in addition to raysim's.
    """
    with _replaced(
        "ray._raylet", "GcsErrorSubscriber", lambda make: lambda *args, **options: _Silent(make(*args, **options))
    ):
        yield


class _Silent:
    """A subscriber that drops Ray's messages on losses, which Ray would print on the driver's standard output."""

    def __init__(self, subscriber: Any) -> None:
        self._subscriber = subscriber

    def poll(self) -> tuple[Any, Any]:
        """Return the next key and message, with None as the message of a loss."""
        key, message = self._subscriber.poll()
        return key, None if message is not None and message["type"] in LOSSES else message

    def __getattr__(self, name: str) -> Any:
        return getattr(self._subscriber, name)


@contextmanager
def task_errors_as(convert: Callable[[Exception], Exception]) -> Iterator[None]:
    """Pass each error of a trial's task through `convert` before Tune sees it, within the block.

    Tune 2.60 retries a trial only after `RayActorError`; any other Ray error ends the whole experiment, before any setting,
    callback or scheduler sees it. Fallback: Tune's own handling.
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
    """Return the address of this machine's cluster, "" if it is in none; fallback: None, unknown."""
    find = _internal("ray._private.services", "canonicalize_bootstrap_address")
    if find is None:
        return None
    try:
        return find("auto") or ""
    except ConnectionError:
        return ""


def local_nodes() -> set[str] | None:
    """Return the ids of the Ray nodes on this machine; fallback: None, unknown."""
    find = _internal("ray._private.services", "find_node_ids")
    return None if find is None else set(find())


def complaint_of(head: str) -> str:
    """Return the error, or "", when a process of this environment asks a head (host:port) for its nodes.

    Fallback: "", and the error shows up when the driver connects.
    """
    command = [sys.executable, "-c", _PROBE, head]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as probe:
        try:
            probe.stdout.readline()  # type: ignore[union-attr]  # Ray is imported, for which a busy machine takes long
            said = probe.communicate(timeout=PROBE_S)[1]
            return said if probe.returncode else ""
        except subprocess.TimeoutExpired:
            probe.kill()
            return probe.communicate()[1] or "no answer"
        finally:
            probe.kill()


def direct_call_bytes() -> int:
    """Return the largest argument that this process sends within a call; fallback: this node's variable, or Ray's default."""
    from ray.exceptions import RayError

    connect = _internal("ray._private.state", "state._connect_and_get_accessor")
    try:
        settings = json.loads(connect().get_system_config())
    except (RayError, TypeError, AttributeError, ValueError):
        settings = {}
    return int(settings.get(RAY_SETTING) or os.environ.get(f"RAY_{RAY_SETTING}") or RAY_DEFAULT_BYTES)


def free_by_node() -> dict[str, dict[str, float]]:
    """Return the free resources of each node by its id; fallback: all free resources under the driver's node."""
    import ray

    read = _internal("ray._private.state", "available_resources_per_node")
    if read is not None:
        return dict(read())
    return {ray.get_runtime_context().get_node_id(): dict(ray.available_resources())}  # type: ignore[no-untyped-call]


def draining_nodes() -> set[str]:
    """Return the nodes about to leave the cluster, such as spot machines under notice; fallback: none."""
    read = _internal("ray._private.state", "state.get_draining_nodes")
    return set() if read is None else set(read())


def idle_nodes() -> set[str]:
    """Return the nodes ended by an autoscaler because they were idle; fallback: none."""
    import ray

    return {node["NodeID"] for node in ray.nodes() if node.get("DeathReason") == ENDED_IDLE}  # type: ignore[no-untyped-call]


class Scaling(NamedTuple):
    """Report of a cluster's autoscaler: starting nodes by type, and the reasons of failed starts since a given time."""

    starting: Mapping[str, int]
    failures: tuple[str, ...]


def scaling(since_s: float = 0.0) -> Scaling | None:
    """Return the autoscaler's report, with failures since a Unix time, or None without an autoscaler; fallback: None.

    Ray 2 has two autoscalers with different reports. In both, the type of a manually started node is named after the node. A
    cluster of the user's own machines has a single type, and no further nodes to start.
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
    """Cluster CPUs held and awaited by a driver's actors and placement groups."""

    job: str
    command: str
    address: str
    held: float
    waiting: float
    user: str
    """User and machine that started the driver, from its job's metadata; "" if missing."""


def cpus_by_driver() -> list[DriverCpus]:
    """Return the living drivers that hold or await CPUs, by start time; fallback: none."""
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
    """Return True while Ray starts the process of one of this driver's actors; fallback: False."""
    import ray

    read = _internal("ray._private.state", "state.actor_table")
    if read is None:
        return False
    job = ray.JobID.from_hex(ray.get_runtime_context().get_job_id())
    return any(read(None, job, state) for state in ("DEPENDENCIES_UNREADY", "PENDING_CREATION"))
