"""A worker's part in the groups that end a step; their results replace the gradients of its stages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor, nn

from raysim.codecs import DTYPES, NonFiniteError, warm
from raysim.pipeline.errors import DivergedError, blamed
from raysim.pipeline.groups import TIED_TABLE, Group, GroupAccount, MemberRounds, average_together
from raysim.pipeline.local_stages import LocalStages
from raysim.pipeline.messages import OutgoingMessage, Parts, Receive, Send, Turns
from raysim.pipeline.plan import Plan, averaged_shapes
from raysim.pipeline.state import under
from raysim.replication.method import (
    Averaged,
    Gradients,
    Memory,
    ReplicaContext,
    ReplicaMethod,
    agreed,
    average_given,
    sum_over_members,
)

_Place: TypeAlias = (
    "tuple[int | None, int]"  # the index of a tied parameter, or None for a stage's average, and the stage
)


def _prefix(place: _Place) -> str:
    """Return the beginning of the names of a memory's tensors in checkpoints."""
    tied, stage = place
    return f"replicas.{stage}." if tied is None else f"tied.{stage}.{tied}."


class GroupExchanges:
    """Runs the groups of one worker's stages, and holds the memories of its replica methods."""

    def __init__(self, local: LocalStages) -> None:
        self.local = local
        self.plan = local.plan
        self.stages = local.stages
        tied = [(i, stage) for i, owners in enumerate(self.plan.tied) for stage, _ in owners if stage in self.stages]
        self._memories: dict[_Place, Memory] = {
            place: self._fresh(place) for place in (*((None, stage) for stage in self.stages), *tied)
        }
        self._begin()

    def _begin(self) -> None:
        self._averaged: dict[_Place, Averaged] = {}
        self._accounts: list[GroupAccount] = []

    def run(self, step: int, step_s: float | None, *, after_update: bool = False) -> Turns[None]:
        """Run all groups of this worker's stages, phase by phase and round by round.

        `after_update`: run the groups of the last phase, which exchange parameters, instead of all others. All workers run their
        groups' rounds in the same order, so that they cannot deadlock. Raises DivergedError if gradients hold NaN or infinity,
        StageError if a method fails.
        """
        last = len(self.plan.groups) - 1
        for phase, groups in enumerate(self.plan.groups):
            if (phase == last) is not after_update:
                continue
            own = [
                (i, member)
                for i, group in enumerate(groups)
                for member, (replica, stage) in enumerate(group.members)
                if replica == self.local.replica and stage in self.stages
            ]
            exchanges: dict[tuple[int, int], MemberRounds] = {}
            rounds = {i: self.plan.rounds_in(step, groups[i]) for i, _ in own}
            for turn in range(max(rounds.values(), default=-1) + 1):
                for i, member in own:
                    group = groups[i]
                    if turn > rounds[i]:
                        continue
                    stage, received = group.members[member][1], list[Parts]()
                    for other in group.others(member) if turn > 0 else ():
                        source = self.plan.worker(*group.members[other])
                        received.append((yield Receive(source, (phase, i, turn - 1, other, member))))
                    with self._failing(step, stage):
                        if turn == 0:
                            exchanges[i, member] = self._exchange(group, member, step, step_s)
                        everyone, *each = exchanges[i, member].advance(received)
                    if turn == rounds[i]:
                        self._conclude(group, member, exchanges.pop((i, member)))
                        continue
                    messages = (
                        OutgoingMessage(
                            self.plan.worker(*group.members[other]), (phase, i, turn, member, other), message
                        )
                        for other, message in zip(group.others(member), each, strict=True)
                    )
                    yield Send(tuple(messages), (everyone,))

    @contextmanager
    def _failing(self, step: int, stage: int) -> Iterator[None]:
        """Turn an error of a method into a DivergedError or a StageError that names the stage."""
        with blamed(f"stage {stage}, averaging of step {step}"):
            try:
                yield
            except NonFiniteError:
                exchanged = "parameters" if self.plan.replica_methods[stage].after_update else "gradient"
                raise DivergedError(step, "update", f"{exchanged} of stage {stage}") from None

    def with_momentum(self, stage: int) -> frozenset[str]:
        """Return a stage's parameters whose averaged gradients already include momentum."""
        averaged = self._averaged.get((None, stage))
        return frozenset() if averaged is None else averaged.with_momentum

    def parameters(self, stage: int) -> Gradients:
        """Return the new parameters of a stage, for a decentralized method."""
        averaged = self._averaged.get((None, stage))
        return {} if averaged is None else averaged.parameters

    def agreed(self, stage: int) -> Gradients:
        return agreed(dict(self.stages[stage].parameters()), self._memories[None, stage])

    def end_step(self) -> list[GroupAccount]:
        """Commit the memories and return the accounts of the step."""
        for place, averaged in self._averaged.items():
            self._memories[place] = averaged.memory
        accounts = self._accounts
        self._begin()
        return accounts

    def state(self) -> dict[str, Tensor]:
        """Return the memories, by kind, stage and flat names."""
        return {
            _prefix(place) + name: x.detach().cpu()
            for place, memory in self._memories.items()
            for name, x in memory.items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the tensors of `state`, after those of the stages, and discard an aborted step.

        The memory of a stage without tensors begins with its parameters.
        """
        for place in self._memories:
            memory = under(_prefix(place), tensors) or self._fresh(place)
            self._memories[place] = {name: x.to(self.local.device, copy=True) for name, x in memory.items()}
        self._begin()

    def _fresh(self, place: _Place) -> Memory:
        """Return the memory before the first step."""
        method = self.plan.replica_methods[place[1]] if place[0] is None else self.plan.config.tied_gradient
        return method.begin(self._parameters(place))

    def _exchange(self, group: Group, member: int, step: int, step_s: float | None) -> MemberRounds:
        """Return a member's rounds in a step: of a replica method, or of the sum of a tied parameter's gradients."""
        plan, config, index = self.plan, self.plan.config, group.members[member][1]
        place, replicas = (group.tied, index), group.tied is None
        method = plan.replica_method(index, step) if replicas else plan.tied_method(step)
        parameters = self._parameters(place)
        num_values = sum(x.numel() for x in parameters.values())
        if not replicas and not method.compresses:  # an owner without a gradient sends nothing
            (tied,) = self._named(place).values()
            flat = None if tied.grad is None else tied.grad.reshape(-1)
            total = sum_over_members("sum", flat, member, len(group.members), self.local.device)
            return MemberRounds(group, member, total, TIED_TABLE, num_values=num_values, stages=self.stages)
        context = ReplicaContext(
            replica=member,
            num_replicas=len(group.members),
            step=step,
            epoch=step // plan.steps_per_epoch,
            steps_per_epoch=plan.steps_per_epoch,
            seed=config.seed,
            stage=group.stage,
            batch_size=config.batch_size,
            learning_rate=plan.learning_rate(step),
            momentum=config.optimizer.momentum or 0.0,
            step_s=step_s,
            parameters=parameters if method.decentralized else None,
            extra=self.stages[index].extra_gradients() if replicas else None,
        )
        gradients = parameters if method.after_update else self._gradients(place)
        rounds = method.average(gradients, self._memories[place], context)
        if replicas and not method.after_update:
            missing = [name for name, x in self._named(place).items() if x.grad is None]
            rounds = average_given(rounds, missing, list(gradients))
        return MemberRounds(group, member, rounds, method.table(parameters), num_values=num_values, stages=self.stages)

    def _named(self, place: _Place) -> dict[str, nn.Parameter]:
        """Return a stage's parameters that replicas average (themselves or their gradients), or one tied parameter."""
        tied, index = place
        module = self.stages[index].module
        if tied is None:
            names = {name: name for name in averaged_shapes(index, module, self.plan.config, self.plan.tied)}
        else:
            names = self.plan.tied_names(tied, index)
        return {name: module.get_parameter(own) for name, own in names.items()}

    def _parameters(self, place: _Place) -> Gradients:
        return {name: x.detach() for name, x in self._named(place).items()}

    def _gradients(self, place: _Place) -> Gradients:
        """Return the gradients of parameters, zeros if there are none."""
        named = self._named(place)
        return {name: torch.zeros_like(x.detach()) if x.grad is None else x.grad for name, x in named.items()}

    def _conclude(self, group: Group, member: int, exchange: MemberRounds) -> None:
        """Replace this member's gradients by the result of the group's rounds."""
        assert exchange.over, f"{group} took more rounds than it stated"
        place, result = (group.tied, group.members[member][1]), exchange.result
        named = self._named(place)
        if isinstance(result, Averaged):
            self._averaged[place] = result
            exchange.account.decisions = tuple(result.decisions)
            owners = 1 if group.tied is None else len(self.plan.tied[group.tied])
            for name, gradient in result.gradients.items():
                named[name].grad = (gradient * owners if owners > 1 else gradient).view_as(named[name])
        elif result is not None:
            (parameter,) = named.values()
            shared = self.plan.num_replicas if self.plan.config.fused_embedding else 1
            parameter.grad = (result / shared if shared > 1 else result).view_as(parameter)
        self._accounts.append(exchange.account)


def warm_run(plan: Plan) -> None:
    """Compile the kernels of a run's codecs and replica methods, or load them from disk."""
    if plan.compresses:
        warm({method.codec for method in plan.methods}, [DTYPES[plan.config.dtype]])
    methods = filter(plan.config.takes_part, plan.replica_methods)
    for method in dict.fromkeys([*methods, plan.config.tied_gradient]):
        if method.compresses:
            _rehearse(method)


@lru_cache(maxsize=1024)  # once in a process, as `warm`
def _rehearse(method: ReplicaMethod) -> None:
    """Average a small matrix over two replicas twice, once after any warm-up of the method."""
    gradients = {"weight": torch.linspace(-1, 1, 48 * 48).view(48, 48)}  # too large to be exempt from compression
    context = ReplicaContext(0, 2, 2**40, 2**20, steps_per_epoch=1, seed=0, parameters=gradients)
    exchanging = (step for step in itertools.count(context.step) if method.part(step) is not None)
    memories: list[Memory] = [method.begin(gradients) for _ in range(2)]
    for step in itertools.islice(exchanging, 2):  # the first may be dense, as the reference of later ones
        contexts = [context._replace(replica=replica, step=step) for replica in range(2)]
        averaged, _ = average_together(method, [gradients, gradients], memories, contexts)
        memories = [each.memory for each in averaged]
