"""The head of a cluster of one's own machines, reached by SSH from any desk that has the cluster's file.

Ray's own commands find this head only on the desk that ran `ray up`, where Ray keeps the cluster's state.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from raysim.config import ConfigError

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


class Head(NamedTuple):
    """The head's user and address, and ssh's options."""

    target: str
    options: tuple[str, ...]

    @classmethod
    def of(cls, file: Path) -> Head | None:
        """Return the head that a cluster's file names; None if only Ray can find it, as in a cloud.

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
        """Return the command that leads a port of this machine to one of the head's loopback."""
        return ["ssh", *self.options, *TUNNEL, "-N", "-L", f"127.0.0.1:{here}:127.0.0.1:{there}", self.target]

    def shell(self, command: str) -> str:
        """Return the shell's command that runs another on the head, in an interactive shell as Ray does."""
        return shlex.join(["ssh", *self.options, "-t", self.target, shlex.join(["bash", "-ic", command])])

    def copy(self, folder: str, to: Path) -> list[str]:
        """Return the command that copies the contents of a folder of the head to one of this machine."""
        return ["rsync", "-az", "-e", shlex.join(["ssh", *self.options]), f"{self.target}:{folder}/", f"{to}/"]


def _read(file: Path) -> Mapping[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"`--cluster` must be the file that `ray up` was given, but {file} is no YAML: {reason}."
        ) from None
    if not isinstance(values, Mapping):
        raise ConfigError(f"`--cluster` must be the file that `ray up` was given, but {file} has no keys.")
    return values
