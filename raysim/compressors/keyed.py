"""Memories of messages by key: the microbatch's slot, the sample of each row, or the link."""

from __future__ import annotations

from raysim.compressors.compressor import Context, State
from raysim.on_demand import torch

KEYS = ("slot", "sample", "link")


def memory_keys(key: str, context: Context) -> list[int]:
    """Return a message's memory keys: its microbatch slot, the single key of a link, or one key per sample."""
    return {"slot": [context.microbatch], "link": [0]}.get(key) or list(context.sample_ids)


def as_rows(x: torch.Tensor, key: str) -> torch.Tensor:
    """Return `x` with one row per memory key: its samples, or the whole message as a single row."""
    return x if key == "sample" else x[None]


def recall(state: State, key: str, context: Context, x: torch.Tensor) -> torch.Tensor:
    """Return the memory for the message `x` under `key`, float32 in the shape of `x`; zeros if none is stored.

    Raises ValueError if the memory has another shape, as before a smaller batch.
    """
    keys, rows = memory_keys(key, context), as_rows(x, key)
    shape = rows.shape[1:]
    for row_key in keys:
        if row_key in state:
            check_shape(key, state[row_key].shape, shape)
    if len(keys) == 1 and keys[0] in state:
        return state[keys[0]].to(x.device, torch.float32).view(x.shape)
    memory = torch.zeros_like(rows, dtype=torch.float32)
    for row, row_key in zip(memory, keys, strict=True):
        if row_key in state:
            row.copy_(state[row_key])
    return memory.view(x.shape)


def check_shape(key: str, kept: torch.Size, new: torch.Size) -> None:
    """Raise ValueError if the memory under `key` does not have the shape of a new message, or of its samples."""
    if kept != new:
        held = "samples" if key == "sample" else "messages"
        remedy = "" if key == "sample" else ": leave incomplete batches out (`drop_last=True`), or keep it by sample"
        raise ValueError(
            f"A memory by {key} needs {held} of one shape, but got {tuple(new)} after {tuple(kept)}{remedy}."
        )


def remember(key: str, context: Context, x: torch.Tensor, dtype: torch.dtype | None = None) -> State:
    """Return the state changes that store the rows of `x` under `key`, in `dtype` or float32."""
    dtype = dtype or torch.float32
    keys, rows = memory_keys(key, context), as_rows(x, key)
    if len(keys) == 1:
        return {keys[0]: rows[0].to(dtype)}
    return {row_key: row.to(dtype, copy=True) for row_key, row in zip(keys, rows, strict=True)}


def recall_residual(state: State, key: str, context: Context, x: torch.Tensor) -> torch.Tensor:
    """Return the residual to add to the message `x`, as `recall`; a sample that occurs twice adds it once."""
    residual, keys = recall(state, key, context, x), memory_keys(key, context)
    again = [i for i, row_key in enumerate(keys) if row_key in keys[:i]] if len(set(keys)) < len(keys) else []
    if again:
        as_rows(residual, key)[again] = 0.0
    return residual


def remember_residual(key: str, context: Context, left: torch.Tensor) -> State:
    """Return the state changes that store a residual, as `remember`; the rows of a sample that occurs twice are added."""
    keys, changes = memory_keys(key, context), remember(key, context, left)
    if len(changes) < len(keys):
        for row_key in changes:
            rows = [i for i, other in enumerate(keys) if other == row_key]
            changes[row_key] = as_rows(left, key)[rows].float().sum(0)
    return changes
