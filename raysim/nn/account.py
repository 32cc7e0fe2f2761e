"""Totals of one direction of a link over all steps, summed from the accounts of its two ends."""

from __future__ import annotations

from typing import Any

from raysim.pipeline.link import LinkAccount

COLUMNS = ["packets", "wire_bytes", "dense_bytes", "factor", "fidelity", "encode_s", "decode_s"]


class Account:
    """Sums over steps."""

    def __init__(self) -> None:
        self.packets = 0
        self.wire_bytes = 0
        self.dense_bytes = 0
        self.encode_s = 0.0
        self.decode_s = 0.0
        self._sent_norm2 = 0.0  # over the steps that were measured
        self._error_norm2 = 0.0

    def add(self, step: LinkAccount, *, counts: bool) -> None:
        """Add the account of one end in a step; its messages are added if this end `counts` them."""
        if step.sender:
            self.encode_s += step.codec_s
        else:
            self.decode_s += step.codec_s
        if not counts:
            return
        self.packets += step.packets
        self.wire_bytes += step.wire_bytes
        self.dense_bytes += step.dense_bytes
        self._sent_norm2 += step.sent_norm2 or 0.0
        self._error_norm2 += step.error_norm2 or 0.0

    def row(self, message_bytes: int | None = None) -> dict[str, Any]:
        """Return the sums, by `COLUMNS`; None for a quotient of nothing. `message_bytes`: of every message, where they are alike."""
        wire_bytes = self.wire_bytes if message_bytes is None else self.packets * message_bytes
        return {
            "packets": self.packets,
            "wire_bytes": wire_bytes,
            "dense_bytes": self.dense_bytes,
            "factor": self.dense_bytes / wire_bytes if wire_bytes else None,
            "fidelity": 1 - self._error_norm2 / self._sent_norm2 if self._sent_norm2 else None,
            "encode_s": self.encode_s,
            "decode_s": self.decode_s,
        }
