"""The GPU of the tests: a CUDA device where there is one, else host memory, on which Triton interprets the kernels."""

import contextlib

import torch
from codec_laws import bits_of, carried, content
from codec_variants import KEY, Variant, normal
from torch import Tensor

from raysim.codecs import Codec, kernels
from raysim.codecs.transfers import Flight

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_gpu():
    """Within this context the kernels of GPUs serve tensors on `DEVICE`."""
    return contextlib.nullcontext() if DEVICE == "cuda" else kernels.interpreted()


class SlowFlight(Flight):
    """A flight whose bytes arrive when it is waited for, and not before: until then they are wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0
        self._held: list[tuple[Tensor, Tensor]] = []

    def takes(self, device: torch.device | str) -> bool:
        return True

    def up(self, host: Tensor, device: torch.device | str) -> Tensor:
        return host.to(device)

    def _copied(self, x: Tensor) -> Tensor:
        host = (
            torch.full(x.shape, 1, dtype=x.dtype) if x.dtype == torch.bool else torch.full(x.shape, 0x5A, dtype=x.dtype)
        )
        self._held.append((host, x.clone().cpu()))
        return host

    def _wait(self) -> None:
        self.waits += 1
        for host, x in self._held:
            host.copy_(x)
        self._held.clear()


def assert_alike_on_gpu(codec: Codec, x: Tensor, name: str = "") -> None:
    """The packet, what it decodes to, and what it withholds with and without a memory are the CPU's."""
    expected, decoded = codec.encode(x, KEY), codec.encode(x, KEY).decode()
    memory = normal(x.numel()).view(x.shape) * 0.5
    fed = [codec.encode_with_residual(x.clone(), x.dtype, KEY, held) for held in (None, memory)]
    with on_gpu():
        moved = x.to(DEVICE)
        packet = codec.encode(moved, KEY)
        assert content(packet) == content(expected), name
        assert bits_of(packet.decode(DEVICE)) == bits_of(decoded), name
        for held, (sent, left) in zip((None, memory.to(DEVICE)), fed, strict=True):
            sent_there, left_there = codec.encode_with_residual(moved.clone(), x.dtype, KEY, held)
            assert content(sent_there) == content(sent), name
            assert bits_of(left_there) == bits_of(left), name


# Laws of codecs on GPUs, beside those of `codec_laws`.


def makes_the_packets_of_the_cpu(variant: Variant) -> None:
    for name, x in carried(variant).items():
        assert_alike_on_gpu(variant.codec, x, name)


def reads_no_bytes_before_they_have_landed(variant: Variant) -> None:
    x, memory = normal(4, 60), normal(4, 60) * 0.1
    expected, left = variant.codec.encode_with_residual(x.clone(), x.dtype, KEY, memory)
    with on_gpu():
        flight = SlowFlight()
        with flight.open():
            packet, held = variant.codec.encode_with_residual(x.to(DEVICE), x.dtype, KEY, memory.to(DEVICE))
        flight.land()
        assert content(packet) == content(expected)
        assert bits_of(held) == bits_of(left)
