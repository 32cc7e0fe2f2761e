"""GraVAC on replica gradients: adapts the compression factor to its gain and to the speed of the system."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from raysim.codecs import Codec, Identity, RandomK
from raysim.codecs.codec import check_is_codec
from raysim.codecs.message import Entry
from raysim.compressors.compressor import Decision
from raysim.notation import check_choice, check_integer, check_real
from raysim.on_demand import torch
from raysim.replication.controller import POLICIES, PROMOTE, Choice, Controller, Rules, candidate_factors, check_factors
from raysim.replication.layers import Layered, flatten, gather_mean, key_of, remembered, sum_values, unflatten
from raysim.replication.method import Averaged, Gradients, Memory, ReplicaContext, RoundPackets, Rounds, mean_dense
from raysim.replication.sparsified import (
    ESTIMATED,
    EXACT,
    Kept,
    codec_of,
    count_of,
    energy,
    packet_of,
    select,
    select_within,
)

if TYPE_CHECKING:
    from torch import Tensor

RANDOM = "random"
_GAINS = ("fed", "raw", "folded")


@dataclass(frozen=True, repr=False)
class GraVAC(Layered):
    """Sends the stronger of two factors whose gain reaches `epsilon`, or dense if none does (Tyagi and Swany 2023, 2305.12201).

    The gain of a factor is ||C(g + e)||^2 / ||g + e||^2, a moving average over steps, averaged over replicas before the choice.
    The whole stage uses one factor. At the end of every window the minimum rises to the candidate if their gains are within
    `omega`, and the candidate rises to the next factor. Exploration ends at the lower of the two fastest factors once their
    throughput times gain is within `omega`. The candidate selects from the values of the minimum. Factors count values, not
    positions.

    Args:
        cf_min: First factor.
        cf_max: Last factor.
        epsilon: Least gain of a factor to be sent.
        omega: Relative difference below which two gains, or two speeds, count as equal.
        window: Steps between two decisions.
        policy: Factors: "exponential", the minimum times 2, 4, 16, 256, ..., or "geometric", times 2, 4, 8, ...
        select: "exact" (TopK), "sampled" (DGC), "bisect" (RedSync), or "random", with the same positions on all replicas.
        values: Codec of the selected values.
        promote: The minimum rises to the candidate ("evaluated", our reading of the text), to the factor after it ("listing"), or
            (ours) to each candidate that passes at the end of a window, and back by one factor if it fails itself ("passing").
        ewma_alpha: Weight of a step in the moving averages; by default a hundredth of the number of replicas.
        gain: Reference: the gradient with its residual ("fed"), or without, as in the published code ("raw"); "folded" is the
            smaller of "raw" and its inverse. The code's norms are not squared: its floor of 0.7 is an `epsilon` of 0.49.
        settle: Number of first steps that send the minimum at any gain; 25 in the published code.

    >>> GraVAC(10, 1000, epsilon=0.9).factors
    (10.0, 20.0, 40.0, 160.0, 1000.0)
    """

    cf_min: float
    cf_max: float
    epsilon: float = 0.7
    omega: float = 0.01
    window: int = 500
    policy: str = "exponential"
    select: str = EXACT
    values: Codec = Identity()  # noqa: RUF009  a frozen codec
    promote: str = "evaluated"
    ewma_alpha: float | None = None
    gain: str = "fed"
    settle: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = check_factors(self.cf_min, self.cf_max)
        self._coerce(
            cf_min=low,
            cf_max=high,
            epsilon=check_real("epsilon", self.epsilon, 0, 1, open_low=True),
            omega=check_real("omega", self.omega, 0, 1, open_low=True),
            window=check_integer("window", self.window, 1),
            settle=check_integer("settle", self.settle, 0),
        )
        check_choice("policy", self.policy, POLICIES)
        check_choice("select", self.select, [EXACT, *ESTIMATED, RANDOM])
        check_choice("promote", self.promote, PROMOTE)
        check_choice("gain", self.gain, _GAINS)
        if self.ewma_alpha is not None:
            self._coerce(ewma_alpha=check_real("ewma_alpha", self.ewma_alpha, 0, 1, open_low=True))
        check_is_codec("values", self.values)
        self.values.check_feedback()
        if self.select == RANDOM and self.values != Identity():
            raise ValueError(
                f"`values` must be Identity with `select='random'`, whose values are summed, but got {self.values!r}."
            )

    @property
    def factors(self) -> tuple[float, ...]:
        return candidate_factors(self.cf_min, self.cf_max, self.policy)

    def entries(self) -> tuple[Entry, ...]:
        return tuple(Entry.of(self._codec(factor)) for factor in self.factors)

    def compressed_rounds(self, num_replicas: int) -> int:
        return 3  # the gains, and a dense fallback by an all-reduce

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"step_s"})

    def compress(self, gradients: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[Averaged]:
        rules = self._rules(context.num_replicas)
        controller = self._controller(memory)
        throughput = context.batch_size / context.step_s if context.step_s else None
        if throughput is not None and controller.used >= 0:
            controller.book(throughput)  # of the previous step, whose time is now known
        events = []
        if controller.at_window(rules):
            controller.close_window()
            events = controller.decide(rules)

        rows = flatten(gradients, "tensor")
        fed = {name: remembered(memory, "residual", name, x) + x for name, x in rows.items()}
        levels = self._levels(fed, controller, context)
        seen = yield from self._agree(levels, fed if self.gain == "fed" else rows, controller, rules)
        choice = controller.choose(seen.minimum, seen.candidate, self.epsilon)
        if controller.steps < self.settle:
            choice = Choice("minimum", controller.minimum, seen.minimum)
        controller.end_step(choice, seen.minimum, seen.candidate)
        sent = {"minimum": levels[0], "candidate": levels[1]}.get(choice.branch)
        if sent is not None and sent.factor > 1:
            means, left = yield from self._send(sent, fed, context)
        else:
            means = yield from mean_dense("dense layers", fed, context)
            left = {name: torch.zeros_like(x) for name, x in fed.items()}

        whole, real = controller.tensors()
        moved = {**memory, "controller/whole": whole, "controller/real": real}
        moved |= {f"residual/{name}": x for name, x in left.items()}
        total = sum(x.numel() for x in fed.values())
        decision = Decision(
            branch=choice.branch,
            factor=total / {"minimum": seen.minimum_count, "candidate": seen.candidate_count}.get(choice.branch, total),
            minimum=levels[0].factor,
            candidate=levels[1].factor,
            gain_minimum=seen.minimum,
            gain_candidate=seen.candidate,
            gain={"minimum": seen.minimum_now, "candidate": seen.candidate_now}.get(choice.branch, 1.0),
            throughput=throughput,
            event="+".join(events) or None,
            reason=self._explain(choice, seen, levels, settling=controller.steps <= self.settle),
        )
        return Averaged(unflatten(means, gradients), moved, [decision])

    def _rules(self, num_replicas: int) -> Rules:
        return Rules(
            epsilon=self.epsilon,
            omega=self.omega,
            window=self.window,
            alpha=min(1.0, num_replicas / 100) if self.ewma_alpha is None else self.ewma_alpha,
            promote=self.promote,
        )

    def _controller(self, memory: Memory) -> Controller:
        if "controller/whole" in memory:
            return Controller.from_tensors(memory["controller/whole"], memory["controller/real"])
        return Controller.new(len(self.factors))

    def _codec(self, factor: float) -> Codec:
        return RandomK(1 / factor) if self.select == RANDOM else codec_of(factor, self.select, self.values)

    def _levels(self, fed: Gradients, controller: Controller, context: ReplicaContext) -> list[Level]:
        """Return the values of every row kept by minimum and candidate."""
        factors = (*self.factors, 1.0)
        levels = [Level(factors[level], {}, 0.0) for level in (controller.minimum, controller.candidate)]
        for name, row in fed.items():
            key = key_of(name, context, shared=self.select == RANDOM)
            for i, level in enumerate(levels):
                if self.select == RANDOM:  # with the same key, the stronger factor's positions are a subset
                    kept = _drawn(row, level.factor, key)
                elif i == 0:
                    kept = select(row.view(-1), count_of(level.factor, row), self.select, key)
                else:
                    kept = select_within(levels[0].kept[name], count_of(level.factor, row), self.select, key)
                sent = kept.values if self.select in ESTIMATED else kept.values[None]  # as in a packet
                if self.values != Identity():
                    sent = self.values.encode(sent, key).decode(sent.device)
                levels[i] = level._replace(kept={**level.kept, name: kept}, energy=level.energy + energy(sent))
        return levels

    def _agree(self, levels: list[Level], reference: Gradients, controller: Controller, rules: Rules) -> Rounds[_Seen]:
        """Return the gains, averaged over steps and then over replicas, bitwise equal on all replicas."""
        whole = sum(energy(x) for x in reference.values())
        now = [self._gain(level.energy, whole) for level in levels]
        smooth = controller.observe(now[0], now[1], rules.alpha)
        counts = [float(sum(len(kept.values) for kept in level.kept.values())) for level in levels]
        own = torch.tensor([*smooth, *now, *counts], dtype=torch.float64)
        received = yield RoundPackets(everyone={"gains": Identity().encode(own)})
        total = torch.zeros_like(own)
        for packets in received:
            total += packets["gains"].decode()
        return _Seen(*(total / len(received)).tolist())

    def _gain(self, kept: float, whole: float) -> float:
        """Return the gain for a kept energy and the energy of the reference, `whole`; 1 if that is zero."""
        gain = kept / whole if whole > 0 else 1.0
        return 1 / gain if self.gain == "folded" and gain > 1 else gain

    def _send(self, level: Level, fed: Gradients, context: ReplicaContext) -> Rounds[tuple[Gradients, Gradients]]:
        """Return the means over replicas of a level's kept values, and this replica's residuals."""
        packets = {}
        for name, row in fed.items():
            key = key_of(name, context, shared=self.select == RANDOM)
            if self.select == RANDOM:
                packets[name] = self._codec(level.factor).encode(row, key)
            else:
                packets[name] = packet_of(level.kept[name], row, level.factor, self.select, self.values, key)
        device = next(iter(fed.values())).device
        rounds = sum_values(packets, context, device) if self.select == RANDOM else gather_mean(packets, device)
        means = yield from rounds
        return means, {name: x - packets[name].decode(x.device) for name, x in fed.items()}

    def _explain(self, choice: Choice, seen: _Seen, levels: list[Level], settling: bool) -> str:
        """Return the reason for a branch, in words."""
        minimum, candidate = levels[0].factor, levels[1].factor
        if settling:
            return f"{minimum:g}x is sent in the first {self.settle} steps; its gain is {seen.minimum:.3f}"
        energy = "the energy" if self.gain == "fed" else "the raw energy"
        if choice.branch == "candidate":
            return f"{candidate:g}x keeps {seen.candidate:.3f} of {energy}, at least {self.epsilon:g}"
        if choice.branch == "minimum":
            return (
                f"{candidate:g}x keeps {seen.candidate:.3f}, less than {self.epsilon:g}; "
                f"{minimum:g}x keeps {seen.minimum:.3f}"
            )
        return f"even {minimum:g}x keeps {seen.minimum:.3f} only, less than {self.epsilon:g}"


class Level(NamedTuple):
    """The kept values of all rows at one factor, and their squared norm."""

    factor: float
    kept: dict[str, Kept]
    energy: float


class _Seen(NamedTuple):
    """The numbers shared by all replicas before they choose a branch."""

    minimum: float  # gains, averaged over steps
    candidate: float
    minimum_now: float  # gain in this step only
    candidate_now: float
    minimum_count: float  # number of kept values
    candidate_count: float


def _drawn(row: Tensor, factor: float, key: int) -> Kept:
    codec = RandomK(1 / factor)
    positions = codec.draw(key, tuple(row.shape), row.device)
    return Kept(positions, row.view(-1)[positions])
