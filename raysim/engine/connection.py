"""Start, join and shut down Ray, keeping this process's signal handlers; its token, dashboard and addresses."""

from __future__ import annotations

import getpass
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from raysim.config import ConfigError
from raysim.engine import ray_internals
from raysim.engine.delivery import NEAR_BYTES
from raysim.engine.watch import HeadWatch, RayWatch, ServersWatch, end_process
from raysim.limits import usable_cpus
from raysim.pipeline.errors import WorkerLostError
from raysim.signals import SIGNALS, handled
from raysim.storage.files import expanded

# Ray's default niceness, 15, starves stages under other load: with three busy processes on two cores, a start took 155 s.
OURS = {ray_internals.RAY_SETTING: NEAR_BYTES, "worker_niceness": 0}
# Settings without a dashboard: nobody would read the metrics and task events.
UNWATCHED = {"enable_metrics_collection": False, "task_events_report_interval_ms": 0}
END_S = 10.0  # for Ray's servers to shut down before they are killed: Ray's core waits for ever for a suspended one
ANSWER_S = 3.0  # for the head to accept a connection
PATIENCE_S = 6.0  # for the driver to notice lost servers; after that, it counts as stuck in Ray


def listen_on_loopback(address: str | None = None) -> None:
    """Make a Ray started by this process listen on loopback only, unless it joins the cluster at `address`.

    Call this before Ray is imported. By default Ray on Linux listens on all addresses; the variable that prevents this is meant
    for other systems.
    """
    if not (address or os.environ.get("RAY_ADDRESS")):
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


def protect_token() -> None:
    """Make the token file, if there is one, readable by its owner only: Ray writes it readable for all."""
    with suppress(OSError):
        _token_file().chmod(0o600)


def dashboard_sentence(url: str) -> str:
    """Return a sentence with the URL of Ray's dashboard, and its token file if it requires a token."""
    asked = os.environ.get("RAY_AUTH_MODE") == "token"
    return f"Ray's dashboard: http://{url}" + (f", by the token in {_token_file()}" if asked else "")


def token_words() -> str:
    """Return the end of a sentence on a refused token: the token this process presented, and the remedy."""
    copied = "from the machine that made the cluster"
    if os.environ.get("RAY_AUTH_MODE") != "token":
        return (
            "and this process showed none, since RAY_AUTH_MODE is not `token`. Set RAY_AUTH_MODE=token, and copy "
            f"~/.ray/auth_token {copied}."
        )
    if value := os.environ.get("RAY_AUTH_TOKEN"):
        return f"and that of RAY_AUTH_TOKEN ({len(value)} characters) is wrong. Unset it, and copy ~/.ray/auth_token {copied}."
    file = _token_file()
    if not file.is_file():
        return f"and there is none in {file}. Copy it {copied}."
    return f"and the one in {file} is wrong. Copy it again {copied}."


def user_here() -> str:
    """Return user@host of this process, by which its jobs are shown to other users of a cluster."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):  # a user without a name, for example in some containers
        return socket.gethostname()


def _token_file() -> Path:
    file = os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"
    return expanded(file) or Path(file)


def init_ray(**options: Any) -> Any:
    """Call `ray.init` with these options, and return its context."""
    import ray

    with signals_after(), ray_internals.no_sigterm_handler(), ray_internals.silent_losses():
        context = ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    protect_token()
    return context


def start_ray(
    *, num_cpus: int | None, dashboard: bool, on_lost: Callable[[RayWatch], None], patience_s: float
) -> RayWatch:
    """Start a private Ray on loopback; if its servers are lost, call `on_lost` after `patience_s`.

    Raises WorkerLostError if it does not start.
    """
    watch = ServersWatch(on_lost, patience_s)
    try:
        with ray_internals.new_servers(watch.adopt):
            context = init_ray(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=dashboard,
                dashboard_host="127.0.0.1",
                _system_config=OURS | ({} if dashboard else UNWATCHED),
            )
    except Exception as error:  # Ray raises bare ones if its servers are too slow to start, or lack space
        end_ray(watch)
        raise WorkerLostError(f"Ray did not start: {first_reason(error)}") from None
    except BaseException:  # a signal that arrived while Ray started
        end_ray(watch)
        raise
    watch.dashboard_url = context.dashboard_url
    host, _, port = context.address_info["gcs_address"].rpartition(":")
    watch.gcs = host, int(port)
    return watch


def end_ray(watch: RayWatch) -> None:
    """End the watch, shut Ray down, and kill any remaining servers of a Ray started by this process.

    Signal handlers are restored: Ray's core removes them when it ends, and SIGTERM would then kill the process.
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
    """Return the line of a Ray error that states the cause: the last line of a traceback, else the first line."""
    lines = _plain_lines(str(error)) or [type(error).__name__]
    return (lines[-1] if "Traceback" in str(error) else lines[0]).rstrip(".")


def _plain_lines(text: str) -> list[str]:
    """Return the non-empty lines of a text, without terminal colours and Ray's time and source of a logged line."""
    plain = re.sub(r"\x1b\[[0-9;]*m|^\[\d{4}-[^]]*\] \S+: ", "", text, flags=re.MULTILINE)
    return [line.strip() for line in plain.splitlines() if line.strip()]


@contextmanager
def signals_after() -> Iterator[None]:
    """Defer signals while a block starts or ends Ray, then restore the previous handlers.

    Ray exits on SIGTERM, with a stack dump once its core runs, and an interrupted start leaves processes behind.
    If Ray raises SystemExit all the same, KeyboardInterrupt is raised instead. Signals arrive in the main thread only, so
    in other threads this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def keep(number: int, _frame: Any) -> None:
        arrived.append(number)

    broken_off = False
    with handled(keep, (*SIGNALS, signal.SIGALRM)):
        try:
            yield
        except SystemExit:
            broken_off = True
            arrived.append(signal.SIGTERM)
    for late in arrived:
        signal.raise_signal(late)
    if broken_off:
        raise KeyboardInterrupt


@contextmanager
def connected(work: str, address: str = "", field: str = "`RAY_ADDRESS`") -> Iterator[None]:
    """Join the cluster at `address`, else `RAY_ADDRESS`, or start a Ray here, unless this process is connected; end it after the block.

    If its servers are lost, the process ends with a sentence that names the `work`, and code 1. Raises ConfigError if the cluster
    cannot be joined, WorkerLostError if Ray does not start.
    """
    import ray

    if ray.is_initialized():
        yield
        return

    def on_lost(watch: RayWatch) -> None:
        end_process(f"raysim: {watch.sentence}. Once Ray's servers can run, repeat the {work}.")

    if address := address or os.environ.get("RAY_ADDRESS", ""):
        check_address(address, field)
        watch = join_cluster(address, field, on_lost, PATIENCE_S)
    else:
        watch = start_ray(num_cpus=usable_cpus(), dashboard=False, on_lost=on_lost, patience_s=PATIENCE_S)
    try:
        yield
    finally:
        end_ray(watch)


def join_cluster(address: str, field: str, on_lost: Callable[[RayWatch], None], patience_s: float) -> RayWatch:
    """Join the cluster at an address already checked by `check_address`, and watch its head.

    `field` names the setting with the address; `on_lost` is called `patience_s` after the head is lost. Raises ConfigError if the
    cluster cannot be joined.
    """
    import ray
    from ray.job_config import JobConfig

    try:
        context = init_ray(address=address, job_config=JobConfig(metadata={"user": user_here()}))
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"The cluster at {field} = {address!r} cannot be joined: {first_reason(error)}.") from None
    watch = HeadWatch(ray.get_runtime_context().gcs_address, on_lost, patience_s)
    watch.dashboard_url = context.dashboard_url
    return watch


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
        local = ray_internals.local_address()
        if local is None:
            return
        if not local:
            raise ConfigError(f"{field} = 'auto' finds no Ray node on this machine. {_ways_in('HEAD:6379')}")
        address = local
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(
            f"{field} must be the host:port of a cluster's head, such as {host or address}:6379, but got {address!r}."
        )
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"{field} must be a running cluster's, but {address!r} does not answer: {error}.") from None
    if ray_internals.local_nodes() == set():
        raise ConfigError(
            f"{field} = {address!r} answers, but this machine is not a node of that cluster. {_ways_in(address)}"
        )
    complaint = ray_internals.complaint_of(address)  # about this environment's token, for example
    if "auth" in complaint.lower() or "token" in complaint.lower():
        raise ConfigError(f"The cluster at {field} = {address!r} asks for its token, {token_words()}")
    if complaint:
        reason = (_plain_lines(complaint) or ["no answer"])[-1].rstrip(".")
        raise ConfigError(f"The cluster at {field} = {address!r} does not list its nodes: {reason}.")


def _ways_in(address: str) -> str:
    return (
        f"Send a job with `raysim submit`, or make this machine a node without CPUs: `ray start --address={address} "
        "--num-cpus=0` (with RAY_AUTH_MODE=token where the cluster has a token)."
    )


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
