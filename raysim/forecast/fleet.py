"""Hosts with GPUs, and ways to train on them: layouts and compression."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from raysim.config.identity import DENSE, IDENTITY, Setting
from raysim.network.presets import DEVICES, Device
from raysim.network.sharding import FSDP
from raysim.notation import InputError, known_words, shown
from raysim.schedules.families import Schedule


@dataclass(frozen=True)
class Fleet:
    """Equal hosts; the GPUs of a host share a stage at no cost beyond the assumed efficiency.

    >>> Fleet.parse("14x8xH100"), Fleet.parse("8xA100").memory_bytes
    (14x8xH100, 80000000000)
    """

    hosts: int
    gpus: int
    """Per host."""
    name: str
    """One of `DEVICES`."""

    @classmethod
    def parse(cls, text: str) -> Fleet:
        """Parse a fleet: `8xA100` is eight hosts with one GPU, `14x8xH100` fourteen with eight. Raises InputError."""
        match = re.fullmatch(r"([1-9]\d{0,4})x(?:([1-9]\d{0,3})x)?(\S+)", text.strip())
        if match is None:
            raise InputError(
                f"`--devices` must look like 8xA100 or 14x8xH100 (hosts x GPUs of each), but got {shown(text)}."
            )
        if match[3] not in DEVICES:
            raise InputError(f"`--devices`: unknown GPU {shown(match[3])}.{known_words(match[3], DEVICES)}")
        return cls(int(match[1]), int(match[2] or 1), match[3])

    def __repr__(self) -> str:
        """Return the text that `parse` reads."""
        return f"{self.hosts}x{f'{self.gpus}x' if self.gpus > 1 else ''}{self.name}"

    @property
    def device(self) -> Device:
        """The datasheet of a GPU."""
        return DEVICES[self.name]

    @property
    def memory_bytes(self) -> int:
        """Total memory of a host's GPUs."""
        return self.gpus * self.device.memory_bytes

    @property
    def flops(self) -> float:
        """Dense 16-bit peak of a host, in FLOP/s."""
        return self.gpus * self.device.peak_flops

    @property
    def codec_bytes_per_s(self) -> float:
        """Dense bytes per second processed by a host's codecs."""
        return self.gpus * self.device.codec_bytes_per_s


class HostLayout(NamedTuple):
    """Hosts arranged as `replicas` pipelines of `workers` hosts."""

    workers: int
    replicas: int
    sharding: FSDP | None = None
    """Sharding of the parameters over replicas."""

    def __str__(self) -> str:
        """Return the layout in words."""
        if self.replicas == 1:
            return f"1 pipeline of {self.workers}"
        words = f"{self.replicas} replicas" if self.workers == 1 else f"{self.replicas} pipelines of {self.workers}"
        return words if self.sharding is None else f"{words}, {self.sharding!r}"

    @property
    def groups(self) -> int:
        """Copies of the model."""
        return self.replicas if self.sharding is None else self.sharding.groups(self.replicas)


@dataclass(frozen=True)
class Proposal:
    """A layout with its link codecs, replica method and schedule."""

    layout: HostLayout
    forward: str = IDENTITY
    backward: str = IDENTITY
    method: str = IDENTITY
    overlap: bool = False
    """Averages uncompressed gradients in buckets during the last backward, like DDP."""
    schedule: Schedule | None = None
    """The order of forwards and backwards, if not the job's: with more microbatches in flight."""

    @property
    def setting(self) -> Setting:
        """Only the compression."""
        return Setting(self.forward, self.backward, self.method)

    @property
    def dense(self) -> bool:
        """True if nothing is compressed, and replicas average in every step."""
        return self.setting == DENSE

    @property
    def links_coded(self) -> bool:
        """True if activations or their gradients are compressed."""
        return (self.forward, self.backward) != (IDENTITY, IDENTITY)

    def __str__(self) -> str:
        """Return the codecs of activations and gradients, and the replica method."""
        links = f"{self.forward} / {self.backward}" if self.links_coded else ""
        words = filter(None, (links, self.method if self.method != IDENTITY else ""))
        schedule = "" if self.schedule is None else f", {self.schedule!r}"
        return (", ".join(words) or "dense") + (", overlapped" if self.overlap else "") + schedule
