"""The commands `raysim bench` and `raysim validate`, registered as entry points `raysim.commands`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysim.cli.exits import end_on_sigterm, fail
from raysim.cli.options import JsonFile, write_json

if TYPE_CHECKING:
    from torch import Tensor

    from raysim.codecs import Codec

HELP = {"help_option_names": ["-h", "--help"]}

bench = typer.Typer(
    help="Measure raysim on this machine, as ratios of two things timed in turn.",
    no_args_is_help=True,
    add_completion=False,
    context_settings=HELP,
)
validate = typer.Typer(add_completion=False, context_settings=HELP)

Device = Annotated[str, typer.Option(help="Where to measure: cpu or cuda.")]


@contextmanager
def measuring(json_file: Path | None = None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that writes figures to the file of `--json`; report failed runs in one sentence."""
    from raysim_benchmarks.harness import FailedError

    try:
        yield lambda figures: write_json(figures, json_file)
    except FailedError as error:
        fail(str(error), 1)


def _check_device(device: str) -> None:
    """Fail in one sentence if the device of `--device` is unknown or missing."""
    if device not in ("cpu", "cuda"):
        fail(f"`--device` must be cpu or cuda, but got {device!r}.", 2)
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            fail("`--device` = cuda needs a GPU, and torch finds none here. Leave it out to measure on the CPU.", 2)


def _parse(codecs: Iterable[str]) -> list[Codec]:
    """Return the codecs of these notations; fail in one sentence if one is none."""
    from raysim.codecs import CODECS
    from raysim.notation import parse_notation

    try:
        return [parse_notation(text, CODECS) for text in codecs]
    except ValueError as error:
        fail(f"`codecs`: {error}", 2)


@bench.command("pipeline")
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
    with measuring(json_file) as write:
        _check_device(device)
        if device == "cuda":
            from raysim_benchmarks.bench.gpu import bench_gpu

            write({"results": [bench_gpu(num_stages, pairs=pairs, steps=steps) for num_stages in stages or [4]]})
        else:
            from raysim_benchmarks.bench.pipeline import bench_pipeline as measure

            write(measure(stages or [2, 4], pairs=pairs, steps=steps))


@bench.command("hops")
def bench_hops(
    stages: Annotated[
        list[int] | None, typer.Option(min=2, max=8, help="Numbers of stages (default: 2 and 4).")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each run.")] = 100,
    json_file: JsonFile = None,
) -> None:
    """Microseconds that a packet needs from worker to worker, of a GPT whose stages compute for a few milliseconds."""
    with measuring(json_file) as write:
        from raysim_benchmarks.bench.hops import bench_hops as measure

        write(measure(stages or [2, 4], steps=steps))


@bench.command("links")
def bench_links(
    hosts: Annotated[int, typer.Option(min=2, max=8, help="Hosts, a stage on each.")] = 2,
    turns: Annotated[int, typer.Option(min=1, help="Runs of every side, in turn.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each run.")] = 10,
    json_file: JsonFile = None,
) -> None:
    """The same GPT over slow links between hosts made on this machine (Linux, root): torch, and raysim compressed."""
    with measuring(json_file) as write:
        from raysim_benchmarks.bench.links import bench_links as measure

        end_on_sigterm()
        write(measure(num_hosts=hosts, turns=turns, steps=steps))


@bench.command("ddp")
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
    with measuring(json_file) as write:
        from raysim_benchmarks.bench.ddp import bench_ddp as measure

        end_on_sigterm()
        write({"results": measure(hosts or [2, 4], rate or ["100mbps", "20mbps"], steps=steps)})


@bench.command("backward")
def bench_backward(
    stages: Annotated[int, typer.Option(min=2, max=7, help="Number of stages.")] = 4,
    pairs: Annotated[int, typer.Option(min=1, help="Alternating pairs of backwards.")] = 51,
    json_file: JsonFile = None,
) -> None:
    """Compare a backward in two parts, as in zero-bubble schedules, with a single backward."""
    with measuring(json_file) as write:
        from raysim_benchmarks.bench.backward import bench_backward as measure

        write(measure(stages, pairs=pairs))


@bench.command("plain")
def bench_plain(
    pairs: Annotated[int, typer.Option(min=1, help="Alternating pairs of runs.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each run.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads, of both.")] = 1,
    json_file: JsonFile = None,
) -> None:
    """Compare ResNet-18 in one process under the inline engine and in a plain torch loop with compression at the same cuts."""
    with measuring(json_file) as write:
        from raysim_benchmarks.bench.plain import bench_plain as measure

        write(measure(pairs=pairs, steps=steps, threads=threads))


@bench.command("adapter")
def bench_adapter(
    pairs: Annotated[int, typer.Option(min=1, help="Alternating pairs of passes.")] = 51,
    json_file: JsonFile = None,
) -> None:
    """Compare models of transformers with raysim's layers of them, in turn."""
    with measuring(json_file) as write:
        from raysim.workloads.options import import_hub

        try:
            import_hub("transformers")
        except ValueError as error:
            fail(str(error), 2)
        from raysim_benchmarks.bench.adapter import bench_adapter as measure

        write(measure(pairs=pairs))


@bench.command("probe")
def bench_probe(
    turns: Annotated[int, typer.Option(min=1, help="Turns, each without a probe and with two.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each.")] = 10,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    json_file: JsonFile = None,
) -> None:
    """A GPT in a plain loop: with `raysim.probe` around it and without, in turn."""
    with measuring(json_file) as write:
        from raysim_benchmarks.bench.probe import bench_probe as measure

        write(measure(turns=turns, steps=steps, threads=threads))


@bench.command("simulate")
def bench_simulate(json_file: JsonFile = None) -> None:
    """One very large schedule, and one recorded run on thousands of networks."""
    with measuring(json_file) as write:
        from raysim_benchmarks.bench.simulate import bench_simulate as measure

        write(measure())


@bench.command("sweep")
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
    if engine not in (None, "ray", "inline"):
        fail(f"`--engine` must be one of ray, inline, but got {engine!r}.", 2)
    with measuring(json_file) as write:
        from raysim_benchmarks.bench.sweep import bench_sweep as measure

        write(measure(trials=trials, steps=steps, jobs=jobs, engine=engine))


@bench.command("nodes")
def bench_nodes(
    nodes: Annotated[
        list[int] | None, typer.Option(min=1, max=64, help="Numbers of Ray nodes (default: 1, 5, 10 and 20).")
    ] = None,
    trials: Annotated[int, typer.Option(min=2, help="Configurations, of four stages each.")] = 64,
    steps: Annotated[int, typer.Option(min=1, help="Of each.")] = 10,
    json_file: JsonFile = None,
) -> None:
    """A sweep over several Ray nodes that are processes of this machine: CPU seconds of a trial, by kind of process."""
    with measuring(json_file) as write:
        from raysim_benchmarks.bench.nodes import bench_nodes as measure

        write({"results": measure(nodes or [1, 5, 10, 20], trials=trials, steps=steps)})


@bench.command("codecs")
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
            help="Recipes whose activations and gradients are measured too (default on the CPU: all that run offline).",
        ),
    ] = None,
    dtypes: Annotated[
        list[str] | None,
        typer.Option("--dtype", help="float32, bfloat16 or float16; may be repeated (default: float32)."),
    ] = None,
    kinds: Annotated[
        list[str] | None, typer.Option("--kind", help="normal, relu or 'heavy tail'; may be repeated (default: all).")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    others: Annotated[bool, typer.Option(help="Measure plain torch and numcodecs too.")] = True,
    device: Device = "cpu",
    json_file: JsonFile = None,
) -> None:
    """Measure codecs: seconds relative to one copy of the tensor, bytes saved, and the error."""
    with measuring(json_file) as write:
        _check_device(device)
        from raysim.cli.terminal import console
        from raysim_benchmarks.bench.codecs import DEFAULTS, KINDS, SIZES, table
        from raysim_benchmarks.bench.codecs import bench_codecs as measure
        from raysim_benchmarks.bench.recorded import RECIPES, record_tensors

        chosen = _parse(codecs or ()) or DEFAULTS
        for option, given, allowed in (("kind", kinds, KINDS), ("dtype", dtypes, ("float32", "bfloat16", "float16"))):
            for name in given or ():
                if name not in allowed:
                    fail(f"`--{option}` must be one of {', '.join(allowed)}, but got {name!r}.", 2)
        out = console()
        with out.status("") as status:
            recorded: dict[str, Tensor] = {}
            for recipe in recipes or (RECIPES if device == "cpu" else ()):
                status.update(f"training {recipe}")
                recorded |= record_tensors(recipe)
            figures = measure(
                tuple(sizes or SIZES),
                kinds or KINDS,
                chosen,
                dtypes=dtypes or ("float32",),
                recorded=recorded,
                others=others,
                threads=threads,
                device=device,
                progress=lambda name: status.update(f"measuring {name}"),
            )
        out.print(table(figures))
        write(figures)


@bench.command("overlap")
def bench_overlap(
    codecs: Annotated[list[str] | None, typer.Argument(help="Codecs, such as TopK(0.1).")] = None,
    size: Annotated[int, typer.Option(min=8192, help="Values of the tensor.")] = 1 << 22,
    width: Annotated[int, typer.Option(min=16, help="Rows and columns of the matrices.")] = 4096,
    device: Device = "cuda",
    json_file: JsonFile = None,
) -> None:
    """Encode and decode during matrix products on a GPU: the share of a codec's time that the products hide."""
    with measuring(json_file) as write:
        _check_device(device)
        from raysim.cli.terminal import console
        from raysim_benchmarks.bench.overlap import DEFAULTS, table
        from raysim_benchmarks.bench.overlap import bench_overlap as measure

        figures = measure(_parse(codecs or DEFAULTS), numel=size, width=width, device=device)
        console().print(table(figures))
        write(figures)


@bench.command("passes")
def bench_passes(
    codecs: Annotated[list[str] | None, typer.Argument(help="Codecs, such as TopK(0.1).")] = None,
    json_file: JsonFile = None,
) -> None:
    """Count the bytes that GPU codecs move per byte of the tensor, and the minimum; needs no GPU."""
    with measuring(json_file) as write:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
        from raysim.cli.terminal import console
        from raysim_benchmarks.bench.passes import DEFAULTS, table
        from raysim_benchmarks.bench.passes import bench_passes as measure

        figures = measure(_parse(codecs or DEFAULTS))
        console().print(table(figures))
        write(figures)


@validate.command("validate")
def validate_prices(
    rate: Annotated[
        list[str] | None, typer.Option(help="A link, such as 20mbps or 50mbps+20ms (default: the campaign's links).")
    ] = None,
    codec: Annotated[
        list[str] | None, typer.Option(help="A codec both ways, or of replicas the method of their gradients.")
    ] = None,
    schedule: Annotated[list[str] | None, typer.Option(help="A schedule (default: 1F1B).")] = None,
    hosts: Annotated[list[int] | None, typer.Option(min=2, max=8, help="Hosts, of all replicas (default: 2).")] = None,
    replicas: Annotated[int, typer.Option(min=1, max=8, help="Replicas, on hosts that meet at a switch.")] = 1,
    recipe: Annotated[str, typer.Option(help="A recipe or a configuration (default: a narrow GPT).")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Steps of every case.")] = 5,
    trips: Annotated[
        bool, typer.Option("--trips", help="Measure how many times a packet pays the latency, instead of cases.")
    ] = False,
    count: Annotated[
        bool,
        typer.Option(
            "--count", help="Compare the bytes on every cable with the bytes in the records, instead of cases."
        ),
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder of the cases' runs and of their table.")] = Path("results/validate"),
) -> None:
    """Predictions against real Ray clusters over real shaped links, on hosts made on this machine (Linux, root).

    Without `--rate`, `--codec`, `--schedule`, `--hosts`, `--replicas` and `--recipe` the whole campaign is run, else every
    combination of them. Runs in the folder are not made again, so the same command continues a killed one.
    For example: raysim validate --rate 20mbps --rate 50mbps --codec 'TopK(0.1)' --hosts 3
    """
    with measuring():
        end_on_sigterm()
        given = {"rate": rate, "schedule": schedule, "replicas": replicas > 1, "recipe": recipe}
        _check_alone(count, trips, given, {"hosts": hosts, "codec": codec})
        from raysim_benchmarks.validate import cases, command

        if trips:
            command.measure_trips(out, rounds)
        elif count:
            command.count_bytes(out, rounds, hosts, codec)
        elif any(given.values()) or hosts or codec:
            chosen = cases.pipelines(
                hosts or [max(2, replicas)],
                replicas,
                codec or ["Identity"],
                schedule or ["1F1B"],
                rate or cases.DENSE_LINKS,
                recipe,
            )
            command.measure_cases(out, rounds, list(chosen))
        else:
            command.measure_cases(out, rounds, cases.campaign())


def _check_alone(count: bool, trips: bool, of_cases: Mapping[str, object], of_count: Mapping[str, object]) -> None:
    """Fail in one sentence if an option of cases, or of cases and `--count`, is given to another measurement."""
    if count and trips:
        fail("`--count` and `--trips` are measurements of their own: give one of them.", 2)
    chosen = "--count" if count else "--trips"
    for option, value in {**of_cases, **({} if count else of_count)}.items():
        if (count or trips) and value:
            fail(f"`--{option}` is for cases, not for `{chosen}`.", 2)
