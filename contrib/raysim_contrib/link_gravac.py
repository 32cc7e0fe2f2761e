"""GraVAC on the links of a pipeline (ours): each link chooses from a ladder of codecs by the fidelity of its messages."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import ClassVar

from raysim.codecs import Codec, Identity, LowRank, Packet, Quantize, TopK
from raysim.codecs.message import Entry, wire_bytes
from raysim.compressors.compressor import Compressor, Context, Decision, State, StepFacts
from raysim.compressors.keyed import KEYS, recall_residual, remember_residual
from raysim.compressors.memory import ErrorFeedback
from raysim.notation import check_choice, check_integer, check_real
from raysim.on_demand import torch
from raysim.replication.controller import POLICIES, PROMOTE, Choice, Controller, Rules, candidate_factors, check_factors

WHOLE, REAL, TALLY = -1, -2, -3  # keys of the controller's state; keys of messages are at least 0
_LADDERS = {
    "bits": tuple(Quantize(bits) for bits in (8, 6, 4, 3, 2)),
    "rank": tuple(LowRank(rank) for rank in (64, 32, 16, 8, 4)),
}
_EPSILON = {"forward": 0.7, "backward": 0.9}  # gradients need milder compression


@dataclass(frozen=True, repr=False)
class LinkGraVAC(Compressor):
    """Sends the stronger of two codecs whose fidelity reaches `epsilon`, or dense if none does (ours, after Tyagi and Swany
    2023, 2305.12201).

    Fidelity is 1 - ||y - C(y)||^2/||y||^2 over the messages of a step, with y the codec's input. Its moving average decides for the
    next step. At the end of every window, each link's controller may move to other codecs. Links decide independently.

    Args:
        cf_min: First factor of the ladder "topk".
        cf_max: Last factor of the ladder "topk".
        epsilon: Least fidelity of a used codec; by default 0.7 forward and 0.9 backward.
        omega: Relative difference below which two fidelities, or two speeds, count as equal.
        window: Steps between two decisions.
        policy: Factors of the ladder "topk", as in `GraVAC`.
        ladder: Codecs from mild to strong: "topk" (per sample), "bits" (Quantize with 8 to 2 bits), "rank" (LowRank with rank 64 to
            4), or a list of codecs.
        promote: As in `GraVAC`.
        memory: Key of a residual, as in `ErrorFeedback`; by default no residual is kept.
        throughput: Speed of a level: "step", samples per second by the clock, or "link", dense bytes over wire bytes.
        probe_every: Both codecs are tried on every `probe_every`-th message of a step.
        ewma_alpha: Weight of a step in the moving averages.

    Use: A link whose best strength is unknown or changes during training. Needs a clock.

    >>> LinkGraVAC(ladder="bits").levels
    (Quantize(8), Quantize(6), Quantize(4), Quantize(3), Quantize(2))
    """

    notation: ClassVar[str] = "GraVAC"
    variants: ClassVar[tuple[str, ...]] = ("GraVAC(ladder='bits')",)
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
    probe_every: int = 1
    ewma_alpha: float = 0.1

    def __post_init__(self) -> None:
        low, high = check_factors(self.cf_min, self.cf_max)
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
        if self.memory is not None:
            check_choice("memory", self.memory, KEYS)
        check_choice("policy", self.policy, POLICIES)
        check_choice("promote", self.promote, PROMOTE)
        check_choice("throughput", self.throughput, ["step", "link"])
        self._check_ladder()

    def _check_ladder(self) -> None:
        if isinstance(self.ladder, str):
            check_choice("ladder", self.ladder, ["topk", *_LADDERS])
        elif (
            not isinstance(self.ladder, (list, tuple))
            or not self.ladder
            or not all(isinstance(codec, Codec) for codec in self.ladder)
        ):
            raise ValueError(
                f"`ladder` must be topk, {', '.join(_LADDERS)}, or codecs from mild to strong, but got {self.ladder!r}."
            )
        else:
            self._coerce(ladder=tuple(self.ladder))
        if self.ladder != "topk":
            for field in fields(self):
                if field.name in ("cf_min", "cf_max", "policy") and getattr(self, field.name) != field.default:
                    raise ValueError(
                        f"`{field.name}` has an effect only with `ladder='topk'`, but got {self.ladder!r}."
                    )
        if self.memory is not None:
            for codec in self.levels:
                ErrorFeedback(codec, key=self.memory)  # rejects codecs that diverge with a residual

    @property
    def adds_residual(self) -> bool:  # type: ignore[override]
        return self.memory is not None

    @property
    def levels(self) -> tuple[Codec, ...]:
        """The codecs of the ladder, from mild to strong."""
        if self.ladder == "topk":
            return tuple(TopK(1 / factor) for factor in candidate_factors(self.cf_min, self.cf_max, self.policy))
        return _LADDERS[self.ladder] if isinstance(self.ladder, str) else self.ladder

    @property
    def codec(self) -> Codec:  # type: ignore[override]
        """The mildest codec."""
        return self.levels[0]

    def entries(self) -> tuple[Entry, ...]:
        return tuple(Entry.of(codec) for codec in self.levels)

    def encode(self, x: torch.Tensor, state: State, context: Context) -> tuple[Packet, State]:
        controller, tally = self._read(state)
        fed = x.detach()
        if self.memory is not None:
            fed = recall_residual(state, self.memory, context, fed) + fed
        message = fed.to(x.dtype)
        tried: dict[int, Packet] = {}
        undecided = tally.level < 0
        if undecided or tally.messages % self.probe_every == 0:
            for level in {controller.minimum, controller.candidate}:
                tried[level] = self._at(level).encode(message, context.key)
            exact = message.double()
            norm2 = float(exact.square().sum())
            lost = {n: float((exact - packet.decode(x.device).double()).square().sum()) for n, packet in tried.items()}
            ends = controller.minimum, controller.candidate
            if undecided:
                fidelities = [_fidelity(lost[level], norm2) for level in ends]
                tally.level = controller.choose(fidelities[0], fidelities[1], self._epsilon(context)).level
            sizes = [wire_bytes(self.table.pack(tried[level])) for level in ends]
            tally.probe(norm2, [lost[level] for level in ends], sizes, x.nbytes)
            tally.lost_sent += lost.get(tally.level, 0.0)
        packet = tried[tally.level] if tally.level in tried else self._at(tally.level).encode(message, context.key)
        tally.send(wire_bytes(self.table.pack(packet)), x.nbytes)
        changes = {TALLY: tally.tensor()}
        if self.memory is not None:
            changes |= remember_residual(self.memory, context, fed - packet.decode(x.device))
        return packet, changes

    def end_step(self, state: State, context: Context, facts: StepFacts) -> tuple[State, list[Decision]]:
        controller, tally = self._read(state)
        epsilon = self._epsilon(context)
        rules = Rules(epsilon, self.omega, self.window, self.ewma_alpha, self.promote)
        throughput = facts.batch_size / facts.step_s if facts.step_s else None
        if self.throughput == "step" and throughput is not None and controller.used >= 0:
            controller.book(throughput)  # of the previous step
        ends, gains = (controller.minimum, controller.candidate), (controller.agreed[0], controller.agreed[1])
        if tally.probed:
            raw = [_fidelity(lost, tally.norm2) for lost in (tally.lost_minimum, tally.lost_candidate)]
            gains = controller.observe(raw[0], raw[1], rules.alpha)
        branch, gain = {ends[0]: ("minimum", gains[0]), ends[1]: ("candidate", gains[1])}.get(
            tally.level, ("dense", 1.0)
        )
        controller.end_step(Choice(branch, tally.level, gain), *gains)
        if self.throughput == "link":
            controller.book(tally.dense_bytes / tally.wire_bytes)
        events = []
        if controller.at_window(rules):
            controller.close_window()
            events = controller.decide(rules)
        following = _Tally(controller.choose(*controller.gains, epsilon).level)
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
            reason=(
                f"of {self._at(ends[1])!r} {gains[1]:.3f} arrives, of {self._at(ends[0])!r} {gains[0]:.3f}; "
                f"{epsilon:g} must, and then {self._at(following.level)!r} is sent"
            ),
        )
        whole, real = controller.tensors()
        return {WHOLE: whole, REAL: real, TALLY: following.tensor()}, [decision]

    def evaluation(self, mode: str, state: State) -> Codec:
        """Return the codec of the current level."""
        controller, tally = self._read(state)
        return self._at(controller.minimum if tally.level < 0 else tally.level)

    def memory_values(self, message: tuple[int, ...], num_microbatches: int, num_samples: int) -> int:
        if self.memory is None:
            return 0
        return ErrorFeedback(self.codec, key=self.memory).memory_values(message, num_microbatches, num_samples)

    def _at(self, level: int) -> Codec:
        return (*self.levels, Identity())[level]

    def _epsilon(self, context: Context) -> float:
        return _EPSILON[context.direction] if self.epsilon is None else self.epsilon

    def _read(self, state: State) -> tuple[Controller, _Tally]:
        known = WHOLE in state
        controller = Controller.from_tensors(state[WHOLE], state[REAL]) if known else Controller.new(len(self.levels))
        return controller, _Tally(*state[TALLY].tolist()) if TALLY in state else _Tally()

    def _factor(self, level: int, dense_bytes: float, wire_bytes: float) -> float | None:
        """Return a level's factor: values over values sent for a sparse codec, else bytes over bytes if known."""
        codec = self._at(level)
        if codec.kept_share is not None:
            return 1 / codec.kept_share
        return dense_bytes / wire_bytes if wire_bytes else None


@dataclass
class _Tally:
    """Sums over the messages of the current step; sums for codecs cover the probed messages only."""

    level: int = -1  # level of sent messages, -1 until chosen
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

    def tensor(self) -> torch.Tensor:
        """Return the sums as a float64 tensor."""
        return torch.tensor(astuple(self), dtype=torch.float64)

    def probe(self, norm2: float, lost: list[float], wire_bytes: list[int], dense_bytes: int) -> None:
        """Add a message encoded by both minimum and candidate."""
        self.probed += 1
        self.norm2 += norm2
        self.lost_minimum += lost[0]
        self.lost_candidate += lost[1]
        self.wire_minimum += wire_bytes[0]
        self.wire_candidate += wire_bytes[1]
        self.dense_probed += dense_bytes

    def send(self, wire_bytes: int, dense_bytes: int) -> None:
        """Add a sent message."""
        self.messages += 1
        self.wire_bytes += wire_bytes
        self.dense_bytes += dense_bytes


def _fidelity(lost: float, norm2: float) -> float:
    """Return the fidelity for a loss of `lost` out of the squared norm `norm2`; 1 for a norm of zero."""
    return 1 - lost / norm2 if norm2 > 0 else 1.0
