"""Check raysim on a GPU machine without a network: `python3 check.py --out FOLDER`, beside the files of `bundle.py`.

Needs Python with torch, triton, numba, pandas, pyarrow, scipy, scikit-learn, transformers and pytest. With Ray, four stages also
share the GPU. Every step has a limit of its own and leaves a log; `summary.txt` is the screen that is printed at the end.
`--device cpu` tries all steps on a CPU, at small sizes, with Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

Step = tuple[str, float, list[list[str]]]  # name, limit in seconds, commands
BUNDLE = Path(__file__).resolve().parent
CODECS = (
    "Identity",
    "Cast('bfloat16')",
    "Quantize(8)",
    "Quantize(4)",
    "Quantize(8, per='row')",
    "Quantize(4, per='row')",
    "Quantize(4, per='block', block=1024)",
    "Quantize(4, rounding='stochastic')",
    "TopK(0.1)",
    "TopK(0.01)",
    "Hadamard(Quantize(4))",
    "LowRank(4)",
    "Rotated(4)",
)
DTYPES = ("float32", "bfloat16")
MEGABYTES = (2, 16, 128)  # of float32
SMALL = {"num_hidden_layers": 4, "hidden_size": 72, "intermediate_size": 96}  # of the model on a CPU
SLACK = 4  # of the limits on a CPU, which others may use too
NETWORK = "200mbps+30ms"
SHOWN = {
    "machine": 4,
    "codecs": 400,
    "overlap": 12,
    "laws": 3,
    "replay": 16,
    "simulate": 16,
    "screen": 16,
}  # lines of a log in the summary
SETTINGS: dict[str, tuple[str, ...]] = {
    "dense": (),
    "8 bits": ("forward=Quantize(8, per='row')", "backward=Quantize(8, per='row')"),
    "4 bits": ("forward=Quantize(4, per='block', block=64)", "backward=Quantize(8, per='row')"),
    "TopK": ("forward=TopK(0.1)", "backward=TopK(0.1)"),
}
SHARED = ("gpus_per_stage=0.25", *SETTINGS["4 bits"])  # four stages on one GPU


def main() -> None:
    """Run the steps in order; write the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-check"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", nargs="*", help="names of the steps to run (default: all)")
    parser.add_argument(
        "--model", type=Path, help="folder of a trained model (default: random weights of 135M parameters)"
    )
    parser.add_argument(
        "--data", nargs="*", help="keys of its data, such as data=text data.path=FILE (default: topics)"
    )
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    check = Check(arguments)
    check.install()
    for name, limit_s, commands in check.steps():
        if not arguments.steps or name in arguments.steps:
            check.run(name, limit_s, commands)
    summary = "\n".join(check.summary())
    (arguments.out / "summary.txt").write_text(summary + "\n")
    print(summary)


class Check:
    """The steps on one machine, their outcomes, and the environment in which they run."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.out = arguments.out.resolve()
        self.gpu = arguments.device == "cuda"
        self.device = arguments.device
        self.cores = len(os.sched_getaffinity(0))
        self.ray = find_spec("ray") is not None or any((BUNDLE / "wheels").glob("ray-*.whl"))
        self.scratch = Path(tempfile.mkdtemp())
        self.environment = os.environ | {
            "PYTHONUNBUFFERED": "1",
            "COLUMNS": "150",
            "PYTHONPATH": os.pathsep.join([str(self.scratch / "site"), os.environ.get("PYTHONPATH", "")]),
        }
        if not self.gpu:
            self.environment["TRITON_INTERPRET"] = "1"
        self.model = arguments.model
        self.data = arguments.data or ["data=topics"]
        self.outcomes: list[tuple[str, float, str]] = []

    def install(self) -> None:
        """Install the wheels and unpack the tests, in a scratch folder."""
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-index",
            "--no-deps",
            "--target",
            str(self.scratch / "site"),
        ]
        subprocess.run([*pip, *map(str, sorted((BUNDLE / "wheels").glob("*.whl")))], check=True, timeout=120)
        with tarfile.open(BUNDLE / "tests.tar.gz") as archive:
            archive.extractall(self.scratch / "tree", filter="data")

    def steps(self) -> list[Step]:
        """Return the name, the limit in seconds and the commands of every step; commands of one step run at the same time."""
        values = [megabytes * 1_000_000 // 4096 * 1024 for megabytes in MEGABYTES] if self.gpu else [65536]
        sizes = [part for count in values for part in ("--size", str(count))]
        kinds = [part for dtype in DTYPES for part in ("--dtype", dtype)]
        bench = [*self._raysim("bench", "codecs"), "--device", self.device, "--kind", "normal", "--no-others", *kinds]
        small = [] if self.gpu else ["--size", "65536", "--width", "64"]
        tests = ["tests/codecs/test_gpu_kernels.py", "tests/codecs/test_transfers.py", "tests/pipeline/test_on_gpu.py"]
        pytest = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "not slow",
            "-v",
            "-p",
            "no:benchmark",
            "-o",
            "pythonpath=tests/support",
            *tests,
        ]
        return [
            ("machine", 60, [[sys.executable, "-c", _MACHINE]]),
            # kernels are compiled once and kept on disk: all at the same time, before anything is timed
            ("compile", 100, [[*bench, *sizes, codec] for codec in CODECS] if self.gpu else []),
            ("codecs", 120, [[*bench, *sizes, *CODECS, "--json", str(self.out / "codecs.json")]]),
            (
                "overlap",
                60,
                [
                    [
                        *self._raysim("bench", "overlap"),
                        *small,
                        "--device",
                        self.device,
                        "--json",
                        str(self.out / "overlap.json"),
                    ]
                ],
            ),
            *((f"train {name}", 90, [self._training(name, keys)]) for name, keys in SETTINGS.items()),
            *(
                [("train on Ray", 120, [self._training("on Ray", SHARED if self.gpu else (), "ray")])]
                if self.ray
                else []
            ),
            ("screen", 90, [self._screening()]),
            ("replay", 60, [self._pricing("replay", self.out / "train dense")]),
            ("simulate", 60, [self._pricing("simulate", "hf", *self._model(), "--device", "H100")]),
            ("laws", 150, [[*pytest, "-n", str(max(1, self.cores - 1))] if self.cores > 2 else pytest]),
        ]

    def run(self, name: str, limit_s: float, commands: list[list[str]]) -> None:
        """Run a step's commands within its limit; output goes to its log."""
        start = time.monotonic()
        limit_s *= 1 if self.gpu else SLACK

        def call(i: int) -> int | str:
            log = self.out / (f"{name}-{i}.log" if len(commands) > 1 else f"{name}.log")
            left = max(1.0, limit_s - (time.monotonic() - start))
            with log.open("wb") as file:
                process = subprocess.Popen(
                    commands[i],
                    cwd=self.scratch / "tree",
                    env=self.environment,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                try:
                    return process.wait(left)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, 9)
                    process.wait()
                    return "cut off"

        with ThreadPoolExecutor(max(1, self.cores - 1)) as pool:
            codes = list(pool.map(call, range(len(commands))))
        bad = [code for code in codes if code != 0]
        self.outcomes.append((name, time.monotonic() - start, "ended well" if not bad else f"ended with {bad}"))
        print(f"{name}: {self.outcomes[-1][2]} after {self.outcomes[-1][1]:.0f} s", flush=True)

    def summary(self) -> list[str]:
        """Return the lines of the screen at the end."""
        lines = [f"{name:<14}{seconds:6.0f} s  {outcome}" for name, seconds, outcome in self.outcomes]
        for name, _, _ in self.outcomes:
            if name in SHOWN or name.startswith("train"):
                log = (self.out / f"{name}.log").read_text(errors="replace")
                lines += ["", f"== {name}", *log.splitlines()[-SHOWN.get(name, 8) :], *_memory(self.out / name)]
        return lines

    def _raysim(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "raysim.cli", *words]

    def _model(self) -> list[str]:
        if self.model is not None:
            shape = f"model.path={self.model.resolve()}"
        else:
            config = json.loads((BUNDLE / "shape.json").read_text())
            config |= {} if self.gpu else SMALL
            file = self.scratch / "config.json"
            file.write_text(json.dumps(config))
            shape = f"model.config={file}"
        return [shape, *self.data, "data.length=128", "num_stages=4", "num_microbatches=4", "batch_size=8"]

    def _training(self, name: str, keys: tuple[str, ...], engine: str = "inline") -> list[str]:
        steps = 60 if self.gpu else 3
        fixed = [
            f"device={self.device}",
            f"steps={steps}",
            "evaluate_samples=64",
            "checkpoint_every_steps=0",
            f"profile_every_steps={10 if self.gpu else 1}",
            "optimizer.learning_rate=2e-5",
        ]
        return [
            *self._raysim("train", "hf"),
            *self._model(),
            *fixed,
            *keys,
            "--engine",
            engine,
            "--out",
            str(self.out / f"train {name}"),
        ]

    def _screening(self) -> list[str]:
        tried = [part for keys in SETTINGS.values() if keys for part in ("--try", " ".join(keys))]
        options = ["--network", NETWORK, "--only-tried", *tried, "--json", str(self.out / "screen.json")]
        return [*self._raysim("screen", "hf"), *self._model(), f"device={self.device}", *options]

    def _pricing(self, command: str, *words: object) -> list[str]:
        json_file = self.out / f"{command}.json"
        return [
            *self._raysim(command, *map(str, words)),
            "--network",
            NETWORK,
            "--network",
            "10gbps",
            "--transport",
            "nccl",
            "--json",
            str(json_file),
        ]


_MACHINE = """
import os, platform, torch
print(platform.platform(), platform.python_version(), f"{len(os.sched_getaffinity(0))} cores")
print("torch", torch.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU")
if torch.cuda.is_available():
    x = torch.empty(1 << 28, device="cuda"); y = torch.empty_like(x)
    times = []
    for _ in range(12):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); y.copy_(x); b.record(); torch.cuda.synchronize(); times.append(a.elapsed_time(b) / 1e3)
    print(f"a copy of 1 GiB: {2 * x.nbytes / sorted(times)[6] / 1e9:.0f} GB/s read and written")
"""


def _memory(run: Path) -> list[str]:
    try:
        import pyarrow.parquet as pq

        row = pq.read_table(run / "run.parquet").to_pylist()[0]
    except (ImportError, OSError, ValueError):
        return []
    forecast, peak = row.get("device_forecast_bytes"), row.get("device_peak_bytes")
    return [f"device memory: forecast {forecast or 0:,} bytes, peak {peak or 0:,} bytes"]


if __name__ == "__main__":
    main()
