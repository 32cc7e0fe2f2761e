"""Options of methods, the plug-in's too: each is varied in the tests, and has an effect."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import codec_variants
import compressor_variants
import contrib_variants
import pytest
import replica_variants
import schedule_variants
import weight_variants
from compressor_variants import Pair, bits_of, messages
from replica_variants import LOCAL, Apart, Team

from raysim.codecs import CODECS, Codec
from raysim.compressors import COMPRESSORS, Compressor, StepFacts
from raysim.compressors import parse as parse_compressor
from raysim.notation import Notation, parse_notation
from raysim.replication import METHODS, parse_replica_method
from raysim.replication.method import ReplicaMethod
from raysim.schedules.families import SCHEDULES, Custom, Schedule, parse_schedule
from raysim.schedules.weights import WeightPolicy, parse_weights

TENSORS = ("outlier", "normal", "images", "tokens", "heavy tail", "long")
STEPS = 8


def of_codec(codec: Codec) -> Iterator[Any]:
    """Yield the packets and the decoded tensors of several inputs."""
    for name in TENSORS:
        x = codec_variants.LAW_TENSORS[name]
        packet = codec.encode(x, codec_variants.KEY)
        yield [(key, array.tobytes()) for key, array in packet.arrays.items()]
        yield bits_of(packet.decode())


def of_compressor(method: Compressor) -> Iterator[Any]:
    """Yield the messages, the decisions and the memory of a link, step by step."""
    pair = Pair(method)
    for step in range(STEPS):
        for x, context in messages(step, step + 1):
            packet, y = pair.send(x, context)
            yield repr(packet.codec), [(key, array.tobytes()) for key, array in packet.arrays.items()], bits_of(y)
        account = pair.sender.end_step(StepFacts(step_s=1 / (1 + step), sensitivity=1.0, batch_size=4))
        pair.receiver.end_step()
        yield account.decisions
        yield [(repr(key), bits_of(row)) for key, row in pair.sender.state.items()]


def of_replica_method(method: ReplicaMethod) -> Iterator[Any]:
    """Yield the averages, the decisions, the memories and the bytes of three replicas, step by step."""
    if method.after_update:
        apart = Apart(repr(method), num_replicas=3)
        for step in range(STEPS):
            for result in apart.step(step):
                yield [(name, bits_of(x)) for name, x in {**result.parameters, **result.memory}.items()]
            yield apart.array_bytes
        return
    team = Team(method, num_replicas=3)
    for step in range(STEPS):
        for result in team.step(step, learning_rate=0.1 / (1 + step), step_s=1 / (1 + step)):
            yield [(name, bits_of(x)) for name, x in {**result.gradients, **result.parameters}.items()]
            yield result.decisions, result.with_momentum
            yield [(name, bits_of(x)) for name, x in result.memory.items()]
        yield team.array_bytes


def of_schedule(schedule: Schedule) -> Iterator[Any]:
    """Yield the rows of several sizes."""
    for size in ((4, 4), (4, 8), (6, 12)):
        try:
            yield schedule.rows(*size)
        except ValueError as error:
            yield str(error)


def of_weights(policy: WeightPolicy) -> Iterator[Any]:
    """Yield the weight of a stage whose loss is a parabola, step by step."""
    yield from weight_variants.parabola(repr(policy), 0, 3)


MORE = {  # settings whose laws hold by other settings of the same class, but whose options need a value
    "codec": [
        "EstimatedTopK(0.2, 'sampled')",
        "EstimatedTopK(0.1, 'sampled', values=Quantize(4))",
        "ATOMO(3.0)",
        "OneBit(per='block', block=100)",
    ],
    "compressor": [],
    "replica": [
        "Accordion(TopK(0.6), TopK(0.05), interval=1)",
        "Accordion(TopK(0.5), TopK(0.02), interval=1, min_values=1)",
        "Accordion(TopK(0.5), TopK(0.05), interval=1, decay=1.0)",
        "DGC(0.05, min_values=1, values=Quantize(4))",
        "EF21(TopK(0.1), min_values=1, warmup=2)",
        "GraVAC(2.0, 100.0, epsilon=0.6, window=1, omega=1.0)",
        "SparseLoCo(2, rate=0.5, min_values=1)",
        "RedSync(0.1, min_values=1, warmup=2)",
    ],
    "schedule": [],
    "weights": ["PipeMare(4, decay=0.5)"],
}
Outcome = Callable[[Any], Iterator[Any]]
KINDS: dict[str, tuple[dict[str, type[Any]], list[Any], Outcome]] = {
    "codec": (
        {**CODECS, **{cls.name(): cls for cls in contrib_variants.CODECS}},
        [v.codec for v in (*codec_variants.VARIANTS, *contrib_variants.VARIANTS)],
        of_codec,
    ),
    "compressor": (COMPRESSORS, [v.method for v in compressor_variants.VARIANTS], of_compressor),
    "replica": (
        {**METHODS, **{cls.name(): cls for cls in contrib_variants.METHODS}},
        [
            *(v.method for v in (*replica_variants.VARIANTS, *contrib_variants.AVERAGES)),
            *map(parse_replica_method, (*LOCAL, *contrib_variants.LOCAL)),
        ],
        of_replica_method,
    ),
    "schedule": (SCHEDULES, [v.schedule for v in schedule_variants.VARIANTS], of_schedule),
    "weights": (weight_variants.KNOWN, [parse_weights(text) for text in weight_variants.VARIANTS], of_weights),
}
PARSERS: dict[str, Callable[[str], Any]] = {
    "codec": lambda text: parse_notation(text, CODECS),
    "compressor": parse_compressor,
    "replica": parse_replica_method,
    "schedule": parse_schedule,
    "weights": parse_weights,
}
OPTIONS = [
    (kind, cls, field.name)
    for kind, (known, _, _) in KINDS.items()
    for cls in known.values()
    for field in dataclasses.fields(cls)
    if (cls, field.name) != (Custom, "path")  # its file's rows are compared in tests of schedules
]


def within(methods: list[Any], cls: type[Notation]) -> list[Any]:
    """Return the methods of a class, those among the settings of others included."""
    found = []
    for method in methods:
        found += [method] if type(method) is cls else []
        settings = [getattr(method, field.name) for field in dataclasses.fields(method)]
        found += within([value for value in settings if isinstance(value, Notation)], cls)
    return list(dict.fromkeys(found))


def values_of(methods: list[Any], cls: type[Any], name: str) -> list[Any]:
    """Return the values that an option takes among methods, and its default."""
    (field,) = (field for field in dataclasses.fields(cls) if field.name == name)
    defaults = [] if field.default is dataclasses.MISSING else [field.default]
    given = [7, 1500] if name == "min_values" else []
    return list(dict.fromkeys([*defaults, *given, *(getattr(method, name) for method in methods)]))


def differ(one: Iterator[Any], other: Iterator[Any]) -> bool:
    return any(a != b for a, b in zip(one, other, strict=False))


@pytest.mark.parametrize(
    ("kind", "cls", "name"), OPTIONS, ids=[f"{kind}-{cls.name()}-{name}" for kind, cls, name in OPTIONS]
)
def test_every_option_has_an_effect(kind: str, cls: type[Any], name: str) -> None:
    _, everything, outcome = KINDS[kind]
    methods = within([*everything, *map(PARSERS[kind], MORE[kind])], cls)
    values = values_of(methods, cls, name)
    assert len(values) > 1, f"the variants give `{name}` of {cls.name()} one value alone: {values}"
    for method in methods:
        for value in values:
            if value == getattr(method, name):
                continue
            try:
                changed = dataclasses.replace(method, **{name: value})
            except ValueError:  # excluded by another option of this variant
                continue
            if differ(outcome(method), outcome(changed)):
                return
    pytest.fail(f"`{name}` of {cls.name()} changes nothing, whatever its value among {values}")
