"""Damaged packets decode to a ValueError or to a tensor of the stated shape and dtype, and to nothing worse."""

from __future__ import annotations

import pytest
import torch

from raysim.codecs import TopK


@pytest.mark.parametrize("length", [130, 4099, 5000])
def test_positions_just_beyond_the_tensor_are_refused(length: int) -> None:
    """The greatest position of an Elias-Fano index, in one piece with the tensor's last values or not."""
    x = torch.zeros(1, length)
    x[0, -3:] = 1.0
    codec = TopK(3 / length, index="elias_fano")
    packet = codec.encode(x)
    assert torch.equal(packet.decode(), x)
    low = packet.arrays["low"].copy()
    width = 8 * len(low) // 3
    assert ((length - 1) | ((1 << width) - 1)) >= length
    low[:] = 255
    with pytest.raises(ValueError, match="must hold 3 increasing positions below"):
        packet._replace(arrays=packet.arrays | {"low": low}).decode()
