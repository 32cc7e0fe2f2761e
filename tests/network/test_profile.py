"""Profiles: from recorded columns, from shapes, from files; and what may not become one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from raysim.network.presets import DEVICES, parse_network
from raysim.network.profile import Profile
from raysim.network.recorded import mean_profile, profiles_from_actions
from raysim.network.simulate import simulate
from raysim.network.topology import Placement
from raysim.schedules.families import OneFOneB

Columns = dict[str, NDArray[np.generic]]


def recorded(steps: int = 2, replicas: int = 2, p: int = 3, m: int = 4, seed: int = 0) -> Columns:
    """Return columns as `actions.parquet` has them, rows in no order."""
    random = np.random.default_rng(seed)
    keys = [
        (step, r, s, op, k)
        for step in range(steps)
        for r in range(replicas)
        for s in range(p)
        for op in "FB"
        for k in range(m)
    ]
    random.shuffle(keys)
    count = len(keys)
    columns: Columns = {
        name: np.array([key[i] for key in keys])
        for i, name in enumerate(("step", "replica", "stage", "op", "microbatch"))
    }
    for name in ("start_s", "end_s", "decode_s", "compute_wall_s", "compute_cpu_s", "encode_s"):
        columns[name] = random.uniform(0, 1, count)
    columns["wire_bytes"] = random.integers(1, 1000, count)
    columns["dense_bytes"] = np.full(count, 4096)
    return columns


def test_recorded_columns_become_a_profile_each_step() -> None:
    columns = recorded()
    profiles = profiles_from_actions(columns, call_s=0.001)
    assert list(profiles) == [0, 1]
    row = 17
    step, replica, stage, microbatch = (int(columns[name][row]) for name in ("step", "replica", "stage", "microbatch"))
    key = (replica, stage, "FB".index(str(columns["op"][row])), microbatch)
    profile = profiles[step]
    assert profile.compute_s.shape == (2, 3, 2, 4)
    assert profile.compute_s[key] == columns["compute_wall_s"][row]
    assert profile.cpu_s[key] == columns["compute_cpu_s"][row]
    assert profile.wire_bytes[key] == columns["wire_bytes"][row]
    assert (profile.call_s, profile.source) == (0.001, f"recorded step {step}")
    assert (profile.num_replicas, profile.num_stages, profile.num_microbatches) == (2, 3, 4)


def test_other_rows_are_left_out_and_nulls_are_zero() -> None:
    columns = recorded(steps=1, replicas=1)
    wire = columns["wire_bytes"].astype(float)
    wire[:3] = np.nan
    changed = columns | {"wire_bytes": wire}
    extended = {name: np.append(values, values[:1]) for name, values in changed.items()}
    extended["op"][-1] = "U"
    profile = profiles_from_actions(extended)[0]
    assert np.count_nonzero(profile.wire_bytes == 0) == 3


def test_unknown_cpu_seconds_stay_unknown() -> None:
    columns = recorded(steps=1, replicas=1)
    on_gpu = profiles_from_actions(columns | {"compute_cpu_s": np.full(len(columns["op"]), np.nan)})[0]
    alone_s = on_gpu.alone_s(Placement((0, 1, 2), cores=(1.0,) * 3))
    np.testing.assert_array_equal(alone_s, on_gpu.compute_s)


def test_incomplete_or_doubled_steps_are_refused() -> None:
    columns = recorded(steps=1, replicas=1)
    gone = np.flatnonzero((columns["stage"] == 1) & (columns["op"] == "B") & (columns["microbatch"] == 2))[0]
    with pytest.raises(ValueError, match=r"^Step 0 must hold every action once, but got 1B2 of replica 0 0 times\.$"):
        profiles_from_actions({name: np.delete(values, gone) for name, values in columns.items()})
    with pytest.raises(ValueError, match=r"^Step 0 must hold every action once, but got 1B2 of replica 0 2 times\.$"):
        profiles_from_actions({name: np.append(values, values[gone]) for name, values in columns.items()})
    with pytest.raises(ValueError, match=r"^`columns` must hold 'dense_bytes', but got \["):
        profiles_from_actions({name: values for name, values in columns.items() if name != "dense_bytes"})
    with pytest.raises(ValueError, match=r"^`columns` must hold at least one forward or backward, but got none\.$"):
        profiles_from_actions(columns | {"op": np.full(len(columns["op"]), "U")})


def test_mean_of_steps() -> None:
    first, second = profiles_from_actions(recorded()).values()
    mean = mean_profile([first, second])
    np.testing.assert_allclose(mean.compute_s, (first.compute_s + second.compute_s) / 2)
    assert mean.source == "mean of 2 steps"
    with pytest.raises(ValueError, match=r"^`profiles` must be one or more of the same shape, but got shapes \[\]\.$"):
        mean_profile([])


def test_mean_microbatch_allows_any_number() -> None:
    profile = profiles_from_actions(recorded(replicas=1))[0]
    alike = profile.mean_microbatch()
    assert alike.num_microbatches is None
    np.testing.assert_allclose(alike.compute_s[..., 0], profile.compute_s.mean(axis=-1))
    assert simulate(OneFOneB(), alike, parse_network("1gbps"), num_microbatches=32).table.num_microbatches == 32


def test_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    for profile in (
        profiles_from_actions(recorded(), step_s=0.5)[1],
        Profile.uniform(3, 1.0, 2.0, gradient_bytes=np.arange(3.0)),
    ):
        profile.save(path)
        again = Profile.load(path)
        for name, value in vars(profile).items():
            np.testing.assert_array_equal(getattr(again, name), value)
            assert type(getattr(again, name)) is type(value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"^The profile '.*' is not valid JSON\.$"),
        ("[]", r"^The profile '.*' is not of format 'raysim profile 2'\.$"),
        ('{"format": "raysim profile 2"}', r"^The profile '.*' must have the fields of a profile, but got \[\]\.$"),
        (
            '{"format": "raysim profile 2", "compute_s": [[[[1], [-2]]]]}',
            r"^`compute_s` must be finite and at least 0, but got -2",
        ),
        (
            '{"format": "raysim profile 2", "compute_s": [1, 2]}',
            r"^`compute_s` must have axes \(replica, stage, op, microbatch\)",
        ),
        ('{"format": "raysim profile 2", "compute_s": "fast"}', r"\(in '.*'\)\.$"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        Profile.load(path)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be read: No such file"):
        Profile.load(tmp_path / "none.json")


def test_profiles_are_read_only_and_checked() -> None:
    profile = Profile.uniform(2, 1.0, 2.0)
    with pytest.raises(ValueError, match="read-only"):
        profile.compute_s[0, 0, 0, 0] = 5.0
    with pytest.raises(ValueError, match=r"^`call_s` must be in \[0, inf\], but got -1\.$"):
        Profile.uniform(2, 1.0, 2.0, call_s=-1)
    with pytest.raises(ValueError, match=r"^Costs must have shapes that agree, but got .*wire_bytes \(1, 3, 2, 1\)"):
        Profile(compute_s=np.ones((1, 2, 2, 1)), wire_bytes=np.ones((1, 3, 2, 1)))
    with pytest.raises(ValueError, match=r"^`encode_s` must be finite and at least 0, but got nan\.$"):
        Profile(compute_s=np.ones((1, 2, 2, 1)), encode_s=np.array(np.nan))
    with pytest.raises(ValueError, match=r"^`compute_s` must have 2 or 3 ops"):
        Profile(compute_s=np.ones((1, 2, 4, 1)))


def test_split_backward_keeps_the_sum() -> None:
    profile = profiles_from_actions(recorded())[0]
    split = profile.split_backward(weight_share=0.4)
    np.testing.assert_allclose(split.compute_s[:, 1:, 1:].sum(axis=2), profile.compute_s[:, 1:, 1])
    np.testing.assert_allclose(split.compute_s[:, 1:, 2], 0.4 * profile.compute_s[:, 1:, 1])
    assert not split.compute_s[:, 0, 1].any()  # nobody awaits a gradient of the data
    np.testing.assert_array_equal(split.compute_s[:, 0, 2], profile.compute_s[:, 0, 1])
    np.testing.assert_array_equal(split.wire_bytes[:, :, :2], profile.wire_bytes)
    assert not split.wire_bytes[:, :, 2].any()
    with pytest.raises(ValueError, match=r"^`compute_s` must have 2 ops to be split, but got 3\.$"):
        split.split_backward(0.4)


def test_devices_are_plausible() -> None:
    for device in DEVICES.values():
        assert 5e13 <= device.peak_flops <= 3e15
        assert 16e9 <= device.memory_bytes <= 200e9


def test_profile_packets_of_another_compressor() -> None:
    dense, packed = profiles_from_actions(recorded(seed=1))[0], profiles_from_actions(recorded(seed=2))[0]
    mixed = dense.with_packets_of(packed)
    np.testing.assert_array_equal(mixed.compute_s, dense.compute_s)
    np.testing.assert_array_equal(mixed.wire_bytes, packed.wire_bytes)
    np.testing.assert_array_equal(mixed.encode_s, packed.encode_s)


def test_files_are_plain_json(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    Profile.uniform(1, 1.0, 2.0).save(path)
    content = json.loads(path.read_text())
    assert content["compute_s"] == [[[[1.0], [2.0]]]]
    assert "cpu_s" not in content
