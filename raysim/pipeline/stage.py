"""A stage: a slice of the model with its optimiser, on one device. It knows nothing of packets or neighbours."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from raysim.codecs.codec import DTYPES
from raysim.config import RunConfig
from raysim.pipeline.device import set_up
from raysim.pipeline.optimizer import Together, directions, make_optimizer
from raysim.pipeline.reports import Unreached
from raysim.pipeline.state import under
from raysim.pipeline.versions import Versions
from raysim.schedules.weights import Weights
from raysim.values import UNNAMED, Value, argument_of, floats, value_of
from raysim.workloads.losses import Loss
from raysim.workloads.two_part_backward import input_gradients, run_branches


@runtime_checkable
class Constrained(Protocol):
    """A module whose parameters must stay in a set, such as a subspace."""

    def constrain(self) -> None:
        """Project the parameters onto the set; called after each optimiser step."""


class _Saved(NamedTuple):
    """The state of a microbatch between its forward and its backward."""

    inputs: Value  # without integers and booleans, unless needed for recomputation
    outputs: Value  # floating-point outputs with their graph; empty if recomputed
    key: int
    targets: Tensor | None
    buffers: dict[str, Tensor]  # before the forward; kept for recomputation only
    weights: Weights | None  # read by the forward; None for the stage's own


class Snapshot(NamedTuple):
    """The state of a stage before an update."""

    parameters: dict[str, Tensor]
    slots: dict[int, Any]
    gradients: dict[str, Tensor]


class Stage:
    """Runs forwards and backwards of microbatches, and updates; gradients accumulate in the parameters.

    `elementwise`: parameters that Muon does not update. `loss`: returned by the forward of the last stage; the microbatches of an
    update have equal weight. `delays`: delay of each microbatch in updates, 0 by default. Gradients between stages are scaled
    by the configuration's `loss_scale`; gradients of parameters are unscaled.
    """

    copies: ClassVar[int] = 1  # of the weights and tensors that it holds, and of the tensors that it sends

    def __init__(
        self,
        module: nn.Module,
        config: RunConfig,
        device: torch.device,
        *,
        first: bool,
        last: bool,
        loss: Loss | None = None,
        elementwise: frozenset[str] = frozenset(),
        delays: Sequence[int] | None = None,
    ) -> None:
        set_up(config, device)
        self.module = module.to(device).train()
        self.config = config
        self.device = device
        self.first = first
        self.last = last
        self.loss = loss
        self.divisor: float | None = None  # of a microbatch's summed loss, in steps with ignored targets
        self.optimizer = make_optimizer(config.optimizer, self.module.named_parameters(), elementwise)
        self._dtype = DTYPES[config.dtype]
        state = self.module.state_dict()
        self._buffers = [name for name, _ in self.module.named_buffers() if name in state]  # the others are constants
        self._constrained = [part for part in self.module.modules() if isinstance(part, Constrained)]
        self._unscale(self.module.parameters())
        delays = delays or [0] * config.num_microbatches
        self.versions = Versions(config.weights, delays, self.module.named_parameters(), self._unscale)
        self.other_work = "update" if config.weights.updates_each_microbatch else None
        """Work other than single forwards and backwards, as named in the records."""
        self._saved: dict[int, _Saved] = {}
        self._second_parts: dict[int, Callable[[], object]] = {}  # of backwards after their first part
        self._unreached = {name for name, parameter in self.module.named_parameters() if parameter.requires_grad}
        self._input_unreached = not first

    def forward(self, microbatch: int, value: Value, key: int, targets: Tensor | None = None) -> Value:
        """Return the activation to send, or on the last stage the microbatch's mean loss; `key` seeds dropout."""
        inputs = {name: x.detach() for name, x in value.items()}
        if not self.first:  # data needs no gradient
            for x in floats(inputs).values():
                x.requires_grad_()
        weights = self.versions.of_forward(microbatch)
        if self.config.recompute:
            buffers = {name: self.module.get_buffer(name).clone() for name in self._buffers}
            with torch.no_grad():  # without gradients a first layer in place would write to the data
                given = {name: x.clone() for name, x in inputs.items()} if self.first else inputs
                sent = self._compute(given, key, targets, weights)
            self._saved[microbatch] = _Saved(inputs, {}, key, targets, buffers, weights)
        else:
            with self.versions.saving(weights):
                sent = self._compute(inputs, key, targets, weights)
            self._saved[microbatch] = _Saved(floats(inputs), floats(sent), key, targets, {}, weights)
        return {name: y.detach() for name, y in sent.items()}

    def backward(self, microbatch: int, gradient: Value | None = None, *, keep: bool = False) -> Value | None:
        """Accumulate a microbatch's gradients in the parameters; return its input's gradient, None on the first stage.

        `gradient`: of the sent floating-point tensors; None on the last stage, which starts from its loss. `keep`:
        keep the forward for further backwards, on the first stage only.
        """
        saved = self._saved[microbatch]
        inputs, outputs, gradients = self._output(microbatch, gradient)
        if outputs:  # empty if a first stage has no parameters
            with self.versions.backward(microbatch, saved.weights):
                torch.autograd.backward(outputs, gradients, retain_graph=keep)
        if keep:
            self._saved[microbatch] = saved
        return None if self.first else self._of_inputs(inputs, [x.grad for x in inputs.values()])

    def backward_input(self, microbatch: int, gradient: Value | None = None) -> Value | None:
        """Return the gradient of the input, as `backward`; `backward_weights` adds the parameters' gradients later.

        The first stage, whose input has no gradient, computes nothing yet.
        """
        if self.first:
            self._second_parts[microbatch] = partial(self.backward, microbatch, gradient)
            return None
        inputs, outputs, gradients = self._output(microbatch, gradient)
        of_inputs, caught = input_gradients(outputs, gradients, list(inputs.values()))
        self._second_parts[microbatch] = partial(run_branches, caught)
        return self._of_inputs(inputs, of_inputs)

    def _of_inputs(self, inputs: Value, gradients: Sequence[Tensor | None]) -> Value:
        """Return the gradient of the input; zeros for tensors without one."""
        self._input_unreached &= all(gradient is None for gradient in gradients)
        pairs = zip(inputs.items(), gradients, strict=True)
        return {name: torch.zeros_like(x) if gradient is None else gradient for (name, x), gradient in pairs}

    def unreached(self) -> Unreached:
        """Return the parameters without a gradient so far, and whether the input lacks one; called before averaging."""
        self._unreached -= self.gradients().keys()
        return Unreached(tuple(sorted(self._unreached)), self._input_unreached)

    def backward_weights(self, microbatch: int) -> None:
        """Accumulate a microbatch's gradients in the parameters, after its `backward_input`."""
        self._second_parts.pop(microbatch)()

    def _output(self, microbatch: int, gradient: Value | None) -> tuple[Value, list[Tensor], list[Tensor]]:
        """Return a microbatch's inputs, its outputs with a graph, and the gradients of these outputs."""
        saved = self._saved.pop(microbatch)
        outputs = saved.outputs
        if not outputs:  # recompute with the copied buffers, so that the stage's own buffers do not change
            tensors = {**(saved.weights or {}), **saved.buffers}
            with self.versions.saving(saved.weights):
                outputs = floats(self._compute(saved.inputs, saved.key, saved.targets, tensors))
        if gradient is None:
            scale = self.config.gradient_scale / self.versions.per_update
            gradient = {UNNAMED: torch.full_like(outputs[UNNAMED], scale)}
        trained = [name for name, y in outputs.items() if y.requires_grad]
        return floats(saved.inputs), [outputs[name] for name in trained], [gradient[name] for name in trained]

    def _unscale(self, parameters: Iterable[Tensor]) -> None:
        """Divide gradients by the loss scale when they reach the parameters."""
        scale = self.config.gradient_scale
        for parameter in parameters:
            if scale != 1 and parameter.requires_grad:
                parameter.register_hook(lambda gradient: gradient / scale)  # type: ignore[no-untyped-call]

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}

    def parameters(self) -> list[tuple[str, Tensor]]:
        """Return the parameters with their names, detached."""
        return [(name, parameter.detach()) for name, parameter in self.module.named_parameters()]

    def place(self, parameters: Mapping[str, Tensor]) -> None:
        for name, values in parameters.items():
            self.module.get_parameter(name).data.copy_(values)

    def begin(self, step: int, *, fresh: bool = False) -> None:
        """Begin a step; `fresh`: the memories of replica methods are empty."""
        self.versions.begin()
        self.divisor = None

    def extra_gradients(self) -> dict[str, Tensor] | None:
        """Return a subclass's additional results, see `ReplicaContext.extra`."""
        return None

    def update(self, learning_rate: float, scale: float = 1.0, with_momentum: frozenset[str] = frozenset()) -> None:
        """Step the optimiser on the gradients times `scale`, clear them, and project constrained modules.

        Gradients of `with_momentum` already include momentum: the optimiser's own is neither applied to these nor changed.
        """
        gradients = self.gradients()
        self._unreached -= gradients.keys()
        if scale != 1.0 and gradients:
            torch._foreach_mul_(list(gradients.values()), scale)
        rest = [self.module.get_parameter(name) for name in with_momentum & gradients.keys()]
        optimizer = self.optimizer
        if optimizer is None:
            return
        with self.versions.update(learning_rate, lambda: directions(optimizer, self.module.named_parameters())):
            self._step_all(optimizer, learning_rate, rest)

    def _step_all(
        self, optimizer: torch.optim.Optimizer | Together, learning_rate: float, without_momentum: list[nn.Parameter]
    ) -> None:
        """Step the optimiser, but update the parameters `without_momentum` by the same rule without momentum."""
        gradients = [parameter.grad for parameter in without_momentum]
        for parameter in without_momentum:
            parameter.grad = None
        self._step(optimizer, learning_rate)
        if without_momentum:
            for parameter, gradient in zip(without_momentum, gradients, strict=True):
                parameter.grad = gradient
            config = self.config.optimizer.model_copy(update={"momentum": None, "learning_rate": learning_rate})
            plain = make_optimizer(config, ((str(i), parameter) for i, parameter in enumerate(without_momentum)))
            assert plain is not None
            self._step(plain, learning_rate)
        for part in self._constrained:
            part.constrain()

    @staticmethod
    def _step(optimizer: torch.optim.Optimizer | Together, learning_rate: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def snapshot(self) -> Snapshot:
        """Return everything that an update changes: copies of parameters and slots, and the gradients themselves."""
        slots = copy.deepcopy(self.optimizer.state_dict()["state"]) if self.optimizer is not None else {}
        return Snapshot({name: x.clone() for name, x in self.parameters()}, slots, self.gradients())

    def restore(self, snapshot: Snapshot) -> None:
        self.place(snapshot.parameters)
        if self.optimizer is not None:
            self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": snapshot.slots})
        for name, gradient in snapshot.gradients.items():
            self.module.get_parameter(name).grad = gradient

    def state(self) -> dict[str, Tensor]:
        """Return copies of weights, buffers and optimiser slots, by flat names."""
        tensors = {f"model.{name}": tensor for name, tensor in self.module.state_dict().items()}
        if self.optimizer is not None:
            for index, slots in self.optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer.{index}.{slot}": x for slot, x in slots.items() if isinstance(x, Tensor)}
        tensors |= {f"versions.{name}": x for name, x in self.versions.state().items()}
        return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Load the tensors of `state`; missing optimiser slots are cleared."""
        self.module.load_state_dict(under("model.", tensors))
        if self.optimizer is not None:
            slots: dict[int, dict[str, Tensor]] = {}
            for name, x in under("optimizer.", tensors).items():
                index, slot = name.split(".", 1)
                slots.setdefault(int(index), {})[slot] = x
            self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": slots})
        self.module.zero_grad(set_to_none=True)
        self.versions.load(under("versions.", tensors), self.device)
        self._saved.clear()
        self._second_parts.clear()

    def infer(self, value: Value, updated: Iterable[nn.Module] = ()) -> Value:
        """Return the activation, or the last stage's logits, in evaluation mode and without gradients.

        Modules of `updated` stay in training mode, so that they update their statistics.
        """
        # cloned, because a received tensor may be read-only, and without gradients in-place layers would write to it
        x = {name: received.clone() for name, received in value.items()}
        with torch.no_grad():
            self.module.eval()
            for module in updated:
                module.train()
            y = self._call(x)
            self.module.train()
        return y

    def _compute(self, x: Value, key: int, targets: Tensor | None, tensors: dict[str, Tensor] | None) -> Value:
        """Return the activation or the loss of the module, with `tensors` in place of its own."""
        # counter-based: no random state to keep, and independent of the order of actions
        torch.default_generator.manual_seed(key)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(key)
        y = self._call(x, tensors)
        if targets is None:
            return y
        assert self.loss is not None
        return {UNNAMED: self.loss(y[UNNAMED], targets, self.divisor)}

    def _call(self, value: Value, tensors: dict[str, Tensor] | None = None) -> Value:
        low_precision = self._dtype != torch.float32
        with torch.autocast(self.device.type, self._dtype, enabled=low_precision):
            x = argument_of(value)
            y = value_of(torch.func.functional_call(self.module, tensors, (x,)) if tensors else self.module(x))
        if not low_precision or self.last:
            return y
        return {**y, **{name: each.to(self._dtype) for name, each in floats(y).items()}}


def stage_class(config: RunConfig) -> type[Stage]:
    """Return the class of a run's stages: `Stage`, or a replica method's own."""
    methods = filter(config.takes_part, config.replica_methods())
    return next(filter(None, (method.stage_class() for method in methods)), Stage)
