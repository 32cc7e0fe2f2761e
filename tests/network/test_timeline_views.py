"""Traces: JSON that the viewers open, bars that nest, arrows that go from a packet's maker to its taker."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from raysim.network.presets import parse_network
from raysim.network.profile import Profile
from raysim.network.simulate import simulate
from raysim.network.timeline import Timeline
from raysim.network.timeline_views import trace_events, write_trace
from raysim.network.topology import Placement
from raysim.schedules.families import OneFOneB


def timeline(placement: Placement | None = None) -> Timeline:
    profile = Profile.uniform(3, 1.0, 2.0, wire_bytes=1000, encode_s=0.25, decode_s=0.5, call_s=0.125)
    return simulate(
        OneFOneB(), profile, parse_network("8kbps+500ms"), num_microbatches=4, num_replicas=2, placement=placement
    )


@pytest.fixture
def events(tmp_path: Path) -> list[dict[str, Any]]:
    path = tmp_path / "trace.json"
    count = write_trace(trace_events(timeline()), path)
    content = json.loads(path.read_text())
    assert content["displayTimeUnit"] == "ms"
    assert len(content["traceEvents"]) == count
    return list(content["traceEvents"])


def test_trace_events_have_required_fields(events: list[dict[str, Any]]) -> None:
    for event in events:
        assert {"ph", "pid", "tid", "name"} <= set(event)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
    assert {event["ph"] for event in events} == set("MXsfbe")


def test_actions_are_where_the_timeline_has_them(events: list[dict[str, Any]]) -> None:
    simulated = timeline()
    actions = [event for event in events if event.get("cat") == "action"]
    assert Counter(event["name"] for event in actions) == Counter(
        {f"{s}{op}{m}": 2 for s in range(3) for op in "FB" for m in range(4)}
    )
    for event in actions:
        stage, op, microbatch = int(event["name"][0]), "FB".index(event["name"][1]), int(event["name"][2])
        key = (event["pid"], stage, op, microbatch)
        assert event["ts"] == pytest.approx(simulated.start_s[key] * 1e6)
        assert event["ts"] + event["dur"] == pytest.approx(simulated.end_s[key] * 1e6)


def test_slices_of_a_worker_nest(events: list[dict[str, Any]]) -> None:
    rows = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append((event["ts"], -event["dur"]))
    for row in rows.values():
        ends: list[float] = []
        for start, length in sorted(row):
            while ends and ends[-1] <= start + 1e-3:
                ends.pop()
            assert not ends or start - length <= ends[-1] + 1e-3
            ends.append(start - length)


def test_trace_arrows_match_transfers(events: list[dict[str, Any]]) -> None:
    for first, second in (("s", "f"), ("b", "e")):
        starts = {event["id"]: event for event in events if event["ph"] == first}
        ends = {event["id"]: event for event in events if event["ph"] == second}
        assert starts.keys() == ends.keys()
        assert len(starts) == 2 * 2 * 2 * 4
        for number, start in starts.items():
            assert start["ts"] <= ends[number]["ts"]
            assert start["name"] == ends[number]["name"]
    threads = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert len(threads) == len(set(threads)) == 2 * 3 + 8
    assert "host 0 to host 1" in threads
    assert "worker 2: stage 2, host 5" in threads


def test_no_wires_within_a_host() -> None:
    kinds = {event["ph"] for event in trace_events(timeline(Placement((0,) * 6)))}
    assert kinds == set("MXsf")
