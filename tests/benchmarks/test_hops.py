"""The bench of hops reads them off reports, from the end of the sender's codec to the start of the receiver's action."""

import pytest
from raysim_benchmarks.bench.hops import hops_of

from raysim.pipeline.reports import ActionRecord, StepReport


def test_hops_are_what_lies_between_codec_and_start():
    times = {(0, "F"): (0.0, 0.5), (1, "F"): (1.0, 1.25), (1, "B"): (1.25, 2.0), (0, "B"): (2.5, 3.0)}
    reports = [
        StepReport(
            replica=0,
            losses=[],
            links=[],
            groups=[],
            actions=[
                ActionRecord(*where, 0, start, end + 0.1, 0.0, end - start, 0.0, 0.0, 1, 1)  # 0.1 s to hand it over
                for where, (start, end) in times.items()
                if where[0] == stage
            ],
            gradient_norm=None,
        )
        for stage in (0, 1)
    ]
    assert hops_of(reports, 2) == pytest.approx([0.5, 0.5])
