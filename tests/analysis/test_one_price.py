"""One setting on one network has one price, wherever it is asked for."""

import re

import pandas as pd
import pytest
from studies import BASE, write_study
from typer.testing import CliRunner

from raysim import analysis
from raysim.analysis import load, replay
from raysim.analysis.report import compose
from raysim.analysis.report.page import Chart, Table
from raysim.analysis.report.words import seconds, speedup, step_time
from raysim.cli import app
from raysim.sweeps.runner import Sweep
from raysim.sweeps.study_file import read_study
from raysim.sweeps.verdicts import show_result
from raysim.units import format_seconds

NETWORK = "2mbps"
PAGE = ("2mbps", "100mbps", "1gbps", "free")


@pytest.fixture(scope="module")
def study(ray, tmp_path_factory):
    """Return a study that was swept: dense and three settings, each with one seed."""
    folder = tmp_path_factory.mktemp("one-price")
    path = write_study(
        folder,
        base={**BASE, "steps": 8, "profile_every_steps": 2},
        objectives=[f"step_s@{NETWORK}"],
        space={"forward": ["Identity", "TopK(0.1)", "Quantize(4)", "ErrorFeedback(TopK(0.3))"]},
        symbols=None,
        sampler="grid",
        trials=None,
        engine="inline",
        jobs=1,
    )
    done = Sweep(read_study(path), out=folder / "study")
    done.run()
    return done


def table(page, key):
    return next(one for one in page.blocks(Table) if one.key == key)


def values(page, network):
    """Return the step and the speed-up of each setting on a network; dense has no speed-up."""
    rows = table(page, "job1-settings").frame.set_index("setting")
    return {
        name: (row["step"][network].value, None if name == "dense" else row["speed-up"][network].value)
        for name, row in rows.iterrows()
    }


def texts(page, key, network):
    shown = table(page, key).on(network)
    return shown.set_index(shown.columns[0]).to_dict("index")


@pytest.mark.slow
def test_all_eight_places_have_the_same_figure(study, capsys):
    page = compose(study.folder, PAGE)
    trials = pd.read_parquet(study.folder / "trials.parquet")  # trials.parquet, settled at the end
    assert trials["settled"].all()
    assert trials["compute"].unique().tolist() == ["pooled over 4 runs"]
    best = trials.loc[trials[f"objective.step_s@{NETWORK}"].idxmin()]
    (run,), setting = best["runs"], best["notation"].removeprefix("forward=").partition(" backward=")[0]
    step_s, faster, low, high = (
        float(best[f"{name}.step_s@{NETWORK}"]) for name in ("objective", "speedup", "speedup_low", "speedup_high")
    )

    show_result(study)  # the sweep's end table
    shown = capsys.readouterr().out
    line = next(line for line in shown.splitlines() if f"forward={setting}" in line)
    assert format_seconds(step_s) in line
    assert f"{faster:.2f}x ({low:.2f} to {high:.2f})" in line

    dense = next(iter(trials.loc[trials["name"] == "dense", "runs"]))[0]
    paths = [str(study.folder / name) for name in (run, dense)]  # raysim replay
    done = CliRunner().invoke(
        app, ["replay", paths[0], "--against", paths[1], "--network", NETWORK], env={"COLUMNS": "300"}
    )
    assert done.exit_code == 0, done.output
    assert "pooled over 4 runs" in done.output
    cells = next(line for line in done.output.splitlines() if NETWORK in line)
    assert format_seconds(step_s) in cells
    assert f"{faster:.2f}x" in cells

    results = load(study.folder)  # pandas
    frame = replay(results, NETWORK, against="dense").set_index("run").loc[run]
    assert frame["step_s"] == pytest.approx(step_s, rel=1e-12)
    assert frame[["speedup", "speedup_low", "speedup_high"]].tolist() == pytest.approx([faster, low, high], rel=1e-9)
    even = analysis.settings(results, networks=NETWORK).set_index("forward").loc[setting]
    assert even["step_s"] == pytest.approx(step_s, rel=1e-12)
    assert even["speedup"] == pytest.approx(faster, rel=1e-9)
    assert (even["break_even_bps"] > 2e6) == (faster > 1)  # below it the setting pays, and 2 Mbit/s is below

    name = f"{setting} / Identity"  # the report's row
    assert values(page, NETWORK)[name] == pytest.approx((step_s, faster), rel=1e-9)
    rows = texts(page, "job1-settings", NETWORK)
    assert "pooled over 4 runs" in table(page, "job1-settings").caption

    (said,) = page.decisions([NETWORK])  # its sentences
    promising = re.search(
        r"promising is (.+?): ([\d.]+) times as fast as dense \(([\d.]+) to ([\d.]+); dense takes (.+?)\)", said
    )
    dense_s = frame["dense_step_s"]
    assert said.startswith(f"On {NETWORK} over Ray, stay dense: {seconds(dense_s)} a step.")
    assert said in shown  # the sweep's verdict is the report's
    if promising is None:
        assert "None is promising" in said
    else:
        told = rows[promising[1]]
        assert told["speed-up"].startswith(f"{promising[2]}x ({promising[3]} to {promising[4]})")
        assert promising[5] == seconds(dense_s)

    picture = next(chart for chart in page.blocks(Chart) if chart.key == "job1-gantt").table(NETWORK)  # its picture
    ends = (picture["time"] + picture["duration"]).groupby(picture["panel"]).max()
    for panel, end in ends.items():
        assert end == pytest.approx(values(page, NETWORK)[panel][0], rel=1e-9)
    assert len(ends) == 2


def test_an_interval_is_written_in_one_unit():
    from raysim.analysis import Estimate

    assert step_time(Estimate(0.0999, 0.0980, 0.1020)) == "99.9 ms (98 to 102)"
    assert step_time(Estimate(0.9, 0.8, 1.1)) == "900 ms (800 to 1.1 s)"
    assert speedup(Estimate(0.9, 0.8, 0.95)) == "0.90x (0.80 to 0.95)"
