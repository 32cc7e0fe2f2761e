"""The addresses on which a Ray of this machine alone listens."""

from __future__ import annotations

import os


def listen_on_loopback(address: str | None = None) -> None:
    """Let a Ray that this process starts listen on loopback; nothing where it joins the cluster of an address.

    Ray listens on all addresses of a machine that may be part of a cluster, which by default is every machine with Linux. It
    reads the variable, whose name tells of the systems for which it was made, when it is imported: call this before.
    """
    if not (address or os.environ.get("RAY_ADDRESS")):
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
