"""The ends of a boundary's links that a module holds: their memories, steps, keys, accounts and checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from raysim.compressors import Compressor, Context
from raysim.nn.account import COLUMNS, Account
from raysim.nn.samples import current, of_microbatch
from raysim.pipeline.link import Link
from raysim.pipeline.state import pack_state, unpack_state
from raysim.random import derive_key

if TYPE_CHECKING:
    import pandas as pd

DIRECTIONS = ("forward", "backward")


class Ends(nn.Module):
    """Base of the modules at a boundary: it counts microbatches and steps for the contexts of compressors.

    `ends`: direction and whether it sends, of each end that the module holds. The other arguments are those of
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
        self.ends = {
            (direction, sender): Link(
                methods[DIRECTIONS.index(direction)], boundary, direction, sender=sender, device=torch.device("cpu")
            )
            for direction, sender in ends
        }
        self._accounts = {direction: Account() for direction in DIRECTIONS}

    def extra_repr(self) -> str:
        forward, backward = self.methods
        return f"{repr(forward)!r}, backward={repr(backward)!r}, boundary={self.boundary}"

    def end_step(self) -> None:
        """End a step: memories that wait for its end move, adaptive methods decide, and the next call is its first microbatch.

        Called by itself after `num_microbatches` calls; a step of fewer needs it.
        """
        if self.microbatch:
            for (direction, sender), end in self.ends.items():
                counts = sender or (direction, True) not in self.ends
                self._accounts[direction].add(end.end_step(measure=self.measures()), counts=counts)
            self.step += 1
            self.microbatch = 0

    def settle(self) -> None:
        """End a step that has all its microbatches, before anybody looks at the memories."""
        if self.microbatch == self.num_microbatches:
            self.end_step()

    def measures(self) -> bool:
        """Return whether fidelity is measured in the current step."""
        return self.measure_every_steps > 0 and self.step % self.measure_every_steps == 0

    def report(self) -> pd.DataFrame:
        """Return bytes, fidelity and seconds of all training messages so far: a row for each direction.

        Columns as of `links.parquet`: `wire_bytes` with headers, `factor` dense over wire bytes, `fidelity` over the steps
        that were measured, where this end sends; seconds of this process.
        """
        import pandas as pd

        self.settle()
        rows = [
            {
                "boundary": self.boundary,
                "direction": direction,
                "codec": repr(method),
                **self._accounts[direction].row(self.message_bytes()),
            }
            for direction, method in zip(DIRECTIONS, self.methods, strict=True)
        ]
        return pd.DataFrame(rows, columns=["boundary", "direction", "codec", *COLUMNS])

    def message_bytes(self) -> int | None:
        """Return the bytes that every message takes on the wire, None where it takes its own."""
        return None

    def context(self, direction: str, num_rows: int) -> Context:
        """Return the context of the current message in a direction, a message of `num_rows` samples."""
        found = of_microbatch(current(), num_rows, self.microbatch, self.num_microbatches)
        return Context(
            direction=direction,
            boundary=self.boundary,
            step=self.step,
            epoch=found.epoch,
            microbatch=self.microbatch,
            sample_ids=found.ids,
            replica=self.replica,
            num_stages=2,
            num_microbatches=self.num_microbatches,
            key=self._key(direction, self.step, self.microbatch),
        )

    def of_gradient(self, context: Context) -> Context:
        """Return the context of the gradient that answers an activation."""
        return context._replace(direction="backward", key=self._key("backward", context.step, context.microbatch))

    def evaluation_key(self) -> int:
        """Return the key of the next message in evaluation."""
        self._evaluations += 1
        return derive_key(self.seed, "evaluation", self.boundary, self._evaluations)

    def get_extra_state(self) -> dict[str, Any]:
        """Return the memories and the count of steps, for `state_dict`."""
        self.settle()
        memories = {_name(*place): pack_state(end.state) for place, end in self.ends.items()}
        forward, backward = (repr(method) for method in self.methods)
        return {"forward": forward, "backward": backward, "step": self.step, "memories": memories}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Load the state of `get_extra_state`; raises ValueError where it is of other compressors."""
        for field, method in zip(DIRECTIONS, self.methods, strict=True):
            if state[field] != repr(method):
                raise ValueError(f"`{field}` must be {state[field]}, as in the checkpoint, but got {method!r}.")
        self.step, self.microbatch = state["step"], 0
        for place, end in self.ends.items():
            end.load(unpack_state(state["memories"][_name(*place)], end.device))

    def _key(self, direction: str, step: int, microbatch: int) -> int:
        return derive_key(self.seed, self.replica, self.boundary, direction, step, microbatch)


def _name(direction: str, sender: bool) -> str:
    return f"{direction}.{'sender' if sender else 'receiver'}"


def own_memory(y: Tensor, *others: Tensor) -> Tensor:
    """Return `y`, or a copy of it where it lies in the memory of another tensor."""
    place = y.untyped_storage().data_ptr()
    return y.clone() if any(place == other.untyped_storage().data_ptr() for other in others) else y
