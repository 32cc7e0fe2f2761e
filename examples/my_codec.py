"""My own codec: does it beat the ones that come with raysim?

`Logarithm` sends the sign and the logarithm of each magnitude in `bits` bits. It names the arrays of its packets and defines the two
directions of the map. It is written by its import path, `my_codec:Logarithm(4)`, wherever a codec can be written.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import matplotlib.pyplot as plt
import numpy as np
import torch
import typer
from torch import Tensor

import raysim
from raysim.codecs import DTYPES, Codec, Packet, check_finite, to_bytes, to_tensor
from raysim.codecs.bits import pack, packed_bytes, unpack
from raysim.testing import check_codec


@dataclass(frozen=True, repr=False)
class Logarithm(Codec):
    """Rounds the logarithm of each magnitude to one of 2**(bits-1) - 1 levels below the greatest; zero stays zero.

    >>> Logarithm(4).encode(torch.tensor([1.0, -0.5, 0.0])).decode()
    tensor([ 1.0000, -0.5000,  0.0000])
    """

    bits: int
    octaves: float = 6.0  # between the greatest magnitude and the least level

    @property
    def _levels(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def array_names(self) -> tuple[str, ...]:
        return ("codes", "greatest")

    def _encode(self, x: Tensor, key: int | None) -> dict[str, np.ndarray]:
        check_finite(x)
        values = x.float().flatten()
        greatest = values.abs().max() if values.numel() else torch.tensor(0.0)
        below = torch.log2(greatest / values.abs()) * ((self._levels - 1) / self.octaves)  # steps below the greatest
        magnitude = torch.where(below.round() < self._levels, self._levels - below.round(), 0).nan_to_num(0)
        codes = 2 * magnitude.long() + (values < 0)
        return {"codes": to_bytes(pack(codes, self.bits)), "greatest": to_bytes(greatest.reshape(1)[: x.numel()])}

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        packed = to_tensor(packet.bytes_of("codes", packed_bytes(packet.numel, self.bits)), torch.uint8)
        greatest = to_tensor(packet.bytes_of("greatest", 4 if packet.numel else 0), torch.float32)
        codes = unpack(packed, packet.numel, self.bits).long()
        magnitude, negative = codes // 2, codes % 2
        steps = (self._levels - magnitude) * (self.octaves / (self._levels - 1))
        values = torch.where(magnitude > 0, greatest * torch.exp2(-steps) * (1 - 2 * negative), 0.0)
        return values.to(DTYPES[packet.dtype]).view(packet.shape).to(device)


def main(
    runs: Annotated[Path, typer.Option(help="A new folder for the runs.")] = Path("results/my_codec"),
    picture: Annotated[Path, typer.Option(help="File of the figure.")] = Path("my_codec.png"),
    steps: int = 300,
) -> None:
    """Compare accuracy and fidelity of the codec with `Quantize` at equal bits."""
    sys.path.insert(0, str(Path(__file__).parent))  # so that `my_codec` can be imported from any folder
    check_codec(raysim.parse("my_codec:Logarithm(4)").codec)  # the laws that links rely on
    widths = (3, 4, 5, 6)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    for name in ("my_codec:Logarithm", "Quantize"):
        accuracies, fidelities = [], []
        for bits in widths:
            codec = f"{name}({bits})"
            changes = (f"steps={steps}", f"forward={codec}", f"backward={codec}")
            run = raysim.train("digits-cnn", *changes, engine="inline", out=runs / f"{name.rpartition(':')[2]}-{bits}")
            accuracies.append(100 * run.evals[run.evals["mode"] == "on"]["accuracy"].iloc[-1])
            fidelities.append(run.links["fidelity"].mean())
            print(f"{codec}: accuracy {accuracies[-1]:.1f} %, fidelity {fidelities[-1]:.4f}")
        left.plot(widths, accuracies, "o-", label=name)
        right.plot(widths, fidelities, "o-", label=name)
    left.set(xlabel="bits a value", ylabel="accuracy, % (one seed)", xticks=widths)
    right.set(xlabel="bits a value", ylabel="mean fidelity of links", xticks=widths)
    left.legend()
    figure.savefig(picture, dpi=130)


if __name__ == "__main__":
    typer.run(main)
