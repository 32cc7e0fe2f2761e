"""The device of a worker: its facts, its settings for arithmetic, and the memory that a worker may use."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

from raysim.config import ConfigError, RunConfig
from raysim.network.memory import StageMemory, check_memory


class DeviceFacts(NamedTuple):
    """A GPU, as it describes itself."""

    name: str
    capability: str
    driver: str
    cuda: str
    memory_bytes: int
    bfloat16: bool
    """True if it computes in bfloat16 without emulation."""
    uuid: str
    """The identity of the GPU, unique over all nodes."""


def facts_of(device: torch.device) -> DeviceFacts | None:
    """Return the facts of a GPU, None of a CPU."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return DeviceFacts(
        name=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        driver=_driver(),
        cuda=torch.version.cuda or "",
        memory_bytes=properties.total_memory,
        bfloat16=torch.cuda.is_bf16_supported(including_emulation=False),
        uuid=str(properties.uuid),
    )


def set_up(config: RunConfig, device: torch.device) -> None:
    """Tell a GPU how to compute, for this whole process.

    Nothing is changed for a CPU, which has no TF32 and whose kernels give the same bits each time.
    """
    if device.type != "cuda":
        return
    precision = "tf32" if config.tf32 else "ieee"
    torch.backends.cuda.matmul.fp32_precision = precision
    torch.backends.cudnn.conv.fp32_precision = precision  # type: ignore[attr-defined]
    torch.backends.cudnn.rnn.fp32_precision = precision  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False  # the quickest kernel of a moment is another one the next time
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.use_deterministic_algorithms(True)


def check_devices(
    config: RunConfig,
    memories: Sequence[StageMemory],
    owners: Sequence[int],
    facts: Sequence[DeviceFacts | None],
    share: float,
) -> None:
    """Raise ConfigError where a GPU lacks the dtype, or the memory for the stages on it.

    The stage of `memories[i]` is the worker's `owners[i]`, whose GPU `facts` tell by worker, and which may take the `share` of
    its memory.
    """
    for one in facts:
        if one is not None and config.dtype == "bfloat16" and not one.bfloat16:
            raise ConfigError(
                f"`dtype` = 'bfloat16' needs a GPU of compute capability 8.0, but {one.name} has {one.capability}. "
                "Set `dtype` to 'float16' or 'float32'."
            )
    placed = [(memory, owner, one) for memory, owner in zip(memories, owners, strict=True) if (one := facts[owner])]
    stages = [memory for memory, _, _ in placed]
    try:
        whole = {one.uuid: one.memory_bytes for _, _, one in placed}
        check_memory(stages, whole, [one.uuid for _, _, one in placed], kind="GPU")
        each = {owner: int(share * one.memory_bytes) for _, owner, one in placed}
        check_memory(stages, each, [owner for _, owner, _ in placed], kind=f"the {share:g} GPU of worker")
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _driver() -> str:
    """Return the version of the driver, as its kernel module states it; nothing where it does not."""
    try:
        with open("/sys/module/nvidia/version", encoding="ascii") as file:  # noqa: PTH123
            return file.read().strip()
    except OSError:
        return ""
