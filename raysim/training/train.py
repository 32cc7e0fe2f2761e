"""`train`: one call to train a run from Python or a notebook."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raysim.config import ConfigError, RunConfig, make_config, read_config
from raysim.records import Run
from raysim.training.events import Phases, to_stderr
from raysim.training.progress import print_progress
from raysim.training.run import Training

_alone = threading.RLock()
"""Held by the run of this process: stages seed torch's random state and set its threads, which all threads share."""


def train(
    config: RunConfig | Mapping[str, Any] | str | Path = "digits-cnn",
    *overrides: str,
    out: str | Path | None = None,
    engine: str = "ray",
    resume: bool = False,
    progress: bool | None = None,
) -> Run:
    """Train a pipeline and return its run, with its tables as DataFrames.

    `config`: a RunConfig, nested values, a recipe's name or a TOML file; `overrides` (`key=value`) change the latter two.
    `out`: the run's own folder, by default `results/<name>/<run_id>`. `resume` continues from the newest checkpoint in `out`.
    `progress` prints lines on the error stream during training; by default in a notebook and at an interactive prompt.
    Calls from several threads run one after another.
    Raises ConfigError, before anything starts, if the input is wrong. A diverged run is returned with that status;
    the KeyboardInterrupt of an interrupted run says how to continue.

    >>> import tempfile
    >>> run = train("digits-cnn", "steps=4", "forward=TopK(0.1)", engine="inline", out=tempfile.mkdtemp())
    >>> run.status, len(run.steps), run.evals["mode"].tolist()
    ('finished', 4, ['on', 'off'])
    """
    if isinstance(config, (str, Path)):
        config = read_config(config, overrides)
    elif overrides:
        raise ConfigError(
            f"Overrides change a recipe or a file, but `config` is {type(config).__name__}: change it there."
        )
    if not isinstance(config, RunConfig):
        config = make_config(config)
    shown = hasattr(sys, "ps1") if progress is None else progress
    with _alone, Phases(to_stderr if shown else None) as phases:
        training = Training(config, out=out, engine=engine, resume=resume, phases=phases)
        try:
            if shown:
                print_progress(training)
            else:
                for _ in training.events():
                    pass
        except KeyboardInterrupt as interruption:
            interruption.add_note(
                f"To continue, train with the same arguments and out={str(training.folder)!r}, resume=True."
            )
            raise
    return Run(training.folder)
