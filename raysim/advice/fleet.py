"""Hosts and their GPUs, as in `8xA100` (eight hosts of one GPU) or `14x8xH100` (fourteen hosts of eight)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from raysim.network.devices import DEVICES, Device
from raysim.notation import InputError, known_words, shown


@dataclass(frozen=True)
class Fleet:
    """Equal hosts; the GPUs of a host share a stage, at no cost beyond the assumed efficiency.

    >>> Fleet.parse("14x8xH100"), Fleet.parse("8xA100").memory_bytes
    (14x8xH100, 80000000000)
    """

    hosts: int
    gpus: int
    """Of each host."""
    name: str
    """One of `DEVICES`."""

    @classmethod
    def parse(cls, text: str) -> Fleet:
        """Return the fleet that `text` writes; raises InputError."""
        match = re.fullmatch(r"([1-9]\d{0,4})x(?:([1-9]\d{0,3})x)?(\S+)", text.strip())
        if match is None:
            raise InputError(
                f"`--devices` must be as 8xA100 or 14x8xH100 (hosts x GPUs of each), but got {shown(text)}."
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
        """Memory of a host's GPUs together."""
        return self.gpus * self.device.memory_bytes

    @property
    def flops(self) -> float:
        """Dense 16-bit peak of a host, in FLOP/s."""
        return self.gpus * self.device.peak_flops

    @property
    def codec_bytes_per_s(self) -> float:
        """Dense bytes a second that a host's codecs go over."""
        return self.gpus * self.device.codec_bytes_per_s
