"""Agreement of `trials.parquet` with the Optuna study."""

import pandas as pd
from optuna.trial import TrialState

STATES = {"finished": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "waiting": TrialState.WAITING}


def check_agree(ledger):
    """Parquet and sqlite tell the same of every trial."""
    frame = pd.read_parquet(ledger.rows.path).set_index("trial")
    trials = ledger.optuna.get_trials()
    assert [trial.number for trial in trials][: len(frame)] == frame.index.tolist()
    for trial in trials:
        if trial.number not in frame.index:
            assert trial.state == TrialState.WAITING
            continue
        row = frame.loc[trial.number]
        if row["status"] == "running" or (row["status"] == "waiting" and pd.notna(row["same_as"])):
            assert trial.state == TrialState.RUNNING
        else:
            assert trial.state == STATES.get(row["status"], TrialState.FAIL)
        if trial.state == TrialState.COMPLETE:
            assert trial.values == [row["objective.accuracy_on"], row["objective.step_s@100mbps"]]
        for name, value in trial.params.items():
            assert row[f"param.{name}"] == value
