"""The costs of a step's actions: seconds of compute and codec, bytes of every packet, overheads of the host.

A `Profile` comes from a recorded run (the columns of `actions.parquet`), from a file, or from shapes and a device's datasheet.
All values are in seconds and bytes.
"""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from raysim.network.collectives import TRANSFER, Transfers, as_transfers
from raysim.network.topology import Placement
from raysim.network.transport import BARE, Transport
from raysim.notation import check_choice, check_integer, check_real
from raysim.schedules.arrays import OPS
from raysim.storage.files import output_file, read_text
from raysim.storage.texts import parse_json

Floats = NDArray[np.float64]

COSTS = ("decode_s", "compute_s", "cpu_s", "encode_s", "shard_s", "wire_bytes", "dense_bytes")
STAGE_COSTS = ("update_s", "gradient_bytes", "bucketed_bytes", "method_s")
END_COSTS = ("transfers", "method_s", "gradient_bytes", "bucketed_bytes")
SECONDS = ("decode_s", "compute_s", "cpu_s", "encode_s", "update_s", "call_s", "message_s", "byte_s", "step_s")
OVERHEADS = ("call_s", "message_s", "byte_s", "step_s", "codec_bytes_per_s")
FORMAT = "raysim profile 2"


@dataclass(frozen=True, eq=False, kw_only=True)
class Profile:
    """Costs by (replica, stage, op, microbatch); a replica or microbatch axis of size 1 means that all are equal.

    Ops are numbered as in `OPS`: forward, backward and, if backward is split, its weight part.

    >>> profile = Profile.uniform(num_stages=4, forward_s=1.0, backward_s=2.0, wire_bytes=1_000_000)
    >>> profile.num_stages, profile.compute_s.shape
    (4, (1, 4, 2, 1))
    """

    compute_s: Floats
    """Wall seconds of the forward or backward itself, on an otherwise idle host."""
    decode_s: Floats = field(default_factory=lambda: np.zeros(1))
    """Seconds on the receiver's clock to unpack the packet."""
    encode_s: Floats = field(default_factory=lambda: np.zeros(1))
    """Seconds on the sender's clock to pack it."""
    cpu_s: Floats = field(default_factory=lambda: np.full(1, math.nan))
    """CPU seconds of the compute over all threads, used if cores are shared; NaN if unknown, which falls back to wall seconds."""
    shard_s: Floats = field(default_factory=lambda: np.zeros(1))
    """Seconds of `compute_s` spent waiting for sharded parameters and gradients, added by `raysim.network.sharding`."""
    wire_bytes: Floats = field(default_factory=lambda: np.zeros(1))
    """Bytes of the packet sent by the action."""
    dense_bytes: Floats = field(default_factory=lambda: np.zeros(1))
    """Bytes of the tensor in that packet; reported, not simulated."""
    update_s: Floats = field(default_factory=lambda: np.zeros(1))
    """By stage: seconds of the optimiser's update; a worker updates its stages in turn."""
    gradient_bytes: Floats = field(default_factory=lambda: np.zeros(1))
    """By stage: bytes averaged uncompressed over replicas, by the algorithm of the transport's averaging. If that is direct and
    `transfers` has messages of the stage, these are used instead."""
    bucketed_bytes: Floats = field(default_factory=lambda: np.full(1, math.nan))
    """By stage: bytes of gradients that may be averaged in buckets during the last backward, if the transport's averaging has
    buckets; by default `gradient_bytes`, and 0 if averaging waits until all pipelines are done."""
    transfers: Transfers = field(default_factory=lambda: np.empty(0, TRANSFER))
    """Transfers of the collectives that end the step, an array of `raysim.network.collectives.TRANSFER`."""
    method_s: Floats = field(default_factory=lambda: np.zeros(1))
    """By stage: seconds on a replica's clock to compress, decompress and add gradients."""
    call_s: float = 0.0
    """Seconds on the sender's clock to hand a packet over."""
    message_s: float = 0.0
    """Seconds that every packet needs besides its wire, on no worker's clock."""
    byte_s: float = 0.0
    """The same per byte: 0.25e-9 is 4 GB/s through shared memory."""
    step_s: float = 0.0
    """Seconds per step outside its actions: submission, gathering of statistics."""
    blocking: bool = False
    """Whether a send blocks its worker until the packet has arrived."""
    codec_bytes_per_s: float = 0.0
    """Dense bytes per second processed by codecs, if recorded; 0 if unknown. Reported, not simulated."""
    paces: Floats = field(default_factory=lambda: np.ones(1))
    """By recorded step: the seconds of its actions relative to the mean. Their spread is the uncertainty of the other figures."""
    microbatch_samples: int = 0
    """Samples per microbatch for which the seconds hold; 0 if unknown."""
    transport: Transport = BARE
    """The transport, which adds bytes and trips to each packet."""
    source: str = ""
    """Origin of the figures, in words."""

    def __post_init__(self) -> None:
        costs = {name: _four_axes(name, getattr(self, name)) for name in COSTS}
        try:
            shape = np.broadcast_shapes(*(array.shape for array in costs.values()))
        except ValueError:
            shapes = ", ".join(f"{name} {array.shape}" for name, array in costs.items())
            raise ValueError(f"Costs must have shapes that agree, but got {shapes}.") from None
        if not 1 <= shape[2] <= len(OPS) or not all(shape):
            raise ValueError(f"`compute_s` must have 2 or 3 ops, and no empty axis, but got shape {shape}.")
        for name, array in costs.items():
            whole = np.ascontiguousarray(np.broadcast_to(array, shape))
            whole.flags.writeable = False
            object.__setattr__(self, name, whole)
        bucketed = np.where(np.isnan(self.bucketed_bytes), self.gradient_bytes, self.bucketed_bytes)
        object.__setattr__(self, "bucketed_bytes", bucketed)
        for name in STAGE_COSTS:
            values = _non_negative(name, np.asarray(getattr(self, name), np.float64))
            object.__setattr__(self, name, np.ascontiguousarray(np.broadcast_to(values, (shape[1],))))
        object.__setattr__(self, "paces", _non_negative("paces", np.asarray(self.paces, np.float64).reshape(-1)))
        if self.transfers.dtype != TRANSFER:
            raise ValueError(f"`transfers` must be an array of `TRANSFER`, but got {self.transfers.dtype}.")
        _non_negative("transfers", self.transfers["wire_bytes"])
        check_integer("microbatch_samples", self.microbatch_samples, 0)
        for name in OVERHEADS:
            object.__setattr__(self, name, check_real(name, getattr(self, name), 0, math.inf))

    @property
    def num_replicas(self) -> int:
        """Return the size of the replica axis; 1 also means any number of equal replicas."""
        return int(self.compute_s.shape[0])

    @property
    def num_stages(self) -> int:
        return int(self.compute_s.shape[1])

    @property
    def num_microbatches(self) -> int | None:
        """Return the number of microbatches; None means any number of equal ones."""
        size = int(self.compute_s.shape[3])
        return size if size > 1 else None

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        forward_s: ArrayLike,
        backward_s: ArrayLike,
        *,
        wire_bytes: ArrayLike = 0.0,
        encode_s: ArrayLike = 0.0,
        decode_s: ArrayLike = 0.0,
        weight_s: ArrayLike | None = None,
        **rest: Any,
    ) -> Profile:
        """Return a profile of equal microbatches; `weight_s` is the cost of a separate weight backward.

        Seconds of compute are one number for all stages, or by stage; costs of packets one number, or by (stage, op).
        """
        parts = [forward_s, backward_s] + ([] if weight_s is None else [weight_s])
        compute_s = np.stack([np.broadcast_to(part, num_stages) for part in parts], axis=1)
        takes, sends = np.zeros((2, *compute_s.shape))
        takes[1:, 0] = takes[:-1, 1] = sends[:-1, 0] = sends[1:, 1] = 1.0
        costs: dict[str, Any] = {
            "compute_s": compute_s,
            "wire_bytes": wire_bytes * sends,
            "encode_s": encode_s * sends,
            "decode_s": decode_s * takes,
        }
        return cls(**{name: cost[None, :, :, None] for name, cost in costs.items()}, **rest)

    @cached_property
    def moved_bytes(self) -> Floats:
        """Bytes on the wire for every packet, including the transport's."""
        return self.wire_bytes + self.transport.beside(self.wire_bytes)

    @cached_property
    def messages(self) -> Floats:
        """Number of messages per packet, alternating in direction; the last one is the packet itself."""
        return self.transport.messages(self.wire_bytes)

    @cached_property
    def trips(self) -> Floats:
        """One-way trips per packet, each of which pays the wire's latency."""
        return self.transport.trips(self.wire_bytes)

    def alone_s(self, placement: Placement) -> Floats:
        """Return the seconds of every action's compute with exclusive cores.

        If cores are shared, these are CPU seconds divided by the threads available, since wall seconds on a busy host include waiting.
        """
        if placement.cores is None:
            return self.compute_s
        return np.where(np.isnan(self.cpu_s), self.compute_s, self.cpu_s / placement.threads)

    def check_microbatches(self, samples: int) -> None:
        """Raise ValueError if the profile's microbatches have a different number of samples."""
        if self.microbatch_samples not in (0, samples):
            raise ValueError(
                f"`profile` must have microbatches of {samples} samples, but has {self.microbatch_samples}: "
                "record it again with the same `batch_size` and `num_microbatches`."
            )

    def check_run(self, num_stages: int, samples: int) -> None:
        """Raise ValueError if the profile cannot price a run of `num_stages` with microbatches of so many samples."""
        self.check_microbatches(samples)
        if self.num_stages != num_stages:
            raise ValueError(
                f"`profile` must have {num_stages} stages, as in the runs that it prices, but has {self.num_stages}."
            )

    def check_messages(self, dense_bytes: ArrayLike) -> None:
        """Raise ValueError if known activations do not have these uncompressed bytes by boundary, as those of another model."""
        own = self.dense_bytes[0, :-1, 0].mean(axis=-1)
        for boundary in np.flatnonzero(~np.isclose(own, dense_bytes) & own.any())[:1]:
            here, wanted = own[boundary], np.asarray(dense_bytes)[boundary]
            raise ValueError(
                f"`profile` must have activations of {wanted:,.0f} bytes at boundary {boundary}, but has {here:,.0f}: record it again "
                "with the same `model`, `data` and `dtype`."
            )

    def with_packets_of(self, other: Profile) -> Profile:
        """Return these costs with the transfers and codec times of `other`: the same model under another compressor."""
        taken = ("decode_s", "encode_s", "wire_bytes", "dense_bytes", "method_s", "transfers")
        return replace(self, **{name: getattr(other, name) for name in taken})

    def with_exchange_of(self, other: Profile) -> Profile:
        """Return these costs with the transfers and averages of `other` at the end of the step."""
        return replace(self, **{name: getattr(other, name) for name in END_COSTS})

    def over(self, transport: Transport, num_workers: int) -> Profile:
        """Return these costs over a transport, with its host overheads for a step of `num_workers` workers."""
        overheads: dict[str, Any] = transport.host.overheads(num_workers)
        return replace(self, transport=transport, **overheads)

    def at_pace(self, pace: float) -> Profile:
        """Return the profile of a machine `pace` times slower; the time on wires does not change."""
        return replace(self, **{name: getattr(self, name) * pace for name in SECONDS})

    def at_seconds(self, **stacked: Floats) -> list[Profile]:
        """Return a profile for each entry of the first axis of `stacked`, with the seconds of that entry.

        They are checked together, which is faster than checking each profile.
        """
        checked = {}
        for name, values in stacked.items():
            check_choice("stacked", name, (*SECONDS, "shard_s", "method_s"))
            shape = () if name in OVERHEADS else np.shape(getattr(self, name))
            whole = _non_negative(name, np.asarray(values, np.float64))
            checked[name] = np.ascontiguousarray(np.broadcast_to(whole, (len(whole), *shape)))
            checked[name].flags.writeable = False
        profiles = []
        for entries in zip(*checked.values(), strict=True):
            profiles.append(copy.copy(self))
            profiles[-1].__dict__.update(
                {name: float(x) if name in OVERHEADS else x for name, x in zip(checked, entries, strict=True)}
            )
        return profiles

    def mean_microbatch(self) -> Profile:
        """Return the profile with mean costs for every microbatch, to simulate a different number of microbatches."""
        return replace(self, **{name: np.mean(getattr(self, name), axis=3, keepdims=True) for name in COSTS})

    def split_backward(self, weight_share: ArrayLike) -> Profile:
        """Return the profile with backward split into input and weight parts, for zero-bubble schedules.

        Together they take as long as the whole; `weight_share`, a number or one per stage, is the weight part's share. The first
        stage's input has no gradient, so all of its backward is in the weight part.
        """
        if self.compute_s.shape[2] != 2:
            raise ValueError(f"`compute_s` must have 2 ops to be split, but got {self.compute_s.shape[2]}.")
        shares = np.broadcast_to(np.asarray(weight_share, np.float64), (self.num_stages,))
        for value in shares.tolist():
            check_real("weight_share", value, 0, 1)
        share = shares[None, :, None, None]
        changed: dict[str, Any] = {}
        for name in COSTS:
            joint = getattr(self, name)
            third = np.zeros_like(joint[:, :, 1:])
            if name in ("compute_s", "cpu_s"):
                first, second = joint[:, :, 1:] * (1 - share), joint[:, :, 1:] * share
                first[:, 0], second[:, 0] = 0 * joint[:, 0, 1:], joint[:, 0, 1:]
                joint, third = np.concatenate([joint[:, :, :1], first], axis=2), second
            changed[name] = np.concatenate([joint, third], axis=2)
        return replace(self, **changed)

    def as_json(self) -> bytes:
        """Return the profile without its transport, as `save` writes it."""
        content: dict[str, Any] = {"format": FORMAT}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name != "transport" and not (item.name == "cpu_s" and np.isnan(value).all()):
                content[item.name] = value.tolist() if isinstance(value, np.ndarray) else value
        return json.dumps(content, allow_nan=False).encode()

    def save(self, path: Path | str) -> None:
        """Write the profile as JSON without its transport; `load` restores the rest exactly."""
        with output_file(Path(path)) as file:
            file.write(self.as_json())

    @classmethod
    def load(cls, path: Path | str) -> Profile:
        """Read a profile written by `save`; raises ValueError naming the file."""
        try:
            text = read_text(path)
        except OSError as error:
            raise ValueError(f"The profile {str(path)!r} cannot be read: {error.strerror}.") from None
        return cls.from_json(text, path)

    @classmethod
    def from_json(cls, text: str, path: Path | str) -> Profile:
        """Return the profile that a file at `path` holds; raises ValueError naming it."""
        try:
            content = parse_json(text)
        except ValueError:
            raise ValueError(f"The profile {str(path)!r} is not valid JSON.") from None
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise ValueError(f"The profile {str(path)!r} is not of format {FORMAT!r}.")
        known = {item.name for item in fields(cls)} - {"transport"}
        if set(content) - known or "compute_s" not in content:
            raise ValueError(f"The profile {str(path)!r} must have the fields of a profile, but got {sorted(content)}.")
        transfers = content.pop("transfers", [])
        arrays: dict[str, Any] = {
            name: np.array(value, np.float64) if isinstance(value, list) else value for name, value in content.items()
        }
        try:
            return cls(**arrays, transfers=as_transfers(transfers))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{str(error).rstrip('.')} (in {str(path)!r}).") from None


def _four_axes(name: str, value: ArrayLike) -> NDArray[Any]:
    array = _non_negative(name, np.asarray(value, np.float64))
    if array.ndim == 4:
        return array
    if array.size == 1:
        return array.reshape(1, 1, 1, 1)
    raise ValueError(f"`{name}` must have axes (replica, stage, op, microbatch), but got shape {array.shape}.")


def _non_negative(name: str, array: Floats) -> Floats:
    wrong = ~(array >= 0) if name != "cpu_s" else array < 0
    if wrong.any() or np.isinf(array).any():
        bad = array[wrong | np.isinf(array)][0]
        raise ValueError(f"`{name}` must be finite and at least 0, but got {bad}.")
    return array
