"""The Ray cluster that a driver joins: checks of its address, its nodes by their addresses, and reasons of its errors."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Sequence

from raysim.config import ConfigError
from raysim.engine.head import Connected, HeadWatch, RayWatch
from raysim.engine.init import first_reason, init_ray, plain_text
from raysim.engine.token import token_words, user_here

ANSWER_S = 3.0  # for the head to take a connection
PROBE_S = 11.0  # for the cluster to say who its nodes are

# Asks the head for its nodes in a process of its own: Ray's core prints what it thinks of a token, and may end the process.
_PROBE = """
import sys
from ray._raylet import GcsClient
try:
    GcsClient(address=sys.argv[1]).get_all_node_info(timeout=8)
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


def join_cluster(address: str, field: str, on_lost: Callable[[RayWatch], None] = lambda watch: None) -> Connected:
    """Join the cluster at an address, which `check_address` has found good, and watch its head from then on.

    `field` names the setting that the address is of, `on_lost` is called when the head is lost. Raises ConfigError where the
    cluster cannot be joined.
    """
    import ray
    from ray.job_config import JobConfig

    try:
        context = init_ray(address=address, job_config=JobConfig(metadata={"user": user_here()}))
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"The cluster at {field} = {address!r} cannot be joined: {first_reason(error)}.") from None
    return Connected(context.dashboard_url, HeadWatch(ray.get_runtime_context().gcs_address, on_lost))


def check_address(address: str, field: str) -> None:
    """Raise ConfigError, within 15 seconds, where a driver on this machine cannot join the cluster at an address."""
    if "://" in address:
        raise ConfigError(
            f"{field} must be the host:port of a cluster's head, or auto, but got {address!r}: a driver needs a Ray node on "
            "its own machine. Send a job with `raysim submit`."
        )
    if address == "local":
        return
    if address == "auto" and not (address := _found()):
        raise ConfigError(f"{field} = 'auto' finds no Ray node on this machine. {_ways_in('HEAD:6379')}")
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(
            f"{field} must be the host:port of a cluster's head, as {host or address}:6379, but got {address!r}."
        )
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"{field} must be a running cluster's, but {address!r} does not answer: {error}.") from None
    if not _local_nodes():
        raise ConfigError(
            f"{field} = {address!r} answers, but this machine is no node of that cluster. {_ways_in(address)}"
        )
    _check_token(address, field)


def _ways_in(address: str) -> str:
    return (
        f"Send a job with `raysim submit`, or make this machine a node without CPUs: `ray start --address={address} "
        "--num-cpus=0` (with RAY_AUTH_MODE=token where the cluster has a token)."
    )


def _check_token(address: str, field: str) -> None:
    """Raise ConfigError where the head does not answer a process with this environment's token."""
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _PROBE, address], capture_output=True, text=True, timeout=PROBE_S, check=False
        )
        said = asked.stderr if asked.returncode else ""
    except subprocess.TimeoutExpired as error:
        said = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else "no answer"
    if not said:
        return
    if "auth" in said.lower() or "token" in said.lower():
        raise ConfigError(f"The cluster at {field} = {address!r} asks for its token, {token_words()}")
    raise ConfigError(f"The cluster at {field} = {address!r} does not say who its nodes are: {_last_line(said)}.")


def _found() -> str:
    """Return the address of the cluster that this machine belongs to, "" where there is none."""
    from ray._private.services import canonicalize_bootstrap_address

    try:
        return canonicalize_bootstrap_address("auto") or ""
    except ConnectionError:
        return ""


def _local_nodes() -> set[str]:
    """Return the ids of the Ray nodes that run on this machine."""
    from ray._private.services import find_node_ids

    found: set[str] = find_node_ids()  # type: ignore[no-untyped-call]
    return found


def node_address(node: str) -> str:
    """Return the address of a node, by which people know it."""
    import ray

    found = [entry["NodeManagerAddress"] for entry in ray.nodes() if entry["NodeID"] == node]  # type: ignore[no-untyped-call]
    return str(found[0]) if found else node


def lost_nodes(nodes: Sequence[str]) -> list[str]:
    """Return the nodes that are no longer alive, each once."""
    import ray

    alive = {entry["NodeID"] for entry in ray.nodes() if entry["Alive"]}  # type: ignore[no-untyped-call]
    return [node for node in dict.fromkeys(nodes) if node not in alive]


def _last_line(text: str) -> str:
    lines = [line.strip() for line in plain_text(text).splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else "no answer"
