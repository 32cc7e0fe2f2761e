"""The base of the modules at a boundary: links with their memories, steps, keys, totals and checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from raysim.compressors import Compressor, Context
from raysim.nn.samples import current, of_microbatch
from raysim.pipeline.link import Link, LinkAccount
from raysim.pipeline.state import pack_state, unpack_state
from raysim.random import derive_key

if TYPE_CHECKING:
    import pandas as pd

DIRECTIONS = ("forward", "backward")
COLUMNS = ["packets", "wire_bytes", "dense_bytes", "factor", "fidelity", "encode_s", "decode_s"]


class BoundaryModule(nn.Module):
    """Base of the modules at a boundary; counts microbatches and steps for the contexts of compressors.

    `ends`: direction and whether it sends, of each link that the module holds. The other arguments are those of
    `raysim.nn.CompressedLink`.
    """

    def __init__(
        self,
        methods: tuple[Compressor, Compressor],
        ends: Iterable[tuple[str, bool]],
        *,
        boundary: int,
        num_microbatches: int,
        seed: int,
        replica: int,
        measure_every_steps: int,
    ) -> None:
        super().__init__()
        if num_microbatches < 1:
            raise ValueError(f"`num_microbatches` must be at least 1, but got {num_microbatches}.")
        self.methods = methods
        self.boundary = boundary
        self.num_microbatches = num_microbatches
        self.seed = seed
        self.replica = replica
        self.measure_every_steps = measure_every_steps
        self.step = 0
        self.microbatch = 0
        self._evaluations = 0
        self.links = {
            (direction, sender): Link(
                methods[DIRECTIONS.index(direction)], boundary, direction, sender=sender, device=torch.device("cpu")
            )
            for direction, sender in ends
        }
        self._totals = {direction: Total() for direction in DIRECTIONS}

    def extra_repr(self) -> str:
        forward, backward = self.methods
        return f"{repr(forward)!r}, backward={repr(backward)!r}, boundary={self.boundary}"

    def end_step(self) -> None:
        """End a step: update the memories that wait for it, let adaptive methods decide, and begin the next step.

        Happens by itself after `num_microbatches` calls; needed only after a step of fewer.
        """
        if self.microbatch:
            for (direction, sender), link in self.links.items():
                counts = sender or (direction, True) not in self.links
                self._totals[direction].add(link.end_step(measure=self.measures()), counts=counts)
            self.step += 1
            self.microbatch = 0

    def settle(self) -> None:
        """End the step if it has all its microbatches, so that the memories can be read."""
        if self.microbatch == self.num_microbatches:
            self.end_step()

    def measures(self) -> bool:
        """Return whether fidelity is measured in the current step."""
        return self.measure_every_steps > 0 and self.step % self.measure_every_steps == 0

    def report(self) -> pd.DataFrame:
        """Return bytes, fidelity and seconds of all training messages so far, one row for each direction.

        Columns as in `links.parquet`: `wire_bytes` include headers, `factor` is dense over wire bytes, `fidelity` is a mean over the
        measured steps, known at the sender; seconds are of this process.
        """
        import pandas as pd

        self.settle()
        rows = [
            {
                "boundary": self.boundary,
                "direction": direction,
                "codec": repr(method),
                **self._totals[direction].row(self.message_bytes()),
            }
            for direction, method in zip(DIRECTIONS, self.methods, strict=True)
        ]
        return pd.DataFrame(rows, columns=["boundary", "direction", "codec", *COLUMNS])

    def message_bytes(self) -> int | None:
        """Return the wire bytes of every message if all have one size, else None."""
        return None

    def context(self, direction: str, num_rows: int) -> Context:
        """Return the context of the current message, which holds `num_rows` samples."""
        samples = of_microbatch(current(), num_rows, self.microbatch, self.num_microbatches)
        return Context(
            direction=direction,
            boundary=self.boundary,
            step=self.step,
            epoch=samples.epoch,
            microbatch=self.microbatch,
            sample_ids=samples.ids,
            replica=self.replica,
            num_stages=2,
            num_microbatches=self.num_microbatches,
            key=self._key(direction, self.step, self.microbatch),
        )

    def of_gradient(self, context: Context) -> Context:
        """Return the context of an activation's gradient."""
        return context._replace(direction="backward", key=self._key("backward", context.step, context.microbatch))

    def evaluation_key(self) -> int:
        """Return the key of the next message in evaluation."""
        self._evaluations += 1
        return derive_key(self.seed, "evaluation", self.boundary, self._evaluations)

    def get_extra_state(self) -> dict[str, Any]:
        """Return the memories and the count of steps, for `state_dict`."""
        self.settle()
        memories = {_name(*end): pack_state(link.state) for end, link in self.links.items()}
        forward, backward = (repr(method) for method in self.methods)
        return {"forward": forward, "backward": backward, "step": self.step, "memories": memories}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Load the state of `get_extra_state`; raises ValueError if it belongs to other compressors."""
        for field, method in zip(DIRECTIONS, self.methods, strict=True):
            if state[field] != repr(method):
                raise ValueError(f"`{field}` must be {state[field]}, as in the checkpoint, but got {method!r}.")
        self.step, self.microbatch = state["step"], 0
        for end, link in self.links.items():
            link.load(unpack_state(state["memories"][_name(*end)], link.device))

    def _key(self, direction: str, step: int, microbatch: int) -> int:
        return derive_key(self.seed, self.replica, self.boundary, direction, step, microbatch)


class Total:
    """Totals of one direction over all steps, from the accounts of its two ends."""

    def __init__(self) -> None:
        self.packets = 0
        self.wire_bytes = 0
        self.dense_bytes = 0
        self.encode_s = 0.0
        self.decode_s = 0.0
        self._sent_norm2 = 0.0  # over the measured steps
        self._error_norm2 = 0.0

    def add(self, step: LinkAccount, *, counts: bool) -> None:
        """Add the account of one end in a step, with its messages if this end `counts` them."""
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
        """Return the totals by `COLUMNS`; quotients of nothing are None. `message_bytes`: of every message, if all have one size."""
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


def _name(direction: str, sender: bool) -> str:
    return f"{direction}.{'sender' if sender else 'receiver'}"


def own_memory(y: Tensor, *others: Tensor) -> Tensor:
    """Return `y`, or a copy of it if it shares memory with another tensor."""
    address = y.untyped_storage().data_ptr()
    return y.clone() if any(address == other.untyped_storage().data_ptr() for other in others) else y
