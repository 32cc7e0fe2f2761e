"""Passes over memory of codecs on a GPU, counted in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from raysim_benchmarks.bench.passes import bench_passes, counted

from raysim.codecs import Quantize

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, not interpreted")


@pytest.mark.slow
def test_ranges_of_rows_take_one_pass_and_one_of_a_tensor_a_second() -> None:
    """Beyond the tensor and its packet, kernels move no more than a few bytes for each row or block."""
    codecs = Quantize(8, per="row"), Quantize(4, per="block", block=64), Quantize(8)
    row, block, tensor = bench_passes(codecs, (4, 64, 128))["rows"]
    for found in (row, block):
        for action in ("encode", "decode"):
            assert 0.96 * found["least_bytes"] < found[f"{action}_bytes"] < 1.02 * found["least_bytes"]
    again = tensor["least_bytes"] + tensor["tensor_bytes"]
    assert again <= tensor["encode_bytes"] < 1.02 * again


def test_operations_of_torch_are_counted_and_views_are_not() -> None:
    with counted() as moved:
        x = torch.zeros(100).view(10, 10).T  # written
        x = x + 1  # read and written
    assert moved.bytes == 400 + 800
