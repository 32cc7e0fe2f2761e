"""The doors of the house: a module imports only from the rooms below it, and what is heavy only where it is used."""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
THIRD_PARTY = {
    "torch",
    "ray",
    "pandas",
    "optuna",
    "jinja2",
    "plotly",
    "matplotlib",
    "numba",
    "pyarrow",
    "pydantic",
    "typer",
    "rich",
    "safetensors",
}

# What each room may import of ours, and of the third-party packages that matter.
LOW = {
    "console",
    "limits",
    "notation",
    "on_demand",
    "plugins",
    "quality",
    "random",
    "signals",
    "storage.files",
    "storage.texts",
    "units",
    "values",
}
TENSORS = {"codecs", "compressors", "replication", "schedules", "network", *LOW}
RUNS = {*TENSORS, "workloads", "config", "storage", "records"}
RECORDS = {
    "storage",
    "records",
    "network",
    "quality",
    "schedules",
    "notation",
    "plugins",
    "config",
    "units",
}
PRICED_RUNS = {"analysis.data", "analysis.runs"}
STUDIES = {"config", "network", "sweeps.budget", "sweeps.objectives", "sweeps.space"}

ROOMS = {
    "raysim.limits": (set(), set()),
    "raysim.plugins": (set(), set()),
    "raysim.notation": ({"plugins"}, set()),
    "raysim.random": (set(), set()),
    "raysim.console": ({"notation"}, {"rich"}),
    "raysim.signals": (set(), set()),
    "raysim.on_demand": (set(), {"torch"}),
    "raysim.quality": (set(), set()),
    "raysim.units": (set(), set()),
    "raysim.scaling": (set(), set()),
    "raysim.storage": ({"notation"}, {"pyarrow"}),
    "raysim.values": (set(), {"torch"}),
    "raysim.codecs": (LOW, {"torch"}),
    "raysim.codecs.kernels": ({"codecs", "on_demand"}, {"torch", "numba"}),
    "raysim.compressors": ({"codecs", *LOW}, {"torch"}),
    "raysim.replication": ({"codecs", "compressors", *LOW}, {"torch"}),
    "raysim.schedules": ({"storage.files", "notation"}, set()),
    "raysim.network": ({"storage.files", "storage.texts", "notation", "schedules", "units"}, {"numba"}),
    "raysim.workloads": (LOW, {"torch", "pyarrow"}),
    "raysim.config": ({*TENSORS, "recipes"}, {"pydantic"}),
    "raysim.records": ({*TENSORS, "storage", "config"}, {"pyarrow", "pandas"}),
    "raysim.pipeline": (RUNS, {"torch", "safetensors"}),
    "raysim.engine": ({*RUNS, "pipeline"}, {"torch"}),
    "raysim.engine.actor": ({*RUNS, "pipeline", "engine"}, {"torch", "ray"}),
    "raysim.engine.connection": (
        {"config", "engine", "limits", "pipeline.errors", "signals", "storage.files"},
        {"ray"},
    ),
    "raysim.engine.resources": ({"config", "engine.ray_internals", "limits", "network", "pipeline.errors"}, {"ray"}),
    "raysim.engine.calibrate": ({"engine", "network", "pipeline.messages"}, {"ray"}),
    "raysim.engine.nodes": ({*RUNS, "pipeline", "engine"}, {"ray"}),
    "raysim.engine.delivery": ({*RUNS, "pipeline", "engine.ray_internals"}, set()),
    "raysim.engine.watch": (set(), set()),
    "raysim.engine.ray_internals": (set(), {"ray"}),
    "raysim.engine.ray": ({*RUNS, "pipeline", "engine"}, {"torch", "ray"}),
    "raysim.forecast": ({*RUNS, "pipeline", "engine"}, {"torch", "pydantic", "matplotlib"}),
    "raysim.training": ({*RUNS, "pipeline", "engine", "forecast"}, {"torch", "safetensors"}),
    "raysim.training.trackers": ({"config", "training.events"}, {"tensorboardX", "wandb", "mlflow", "trackio"}),
    "raysim.nn": ({"codecs", "compressors", "pipeline", *LOW}, {"torch", "pandas"}),
    "raysim.distributed": ({"codecs", "compressors", "replication", "nn", "pipeline", *LOW}, {"torch", "pandas"}),
    "raysim.testing": ({"codecs", "compressors", "replication", "schedules", "pipeline", "notation"}, {"torch"}),
    "raysim.probing": (
        {"codecs", "compressors", "distributed", "nn", "pipeline", "records", "replication", "schedules", *LOW},
        {"torch"},
    ),
    "raysim.screening": (
        {*RUNS, "engine", "pipeline", "forecast", "probing", "training"},
        {"torch", "pyarrow", "matplotlib"},
    ),
    "raysim.screening.ray_bench": (
        {"config", "engine", "forecast", "pipeline", "probing", "screening"},
        {"ray"},
    ),
    "raysim.recipes": (set(), set()),
    "raysim_benchmarks": ({"*"}, THIRD_PARTY),
    "raysim_findings": ({*RECORDS, *PRICED_RUNS, "analysis", "cli"}, {"pandas", "typer", "rich"}),
    "raysim_contrib": (
        {"pipeline", *TENSORS},
        {"torch", "numba"},
    ),
    "raysim.cli": ({"*"}, {"typer", "rich"}),
    "raysim": ({"*"}, set()),
    "raysim.sweeps": ({"*"}, THIRD_PARTY),
    "raysim.sweeps.budget": ({"config"}, set()),
    "raysim.sweeps.space": ({"config"}, {"optuna"}),
    "raysim.sweeps.objectives": ({"analysis", "config", "network", "quality", "records"}, set()),
    "raysim.sweeps.study": ({*STUDIES, "storage", "plugins"}, {"optuna", "pydantic"}),
    "raysim.sweeps.study_checks": ({*STUDIES, "sweeps.study", "training.trackers", "workloads"}, {"optuna"}),
    "raysim.sweeps.study_file": (
        {*STUDIES, "storage", "notation", "sweeps.study", "sweeps.study_checks"},
        {"pydantic"},
    ),
    "raysim.sweeps.trial_rows": (
        {"analysis", "config", "records", "storage", "sweeps.objectives"},
        {"pandas", "pyarrow"},
    ),
    "raysim.sweeps.store": ({"config", "storage", "training.checkpoint"}, {"pyarrow"}),
    "raysim.sweeps.submit": ({"config", "engine.connection", "storage"}, {"ray", "pyarrow"}),
    "raysim.analysis.data": (RECORDS, {"pandas", "pyarrow"}),
    "raysim.analysis.runs": ({*RECORDS, "analysis.data"}, {"pandas", "pyarrow"}),
    "raysim.analysis.comparison": ({*RECORDS, *PRICED_RUNS, "scaling"}, {"pandas", "optuna"}),
    "raysim.analysis.report": (
        {*RECORDS, *PRICED_RUNS, "analysis.comparison"},
        {"pandas", "jinja2", "plotly", "matplotlib"},
    ),
    "raysim.analysis": ({"analysis"}, set()),
}


# What each part of the benchmarks may import of the others: benchmarks and validation share what is below both.
SHARED = {"harness", "hosts", "ranks", "workload"}
BENCHMARKS = {
    "harness": set(),
    "processes": set(),
    "workload": {"processes"},
    "hosts": {"harness"},
    "ranks": {"harness", "hosts"},
    "bench": {"processes", *SHARED},
    "validate": SHARED,
    "commands": {"harness", "bench", "validate"},
}


def modules():
    ours = (ROOT / "raysim", ROOT / "sweeps", ROOT / "analysis")
    beside = [ROOT / name / f"raysim_{name}" for name in ("contrib", "benchmarks", "findings")]
    for folder in (*ours, *beside):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            yield f"raysim.{name}" if folder.name in ("sweeps", "analysis") else name, path


def room_of(module):
    found = [room for room in ROOMS if module == room or module.startswith(f"{room}.")]
    room = max(found, key=len)
    if room == "raysim" and module != "raysim":
        raise AssertionError(f"{module} is in no room: give it one in this table")
    return room


@cache
def imports_of(path):
    """Return the modules and names that a file imports, wherever in it, without imports for the type checker alone."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found: list[tuple[str, str | None]] = []
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [(node.module, alias.name) for alias in node.names]
    return found


def test_modules_import_only_from_lower_packages():
    for module, path in modules():
        check_imports(module, path)


def check_imports(module, path):
    room = room_of(module)
    ours, theirs = ROOMS[room]
    own = room.removeprefix("raysim.")
    for name, _ in imports_of(path):
        top = name.split(".")[0]
        if top == "raysim" and name != "raysim" and ours != {"*"}:
            inner = name.removeprefix("raysim.")
            allowed = any(inner == one or inner.startswith(f"{one}.") for one in {*ours, own})
            assert allowed, f"{module} imports {name}"
        elif top == "raysim_benchmarks":
            part = module.split(".")[1]
            assert room == top and name.split(".")[1] in {*BENCHMARKS[part], part}, f"{module} imports {name}"  # noqa: PT018
        elif top in {"analysis", "sweeps"}:
            raise AssertionError(f"{module} imports {name}: its name is raysim.{name}")
        elif top in THIRD_PARTY:
            assert top in theirs, f"{module} imports {name}"


def test_no_circular_imports():
    """Imports within functions count too: a circle is one wherever it is closed."""
    paths = dict(modules())
    graph = {
        module: {
            inner if (inner := f"{name}.{imported}") in paths else name for name, imported in imports_of(path)
        }.intersection(paths)
        for module, path in paths.items()
    }
    assert any(graph.values())
    TopologicalSorter(graph).prepare()  # raises CycleError with the circle


COMMANDS = [
    ["--help"],
    ["train", "--help"],
    ["replay", "--help"],
    ["report", "--help"],
    ["simulate", "--help"],
    ["advise", "--help"],
    ["findings", "--help"],
    ["sweep", "--help"],
    ["submit", "--help"],
    ["pack", "--help"],
    ["screen", "--help"],
    ["export", "--help"],
    ["--version"],
    ["recipes"],
    ["studies"],
    ["keys"],
    ["keys", "study"],
    ["keys", "data", "cifar10"],
    ["screen", "digits-cn"],
    ["screen", "digits-cnn", "stpes=5"],
    ["train", "digits-cn"],
    ["train", "digits-cnn", "stpes=5"],
    ["train", "digits-cnn", "steps=0"],
    ["train", "digits-cnn", "data.samples=3"],
    ["train", "digits-cnn", "forward=TopKk(0.1)"],
    ["train", "digits-cnn", "forward=TopK(1.5)"],
    ["train", "digits-cnn", "backward=ErrorFeedback(Quantize(9))"],
    ["train", "digits-cnn", "num_replicas=2", "replica_gradient=GraVAC(3)"],
    ["train", "digits-cnn", "schedule=2F1B"],
    ["train", "digits-cnn", "num_stages=99"],
    ["train", "digits-cnn", "--engine", "tpu"],
    ["train", "digits-cnn", "--resume", "--out", "nowhere"],
    ["sweep", "quickstarts"],
    *(
        [command, str(ROOT / "docker"), "--network", "100mbps"] for command in ("findings", "report", "replay")
    ),  # no run is there
]


def test_help_and_input_errors_import_neither_torch_nor_ray():
    """They share a process: a module that one of them imports stays imported."""
    code = f"""
import sys
import raysim, raysim.analysis, raysim.sweeps
from raysim.cli import main
for command in {COMMANDS!r}:
    sys.argv = ["raysim", *command]
    try:
        main()
    except SystemExit:
        pass
    heavy = {{"torch", "ray", "pandas", "numba"}} & set(sys.modules)
    assert not heavy, (command, heavy)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_every_package_is_documented_and_typed():
    for package in ("raysim", "analysis", "sweeps"):
        assert (ROOT / package / "py.typed").is_file()
    for _, path in modules():
        assert re.match(r'r?"""\S|$', path.read_text()), path


def test_architecture_page_lists_every_package():
    page = (ROOT / "docs" / "architecture.md").read_text()
    there = [path for path in (ROOT / "raysim").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    names = {path.name for path in there} - {"__init__.py"}
    assert {name for name in names if f"`{name}`" not in page and f"`raysim/{name}`" not in page} == set()


def test_no_test_module_imports_another():
    for path in sorted((ROOT / "tests").rglob("*.py")):
        assert not re.search(r"^\s*(from|import) ([\w.]+\.)?test_", path.read_text(), re.M), path
