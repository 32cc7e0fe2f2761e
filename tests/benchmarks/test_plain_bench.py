"""The loop that `raysim bench plain` measures against trains the same model."""

import pytest
import torch
from raysim_benchmarks.bench import plain


@pytest.mark.slow
@pytest.mark.parametrize(("codec", "compression"), plain.CODECS, ids=[repr(codec) for codec, _ in plain.CODECS])
def test_the_plain_loop_trains_what_raysim_trains(codec, compression):
    from raysim.pipeline.prepare import prepare

    torch.set_num_threads(1)
    workload = prepare(plain.plain_config(codec, threads=1, batch_size=8), plain.random_images())
    loop, inline = plain.PlainLoop(workload, compression), plain.inline_step(workload)
    found = [(loop.step(step), inline(step)) for step in range(3)]
    assert found[0][0] == pytest.approx(found[0][1], rel=1e-6)
    for ours, raysim in found:  # where rounding falls on either side of a level, the gradients go apart
        assert ours == pytest.approx(raysim, rel=0.05)
    assert len({round(ours, 3) for ours, _ in found}) == 3
