"""Advice on a job's network: its bandwidths are those at which the simulator reaches a utilisation, its bytes those of real packets."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from messages import explicit
from typer.testing import CliRunner

from raysim.cli import app
from raysim.config import read_config
from raysim.config.identity import Setting
from raysim.forecast.advise import advise
from raysim.forecast.answer import answer, percent
from raysim.forecast.bandwidth import LEVELS, free_s, needed
from raysim.forecast.fleet import Fleet, HostLayout, Proposal
from raysim.forecast.inputs import make_job, parse_setting
from raysim.forecast.job import GRADIENT_BYTES, Job
from raysim.forecast.link_costs import link_costs
from raysim.forecast.packets import exchange_of, link_messages
from raysim.forecast.replica_costs import replica_costs
from raysim.forecast.shapes import ModelShape
from raysim.forecast.structure import RecipeModel
from raysim.forecast.study import write_study
from raysim.network.costs import FleetCosts
from raysim.network.presets import parse_network
from raysim.network.sharding import FSDP
from raysim.network.simulate import step_seconds
from raysim.network.topology import FREE, Network
from raysim.network.transport import BARE, NCCL, RAY
from raysim.notation import InputError
from raysim.schedules import parse_schedule
from raysim.schedules.actions import peak_in_flight
from raysim.schedules.families import ZBV
from raysim.sweeps.study_file import read_study
from raysim.units import format_seconds
from raysim.values import BoundaryTensors

SHAPE = ModelShape(layers=8, width=256, length=512, vocabulary=1000, heads=4)
SLOW, NEAR, FAR = parse_network("1gbps+1ms"), parse_network("1gbps+10us"), parse_network("four-regions")


def job(schedule: str = "1F1B", devices: str = "4xA100", **changes: Any) -> Job:
    fields: dict[str, Any] = {"batch": 32, "microbatch": 1, "efficiency": 0.4, "transport": NCCL} | changes
    return Job(SHAPE, Fleet.parse(devices), parse_schedule(schedule), **fields)


@pytest.mark.parametrize(
    "codec",
    [
        "Identity",
        "Quantize(4)",
        "Quantize(3, per='block')",
        "TopK(0.1)",
        "TopK(0.01)",
        "LowRank(8)",
        "AQSGD(Quantize(2))",
    ],
)
@pytest.mark.parametrize("shape", [(2, 1024, 320), (7, 256, 1024)])
def test_a_large_message_has_the_bytes_of_its_packet(codec: str, shape: tuple[int, ...]) -> None:
    forward, backward = link_messages(codec, "Identity", shape, "bfloat16")
    config = read_config("topics-gpt", ["num_stages=2", f"forward={codec}", "dtype=bfloat16"])
    real = link_costs(config, [BoundaryTensors({"": shape}, {})], 1e9, [])
    assert forward.wire_bytes == pytest.approx(real[0].wire_bytes, rel=2e-3)
    assert forward.encode_s == pytest.approx(real[0].encode_s, rel=1e-6)
    assert forward.decode_s == pytest.approx(real[0].decode_s, rel=1e-6)
    assert backward.wire_bytes == pytest.approx(real[1].wire_bytes, rel=1e-5)


@pytest.mark.parametrize(
    "method",
    [
        "Quantize(8)",
        "PowerSGD(4)",
        "ErrorFeedback(TopK(0.01))",
        "DiLoCo(5)",
        "DiLoCo(5, codec=Quantize(4))",
        "TwoShot(Quantize(8))",
        "Identity",
    ],
)
@pytest.mark.parametrize("shape", [(400,), (300, 160), (120, 40, 3), (8, 900)], ids=str)
@pytest.mark.parametrize("num_replicas", [3, *(pytest.param(count, marks=pytest.mark.slow) for count in (2, 8))])
def test_a_large_exchange_has_the_bytes_of_its_packets(method: str, shape: tuple[int, ...], num_replicas: int) -> None:
    found = exchange_of(method, shape, num_replicas)
    config = read_config(
        "topics-gpt",
        [
            *(f"replica_gradient={method}", "num_stages=1", f"num_replicas={num_replicas}"),
            *(f"batch_size={num_replicas}", "num_microbatches=1"),
        ],
    )
    (real,) = replica_costs(config, [{"weight": shape}], 1e9, [])
    (kind,) = found
    transfers, own = (explicit(each, num_replicas) for each in (kind.transfers(0, num_replicas), real.transfers))
    assert transfers["wire_bytes"].sum() == pytest.approx(own["wire_bytes"].sum(), rel=0.02, abs=60 * num_replicas**2)
    assert kind.work == pytest.approx(1e9 * real.method_s, rel=0.02)
    assert kind.share == (0.2 if "DiLoCo" in method else 1.0)


@pytest.mark.parametrize("num_replicas", [5, 64, 1000])
def test_two_shot_messages_shrink_as_replicas_are_added(num_replicas: int) -> None:
    """One byte for each value of a chunk, and a range for each block of 4096."""
    (kind,) = exchange_of("TwoShot(Quantize(8, per='block'))", (128_000, 4096), num_replicas)
    assert num_replicas * np.array(kind.pair_bytes) == pytest.approx(128_000 * 4096 * (1 + 8 / 4096), rel=0.01)


WAYS = [
    Proposal(HostLayout(4, 1)),
    Proposal(HostLayout(4, 1), "Quantize(4)", "Quantize(6)"),
    Proposal(HostLayout(1, 4)),
    Proposal(HostLayout(2, 2), method="DiLoCo(10)"),
    Proposal(HostLayout(2, 2), "TopK(0.1)", "Quantize(8)", "PowerSGD(4)"),
    Proposal(HostLayout(2, 2), overlap=True),
    Proposal(HostLayout(1, 4, FSDP(4))),
    Proposal(HostLayout(1, 4, FSDP(4, "step")), method="Quantize(8)"),
    Proposal(HostLayout(1, 4, FSDP(2, "backward")), method="DiLoCo(10)"),
    Proposal(HostLayout(2, 2, FSDP(2)), "Quantize(4)", "Quantize(6)"),
]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(
    "schedule",
    [
        *("1F1B", "ZBH1", "DualPipeV"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("GPipe", "Interleaved1F1B(2)")),
    ],
)
def test_steps_on_many_networks_are_those_of_their_timelines(way: Proposal, schedule: str) -> None:
    many = [*(parse_network(f"{100 * (i + 1)}mbps+1ms") for i in range(65)), FREE]
    for transport in (NCCL, RAY):  # whose driver waits for all replicas
        step = job(schedule, transport=transport).step(way)
        for networks in (many, [SLOW, FREE, FAR]):
            shown = [
                [share * step.simulate(on, i).step_s for i, (share, _) in enumerate(step.kinds)] for on in networks[-3:]
            ]
            assert step.steps_s(networks)[-3:] == pytest.approx([sum(kinds) for kinds in shown], rel=1e-12)
    own = job(schedule)
    for network in (SLOW, FAR):
        parts = own.step(way).parts(network, free_s(own, way.layout))
        assert sum(parts) == pytest.approx(own.step(way).step_s(network))
        assert min(parts) >= -1e-9 * sum(parts)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_required_bandwidth_gives_requested_utilisation(way: Proposal) -> None:
    own, reached = job(), 0
    for level, found in zip(LEVELS, needed(own, way, NEAR), strict=True):
        assert found.low_bps <= found.bps <= found.high_bps
        if found.bps == float("inf"):
            best = own.step(way).step_s(replace(NEAR, bandwidth_bps=1e13, name=""))
            assert free_s(own, way.layout) / best < level
            continue
        step = own.step(way).step_s(replace(NEAR, bandwidth_bps=found.bps, name=""))
        assert free_s(own, way.layout) / step == pytest.approx(level, rel=2e-3)
        reached += 1
    assert reached or way.layout.sharding is not None  # whose trips may outlast this model's compute


def test_averaging_takes_the_seconds_of_the_formula() -> None:
    """A direct all-reduce sends 2 (D - 1) / D of 4 bytes a parameter."""
    own = job(transport=BARE)
    seconds = own.step(Proposal(HostLayout(1, 4))).step_s(parse_network("1gbps")) - free_s(own, HostLayout(1, 4))
    assert seconds == pytest.approx(2 * 3 / 4 * 4 * SHAPE.num_parameters * 8 / 1e9, rel=1e-4)
    tenth = own.step(Proposal(HostLayout(1, 4), method="DiLoCo(10)")).step_s(parse_network("1gbps")) - free_s(
        own, HostLayout(1, 4)
    )
    assert tenth == pytest.approx(seconds / 10, rel=1e-3)


@pytest.mark.parametrize("layout", [HostLayout(1, 4), HostLayout(2, 2)], ids=repr)
def test_exchanges_that_lag_are_hidden_as_far_as_later_steps_last(layout: HostLayout) -> None:
    one, period = job(), 5
    lagging, waiting = (Proposal(layout, method=f"DiLoCoX({period}, delay={delay})") for delay in (1, 0))
    networks = [FREE, *map(parse_network, ("100gbps", "10gbps", "1gbps", "100mbps+20ms"))]
    hidden_s, waited_s = one.step(lagging).steps_s(networks), one.step(waiting).steps_s(networks)
    pipeline_s = one.step(Proposal(layout)).step_s(FREE)
    quiet_s = np.array([step_s_without(one, waiting, network) for network in networks])
    codec_s = waited_s[0] - pipeline_s  # of an exchange, in the mean of a step
    exchange_s = period * (waited_s - quiet_s)  # with its codec
    left_s = np.maximum(exchange_s - period * codec_s - period * quiet_s, 0.0)
    assert hidden_s == pytest.approx(quiet_s + codec_s + left_s / period, rel=1e-6)
    assert hidden_s[0] == waited_s[0]
    assert hidden_s[1] < waited_s[1]


def step_s_without(one: Job, way: Proposal, network: Network) -> float:
    """Return the seconds of a step without an exchange."""
    count = one.num_microbatches(way.layout)
    profile = one.profile(way)
    seconds = step_seconds(one.schedule, profile, [network], num_microbatches=count, num_replicas=way.layout.replicas)
    return float(seconds[0, 0])


@pytest.mark.parametrize("money", [{"gpu_hour": 2.0}, {"egress_gb": 0.1}])
def test_the_cheapest_way_is_named_and_pays_what_its_step_sends(money: dict[str, Any]) -> None:
    costs = FleetCosts(currency="EUR", **money)
    one, network = job(devices="4x2xA100"), parse_network("1gbps")
    advice = advise(one, [network], layout=HostLayout(2, 2), local_steps=[10], costs=costs)
    dense, best = advice.dense.networks[0].expected, advice.cheapest()
    assert best is not None
    assert dense is not None
    offers = [(row, row.networks[0].expected) for row in advice.rows if row.fits and not row.known.breaks]
    assert best is min(offers, key=lambda each: each[1].money if each[1] is not None else math.inf)[0]
    assert any("Cheapest that fits: " in sentence for sentence in answer(advice))
    whole = GRADIENT_BYTES * one.model.num_parameters * 2  # there and back, for each of two replicas
    links = (
        2
        * sum(one.profile(advice.dense.way).wire_bytes.sum() for _ in range(1))
        * one.num_microbatches(HostLayout(2, 2))
    )
    sent_gb = (whole + links) / 1e9
    hours = advice.dense.networks[0].step_s * 8 / 3600
    expected = money.get("gpu_hour", 0) * hours + money.get("egress_gb", 0) * sent_gb
    assert dense.money == pytest.approx(expected, rel=0.01)  # tied parameters and headers


def test_shards_send_the_bytes_of_the_formula() -> None:
    """On a slow wire: 2 bytes a gathered parameter, 4 a scattered gradient, and of coded ones those of the packet of a shard."""
    own, slow = job(transport=BARE), parse_network("1mbps")
    size = SHAPE.num_parameters
    for sharding, gathers, scatters in ((FSDP(4), 16, 8), (FSDP(4, "backward"), 8, 8), (FSDP(4, "step"), 1, 1)):
        seconds = own.step(Proposal(HostLayout(1, 4, sharding))).step_s(slow)
        assert seconds == pytest.approx(3 / 4 * (gathers * 2 + scatters * 4) * size * 8 / 1e6, rel=1e-4)
    coded = own.step(Proposal(HostLayout(1, 4, FSDP(4, "step")), method="Quantize(8)")).step_s(slow)
    assert coded == pytest.approx(3 / 4 * (2 + 1) * size * 8 / 1e6, rel=0.01)
    halves = own.step(Proposal(HostLayout(1, 4, FSDP(2, "step")))).step_s(slow)
    assert halves == pytest.approx((1 / 2 * (2 + 4) + 4 / 2) * size * 8 / 1e6, rel=1e-4)
    local = own.step(Proposal(HostLayout(1, 4, FSDP(2, "step")), method="DiLoCo(10)")).step_s(slow)
    assert local == pytest.approx((1 / 2 * (2 + 4) + 4 / 2 / 10) * size * 8 / 1e6, rel=1e-3)


def test_a_replica_codes_a_shard_for_every_other_owner_and_decodes_as_many() -> None:
    own = job()
    (units,) = own.sharded(Proposal(HostLayout(1, 4, FSDP(4)), method="Quantize(8)")).stages
    packet, _ = link_messages("Quantize(8)", "Identity", (1, 192, 1024), "float32")  # a quarter of a block
    assert packet.encode_s > 0
    assert packet.decode_s > 0
    seconds = 3 * (packet.encode_s + packet.decode_s) * 1e9 / own.fleet.codec_bytes_per_s
    assert units.codec_s[1:-1] == pytest.approx([seconds] * SHAPE.layers)


def test_a_single_shard_is_a_dense_replica() -> None:
    own = job()
    alone, dense = Proposal(HostLayout(4, 1, FSDP(1))), Proposal(HostLayout(4, 1))
    assert own.step(alone).steps_s([SLOW]) == pytest.approx(own.step(dense).steps_s([SLOW]))


def test_profile_units_are_the_stage() -> None:
    for model in (SHAPE, replace(SHAPE, tied=True), RecipeModel(read_config("topics-gpt"))):
        for count in (1, 2):
            for stage in model.stages(count, 2):
                assert sum(unit.num_parameters for unit in stage.units) == stage.num_parameters
                assert sum(unit.forward_flops for unit in stage.units) == pytest.approx(stage.forward_flops)


def test_shards_need_less_memory_than_replicas() -> None:
    own = job()
    rows = [HostLayout(1, 4), *(HostLayout(1, 4, FSDP(4, each)) for each in ("step", "backward", "forward"))]
    sizes = [own.memory_bytes(Proposal(layout)) for layout in rows]
    assert sizes == sorted(sizes, reverse=True)
    block = 12 * 256**2  # the largest unit: one computes, and the next is gathered
    gathered, made = 2 * block, block
    expected = 16 * SHAPE.num_parameters / 4 + 2 * gathered + 4 * made + 8 * 34 * 512 * 256 + 6 * 512 * 1000
    assert sizes[-1] == pytest.approx(expected)


def test_memory_is_that_of_the_formula_and_recomputation_saves_some() -> None:
    own = job()
    tokens = 512
    expected = 16 * SHAPE.num_parameters + 8 * 34 * tokens * 256 + 6 * tokens * 1000
    assert own.memory_bytes(Proposal(HostLayout(1, 4))) == pytest.approx(expected)
    assert own.memory_bytes(Proposal(HostLayout(1, 4), method="DiLoCo(10)")) == pytest.approx(
        expected + 8 * SHAPE.num_parameters
    )
    deep = Proposal(HostLayout(4, 1))
    assert replace(own, recompute=True).memory_bytes(deep) < own.memory_bytes(deep)
    assert job("GPipe").memory_bytes(deep) > own.memory_bytes(deep)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("devices", ["4xA100", "4x2xA100"])
@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
def test_a_stage_takes_its_operations_and_its_messages(schedule: str, devices: str, recompute: bool) -> None:
    """Seconds of operations and of the optimiser's bytes by all GPUs of a host, and messages of 16 bits, each worked out by hand."""
    own, layout = job(schedule, devices, recompute=recompute), HostLayout(4, 1)
    gpus = own.fleet.gpus
    profile, stages = own.profile(Proposal(layout, "Quantize(8)", "Identity")), SHAPE.stages(4, 1)
    times = profile.compute_s[0, :, :, 0]
    forward_s = [stage.forward_flops / (gpus * 312e12 * 0.4) for stage in stages]
    assert times[:, 0] == pytest.approx(forward_s)
    assert times[:, 1:].sum(axis=1) == pytest.approx([(3 if recompute else 2) * seconds for seconds in forward_s])
    if schedule == "ZBH1":
        assert times[0, 1] == 0.0  # a first stage has no gradient of its input to make
        assert times[1:, 2] == pytest.approx(
            [2 * stage.weight_share * seconds for stage, seconds in zip(stages[1:], forward_s[1:], strict=True)]
        )
    assert profile.update_s == pytest.approx([28 * stage.num_parameters / (gpus * 2039e9) for stage in stages])
    values = 512 * 256
    assert profile.wire_bytes[0, 1:, 1, 0] == pytest.approx(2 * values, abs=100)  # gradients go back uncompressed
    assert profile.wire_bytes[0, :-1, 0, 0] == pytest.approx(values, rel=0.01)
    coded = [profile.encode_s[0, :, 0, 0] > 0, profile.decode_s[0, :, 0, 0] > 0]
    assert [each.tolist() for each in coded] == [[True, True, True, False], [False, True, True, True]]
    assert profile.step_s == own.transport.host.overheads(4)["step_s"]
    busy_s = 32 * sum((4 if recompute else 3) * seconds for seconds in forward_s) / 4
    assert own.step(Proposal(layout)).compute_s == pytest.approx(busy_s)
    assert own.step(Proposal(layout)).parts(SLOW).compute == pytest.approx(busy_s)


def test_host_codec_time_uses_all_gpus() -> None:
    one, two = (
        job(devices=devices).profile(Proposal(HostLayout(4, 1), "Quantize(8)")) for devices in ("4xA100", "4x2xA100")
    )
    assert one.encode_s == pytest.approx(2 * two.encode_s)
    assert one.decode_s == pytest.approx(2 * two.decode_s)
    assert job(devices="4x2xA100").fleet.memory_bytes == 2 * 80e9


@pytest.mark.parametrize(
    "schedule", ["1F1B", "1F1B(ahead=8)", "GPipe", "ZBH2", "ZBV", "DualPipeV", "Interleaved1F1B(2)"]
)
def test_microbatches_in_flight_are_those_of_the_whole_row(schedule: str) -> None:
    own = replace(job(schedule), model=replace(SHAPE, layers=16))
    count = own.num_stages(HostLayout(4, 1))
    rows, owner = own.schedule.rows(count, 32), own.schedule.workers(count)
    peaks = [peak_in_flight([each for each in rows[owner[stage]] if each.stage == stage]) for stage in range(count)]
    assert own.in_flight(HostLayout(4, 1)) == tuple(peaks)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_overlapped_averages_are_float32(workers: int) -> None:
    way = Proposal(HostLayout(workers, 4 // workers), overlap=True)
    if way.layout.replicas == 1:
        way = Proposal(HostLayout(2, 2), overlap=True)
    ((share, profile),) = job().step(way).kinds
    sizes = [4 * stage.num_parameters for stage in SHAPE.stages(way.layout.workers, 1)]
    assert (share, profile.gradient_bytes.tolist(), profile.bucketed_bytes.tolist()) == (1.0, sizes, sizes)


def test_the_interval_is_that_of_the_seconds_of_the_network() -> None:
    """1.645 x 12 % of all that the network adds, links, averages and trips, and in the search the same the other way round."""
    own, way = job(), Proposal(HostLayout(2, 2), "Quantize(8)", "Quantize(8)")
    (row,) = [
        row
        for row in advise(own, [SLOW], layout=way.layout, tried=[Setting("Quantize(8)", "Quantize(8)")]).rows
        if row.way == way
    ]
    (on,) = row.networks
    free, step = free_s(own, way.layout), own.step(way).step_s(SLOW)
    error = 1.645 * 0.12 * (step - own.step(way).step_s(FREE))
    assert (on.low, on.utilisation, on.high) == pytest.approx(
        (free / (step + error), free / step, free / (step - error))
    )
    assert on.samples_per_s == pytest.approx(32 / step)
    assert on.busy == pytest.approx(own.step(way).compute_s / step)
    at = needed(own, way, NEAR)[LEVELS.index(0.8)]
    for bps, sign in ((at.high_bps, 1), (at.low_bps, -1)):
        step = own.step(way).step_s(replace(NEAR, bandwidth_bps=bps, name=""))
        own_s = own.step(way).step_s(FREE)
        assert free / (own_s + (1 + sign * 1.645 * 0.12) * (step - own_s)) == pytest.approx(0.8, rel=1e-3)


@pytest.mark.slow
def test_recipe_and_shape_give_equal_advice() -> None:
    model = RecipeModel(read_config("topics-gpt"))
    own = make_job(
        model,
        Fleet.parse("4xT4"),
        schedule="1F1B",
        batch=None,
        microbatch=None,
        efficiency=0.4,
        transport="nccl",
        recompute=False,
    )
    advice = advise(own, [SLOW])
    assert advice.layout == HostLayout(4, 1)
    assert own.num_microbatches(advice.layout) == 4
    assert sum(stage.num_parameters for stage in own.stages(HostLayout(4, 1))) == model.num_parameters
    assert advice.dense.networks[0].utilisation < 1


def test_settings_are_read_as_they_are_written() -> None:
    assert parse_setting("forward=TopK(density=0.1) replica_gradient=DiLoCo(10, codec=Quantize(8))") == Setting(
        "TopK(0.1)", replica_gradient="DiLoCo(10, codec=Quantize(8))"
    )
    assert parse_setting("tied_gradient=PowerSGD(rank=8)", trained=True) == Setting(tied_gradient="PowerSGD(8)")
    with pytest.raises(InputError, match="only training can judge `tied_gradient`"):
        parse_setting("tied_gradient=PowerSGD(8)")
    with pytest.raises(InputError, match="`--try` must look like"):
        parse_setting("forward TopK")
    with pytest.raises(InputError, match="TopKk"):
        parse_setting("forward=TopKk(0.1)")


def test_advice_names_bandwidths_and_fastest_fitting_option() -> None:
    advice = advise(job(), [parse_network("100mbps")])
    first, step, second = answer(advice)
    dense = advice.dense
    assert first.startswith(f"On 100mbps this job runs at {percent(dense.networks[0].utilisation)} utilisation")
    assert "would give 90 %; with" in first
    assert step.startswith(
        "A step is 32 sequences of 512 tokens, 32 microbatches of 1, at most 4 in flight: the answer depends on `--batch`"
    )
    assert second.startswith("Fastest that fits: ")
    best = advice.fastest()
    assert best is not None
    assert all(
        row.networks[0].samples_per_s <= best.networks[0].samples_per_s for row in advice.rows if not row.known.breaks
    )
    assert answer(advise(job(), []))[0].startswith("This job needs ")
    several = answer(advise(job(), [parse_network("100mbps"), parse_network("10gbps")]))
    assert second.replace("fits:", "fits on 100mbps:") in several
    (overlapped,) = [line for line in answer(advise(job(), [parse_network("free")])) if line.startswith("Fastest")]
    assert "dense, overlapped, with" in overlapped


def test_more_microbatches_in_flight_hide_latency_for_memory() -> None:
    plain, *more = [
        row for row in advise(job(), [parse_network("free"), parse_network("1gbps+30ms")]).rows if row.way.dense
    ][:3]
    assert [str(row.way) for row in more] == ["dense, 1F1B(ahead=2)", "dense, 1F1B(ahead=4)"]
    for fewer, row in pairwise([plain, *more]):
        assert row.memory_bytes > fewer.memory_bytes
        assert row.networks[0].step_s <= fewer.networks[0].step_s
        assert row.networks[1].parts.latency < fewer.networks[1].parts.latency
    whole = advise(job(schedule="GPipe"), [parse_network("1gbps+30ms")]).rows
    assert all(row.way.schedule is None for row in whole)


SMALL = ["--layers", "8", "--width", "256", "--length", "512", "--vocabulary", "1000"]


def test_advise_writes_study_plot_and_figures(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = ["--study", "s.toml", "--plot", "p.png", "--json", "f.json"]
    extra = ["--try", "forward=Quantize(5) backward=Quantize(5)", "--stages", "4"]
    done = CliRunner().invoke(app, ["advise", *SMALL, "--devices", "4xA100", "--network", "100mbps", *files, *extra])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("On 100mbps this job runs at ")
    figures = json.loads(Path("f.json").read_text())
    rows = {row["setting"]: row for row in figures["rows"] if row["replicas"] == 1}
    assert "Quantize(5) / Quantize(5)" in rows
    study = read_study("s.toml")
    assert study.name == "s"
    words = " ".join(done.output.split())
    assert "on this machine one after another (topics-gpt," in words
    runs = 5 * (1 + Path("s.toml").read_text().count("[space.variants."))
    assert f"{runs} runs of " in words
    text = Path("s.toml").read_text()
    fast = [
        name
        for name, row in rows.items()
        if not name.startswith("dense")
        and "ahead" not in name  # the same setting in another schedule
        and row["known"] not in ("harmful", "hopeless at once")
        and row["networks"][0]["step_s"] * 1.05 <= rows["dense"]["networks"][0]["step_s"]
    ]
    assert len(fast) > 2
    assert all(f'"{name}"' in text for name in fast)
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")
    nothing = CliRunner().invoke(
        app, ["advise", *SMALL, "--devices", "4xA100", "--network", "free", "--study", "s.toml"]
    )
    assert nothing.exit_code == 2
    assert "nothing pays on free" in " ".join(nothing.output.split())


def test_the_bandwidth_named_first_is_that_of_a_setting_that_fits() -> None:
    model = ModelShape(layers=32, width=4096, length=4096, vocabulary=128_000, heads=32)
    fields: dict[str, Any] = {"batch": 64, "microbatch": 1, "efficiency": 0.4, "transport": "nccl", "recompute": False}
    advice = advise(make_job(model, Fleet.parse("8xA100"), schedule="1F1B", **fields), [parse_network("1gbps")])
    first = advice.remedies()[0]
    larger = [row for row in advice.rows if not row.fits and row.way.links_coded and row.way.layout == advice.layout]
    assert first.fits
    assert first.way.schedule is not None
    assert any(row.bandwidth(0.9).bps < first.bandwidth(0.9).bps for row in larger)


def test_tables_show_full_settings_and_help_names_defaults(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = CliRunner().invoke(app, ["advise", *SMALL, "--devices", "4xA100", "--network", "100mbps"])
    assert done.exit_code == 0, done.output
    assert "…" not in done.output
    assert (
        f"{ModelShape(layers=8, width=256, length=512, vocabulary=1000, heads=2).num_parameters:,} parameters"
        in " ".join(done.output.split())
    )
    words = " ".join(CliRunner().invoke(app, ["advise", "--help"]).output.split())
    assert "Pipelines (default: hosts / stages)." in words


@pytest.mark.slow
def test_the_price_of_a_study_is_that_of_its_steps(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = RecipeModel(read_config("digits-cnn"))
    fields: dict[str, Any] = {
        "schedule": "1F1B",
        "batch": None,
        "microbatch": None,
        "transport": "nccl",
        "recompute": False,
    }
    prices, layout, far = [], HostLayout(4, 1), "20mbps+20ms"  # where two pipelines would be faster
    for efficiency in (0.4, 0.2):
        own = make_job(model, Fleet.parse("4xT4"), efficiency=efficiency, **fields)
        advice = advise(own, [parse_network(far)], layout=layout)
        words = write_study(advice, "digits-cnn", Path("s.toml"))
        settings = {(row.way.forward, row.way.backward, row.way.method) for row in advice.paying()}
        kept = Path("s.toml").read_text().count("[space.variants.")
        steps = read_study("s.toml").config({}).steps
        assert 0 < kept <= len(settings)
        assert f"{5 * (kept + 1)} runs of {steps} steps take " in words
        study = [Setting(), *(row.way.setting for row in advice.paying() if row.way.layout == layout)]
        alike = [Proposal(layout, *setting[:3]) for setting in dict.fromkeys(study)]
        seconds = sum(own.step(way).step_s(parse_network(far)) for way in alike)
        assert f" take {format_seconds(5 * steps * seconds)} one after another" in words
        assert f"on 4xT4 over {far}, by the steps above (efficiency {efficiency:g})" in words
        prices.append(words)
    assert prices[0] != prices[1]


@pytest.mark.parametrize("shape", [(4096, 4), (4, 4096)])
def test_a_matrix_narrower_than_the_rank_is_sent_as_a_vector_is(shape):
    assert exchange_of("PowerSGD(8)", shape, 4) == exchange_of("PowerSGD(8)", (math.prod(shape),), 4)


@pytest.mark.parametrize(("tied", "layers"), [(True, 8), (True, 7), (False, 8)])
def test_a_v_is_proposed_for_a_tied_pipeline_that_has_blocks_for_it(tied: bool, layers: int) -> None:
    own = replace(job(), model=replace(SHAPE, tied=tied, layers=layers))
    rows = [row for row in advise(own, [SLOW]).rows if row.way.schedule == ZBV()]
    assert [row.way.dense for row in rows] == ([True, False] if tied and layers == 8 else [])
    bent = replace(own, schedule=ZBV())
    for row in rows:
        step = bent.step(replace(row.way, schedule=None)).step_s(SLOW)
        assert (row.networks[0].step_s, row.networks[0].parts.tied) == (pytest.approx(step), pytest.approx(0, abs=1e-9))


def test_tied_embedding_costs_time_only_between_two_workers() -> None:
    """Its two copies are summed in two rounds of half of it each way; a V-shaped schedule keeps both on one worker."""
    tied, untied = (replace(SHAPE, tied=tied, vocabulary=50_000) for tied in (True, False))
    way, own = Proposal(HostLayout(4, 1)), replace(job(transport=BARE), model=tied)
    seconds = own.step(way).parts(SLOW).tied
    assert seconds == pytest.approx(8 * 4 * tied.vocabulary * tied.width / 1e9, rel=1e-4)
    assert replace(own, schedule=parse_schedule("ZBV")).step(way).parts(SLOW).tied == 0.0
    assert replace(own, model=untied).step(way).parts(SLOW).tied == 0.0
    for layout in (HostLayout(2, 2), HostLayout(2, 2, FSDP(2))):  # each replica sums its own, or its shard
        share = 2 if layout.sharding else 1
        assert own.step(Proposal(layout)).parts(SLOW).tied == pytest.approx(seconds / share, rel=1e-4)
    advice = advise(own, [SLOW], layout=way.layout)
    (sentence,) = [line for line in answer(advice) if "tied embedding" in line]
    assert "51.2 MB" in sentence
    assert "--schedule ZBV" in sentence
    assert not [line for line in answer(advise(replace(own, model=untied), [SLOW])) if "tied" in line]


def test_a_layer_used_twice_is_a_unit_twice() -> None:
    model = RecipeModel(read_config("digits-cnn", ["model=own_modules:reused"]))
    for stage in model.stages(2, 4):
        assert sum(unit.forward_flops for unit in stage.units) == stage.forward_flops
        assert sum(unit.num_parameters for unit in stage.units) == stage.num_parameters
    assert sum(len(stage.units) for stage in model.stages(2, 4)) == model.layers == 6


def test_keys_of_the_recipe_count() -> None:
    plain, half = (RecipeModel(read_config("topics-gpt", [f"dtype={dtype}"])) for dtype in ("float32", "bfloat16"))
    assert half.stages(2, 4)[1].saved_bytes < plain.stages(2, 4)[1].saved_bytes
    fields: dict[str, Any] = {"schedule": "1F1B", "batch": None, "microbatch": None, "transport": "nccl"}
    again = RecipeModel(read_config("topics-gpt", ["recompute=true"]))
    jobs = [make_job(x, Fleet.parse("4xT4"), efficiency=0.4, recompute=False, **fields) for x in (plain, again)]
    assert [each.recompute for each in jobs] == [False, True]
    narrow = RecipeModel(read_config("topics-gpt", ["bottleneck=8"]))
    with pytest.raises(InputError, match=r"^topics-gpt has a `bottleneck`, which only `raysim simulate` prices\.$"):
        narrow.stages(2, 4)
