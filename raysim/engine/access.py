"""Access to Ray: the address on which it listens, its token, and the name of a user."""

from __future__ import annotations

import getpass
import os
import socket
from contextlib import suppress
from pathlib import Path


def listen_on_loopback(address: str | None = None) -> None:
    """Make a Ray of this process listen on loopback only, unless it joins the cluster of an address. Call it before Ray is imported.

    By default Ray on Linux listens on all addresses. The variable was made for other systems, hence its name.
    """
    if not (address or os.environ.get("RAY_ADDRESS")):
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


def protect_token() -> None:
    """Make the token's file, which Ray writes for all to read, readable by its owner only, if there is one."""
    with suppress(OSError):
        _token_file().chmod(0o600)


def dashboard_sentence(url: str) -> str:
    """Return a sentence with the address of Ray's dashboard, and the file of its token if it asks for one."""
    asked = os.environ.get("RAY_AUTH_MODE") == "token"
    return f"Ray's dashboard: http://{url}" + (f", by the token in {_token_file()}" if asked else "")


def token_words() -> str:
    """Return the end of a sentence on a refusal: the token that this process showed, and the remedy."""
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
    """Return user@host of this process, the name of its jobs to others on a cluster."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):  # a user without a name, as in some containers
        return socket.gethostname()


def _token_file() -> Path:
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
