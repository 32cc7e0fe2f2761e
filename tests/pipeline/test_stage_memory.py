"""The memory of a stage as it trains, beside the plan's count: tensors of torch, from their making to their end."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from raysim.config import make_config
from raysim.engine.inline import InlineEngine
from raysim.pipeline.plan import prepare

BASE = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
TEXT = {"name": "topics", "length": 64, "train_samples": 64, "test_samples": 8}
DIGITS = {"name": "digits", "train_samples": 64, "test_samples": 8}
MODELS = {
    "llama": ({"model_type": "llama", **BASE, "num_key_value_heads": 2}, TEXT),
    "gpt2": ({"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4, "tie_word_embeddings": False}, TEXT),
    "vit": ({"model_type": "vit", **BASE, "patch_size": 2}, DIGITS),
}


class Held(TorchDispatchMode):
    """Tells the bytes of the storages that each stage has made or been given first, and that are alive."""

    def __init__(self):
        super().__init__()
        self.stage = None  # that computes
        self.alive = {}

    def see(self, values):
        for x in tree_leaves(values):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                known = self.alive.get(storage._cdata)
                if known is None or known[0].expired():
                    self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes(), self.stage)

    def bytes_of(self, stage):
        self.alive = {place: one for place, one in self.alive.items() if not one[0].expired()}
        return sum(size for _, size, owner in self.alive.values() if owner == stage)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if self.stage is not None:
            self.see((args, kwargs, found))
        return found


def between_actions(engine, held):
    """Return, by stage, the most bytes that it holds after any of its actions in two steps."""
    most = {}

    def watch(index, stage, name):
        action = getattr(stage, name)

        def run(*arguments, **options):
            held.stage = index
            try:
                return action(*arguments, **options)
            finally:
                held.stage = None
                most[index] = max(most.get(index, 0), held.bytes_of(index))

        setattr(stage, name, run)

    stages = {index: stage for worker in engine.workers for index, stage in worker.stages.items()}
    for index, stage in stages.items():
        held.stage = index
        held.see([*stage.module.parameters(), *stage.module.buffers()])
        for name in ("forward", "backward", "backward_input", "backward_weights", "update"):
            watch(index, stage, name)
    held.stage = None
    with held:
        for step in range(2):
            engine.step(step)
    return most


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", MODELS)
def test_a_stage_holds_what_was_promised_between_actions(name, optimizer):
    config, data = MODELS[name]
    engine = InlineEngine(
        prepare(
            make_config(
                {
                    "model": {"name": "hf", "config": config},
                    "data": data,
                    "num_stages": 4,
                    "batch_size": 32,
                    "num_microbatches": 4,
                    "steps": 2,
                    "profile_every_steps": 0,
                    "forward": "Quantize(8)",
                    "backward": "Quantize(8)",
                    "optimizer": {"name": optimizer},
                }
            )
        )
    )
    engine.start()
    found = between_actions(engine, Held())
    for memory in engine.workload.plan.memories:
        promised = memory.total_bytes - memory.messages_bytes  # packets are no tensors
        assert 0.9 * promised <= found[memory.stage] <= 1.1 * promised
    engine.close()
