"""The bench of a pipeline beside torch's: both sides are timed, and all their processes have spent CPU seconds."""

import json
import subprocess
import sys

import pytest
from raysim_benchmarks.processes import by_kind, per


def test_cpu_seconds_are_what_was_spent_between_two_readings():
    before = {(7, 1.0): ("driver", 2.0), (8, 1.0): ("stages", 1.0)}
    after = {(7, 1.0): ("driver", 2.5), (8, 1.0): ("stages", 3.0), (8, 9.0): ("stages", 4.0)}  # a number is used again
    assert per(by_kind(before, after), 2) == {"driver": 0.25, "stages": 3.0}


@pytest.mark.slow
def test_both_sides_are_timed_and_have_spent_cpu_seconds(tmp_path):
    words = [
        "bench",
        "pipeline",
        "--stages",
        "2",
        "--pairs",
        "1",
        "--steps",
        "1",
        "--json",
        str(tmp_path / "found.json"),
    ]
    subprocess.run([sys.executable, "-m", "raysim.cli", *words], check=True, timeout=280)
    results = json.loads((tmp_path / "found.json").read_text())["results"]
    assert [found["codec"] for found in results] == ["Identity", "Quantize(8)"]
    for found in results:
        (run,) = found["runs"]
        assert found["ratio"] == run["ray"] / run["torch"]
        assert found["cpu_s"]["torch"]["ranks"] > 0
        assert {"driver", "head", "raylets", "stages"} <= found["cpu_s"]["ray"].keys()
        assert found["cpu_s"]["ray"]["stages"] > 0
