"""The dense run from which the trials of a study branch: a study of its own in the folder `parent`."""

from __future__ import annotations

from dataclasses import replace

from optuna.trial import FixedTrial

from raysim.config import RunConfig
from raysim.config.run_fields import Start
from raysim.sweeps.study import PARENT, Baseline, Study


def parent_study(study: Study) -> Study:
    """Return the study that trains the dense run once, with the base's seed, and keeps its checkpoints at the points."""
    dense = study.dense
    assert study.branches is not None
    assert dense is not None
    overrides = study.overrides(FixedTrial(dict(dense.params or {})), dense.name)
    changes = {key: value for key, value in overrides.items() if key != "start"}
    return replace(
        study,
        name=f"{study.name}-{PARENT}",
        base={**study.base, "checkpoint_at_steps": study.branch_steps},
        seeds=(study.config({}).seed,),
        trials=1,
        sampler="random",
        constraints=(),
        baselines=(Baseline("dense", set=changes),),
        branches=None,
    )


def started(config: RunConfig, folder: str) -> RunConfig:
    """Return the configuration of a trial that branches from the dense run in `folder`."""
    assert config.start is not None
    return config.changed(start=Start(folder, config.start.step))
