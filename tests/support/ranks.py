"""Processes of one gloo group on loopback that each run a function, for what needs torch.distributed."""

import importlib
import os
import pickle
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).parents[2]


class RankError(AssertionError):
    """A rank did not end well; the message holds the end of each one's output."""


def run_ranks(function, world_size, folder, *arguments, timeout_s=180):
    """Return each rank's result of `function`, "module:name" of tests/support, called with rank, world size and arguments."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "arguments").write_bytes(pickle.dumps(arguments))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")]),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, function, str(rank), str(world_size), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [rank.communicate(timeout=timeout_s)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(rank.returncode for rank in ranks):
        raise RankError("\n".join(f"rank {n}: {output[-3000:]}" for n, output in enumerate(outputs)))
    return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world_size)]


def in_turn(rank, world_size, jobs):
    """Run the function of each job with its arguments."""
    return {name: _named(function)(rank, world_size, *arguments) for name, (function, *arguments) in jobs.items()}


def _named(function):
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


def main():
    function, rank, world_size, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    import torch
    from torch import distributed as dist

    torch.set_num_threads(1)
    _leave_out_warm_up()
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    arguments = pickle.loads((folder / "arguments").read_bytes())
    result = _named(function)(rank, world_size, *arguments)
    (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(
        0
    )  # threads of gloo's that are still there end the interpreter's own exit by `terminate`, once in some hundred runs


def _leave_out_warm_up():
    """Keep older torch, as 2.10, from warming NCCL up: if a V's next stage is on the same rank, gloo cannot send to itself."""
    from torch.distributed.pipelining import stage

    if not hasattr(stage.PipelineStage, "_warmup_forward_vote"):
        stage._PipelineStageBase._get_init_p2p_neighbors_ops = lambda self: []


if __name__ == "__main__":
    main()


def check_refusals(ranks, sentences):
    """Assert that every rank was refused with the same sentences, in this order."""
    for rank in ranks:
        for said, sentence in zip(rank["refusals"], sentences, strict=True):
            assert said is not None, sentence
            assert sentence in said
