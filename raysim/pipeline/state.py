"""The state of compressors and workers as named tensors, and its bytes in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from raysim.compressors import State
from raysim.notation import InputError


class CheckpointError(InputError):
    """A checkpoint cannot be read."""


def pack_tensors(tensors: dict[str, Tensor]) -> np.ndarray:
    """Return named tensors as safetensors bytes, in an array that Ray moves without a copy."""
    return np.frombuffer(save({name: tensor.contiguous() for name, tensor in tensors.items()}), dtype=np.uint8)


def unpack_tensors(data: np.ndarray) -> dict[str, Tensor]:
    """Invert `pack_tensors`; raises CheckpointError."""
    try:
        return load(data.tobytes())
    except SafetensorError as error:
        raise CheckpointError(f"A part of the checkpoint is not a safetensors file: {error}.") from None


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `prefix`, with the prefix removed."""
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


def mean_of(replicas: Sequence[Tensor]) -> Tensor:
    """Return the mean of a tensor over replicas; bit for bit the same if all are equal."""
    first = replicas[0]
    if all(torch.equal(first, other) for other in replicas[1:]):
        return first
    return torch.stack([x.double() for x in replicas]).mean(dim=0).to(first.dtype)


def pack_state(state: State) -> dict[str, Tensor]:
    """Return a compressor's state as named tensors: stacks of rows with equal shape, and all keys in order of last use."""
    groups: dict[tuple[torch.dtype, torch.Size], list[int]] = {}
    for key, row in state.items():
        groups.setdefault((row.dtype, row.shape), []).append(key)
    packed = {"order": torch.tensor(list(state))}
    for i, keys in enumerate(groups.values()):
        packed[f"{i}.keys"] = torch.tensor(keys)
        packed[f"{i}.rows"] = torch.stack([state[key] for key in keys])
    return packed


def unpack_state(packed: Mapping[str, Tensor], device: torch.device) -> State:
    """Invert `pack_state`; each row gets its own memory."""
    state: State = {}
    for i in range(len(packed) // 2):
        rows = packed[f"{i}.rows"].to(device)
        state |= {key: row.clone() for key, row in zip(packed[f"{i}.keys"].tolist(), rows, strict=True)}
    return {key: state[key] for key in packed["order"].tolist()} if packed else {}
