"""The one list of variants of replica methods, and the gradients over which their laws run.

A method that is in `METHODS` but not here fails a test; what is said of a variant here is what the laws hold it to.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from codec_variants import normal, student

from raysim.codecs.message import CodecTable, wire_bytes
from raysim.pipeline.state import pack_tensors, unpack_tensors
from raysim.replication import parse_replica_method
from raysim.replication.layers import WHOLE, unflatten
from raysim.replication.method import Averaged, Gradients, Memory, ReplicaContext, ReplicaMethod, RoundPackets

SHAPES: dict[str, tuple[int, ...]] = {
    "first.weight": (24, 3, 5, 5),
    "first.bias": (24,),
    "tiny.weight": (7, 9),
    "wide.weight": (8, 150),
    "silent.weight": (40, 30),  # its gradient is zero at all replicas
    "last.bias": (5,),
}
STEPS_PER_EPOCH = 3


@dataclass(frozen=True)
class Variant:
    notation: str
    conserves: bool = False  # what was averaged and what is remembered sum to what was fed
    exact: bool = False  # equals the uncompressed mean: bit for bit where `bitwise`
    bitwise: bool = False
    momentum: float | None = 0.9  # of the optimiser

    @property
    def method(self) -> ReplicaMethod:
        return parse_replica_method(self.notation)


VARIANTS = [
    Variant("Identity", conserves=True, exact=True, bitwise=True),
    Variant("Gathered(Identity, warmup=2)", conserves=True, exact=True, bitwise=True),
    Variant("TopK(0.05)"),
    Variant("TopK(1.0)", exact=True, bitwise=True),
    Variant("ErrorFeedback(TopK(0.05))", conserves=True),
    Variant("ErrorFeedback(TopK(1.0))", conserves=True, exact=True, bitwise=True),
    Variant("Gathered(ErrorFeedback(TopK(0.02, values=Cast('bfloat16'))), scope='stage', warmup=2)", conserves=True),
    Variant("Gathered(ErrorFeedback(TopK(0.1)), min_values=1)", conserves=True),
    Variant("MixedErrorFeedback(TopK(0.05))", conserves=True),
    Variant("RandomK(0.05, unbiased=True)"),
    Variant("ErrorFeedback(RandomK(0.05))", conserves=True),
    Variant("ErrorFeedback(RandomK(1.0))", conserves=True, exact=True, bitwise=True),
    Variant("Gathered(ErrorFeedback(RandomK(0.1)), seeds='separate')", conserves=True),
    Variant("Gathered(ErrorFeedback(RandomK(0.1)), scope='stage')", conserves=True),
    Variant("ErrorFeedback(RandomK(0.1, values=Quantize(4)))", conserves=True),
    Variant("ErrorFeedback(EstimatedTopK(0.05, 'sampled'))", conserves=True),
    Variant("ErrorFeedback(Threshold(0.5))", conserves=True),
    Variant("ErrorFeedback(Sign)", conserves=True),
    Variant("ErrorFeedback(OneBit(per='channel'))", conserves=True),
    Variant("ErrorFeedback(LowRank(2))", conserves=True),
    Variant("QSGD(4)"),
    Variant("TernGrad"),
    Variant("Natural"),
    Variant("Entropy(LowRank(2))"),
    Variant("Accordion(TopK(0.5), TopK(0.05), interval=1)", conserves=True),
    Variant("Accordion(LowRank(3), LowRank(1), eta=0.05, interval=1)", conserves=True),
    Variant("Accordion(RandomK(0.3), RandomK(0.1), interval=1, warmup=1)", conserves=True),
    Variant("DGC(0.05)"),
    Variant("DGC(0.01, select='sampled', ramp=2, clip_norm=5.0, warmup=1)"),
    Variant("DGC(0.05, masking=False, scope='stage')"),
    Variant("DGC(0.05, correction=False)", conserves=True),
    Variant("DGC(1.0)", exact=True, bitwise=True),
    Variant("RedSync(0.05)", conserves=True),
    Variant("RedSync(0.05, search='trimmed')", conserves=True),
    Variant("RedSync(0.05, same_sign=True)", conserves=True),
    Variant("TwoShot(Quantize(8))"),
    Variant("TwoShot(QSGD(4), warmup=1)"),
    Variant("TwoShot(TopK(0.1), min_values=1)"),
    Variant("TwoShot(Identity)", exact=True, bitwise=True),
    Variant("EF21(TopK(0.1))"),
    Variant("EF21(QSGD(4), start='zero')"),
    Variant("EF21(Identity)", exact=True),
    Variant("PowerSGD(2)", conserves=True),
    Variant("PowerSGD(1, error='own', warmup=2)", conserves=True),
    Variant("PowerSGD(2, warm_start=False)", conserves=True),
    Variant("PowerSGD(3, feedback=False)"),
    Variant("PowerSGD(2, alternate=True)", conserves=True),
    Variant("PowerSGD(30, min_compression=0.0)", conserves=True, exact=True),
    Variant("PowerGossip"),
    Variant("PowerGossip(rank=2, iterations=3, warmup=1)"),
    Variant("GraVAC(4.0, 100.0, window=2)", conserves=True),
    Variant("GraVAC(2.0, 50.0, epsilon=0.4, window=1, policy='geometric', select='sampled')", conserves=True),
    Variant("GraVAC(2.0, 50.0, epsilon=0.5, window=2, select='bisect', warmup=2)", conserves=True),
    Variant("GraVAC(1.5, 20.0, epsilon=0.3, window=2, select='random')", conserves=True),
    Variant("GraVAC(4.0, 100.0, window=2, values=Quantize(8))", conserves=True),
    Variant("GraVAC(2.0, 100.0, epsilon=0.6, window=1, promote='passing', ewma_alpha=1.0)", conserves=True),
    Variant("GraVAC(4.0, 100.0, window=2, gain='raw', settle=3)", conserves=True),
    Variant("GraVAC(4.0, 100.0, epsilon=0.5, window=1, gain='folded', settle=1)", conserves=True),
    Variant("GraVAC(1.0, 1.0)", conserves=True, exact=True, bitwise=True),
    Variant("GraVAC(10.0, 1000.0, epsilon=1.0)", conserves=True, exact=True, bitwise=True),
]

# Methods of which each replica steps by itself.
LOCAL = [
    "DiLoCo(2)",
    "DiLoCo(3, rate=0.5, momentum=0.0)",
    "DiLoCo(2, codec=ErrorFeedback(TopK(0.05)))",
    "DiLoCo(1, rate=1.0, momentum=0.5, codec=PowerSGD(2))",
    "DiLoCo(2, codec=Gathered(Quantize(4), warmup=1))",
    "DiLoCo(2, codec=TwoShot(Quantize(8)))",
    "SparseLoCo(2)",
    "SparseLoCo(3, decay=1.0, kept=5, side=8, values=Quantize(4))",
]


def context(replica: int, num_replicas: int, step: int, **changes: Any) -> ReplicaContext:
    fields: dict[str, Any] = {
        "epoch": step // STEPS_PER_EPOCH,
        "steps_per_epoch": STEPS_PER_EPOCH,
        "seed": 3,
        "batch_size": 16,
        "learning_rate": 0.1,
        "momentum": 0.9,
        "step_s": None if step == 0 else 0.5,
    }
    return ReplicaContext(replica, num_replicas, step, **{**fields, **changes})


def gradients(replica: int, step: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> Gradients:
    """Of one replica: the same direction at all, with heavy tails, and its own noise."""
    return copy_of(_gradients(replica, step, tuple(shapes.items())))


@functools.cache
def _gradients(replica: int, step: int, shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> Gradients:
    made = {}
    for place, (name, shape) in enumerate(shapes):
        shared = student(*shape, seed=100 * place + step // 2)
        own = normal(*shape, seed=1000 + 100 * place + 10 * step + replica)
        made[name] = torch.zeros(shape) if name.startswith("silent") else shared + 0.3 * own
    return made


def carried(sent: RoundPackets, table: CodecTable) -> RoundPackets:
    """Return what arrives: packets of messages that were pickled, in memory that nobody may write to."""

    def carry(packets):
        header, *arrays = pickle.loads(pickle.dumps(table.pack_round(packets)))
        for array in arrays:
            array.flags.writeable = False
        return table.unpack_round((header, *arrays), max_values=1 << 20)

    return RoundPackets(carry(sent.everyone), {other: carry(packets) for other, packets in sent.each.items()})


def average(
    method: ReplicaMethod, given: Sequence[Gradients], memories: Sequence[Memory], contexts: Sequence[ReplicaContext]
) -> tuple[list[Averaged], list[int]]:
    """As `average_together`, with packets that travel, and the bytes of their arrays summed one by one."""
    table = method.table(given[0])
    running = [method.average(*arguments) for arguments in zip(given, memories, contexts, strict=True)]
    sent_bytes, received, count = [0] * len(given), None, len(given)
    for _ in range(method.num_rounds(count) + 1):
        sent, results = [], []
        for replica, one in enumerate(running):
            try:
                sent.append(carried(next(one) if received is None else one.send(received[replica]), table))
            except StopIteration as stop:
                results.append(stop.value)
        if results:
            assert len(results) == count
            return results, sent_bytes
        for replica, part in enumerate(sent):
            everyone = sum(array.nbytes for packet in part.everyone.values() for array in packet.arrays.values())
            addressed = [p for to, packets in part.each.items() for p in packets.values() if to != replica]
            assert replica not in part.each
            each = sum(array.nbytes for packet in addressed for array in packet.arrays.values())
            sent_bytes[replica] += (count - 1) * everyone + each
            messages = [part.everyone] * (count - 1) + list(part.each.values())
            headers = sum(wire_bytes(table.pack_round(packets)) for packets in messages if packets)
            headers -= (count - 1) * everyone + each
            assert (headers > 0) == bool((count - 1) * len(part.everyone) + len(addressed))
        received = [[{**part.everyone, **part.each.get(replica, {})} for part in sent] for replica in range(count)]
    raise AssertionError(f"more than {method.num_rounds(count)} rounds")


class Team:
    """The replicas of one stage, with their memories."""

    def __init__(self, method: ReplicaMethod, num_replicas: int = 2, shapes=SHAPES) -> None:
        self.method, self.count, self.shapes = method, num_replicas, shapes
        self.memories: list[Memory] = [{} for _ in range(num_replicas)]
        self.fed = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
        self.sent = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
        self.array_bytes = 0
        self.parameters = [
            {name: normal(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
        ] * num_replicas
        self.before: list[Gradients] = [{name: torch.zeros(shape) for name, shape in shapes.items()}] * num_replicas

    def step(self, step: int, given: list[Gradients] | None = None, **changes: object) -> list[Averaged]:
        given = given or [gradients(replica, step, self.shapes) for replica in range(self.count)]
        # as if the samples were the same in all steps, the last step's gradients are those at the last step's parameters
        contexts = [
            context(
                replica,
                self.count,
                step,
                **{"extra": self.before[replica], "parameters": self.parameters[replica], **changes},
            )
            for replica in range(self.count)
        ]
        results, sent = average(self.method, given, self.memories, contexts)
        self.before = given
        self.parameters = [
            {name: result.parameters.get(name, x) - 0.1 * result.gradients[name] for name, x in own.items()}
            for own, result in zip(self.parameters, results, strict=True)
        ]
        self.memories = [result.memory for result in results]
        self.array_bytes = sum(sent)
        for name in self.shapes:
            self.fed[name] += sum(one[name].double() for one in given) / self.count
            self.sent[name] += results[0].gradients[name].double()
        return results

    def restore(self) -> None:
        """Take over from a checkpoint."""
        self.memories = [unpack_tensors(pack_tensors(memory)) if memory else {} for memory in self.memories]

    def residual(self, name: str) -> torch.Tensor:
        """The mean over replicas of what is remembered of a tensor."""
        total = torch.zeros(self.shapes[name], dtype=torch.float64)
        for memory in self.memories:
            if f"residual/{WHOLE}" in memory and not self.method.exempts(self.shapes[name]):  # type: ignore[attr-defined]
                rows = {one: torch.zeros(shape) for one, shape in self.method.compressed_shapes(self.shapes).items()}  # type: ignore[attr-defined]
                memory = unflatten({WHOLE: memory[f"residual/{WHOLE}"]}, rows)
                total += memory[name].double()
            else:  # of a method within another, under its prefix
                held = [x for key, x in memory.items() if key.endswith(f"residual/{name}")]
                total += sum(x.double().view(self.shapes[name]) for x in held)
        return total / self.count


class Apart:
    """The replicas of one stage, each of which steps by its own gradient."""

    def __init__(self, notation: str, num_replicas: int = 2, shapes=SHAPES) -> None:
        self.method, self.count, self.shapes = parse_replica_method(notation), num_replicas, shapes
        start = {name: normal(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
        self.parameters: list[Gradients] = [copy_of(start) for _ in range(num_replicas)]
        self.memories: list[Memory] = [self.method.begin(own) for own in self.parameters]
        self.array_bytes: list[int] = []

    def step(self, step: int, given: list[Gradients] | None = None, rate: float = 0.125) -> list[Averaged]:
        given = given or [gradients(replica, step, self.shapes) for replica in range(self.count)]
        stepped = [
            {name: x - rate * own[name] for name, x in held.items()}
            for held, own in zip(self.parameters, given, strict=True)
        ]
        contexts = [
            context(replica, self.count, step, parameters=stepped[replica], learning_rate=rate)
            for replica in range(self.count)
        ]
        before = [copy_of(one) for one in (*stepped, *self.memories)]
        results, self.array_bytes = average(self.method, stepped, self.memories, contexts)
        assert all(same_tensors(*pair) for pair in zip((*stepped, *self.memories), before, strict=True))
        self.parameters = [{**own, **result.parameters} for own, result in zip(stepped, results, strict=True)]
        self.memories = [result.memory for result in results]
        return results

    def restore(self) -> None:
        """Take over from a checkpoint."""
        self.memories = [unpack_tensors(pack_tensors(memory)) for memory in self.memories]


def dense_mean(given: Sequence[Gradients]) -> Gradients:
    means = {}
    for name in given[0]:
        total = torch.zeros_like(given[0][name])
        for one in given:
            total += one[name]
        means[name] = total / len(given)
    return means


def same_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """The same names in any order, bit for bit."""
    if a.keys() != b.keys():
        return False
    return all(
        a[name].dtype == b[name].dtype
        and a[name].shape == b[name].shape
        and a[name].contiguous().view(-1).view(torch.uint8).equal(b[name].contiguous().view(-1).view(torch.uint8))
        for name in a
    )


def copy_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in tensors.items()}
