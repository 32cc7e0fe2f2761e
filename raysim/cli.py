"""The command line. Every command imports what it needs itself, so that `raysim --help` imports neither torch nor Ray."""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from torch import Tensor

    from raysim.network.network import Network

app = typer.Typer(
    help="Which compression of pipeline-parallel training is safe for your model, and how much faster is it on your network?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure raysim on this machine, as ratios of two things timed in turn.", no_args_is_help=True)
app.add_typer(bench, name="bench")


def main() -> None:
    """Run the command line; bad input is one sentence and exit code 2, without a traceback."""
    app()


@contextmanager
def _bad_input_in_one_sentence() -> Iterator[None]:
    from raysim.config import ConfigError

    try:
        yield
    except ConfigError as error:
        _fail(str(error), 2)


def _fail(sentence: str, code: int) -> NoReturn:
    from rich.console import Console

    Console(stderr=True, soft_wrap=True, highlight=False).print(f"raysim: {sentence}", markup=False)
    raise typer.Exit(code)


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe's name (see `raysim recipes`), or a .toml file.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to it.")] = None,
    engine: Annotated[str, typer.Option(help="ray: one actor a stage. inline: all in this process.")] = "ray",
    out: Annotated[Path | None, typer.Option(help="The run's own folder [default: results/<name>/<run_id>].")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")] = False,
) -> None:
    """Train a pipeline with compressed links, and leave Parquet behind.

    For example: raysim train digits-cnn forward='TopK(0.1)' backward='Quantize(8)'
    """
    with _bad_input_in_one_sentence():
        from raysim.config import read_config
        from raysim.pipeline.checkpoint import CheckpointError
        from raysim.pipeline.faults import StageError, WorkerLostError
        from raysim.pipeline.training import Training
        from raysim.progress import show_training, tables

        def again(folder: Path) -> str:
            words = [
                "raysim",
                "train",
                recipe,
                *(overrides or []),
                "--engine",
                engine,
                "--out",
                str(folder),
                "--resume",
            ]
            return shlex.join(words)

        training = Training(read_config(recipe, overrides or []), out=out, engine=engine, resume=resume)
        signal.signal(signal.SIGTERM, _interrupt)
        try:
            show_training(training)
        except KeyboardInterrupt:
            _fail(f"interrupted. To go on: {again(training.folder)}", 130)
        except WorkerLostError as error:
            _fail(f"the run failed: {error}. To go on: {again(training.folder)}", 1)
        except (StageError, CheckpointError) as error:
            _fail(f"the run failed: {error}. Its records are in {training.folder}.", 1)
        from raysim.records import Run

        run = Run(training.folder)
        tables(run)
        if run.status == "diverged":
            _fail(f"the run diverged: {run.row['error']}.", 1)


def _interrupt(_signal: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


@app.command()
def sweep(
    study: Annotated[str, typer.Argument(help="A study's name (see `raysim studies`), or a .toml or .py file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to its base.")
    ] = None,
    trials: Annotated[int | None, typer.Option(help="Configurations trained at most, instead of the study's.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Trials at once [default: as many as have a CPU a stage].")] = None,
    out: Annotated[
        str | None, typer.Option(help="The study's own folder, or a bucket's URI [default: results/<name>/<time>].")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the study in --out.")] = False,
    address: Annotated[str | None, typer.Option(help="A running cluster, host:port or auto.")] = None,
    dashboard: Annotated[bool, typer.Option("--dashboard", help="Start Ray's dashboard, on loopback.")] = False,
) -> None:
    """Search the settings of a model over real training, and print what is worth it.

    For example: raysim sweep quickstart --out results/first-sweep
    """
    _check_ours("sweeps")
    _check_ours("analysis")
    with _bad_input_in_one_sentence():
        from sweeps.study import read_study

        chosen = read_study(study, overrides or [], trials=trials, jobs=jobs)
        from sweeps.runner import Sweep, SweepError
        from sweeps.show import show_result, show_sweep

        one = Sweep(chosen, out=out, resume=resume, address=address, dashboard=dashboard)
        options = [("--trials", trials), ("--jobs", jobs), ("--address", address), ("--out", one.store.out)]
        words = [word for option, value in options if value is not None for word in (option, str(value))]
        again = shlex.join(["raysim", "sweep", study, *(overrides or []), *words, "--resume"])
        try:
            show_sweep(one)
        except KeyboardInterrupt:
            _fail(f"interrupted. To go on: {again}", 130)
        except SweepError as error:
            _fail(f"{str(error).rstrip('.')}. To go on: {again}", 1)
        show_result(one)


@app.command()
def studies() -> None:
    """List the studies that come along, each with its first line."""
    from importlib import resources

    found = {
        entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        for entry in resources.files("sweeps").joinpath("studies").iterdir()
        if entry.name.endswith(".toml")
    }
    for name, first in sorted(found.items()):
        typer.echo(f"{name:<{max(map(len, found))}}  {first}")


Networks = Annotated[
    list[str] | None,
    typer.Option(
        "--network",
        help="A preset (free, 100mbps, 10gbps, worldwide, ...), text such as 100mbps+20ms, or a .toml or .csv file; may be repeated.",
    ),
]
TraceFile = Annotated[
    Path | None,
    typer.Option(help="Write a step on the first network here, for chrome://tracing or ui.perfetto.dev."),
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the figures here.")]


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a recorded run.")],
    network: Networks = None,
    against: Annotated[
        Path | None, typer.Option(help="The folder of the same run without compression: where does it pay?")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="A quality to reach: accuracy=0.9, loss=0.5 or perplexity=20.")
    ] = None,
    compute: Annotated[
        str, typer.Option(help="wall: seconds as they passed. cpu: CPU seconds, where stages shared cores.")
    ] = "wall",
    overheads: Annotated[
        str, typer.Option(help="run: of calls and packets, calibrated on the run. none: for runs over a slow network.")
    ] = "run",
    driver: Annotated[
        int | None, typer.Option(help="Host of Ray's driver, through which packets under 100 KiB go.")
    ] = None,
    trace: TraceFile = None,
    json_file: JsonFile = None,
) -> None:
    """What a recorded run would take on networks, without training.

    For example: raysim replay results/digits-cnn/RUN --network 100mbps --network worldwide
    """
    networks = _networks(network)
    _check_writable("--trace", trace)
    _check_writable("--json", json_file)
    _check_ours("analysis")
    from analysis import Replay, ReplayError, Target
    from analysis import replay as price
    from raysim.show import replay_figures, show_replay

    try:
        wanted = Target.parse(target) if target is not None else None
        options: dict[str, Any] = {"compute": compute, "overheads": overheads, "driver": driver}
        one = Replay(run, **options)
        dense = Replay(against, **options) if against is not None else None
        frame = price(one, networks, against=dense, target=wanted)
        show_replay(one, networks, frame, dense, wanted)
        if trace is not None:
            step, events = one.trace(networks[0])
            _write_trace(events, trace, f"step {step} on {networks[0]!r}")
        if json_file is not None:
            _write_json(replay_figures(one, networks, frame, wanted), json_file)
    except ReplayError as error:
        _fail(str(error), 2)


@app.command()
def findings(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder with runs or studies, at any depth.")],
    quality: Annotated[
        str, typer.Option(help="accuracy, loss, or auto: the loss of language models and the accuracy of all others.")
    ] = "auto",
    margin: Annotated[
        float | None,
        typer.Option(help="What does no harm [default: 0.5 points of accuracy, or 1 % of the loss]."),
    ] = None,
    confidence: Annotated[float, typer.Option(help="Of the intervals over seeds.")] = 0.95,
    network: Annotated[str, typer.Option(help="Where step times are compared.")] = "1gbps",
    json_file: JsonFile = None,
) -> None:
    """Test the papers' claims on your runs: what they support, what they contradict, and what to run to decide the rest.

    For example: raysim findings results
    """
    _check_writable("--json", json_file)
    _check_ours("analysis")
    from analysis import AnalysisError, load
    from analysis import findings as test_claims
    from raysim.show import findings_figures, show_findings

    try:
        results = load(folder)
        if results.runs.empty:
            _fail(" ".join(results.problems), 2)
        found = test_claims(results, quality=quality, margin=margin, confidence=confidence, network=network)
    except AnalysisError as error:
        _fail(str(error), 2)
    show_findings(found, results.problems)
    if json_file is not None:
        _write_json(findings_figures(found, results.problems), json_file)


@app.command()
def simulate(
    recipe: Annotated[str, typer.Argument(help="A recipe's name (see `raysim recipes`), or a .toml file.")],
    network: Networks = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to it.")] = None,
    device: Annotated[str | None, typer.Option(help="A GPU by its datasheet, such as A100: or --profile.")] = None,
    profile: Annotated[Path | None, typer.Option(help="A file of `raysim profile`: or --device.")] = None,
    efficiency: Annotated[
        float, typer.Option(help="Share of the datasheet's 16-bit peak that training reaches.")
    ] = 0.4,
    codec_speed: Annotated[
        float | None,
        typer.Option(help="Dense bytes a second that the device packs; measured on this machine by default."),
    ] = None,
    trace: TraceFile = None,
    json_file: JsonFile = None,
) -> None:
    """What a run that was never made would take on networks: nothing is trained.

    For example: raysim simulate gpt2-wikitext2 num_microbatches=8 schedule=ZBH1 --device A100 --network 1gbps+20ms
    """
    networks = _networks(network)
    _check_writable("--trace", trace)
    _check_writable("--json", json_file)
    with _bad_input_in_one_sentence():
        from raysim.network.trace import trace_events
        from raysim.pipeline.forecast import forecast
        from raysim.show import forecast_figures, show_forecast

        plan = forecast(
            recipe,
            *(overrides or []),
            device=device,
            profile=profile,
            efficiency=efficiency,
            codec_bytes_per_s=codec_speed,
        )
        show_forecast(plan, networks)
        if trace is not None:
            _write_trace(trace_events(plan.simulate(networks[0])), trace, f"a step on {networks[0]!r}")
        if json_file is not None:
            _write_json(forecast_figures(plan, networks), json_file)


@app.command()
def profile(
    recipe: Annotated[str, typer.Argument(help="A recipe's name (see `raysim recipes`), or a .toml file.")],
    out: Annotated[Path, typer.Option(help="The profile's file, for `raysim simulate --profile`.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to it.")] = None,
    steps: Annotated[int, typer.Option(help="Recorded steps; as many and two more are run beside.")] = 5,
) -> None:
    """Record what forwards and backwards cost on this machine, by a few steps in this process.

    For example: raysim profile topics-gpt --out topics.json
    """
    _check_writable("--out", out)
    with _bad_input_in_one_sentence():
        from raysim.config import read_config
        from raysim.pipeline.faults import DivergedError, StageError
        from raysim.pipeline.recorded import record_profile
        from raysim.show import show_profile

        try:
            found = record_profile(read_config(recipe, overrides or []), num_steps=steps)
        except (DivergedError, StageError) as error:
            _fail(f"the run failed: {error}.", 1)
        show_profile(found)
        found.save(out)
        typer.echo(f"Profile: {out}")


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run, a study, or a folder of either at any depth.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="The page; with --format md a folder [default: DIR/report.html or DIR/report]."
        ),
    ] = None,
    form: Annotated[
        str, typer.Option("--format", help="html: one page. md: Markdown, PNG figures, and their data as CSV.")
    ] = "html",
    network: Networks = None,
    compute: Annotated[
        str, typer.Option(help="wall: seconds as they passed. cpu: CPU seconds, where stages or runs shared cores.")
    ] = "wall",
) -> None:
    """Pictures and words of what runs and studies show: one page that needs nothing but a browser.

    For example: raysim report results -o report.html
    """
    for option, value, known in (("--format", form, ("html", "md")), ("--compute", compute, ("wall", "cpu"))):
        if value not in known:
            _fail(f"`{option}` must be {' or '.join(known)}, but got {value!r}.", 2)
    networks = _networks(network) if network else None
    if not folder.is_dir():
        _fail(f"There is no folder {folder}.", 2)
    target = out or folder / ("report.html" if form == "html" else "report")
    if form == "html":
        _check_writable("--out", target)
    elif target.exists() and not target.is_dir():
        _fail(f"`--out` must be a folder with --format md, but {target} is a file.", 2)
    _check_ours("analysis")
    from analysis import AnalysisError
    from analysis.report import NETWORKS, write_report
    from raysim.show import console

    try:
        with console().status(f"reading {folder}"):
            page = write_report(folder, target, form=form, networks=networks or NETWORKS, compute=compute)
    except AnalysisError as error:
        _fail(str(error), 2)
    except OSError as error:
        _fail(f"`--out` must be a place that can be written, but got {str(target)!r}: {error.strerror}.", 2)
    for problem in page.problems:
        typer.echo(f"- {problem}")
    typer.echo(f"Report of {page.subtitle[:-1]}: {target if form == 'html' else target / 'report.md'}")


def _networks(texts: list[str] | None) -> list[Network]:
    if not texts:
        _fail("`--network` must be given once or more, as in --network 100mbps.", 2)
    from raysim.network.presets import parse_network

    try:
        return [parse_network(text) for text in texts]
    except ValueError as error:
        _fail(f"`--network`: {error}", 2)


def _check_writable(option: str, file: Path | None) -> None:
    """Fail where a file cannot be written, before anything starts; leaves nothing behind."""
    if file is None:
        return
    new = not file.exists()
    try:
        with file.open("a"):
            pass
    except OSError as error:
        _fail(f"`{option}` must be a file that can be written, but got {str(file)!r}: {error.strerror}.", 2)
    if new:
        file.unlink()


def _check_ours(package: str) -> None:
    """Fail where another package of that name comes first, such as a folder that one stands in."""
    from importlib.util import find_spec

    here = Path(__file__).resolve().parent.parent / package
    found = find_spec(package)
    if found is None or found.origin is None or Path(found.origin).resolve().parent != here:
        _fail(
            f"`{package}` must be raysim's own, in {here}, but Python finds {found and found.origin}: run it elsewhere.",
            2,
        )


def _write_json(figures: dict[str, Any], file: Path) -> None:
    file.write_text(json.dumps(figures, indent=1, allow_nan=False), encoding="utf-8")
    typer.echo(f"Figures: {file}")


def _write_trace(events: Iterator[dict[str, Any]], file: Path, what: str) -> None:
    from raysim.network.trace import write_trace

    typer.echo(f"Trace of {what}: {file}, {write_trace(events, file):,} events")


@app.command()
def recipes() -> None:
    """List the recipes, each with its first line."""
    from importlib import resources

    from raysim.config import recipe_names

    names = recipe_names()
    for name in names:
        first = resources.files("raysim.recipes").joinpath(f"{name}.toml").read_text(encoding="utf-8").splitlines()[0]
        typer.echo(f"{name:<{max(map(len, names))}}  {first.lstrip('# ')}")


@app.command()
def keys() -> None:
    """List every configuration key, its default and what it does; options of models and data sets are their own."""
    from rich.console import Console
    from rich.table import Table

    from raysim.config import OptimizerConfig, RunConfig

    table = Table("key", "default", "what it does", box=None)
    for prefix, model in (("", RunConfig), ("optimizer.", OptimizerConfig)):
        for name, field in model.model_fields.items():
            if name != "optimizer":
                default = getattr(field.default, "name", field.default)
                table.add_row(prefix + name, "" if default is None else str(default), field.description)
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 140
    console.print(table)


@bench.command("pipeline")
def bench_pipeline(
    stages: Annotated[
        list[int] | None,
        typer.Option(min=2, max=8, help="Numbers of stages, at most the microbatches [default: 2 and 4]."),
    ] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Alternating pairs of runs.")] = 7,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each run.")] = 20,
    json_file: JsonFile = None,
) -> None:
    """The same GPT under torch.distributed.pipelining over gloo and under raysim's Ray engine, in turn."""
    _check_writable("--json", json_file)
    from raysim.bench.pipeline import bench_pipeline as measure

    result = measure(stages or [2, 4], pairs=pairs, steps=steps)
    if json_file is not None:
        _write_json(result, json_file)


@bench.command("backward")
def bench_backward(
    stages: Annotated[int, typer.Option(min=2, max=7, help="Number of stages.")] = 4,
    pairs: Annotated[int, typer.Option(min=1, help="Alternating pairs of backwards.")] = 51,
    json_file: JsonFile = None,
) -> None:
    """A backward in two parts, as zero-bubble schedules run it, beside one backward."""
    _check_writable("--json", json_file)
    from raysim.bench.backward import bench_backward as measure

    result = measure(stages, pairs=pairs)
    if json_file is not None:
        _write_json(result, json_file)


@bench.command("simulate")
def bench_simulate(json_file: JsonFile = None) -> None:
    """One very large schedule, and one recorded run on thousands of networks."""
    _check_writable("--json", json_file)
    from raysim.bench.simulate import bench_simulate as measure

    result = measure()
    if json_file is not None:
        _write_json(result, json_file)


@bench.command("sweep")
def bench_sweep(
    trials: Annotated[int, typer.Option(min=2, max=12, help="Configurations.")] = 12,
    steps: Annotated[int, typer.Option(min=1, help="Of each; the default takes some seconds.")] = 150,
    jobs: Annotated[int | None, typer.Option(min=1, help="Trials at once.")] = None,
    engine: Annotated[str, typer.Option(help="ray or inline, of both.")] = "ray",
    json_file: JsonFile = None,
) -> None:
    """One sweep against the same configurations as separate `raysim train` calls."""
    _check_writable("--json", json_file)
    _check_ours("sweeps")
    from sweeps.bench import bench_sweep as measure

    if engine not in ("ray", "inline"):
        _fail(f"`--engine` must be one of ray, inline, but got {engine!r}.", 2)
    try:
        result = measure(trials=trials, steps=steps, jobs=jobs, engine=engine)
    except RuntimeError as error:
        _fail(str(error), 1)
    if json_file is not None:
        _write_json(result, json_file)


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
            help="Recipes whose activations and gradients are measured too; those that run offline by default.",
        ),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    others: Annotated[bool, typer.Option(help="Measure plain torch and numcodecs too.")] = True,
    json_file: JsonFile = None,
) -> None:
    """What codecs cost beside one memcpy of the tensor, what they save, and their error."""
    _check_writable("--json", json_file)
    from raysim.bench.codecs import DEFAULTS, SIZES, table
    from raysim.bench.codecs import bench_codecs as measure
    from raysim.bench.recorded import RECIPES, record_tensors
    from raysim.codecs import CODECS
    from raysim.config import ConfigError
    from raysim.notation import parse
    from raysim.show import console

    try:
        chosen = [parse(text, CODECS) for text in codecs] if codecs else DEFAULTS
    except ValueError as error:
        _fail(f"`codecs`: {error}", 2)
    out = console()
    with out.status("") as status:
        recorded: dict[str, Tensor] = {}
        for recipe in recipes or RECIPES:
            status.update(f"training {recipe}")
            try:
                recorded |= record_tensors(recipe)
            except ConfigError as error:
                _fail(str(error), 2)
        result = measure(
            tuple(sizes or SIZES),
            codecs=chosen,
            recorded=recorded,
            others=others,
            threads=threads,
            progress=lambda name: status.update(f"measuring {name}"),
        )
    out.print(table(result))
    if json_file is not None:
        _write_json(result, json_file)


if __name__ == "__main__":
    main()
