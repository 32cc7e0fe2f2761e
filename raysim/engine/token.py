"""The token of Ray's clusters, kept from other users of the machine."""

from __future__ import annotations

import os
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


def _token_file() -> Path:
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
