"""Laws of every timeline."""

import json
from itertools import pairwise

import pytest

from raysim.network.timeline import Timeline


def check_timeline(timeline: Timeline) -> None:
    """Parts of each worker's time add up; the critical path has no gaps; nothing beats a resource's load."""
    for worker in timeline.workers():
        assert min(worker) >= 0
        assert sum(worker[2:]) == pytest.approx(timeline.step_s, rel=1e-9)
    assert json.loads(json.dumps(timeline.summary()))["pipeline_s"] == timeline.pipeline_s
    path = timeline.critical_path()
    edges = [(segment.start_s, segment.end_s) for segment in path]
    assert edges[-1][1] == pytest.approx(timeline.step_s, rel=1e-12)
    assert edges[0][0] == 0.0
    assert all(a[1] == pytest.approx(b[0], abs=1e-9) for a, b in pairwise(edges))
    assert sum(timeline.explain().values()) == pytest.approx(timeline.step_s)
    assert timeline.busiest <= 1 + 1e-9
    assert not (timeline.arrive_s < timeline.begin_s - 1e-9).any()
    assert not (timeline.begin_s < timeline.end_s - 1e-9).any()
