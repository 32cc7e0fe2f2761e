"""Commands for missing runs name folders that file systems take."""

import shlex
from pathlib import Path

import pandas as pd
from raysim_findings.train_commands import train_commands
from records_made import write_run

from raysim.analysis import load
from raysim.analysis.comparison.contexts import ComparedRuns
from raysim.config.identity import Setting


def test_long_settings_have_folders_of_their_own_within_255_bytes(tmp_path):
    results = load(write_run(tmp_path / "run"))
    context = ComparedRuns("digits-cnn, data.name=äöü " + "x" * 200, pd.DataFrame({"run": []}))
    feedback = "ErrorFeedback(" * 20 + "TopK({})" + ")" * 20
    wanted = {Setting(feedback.format(density), feedback.format(density)): [7] for density in (0.1, 0.2)}
    folders = [Path(shlex.split(command)[-1]) for command in train_commands(results, context, wanted, ("digits-cnn",))]
    assert len(set(folders)) == 2
    for folder in folders:
        assert len(folder.name.encode()) <= 255
        folder.mkdir()
