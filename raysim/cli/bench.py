"""Measurements of raysim on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from raysim.cli.exits import end_on_sigterm, fail
from raysim.cli.options import JsonFile, check_writable, write_json

if TYPE_CHECKING:
    from torch import Tensor


Device = Annotated[str, typer.Option(help="Where to measure: cpu or cuda.")]


@contextmanager
def on_made_hosts() -> Iterator[None]:
    """Let a command that makes hosts on this machine remove them at SIGTERM, and end in one sentence if it fails."""
    from raysim.validate.runs import FailedError

    end_on_sigterm()
    try:
        yield
    except FailedError as error:
        fail(str(error), 1)


def _check_device(device: str) -> None:
    """End with one sentence where the device of `--device` is not there."""
    if device not in ("cpu", "cuda"):
        fail(f"`--device` must be cpu or cuda, but got {device!r}.", 2)
    if device == "cuda":
        from raysim.bench.gpu import available

        if not available():
            fail("`--device` = cuda needs a GPU, and torch finds none here. Leave it out to measure on the CPU.", 2)


def bench_pipeline(
    stages: Annotated[
        list[int] | None,
        typer.Option(min=2, max=8, help="Numbers of stages, at most the microbatches (default: 2 and 4)."),
    ] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Alternating pairs of runs.")] = 7,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each run.")] = 20,
    device: Device = "cpu",
    json_file: JsonFile = None,
) -> None:
    """The same GPT under torch.distributed.pipelining over gloo and under raysim's Ray engine, in turn.

    On a GPU: a GPT of GPT-2 small's shape in one process, and as stages that share the GPU.
    """
    check_writable("--json", json_file)
    _check_device(device)
    if device == "cuda":
        from raysim.bench.gpu import bench_gpu

        result = {"results": [bench_gpu(num_stages, pairs=pairs, steps=steps) for num_stages in stages or [4]]}
    else:
        from raysim.bench.pipeline import bench_pipeline as measure

        result = measure(stages or [2, 4], pairs=pairs, steps=steps)
    if json_file is not None:
        write_json(result, json_file)


def bench_hops(
    stages: Annotated[
        list[int] | None, typer.Option(min=2, max=8, help="Numbers of stages (default: 2 and 4).")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each run.")] = 100,
    json_file: JsonFile = None,
) -> None:
    """Microseconds that a packet needs from worker to worker, of a GPT whose stages compute for a few milliseconds."""
    check_writable("--json", json_file)
    from raysim.bench.hops import bench_hops as measure

    result = measure(stages or [2, 4], steps=steps)
    if json_file is not None:
        write_json(result, json_file)


def bench_links(
    hosts: Annotated[int, typer.Option(min=2, max=8, help="Hosts, a stage on each.")] = 2,
    turns: Annotated[int, typer.Option(min=1, help="Runs of every side, in turn.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each run.")] = 10,
    json_file: JsonFile = None,
) -> None:
    """The same GPT over slow links between hosts made on this machine (Linux, root): torch, and raysim compressed."""
    check_writable("--json", json_file)
    with on_made_hosts():
        from raysim.bench.links import bench_links as measure

        result = measure(num_hosts=hosts, turns=turns, steps=steps)
    if json_file is not None:
        write_json(result, json_file)


def bench_ddp(
    hosts: Annotated[
        list[int] | None, typer.Option(min=2, max=8, help="Numbers of hosts, a rank on each (default: 2 and 4).")
    ] = None,
    rate: Annotated[
        list[str] | None, typer.Option(help="Bandwidths of the links (default: 100mbps and 20mbps).")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each contender.")] = 10,
    json_file: JsonFile = None,
) -> None:
    """DistributedDataParallel between hosts made on this machine (Linux, root): plain, with torch's hooks, and with raysim's."""
    check_writable("--json", json_file)
    with on_made_hosts():
        from raysim.bench.ddp import bench_ddp as measure

        rows = measure(hosts or [2, 4], rate or ["100mbps", "20mbps"], steps=steps)
    if json_file is not None:
        write_json({"results": rows}, json_file)


def bench_backward(
    stages: Annotated[int, typer.Option(min=2, max=7, help="Number of stages.")] = 4,
    pairs: Annotated[int, typer.Option(min=1, help="Alternating pairs of backwards.")] = 51,
    json_file: JsonFile = None,
) -> None:
    """A backward in two parts, as zero-bubble schedules run it, beside one backward."""
    check_writable("--json", json_file)
    from raysim.bench.backward import bench_backward as measure

    result = measure(stages, pairs=pairs)
    if json_file is not None:
        write_json(result, json_file)


def bench_plain(
    pairs: Annotated[int, typer.Option(min=1, help="Alternating pairs of runs.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each run.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads, of both.")] = 1,
    json_file: JsonFile = None,
) -> None:
    """ResNet-18 in one process: the inline engine beside a loop in plain torch with compression at the same cuts."""
    check_writable("--json", json_file)
    from raysim.bench.plain import bench_plain as measure

    result = measure(pairs=pairs, steps=steps, threads=threads)
    if json_file is not None:
        write_json(result, json_file)


def bench_adapter(
    pairs: Annotated[int, typer.Option(min=1, help="Alternating pairs of passes.")] = 51,
    json_file: JsonFile = None,
) -> None:
    """Models of transformers as the layers that raysim cuts, beside the models themselves, in turn."""
    check_writable("--json", json_file)
    from raysim.workloads.options import import_hub

    try:
        import_hub("transformers")
    except ValueError as error:
        fail(str(error), 2)
    from raysim.bench.adapter import bench_adapter as measure

    result = measure(pairs=pairs)
    if json_file is not None:
        write_json(result, json_file)


def bench_probe(
    turns: Annotated[int, typer.Option(min=1, help="Turns, each without a probe and with two.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each.")] = 10,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    json_file: JsonFile = None,
) -> None:
    """A GPT in a plain loop: with `raysim.probe` around it and without, in turn."""
    check_writable("--json", json_file)
    from raysim.bench.probe import bench_probe as measure

    result = measure(turns=turns, steps=steps, threads=threads)
    if json_file is not None:
        write_json(result, json_file)


def bench_simulate(json_file: JsonFile = None) -> None:
    """One very large schedule, and one recorded run on thousands of networks."""
    check_writable("--json", json_file)
    from raysim.bench.simulate import bench_simulate as measure

    result = measure()
    if json_file is not None:
        write_json(result, json_file)


def bench_sweep(
    trials: Annotated[int, typer.Option(min=2, max=12, help="Configurations.")] = 12,
    steps: Annotated[int, typer.Option(min=1, help="Of each; the default takes some seconds.")] = 75,
    jobs: Annotated[int | None, typer.Option(min=1, help="Trials at once.")] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="ray or inline, of both (default: trials in a process each, calls on Ray)."),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """One sweep against the same configurations as separate `raysim train` calls."""
    check_writable("--json", json_file)
    from raysim.sweeps.bench import bench_sweep as measure

    if engine not in (None, "ray", "inline"):
        fail(f"`--engine` must be one of ray, inline, but got {engine!r}.", 2)
    try:
        result = measure(trials=trials, steps=steps, jobs=jobs, engine=engine)
    except RuntimeError as error:
        fail(str(error), 1)
    if json_file is not None:
        write_json(result, json_file)


def bench_nodes(
    nodes: Annotated[
        list[int] | None, typer.Option(min=1, max=64, help="Numbers of Ray nodes (default: 1, 5, 10 and 20).")
    ] = None,
    trials: Annotated[int, typer.Option(min=2, help="Configurations, of four stages each.")] = 64,
    steps: Annotated[int, typer.Option(min=1, help="Of each.")] = 10,
    json_file: JsonFile = None,
) -> None:
    """A sweep over several Ray nodes that are processes of this machine: CPU seconds of a trial, by kind of process."""
    check_writable("--json", json_file)
    from raysim.sweeps.bench_nodes import bench_nodes as measure

    try:
        rows = measure(nodes or [1, 5, 10, 20], trials=trials, steps=steps)
    except RuntimeError as error:
        fail(str(error), 1)
    if json_file is not None:
        write_json({"results": rows}, json_file)


def bench_codecs(
    codecs: Annotated[
        list[str] | None, typer.Argument(help="Codecs, such as TopK(0.1); a choice of all by default.")
    ] = None,
    sizes: Annotated[
        list[int] | None, typer.Option("--size", min=512, help="Values of a tensor; may be repeated.")
    ] = None,
    recipes: Annotated[
        list[str] | None,
        typer.Option(
            "--recipe",
            help="Recipes whose activations and gradients are measured too (default: all that run offline).",
        ),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    others: Annotated[bool, typer.Option(help="Measure plain torch and numcodecs too.")] = True,
    device: Device = "cpu",
    json_file: JsonFile = None,
) -> None:
    """Measure codecs: seconds beside one copy of the tensor, bytes saved, and the error."""
    check_writable("--json", json_file)
    _check_device(device)
    from raysim.bench.codecs import DEFAULTS, SIZES, table
    from raysim.bench.codecs import bench_codecs as measure
    from raysim.bench.recorded import RECIPES, record_tensors
    from raysim.codecs import CODECS
    from raysim.config import ConfigError
    from raysim.notation import parse
    from raysim.show.terminal import console

    try:
        chosen = [parse(text, CODECS) for text in codecs] if codecs else DEFAULTS
    except ValueError as error:
        fail(f"`codecs`: {error}", 2)
    out = console()
    with out.status("") as status:
        recorded: dict[str, Tensor] = {}
        for recipe in recipes or RECIPES:
            status.update(f"training {recipe}")
            try:
                recorded |= record_tensors(recipe)
            except ConfigError as error:
                fail(str(error), 2)
        result = measure(
            tuple(sizes or SIZES),
            codecs=chosen,
            recorded=recorded,
            others=others,
            threads=threads,
            device=device,
            progress=lambda name: status.update(f"measuring {name}"),
        )
    out.print(table(result))
    if json_file is not None:
        write_json(result, json_file)
