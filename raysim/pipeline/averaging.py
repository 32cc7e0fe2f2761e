"""A worker's part in the groups that end a step; their results replace the gradients of its stages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from raysim.codecs import NonFiniteError
from raysim.codecs import warm as warm_codecs
from raysim.pipeline.errors import DivergedError, blamed
from raysim.pipeline.groups import TIED_TABLE, Group, GroupAccount, MemberRounds, takes_part
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
    average_together,
    sum_over_members,
)


class Averaging:
    """Runs the groups of one worker's stages, and holds the memories of its replica methods."""

    def __init__(self, local: LocalStages) -> None:
        self.local = local
        self.plan = local.plan
        self.stages = local.stages
        self._memories: dict[int, Memory] = {
            stage: self.plan.replica_methods[stage].begin(self._parameters(stage)) for stage in self.stages
        }
        self._begin()

    def _begin(self) -> None:
        self._averaged: dict[int, Averaged] = {}
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
        return self._averaged[stage].with_momentum if stage in self._averaged else frozenset()

    def parameters(self, stage: int) -> Gradients:
        """Return the new parameters of a stage, for a decentralized method."""
        return self._averaged[stage].parameters if stage in self._averaged else {}

    def agreed(self, stage: int) -> Gradients:
        return agreed(dict(self.stages[stage].parameters()), self._memories[stage])

    def end_step(self) -> list[GroupAccount]:
        """Commit the memories and return the accounts of the step."""
        for stage, averaged in self._averaged.items():
            self._memories[stage] = averaged.memory
        accounts = self._accounts
        self._begin()
        return accounts

    def state(self) -> dict[str, Tensor]:
        """Return the memories, by stage and flat names."""
        return {
            f"{stage}.{name}": x.detach().cpu()
            for stage, memory in self._memories.items()
            for name, x in memory.items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the tensors of `state`, after those of the stages, and discard an aborted step.

        The memory of a stage without tensors begins with its parameters.
        """
        for stage in self._memories:
            memory = under(f"{stage}.", tensors) or self.plan.replica_methods[stage].begin(self._parameters(stage))
            self._memories[stage] = {name: x.to(self.local.device, copy=True) for name, x in memory.items()}
        self._begin()

    def _exchange(self, group: Group, member: int, step: int, step_s: float | None) -> MemberRounds:
        """Return a member's rounds in a step: of a replica method, or of the sum of a tied parameter's gradients."""
        plan, index = self.plan, group.members[member][1]
        module = self.stages[index].module
        if group.tied is not None:
            tied = module.get_parameter(plan.tied_name(group.tied, index))
            flat = None if tied.grad is None else tied.grad.reshape(-1)
            total = sum_over_members("sum", flat, member, len(group.members), self.local.device)
            return MemberRounds(group, member, total, TIED_TABLE, num_values=tied.numel(), stages=self.stages)
        method, config, parameters = plan.replica_method(index, step), plan.config, self._parameters(index)
        context = ReplicaContext(
            replica=self.local.replica,
            num_replicas=plan.num_replicas,
            step=step,
            epoch=step // plan.steps_per_epoch,
            steps_per_epoch=plan.steps_per_epoch,
            seed=config.seed,
            stage=index,
            num_stages=plan.num_stages,
            batch_size=config.batch_size,
            learning_rate=plan.learning_rate(step),
            momentum=config.optimizer.momentum or 0.0,
            step_s=step_s,
            parameters=parameters if method.decentralized else None,
            extra=self.stages[index].extra_gradients(),
        )
        gradients = parameters if method.after_update else self._gradients(index)
        rounds = method.average(gradients, self._memories[index], context)
        num_values = sum(x.numel() for x in parameters.values())
        return MemberRounds(group, member, rounds, method.table(parameters), num_values=num_values, stages=self.stages)

    def _parameters(self, index: int) -> Gradients:
        """Return a stage's parameters that replicas average themselves or by gradients, detached."""
        module = self.stages[index].module
        names = averaged_shapes(index, module, self.plan.config, self.plan.tied)
        return {name: module.get_parameter(name).detach() for name in names}

    def _gradients(self, index: int) -> Gradients:
        """Return the gradients of a stage's `_parameters`, zeros if there are none."""
        module = self.stages[index].module
        gradients = {}
        for name, x in self._parameters(index).items():
            gradient = module.get_parameter(name).grad
            gradients[name] = torch.zeros_like(x) if gradient is None else gradient
        return gradients

    def _conclude(self, group: Group, member: int, exchange: MemberRounds) -> None:
        """Replace this member's gradients by the result of the group's rounds."""
        assert exchange.over, f"{group} took more rounds than it stated"
        index = group.members[member][1]
        module = self.stages[index].module
        if group.tied is None:
            averaged: Averaged = exchange.result
            self._averaged[index] = averaged
            exchange.account.decisions = tuple(averaged.decisions)
            for name, gradient in averaged.gradients.items():
                parameter = module.get_parameter(name)
                parameter.grad = gradient.view_as(parameter)
        elif exchange.result is not None:
            parameter = module.get_parameter(self.plan.tied_name(group.tied, index))
            shared = self.plan.num_replicas if self.plan.config.fused_embedding else 1
            parameter.grad = (exchange.result / shared if shared > 1 else exchange.result).view_as(parameter)
        self._accounts.append(exchange.account)


def warm(plan: Plan) -> None:
    """Compile the kernels of a run's codecs and replica methods, or load them from disk."""
    if plan.compresses:
        warm_codecs({method.codec for method in plan.methods})
    for method in dict.fromkeys(plan.replica_methods):
        if method.compresses and takes_part(method, plan.num_replicas):
            _rehearse(method)


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
