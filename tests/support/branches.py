"""Comparing a branch with the run that it repeats."""

import numpy as np
from runs import MEASURED

from raysim import Run, load_weights


def without_times(frame):
    return frame.drop(columns=MEASURED, errors="ignore").reset_index(drop=True)


def same_steps(branch: Run, parent: Run) -> None:
    """Compare a branch with the parent's steps from its first one on, and the weights, bit for bit.

    Each run profiles its own first steps, so transfers are compared in the steps that both have profiled.
    """
    first = branch.row["first_step"]
    for table in ("steps", "links", "decisions"):
        frame = getattr(parent, table)
        assert without_times(getattr(branch, table)).equals(without_times(frame[frame["step"] >= first])), table
    own, others = branch.collectives, parent.collectives
    both = {*own["step"]} & {*others["step"]}
    assert both or own.empty
    own, others = (without_times(frame[frame["step"].isin(both)]) for frame in (own, others))
    assert own.equals(others)
    evals = parent.evals
    assert without_times(branch.evals).equals(without_times(evals[evals["step"] > first]))
    weights, others = (load_weights(run.folder) for run in (branch, parent))
    assert weights.keys() == others.keys()
    assert all(np.array_equal(weights[name].float(), others[name].float()) for name in weights)
