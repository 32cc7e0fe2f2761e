"""Golden packets: a change of format cannot pass unseen.

`make golden` writes the digests again, after a change that is meant.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from codec_variants import KEY, VARIANTS, Variant, normal
from torch import Tensor

GOLDEN = Path(__file__).parents[1] / "golden" / "packets.json"

TENSORS: dict[str, Tensor] = {
    "ramp": (torch.arange(-768, 768) / 7).view(4, 6, 64),
    "normal": normal(3, 17, 32),
    "relu": normal(4, 8, 6, 5, seed=4).relu(),
}


def digests(variant: Variant) -> dict[str, str]:
    found = {}
    for name, x in TENSORS.items():
        digest = hashlib.blake2b(digest_size=8)
        for array_name, array in sorted(variant.codec.encode(x, KEY).arrays.items()):
            digest.update(f"{array_name}:{array.nbytes};".encode() + array.tobytes())
        found[name] = digest.hexdigest()
    return found


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.notation)
def test_bytes_are_as_ever(variant: Variant) -> None:
    assert digests(variant) == json.loads(GOLDEN.read_text())[variant.notation]


def test_no_digest_is_left_over() -> None:
    assert set(json.loads(GOLDEN.read_text())) == {variant.notation for variant in VARIANTS}


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({variant.notation: digests(variant) for variant in VARIANTS}, indent=1) + "\n")
