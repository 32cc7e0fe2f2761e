"""GraVAC on replica gradients: the compression factor moves while training runs, by what it keeps and how fast the system is."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from raysim.codecs import Codec, Identity, RandomK
from raysim.codecs.message import Entry
from raysim.compressors.base import Decision
from raysim.compressors.controller import POLICIES, PROMOTE, Choice, Rules, Standing, candidate_factors
from raysim.notation import check_choice, check_integer, check_real
from raysim.on_demand import torch
from raysim.replication.base import (
    Averaged,
    Gradients,
    Memory,
    Received,
    ReplicaContext,
    Round,
    mean_dense,
)
from raysim.replication.layers import (
    Layered,
    check_scope,
    flatten,
    gather_mean,
    key_of,
    remembered,
    sum_values,
    unflatten,
)
from raysim.replication.selection import ESTIMATED, EXACT, Kept, codec_of, count_of, energy, pack, select, select_within

if TYPE_CHECKING:
    from torch import Tensor

RANDOM = "random"


@dataclass(frozen=True, repr=False)
class GraVAC(Layered):
    """Compresses each tensor to the strongest of two factors whose gain reaches `epsilon`, else sends it dense (Tyagi and
    Swany 2023, 2305.12201).

    Error feedback; the second compression is of the first one's result. Gains are agreed before a branch is taken, and one
    factor serves the whole stage. At the end of every `window` of steps the minimum rises to the candidate where their gains
    are within `omega`, the candidate to the next factor from `cf_min` to `cf_max`, and both stay where throughput times gain
    of the two fastest factors are within `omega`. Factors count values, not positions.

    `policy` "exponential" (times 2, 4, 16, 256, ...) or "geometric" (by `growth`). `select` "exact" (TopK), "sampled" (DGC),
    "bisect" (RedSync), "random" (the same positions at all replicas). `values` codes what is kept.
    Where the paper leaves room (gravac.md 1.5), the first is the default:
    `promote` to the "evaluated" candidate, or as the "listing" has it to the next one, or (ours) to each that is "passing"
    `epsilon` at a window's end, and back by one where the minimum fails, the candidate always the next above it;
    `saturation` at the "lower" of the two factors, or at the second fastest as the "listing" has it; `saturate_on_dense`;
    `throughput` of a factor the "mean" of a window, "ewma" or "last"; `reopen_every` so many windows after settling;
    `gain_reference` "error_fed" or the "raw" gradient; `gain_power` 2 or 1; `gain_fold` "none" or "minmax", the lesser over the
    greater; `gain_average` of "ratios" or "ratio_of_means"; `ewma_alpha`, replicas/100 where None;
    `scope`; `start_at_min`; `dgc_momentum`: momentum before compression, as in DGC.

    >>> GraVAC(10, 1000, epsilon=0.9).factors
    (10.0, 20.0, 40.0, 160.0, 1000.0)
    """

    cf_min: float
    cf_max: float
    epsilon: float = 0.7
    omega: float = 0.01
    window: int = 500
    policy: str = "exponential"
    growth: float = 2.0
    select: str = EXACT
    values: Codec = Identity()  # noqa: RUF009  a frozen codec
    scope: str = "tensor"
    promote: str = "evaluated"
    saturation: str = "lower"
    throughput: str = "mean"
    reopen_every: int | None = None
    gain_reference: str = "error_fed"
    gain_power: int = 2
    gain_fold: str = "none"
    gain_average: str = "ratios"
    ewma_alpha: float | None = None
    start_at_min: bool = False
    saturate_on_dense: bool = False
    dgc_momentum: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_factors(self, self.cf_min, self.cf_max)
        self._coerce(
            epsilon=check_real("epsilon", self.epsilon, 0, 1, open_low=True),
            omega=check_real("omega", self.omega, 0, 1, open_low=True),
            window=check_integer("window", self.window, 1),
            growth=check_real("growth", self.growth, 1, 1e6, open_low=True),
            gain_power=check_integer("gain_power", self.gain_power, 1, 2),
        )
        check_choice("policy", self.policy, POLICIES)
        check_choice("select", self.select, [EXACT, *ESTIMATED, RANDOM])
        check_scope(self.scope)
        check_choice("promote", self.promote, PROMOTE)
        check_choice("saturation", self.saturation, ["lower", "listing"])
        check_choice("throughput", self.throughput, ["mean", "ewma", "last"])
        check_choice("gain_reference", self.gain_reference, ["error_fed", "raw"])
        check_choice("gain_fold", self.gain_fold, ["none", "minmax"])
        check_choice("gain_average", self.gain_average, ["ratios", "ratio_of_means"])
        if self.growth != 2.0 and self.policy != "geometric":
            raise ValueError(f"`growth` is of the policy 'geometric', but got {self.growth} with {self.policy!r}.")
        if self.reopen_every is not None:
            self._coerce(reopen_every=check_integer("reopen_every", self.reopen_every, 1))
        if self.ewma_alpha is not None:
            self._coerce(ewma_alpha=check_real("ewma_alpha", self.ewma_alpha, 0, 1, open_low=True))
        if not isinstance(self.values, Codec):
            raise ValueError(f"`values` must be a codec, but got {self.values!r}.")
        if self.select == RANDOM and self.values != Identity():
            raise ValueError(f"`values` of the selection 'random' are summed as they are, but got {self.values!r}.")
        for field in ("start_at_min", "saturate_on_dense", "dgc_momentum"):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"`{field}` must be True or False, but got {getattr(self, field)!r}.")

    @property
    def factors(self) -> tuple[float, ...]:
        """The factors to explore."""
        return candidate_factors(self.cf_min, self.cf_max, self.policy, self.growth)

    def entries(self) -> tuple[Entry, ...]:
        return tuple(Entry.of(self._codec(factor)) for factor in self.factors)

    def compressed_rounds(self, num_replicas: int) -> int:
        return 3  # the gains, and a dense fallback by an all-reduce

    def check(self, shapes: Mapping[str, tuple[int, ...]], num_replicas: int, momentum: float | None) -> None:
        if self.dgc_momentum and not momentum:
            raise ValueError(
                "`dgc_momentum` takes over the optimiser's momentum, but the optimiser has none. Use `optimizer.name=sgd` "
                "with `optimizer.momentum`, or leave it out."
            )

    def memory_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        return 4 * self.compressed_values(shapes) * (2 if self.dgc_momentum else 1)

    def compress(
        self, gradients: Gradients, memory: Memory, context: ReplicaContext
    ) -> Generator[Round, Received, Averaged]:
        rules = self._rules(context.num_replicas)
        standing = self._standing(memory)
        throughput = context.batch_size / context.step_s if context.step_s else None
        if throughput is not None and standing.used >= 0:
            standing.book(throughput, rules)  # of the last step, whose time is known now
        events = []
        if standing.at_window(rules):
            standing.close_window()
            events = standing.decide(rules)

        raw = flatten(gradients, self.scope)
        velocity = self._velocity(raw, memory, context)
        fed = {name: remembered(memory, "residual", name, x) + velocity.get(name, x) for name, x in raw.items()}
        levels = self._levels(fed, standing, context)
        seen = yield from self._agree(levels, raw if self.gain_reference == "raw" else fed, standing, rules)
        choice = standing.choose(seen.minimum, seen.candidate, self.epsilon)
        standing.end_step(choice, seen.minimum, seen.candidate)
        sent = {"minimum": levels[0], "candidate": levels[1]}.get(choice.branch)
        if sent is not None and sent.factor > 1:
            means, left = yield from self._send(sent, fed, context)
            velocity = {name: _masked(x, sent.kept[name]) for name, x in velocity.items()}
        else:
            means = yield from mean_dense("dense layers", fed, context)
            left = {name: torch.zeros_like(x) for name, x in fed.items()}

        whole, real = standing.tensors()
        moved = {**memory, "controller/whole": whole, "controller/real": real}
        moved |= {f"residual/{name}": x for name, x in left.items()}
        moved |= {f"velocity/{name}": x for name, x in velocity.items()}
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
            reason=explain(choice, seen, levels, self.epsilon),
        )
        with_momentum = frozenset(gradients) if self.dgc_momentum else frozenset()
        return Averaged(unflatten(means, gradients), moved, [decision], with_momentum)

    def _rules(self, num_replicas: int) -> Rules:
        return Rules(
            epsilon=self.epsilon,
            omega=self.omega,
            window=self.window,
            alpha=min(1.0, num_replicas / 100) if self.ewma_alpha is None else self.ewma_alpha,
            promote=self.promote,
            saturation=self.saturation,
            throughput=self.throughput,
            reopen_every=self.reopen_every,
            saturate_on_dense=self.saturate_on_dense,
        )

    def _standing(self, memory: Memory) -> Standing:
        if "controller/whole" in memory:
            return Standing.from_tensors(memory["controller/whole"], memory["controller/real"])
        return Standing.fresh(len(self.factors), start_at_min=self.start_at_min)

    def _gain(self, kept: float, whole: float) -> float:
        """Return the gain of energies, as the options define it; of nothing at all it is 1."""
        if whole <= 0:
            return 1.0
        gain = math.sqrt(kept / whole) if self.gain_power == 1 else kept / whole
        return min(gain, 1 / gain) if self.gain_fold == "minmax" and gain > 0 else gain

    def _velocity(self, raw: Gradients, memory: Memory, context: ReplicaContext) -> Gradients:
        if not self.dgc_momentum:
            return {}
        return {name: context.momentum * remembered(memory, "velocity", name, x) + x for name, x in raw.items()}

    def _codec(self, factor: float) -> Codec:
        """Return the codec that keeps the values of a factor."""
        return RandomK(1 / factor) if self.select == RANDOM else codec_of(factor, self.select, self.values)

    def _levels(self, fed: Gradients, standing: Standing, context: ReplicaContext) -> list[Level]:
        """Return what minimum and candidate keep of every row."""
        factors = (*self.factors, 1.0)
        levels = [Level(factors[level], {}, 0.0) for level in (standing.minimum, standing.candidate)]
        for name, row in fed.items():
            key = key_of(name, context, shared=self.select == RANDOM)
            for place, level in enumerate(levels):
                if self.select == RANDOM:  # of one draw, the stronger keeps some of what the milder one does
                    kept = _drawn(row, level.factor, key)
                elif place == 0:
                    kept = select(row.view(-1), count_of(level.factor, row), self.select, key)
                else:
                    kept = select_within(levels[0].kept[name], count_of(level.factor, row), self.select, key)
                sent = kept.values
                if self.values != Identity():
                    sent = self.values.encode(sent, key).decode(sent.device)
                levels[place] = level._replace(kept={**level.kept, name: kept}, energy=level.energy + energy(sent))
        return levels

    def _agree(
        self, levels: list[Level], reference: Gradients, standing: Standing, rules: Rules
    ) -> Generator[Round, Received, Seen]:
        """Return the gains, averaged over steps at each replica and then over replicas: the same bits at all."""
        whole = sum(energy(x) for x in reference.values())
        now = [self._gain(level.energy, whole) for level in levels]
        if self.gain_average == "ratios":
            smooth = list(standing.observe((now[0], 1.0), (now[1], 1.0), rules.alpha))
        else:
            low, high = [(level.energy, whole) if whole > 0 else (1.0, 1.0) for level in levels]
            smooth = [self._gain(ratio, 1.0) for ratio in standing.observe(low, high, rules.alpha)]
        counts = [float(sum(len(kept.values) for kept in level.kept.values())) for level in levels]
        own = torch.tensor([*smooth, *now, *counts], dtype=torch.float64)
        received = yield Round(everyone={"gains": Identity().encode(own)})
        total = torch.zeros_like(own)
        for packets in received:
            total += packets["gains"].decode()
        return Seen(*(total / len(received)).tolist())

    def _send(
        self, level: Level, fed: Gradients, context: ReplicaContext
    ) -> Generator[Round, Received, tuple[Gradients, Gradients]]:
        """Return the means over replicas of what a level keeps, and what it withholds here."""
        packets = {}
        for name, row in fed.items():
            key = key_of(name, context, shared=self.select == RANDOM)
            if self.select == RANDOM:
                packets[name] = self._codec(level.factor).encode(row, key)
            else:
                packets[name] = pack(level.kept[name], row, level.factor, self.select, self.values, key)
        device = next(iter(fed.values())).device
        rounds = sum_values(packets, context, device) if self.select == RANDOM else gather_mean(packets, device)
        means = yield from rounds
        return means, {name: x - packets[name].decode(x.device) for name, x in fed.items()}


class Level(NamedTuple):
    """What one factor keeps of all rows, and the squared norm of that."""

    factor: float
    kept: dict[str, Kept]
    energy: float


class Seen(NamedTuple):
    """What replicas agree on before a branch is taken."""

    minimum: float  # gains, averaged over steps
    candidate: float
    minimum_now: float  # of this step alone
    candidate_now: float
    minimum_count: float  # values kept
    candidate_count: float


def check_factors(method: GraVAC, cf_min: object, cf_max: object) -> None:
    """Coerce the ends of the range of factors; raises ValueError by field and rule."""
    low, high = check_real("cf_min", cf_min, 1, 1e9), check_real("cf_max", cf_max, 1, 1e9)
    if low > high:
        raise ValueError(f"`cf_min` must be at most `cf_max`, but got {low:g} and {high:g}.")
    method._coerce(cf_min=low, cf_max=high)


def explain(choice: Choice, seen: Seen, levels: list[Level], epsilon: float) -> str:
    """Return in words why a branch was taken."""
    minimum, candidate = levels[0].factor, levels[1].factor
    if choice.branch == "candidate":
        return f"{candidate:g}x keeps {seen.candidate:.3f} of the energy, at least {epsilon:g}"
    if choice.branch == "minimum":
        return (
            f"{candidate:g}x keeps {seen.candidate:.3f}, less than {epsilon:g}; {minimum:g}x keeps {seen.minimum:.3f}"
        )
    return f"even {minimum:g}x keeps {seen.minimum:.3f} only, less than {epsilon:g}"


def _drawn(row: Tensor, factor: float, key: int) -> Kept:
    codec = RandomK(1 / factor)
    positions = codec.draw(key, tuple(row.shape), row.device)
    return Kept(positions, row.view(-1)[positions])


def _masked(velocity: Tensor, kept: Kept) -> Tensor:
    """Return the velocity with zeros where values were sent (momentum factor masking)."""
    masked = velocity.clone()
    masked.view(-1)[kept.positions] = 0
    return masked
