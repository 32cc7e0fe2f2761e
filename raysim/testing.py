"""Check the laws for your own codecs, compressors, replica methods and schedules; call these from a test.

>>> from raysim.codecs import Quantize
>>> check_codec(Quantize(4))
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raysim.codecs import CODECS, Codec, NonFiniteError, Packet
from raysim.codecs.message import CodecTable, Entry
from raysim.compressors import Compressor, Context
from raysim.compressors import parse as parse_compressor
from raysim.notation import parse_notation
from raysim.pipeline.groups import average_together
from raysim.replication import parse_replica_method
from raysim.replication.method import ReplicaContext, ReplicaMethod
from raysim.schedules.actions import check_rows
from raysim.schedules.families import Schedule, parse_schedule

__all__ = ["check_codec", "check_compressor", "check_replica_method", "check_schedule", "example_tensors"]

_KEY = 0x5EED


def example_tensors() -> dict[str, Tensor]:
    """Return example tensors of links, including empty, constant, huge, tiny and strided ones, which break many codecs."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    return {
        "zeros": torch.zeros(3, 7),
        "one element": torch.tensor([[-2.5]]),
        "empty": torch.empty(0, 5),
        "empty rows": torch.empty(4, 0),
        "constant": torch.full((2, 3, 5), 0.1),
        "outlier": torch.cat([normal(3, 40), torch.full((3, 1), 1e4)], dim=1),
        "tiny": normal(2, 50) * 1e-7,
        "after ReLU": normal(4, 6, 5, 5).relu(),
        "normal": normal(5, 37),
        "long": normal(2, 5000),
        "images": normal(3, 8, 4, 4),
        "tokens": normal(2, 9, 16),
        "ties": normal(4, 40).round(),
        "strided": normal(12, 10).T[::2],
        "bfloat16": normal(3, 50).bfloat16(),
        "float16": normal(3, 50).half(),
        "float64": normal(3, 50).double(),
        "huge": torch.tensor([[3e38, -3e38, 1.0, 0.0]]),
        "denormals": torch.tensor([[1e-45, -1e-45, 3e-42, 0.0]]),
        "negative zero": torch.tensor([[-0.0, 0.0, 1.0, -1.0]]),
    }


def check_codec(codec: Codec, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Raise AssertionError, naming the law and the tensor, if a codec breaks a law required by links.

    `tensors`: inputs that the codec can encode; by default `example_tensors()`.
    """
    _is_written_and_pickled(codec, lambda text: parse_notation(text, CODECS))
    for name, x in (example_tensors() if tensors is None else tensors).items():
        for law in (_keeps_shape, _is_pure, _survives_the_way, _fits_a_message, _needs_its_arrays):
            with _subject(f"{codec!r} on the tensor {name!r}"):
                law(codec, x)
    _refuses_what_is_not_finite(codec)
    _refuses_integers(codec)
    _draws_by_its_key(codec)


def check_compressor(compressor: Compressor, direction: str = "forward", steps: int = 3) -> None:
    """Raise AssertionError, naming the law, if a compressor breaks a law required by links.

    In each of `steps` steps, sends messages of two microbatches from one end to the other, as a link does.
    """
    written = repr(compressor)
    _is_written_and_pickled(compressor, parse_compressor)
    sender: dict[int, Tensor] = {}
    receiver: dict[int, Tensor] = {}
    draw = torch.Generator().manual_seed(0)
    for step in range(steps):
        for microbatch in range(2):
            x = torch.randn(4, 6, 8, generator=draw)
            before, held = _bits(x), _content(sender)
            ids = tuple(range(4 * microbatch, 4 * microbatch + 4))
            context = Context(direction, step, step, microbatch, ids, key=_KEY + step)
            packet, changes = compressor.encode(x, sender, context)
            again, _ = compressor.encode(x, sender, context)
            _require(_bits(x) == before, f"{written} changes the tensor that it encodes")
            _require(_content(sender) == held, f"{written} changes the state that it is given")
            _require(_same_packet(packet, again), f"{written} encodes the same tensor in two ways")
            arrived = compressor.table.unpack(compressor.table.pack(packet), x.numel())
            y, received = compressor.decode(arrived, receiver, context)
            _require(y.shape == x.shape and y.dtype == x.dtype, f"{written} returns another shape or dtype")
            _require(bool(torch.isfinite(y).all()), f"{written} returns values that are not finite")
            compressor.commit(sender, changes)
            compressor.commit(receiver, received)
            shared = _storages(y) & _storages(*received.values())
            _require(not shared, f"{written} returns its memory, to which the receiver's layers may write")
            if compressor.two_ended:
                _require(_content(sender) == _content(receiver), f"{written} lets the memories of its two ends part")


def check_replica_method(method: ReplicaMethod, num_replicas: int = 3, steps: int = 4) -> None:
    """Raise AssertionError, naming the law, if a replica method breaks a law required by gradient averaging.

    Averages the gradients of three parameters over `num_replicas` replicas in `steps` steps. Only methods that exchange gradients are
    checked, not local steps (`after_update`).
    """
    written = repr(method)
    _is_written_and_pickled(method, parse_replica_method)
    _require(not method.after_update, f"{written} exchanges parameters, and only methods of gradients are checked")
    draw = torch.Generator().manual_seed(0)
    shapes = {"weight": (24, 30), "silent.weight": (16, 20), "bias": (24,)}
    parameters = {name: torch.randn(*shape, generator=draw) for name, shape in shapes.items()}
    memories = [method.begin(parameters) for _ in range(num_replicas)]
    for step in range(steps):
        gradients = [
            {name: torch.randn(*shape, generator=draw) * (name != "silent.weight") for name, shape in shapes.items()}
            for _ in range(num_replicas)
        ]
        facts: dict[str, Any] = {"learning_rate": 0.1, "momentum": 0.9, "step_s": 0.1, "parameters": parameters}
        contexts = [
            ReplicaContext(i, num_replicas, step, step // 2, 2, _KEY, extra=extra, **facts)
            for i, extra in enumerate(gradients)
        ]
        before, held = [*map(_content, gradients)], [*map(_content, memories)]
        with _subject(written):
            results, sent_bytes = average_together(method, gradients, memories, contexts)
            again, sent_again = average_together(method, gradients, memories, contexts)
        _require([*map(_content, gradients)] == before, f"{written} changes the gradients that it is given")
        _require([*map(_content, memories)] == held, f"{written} changes the memory that it is given")
        averages = [_content(result.gradients) for result in results]
        repeated = [_content(result.gradients) for result in again]
        _require(averages == repeated, f"{written} averages alike gradients in two ways")
        _require(sent_bytes == sent_again, f"{written} sends alike gradients in two ways")
        for i, result in enumerate(results):
            returned = {name: tuple(x.shape) for name, x in result.gradients.items()}
            _require(returned == shapes, f"{written} returns {returned} for gradients of {shapes}")
            finite = all(bool(torch.isfinite(x).all()) for x in result.gradients.values())
            _require(finite, f"{written} returns gradients that are not finite")
            shared = _storages(*result.gradients.values()) & _storages(*result.memory.values())
            _require(not shared, f"{written} returns its memory, which clipping would overwrite")
            agrees = method.decentralized or averages[i] == averages[0]
            _require(agrees, f"{written} lets replicas step differently")
        memories = [result.memory for result in results]
    gradients[-1]["weight"][3, 4] = math.nan
    try:
        average_together(method, gradients, memories, contexts)
    except NonFiniteError:
        return
    raise AssertionError(f"{written} averages a gradient with nan, and must raise NonFiniteError")


def check_schedule(schedule: Schedule, max_stages: int = 6, max_microbatches: int = 8) -> None:
    """Raise AssertionError if a schedule omits or repeats an action, or deadlocks, at any size up to the given ones."""
    _require(parse_schedule(repr(schedule)) == schedule, f"{schedule!r} is not what its notation says")
    for num_stages in range(1, max_stages + 1):
        for num_microbatches in range(1, max_microbatches + 1):
            try:
                rows = schedule.rows(num_stages, num_microbatches)
            except ValueError:
                continue  # a schedule may reject a size
            size = f"{schedule!r} of {num_stages} stages and {num_microbatches} microbatches"
            try:
                check_rows(rows)
            except ValueError as error:
                raise AssertionError(f"{size}: {error}") from None
            forwards = {(action.stage, action.microbatch) for row in rows for action in row if action.op == "F"}
            _require(len(forwards) == num_stages * num_microbatches, f"{size}: a stage or a microbatch is missing")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


@contextmanager
def _subject(name: str) -> Iterator[None]:
    """Turn any error in the block into an AssertionError that starts with the subject's name."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}.") from None
    except Exception as error:
        raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error


def _is_written_and_pickled(subject: object, read: Callable[[str], object]) -> None:
    _require(read(repr(subject)) == subject, f"{subject!r} is not what its notation says")
    pickled = pickle.loads(pickle.dumps(subject))
    _require(pickled == subject, f"{subject!r} does not survive pickling, as on the way to a worker")


def _keeps_shape(codec: Codec, x: Tensor) -> None:
    y = codec.encode(x, _KEY).decode()
    _require(y.shape == x.shape, f"the shape {tuple(x.shape)} becomes {tuple(y.shape)}")
    _require(y.dtype == x.dtype, f"the type {x.dtype} becomes {y.dtype}")
    _require(bool(torch.isfinite(y).all()), "decoded values are not finite")


def _is_pure(codec: Codec, x: Tensor) -> None:
    before = x.clone()
    packet = codec.encode(x, _KEY)
    _require(_bits(x) == _bits(before), "encoding changes the tensor")
    _require(_same_packet(packet, codec.encode(x, _KEY)), "two packets of the same tensor and key differ")
    _require(packet.dense_bytes == x.numel() * x.dtype.itemsize, "dense bytes are not those of the tensor")


def _survives_the_way(codec: Codec, x: Tensor) -> None:
    packet = codec.encode(x, _KEY)
    expected = _bits(packet.decode())
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(packet, protocol=5, buffer_callback=buffers.append)
    arrived = pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers])  # read-only, as from Ray's store
    _require(_same_packet(packet, arrived), "a packet does not survive pickling")
    _require(_bits(arrived.decode()) == expected, "a packet in read-only memory is decoded to something else")


def _fits_a_message(codec: Codec, x: Tensor) -> None:
    packet = codec.encode(x, _KEY)
    unknown = sorted(packet.arrays.keys() - set(codec.array_names()))
    _require(not unknown, f"a packet holds arrays that `array_names` leaves out: {', '.join(unknown)}")
    table = CodecTable([Entry.of(codec)])
    arrived = table.unpack(table.pack(packet), max_values=1 << 32)
    _require(_bits(arrived.decode()) == _bits(packet.decode()), "a message is decoded to something else")


def _needs_its_arrays(codec: Codec, x: Tensor) -> None:
    packet = codec.encode(x, _KEY)
    for name, array in packet.arrays.items():
        rest = {other: value for other, value in packet.arrays.items() if other != name}
        shorter = rest | {name: array.reshape(-1).view(np.uint8)[:-1]}
        for arrays in (rest, shorter) if array.size else (rest,):
            try:
                packet._replace(arrays=arrays).decode()
            except ValueError:
                continue
            except Exception as error:
                raise AssertionError(
                    f"a packet without all of `{name}` raises {type(error).__name__}, not ValueError"
                ) from None
            raise AssertionError(f"a packet without all of `{name}` is decoded, not refused with ValueError")


def _refuses_what_is_not_finite(codec: Codec) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for bad in (math.nan, -math.nan, math.inf, -math.inf):
            for position in ((0, 0), (1, 3), (3, 255)):
                x = torch.linspace(-1, 1, 1024).view(4, 256).to(dtype)
                x[position] = bad
                try:
                    codec.encode(x, _KEY)
                except NonFiniteError:
                    continue
                raise AssertionError(f"{codec!r} encodes a {dtype} tensor with {bad}, and must raise NonFiniteError")


def _refuses_integers(codec: Codec) -> None:
    for dtype in (torch.int64, torch.bool, torch.complex64):
        try:
            codec.encode(torch.ones(2, 64).to(dtype), _KEY)
        except ValueError as error:
            if str(error).startswith("A link carries"):
                continue
        raise AssertionError(f"{codec!r} encodes {dtype}, and must refuse it as `Codec.encode` does")


def _draws_by_its_key(codec: Codec) -> None:
    x = torch.randn(4, 50, 60, generator=torch.Generator().manual_seed(1))
    if not codec.random:
        _require(
            _same_packet(codec.encode(x), codec.encode(x, _KEY)), f"{codec!r} is not `random`, but depends on the key"
        )
        return
    try:
        codec.encode(x)
    except ValueError:
        _require(
            not _same_packet(codec.encode(x, 1), codec.encode(x, 2)), f"{codec!r} is `random`, but ignores the key"
        )
        return
    raise AssertionError(f"{codec!r} is `random`, and must refuse to encode without a key")


def _bits(x: Tensor) -> bytes:
    """Return the bytes of a tensor, so that negative zero differs from zero."""
    return x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""


def _content(tensors: Mapping[Any, Tensor]) -> dict[Any, bytes]:
    return {key: _bits(x) for key, x in tensors.items()}


def _storages(*tensors: Tensor) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in tensors}


def _same_packet(a: Packet, b: Packet) -> bool:
    same = (a.codec, a.shape, a.dtype, a.arrays.keys()) == (b.codec, b.shape, b.dtype, b.arrays.keys())
    return same and all(a.arrays[name].tobytes() == b.arrays[name].tobytes() for name in a.arrays)
