"""Parameters of a partitioned model: the owners of tied ones, constrained ones, and the shapes whose gradients replicas average."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import nn

from raysim.config import RunConfig
from raysim.workloads.partition import Partition

TiedOwners = tuple[tuple[tuple[int, str], ...], ...]
"""By tied parameter: its owners, each a stage and the parameter's name there."""


@runtime_checkable
class Constrained(Protocol):
    """A module whose parameters must stay in a set, such as a subspace."""

    def constrain(self) -> None:
        """Bring the parameters back into the set; called after each step of the optimiser."""


def tied_owners(parts: Partition) -> TiedOwners:
    """Return the owners of each tied parameter, by stage; pairs with an owner in common are one parameter."""
    groups: list[list[tuple[int, str]]] = []
    for stage, name, other_stage, other_name in parts.tied:
        pair = [(stage, name), (other_stage, other_name)]
        group = next((group for group in groups if set(group) & set(pair)), None)
        if group is None:
            groups.append(pair)
        else:
            group.extend(owner for owner in pair if owner not in group)
    return tuple(tuple(sorted(group)) for group in groups)


def averaged_shapes(stage: int, module: nn.Module, config: RunConfig, tied: TiedOwners) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the gradients that the replicas of a stage average, by parameter name, in the module's order.

    Parameters that `fused_embedding` sums over stages and replicas at once are left out.
    """
    fused = {owner for owners in tied for owner in owners} if config.fused_embedding else set()
    return {
        name: tuple(parameter.shape)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and (stage, name) not in fused
    }
