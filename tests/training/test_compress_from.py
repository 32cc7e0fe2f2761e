"""`compress_from`: dense until that step, and from there on the run that branches off the dense one."""

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from branches import same_steps, without_times
from pipelines import RUNS, shares

from raysim import Run, train
from raysim.analysis import Replay
from raysim.config.keys import keys_of
from raysim.records import write_table

AT = 3
REFUSED = {"replicas-local", "replicas-apart", "replicas-gossip", "look-ahead", "replicas-subspace"}
COMPRESSION = keys_of("compression") - {"fused_embedding", "weights"}
COMPRESSED = {name for name, run in RUNS.items() if COMPRESSION & run.keys() and name not in REFUSED}


def dense(settings):
    return {key: value for key, value in settings.items() if key not in COMPRESSION}


@pytest.mark.parametrize("name", shares(5, names=COMPRESSED, of=28))
def test_warmup_run_equals_branch_of_dense_run(small, tmp_path, name):
    """Links and replica methods of all kinds, with the memory of none."""
    settings = {"clock": "100mbps", "profile": "T4", "codec_speed": 1e9, **RUNS[name]}
    settings.pop("compress_from", None)
    before = train(small(**dense(settings), checkpoint_at_steps=[AT]), engine="inline", out=tmp_path / "dense")
    run = train(small(**settings, compress_from=AT), engine="inline", out=tmp_path / "run")
    branch = train(
        small(**settings, steps=6 - AT, start=f"{before.folder}@{AT}"), engine="inline", out=tmp_path / "branch"
    )
    for table in ("steps", "links"):
        own, other = (getattr(each, table) for each in (run, before))
        assert without_times(own[own["step"] < AT]).equals(without_times(other[other["step"] < AT])), table
    assert set(run.links[run.links["step"] < AT]["codec"]) <= {"Identity"}
    assert set(run.links[run.links["step"] >= AT]["codec"]) - {"Identity"}
    same_steps(branch, run)


@pytest.mark.parametrize("name", shares(13, of=28))
def test_branch_at_step_0_equals_run_from_scratch(small, tmp_path, name):
    """Methods whose memory holds parameters, and weights with delays, begin in a branch as in any run."""
    settings = {"clock": "100mbps", "profile": "T4", "codec_speed": 1e9, **RUNS[name]}
    parent = dense(settings) | {"weights": "Synchronous"}
    before = train(small(**parent, steps=2, checkpoint_at_steps=[0]), engine="inline", out=tmp_path / "dense")
    whole = train(small(**settings), engine="inline", out=tmp_path / "whole")
    branch = train(small(**settings, start=f"{before.folder}@0"), engine="inline", out=tmp_path / "branch")
    same_steps(branch, whole)


def test_warmup_run_is_priced_by_compressed_steps(small, tmp_path):
    """Whatever the share of the dense steps: the bytes of a priced step are those of the setting."""
    prices = {}
    for name, changes in {"whole": {}, "late": {"compress_from": 4}}.items():
        values = {"forward": "TopK(0.1)", "profile_every_steps": 1, **changes}
        run = train(small(**values), engine="inline", out=tmp_path / name)
        prices[name] = Replay(run.folder)
    assert prices["late"].wire_bytes.mean() == prices["whole"].wire_bytes.mean()
    assert prices["late"].recording.step_numbers.tolist() == [4, 5]
    sentence = (
        "Priced are the compressed steps, from `compress_from` = 4 on; those before were dense, and count as compressed in the "
        "seconds of a whole run and to a target."
    )
    assert [sentence in prices[name].notes for name in prices] == [False, True]


def test_run_without_profiled_compressed_step_has_no_price(small, tmp_path):
    values = {"forward": "TopK(0.1)", "profile_every_steps": 4, "compress_from": 3}
    run = train(small(**values), engine="inline", out=tmp_path / "run")
    actions = tmp_path / "run" / "actions.parquet"
    table = pq.read_table(actions)
    write_table(table.filter(pc.less(table["step"], 3)), actions)  # as earlier versions recorded it
    with pytest.raises(ValueError, match="it has no profiled step from `compress_from` = 3 on"):
        Replay(run.folder)


def test_runs_are_distinguished_by_settings(small, tmp_path):

    run = train(small(forward="TopK(0.1)", compress_from=2), engine="inline", out=tmp_path / "run")
    assert Run(run.folder).row["setting"] == "forward=TopK(0.1) compress_from=2"
