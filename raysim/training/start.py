"""Checks of a run's engine and folder before it starts, without importing torch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from raysim.config import ConfigError
from raysim.limits import ROOT, node_memory
from raysim.notation import suggestion
from raysim.storage.files import LOCK

ENGINES = ("ray", "inline")
LEAST_BYTES = {"inline": 384 << 20, "ray": 1 << 30}
"""Memory for torch alone (inline), and for Ray's servers and two processes with torch; with less, the kernel kills them silently."""


def check_start(out: str | Path | None, engine: str, *, resume: bool = False) -> None:
    """Raise ConfigError for an unknown engine, a non-empty folder, or a run that cannot be resumed."""
    if engine not in ENGINES:
        near = suggestion(engine, ENGINES)
        raise ConfigError(f"`engine` must be one of {', '.join(ENGINES)}, but got {engine!r}.{near}")
    if engine == "ray" and find_spec("ray") is None:
        raise ConfigError(
            "`engine` = 'ray' needs the package ray, which is not installed: `pip install ray`, or use the engine inline."
        )
    if resume and out is None:
        raise ConfigError("`resume` needs `out`, the folder of the run to resume.")
    if out is None:
        return
    folder = run_folder(out)
    if is_unbegun(folder):
        return
    if not resume:
        if folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(f"The folder {folder} is not empty. Give another `out`, or `resume` the run in it.")
        return
    from raysim.records import RecordsError, Run

    try:
        status = Run(folder).status
    except RecordsError as error:
        raise ConfigError(f"Nothing to resume: {str(error)[0].lower()}{str(error)[1:]}") from None
    if status in ("finished", "diverged"):
        raise ConfigError(f"The run in {folder} is {status}: there is nothing to resume.")


def check_least_memory(engine: str, root: Path = ROOT) -> None:
    """Raise ConfigError if the memory here is too small for any run with this engine; `root` as in `limits`."""
    limit, least = node_memory(root), LEAST_BYTES[engine]
    if limit.size >= least:
        return
    other = f"choose the inline engine, which needs {LEAST_BYTES['inline'] / 1e9:.1f} GB"
    remedy = f", or {other}" if engine == "ray" and limit.size >= LEAST_BYTES["inline"] else ""
    raise ConfigError(
        f"The {engine} engine needs at least {least / 1e9:.1f} GB of memory, but {limit}. Give it more{remedy}."
    )


def is_unbegun(folder: Path) -> bool:
    """Return whether a folder holds at most the remains of a run killed before it began, and may be reused."""
    try:
        return folder.is_dir() and all(
            path.name == LOCK
            or (path.name == "parts" and not path.is_symlink() and path.is_dir() and not any(path.iterdir()))
            or path.name.startswith(".run.parquet.")
            for path in list(folder.iterdir())
        )
    except FileNotFoundError:  # a run has just ended there
        return False


def run_folder(out: str | Path) -> Path:
    """Return the path of a run's folder; raises ConfigError for a bucket."""
    from raysim.storage.places import in_bucket, local_path

    if in_bucket(out):
        raise ConfigError(
            f"`out` of a run must be a folder of this machine, but got {str(out)!r}: copy the run there when it has "
            "ended, or use `raysim sweep`, whose studies may lie in buckets."
        )
    return local_path(out)
