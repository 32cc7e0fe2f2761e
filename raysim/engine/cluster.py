"""The Ray cluster that a driver joins: checks of its address, and its nodes by their addresses."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from raysim.config import ConfigError
from raysim.engine.access import token_words, user_here
from raysim.engine.ray_internals import complaint_of, local_address, local_nodes
from raysim.engine.start import first_reason, init_ray, plain_text
from raysim.engine.watch import Connected, HeadWatch, RayWatch

ANSWER_S = 3.0  # for the head to take a connection


def join_cluster(address: str, field: str, on_lost: Callable[[RayWatch], None] = lambda watch: None) -> Connected:
    """Join the cluster at an address, checked by `check_address`, and watch its head.

    `field` names the setting with the address; `on_lost` is called if the head is lost. Raises ConfigError if the cluster cannot
    be joined.
    """
    import ray
    from ray.job_config import JobConfig

    try:
        context = init_ray(address=address, job_config=JobConfig(metadata={"user": user_here()}))
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"The cluster at {field} = {address!r} cannot be joined: {first_reason(error)}.") from None
    return Connected(context.dashboard_url, HeadWatch(ray.get_runtime_context().gcs_address, on_lost))


def check_address(address: str, field: str) -> None:
    """Raise ConfigError, within 15 seconds, if a driver on this machine cannot join the cluster at an address."""
    if "://" in address:
        raise ConfigError(
            f"{field} must be the host:port of a cluster's head, or auto, but got {address!r}: a driver needs a Ray node on "
            "its own machine. Send a job with `raysim submit`."
        )
    if address == "local":
        return
    if address == "auto":
        local = local_address()
        if local is None:
            return
        if not local:
            raise ConfigError(f"{field} = 'auto' finds no Ray node on this machine. {_ways_in('HEAD:6379')}")
        address = local
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(
            f"{field} must be the host:port of a cluster's head, as {host or address}:6379, but got {address!r}."
        )
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"{field} must be a running cluster's, but {address!r} does not answer: {error}.") from None
    if local_nodes() == set():
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
    """Raise ConfigError if the head does not answer a process with this environment's token."""
    complaint = complaint_of(address)
    if not complaint:
        return
    if "auth" in complaint.lower() or "token" in complaint.lower():
        raise ConfigError(f"The cluster at {field} = {address!r} asks for its token, {token_words()}")
    raise ConfigError(f"The cluster at {field} = {address!r} does not say who its nodes are: {_last_line(complaint)}.")


def node_address(node: str) -> str:
    """Return the address of a node by its id."""
    import ray

    addresses = [entry["NodeManagerAddress"] for entry in ray.nodes() if entry["NodeID"] == node]  # type: ignore[no-untyped-call]
    return str(addresses[0]) if addresses else node


def lost_nodes(nodes: Sequence[str]) -> list[str]:
    """Return the dead nodes, each once."""
    import ray

    alive = {entry["NodeID"] for entry in ray.nodes() if entry["Alive"]}  # type: ignore[no-untyped-call]
    return [node for node in dict.fromkeys(nodes) if node not in alive]


def _last_line(text: str) -> str:
    lines = [line.strip() for line in plain_text(text).splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else "no answer"
