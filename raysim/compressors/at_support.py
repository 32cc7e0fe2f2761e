"""Shared indices: the gradient goes back at the positions that its activation kept, values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from raysim.codecs import Codec, Packet
from raysim.codecs.base import check_finite
from raysim.compressors.base import Compressor, Context, Plain, State
from raysim.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, repr=False)
class AtSupport(Compressor):
    """Sends the values at `context.support` by a codec, and no indices (Rudakov et al. 2023, shared-index TopK).

    It is the exact derivative of the masked activation. Both ends know the support: one decoded the forward packet, the
    other made it. It is not in the notation: the setting `shared_indices` makes it of a backward codec.
    """

    codec: Codec

    def encode(self, x: Tensor, state: State, context: Context) -> tuple[Packet, State]:
        assert context.support is not None, "the forward packet of this microbatch was not seen"
        check_finite(x)  # also where nothing is sent
        positions = context.support.positions.to(x.device)
        return self.codec.encode(x.detach().reshape(-1)[positions], context.key), {}

    def decode(
        self, packet: Packet, state: State, context: Context, device: torch.device | str = "cpu"
    ) -> tuple[Tensor, State]:
        assert context.support is not None, "the forward packet of this microbatch was not sent"
        positions, shape = context.support
        if packet.shape != tuple(positions.shape):
            raise ValueError(
                f"A packet holds values of shape {packet.shape}, but its activation kept {tuple(positions.shape)}."
            )
        values = packet.decode(device)
        x = torch.zeros(shape, dtype=values.dtype, device=device)
        x.view(-1)[positions.to(device)] = values
        return x, {}


def share_indices(forward: Compressor, backward: Compressor, where: str = "") -> Compressor:
    """Return the compressor of gradients that go back at the positions of their activations.

    Raises ValueError where `forward` keeps no positions, or `backward` is no bare codec of the values; `where` ends the sentence.
    """
    if not (forward.carries_support and forward.codec.selects):
        raise ValueError(
            f"`shared_indices` needs a forward TopK, alone or under ErrorFeedback, but got {forward!r}{where}."
        )
    if not isinstance(backward, Plain) or backward.codec.selects:
        raise ValueError(
            "With `shared_indices` the activation chooses the positions and `backward` is the bare codec of the values, "
            f"such as Identity or Quantize(8), but got {backward!r}."
        )
    return AtSupport(backward.codec)
