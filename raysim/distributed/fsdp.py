"""Compressed reduce-scatters in FSDP2, by `set_custom_reduce_scatter`.

Each rank sends every other rank a packet of the gradients of that rank's shard, and sums the packets received for its own
shard. So only methods with one message for each shard are possible: a codec, alone or with error feedback. Methods that need
whole matrices, several rounds, or state shared by all replicas (PowerSGD, DGC, EF21, Accordion, GraVAC) do not
fit: FSDP2 passes flat shards, and a rank sees only the sum of its own shard.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from raysim.codecs.message import CodecTable
from raysim.compressors import Compressor, Context, State
from raysim.distributed.exchange import (
    Channel,
    ReplicaError,
    Shapes,
    build_alike,
    check_parameters,
    check_same_rank,
    overflowed,
    plain_names,
    run_rounds,
)
from raysim.nn.loss_scale import LossScale
from raysim.pipeline.state import pack_state, unpack_state
from raysim.random import derive_key
from raysim.replication import parse_replica_method
from raysim.replication.gathered import Gathered
from raysim.replication.method import Rounds, reduce_scatter

_NAME = "shard"


def compress(
    model: nn.Module, method: str, *, seed: int = 0, scaler: torch.amp.GradScaler | None = None
) -> ShardedGradients:
    """Make FSDP2 reduce a model's gradients through a codec, alone or with error feedback, and return the reducer.

    Call it on every rank after `fully_shard`. Each group of parameters that FSDP reduces together is compressed as one row,
    including small tensors. A rank's own contribution is exact. `scaler` scales the loss: residuals follow its scale, and an
    overflow, which it skips, changes none of them. Error feedback needs the gradients of all trained parameters in every step.

    Raises the same ValueError on every rank if the method cannot be a reduce-scatter, the model has no FSDP2 module, or ranks
    differ.
    """

    def build() -> ShardedGradients:
        parsed = parse_replica_method(method)
        if (
            not isinstance(parsed, Gathered)
            or parsed != Gathered(parsed.compressor)
            or parsed.compressor.codec.by_matrix
        ):
            raise ValueError(
                f"`method` must be a codec of flat tensors, alone or under ErrorFeedback, to be a reduce-scatter of FSDP, but got "
                f"{parsed!r}. Use DDP with `raysim.ddp.hook` for the other methods."
            )
        modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        if not modules:
            raise ValueError("`model` must hold modules of FSDP2: call `fully_shard` on them first.")
        for module in modules:
            module.reshard()  # after a forward it may hold whole parameters
        groups = [module._get_fsdp_state() for module in modules]  # one for all modules of a list that was sharded
        numbers = {group: i for i, group in enumerate(dict.fromkeys(groups))}
        owners = {
            parameter: numbers[group]
            for group, module in zip(groups, modules, strict=True)
            for parameter in module.parameters()
        }  # innermost last
        plain = plain_names(name for name, _ in model.named_parameters())
        owned: list[dict[str, nn.Parameter]] = [{} for _ in numbers]
        for name, parameter in model.named_parameters():
            if parameter in owners:
                owned[owners[parameter]][plain[name]] = parameter
        reductions = [
            _ReduceScatter(parsed.compressor, i, seed, of_module, scaler) for i, of_module in enumerate(owned)
        ]
        for group, module in zip(groups, modules, strict=True):
            module.set_custom_reduce_scatter(reductions[numbers[group]])  # type: ignore[arg-type]  # has the two methods called by FSDP
        return ShardedGradients(parsed, reductions)

    group = next((p.device_mesh.get_group(-1) for p in model.parameters() if isinstance(p, DTensor)), None)
    return build_alike(
        group, "reduce gradients", build, {"the method": method, "`seed`": seed, "`scaler`": scaler is not None}
    )


class ShardedGradients:
    """This rank's memories for a sharded model; made by `compress`."""

    def __init__(self, method: Gathered, reductions: Sequence[_ReduceScatter]) -> None:
        self.method = method
        self._reductions = reductions
        self._rank = dist.get_rank() if dist.is_initialized() else 0

    @property
    def sent_bytes(self) -> int:
        return sum(reduction.channel.sent_bytes for reduction in self._reductions if reduction.channel is not None)

    def state_dict(self) -> dict[str, Any]:
        """Return the memory of this rank, for a checkpoint; every rank keeps its own."""
        states = [
            {"step": each.step, "memory": pack_state(each.unscaled_state()), "parameters": each.shapes}
            for each in self._reductions
        ]
        rank = self._rank if any(each.state for each in self._reductions) else None
        return {"method": repr(self.method), "rank": rank, "states": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the `state_dict` of the same rank; raises ValueError if its method or model differs, or it is another rank's."""
        if state["method"] != repr(self.method):
            raise ValueError(f"`method` must be {state['method']}, as in the checkpoint, but got {self.method!r}.")
        check_same_rank(state.get("rank"), self._rank)
        if len(state["states"]) != len(self._reductions):
            raise ValueError(
                f"`model` must have {len(state['states'])} modules of FSDP2, as in the checkpoint, but has {len(self._reductions)}."
            )
        for reduction, kept in zip(self._reductions, state["states"], strict=True):
            shapes = kept.get("parameters", reduction.shapes)
            check_parameters({name: tuple(shape) for name, shape in shapes.items()}, reduction.shapes)
        for reduction, kept in zip(self._reductions, state["states"], strict=True):
            reduction.step, reduction.state = kept["step"], unpack_state(kept["memory"], torch.device("cpu"))
            reduction.scale.forget()


class _ReduceScatter:
    """The reduce-scatter of one group of parameters, called by FSDP2."""

    def __init__(
        self,
        compressor: Compressor,
        index: int,
        seed: int,
        parameters: Mapping[str, nn.Parameter],
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.compressor = compressor
        self.parameters = parameters
        self.scale = LossScale(scaler)
        self.index = index
        self.seed = seed
        self.step = 0
        self.state: State = {}  # by the shard's rank
        self.trained: tuple[str, ...] = ()  # the parameters whose residuals are in the state
        self.channel: Channel | None = None

    @property
    def shapes(self) -> Shapes:
        return {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}

    def unscaled_state(self) -> State:
        """Return the residuals of a loss without scale, for a checkpoint."""
        self.state = self.scale.follow(self.state)
        return self.scale.unscaled(self.state)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Write the sum or mean of all ranks' gradients for this rank's shard into `output_tensor`."""
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError("A compressed reduce-scatter sums or averages: leave `set_gradient_divide_factor` out.")
        if self.channel is None:
            self.channel = Channel(group, input_tensor.device)
        table = CodecTable(self.compressor.entries(), names=[_NAME])
        self.state = self.scale.follow(self.state)
        rounds = self._rounds(input_tensor, self.channel)
        numel = output_tensor.numel()
        try:
            total = run_rounds(rounds, self.channel, table, self.index, stage=self.index, num_values=numel).result
        except ReplicaError as error:
            if self.scale.scaler is None or not overflowed(error, self.channel, self._local()):
                raise
            output_tensor.fill_(math.nan)
        else:
            output_tensor.copy_(total / self.channel.size if op == dist.ReduceOp.AVG else total)
        self.step += 1

    def _local(self) -> list[Tensor]:
        """Return this rank's shards of the parameters."""
        return [x.to_local() if isinstance(x, DTensor) else x for x in self.parameters.values()]

    def _check_whole(self, gradients: Tensor, num_ranks: int) -> None:
        """Raise ValueError unless the same parameters get gradients in every step, all that are trained."""
        trained = {name: x for name, x in self.parameters.items() if x.requires_grad and isinstance(x, DTensor)}
        self.trained = self.trained or tuple(trained)
        names = ", ".join(trained)
        if gradients.numel() != sum(_padded(parameter, num_ranks) for parameter in trained.values()):
            why = f"some of {names} got none. Call `fully_shard` on each part that may get none, or leave error feedback out"
        elif self.trained != tuple(trained):
            why = f"{', '.join(self.trained)} got them before, and {names} now. Call `raysim.fsdp.compress` again"
        else:
            return
        raise ValueError(
            f"With {self.compressor!r} the same parameters of an FSDP2 module must get gradients in every step, but {why}."
        )

    def _rounds(self, gradients: Tensor, channel: Channel) -> Rounds[Tensor]:
        if self.compressor.adds_residual:
            self._check_whole(gradients, channel.size)
        shards = gradients.detach().view(channel.size, 1, -1)
        packets, changed = {}, {}
        for owner, shard in enumerate(shards):
            if owner == channel.rank:
                continue
            context = Context(
                direction="replica_gradient",
                step=self.step,
                epoch=0,
                microbatch=0,
                sample_ids=(0,),
                key=derive_key(self.seed, "replica gradient", channel.rank, owner, self.index, self.step),
            )
            state = {0: self.state[owner]} if owner in self.state else {}
            packets[owner], changes = self.compressor.encode(shard, state, context)
            for residual in changes.values():
                changed[owner] = residual
        total = yield from reduce_scatter(_NAME, packets, shards[channel.rank], channel.rank, gradients.device)
        assert total is not None
        self.state.update(changed)
        return total.view(-1)


def _padded(parameter: DTensor, num_ranks: int) -> int:
    """Return the number of values of a parameter's gradient in a reduce-scatter, in shards of equal size."""
    length = parameter.shape[getattr(parameter.placements[-1], "dim", 0)]
    return -(-length // num_ranks) * num_ranks * (parameter.numel() // max(1, length))
