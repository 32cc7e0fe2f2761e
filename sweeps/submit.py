"""A sweep as a cluster job: submitted, followed and fetched from a machine outside the cluster."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from raysim.config import ConfigError
from raysim.engine.connection import token_words, user_here
from raysim.storage.places import in_bucket
from raysim.sweeps.remote_cluster import Cluster, last_line

AGENT_S = 60.0  # for the agent that starts jobs, which comes up after the dashboard
LEFT_OUT = [".git", ".venv", "**/__pycache__", "results"]  # of the sent folder, besides what its .gitignore names


class JobError(Exception):
    """A job that failed or that cannot be followed: one sentence."""


def submit(
    words: list[str], cluster: Cluster, out: str, *, files: Path | None = None, fetch: Path | None = None
) -> int:
    """Run `raysim` with `words` as a job of a cluster and print its output; return its exit code.

    `files`: a folder, of which the job starts in a copy. `fetch`: the folder to which the results in `out` are copied
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
            status = asyncio.run(_follow(client, job))
        except KeyboardInterrupt as interruption:
            stop = cluster.job_command("stop", job)
            interruption.add_note(f"The job goes on. To follow it: {follow}. To end it: {stop}.")
            raise
        except (RuntimeError, OSError) as error:
            raise JobError(
                f"the job can no longer be followed ({_first_line(error)}). Once the cluster answers: {follow}. If its head is lost, "
                f"the same command with --resume goes on from {out}"
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
        copied = subprocess.run(cluster.copy_command(out, to), capture_output=True, text=True, check=False)
        if copied.returncode:
            raise JobError(
                f"the results are in {out} of the cluster, but could not be fetched: {last_line(copied.stderr)}"
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
        raise ConfigError(f"The dashboard at {url} accepts no jobs: {_first_line(error)}.") from None


def _send(client: Any, entrypoint: str, environment: dict[str, Any]) -> str:
    """Submit a job and return its id; a cluster that has just started has no agent for it yet."""
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


def _first_line(error: BaseException) -> str:
    return next((line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()), type(error).__name__)
