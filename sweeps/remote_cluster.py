"""A cluster reached from outside: through a tunnel to its head, with the file of `ray up`, or at its dashboard's URL.

For on-premises clusters, Ray's own commands find the head only on the machine that ran `ray up`, where Ray keeps the
cluster's state. `Head` finds it by SSH from any machine with the cluster's file.
"""

from __future__ import annotations

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

PORT = 8265  # of the dashboard, which takes jobs
ANSWER_S = 3.0  # for the dashboard to take a connection
TUNNEL_S = 12.0  # for a tunnel to reach it

OPTIONS = (
    *("-o", "BatchMode=yes"),
    *("-o", "ConnectTimeout=10"),
    *("-o", "LogLevel=ERROR"),
    *("-o", "StrictHostKeyChecking=accept-new"),
)
TUNNEL = (
    *("-o", "ExitOnForwardFailure=yes"),
    *("-o", "ServerAliveInterval=15"),
)  # the connection is idle while a job is silent
RAY = (sys.executable, "-m", "ray.scripts.scripts")


class Head(NamedTuple):
    """The head's user and address, and ssh's options."""

    target: str
    options: tuple[str, ...]

    @classmethod
    def of(cls, file: Path) -> Head | None:
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
        """Return the command that forwards a port of this machine to one of the head's loopback."""
        return ["ssh", *self.options, *TUNNEL, "-N", "-L", f"127.0.0.1:{here}:127.0.0.1:{there}", self.target]

    def shell(self, command: str) -> str:
        """Return the shell command that runs another command on the head, in an interactive shell as Ray does."""
        return shlex.join(["ssh", *self.options, "-t", self.target, shlex.join(["bash", "-ic", command])])

    def copy(self, folder: str, to: Path) -> list[str]:
        """Return the command that copies the contents of a folder of the head to one of this machine."""
        return ["rsync", "-az", "-e", shlex.join(["ssh", *self.options]), f"{self.target}:{folder}/", f"{to}/"]


class Cluster(NamedTuple):
    """The cluster that a job is sent to: by the file of `ray up`, or by the URL of its dashboard."""

    file: Path | None = None
    url: str | None = None
    head: Head | None = None
    """The head in the file; None if only Ray can find it."""

    @classmethod
    def named(cls, file: str | None, url: str | None) -> Cluster:
        """Return the cluster given by `file` or `url`; raises ConfigError unless exactly one is given, or if the file is bad."""
        if (file is None) == (url is None):
            raise ConfigError(
                "Give the cluster by `--cluster FILE`, as for `ray up`, or by `--address URL`, one of them."
            )
        if file is not None and not Path(file).is_file():
            raise ConfigError(f"`--cluster` must be the file that `ray up` was given, but {file} is not a file.")
        if url is not None and urlsplit(url).scheme not in ("http", "https"):
            raise ConfigError(
                f"`--address` must be the URL of the cluster's dashboard, as http://127.0.0.1:{PORT}, but got {url!r}."
            )
        return cls(Path(file), None, Head.of(Path(file))) if file else cls(None, url)

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
        """Return the shell's command that applies a command of `ray job` to a job."""
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
            request = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
            try:
                request.request("GET", "/api/version")
                request.getresponse()
                return
            except (OSError, http.client.HTTPException) as error:
                # Any other error: ssh is connected, but nothing listens on the head's port.
                connected |= not isinstance(error, ConnectionRefusedError)
                time.sleep(0.2)
            finally:
                request.close()
        ended = tunnel.poll() is not None
        reason = last_line(tunnel.stdout.read()) if ended and tunnel.stdout else f"no answer within {TUNNEL_S:g} s"
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


def last_line(text: str) -> str:
    """Return the last line of a command's output without its full stop."""
    return next((line.strip().rstrip(".") for line in reversed(text.splitlines()) if line.strip()), "no output")


def _read(file: Path) -> Mapping[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"`--cluster` must be the file that `ray up` was given, but {file} is not YAML: {reason}."
        ) from None
    if not isinstance(values, Mapping):
        raise ConfigError(f"`--cluster` must be the file that `ray up` was given, but {file} has no keys.")
    return values
