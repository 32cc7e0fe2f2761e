"""The token of Ray's clusters, kept from other users of the machine, and the name of a cluster's user."""

from __future__ import annotations

import getpass
import os
import socket
from contextlib import suppress
from pathlib import Path


def protect_token() -> None:
    """Make the file of the token, which Ray writes for all to read, its owner's alone; nothing where there is none."""
    with suppress(OSError):
        _token_file().chmod(0o600)


def dashboard_sentence(url: str) -> str:
    """Return the address of Ray's dashboard, and the file of the token that it asks for, where it does."""
    asked = os.environ.get("RAY_AUTH_MODE") == "token"
    return f"Ray's dashboard: http://{url}" + (f", by the token in {_token_file()}" if asked else "")


def token_words() -> str:
    """Return what this process showed a cluster that refused it, and the remedy: the end of a sentence."""
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
    return f"and the one in {file} is wrong. Copy it anew {copied}."


def user_here() -> str:
    """Return this process's user and host, by which others on a cluster know its jobs."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):  # a user without a name, as in some containers
        return socket.gethostname()


def _token_file() -> Path:
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
