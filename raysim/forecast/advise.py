"""Advice before training: the network that a job needs, and the compression that would help."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from raysim.config.identity import IDENTITY, Setting
from raysim.forecast.bandwidth import LEVELS, Needed, free_s, needed
from raysim.forecast.evidence import TRANSFORMER, UNKNOWN, Known, known
from raysim.forecast.fleet import HostLayout, Proposal
from raysim.forecast.job import STATE_BYTES, Job
from raysim.network.costs import Expected, FleetCosts
from raysim.network.presets import DEVICES
from raysim.network.prices import MODEL_ERROR, NINE_TENTHS, PAYS
from raysim.network.sharding import FSDP
from raysim.network.timed_step import Parts
from raysim.network.topology import Network
from raysim.notation import InputError
from raysim.schedules.families import ZBV, OneFOneB, Schedule
from raysim.units import apart, format_bytes

PER_TOKEN = (
    ("Quantize(8, per='row')", "Quantize(8, per='row')"),
    ("Quantize(4, per='block', block=64)", "Quantize(8, per='row')"),
    ("Rotated(4)", "Rotated(4)"),
)
"""Codecs of activations and gradients to try, mildest first: a range for each token or less, as trained transformers need."""
PER_TENSOR = (
    ("Quantize(8)", "Quantize(8)"),
    ("Quantize(4)", "Quantize(6)"),
    ("Quantize(3)", "Quantize(6)"),
    ("TopK(0.1)", "TopK(0.1)"),
)
"""The same for models that are not transformers."""
METHODS = ("TwoShot(Quantize(8, per='block'))", "PowerSGD(8)", "ErrorFeedback(TopK(0.01))")
"""Replica methods that average in every step."""
SCATTERS = ("Quantize(8, per='block')", "Quantize(4, per='block')")
"""Codecs for the gradients scattered by sharded replicas, as in `raysim.distributed.fsdp`."""
LOCAL_STEPS = (10, 100, 500)
AHEAD = (2, 4)
"""Microbatches in flight at each stage, in units of those of 1F1B."""


@dataclass(frozen=True, eq=False)
class OnNetwork:
    """The predicted step of a way to train on one network."""

    network: Network
    step_s: float
    utilisation: float
    """The step without compression and network, divided by this step."""
    low: float
    high: float
    """The 90 % interval of `utilisation`, given the network model's error."""
    samples_per_s: float
    parts: Parts
    """Seconds of the step by cause."""
    expected: Expected | None = None
    """The step with churn and money, if costs are given."""

    @property
    def busy(self) -> float:
        """The share of the step that a host's GPUs spend computing."""
        return self.parts.compute / self.step_s

    @property
    def limit(self) -> str:
        """The name of the largest of `parts`."""
        return max(self.parts._fields, key=lambda name: float(getattr(self.parts, name)))


@dataclass(frozen=True, eq=False)
class Row:
    """A way to train, with its memory and required bandwidths."""

    way: Proposal
    memory_bytes: float
    fits: bool
    needed: tuple[Needed, ...]
    """By level of `LEVELS`; empty if the network has several bandwidths."""
    networks: tuple[OnNetwork, ...]
    known: Known
    """The verdict of raysim's findings on its setting, for models like this one."""

    def bandwidth(self, level: float) -> Needed | None:
        """Return the bandwidth needed for a utilisation of `LEVELS`."""
        return self.needed[LEVELS.index(level)] if self.needed else None


@dataclass(frozen=True, eq=False)
class Advice:
    """The answer for one job."""

    job: Job
    layout: HostLayout
    """The job's own layout."""
    networks: tuple[Network, ...]
    rows: tuple[Row, ...]
    """The first is the uncompressed job in its own layout."""
    chosen: bool = False
    """True if the user asked for the layout."""
    costs: FleetCosts | None = None

    @property
    def dense(self) -> Row:
        """The uncompressed job in its own layout."""
        return self.rows[0]

    def remedies(self) -> list[Row]:
        """Return compressed settings in the job's layout that are not known to be harmful, lowest bandwidth first.

        Settings that do not fit are left out if others fit.
        """
        own = [row for row in self.rows if row.way.layout == self.layout and not row.way.dense and not row.known.breaks]
        return sorted([row for row in own if row.fits] or own, key=_hunger)

    def fastest(self) -> Row | None:
        """Return the fastest setting that fits on the first network and is not known to be harmful."""
        able = [row for row in self.rows if row.fits and not row.known.breaks]
        return max(able, key=lambda row: row.networks[0].samples_per_s, default=None)

    def cheapest(self) -> Row | None:
        """Return the cheapest setting that fits on the first network and is not known to be harmful; None without costs."""
        priced = [(row.networks[0].expected, row) for row in self.rows if row.fits and not row.known.breaks]
        return min(
            ((expected.money, row) for expected, row in priced if expected is not None),
            key=lambda each: each[0],
            default=(0.0, None),
        )[1]

    def paying(self) -> list[Row]:
        """Return compressed settings that fit, are not known to be harmful, and are at least `PAYS` times as fast as dense.

        Dense has the same layout and schedule. The fastest on the first network is first.
        """

        def frame(row: Row) -> tuple[HostLayout, Schedule | None]:
            return row.way.layout, row.way.schedule

        limits = {frame(row): row.networks[0].step_s for row in reversed(self.rows) if row.way.dense}
        compressed = [row for row in self.rows if row.fits and not row.way.dense and not row.known.breaks]
        paying = [row for row in compressed if row.networks[0].step_s * PAYS <= limits[frame(row)]]
        return sorted(paying, key=lambda row: -row.networks[0].samples_per_s)


def _hunger(row: Row) -> float:
    """Return a sort key: the bandwidth for 90 % utilisation, or else the step seconds summed over networks."""
    level = row.bandwidth(0.9)
    return level.bps if level is not None else sum(on.step_s for on in row.networks)


def advise(
    job: Job,
    networks: Sequence[Network] = (),
    *,
    layout: HostLayout | None = None,
    local_steps: Sequence[int] = LOCAL_STEPS,
    tried: Sequence[Setting] = (),
    costs: FleetCosts | None = None,
) -> Advice:
    """Return the network that a job needs, and the effect of compression.

    `layout`: the job's own, by default the longest pipeline that the model allows. `tried`: additional settings in that layout.
    `costs`: money and churn of the hosts. Raises InputError if there is only one host, or the hosts cannot hold the model.
    """
    own = layout or _pipeline(job)
    _check(job, own, networks, tried)
    links = PER_TOKEN if job.model.scope.kind in (TRANSFORMER, UNKNOWN) else PER_TENSOR
    own_ways = _ways(own, local_steps, links)
    rescheduled = _schedules(job, own) if own.replicas == 1 else []
    forward, backward = PER_TOKEN[-1]
    coded = [replace(way, forward=forward, backward=backward) for way in rescheduled if links is PER_TOKEN]
    others = [way for each in _others(job, own) for way in _ways(each, local_steps, links)]
    ways = [
        own_ways[0],
        *rescheduled,
        *own_ways[1:],
        *coded,
        *others,
        *(Proposal(own, *setting[:3]) for setting in tried),
    ]
    template = networks[0] if networks else Network(1e9)
    rows = tuple(_row(job, way, template, networks, costs) for way in dict.fromkeys(ways))
    return Advice(job, own, tuple(networks), rows, chosen=layout is not None, costs=costs)


def _check(job: Job, own: HostLayout, networks: Sequence[Network], tried: Sequence[Setting]) -> None:
    fleet = job.fleet
    if fleet.hosts < 2:
        raise InputError(
            f"{fleet!r} is one host, which sends nothing to others: give two or more, such as 2x{fleet.gpus}x{fleet.name}."
        )
    if own.workers * own.replicas != fleet.hosts:
        raise InputError(
            f"`--stages` x `--replicas` must be the {fleet.hosts} hosts of {fleet!r}, but got {own.workers} x {own.replicas}."
        )
    for network in networks:
        if network.num_hosts is not None and network.num_hosts < fleet.hosts:
            raise InputError(f"{network!r} has {network.num_hosts} hosts, but the job has {fleet.hosts}: use as many.")
    methods = {each.replica_gradient for each in tried} - {IDENTITY}
    if own.replicas == 1 and methods:
        raise InputError("`--try`: `replica_gradient` needs replicas, but the job is one pipeline: add --replicas 2.")
    if own.workers == 1 and any(Proposal(own, *each[:2]).links_coded for each in tried):
        raise InputError("`--try`: `forward` and `backward` need links, but each replica is one stage: add --stages 2.")
    for method in methods if own.sharding is not None else ():
        local = method.startswith("DiLoCo")
        if local != (own.groups > 1):
            remedy = "groups, as by --sharding 'FSDP(4)' of 8 replicas" if local else "a codec such as Quantize(8)"
            raise InputError(f"`--try`: {method} does not fit {own}: it needs {remedy}.")
    need, have = STATE_BYTES * job.model.num_parameters, fleet.hosts * fleet.memory_bytes
    if need > have:
        names = dict.fromkeys([fleet.name, "H200", "B200"])
        larger = " or ".join(f"{math.ceil(need / DEVICES[name].memory_bytes)} {name}" for name in names)
        needs, has = apart(format_bytes, need, have)
        raise InputError(
            f"{job.model.name} needs {needs} for weights, gradients and Adam ({STATE_BYTES} bytes for each of "
            f"{job.model.num_parameters:.3g} parameters), but {fleet!r} has {has}: {larger} would hold it."
        )
    job.profile(Proposal(own))  # the schedule accepts the number of microbatches


def _pipeline(job: Job) -> HostLayout:
    """Return the layout with the longest pipeline that the model allows."""
    hosts = job.fleet.hosts
    workers = max(count for count in range(1, hosts + 1) if hosts % count == 0 and count <= job.model.layers)
    return HostLayout(workers, hosts // workers)


def _others(job: Job, own: HostLayout) -> list[HostLayout]:
    """Return alternative layouts: one pipeline, replicas only, sharded replicas, two pipelines."""
    hosts = job.fleet.hosts
    layouts = [HostLayout(hosts, 1), HostLayout(1, hosts)]
    layouts += [HostLayout(1, hosts, FSDP(hosts, reshard_after)) for reshard_after in ("forward", "step")]
    layouts += [HostLayout(hosts // 2, 2)] if hosts % 2 == 0 and hosts > 2 else []
    return [
        layout for layout in layouts if layout != own and layout.workers <= job.model.layers and _accepted(job, layout)
    ]


def _accepted(job: Job, layout: HostLayout) -> bool:
    """Return whether a batch fills the layout, under the job's schedule."""
    try:
        job.profile(Proposal(layout))
    except InputError:
        return False
    return True


def _ways(layout: HostLayout, local_steps: Sequence[int], pairs: Sequence[tuple[str, str]]) -> list[Proposal]:
    """Return the ways to try in a layout, dense first; `pairs` are codecs of activations and gradients."""
    links = pairs if layout.workers > 1 else ()
    if layout.replicas == 1:
        return [Proposal(layout), *(Proposal(layout, *pair) for pair in links)]
    local = [f"DiLoCo({steps})" for steps in local_steps]
    if layout.sharding is not None:
        methods = SCATTERS if layout.groups == 1 else local
        coded = [Proposal(layout, method=method) for method in methods]
        return [Proposal(layout), *(Proposal(layout, *pair) for pair in links), *coded]
    methods = local if links else [*METHODS, *local]
    middle = local[len(local) // 2] if local else IDENTITY
    return [
        Proposal(layout, overlap=True),
        Proposal(layout),
        *(Proposal(layout, method=method) for method in methods),
        *(Proposal(layout, *pair, method=middle) for pair in links),
    ]


def _schedules(job: Job, layout: HostLayout) -> list[Proposal]:
    """Return a 1F1B pipeline's dense ways in other schedules.

    More microbatches in flight hide latency; a V-shaped schedule keeps both ends of a tied embedding on one worker.
    """
    if job.schedule != OneFOneB() or layout.workers == 1 or layout.sharding is not None:
        return []
    schedules = [OneFOneB(), *(OneFOneB(ahead=ahead) for ahead in AHEAD)]
    held = [job.scheduled(schedule).in_flight(layout) for schedule in schedules]
    more: list[Schedule] = [schedules[i] for i in range(1, len(schedules)) if held[i] != held[i - 1]]
    if job.model.tied_sizes(layout.workers) and _accepted(job.scheduled(ZBV()), layout):
        more.append(ZBV())
    return [Proposal(layout, schedule=schedule) for schedule in more]


def _row(job: Job, way: Proposal, template: Network, networks: Sequence[Network], costs: FleetCosts | None) -> Row:
    job = job.scheduled(way.schedule)
    memory = job.memory_bytes(way)
    return Row(
        way=way,
        memory_bytes=memory,
        fits=memory <= job.fleet.memory_bytes,
        needed=() if isinstance(template.bandwidth_bps, tuple) else needed(job, way, template),
        networks=tuple(_on(job, way, network, costs) for network in networks),
        known=known(way.setting, job.model.scope, way.layout.replicas),
    )


def _on(job: Job, way: Proposal, network: Network, costs: FleetCosts | None) -> OnNetwork:
    timed, free = job.step(way), free_s(job, way.layout)
    parts = timed.parts(network, free)
    step = sum(parts)
    error = NINE_TENTHS * MODEL_ERROR * (parts.links + parts.tied + parts.averaging + parts.latency)
    return OnNetwork(
        network=network,
        step_s=step,
        utilisation=free / step,
        low=free / (step + error),
        high=free / (step - error),
        samples_per_s=job.batch / step,
        parts=parts,
        expected=None if costs is None else timed.expected(costs, network, gpus=job.fleet.gpus),
    )
