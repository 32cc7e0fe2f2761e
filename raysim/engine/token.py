"""The token of Ray's clusters, kept from other users of the machine."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def protect_token() -> None:
    """Make the file of the token, which Ray writes for all to read, its owner's alone; nothing where there is none."""
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    with suppress(OSError):
        path.chmod(0o600)
