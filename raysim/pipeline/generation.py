"""Greedy generation of the answers of an evaluation, over the stages of one worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from raysim.codecs.bundle import bundle, unbundle
from raysim.codecs.message import Message
from raysim.config import ConfigError
from raysim.pipeline.messages import OutgoingMessage, Receive, Send, Turns
from raysim.pipeline.plan import Plan
from raysim.pipeline.reports import Evaluated
from raysim.workloads.losses import IGNORED
from raysim.workloads.options import reason_of
from raysim.workloads.splits import Split

Forward = Callable[[int, int, int, "Message | Tensor"], "Message | Tensor"]
"""Returns a stage's message or, of the last stage, its outputs, given its index, the batch, the position and its input."""


def generate(
    plan: Plan, replica: int, stages: Sequence[int], split: Split | None, batches: Sequence[int], forward: Forward
) -> Turns[list[Evaluated]]:
    """Generate the answers of test batches; the worker of the last stage returns the sums over each batch.

    For each token the whole text so far goes through all stages, and the last stage returns the token of the greatest score to the
    first. Positions that do not count keep the token of the data. `split`: the test data, of the workers with the first or the last
    stage.
    """
    first, last = plan.worker(replica, 0), plan.worker(replica, plan.num_stages - 1)
    ids = {batch: plan.evaluation_ids("test", batch) for batch in batches}
    targets = {batch: split.targets(ids[batch]) for batch in batches} if split is not None else {}
    generated = {batch: each.clone() for batch, each in targets.items()}
    texts = {}
    if split is not None and 0 in stages:
        texts = {batch: split.inputs(ids[batch], 0, plan.config.seed, False).clone() for batch in batches}
    for position in range(*plan.answer):
        for index in stages:
            for batch in batches:
                if index > 0:
                    key = ("generating", index - 1, batch, position)
                    (message,) = yield Receive(plan.worker(replica, index - 1), key)
                    assert message is not None
                    outcome = forward(index, batch, position, message)
                else:
                    if position > plan.answer[0]:
                        (message,) = yield Receive(last, ("generated", batch, position))
                        assert message is not None
                        counted = targets[batch][:, position - 1] != IGNORED
                        texts[batch][counted, position] = _tokens(message, len(counted))[counted]
                    outcome = forward(index, batch, position, texts[batch][:, : position + 1])
                if not isinstance(outcome, Tensor):
                    key = ("generating", index, batch, position)
                    yield Send((OutgoingMessage(plan.worker(replica, index + 1), key, outcome),))
                    continue
                tokens = generated[batch][:, position] = outcome[:, -1].argmax(dim=-1).cpu()
                if position + 1 < plan.answer[1]:
                    message = bundle({}, {"tokens": tokens})
                    yield Send((OutgoingMessage(first, ("generated", batch, position + 1), message),))
    if plan.num_stages - 1 not in stages:
        return []
    return [Evaluated(0, plan.task.generated_sums(generated[batch], targets[batch])) for batch in batches]


def _tokens(message: Message, most: int) -> Tensor:
    return unbundle(message, most)[1]["tokens"]


def check_generation(stages: Sequence[nn.Module], test: Split, start: int, num_tokens: int) -> None:
    """Raise ConfigError if a model does not take a text that ends at the position `start`, from which its answer is generated."""
    ids = torch.zeros(1, dtype=torch.int64).numpy()
    value = test.inputs(ids, 0, 0, False)[:, : start + 1]
    wanted = (1, start + 1)
    try:
        with torch.no_grad():
            for stage in stages:
                value = stage.eval()(value)
        found = tuple(value.shape)
    except Exception as error:
        raise ConfigError(
            f"`metrics` = 'exact_match' needs a model for texts of any length, but `model` failed on {start + 1} of "
            f"{test.inputs(ids, 0, 0, False).shape[1]} tokens: {reason_of(error)}."
        ) from error
    finally:
        for stage in stages:
            stage.train()
    if found[:2] != wanted or found[2:] < (num_tokens,):
        raise ConfigError(
            f"`metrics` = 'exact_match' needs scores of the shape {(*wanted, num_tokens)} for {start + 1} tokens, but `model` returned "
            f"{found}."
        )
