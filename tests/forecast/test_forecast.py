"""Runs that were never made: their profiles from counted operations and real codecs, their memory, their commands."""

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from raysim import train
from raysim.cli import app
from raysim.config import ConfigError, read_config
from raysim.engine.inline import InlineEngine
from raysim.forecast.compute import datasheet_profile, record_profile
from raysim.forecast.forecast import forecast
from raysim.forecast.timings import read_timings
from raysim.network.presets import DEVICES, parse_network
from raysim.network.prices import MODEL_ERROR, mean_bounds
from raysim.network.profile import Profile
from raysim.network.simulate import simulate
from raysim.network.timeline_views import wire_use
from raysim.network.topology import Network
from raysim.network.transport import RAY
from raysim.notation import InputError
from raysim.pipeline.groups import TIED_TABLE, chunk_bytes
from raysim.pipeline.prepare import prepare
from raysim.schedules.families import GPipe

FREE = parse_network("free")
QUICK = ["data.train_samples=64", "data.test_samples=20", "model.width=4"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["digits-cnn"],
        ["digits-cnn", "forward=AQSGD(Quantize(4))", "backward=EF21(TopK(0.1))", "schedule=GPipe", "num_stages=3"],
        ["digits-cnn", "forward=ErrorFeedback(TopK(0.1))", "recompute=true", "dtype=bfloat16", "num_microbatches=8"],
        ["topics-gpt", "model.tied=true", "optimizer.name=sgd", "schedule=1F1B(extra_warmup=1)", "num_microbatches=8"],
        pytest.param(["topics-gpt", "model.subspace=16"], marks=pytest.mark.slow),
    ],
)
def test_forecast_memory_and_shapes_match_plan(overrides):
    plan = prepare(read_config(overrides[0], overrides[1:])).plan
    found = forecast(*overrides, device="A100")
    assert found.memories == plan.memories
    assert found.num_steps == plan.num_steps
    assert found.worker_bytes() == [memory.total_bytes for memory in plan.memories]
    itemsize = 2 if plan.config.dtype == "bfloat16" else 4
    assert [link.dense_bytes for link in found.links] == [
        size
        for one in plan.boundaries
        for size in (*2 * [itemsize * int(np.prod(one.shape))], *one.exact_bytes.values())
    ]
    assert len(found.tied) == len(plan.tied)


@pytest.mark.parametrize(
    ("forward", "backward", "shared"),
    [
        pytest.param("TopK(0.1)", "Quantize(4)", False, marks=pytest.mark.slow),
        pytest.param(
            "ErrorFeedback(TopK(0.3, values=Quantize(8)))", "EF21(Quantize(3))", False, marks=pytest.mark.slow
        ),
        ("TopK(0.25)", "Quantize(8)", True),
        ("AQSGD(Quantize(4))", "Identity", False),
    ],
)
def test_forecast_packets_have_recorded_sizes(small, tmp_path, forward, backward, shared):
    config = small(forward=forward, backward=backward, shared_indices=shared, steps=8)
    run = train(config, engine="inline", out=tmp_path / "run")
    found = forecast(config, device="A100")
    links = run.links
    for step, first in ((0, True), (7, False)):  # AQ-SGD's first epoch has four steps
        recorded = links[links["step"] == step].set_index(["boundary", "direction"])["wire_bytes"]
        for link in found.links:
            size = link.first_bytes if first else link.wire_bytes
            assert size * config.num_microbatches == recorded[link.boundary, link.direction]
        timeline = found.timed(first=first).simulate(parse_network("1gbps"))
        beside = len(found.links) * config.num_microbatches * RAY.bands[0].beside_bytes
        assert sum(wire.wire_bytes for wire in wire_use(timeline)) == recorded.sum() + beside
    assert found.first_steps == (4 if forward.startswith("AQSGD") else 0)


def test_compute_is_operations_at_a_share_of_the_datasheets_peak() -> None:
    flops, config = np.array([1, 2, 1]) * 10**12, read_config("digits-cnn")
    for recompute, factor in ((False, 2), (True, 3)):
        profile = datasheet_profile(config.changed(recompute=recompute), "T4", flops.tolist(), (), 0.5)
        np.testing.assert_allclose(profile.compute_s[0, :, 0, 0], flops / 32.5e12)
        np.testing.assert_allclose(profile.compute_s[0, :, 1, 0], factor * flops / 32.5e12)
        assert "T4 at 0.5" in profile.source
    with pytest.raises(ValueError, match=r"^`device` must be one of T4, V100, .*, but got 'TPU'\.$"):
        datasheet_profile(config, "TPU", [1], ())
    with pytest.raises(ValueError, match=r"^`efficiency` must be in \(0, 1\], but got 40\.$"):
        datasheet_profile(config, "A100", [1], (), 40)


def gpt_forward_flops(num_blocks, width, sequence, batch, vocabulary):
    """Return the FLOPs of a forward through GPT blocks and the head: 24 w^2 + 4 s w a token and block."""
    return batch * sequence * (num_blocks * (24 * width**2 + 4 * sequence * width) + 2 * width * vocabulary)


def test_compute_is_counted_operations_over_the_datasheets_speed():
    found = forecast("topics-gpt", "num_stages=2", device="A100", efficiency=0.5)
    per_stage = np.array(found.flops_forward, float)
    assert per_stage.sum() == gpt_forward_flops(4, 128, 64, batch=8, vocabulary=256)
    speed = 0.5 * DEVICES["A100"].peak_flops
    np.testing.assert_allclose(found.steady.compute_s[0, :, 0, 0], per_stage / speed)
    np.testing.assert_allclose(found.steady.compute_s[0, :, 1, 0], 2 * per_stage / speed)
    again = forecast("topics-gpt", "num_stages=2", "recompute=true", device="A100", efficiency=0.5)
    np.testing.assert_allclose(again.steady.compute_s[0, :, 1, 0], 3 * per_stage / speed)


def test_forecast_is_monotone_in_bandwidth_and_tends_to_compute():
    found = forecast("digits-cnn", "forward=TopK(0.1)", device="T4", transport="bare")
    seconds = [found.step_s(Network(bandwidth, 0.001)) for bandwidth in np.geomspace(1e5, 1e11, 20)]
    assert (np.diff(seconds) <= 1e-12).all()
    free = found.simulate(FREE)
    assert all(worker.wait_bytes_s == pytest.approx(0, abs=1e-12) for worker in free.workers())
    assert found.run_s(FREE) == pytest.approx(found.num_steps * found.step_s(FREE))


def test_first_epoch_of_aqsgd_is_priced_separately():
    found = forecast("digits-cnn", "forward=AQSGD(Quantize(4))", device="T4", codec_bytes_per_s=1e12)
    network = parse_network("100mbps")
    first, steady = found.step_s(network, first=True), found.step_s(network)
    assert first > steady
    assert (found.first_steps, found.num_steps) == (1437 // 32, 300)
    assert found.run_s(network) == pytest.approx(44 * first + 256 * steady)
    longer = forecast("digits-cnn", "forward=AQSGD(Quantize(4), warmup=3)", device="T4")
    assert longer.first_steps == 3 * 44


def test_codecs_can_be_given_a_speed():
    found = forecast("digits-cnn", "forward=TopK(0.1)", device="T4", codec_bytes_per_s=1e9)
    assert {(link.encode_s, link.decode_s) for link in found.links if link.direction == "forward"} == {
        (link.dense_bytes / 1e9,) * 2 for link in found.links
    }
    by_datasheet = forecast("digits-cnn", "forward=TopK(0.1)", device="T4")
    speed = DEVICES["T4"].memory_bytes_per_s / 8
    forwards = [link for link in by_datasheet.links if link.direction == "forward"]
    assert [link.encode_s for link in forwards] == [link.dense_bytes / speed for link in forwards]
    assert all(link.encode_s == 0 for link in by_datasheet.links if link.codec == "Identity")
    assert any("37.5 GB a second" in note for note in by_datasheet.notes)


@pytest.mark.parametrize("text", ["ZBH1", "Interleaved1F1B(2)", "1F1B(ahead=2)", "GPipe"])
def test_every_schedule_is_forecast(text):
    found = forecast("digits-cnn", f"schedule={text}", device="A100")
    assert repr(found.schedule) == repr(found.config.schedule) == text
    assert found.memories == prepare(read_config("digits-cnn", [f"schedule={text}"])).plan.memories
    assert found.num_workers == (2 if text.startswith("Inter") else 4)
    assert found.step_s(parse_network("8mbps")) > found.step_s(FREE) > 0
    assert len(found.simulate(FREE).workers()) == found.num_workers


def test_a_profile_recorded_in_two_parts_prices_any_schedule():
    recorded = record_profile(read_config("digits-cnn", [*QUICK, "schedule=ZBH1"]), num_steps=1)
    assert recorded.compute_s.shape[2] == 3
    assert (recorded.compute_s[0, :, 2] > 0).all()
    forecasts = [forecast("digits-cnn", *QUICK, f"schedule={text}", profile=recorded) for text in ("ZBH1", "1F1B")]
    apart, joint = ([w.compute_s for w in found.simulate(FREE).workers()] for found in forecasts)
    assert apart == pytest.approx(joint)


@pytest.mark.slow
def test_published_sizes_need_neither_data_nor_weights():
    found = forecast("gpt2-wikitext2", "forward=Quantize(4)", device="A100")
    tokens = 8 * 1024
    assert sum(found.flops_forward) == gpt_forward_flops(12, 768, 1024, batch=8, vocabulary=50257)
    assert [link.dense_bytes for link in found.links] == [4 * tokens * 768] * 6
    assert found.tied == (((0, 3), (50257, 768)),)
    weights = sum(memory.weights_bytes for memory in found.memories) // 4
    assert weights == 124_439_808 + 50257 * 768  # the tied table is in two stages
    network = parse_network("100mbps")
    timeline = found.simulate(network)
    chunk = chunk_bytes("sum", 50257 * 768, 2, TIED_TABLE)[0] + RAY.bands[-1].beside_bytes
    assert timeline.collective_s == pytest.approx(2 * 8 * chunk / 100e6)
    driver_s = RAY.host.overheads(4)["step_s"]
    assert found.step_s(network) == timeline.step_s
    assert timeline.step_s == pytest.approx(timeline.pipeline_s + timeline.collective_s + driver_s)
    resnet = forecast("resnet18-cifar10", "data.train_samples=1280", "epochs=3", device="A100")
    assert resnet.num_steps == 30
    assert sum(memory.gradients_bytes for memory in resnet.memories) == 4 * 11_173_962


def test_a_model_larger_than_this_machine():
    large = ["topics-gpt", "data.length=64", "model.num_blocks=6", "model.width=24576", "num_stages=6"]
    found = forecast(*large, "batch_size=4", device="H100", codec_bytes_per_s=1e11)
    assert sum(memory.weights_bytes for memory in found.memories) > 4 * 43e9
    assert found.step_s(parse_network("10gbps")) > found.step_s(FREE)


def test_replicas_average_their_gradients():
    """By reduce-scatter and all-gather: two rounds, in which each sends 2 (D - 1) / D of its gradients."""
    found = forecast("digits-cnn", "num_replicas=2", "num_microbatches=2", device="T4")
    network = parse_network("100mbps+1ms")
    timeline = found.simulate(network)
    sent = [cost.wire_bytes for cost in found.averages]
    headers = [size - memory.gradients_bytes for size, memory in zip(sent, found.memories, strict=True)]
    assert all(0 < header <= 2 * 16 for header in headers)  # of two messages
    seconds = [one.end_s - one.start_s for one in timeline.collectives]
    beside = [float(RAY.beside(size / 2)) for size in sent]
    trips = [float(RAY.trips(size / 2)) for size in sent]
    expected = [
        2 * (t * 1e-3 + 8 * (size / 2 + more) / 100e6) for t, size, more in zip(trips, sent, beside, strict=True)
    ]
    assert seconds == pytest.approx(expected, rel=1e-4)  # but for odd sizes
    trips_s = RAY.step_trips * 1e-3  # the driver's call to update, and its reply
    driver_s = RAY.host.overheads(2 * len(found.schedule.rows(4, 2)))["step_s"]
    assert timeline.step_s == pytest.approx(timeline.pipeline_s + max(seconds) + trips_s + driver_s)


@pytest.mark.parametrize(
    "method",
    [
        "Identity",
        "ErrorFeedback(TopK(0.05, index='int32'))",
        pytest.param("PowerGossip(min_values=16)", marks=pytest.mark.slow),
    ],
)
def test_replica_methods_are_forecast_as_they_are_recorded(small, tmp_path, method):
    """A method whose packets do not depend on the gradients: what a run would send is what it sends, on average."""
    config = small(num_replicas=2, num_microbatches=2, replica_gradient=method)
    found = forecast(config, device="T4")
    run = train(config, engine="inline", out=tmp_path / "run")
    links = run.links[(run.links["direction"] == "replica_gradient") & run.links["step"].isin([3, 4])]
    sent = links[links["replica"] == 0].groupby("stage")[["wire_bytes", "dense_bytes", "rounds"]].mean()
    for name in sent:
        assert sent[name].round().tolist() == [getattr(cost, name) for cost in found.averages]


def test_unequal_steps_are_not_forecast(small):
    with pytest.raises(ConfigError) as refused:
        forecast(small(num_replicas=2, num_microbatches=2, replica_gradient="MARINA(Natural)"), device="T4")
    assert "must need only gradients, but MARINA(Natural) needs stages of its own" in str(refused.value)


def test_a_recorded_profile_gives_compute_for_any_codec(small, tmp_path):
    config = small()
    profile = record_profile(config, num_steps=2)
    assert profile.compute_s.shape == (1, 3, 2, 4)
    assert (profile.compute_s > 0).all()
    assert (profile.update_s >= 0).all()
    assert profile.call_s == profile.message_s == profile.byte_s == profile.step_s == 0
    profile.save(tmp_path / "p.json")
    found = forecast(small(forward="TopK(0.1)"), profile=tmp_path / "p.json")
    loading = np.zeros((3, 2))
    loading[0, 0], loading[-1, 1] = profile.decode_s[0, 0, 0].mean(), profile.decode_s[0, -1, 1].mean()
    np.testing.assert_allclose(found.steady.compute_s[0, :, :, 0], profile.compute_s[0].mean(axis=-1) + loading)
    assert found.steady.call_s == RAY.host.call_s
    assert found.links[0].wire_bytes < found.links[0].dense_bytes / 7
    assert found.capacity_bytes is None
    more = forecast(small(batch_size=32, num_microbatches=8), profile=profile)
    assert more.step_s(FREE) > found.step_s(FREE)
    with pytest.raises(ConfigError, match=r"`num_stages` must be the profile's \(3\), but got 2"):
        forecast(small(num_stages=2), profile=profile)
    with pytest.raises(ConfigError, match=r"`profile` must have microbatches of 8 samples, but has 4: record it again"):
        forecast(small(num_microbatches=2), profile=profile)
    for other in ({"model": {"name": "cnn", "width": 64}}, {"dtype": "bfloat16"}):  # their compute is another one
        with pytest.raises(
            ConfigError, match=r"`profile` must have activations of [\d,]+ bytes at boundary 0, but has [\d,]+: rec"
        ):
            forecast(small(**other), profile=profile)
    by_hand = replace(profile, dense_bytes=np.zeros(1))  # knows no messages
    assert forecast(small(dtype="bfloat16"), profile=by_hand).steady.compute_s.sum() > 0


def test_replicas_of_a_recorded_profile_average_its_gradients(small, tmp_path):
    config = small(
        model={"name": "gpt", "num_blocks": 2, "width": 8, "num_heads": 2, "tied": True},
        data={"name": "topics", "length": 8, "train_samples": 64, "test_samples": 20},
    )
    profile = record_profile(config, num_steps=1)
    profile.save(tmp_path / "p.json")
    network = parse_network("1mbps+10ms")

    def step(*overrides):
        return read_timings(str(tmp_path / "p.json"), overrides).simulate(network)

    alone, averaging = step(), step("num_replicas=2")
    own = forecast(config.changed(num_replicas=2, batch_size=2 * config.batch_size), profile=profile, transport="bare")
    assert alone.collective_s == pytest.approx(
        forecast(config, profile=profile, transport="bare").simulate(network).collective_s
    )
    assert averaging.collective_s == pytest.approx(own.simulate(network).collective_s, rel=0.01)  # headers
    assert averaging.collective_s > alone.collective_s > 0
    replace(profile, gradient_bytes=np.zeros(1), bucketed_bytes=np.zeros(1), transfers=profile.transfers[:0]).save(
        tmp_path / "p.json"
    )
    assert step("num_microbatches=8").step_s > 0
    with pytest.raises(
        InputError, match=r"^`num_replicas`: .*p\.json has no `gradient_bytes` to average: record it again, or add"
    ):
        step("num_replicas=2")


def test_a_profile_leaves_out_what_other_work_takes(small, monkeypatch):
    step = InlineEngine.step

    def shared(self, *arguments):
        reports = step(self, *arguments)
        waited = [[each._replace(compute_wall_s=each.compute_wall_s + 1) for each in one.actions] for one in reports]
        return [one._replace(actions=actions) for one, actions in zip(reports, waited, strict=True)]

    monkeypatch.setattr(InlineEngine, "step", shared)
    profile = record_profile(small(), num_steps=1)
    assert 0 < profile.compute_s.max() < 1
    np.testing.assert_array_equal(profile.compute_s, profile.cpu_s)


def test_the_interval_of_a_step_is_that_of_the_recorded_steps(small):
    config = small(forward="TopK(0.1)")
    profile = record_profile(config, num_steps=2)
    low, high = mean_bounds([0.8, 1.2])
    plan = forecast(config, profile=replace(profile, paces=np.array([0.8, 1.2])))
    network = parse_network("20mbps")
    free = plan.step_bounds_s(FREE)
    assert free == pytest.approx((low * plan.step_s(FREE), high * plan.step_s(FREE)))
    bounds = plan.step_bounds_s(network)
    error_s = 1.645 * MODEL_ERROR * (plan.step_s(network) - plan.step_s(FREE))
    assert bounds[0] <= plan.step_s(network) - error_s < plan.step_s(network) + error_s <= bounds[1]
    assert forecast(config, profile=replace(profile, paces=np.ones(1))).step_bounds_s(network) is None
    assert forecast(config, device="T4").step_bounds_s(network) is None


def test_mean_interval_has_90_percent_coverage():
    random, inside = np.random.default_rng(0), 0
    for _ in range(400):
        steps = random.normal(1.0, 0.1, 8)
        low, high = mean_bounds(steps / steps.mean())
        inside += low <= 1.0 / steps.mean() <= high
    assert 0.84 <= inside / 400 <= 0.94


def test_profile_then_simulate(tmp_path):
    made = CliRunner().invoke(
        app,
        ["profile", "digits-cnn", *QUICK, "schedule=ZBH1", "--steps", "1", "--out", str(tmp_path / "p.json")],
    )
    assert made.exit_code == 0, made.output
    assert "Raysim profile of digits-cnn on " in made.output
    assert Profile.load(tmp_path / "p.json").num_stages == 4
    files = {"--json": tmp_path / "s.json", "--trace": tmp_path / "t.json"}
    done = CliRunner().invoke(
        app,
        [
            *[
                "simulate",
                "digits-cnn",
                *QUICK,
                "forward=TopK(0.1)",
                "schedule=ZBH1",
                "--profile",
                str(tmp_path / "p.json"),
            ],
            *["--network", "8mbps", "--network", "worldwide", *(str(part) for pair in files.items() for part in pair)],
        ],
    )
    assert done.exit_code == 0, done.output
    for text in (
        "ZBH1, 4 stages on 4 workers",
        "Peak memory",
        "no device named",
        "TopK(0.1)",
        "samples/s",
        "worldwide",
    ):
        assert text in done.output
    figures = json.loads((tmp_path / "s.json").read_text())
    assert [row["network"] for row in figures["networks"]] == ["8mbps", "worldwide"]
    assert figures["worker_bytes"] == [memory["total_bytes"] for memory in figures["memories"]]
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" and event.get("cat") == "action" for event in events) == 3 * 4 * 4


def test_weight_gradient_share_is_counted_or_requested():
    found = forecast("digits-cnn", *QUICK, "schedule=ZBH1", device="T4")
    forwards, inputs, weights = found.steady.compute_s[0, :, :, 0].T
    np.testing.assert_allclose(inputs + weights, 2 * forwards)
    np.testing.assert_allclose(weights[1:], inputs[1:])  # convolutions and a linear layer
    assert any(note.startswith("Weight gradients take 50% of a backward") for note in found.notes)
    whole = Profile.uniform(4, 1.0, 2.0)
    with pytest.raises(
        ConfigError, match="`profile` times each backward as a whole, but ZBH1 runs weight gradients separately"
    ):
        forecast("digits-cnn", *QUICK, "schedule=ZBH1", profile=whole)
    notes = forecast("digits-cnn", *QUICK, profile=whole).notes
    assert not any("recorded steps" in note for note in notes)


def test_the_verdict_is_the_devices():
    done = CliRunner().invoke(
        app,
        [
            *["simulate", "topics-gpt", "model.width=8192", "model.num_blocks=4", "--device", "T4"],
            *["--network", "1gbps", "--codec-speed", "1e10"],
        ],
    )
    assert done.exit_code == 0, done.output
    assert "too much for 16 GB" in done.output
    assert "fits 16 GB" not in done.output


def test_a_bench_is_a_command(tmp_path, monkeypatch):
    from raysim_benchmarks.bench import simulate

    monkeypatch.setattr(simulate, "bench_simulate", lambda: {"bench": "simulate"})
    done = CliRunner().invoke(app, ["bench", "simulate", "--json", str(tmp_path / "s.json")])
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "s.json").read_text()) == {"bench": "simulate"}
    refused = CliRunner().invoke(app, ["bench", "codecs", "Quantise(4)"])
    assert refused.exit_code == 2
    assert "`codecs`: Unknown codec `Quantise`" in refused.stderr


@pytest.mark.slow
def test_the_bench_of_codecs_measures_those_asked_for(tmp_path):
    done = CliRunner().invoke(
        app, ["bench", "codecs", "Quantize(4)", "--size", "4096", "--no-others", "--json", str(tmp_path / "c.json")]
    )
    assert done.exit_code == 0, done.output
    assert "Quantize(4)" in done.output
    rows = json.loads((tmp_path / "c.json").read_text())["rows"]
    assert {row["codec"] for row in rows} == {"Quantize(4)"}


def test_dense_steps_before_compression_are_named() -> None:
    later = forecast("digits-cnn", "forward=TopK(0.1)", "compress_from=5", device="T4")
    assert any("`compress_from` = 5" in note for note in later.notes)


def test_gather_larger_than_dense_average_is_reported() -> None:
    replicas = ("num_replicas=14", "batch_size=14", "num_stages=1", "num_microbatches=1")
    gathered = forecast("digits-cnn", *replicas, "replica_gradient=Quantize(8)", device="T4", transport="nccl")
    (note,) = [note for note in gathered.notes if "uncompressed all-reduce" in note]
    (cost,) = gathered.averages
    assert f"sends {cost.wire_bytes / cost.dense_bytes:.2f} times" in note
    assert 1.7 < cost.wire_bytes / cost.dense_bytes < 1.85
    shots = forecast("digits-cnn", *replicas, "replica_gradient=TwoShot(Quantize(8))", device="T4", transport="nccl")
    assert not any("uncompressed all-reduce" in note for note in shots.notes)
    assert 3.5 < shots.averages[0].dense_bytes / shots.averages[0].wire_bytes < 4.1
    assert any("in buckets of 25 MiB" in note for note in shots.notes)
    dense = forecast("digits-cnn", *replicas, device="T4", transport="nccl")
    assert any("14 replicas average their gradients by a ring all-reduce, in buckets" in note for note in dense.notes)
    assert not any("times the bytes" in note for note in dense.notes)


@pytest.mark.slow
def test_published_utilisation_by_diloco_of_int8_in_two_shots() -> None:
    """INTELLECT-1 (2412.01152): 38 minutes of compute, then 10.2 e9 values in int8 over 14 nodes, at the bandwidths its times imply.

    The transfers are those of the method on a small model, scaled to the paper's number of values.
    """
    replicas = ("num_replicas=14", "batch_size=14", "num_stages=1", "num_microbatches=1")
    plan = forecast(
        "digits-cnn",
        *replicas,
        "replica_gradient=DiLoCo(100, codec=TwoShot(Quantize(8)))",
        device="T4",
        transport="bare",
    )
    (cost,) = plan.averages
    times = 10.2e9 / (cost.dense_bytes * 14 / (2 * 13) / 4)
    transfers = cost.transfers.copy()
    transfers["wire_bytes"] *= times
    profile = Profile.uniform(1, 38 * 20, 38 * 40, transfers=transfers)
    for bps, published in ((1.47e9, 0.957), (0.40e9, 0.856), (0.32e9, 0.830)):
        step_s = simulate(GPipe(), profile, Network(bps), num_microbatches=1, num_replicas=14).step_s
        assert 38 * 60 / step_s == pytest.approx(published, abs=0.01)
