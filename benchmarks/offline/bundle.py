"""Pack what a GPU machine without a network lacks to check raysim: `python benchmarks/offline/bundle.py FOLDER`.

FOLDER receives wheels for the target's Python (raysim, its plug-in, its benchmarks, and their dependencies beyond a usual torch
image), the tests, the shape of a model of 135 million parameters, and `check.py`, the one program to run there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = (  # beyond torch, triton, numpy, numba, pandas, pyarrow, scipy, scikit-learn, typer, rich, transformers and pytest
    "pydantic",
    "pydantic_core",
    "annotated-types",
    "typing-inspection",
    "zstandard",
    "numcodecs",
    "tomli_w",
    "tensorboardX",
)
RAY = ("ray", "msgpack", "protobuf", "jsonschema", "jsonschema-specifications", "referencing", "rpds-py", "attrs")
SHAPE = {  # SmolLM2-135M: https://huggingface.co/HuggingFaceTB/SmolLM2-135M
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
TESTS = ("tests", "pyproject.toml")
PLATFORMS = [f"manylinux_2_{glibc}_x86_64" for glibc in (17, 27, 28, 34)] + ["manylinux2014_x86_64", "any"]


def main() -> None:
    """Fill the folder; print its size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version of the target's Python (default: 3.12)")
    parser.add_argument("--ray", action="store_true", help="add Ray, of some 75 MB")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "wheels").mkdir(parents=True)
    _download(folder / "wheels", arguments.python, (*PACKAGES, *RAY) if arguments.ray else PACKAGES)
    for source in (".", "contrib", "benchmarks", "findings"):
        _pip("wheel", "--no-deps", "-w", str(folder / "wheels"), str(ROOT / source))
    names = subprocess.run(
        ["git", "ls-files", *TESTS], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    with tarfile.open(folder / "tests.tar.gz", "w:gz") as archive:
        for name in filter(None, names):
            archive.add(ROOT / name, name)
    (folder / "shape.json").write_text(json.dumps(SHAPE))
    shutil.copy(Path(__file__).with_name("check.py"), folder)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{folder}: {size / 1e6:.1f} MB. On the GPU machine: python3 check.py --out FOLDER")


def _download(wheels: Path, python: str, packages: tuple[str, ...]) -> None:
    tag = "cp" + python.replace(".", "")
    platforms = [part for name in PLATFORMS for part in ("--platform", name)]
    abis = [part for name in (tag, "abi3", "none") for part in ("--abi", name)]
    target = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", *abis, *platforms]
    versions = {line.partition("==")[0]: line for line in (ROOT / "constraints.txt").read_text().splitlines()}
    pinned = [versions[name] for name in packages]
    _pip("download", "--no-deps", "-d", str(wheels), *target, *pinned)


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments, "-q", "--disable-pip-version-check"], check=True)


if __name__ == "__main__":
    main()
