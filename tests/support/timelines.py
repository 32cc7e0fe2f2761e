"""Laws of every timeline."""

import json
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from raysim.network.timeline import Timeline
from raysim.network.timeline_views import busiest_share, summary

Columns = dict[str, NDArray]


def check_timeline(timeline: Timeline) -> None:
    """Parts of each worker's time add up; the critical path has no gaps; nothing beats a resource's load."""
    for worker in timeline.workers():
        assert min(worker) >= 0
        assert sum(worker[2:]) == pytest.approx(timeline.step_s, rel=1e-9)
    assert json.loads(json.dumps(summary(timeline)))["pipeline_s"] == timeline.pipeline_s
    path = timeline.critical_path()
    edges = [(segment.start_s, segment.end_s) for segment in path]
    assert edges[-1][1] == pytest.approx(timeline.step_s, rel=1e-12)
    assert edges[0][0] == 0.0
    assert all(a[1] == pytest.approx(b[0], abs=1e-9) for a, b in pairwise(edges))
    assert sum(timeline.explain().values()) == pytest.approx(timeline.step_s)
    assert busiest_share(timeline) <= 1 + 1e-9
    assert not (timeline.arrive_s < timeline.begin_s - 1e-9).any()
    assert not (timeline.begin_s < timeline.end_s - 1e-9).any()


def columns_of(timeline: Timeline) -> Columns:
    """Return the columns that a run with this timeline would record."""
    keys = [
        (r, s, op, m)
        for r in range(timeline.num_replicas)
        for s, o, m in zip(timeline.table.stage, timeline.table.op, timeline.table.microbatch, strict=True)
        for op in [int(o)]
    ]
    index = tuple(np.array(keys).T)
    whole = np.broadcast_to
    shape, profile = timeline.start_s.shape, timeline.profile
    return {
        "step": np.zeros(len(keys), int),
        "replica": index[0],
        "stage": index[1],
        "op": np.array(list("FBW"))[index[2]],
        "microbatch": index[3],
        "start_s": timeline.start_s[index],
        "end_s": timeline.end_s[index],
        "decode_s": whole(profile.decode_s, shape)[index],
        "compute_wall_s": whole(profile.compute_s, shape)[index],
        "compute_cpu_s": whole(profile.compute_s, shape)[index],
        "encode_s": whole(profile.encode_s, shape)[index],
        "wire_bytes": whole(profile.wire_bytes, shape)[index],
        "dense_bytes": whole(profile.wire_bytes, shape)[index],
    }
