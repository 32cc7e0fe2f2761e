"""A sweep as a cluster job: submitted, followed and fetched from a machine outside the cluster.

The cluster is reached through a tunnel to its head, with the file of `ray up`, or at its dashboard's URL. For on-premises clusters,
Ray's own commands find the head only on the machine that ran `ray up`, where Ray keeps the cluster's state. `Head` finds it by SSH
from any machine with the cluster's file.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from raysim.config import ConfigError
from raysim.engine.connection import token_words, user_here
from raysim.storage.places import in_bucket

AGENT_S = 60.0  # for the agent that starts jobs, ready after the dashboard
LEFT_OUT = [".git", ".venv", "**/__pycache__", "results"]  # of the sent folder, besides the entries of its .gitignore
PORT = 8265  # of the dashboard, which accepts jobs
ANSWER_S = 3.0  # for the dashboard to accept a connection, or to answer
ASK_S = 5.0  # between questions to the dashboard while its job prints nothing
LOST_S = 60.0  # without an answer, after which the head counts as lost
TUNNEL_S = 12.0  # for a tunnel to reach it

OPTIONS = (  # of ssh
    *("-o", "BatchMode=yes"),
    *("-o", "ConnectTimeout=10"),
    *("-o", "LogLevel=ERROR"),
    *("-o", "StrictHostKeyChecking=accept-new"),
)
TUNNEL = ("-o", "ExitOnForwardFailure=yes", "-o", "ServerAliveInterval=15")  # idle while a job is silent
RAY = (sys.executable, "-m", "ray.scripts.scripts")


class ClusterHead(NamedTuple):
    """The head's user and address, and ssh's options."""

    target: str
    options: tuple[str, ...]

    @classmethod
    def of(cls, file: Path) -> ClusterHead | None:
        """Return the head named in a cluster's file; None if only Ray can find it, as in a cloud.

        Raises ConfigError if the file cannot be read, or if this machine has no ssh.
        """
        values = _read(file)
        provider, auth = (values.get(name) or {} for name in ("provider", "auth"))
        if provider.get("type") != "local" or "head_ip" not in provider or values.get("docker"):
            return None
        if shutil.which("ssh") is None:
            raise ConfigError("`--cluster` needs `ssh`, which this machine lacks. Install OpenSSH's client.")
        options: tuple[str, ...] = OPTIONS
        if key := auth.get("ssh_private_key"):
            options += ("-i", str(Path(key).expanduser()), "-o", "IdentitiesOnly=yes")
        if proxy := auth.get("ssh_proxy_command"):
            options += ("-o", f"ProxyCommand={proxy}")
        user = auth.get("ssh_user")
        return cls(f"{user}@{provider['head_ip']}" if user else str(provider["head_ip"]), options)

    def tunnel(self, here: int, there: int) -> list[str]:
        """Return the command that forwards a port of this machine to a loopback port of the head."""
        return ["ssh", *self.options, *TUNNEL, "-N", "-L", f"127.0.0.1:{here}:127.0.0.1:{there}", self.target]

    def shell(self, command: str) -> str:
        """Return the shell command that runs another command on the head, in an interactive shell as Ray does."""
        return shlex.join(["ssh", *self.options, "-t", self.target, shlex.join(["bash", "-ic", command])])

    def copy(self, folder: str, to: Path) -> list[str]:
        """Return the command that copies the contents of a folder of the head to one of this machine."""
        return ["rsync", "-az", "-e", shlex.join(["ssh", *self.options]), f"{self.target}:{folder}/", f"{to}/"]


class Cluster(NamedTuple):
    """The target cluster of a job, given by the file of `ray up` or the URL of its dashboard."""

    file: Path | None = None
    url: str | None = None
    head: ClusterHead | None = None
    """The head in the file; None if only Ray can find it."""

    @classmethod
    def named(cls, file: str | None, url: str | None) -> Cluster:
        """Return the cluster given by `file` or `url`; raises ConfigError unless exactly one is given, or if the file is bad."""
        if (file is None) == (url is None):
            raise ConfigError("Give exactly one of `--cluster FILE`, as for `ray up`, and `--address URL`.")
        if file is not None and not Path(file).is_file():
            raise ConfigError(f"`--cluster` must be the file given to `ray up`, but {file} is not a file.")
        if url is not None and urlsplit(url).scheme not in ("http", "https"):
            raise ConfigError(
                f"`--address` must be the URL of the cluster's dashboard, such as http://127.0.0.1:{PORT}, but got {url!r}."
            )
        return cls(Path(file), None, ClusterHead.of(Path(file))) if file else cls(None, url)

    @contextmanager
    def reached(self) -> Iterator[str]:
        """Yield a URL of the dashboard, through a tunnel if the cluster is given by its file; raises ConfigError."""
        if self.url is not None:
            parts = urlsplit(self.url)
            try:
                address = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
                socket.create_connection(address, timeout=ANSWER_S).close()
            except OSError as error:
                raise ConfigError(f"`--address` {self.url} does not answer: {error.strerror or error}.") from None
            yield self.url
            return
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        by_ray = [*RAY, "dashboard", str(self.file), "--port", str(port)]
        tunnel = subprocess.Popen(
            self.head.tunnel(port, PORT) if self.head else by_ray,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            self._await(tunnel, port)
            yield f"http://127.0.0.1:{port}"
        finally:
            tunnel.terminate()
            tunnel.wait()

    def job_command(self, command: str, job: str) -> str:
        """Return the shell command that applies a `ray job` subcommand to a job."""
        if self.url is not None:
            token = "RAY_AUTH_MODE=token " if os.environ.get("RAY_AUTH_MODE") == "token" else ""
            return token + shlex.join(["ray", "job", *command.split(), "--address", self.url, job])
        on_head = f"RAY_AUTH_MODE=token ray job {command} {job}"
        return self.head.shell(on_head) if self.head else shlex.join(["ray", "exec", str(self.file), on_head])

    def copy_command(self, folder: str, to: Path) -> list[str]:
        """Return the command that copies the contents of a folder of the head to one of this machine."""
        folder = folder.rstrip("/")
        return self.head.copy(folder, to) if self.head else [*RAY, "rsync-down", str(self.file), f"{folder}/", f"{to}/"]

    def _await(self, tunnel: subprocess.Popen[str], port: int) -> None:
        """Wait until a dashboard answers through a tunnel; raises ConfigError if none does."""
        deadline, connected = time.monotonic() + TUNNEL_S, False
        while time.monotonic() < deadline and tunnel.poll() is None:
            try:
                _ask(f"http://127.0.0.1:{port}")
                return
            except (OSError, http.client.HTTPException) as error:
                # Any other error: ssh is connected, but nothing listens on the head's port.
                connected |= not isinstance(error, ConnectionRefusedError)
                time.sleep(0.2)
        ended = tunnel.poll() is not None
        reason = _last_line(tunnel.stdout.read()) if ended and tunnel.stdout else f"no answer within {TUNNEL_S:g} s"
        if self.head is None:
            raise ConfigError(f"The head of {self.file} cannot be reached: {reason}. Is the cluster up?")
        target = self.head.target
        if connected and not ended:
            raise ConfigError(
                f"{target} answers by SSH, but no dashboard of Ray on its port {PORT}. If no cluster is up there, "
                f"`ray up {self.file}` starts one; it ends every Ray of that user on that machine."
            )
        raise ConfigError(
            f"The head of {self.file}, {target}, cannot be reached by SSH: {reason}. Check `provider.head_ip` and `auth` in it."
        )


class JobError(Exception):
    """A job failed or cannot be followed; the message is one sentence."""


def submit(
    words: list[str], cluster: Cluster, out: str, *, files: Path | None = None, fetch: Path | None = None
) -> int:
    """Run `raysim` with `words` as a job of a cluster and print its output; return its exit code.

    `files`: a folder; the job starts in a copy of it. `fetch`: the folder to which the results in `out` are copied
    after success. Raises ConfigError if nothing was submitted, JobError if the job cannot be followed, and
    KeyboardInterrupt, with a note on how to continue, if the user leaves the job.
    """
    _check_out(out, cluster, fetch)
    if "RAY_AUTH_MODE" not in os.environ and Path("~/.ray/auth_token").expanduser().is_file():
        os.environ["RAY_AUTH_MODE"] = "token"  # read by Ray when it is first imported
    with cluster.reached() as url:
        client = _client(url)
        environment: dict[str, Any] = {"env_vars": {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1"}}
        if files is not None:
            environment |= {"working_dir": str(files.resolve()), "excludes": LEFT_OUT}
        try:
            job = _send(client, shlex.join(["raysim", *words]), environment)
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"The job was not accepted: {_first_line(error)}.") from None
        print(f"job {job}: raysim {shlex.join(words)}", file=sys.stderr, flush=True)
        follow = cluster.job_command("logs --follow", job)
        try:
            status = asyncio.run(_follow(client, job, url))
        except KeyboardInterrupt as interruption:
            stop = cluster.job_command("stop", job)
            interruption.add_note(f"The job continues. To follow it: {follow}. To end it: {stop}.")
            raise
        except (RuntimeError, OSError) as error:
            raise JobError(
                f"the job can no longer be followed ({_first_line(error)}). Once the cluster answers: {follow}. If its head is lost, "
                f"the same command with --resume continues from {out}"
            ) from None
        code = client.get_job_info(job).driver_exit_code
    if status != "SUCCEEDED":
        return code or 1
    if fetch is not None:
        _fetch(out, cluster, fetch)
    return 0


def _check_out(out: str, cluster: Cluster, fetch: Path | None) -> None:
    """Raise ConfigError if the results would be lost with the job's folder, or cannot be fetched."""
    if not in_bucket(out) and not Path(out).is_absolute():
        raise ConfigError(f"`--out` must be a bucket's URI or an absolute path that every node sees, but got {out!r}.")
    if fetch is None:
        return
    if not in_bucket(out) and cluster.file is None:
        raise ConfigError("`--fetch` of a path needs `--cluster FILE`, by which the head is reached.")
    if fetch.exists() and any(fetch.iterdir()):
        raise ConfigError(f"`--fetch` must be a new folder, but {fetch} is not empty.")


async def _follow(client: Any, job: str, url: str) -> str:
    """Print the output of a job until it ends; return its status. Raises OSError if its head is silent for `LOST_S`."""
    following = asyncio.ensure_future(_print_logs(client, job))
    answered, waiting = time.monotonic(), False
    while not (await asyncio.wait([following], timeout=ASK_S))[0]:
        try:
            await asyncio.to_thread(_ask, url)
            answered, waiting = time.monotonic(), False
        except (OSError, http.client.HTTPException):
            silent = time.monotonic() - answered
            if silent > LOST_S:
                following.cancel()
                raise OSError(f"no answer for {silent:.0f} s") from None
            if not waiting:
                print(
                    f"The cluster's head does not answer: waiting for up to {LOST_S:g} s", file=sys.stderr, flush=True
                )
            waiting = True
    return following.result()


async def _print_logs(client: Any, job: str) -> str:
    """Print the output of a job until it ends; return its status."""
    async for text in client.tail_job_logs(job):
        print(text, end="", flush=True)
    while (status := client.get_job_status(job)) not in ("SUCCEEDED", "FAILED", "STOPPED"):
        await asyncio.sleep(0.5)  # the last lines come before the status
    return str(status)


def _ask(url: str) -> None:
    """Ask a dashboard for its version; raises OSError or HTTPException if it does not answer within `ANSWER_S`."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    request = kind(parts.hostname or "", parts.port, timeout=ANSWER_S)
    try:
        request.request("GET", "/api/version")
        request.getresponse()
    finally:
        request.close()


def _fetch(out: str, cluster: Cluster, to: Path) -> None:
    """Copy the results here, without locks and empty folders."""
    to.mkdir(parents=True, exist_ok=True)
    if in_bucket(out):
        from pyarrow import fs

        try:
            fs.copy_files(out, str(to))
        except OSError as error:
            raise JobError(f"the results are in {out}, but could not be fetched: {_first_line(error)}") from None
    else:
        command = cluster.copy_command(out, to)
        copied = subprocess.run(command, capture_output=True, text=True, check=False)
        if copied.returncode:
            again = shlex.join(command).replace(shlex.join(RAY), "ray")
            reason = _first_line(copied.stderr or "no output")  # ssh's, above those of rsync
            raise JobError(
                f"the results are in {out} of the cluster, but could not be fetched: {reason}. To fetch them: {again}"
            )
    for lock in to.rglob(".lock"):
        lock.unlink()
    for folder in sorted((path for path in to.rglob("*") if path.is_dir()), reverse=True):  # the inner ones first
        if not any(folder.iterdir()):
            folder.rmdir()
    print(f"results in {to}", file=sys.stderr)


def _client(url: str) -> Any:
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient(url)
    except Exception as error:  # from requests, the connection or the token
        text = str(error)
        if "401" in text or "403" in text or "token" in text.lower():
            raise ConfigError(f"The cluster at {url} asks for its token, {token_words()}") from None
        raise ConfigError(f"The dashboard at {url} accepts no jobs: {_first_line(error)}.") from None


def _send(client: Any, entrypoint: str, environment: dict[str, Any]) -> str:
    """Submit a job and return its id; a newly started cluster has no agent for it yet."""
    deadline, reported = time.monotonic() + AGENT_S, False
    while True:
        try:
            return str(
                client.submit_job(entrypoint=entrypoint, runtime_env=environment, metadata={"user": user_here()})
            )
        except RuntimeError as error:
            if "No available agent" not in str(error) or time.monotonic() > deadline:
                raise
            if not reported:
                print(
                    f"The cluster cannot start jobs yet: waiting for up to {AGENT_S:g} s", file=sys.stderr, flush=True
                )
                reported = True
            time.sleep(1.0)


def _first_line(error: BaseException | str) -> str:
    return next((line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _last_line(text: str) -> str:
    return next((line.strip().rstrip(".") for line in reversed(text.splitlines()) if line.strip()), "no output")


def _read(file: Path) -> Mapping[str, Any]:
    import yaml

    rule = "`--cluster` must be the file that `ray up` was given"
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{rule}, but {file} is not YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(values, Mapping):
        raise ConfigError(f"{rule}, but {file} has no keys.")
    return values
