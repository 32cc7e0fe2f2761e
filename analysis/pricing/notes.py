"""The limits of a replay's figures, as sentences beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysim.schedules import Unflushed

if TYPE_CHECKING:
    from analysis.pricing.step import Replay

STRAIGHT_SINCE = 2  # version of records since which packets go from worker to worker


def notes_of(replay: Replay) -> list[str]:
    """Return the limits of a replay's figures, a sentence each."""
    notes = []
    if replay.row.get("engine") == "inline":
        notes.append(
            "Recorded with the inline engine, which moves no packets and updates its stages in turn: "
            "Ray's time for a packet is not in the figures."
        )
    if replay.row.get("engine") == "ray" and replay.with_overheads:
        notes.append(
            f"Ray's own time for a packet is {1000 * _packet_s(replay):.2g} ms, as recorded. Other work on the machine lengthens it, "
            "and intervals hold its spread between runs alone. `--overheads none` leaves it out."
        )
    notes.append(f"Transport {replay.transport}.")
    if replay.row.get("engine") == "ray" and replay.row["schema_version"] < STRAIGHT_SINCE:
        notes.append(
            "Recorded when packets under 100 KiB went by way of the driver: the overheads of packets include that detour, "
            "which they do not make any more. `--overheads none` leaves them out."
        )
    if isinstance(replay.schedule, Unflushed):
        notes.append(
            f"{replay.row['weights']}: a step is priced as one of many without a flush, from the end of the step before to its own. "
            "The stages of raysim's engines wait for one another between steps, so recorded seconds are longer."
        )
    low, high = replay.wire_bytes.min(), replay.wire_bytes.max()
    if high > 1.01 * low:
        notes.append(f"The packets of a step varied between {low:,.0f} and {high:,.0f} bytes; times are means.")
    if replay.row.get("exchange_delay"):
        notes.append(
            f"An exchange of replicas may last {replay.row['exchange_delay']} steps more: of a step's seconds the part that these "
            "hide is left out, but its shares by worker and the break-even are those of exchanges that are waited for."
        )
    if replay.num_replicas > 1:
        known = "by the transfers recorded"
        if replay.recording.knows_totals_alone:
            known = (
                "and the bytes recorded are spread evenly over rounds and peers, as the run has no table of transfers"
            )
        notes.append(f"{replay.num_replicas} replicas average their gradients once all pipelines are done, {known}.")
    return notes


def _packet_s(replay: Replay) -> float:
    """Return the engine's seconds for a packet of mean size, beside codec and wire."""
    sizes = replay.recording.stacked("wire_bytes")
    mean_bytes = float(sizes[sizes > 0].mean()) if (sizes > 0).any() else 0.0
    return replay.overheads.call_s + replay.overheads.message_s + mean_bytes * replay.overheads.byte_s
