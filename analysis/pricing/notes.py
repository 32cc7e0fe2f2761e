"""The limits of a replay's figures, as sentences beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysim.schedules import Unflushed

if TYPE_CHECKING:
    from raysim.analysis.pricing.step import Replay
    from raysim.network.calibrate import Overheads


def notes_of(replay: Replay) -> list[str]:
    """Return the limits of a replay's figures, a sentence each."""
    notes = []
    notes.append(f"Transport {replay.transport}.")
    waits = replay.recording.waits
    if waits is not None:
        notes.append(
            f"Waited in this recording, and not in the price: {1000 * _packet_s(replay, waits):.2g} ms a packet and "
            f"{1000 * waits.step_s:.2g} ms a step, which the load of the machine lengthens."
        )
    if not replay.costs.knows_updates:
        notes.append(
            "The optimiser's update is not in the price: this version of the records does not have its seconds."
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


def _packet_s(replay: Replay, waits: Overheads) -> float:
    """Return the seconds that a packet of mean size waited beside its codec."""
    sizes = replay.recording.stacked("wire_bytes")
    mean_bytes = float(sizes[sizes > 0].mean()) if (sizes > 0).any() else 0.0
    return waits.call_s + waits.message_s + mean_bytes * waits.byte_s
