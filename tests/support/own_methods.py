"""A user's own codec, compressor, schedule and replica method, named in configurations by import path."""

from dataclasses import dataclass

import numpy as np
import torch

from raysim.codecs import Codec, Identity, Packet
from raysim.codecs.codec import check_finite, to_bytes, to_tensor
from raysim.codecs.message import Entry
from raysim.compressors import ErrorFeedback
from raysim.notation import check_integer
from raysim.replication.method import Averaged, ReplicaMethod, RoundPackets
from raysim.schedules.families import GPipe, Schedule


@dataclass(frozen=True, repr=False)
class Half(Codec):
    """Sends all values in bfloat16, and of every sample the first `skip` values as zero."""

    skip: int = 0

    def __post_init__(self) -> None:
        self._coerce(skip=check_integer("skip", self.skip, 0))

    def array_names(self) -> tuple[str, ...]:
        return ("values",)

    def _encode(self, x, key) -> dict[str, np.ndarray]:
        check_finite(x)
        limit = torch.finfo(torch.bfloat16).max
        y = x.double().clamp(-limit, limit).to(torch.bfloat16).flatten(1)
        y[:, : self.skip] = 0
        return {"values": to_bytes(y)}

    def decode(self, packet: Packet, device="cpu"):
        data = packet.bytes_of("values", 2 * packet.numel)
        y = to_tensor(data, torch.bfloat16, device).view(packet.shape)
        limit = torch.finfo(getattr(torch, packet.dtype)).max
        return y.double().clamp(-limit, limit).to(getattr(torch, packet.dtype))


@dataclass(frozen=True, repr=False)
class Forgetful(ErrorFeedback):
    """Error feedback under another name."""


@dataclass(frozen=True, repr=False)
class Backwards(Schedule):
    """GPipe by another name."""

    def ops(self, stage: int, num_stages: int, num_microbatches: int) -> str:
        return GPipe().ops(stage, num_stages, num_microbatches)


@dataclass(frozen=True, repr=False)
class Median(ReplicaMethod):
    """Takes the median of each value over the replicas, or with `selfish` this replica's own value."""

    selfish: bool = False

    def entries(self):
        return (Entry.of(Identity()),)

    def num_rounds(self, num_replicas):
        return 1

    def average(self, gradients, memory, context):
        received = yield RoundPackets(everyone={name: Identity().encode(x) for name, x in gradients.items()})
        if self.selfish:
            return Averaged(gradients, memory)
        stacked = {name: torch.stack([packets[name].decode() for packets in received]) for name in gradients}
        return Averaged({name: x.median(dim=0).values for name, x in stacked.items()}, memory)


@dataclass(frozen=True)
class Written(Codec):
    """A codec whose `repr` is not its notation."""

    def array_names(self) -> tuple[str, ...]:
        return ()

    def _encode(self, x, key):
        return {}

    def decode(self, packet, device="cpu"):
        return torch.zeros(packet.shape)


class NoCodec:
    """A class that is no codec."""
