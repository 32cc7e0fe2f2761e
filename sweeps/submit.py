"""A sweep as a job of a cluster: sent, followed and fetched from a machine outside of it."""

from __future__ import annotations

import asyncio
import http.client
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from raysim.config import ConfigError
from raysim.engine.token import token_words, user_here
from raysim.places import in_bucket
from raysim.sweeps.ssh import Head

PORT = 8265  # of the dashboard, which takes jobs
ANSWER_S = 3.0  # for the dashboard to take a connection
TUNNEL_S = 12.0  # for a tunnel to lead there
AGENT_S = 60.0  # for the agent that starts jobs, which comes up after the dashboard
LEFT_OUT = [
    ".git",
    ".venv",
    "**/__pycache__",
    "results",
]  # of the folder that is sent; Ray leaves out what .gitignore names too


class JobError(Exception):
    """A job that failed or that cannot be followed: one sentence."""


class Cluster(NamedTuple):
    """The cluster that a job goes to: by the file of `ray up`, or by the URL of its dashboard."""

    file: Path | None = None
    url: str | None = None
    head: Head | None = None
    """The head that the file names; None if only Ray can find it."""

    @classmethod
    def named(cls, file: str | None, url: str | None) -> Cluster:
        """Return the cluster of one of the two; raises ConfigError where there is not exactly one, or the file is none."""
        if (file is None) == (url is None):
            raise ConfigError(
                "Give the cluster by `--cluster FILE`, as for `ray up`, or by `--address URL`, one of them."
            )
        if file is not None and not Path(file).is_file():
            raise ConfigError(f"`--cluster` must be the file that `ray up` was given, but {file} is no file.")
        if url is not None and urlsplit(url).scheme not in ("http", "https"):
            raise ConfigError(
                f"`--address` must be the URL of the cluster's dashboard, as http://127.0.0.1:{PORT}, but got {url!r}."
            )
        return cls(Path(file), None, Head.of(Path(file))) if file else cls(None, url)

    @contextmanager
    def reached(self) -> Iterator[str]:
        """Yield a URL of the dashboard that leads there: through a tunnel where the cluster is given by its file."""
        if self.url is not None:
            parts = urlsplit(self.url)
            try:
                there = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
                socket.create_connection(there, timeout=ANSWER_S).close()
            except OSError as error:
                raise ConfigError(f"`--address` {self.url} does not answer: {error.strerror or error}.") from None
            yield self.url
            return
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        by_ray = [*_RAY, "dashboard", str(self.file), "--port", str(port)]
        tunnel = subprocess.Popen(
            self.head.tunnel(port, PORT) if self.head else by_ray,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            _await_tunnel(tunnel, port, self)
            yield f"http://127.0.0.1:{port}"
        finally:
            tunnel.terminate()
            tunnel.wait()

    def words(self, command: str, job: str) -> str:
        """Return the shell's command by which `ray job` does something with a job."""
        if self.url is not None:
            token = "RAY_AUTH_MODE=token " if os.environ.get("RAY_AUTH_MODE") == "token" else ""
            return token + shlex.join(["ray", "job", *command.split(), "--address", self.url, job])
        there = f"RAY_AUTH_MODE=token ray job {command} {job}"
        return self.head.shell(there) if self.head else shlex.join(["ray", "exec", str(self.file), there])


def submit(
    words: list[str], cluster: Cluster, out: str, *, files: Path | None = None, fetch: Path | None = None
) -> int:
    """Run `raysim` with `words` as a job of a cluster and print its output; return its exit code.

    `files`: a folder that the job starts in a copy of. `fetch`: where the results, which the job writes to `out`, are copied
    to when it has succeeded. Raises ConfigError where nothing was sent, JobError where the job cannot be followed, and
    KeyboardInterrupt with a note of how to go on where it is left to itself.
    """
    check_place(out, cluster, fetch)
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
            raise ConfigError(f"The job was not taken: {_first_line(error)}.") from None
        print(f"job {job}: raysim {shlex.join(words)}", file=sys.stderr, flush=True)
        try:
            status = asyncio.run(_follow(client, job))
        except KeyboardInterrupt as interruption:
            interruption.add_note(
                f"The job goes on. To follow it: {cluster.words('logs --follow', job)}. To end it: {cluster.words('stop', job)}."
            )
            raise
        except (RuntimeError, OSError) as error:
            raise JobError(
                f"the job can no longer be followed ({_first_line(error)}). Once the cluster answers: "
                f"{cluster.words('logs --follow', job)}. If its head is lost, the same command with --resume goes on from {out}"
            ) from None
        code = client.get_job_info(job).driver_exit_code
    if status != "SUCCEEDED":
        return code or 1
    if fetch is not None:
        _fetch(out, cluster, fetch)
    return 0


def check_place(out: str, cluster: Cluster, fetch: Path | None) -> None:
    """Raise ConfigError for results that would be lost with the job's folder, or that cannot be fetched."""
    if not in_bucket(out) and not Path(out).is_absolute():
        raise ConfigError(
            f"`--out` must be a bucket's URI or an absolute path that every node sees, but got {out!r}: a job has no folder."
        )
    if fetch is None:
        return
    if not in_bucket(out) and cluster.file is None:
        raise ConfigError("`--fetch` of a path needs `--cluster FILE`, by which the head is reached.")
    if fetch.exists() and any(fetch.iterdir()):
        raise ConfigError(f"`--fetch` must be a new folder, but {fetch} is not empty.")


async def _follow(client: Any, job: str) -> str:
    """Print the output of a job until it ends; return its status."""
    async for text in client.tail_job_logs(job):
        print(text, end="", flush=True)
    while (status := client.get_job_status(job)) not in ("SUCCEEDED", "FAILED", "STOPPED"):
        await asyncio.sleep(0.5)  # the last lines come before the status
    return str(status)


def _fetch(out: str, cluster: Cluster, to: Path) -> None:
    """Copy the results here, without locks and empty folders."""
    to.mkdir(parents=True, exist_ok=True)
    if in_bucket(out):
        from pyarrow import fs

        fs.copy_files(out, str(to))
    else:
        by_ray = [*_RAY, "rsync-down", str(cluster.file), f"{out.rstrip('/')}/", f"{to}/"]
        words = cluster.head.copy(out.rstrip("/"), to) if cluster.head else by_ray
        copied = subprocess.run(words, capture_output=True, text=True, check=False)
        if copied.returncode:
            raise JobError(
                f"the results are in {out} of the cluster, but could not be fetched: {_last_line(copied.stderr)}"
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
    except Exception as error:  # of requests, of the connection, of the token
        text = str(error)
        if "401" in text or "403" in text or "token" in text.lower():
            raise ConfigError(f"The cluster at {url} asks for its token, {token_words()}") from None
        raise ConfigError(f"The dashboard at {url} takes no jobs: {_first_line(error)}.") from None


def _send(client: Any, entrypoint: str, environment: dict[str, Any]) -> str:
    """Return the id of a job that was taken; a cluster that has just started has no agent for it yet."""
    deadline, told = time.monotonic() + AGENT_S, False
    while True:
        try:
            return str(
                client.submit_job(entrypoint=entrypoint, runtime_env=environment, metadata={"user": user_here()})
            )
        except RuntimeError as error:
            if "No available agent" not in str(error) or time.monotonic() > deadline:
                raise
            if not told:
                print(
                    f"The cluster cannot start jobs yet: waiting for up to {AGENT_S:g} s", file=sys.stderr, flush=True
                )
                told = True
            time.sleep(1.0)


def _await_tunnel(tunnel: subprocess.Popen[str], port: int, cluster: Cluster) -> None:
    """Wait until a dashboard answers through a tunnel; raises ConfigError if none does."""
    deadline, led = time.monotonic() + TUNNEL_S, False
    while time.monotonic() < deadline and tunnel.poll() is None:
        try:
            asked = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
            asked.request("GET", "/api/version")
            asked.getresponse()
            return
        except (OSError, http.client.HTTPException) as error:
            led |= not isinstance(
                error, ConnectionRefusedError
            )  # ssh has a connection, of which nobody takes the other end
            time.sleep(0.2)
        finally:
            asked.close()
    ended = tunnel.poll() is not None
    said = _last_line(tunnel.stdout.read()) if ended and tunnel.stdout else f"no answer within {TUNNEL_S:g} s"
    if cluster.head is None:
        raise ConfigError(f"The head of {cluster.file} cannot be reached: {said}. Is the cluster up?")
    target = cluster.head.target
    if led and not ended:
        raise ConfigError(
            f"{target} answers by SSH, but no dashboard of Ray on its port {PORT}. If no cluster is up there, "
            f"`ray up {cluster.file}` starts one; it ends every Ray of that user on that machine."
        )
    raise ConfigError(
        f"The head of {cluster.file}, {target}, cannot be reached by SSH: {said}. Check `provider.head_ip` and `auth` in it."
    )


_RAY = (sys.executable, "-m", "ray.scripts.scripts")


def _first_line(error: BaseException) -> str:
    return next((line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _last_line(text: str) -> str:
    return next((line.strip().rstrip(".") for line in reversed(text.splitlines()) if line.strip()), "it said nothing")
