"""GraVAC on a pipeline's links (ours; gravac.md 4): each link climbs a ladder of codecs, by what they keep of its messages."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

from raysim.codecs import Codec, EstimatedTopK, Identity, LowRank, Packet, Quantize, RandomK, TopK
from raysim.codecs.message import Entry, wire_bytes
from raysim.compressors.base import (
    KEYS,
    Compressor,
    Context,
    Decision,
    Offer,
    State,
    as_rows,
    memory_keys,
    recall,
    remember,
)
from raysim.compressors.controller import POLICIES, PROMOTE, Choice, Rules, Standing, candidate_factors
from raysim.compressors.feedback import ErrorFeedback
from raysim.notation import check_choice, check_integer, check_real
from raysim.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor

WHOLE, REAL, TALLY = -1, -2, -3  # keys of what the controller knows: those of no message
LADDERS = {
    "bits": tuple(Quantize(bits) for bits in (8, 6, 4, 3, 2)),
    "rank": tuple(LowRank(rank) for rank in (64, 32, 16, 8, 4)),
}
EPSILON = {"forward": 0.7, "backward": 0.9}  # gradients need milder compression


@dataclass(frozen=True, repr=False)
class GraVAC(Compressor):
    """Sends the messages of a step by the strongest of two codecs of a `ladder` whose fidelity reaches `epsilon`, else as they are.

    Fidelity is 1 - ||y - C(y)||^2/||y||^2, y the codec's input, over the messages of a step, in moving averages of weight
    `ewma_alpha`; the next step goes by it. Both codecs are tried on every `probe_every`-th message. At the end of every `window`
    of steps the controller of GraVAC moves, that of every link by itself.

    The gains of links are independent: the fidelity of a link is measured on its own messages, and no other link's codec enters
    it. Compression upstream still changes the messages that a link downstream sees; the moving averages follow these messages,
    and after 1/`ewma_alpha` steps hold little of those before. Only a `budget` couples the decisions of links. The speed of a
    step is common to all: with `throughput="step"` it is credited to the level of every link. `simultaneous=False` gives a change
    of speed a single cause: links take turns in the order of boundaries, one a window, 2(P - 1) windows a round.

    `ladder` "topk" (per sample, factors from `cf_min` to `cf_max` by `policy`), "bits" (Quantize 8 to 2), "rank" (LowRank 64 to
    4), or codecs from mild to strong. `epsilon` is 0.7 forward and 0.9 backward where None. `budget` stands in for it: what the
    links of a direction that have one must keep together, as a product, compression going to the slowest links first
    (`raysim.compressors.budget`); each has its own epsilon then, of what was seen a step before. `throughput` "step": samples a
    second by the clock; "link": dense bytes over wire bytes, which needs no clock. `memory` keeps a residual, under the keys of
    ErrorFeedback. `promote` as of GraVAC on replica gradients. `decide="message"` chooses for every message by its own
    fidelity. `reopen_every`: windows until a settled controller explores again.

    >>> GraVAC(ladder="bits").levels
    (Quantize(8), Quantize(6), Quantize(4), Quantize(3), Quantize(2))
    """

    message_varies: ClassVar[bool] = True

    cf_min: float = 2.0
    cf_max: float = 32.0
    epsilon: float | None = None
    omega: float = 0.01
    window: int = 100
    policy: str = "exponential"
    ladder: str | tuple[Codec, ...] = "topk"
    promote: str = "evaluated"
    memory: str | None = None
    throughput: str = "step"
    decide: str = "step"
    probe_every: int = 1
    ewma_alpha: float = 0.1
    simultaneous: bool = True
    reopen_every: int | None = None
    budget: float | None = None

    def __post_init__(self) -> None:
        low, high = check_real("cf_min", self.cf_min, 1, 1e9), check_real("cf_max", self.cf_max, 1, 1e9)
        if low > high:
            raise ValueError(f"`cf_min` must be at most `cf_max`, but got {low:g} and {high:g}.")
        self._coerce(
            cf_min=low,
            cf_max=high,
            omega=check_real("omega", self.omega, 0, 1, open_low=True),
            window=check_integer("window", self.window, 1),
            probe_every=check_integer("probe_every", self.probe_every, 1),
            ewma_alpha=check_real("ewma_alpha", self.ewma_alpha, 0, 1, open_low=True),
        )
        if self.epsilon is not None:
            self._coerce(epsilon=check_real("epsilon", self.epsilon, 0, 1, open_low=True))
        if self.budget is not None:
            self._coerce(budget=check_real("budget", self.budget, 0, 1, open_low=True))
            for field, default in (("epsilon", None), ("decide", "step")):
                if getattr(self, field) != default:
                    raise ValueError(f"`{field}` must be {default} with `budget`, but got {getattr(self, field)!r}.")
        if self.reopen_every is not None:
            self._coerce(reopen_every=check_integer("reopen_every", self.reopen_every, 1))
        if self.memory is not None:
            check_choice("memory", self.memory, KEYS)
        check_choice("policy", self.policy, POLICIES)
        check_choice("promote", self.promote, PROMOTE)
        check_choice("throughput", self.throughput, ["step", "link"])
        check_choice("decide", self.decide, ["step", "message"])
        if not isinstance(self.simultaneous, bool):
            raise ValueError(f"`simultaneous` must be True or False, but got {self.simultaneous!r}.")
        self._check_ladder()

    def _check_ladder(self) -> None:
        if isinstance(self.ladder, str):
            check_choice("ladder", self.ladder, ["topk", *LADDERS])
        elif (
            not isinstance(self.ladder, (list, tuple))
            or not self.ladder
            or not all(isinstance(codec, Codec) for codec in self.ladder)
        ):
            raise ValueError(
                f"`ladder` must be topk, {', '.join(LADDERS)}, or codecs from mild to strong, but got {self.ladder!r}."
            )
        else:
            self._coerce(ladder=tuple(self.ladder))
        if self.ladder != "topk":
            for field in fields(self):
                if field.name in ("cf_min", "cf_max", "policy") and getattr(self, field.name) != field.default:
                    raise ValueError(f"`{field.name}` is of the ladder 'topk', but got it with {self.ladder!r}.")
        if self.memory is not None:
            for codec in self.levels:
                ErrorFeedback(codec, key=self.memory)  # refuses what diverges under a residual

    @property
    def levels(self) -> tuple[Codec, ...]:
        """The codecs of the ladder, from mild to strong."""
        if self.ladder == "topk":
            return tuple(TopK(1 / factor) for factor in candidate_factors(self.cf_min, self.cf_max, self.policy))
        return LADDERS[self.ladder] if isinstance(self.ladder, str) else self.ladder

    @property
    def codec(self) -> Codec:  # type: ignore[override]
        """The mildest codec."""
        return self.levels[0]

    def entries(self) -> tuple[Entry, ...]:
        return tuple(Entry.of(codec) for codec in self.levels)

    def encode(self, x: Tensor, state: State, context: Context) -> tuple[Packet, State]:
        standing, tally = self._read(state)
        fed = x.detach()
        keys: list[int] = []
        if self.memory is not None:
            keys, rows = memory_keys(self.memory, context), as_rows(fed, self.memory)
            fed = (recall(state, keys, rows) + rows).view(x.shape)
        message = fed.to(x.dtype)
        tried: dict[int, Packet] = {}
        undecided = tally.level < 0 or self.decide == "message"
        if undecided or tally.messages % self.probe_every == 0:
            for level in {standing.minimum, standing.candidate}:
                tried[level] = self._at(level).encode(message, context.key)
            exact = message.double()
            norm2 = float(exact.square().sum())
            lost = {n: float((exact - one.decode(x.device).double()).square().sum()) for n, one in tried.items()}
            ends = standing.minimum, standing.candidate
            if undecided:
                fidelities = [_fidelity(lost[level], norm2) for level in ends]
                tally.level = standing.choose(fidelities[0], fidelities[1], self._epsilon(context)).level
            sizes = [wire_bytes(self.table.pack(tried[level])) for level in ends]
            tally.probe(norm2, [lost[level] for level in ends], sizes, x.nbytes)
            tally.lost_sent += lost.get(tally.level, 0.0)
        packet = tried[tally.level] if tally.level in tried else self._at(tally.level).encode(message, context.key)
        tally.send(wire_bytes(self.table.pack(packet)), x.nbytes)
        changes = {TALLY: tally.tensor()}
        if self.memory is not None:
            changes |= remember(keys, as_rows(fed - packet.decode(x.device), self.memory))
        return packet, changes

    def end_step(self, state: State, context: Context) -> tuple[State, list[Decision]]:
        standing, tally = self._read(state)
        rules, epsilon = self._rules(context), self._epsilon(context)
        throughput = context.batch_size / context.step_s if context.step_s else None
        if self.throughput == "step" and throughput is not None and standing.used >= 0:
            standing.book(throughput, rules)  # of the step before this one
        ends, gains = (standing.minimum, standing.candidate), (standing.agreed[0], standing.agreed[1])
        if tally.probed:
            raw = [_fidelity(lost, tally.norm2) for lost in (tally.lost_minimum, tally.lost_candidate)]
            gains = standing.observe((raw[0], 1.0), (raw[1], 1.0), rules.alpha)
        branch, gain = {ends[0]: ("minimum", gains[0]), ends[1]: ("candidate", gains[1])}.get(
            tally.level, ("dense", 1.0)
        )
        standing.end_step(Choice(branch, tally.level, gain), *gains)
        if self.throughput == "link":
            standing.book(tally.dense_bytes / tally.wire_bytes, rules)
        events = []
        if standing.at_window(rules):
            standing.close_window()
            if self._has_turn(standing, context):
                events = standing.decide(rules)
        following = Tally()
        if self.decide == "step":
            following.level = standing.choose(*standing.gains, epsilon).level
        decision = Decision(
            branch=branch,
            factor=self._factor(tally.level, tally.dense_bytes, tally.wire_bytes) or 1.0,
            minimum=self._factor(ends[0], tally.dense_probed, tally.wire_minimum),
            candidate=self._factor(ends[1], tally.dense_probed, tally.wire_candidate),
            gain_minimum=gains[0],
            gain_candidate=gains[1],
            gain=_fidelity(tally.lost_sent, tally.norm2) if tally.probed else None,
            throughput=throughput,
            event="+".join(events) or None,
            offers=self._offers(tally, gains),
            reason=(
                f"of {self._at(ends[1])!r} {gains[1]:.3f} arrives, of {self._at(ends[0])!r} {gains[0]:.3f}; "
                f"{epsilon:g} must, and then {self._at(following.level)!r} is sent"
                if following.level >= 0
                else f"{epsilon:g} of each message must arrive"
            ),
        )
        whole, real = standing.tensors()
        return {WHOLE: whole, REAL: real, TALLY: following.tensor()}, [decision]

    def evaluation(self, mode: str, state: State) -> Codec:
        """Return the codec of the level at hand."""
        standing, tally = self._read(state)
        return self._at(standing.minimum if tally.level < 0 else tally.level)

    def memory_values(self, message: tuple[int, ...], num_microbatches: int, num_samples: int) -> int:
        if self.memory is None:
            return 0
        return ErrorFeedback(self.codec, key=self.memory).memory_values(message, num_microbatches, num_samples)

    def _at(self, level: int) -> Codec:
        return (*self.levels, Identity())[level]

    def _epsilon(self, context: Context) -> float:
        if self.budget is None:
            return EPSILON[context.direction] if self.epsilon is None else self.epsilon
        if context.floor is None:  # nothing was seen yet: equal shares
            return float(self.budget ** (1 / max(1, context.num_stages - 1)))
        return context.floor

    def _offers(self, tally: Tally, gains: tuple[float, float]) -> tuple[Offer, ...]:
        """Return what minimum and candidate would do to this link's messages."""
        if self.budget is None or not tally.probed:
            return ()
        wires = tally.wire_minimum, tally.wire_candidate
        return tuple(Offer(min(1.0, gain), tally.dense_probed / wire) for gain, wire in zip(gains, wires, strict=True))

    def _rules(self, context: Context) -> Rules:
        return Rules(
            epsilon=self._epsilon(context),
            omega=self.omega,
            window=self.window,
            alpha=self.ewma_alpha,
            promote=self.promote,
            reopen_every=self.reopen_every,
        )

    def _read(self, state: State) -> tuple[Standing, Tally]:
        known = WHOLE in state
        standing = Standing.from_tensors(state[WHOLE], state[REAL]) if known else Standing.fresh(len(self.levels))
        return standing, Tally(*state[TALLY].tolist()) if TALLY in state else Tally()

    def _has_turn(self, standing: Standing, context: Context) -> bool:
        """Return whether this link may move at the end of this window."""
        if self.simultaneous:
            return True
        window, place = standing.steps // self.window - 1, 2 * context.boundary + (context.direction == "backward")
        return window % (2 * max(1, context.num_stages - 1)) == place

    def _factor(self, level: int, dense_bytes: float, wire_bytes: float) -> float | None:
        """Return the factor of a level: of values where it keeps some of them, else of bytes, where they are known."""
        codec = self._at(level)
        if isinstance(codec, (EstimatedTopK, RandomK, TopK)):
            return 1 / codec.density
        return dense_bytes / wire_bytes if wire_bytes else None


@dataclass
class Tally:
    """What is known of the step at hand; sums over messages, those of codecs over the ones that were probed."""

    level: int = -1  # at which messages are sent, -1 until that is chosen
    messages: float = 0
    probed: float = 0
    norm2: float = 0.0
    lost_minimum: float = 0.0
    lost_candidate: float = 0.0
    lost_sent: float = 0.0
    wire_minimum: float = 0
    wire_candidate: float = 0
    dense_probed: float = 0
    wire_bytes: float = 0
    dense_bytes: float = 0

    def __post_init__(self) -> None:
        self.level = int(self.level)

    def tensor(self) -> Tensor:
        """Return all of it, float64."""
        return torch.tensor([float(getattr(self, field.name)) for field in fields(self)], dtype=torch.float64)

    def probe(self, norm2: float, lost: list[float], wire_bytes: list[int], dense_bytes: int) -> None:
        """Add a message on which minimum and candidate were tried."""
        self.probed += 1
        self.norm2 += norm2
        self.lost_minimum += lost[0]
        self.lost_candidate += lost[1]
        self.wire_minimum += wire_bytes[0]
        self.wire_candidate += wire_bytes[1]
        self.dense_probed += dense_bytes

    def send(self, wire_bytes: int, dense_bytes: int) -> None:
        """Add a message that was sent."""
        self.messages += 1
        self.wire_bytes += wire_bytes
        self.dense_bytes += dense_bytes


def _fidelity(lost: float, norm2: float) -> float:
    """Return the fidelity where so much of a squared norm is lost; of nothing it is 1."""
    return 1 - lost / norm2 if norm2 > 0 else 1.0
