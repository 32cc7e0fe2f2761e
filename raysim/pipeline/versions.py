"""Versions of a stage's weights: each update makes a new one, and old ones are kept until no pass reads them.

An engine runs one step after another, so a stage begins a step after all updates of the previous step. In a schedule without a
flush, some of these would come after the first forwards of the step. So a stage keeps as many old versions as its longest delay,
and gives each forward the version that the schedule without a flush prescribes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from raysim.pipeline.state import under
from raysim.schedules.weights import Memory, WeightPolicy, Weights


class Versions:
    """Gives each pass of a stage its weights, under a weight policy.

    `delays`: for each microbatch of a step, the updates between its forward and the update with its gradient. `prepare` is called
    with the tensors that receive gradients.
    """

    def __init__(
        self,
        policy: WeightPolicy,
        delays: Sequence[int],
        named: Iterable[tuple[str, nn.Parameter]],
        prepare: Callable[[Iterable[Tensor]], None],
    ) -> None:
        self.policy = policy
        self.delays = delays
        self.longest = max(delays)
        self.per_update = 1 if policy.updates_each_microbatch else len(delays)
        """Number of microbatches per update."""
        self._parameters = {name: parameter for name, parameter in named if parameter.requires_grad}
        self._prepare = prepare
        self._memory: Memory = {}
        self._read_by_backward: Weights = {}
        self._kept = deque([self._newest(dict, 0.0)])  # newest last, see `WeightPolicy.forward_weights`
        self.begin()

    def begin(self) -> None:
        self._updates = 0  # of this step

    @property
    def num_kept(self) -> int:
        """Return the number of versions that passes may still read."""
        return len(self._kept)

    def of_forward(self, microbatch: int) -> Weights | None:
        """Return the weights that a microbatch reads; None for the stage's own."""
        delay = self.delays[microbatch]
        if not delay or not self._parameters:
            return None
        age = self._updates - microbatch // self.per_update + delay
        assert age >= 0, "the update that a forward reads comes before it"
        version = self._kept[max(0, len(self._kept) - 1 - age)]  # at first there is only one version
        weights = version[delay if delay in version else 0]
        leaves = {name: x.detach().requires_grad_() for name, x in weights.items()}
        self._prepare(leaves.values())
        return leaves

    def saving(self, weights: Weights | None) -> AbstractContextManager[object]:
        """Return a context for a forward that reads `weights`, whose backward may read others; see `backward`."""
        if weights is None:
            return nullcontext()
        names = {x.untyped_storage().data_ptr(): name for name, x in weights.items() if x.numel()}

        def save(x: Tensor) -> Tensor | tuple[str, tuple[object, ...]]:
            name = names.get(x.untyped_storage().data_ptr())
            return x.detach() if name is None else (name, (x.shape, x.stride(), x.storage_offset()))

        def restore(saved: Tensor | tuple[str, tuple[object, ...]]) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            name, view = saved
            return self._read_by_backward[name].as_strided(*view)  # type: ignore[arg-type]

        return torch.autograd.graph.saved_tensors_hooks(save, restore)

    @contextmanager
    def backward(self, microbatch: int, weights: Weights | None) -> Iterator[None]:
        """Accumulate the gradients of a backward, whose forward read `weights`, in the stage's own parameters."""
        if weights is None:
            yield
            return
        read = {name: x.detach() for name, x in weights.items()}
        delay = self.delays[microbatch]
        self._read_by_backward = self.policy.backward_weights(read, self._own(), self._memory, delay)
        for name, parameter in self._parameters.items():
            weights[name].grad = parameter.grad
        yield
        for name, parameter in self._parameters.items():
            parameter.grad, weights[name].grad = weights[name].grad, None
        self._read_by_backward = {}

    @contextmanager
    def update(self, rate: float, directions: Callable[[], Weights]) -> Iterator[None]:
        """Update the stage's parameters inside this context, at a learning rate. Passes that read the old version keep it.

        `directions`: returns the optimiser's directions, see `WeightPolicy.forward_weights`.
        """
        if not self.longest:
            yield
            return
        if self.num_kept > self.longest:
            self._kept.popleft()
        before = self._own()
        for parameter in self._parameters.values():
            parameter.data = parameter.data.clone()
        yield
        self._updates += 1
        self._memory = self.policy.after_update(before, self._own(), self._memory, self.longest)
        self._kept.append(self._newest(directions, rate))

    def _own(self) -> Weights:
        return {name: parameter.data for name, parameter in self._parameters.items()}

    def _newest(self, directions: Callable[[], Weights], rate: float) -> dict[int, Weights]:
        """Return the newest version of the weights, as read by forwards; it may share the parameters' memory until their update."""
        delays = sorted({delay for delay in self.delays if delay})
        return self.policy.forward_weights(self._own(), directions, rate, delays)

    def state(self) -> dict[str, Tensor]:
        """Return the versions and the policy's memory, by flat names, without the stage's own parameters."""
        tensors = {f"memory.{name}": x for name, x in self._memory.items()}
        for age, version in enumerate(reversed(self._kept)):
            for delay, weights in version.items():
                if delay or age:
                    tensors |= {f"kept.{age}.{delay}.{name}": x for name, x in weights.items()}
        return tensors

    def load(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Load the tensors of `state`, after the stage's parameters."""
        self._memory = {name: x.to(device, copy=True) for name, x in under("memory.", tensors).items()}
        versions = {0: self._newest(dict, 0.0)}
        for name, x in under("kept.", tensors).items():
            age, delay, parameter = name.split(".", 2)
            versions.setdefault(int(age), {}).setdefault(int(delay), {})[parameter] = x.to(device, copy=True)
        self._kept = deque(versions[age] for age in sorted(versions, reverse=True))
        self.begin()
