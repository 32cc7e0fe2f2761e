"""The report of runs: what it says follows from the records, whatever the folder holds; what it writes is sound HTML and Markdown."""

import ast
import dataclasses
import io
import itertools
import json
import math
import re
import shutil
from html.parser import HTMLParser

import pandas as pd
import plotly.graph_objects as go
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from records_made import write_run, write_study
from report_runs import SEEDS, SPITE, change_columns, change_row, copy_run, make_study, write_decisions
from typer.testing import CliRunner

from raysim import analysis, train
from raysim.analysis import AnalysisError, Estimate, beside, load
from raysim.analysis.report import compose
from raysim.analysis.report.material import NETWORKS as MATERIAL_NETWORKS
from raysim.analysis.report.material import JobRuns, MeanQuality, SettingRuns
from raysim.analysis.report.page import Chart, Table, Text
from raysim.analysis.report.reuse import adoption, recipe, snippet
from raysim.analysis.report.words import against_dense, answer_for, seconds, sure
from raysim.analysis.report.write import _lines, to_html, write_report
from raysim.cli import app
from raysim.config import read_config
from raysim.network.costs import Expected, load_costs
from raysim.network.presets import parse_network
from raysim.network.prices import PAYS, WireSeconds
from raysim.nn import CompressedLink
from raysim.quality import MEASURES
from raysim.records import Run, write_table
from raysim.sweeps.budget import duration
from raysim.units import apart, decimals, format_bytes, three_digits

NETWORKS = ("100mbps", "10mbps", "free")  # those of `page`


@pytest.fixture(scope="module")
def runs(report_runs):
    return report_runs


@pytest.fixture(scope="module")
def page(runs):
    return compose(runs, NETWORKS)


@pytest.fixture(scope="module")
def over_nccl(runs):
    return compose(runs, ["10mbps"], transport="nccl")


@pytest.fixture(scope="module")
def learned(runs, tmp_path_factory):
    """Return the runs with accuracies far above chance, so that settings may be promising."""
    folder = tmp_path_factory.mktemp("learned")
    for run in runs.iterdir():
        row = Run(run).row
        copy_run(run, folder / run.name, **{key: row[key] + 0.5 for key in ("final_accuracy_on", "final_accuracy_off")})
    return folder


@pytest.fixture(scope="module")
def learned_page(learned):
    return compose(learned, NETWORKS)


@pytest.fixture(scope="module")
def html(page):
    return to_html(page)


def section(page, key):
    return next(one for one in page.sections if one.key == key)


def chart(page, key):
    return next(one for one in page.blocks(Chart) if one.key.endswith(key))


def table(page, key):
    return next(one for one in page.blocks(Table) if one.key == key)


def rows(page, key, network):
    """Return the rows of a table as the reader sees them, by their first cell."""
    shown = table(page, key).on(network)
    return shown.set_index(shown.columns[0], drop=False).to_dict("index")


class Outline(HTMLParser):
    """What a page consists of: its elements with their attributes, and the text outside of scripts."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.text = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in ("meta", "link", "input", "br", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.text.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def test_the_outline_is_sound_and_everything_is_labelled(html):
    outline = Outline(html)
    assert not outline.open
    levels = [int(tag[1]) for tag, _ in outline.elements if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels)), levels
    ids = [attributes["id"] for _, attributes in outline.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    labelled = {attributes.get("for") for attributes in outline.all("label")}
    controls = [*outline.all("input"), *outline.all("select")]
    assert controls
    assert {attributes["id"] for attributes in controls} <= labelled
    assert all("scope" in attributes for attributes in outline.all("th"))
    assert len(outline.all("caption")) == len(outline.all("table")) > 3
    assert all(a["aria-label"] for _, a in outline.elements if a.get("role") == "img")
    assert {a["href"][1:] for a in outline.all("a")} <= set(ids)


def test_the_page_is_whole_by_itself(html):
    outline = Outline(html)
    for _, attributes in outline.elements:
        for name in ("src", "href", "action"):
            assert attributes.get(name, "#").startswith(("#", "data:")), attributes
    policy = next(a["content"] for a in outline.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy.split("script-src")[1].split(";")[0]


def test_what_comes_from_runs_is_never_markup(runs, html, tmp_path):
    folder = tmp_path / "<b>&'\"runs"
    copy_run(runs / "dense-s1", folder / "dense")
    copy_run(runs / "topk-s1", folder / "<script>alert(1)<!--", name=SPITE, host=SPITE, schedule="1F1B")
    change_row(folder / "<script>alert(1)<!--", data=f"</script>{SPITE}")
    written = compose(folder, ("100mbps",))
    outline = Outline(to_html(written))
    assert {tag for tag, _ in outline.elements} <= {tag for tag, _ in Outline(html).elements}
    assert not any(name.startswith("on") for _, attributes in outline.elements for name in attributes)
    assert {"src", "onerror"}.isdisjoint(name for _, attributes in outline.elements for name in attributes)
    assert SPITE.replace("`", "") in "".join(outline.text).replace("`", "")
    markdown = "\n".join(_lines(written))
    assert "<script>" not in re.sub(r"```.*?```|`[^`\n]*`", "", markdown, flags=re.S).replace("\\<", "")


def test_a_chart_is_one_plotly_figure_of_all_networks(page, html):
    """The JSON in the page holds each point of the CSV, and a trace names its network if it depends on one."""
    figures = [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', html, re.S)]
    assert len(figures) == len(page.blocks(Chart)) > 5
    frontier = chart(page, "frontier")
    drawn = next(figure for figure in figures if len(figure["wide"]["data"]) == len(frontier.data()))
    for figure in figures:
        go.Figure(**figure["wide"])  # which raises for an unknown key or value
    assert {trace["meta"] for trace in drawn["wide"]["data"]} == set(NETWORKS)
    assert "xaxis2" in drawn["narrow"]["layout"]
    assert drawn["narrow"]["data"] == []
    everything = frontier.table()
    assert set(everything["network"]) == set(NETWORKS)
    assert len(everything) == sum(len(frontier.table(network)) for network in NETWORKS)


def test_a_setting_that_did_not_learn_stands_under_the_frontier_and_points_have_the_numbers_of_the_table(
    runs, tmp_path
):
    reached = {"dense": 0.9, "topk": 0.85, "q8": 0.3, "feedback": 0.1}
    for name, value in reached.items():
        for seed in SEEDS[:1]:
            quality = {"final_accuracy_on": value, "final_accuracy_off": value, "chance_accuracy": 0.1}
            copy_run(runs / f"{name}-s{seed}", tmp_path / f"{name}-s{seed}", **quality)
    drawn = compose(tmp_path, ["100mbps"])
    frontier = chart(drawn, "frontier")
    points = [trace for trace in frontier.panels[0].traces if "text" in trace]
    assert {value for trace in points for value in trace["y"]} == {0.9, 0.85}
    undrawn = frontier.caption.partition("are not drawn: ")[2]
    assert "(30.0 %)" in undrawn
    assert "(10.0 %)" in undrawn
    names = {row["point"]: name for name, row in rows(drawn, "job1-settings", "100mbps").items()}
    for trace in points:
        for text, label in zip(trace["text"], trace["hovertext"], strict=True):
            assert label.startswith(f"{names[text.strip()]} (")


def test_the_charts_hold_what_the_records_hold(runs, page):
    results = load(runs)
    frontier = chart(page, "frontier").table("100mbps")
    steps = [results.replay(f"topk-s{seed}").step_seconds([parse_network("100mbps")]).mean() for seed in SEEDS]
    (row,) = frontier[
        (frontier["series"] == "TopK / Identity") & (frontier["panel"] == "Compression on at inference")
    ].to_dict("records")
    assert row["time of a step"] == pytest.approx(sum(steps) / len(steps))
    mine = results.runs[results.runs["forward"] == "TopK(0.1)"]
    assert row["accuracy"] == pytest.approx(mine["final_accuracy_on"].mean())
    assert row["sd"] == pytest.approx(mine["final_accuracy_on"].std())
    curves = chart(page, "curves").table("100mbps")
    curves = curves[curves["series"] == "TopK(0.1) / Identity"]
    assert curves.loc[curves["training loss"].notna(), "bytes sent"].max() == pytest.approx(mine["wire_bytes"].mean())
    times = curves.loc[curves["accuracy"].notna(), "time, simulated"]
    assert times.max() == pytest.approx(6 * row["time of a step"])
    links = chart(page, "links").table()
    sent = links[links["series"] == "TopK(0.1) / Identity"]["bytes of a step"].sum()
    assert sent == pytest.approx(mine["wire_bytes"].mean() / 6)


def test_sentences_say_what_the_tables_say(page):
    """The recommended setting, and the number of faster ones, by the numbers of the page alone."""
    network = page.network
    shown, prices = (
        rows(page, "job1-settings", network),
        table(page, "job1-settings").frame.set_index("setting")["step"],
    )
    steps = {name: price[network].value for name, price in prices.items()}
    (summary,) = page.recommended(network)
    chosen = shown[summary["setting"]]
    assert (summary["step"], summary["speed-up"]) == (chosen["step"], chosen["speed-up"])
    assert summary["dense step"] == seconds(steps["dense"])
    surely = 0
    for name in steps.keys() - {"dense"}:
        text = shown[name]["speed-up"]
        value, low, high = map(float, re.match(r"([\d.]+)x \(([\d.]+) to ([\d.]+)\)", text).groups())
        assert value == pytest.approx(steps["dense"] / steps[name], abs=0.006)
        assert ("not distinguishable" in text) == (low <= 1 <= high)
        surely += value >= PAYS and low > 1
    told = re.match(r"(\d+) faster|none is 5 % faster", summary["evidence"])
    assert told is None or int(told[1] or 0) == surely


def test_a_curve_over_time_is_one_over_steps_scaled(page):
    curves = chart(page, "curves")
    slow, fast = curves.table("100mbps"), curves.table("free")
    started = slow["time, simulated"] > 0
    factors = (slow.loc[started, "time, simulated"] / fast.loc[started, "time, simulated"]).groupby(slow["series"])
    assert (factors.min() > 1).all()
    assert factors.max().tolist() == pytest.approx(factors.min().tolist())
    steps = slow["steps"].notna()
    assert slow.loc[steps, ["steps", "training loss"]].equals(fast.loc[steps, ["steps", "training loss"]])


def test_prices_of_a_study_are_by_its_own_profile(runs, tmp_path):
    for name in ("dense-s1", "topk-s1"):
        copy_run(runs / name, tmp_path / "study" / "trials" / name)
    recorded = load(runs).replay("dense-s1").mean_profile
    dataclasses.replace(recorded, compute_s=100 * recorded.compute_s).save(tmp_path / "study" / "profile.json")
    (tmp_path / "study" / "study.toml").write_text('profile = "profile.json"')
    analysis.pack(tmp_path / "study", tmp_path / "packed")
    for folder in (tmp_path / "study", tmp_path / "packed"):
        frame = table(compose(folder, ["free"]), "job1-settings").frame.set_index("setting")
        own = load(folder).replay("trials/dense-s1", profile=tmp_path / "study" / "profile.json")
        assert frame.loc["dense", "step"]["free"].value == pytest.approx(own.step_s([parse_network("free")])[0].value)
        (row,) = analysis.settings(load(folder), networks="free").to_dict("records")
        assert row["dense_step_s"] == pytest.approx(frame.loc["dense", "step"]["free"].value)
    (tmp_path / "study" / "profile.json").write_text("{")
    (tmp_path / "packed" / "profile.json").unlink()
    for name, reason in (("study", "is not valid JSON"), ("packed", "is missing")):
        problem = f"The profile '{tmp_path}/{name}/profile.json' {reason}: steps are priced by the recorded compute."
        assert problem in compose(tmp_path / name, ["free"]).problems


def test_time_of_a_branch_counts_its_own_steps(runs, page, tmp_path):
    for run in runs.iterdir():
        copy_run(run, tmp_path / run.name, first_step=50)
        for file in (tmp_path / run.name).glob("*.parquet"):
            if "step" in pq.read_schema(file).names:
                change_columns(file, step=lambda steps: steps + 50)
    whole, branch = (chart(each, "curves").table("100mbps") for each in (page, compose(tmp_path, NETWORKS)))
    assert branch["steps"].tolist() == pytest.approx((whole["steps"] + 50).tolist(), nan_ok=True)
    assert branch["time, simulated"].tolist() == pytest.approx(whole["time, simulated"].tolist(), nan_ok=True)


def test_a_step_has_work_on_the_lanes_of_stages_and_flights_on_those_of_links(page):
    spans = chart(page, "gantt").table("100mbps")
    flights = spans["series"] == "bytes"  # this network has no latency
    assert flights.any()
    assert spans["lane"][flights].str.contains("→").all()
    assert not spans["lane"][~flights].str.contains("→").any()


def made(name, step_s, verdict="safe", *, dense=False, speedup=None, accuracy=0.9):
    quality = {mode: MeanQuality(accuracy, 0.0) for mode in ("on", "off")}
    price = {network: Estimate(step_s, 0.99 * step_s, 1.01 * step_s) for network in NETWORKS}
    times = speedup if speedup is not None else 1.0 / step_s
    faster = {network: Estimate(times, 0.99 * times, 1.01 * times) for network in NETWORKS}
    return SettingRuns(
        name,
        name,
        "Identity",
        dense,
        (name,),
        3,
        0,
        10.0,
        100.0,
        quality,
        {"verdict": verdict},
        priced=name,
        step_s=price,
        dense_step_s=dict.fromkeys(NETWORKS, 1.0),
        speedup=faster,
        wire=dict.fromkeys(NETWORKS, WireSeconds(0.1, 0.3)),
    )


def job(*settings):
    return JobRuns("job1", "a job", MEASURES["accuracy"], settings, pd.DataFrame(), NETWORKS)


def test_what_is_recommended_is_safe_and_worth_it():
    dense = made("dense", 1.0, "", dense=True)
    safe, safer, harmful, unsure = (
        made("a", 0.5),
        made("b", 0.8),
        made("c", 0.1, "harmful"),
        made("d", 0.2, "undecided"),
    )
    assert job(dense, harmful, unsure, safer, safe).recommended("free") is safe
    assert job(dense, harmful, unsure).recommended("free") is dense
    assert job(dense, made("e", 0.99, speedup=PAYS - 0.001)).recommended("free") is dense
    assert job(safe).recommended("free") is None


def test_the_fastest_of_several_schedules_is_recommended_though_its_own_dense_step_is_faster_too():
    """A setting is compared with dense of its schedule: the greatest speed-up may be over the slowest one."""
    dense, slow, fast = made("dense", 1.0, "", dense=True), made("GPipe", 0.8, speedup=3.0), made("1F1B", 0.5)
    assert job(dense, slow, fast).recommended("free") is fast
    unsure = [undecided(name, 0.1) for name in ("GPipe", "1F1B")]
    slower = dataclasses.replace(unsure[0], step_s=slow.step_s, speedup=slow.speedup)
    unsure[1] = dataclasses.replace(unsure[1], speedup=fast.speedup)
    assert job(dense, slower, unsure[1]).promising("free") is unsure[1]


def test_of_several_schedules_the_fastest_dense_setting_is_the_one_to_stay_with():
    """Not that with the most seeds; and a setting that is faster in its own schedule must gain over it too."""
    many = dataclasses.replace(made("dense schedule=GPipe", 2.0, "", dense=True), runs=("a", "b", "c"))
    few, same = (made(f"dense schedule={name}", 0.5, "", dense=True) for name in ("1F1B", "ZB"))
    assert job(many, few).recommended("free") is few
    assert "stay dense with `schedule=1F1B`: 500 ms a step." in answer_for(job(many, few), "free").text
    safe = made("GPipe", 0.49, speedup=2.0 / 0.49)
    of_both = job(many, few, safe)
    assert of_both.recommended("free") is few
    assert of_both.promising("free") is of_both.least_harmful("free") is None
    assert "4.08x (4.04 to 4.12) over dense in its own schedule, 1 s a step." in answer_for(of_both, "free").text
    assert job(many, safe).recommended("free") is safe
    assert job(many, few, made("quick", 0.4, speedup=5.0)).recommended("free").name == "quick"
    often = dataclasses.replace(same, runs=("a", "b"))
    assert job(few, often).recommended("free") is job(often, few).recommended("free") is often


@given(st.floats(-1e3, 1e3), st.integers(0, 3), st.floats(-1e3, 1e3))
@example(1.0496, 2, 1.05)
@example(1.05, 2, 1.05)
def test_a_number_is_read_on_its_side_of_a_limit(value, digits, limit):
    shown = float(decimals(value, digits, limit))
    assert ((shown < limit), (shown > limit)) == ((value < limit), (value > limit))
    assert abs(shown - value) <= 0.51 * 10**-digits


@given(st.floats(1.0, 1e12), st.floats(1e-8, 1e-2), st.sampled_from([format_bytes, three_digits, duration]))
@example(80e9, 5e-4, format_bytes)
def test_two_figures_that_a_sentence_compares_do_not_look_equal(value, share, write):
    assert len({*apart(write, value, value * (1 + share))}) == 2
    assert len({*apart(write, value, value)}) == 1


def test_a_figure_agrees_with_the_sentence_beside_it():
    almost = job(made("dense", 1.0, "", dense=True), made("e", 0.95, speedup=PAYS - 0.0004))
    assert "not at least 5 % faster: `e`, 1.0496x" in answer_for(almost, "free").text
    judged = {"harm": 0.4, "harm_low": 0.3, "harm_high": 0.4996, "within": 0.5, "seeds": 5}
    safe = dataclasses.replace(made("a", 0.5), judged=judged)
    assert against_dense(safe, MEASURES["accuracy"]).endswith("(\N{MINUS SIGN}0.4996 to \N{MINUS SIGN}0.30)")


def test_code_to_take_home_names_the_sum_of_tied_parameters():
    """Also of a setting that compresses nothing else: without code the report would say "stay dense"."""
    row = {"num_stages": 2, "forward": "Identity", "backward": "Identity", "tied_gradient": "TopK(0.01)"}
    assert snippet(row).startswith("# tied_gradient=TopK(0.01): not here, ")
    assert snippet(row | {"forward": "Quantize(8)"}).endswith(snippet(row))
    assert snippet(row | {"num_stages": 1}) == snippet(row | {"tied_gradient": "Identity"}) == ""


def test_a_setting_without_harm_has_no_verdict_and_the_report_says_why():
    why = MEASURES["loss"].undefined(-1.5)
    judged = undecided("a", math.nan, seeds=0, lacking=why, chance=math.nan, deviation=math.nan)
    said = answer_for(of_losses(made("dense", 1.0, "", dense=True), judged), "100mbps").text
    assert said.endswith(f"1 setting is faster, but none is shown to be safe. No verdict: {why}.")


def test_a_verdict_names_the_seeds_that_it_rests_on():
    judged = {
        "confidence": 0.95,
        "seeds": 40,
        "within": 0.5,
        "unit": "points of accuracy",
        "confirmed_on": [*range(4, 44)],
        "diverged": 0,
        "diverged_high": 0.0722,
    }
    setting = dataclasses.replace(made("a", 0.5), judged=judged, seeds=44)  # four of them chose it
    assert sure(setting) == (
        " At 95% confidence, over 40 fresh seeds, it is at most 0.5 points of accuracy worse than dense; 0 of 40 "
        "diverged: rate below 7 %."
    )
    assert "over 40 seeds" in sure(dataclasses.replace(setting, judged=judged | {"confirmed_on": []}))


def undecided(name, harm, *, seeds=2, **changes):
    row = {
        "verdict": "undecided",
        "harm": harm,
        "harm_low": harm - 350,
        "harm_high": harm + 350,
        "within": 1.0,
        "family": 2,
    }
    row |= {
        "unit": "% of loss",
        "seeds": seeds,
        "lacking": f"{seeds} of at least 3 seeds",
        "chance": 0.6,
        "deviation": 6.9,
        "borrowed": 0.0,
    } | changes
    return dataclasses.replace(made(name, 0.2), judged=row, seeds=seeds)


def of_losses(*settings):
    runs = pd.DataFrame({"run": [one.name for one in settings], "seconds": 600.0})
    return dataclasses.replace(job(*settings), measure=MEASURES["loss"], runs=runs)


def test_two_seeds_decide_nothing_and_a_setting_that_is_probably_harmful_is_not_promising():
    dense = dataclasses.replace(made("dense", 1.0, "", dense=True), seeds=2)
    harmful = of_losses(dense, undecided("a", 15.0), undecided("b", 18.0))
    said = answer_for(harmful, "100mbps").text
    assert said.startswith(
        "On 100mbps over Ray, stay dense: 1 s a step. 2 settings are faster, but none is shown to be safe."
    )
    assert "None is promising. The least harmful is `a`: loss 15 % higher than dense on 2 seeds." in said
    assert said.endswith("2 seeds cannot decide, but a study of 7 would, 3.5 h of training.")  # three settings
    assert adoption(harmful, "100mbps") == (
        "On 100mbps, stay dense: no change to your training code.",
        "",
    )
    near = of_losses(dense, undecided("a", 15.0), undecided("b", -0.5))
    said = answer_for(dataclasses.replace(near, transport="nccl"), "100mbps").text
    assert "On 100mbps over NCCL, stay dense" in said
    assert (
        "The most promising is `b`: 5.00 times as fast as dense (4.95 to 5.05; dense takes 1 s); loss 0.50 % lower"
        in said
    )
    assert "60 % likely to be safe" in said
    surely = answer_for(
        of_losses(dense, undecided("a", 15.0), undecided("b", -0.5, seeds=12, chance=0.9999)), "100mbps"
    ).text
    assert "over 99 % likely to be safe" in surely
    assert near.promising("100mbps").name == near.taken_home("100mbps").name == "b"
    assert (
        "and 21 would not either"
        in answer_for(of_losses(dense, undecided("a", 1.2, seeds=3, lacking="")), "100mbps").text
    )


@pytest.mark.slow
def test_a_report_over_nccl_has_the_prices_of_a_replay_over_nccl(runs, page, over_nccl):
    assert over_nccl.transport == "nccl"
    assert all(lead.startswith("On 10mbps over NCCL, ") for lead in over_nccl.decisions(["10mbps"]))
    network = parse_network("10mbps")
    paths = [runs / f"{kind}-s{seed}" for seed in SEEDS for kind in ("topk", "dense")]
    priced = {}
    for transport, shown in (("nccl", over_nccl), ("ray", page)):
        frame = table(shown, "job1-settings").frame.set_index("setting")
        priced[transport] = frame.loc["TopK(0.1) / Identity", "step"]["10mbps"].value
        replays = beside(paths, runs, transport=transport)
        assert priced[transport] == pytest.approx(sum(one.step_seconds([network]).mean() for one in replays[::2]) / 3)
    assert priced["nccl"] < priced["ray"]


def test_the_command_ends_with_the_decision_and_money_is_that_of_hours_and_bytes_and_of_one_run(runs, tmp_path):
    file, out = tmp_path / "costs.toml", tmp_path / "report.json"
    file.write_text('currency = "EUR"\ngpu_hour = 2.0\negress_gb = 0.1\ndeparture_hours = 24\nrestart_s = 300\n')
    network, costs, folder = "10mbps", load_costs(file), tmp_path / "runs"
    for name in ("dense-s1", "dense-s2", "topk-s1"):
        copy_run(runs / name, folder / name)
    options = ("--network", network, "--only", "--costs", file)
    done = command(folder, "--out", tmp_path / "report.html", *options, "--json", out)
    assert done.exit_code == 0, done.output
    *_, said, named = done.output.splitlines()
    assert named == f"Figures: {out}"
    assert said.startswith("On 10mbps over Ray, ")  # the page's own sentences, as plain text
    text = " ".join("".join(Outline((tmp_path / "report.html").read_text()).text).split())
    for sentence in said.removesuffix(".").split(". "):
        assert sentence in text
    (row,) = json.loads(out.read_text())["recommended"][network]
    assert row["setting"] == "dense"
    replays = beside([folder / f"dense-s{seed}" for seed in SEEDS[:2]], folder)
    expected = Expected.mean([replay.expected(costs, parse_network(network)) for replay in replays])
    assert row | costs.cells(expected) == row
    assert costs.sentence(expected) in done.output
    figures = tmp_path / "replay.json"
    alone = [str(folder / "topk-s1"), *map(str, options[:2]), "--costs", str(file), "--json", str(figures)]
    assert CliRunner().invoke(app, ["replay", *alone]).exit_code == 0
    (priced,) = json.loads(figures.read_text())["networks"]
    (replay,) = beside([folder / "topk-s1"], folder)
    assert priced["expected"] == pytest.approx(replay.expected(costs, parse_network(network))._asdict())
    (bare,) = beside([folder / "topk-s1"], folder, transport="bare")  # without headers
    step = bare.expected(costs, parse_network(network))
    assert step.step_s == pytest.approx(bare.step_seconds([parse_network(network)]).mean() * step.departures)
    gpu_hours, sent_gb = step.step_s / 3600 * bare.num_workers, bare.wire_bytes.mean() / 1e9
    assert step.money == pytest.approx(2.0 * gpu_hours + 0.1 * sent_gb)


def test_code_to_take_home_has_the_prices_of_its_own_transports(learned, learned_page):
    page, over_nccl = learned_page, compose(learned, ["10mbps"], transport="nccl")
    (code,) = [block.text for block in section(page, "summary").blocks if getattr(block, "kind", "") == "python"]
    text = code["10mbps"]
    comment, below = re.search(r"(# on 10mbps, against dense: .*)\n(.*)", text).groups()
    assert "pipelining" in below
    faster = re.search(r"([\d.]+)x \([\d.]+ to [\d.]+\).* over NCCL; ([\d.]+)x \(.*\).* over Gloo$", comment)
    assert faster is not None, comment
    name = re.match(
        r"`([^`]+)`", next(b.text for b in section(page, "summary").blocks if "own training" in str(b))["10mbps"]
    )
    assert rows(over_nccl, "job1-settings", "10mbps")[name[1]]["speed-up"].startswith(f"{faster[1]}x")


def test_the_setting_to_take_home_is_python_that_raysim_reads(learned_page):
    codes = [block.text for block in section(learned_page, "summary").blocks if getattr(block, "kind", "") == "python"]
    lines = {line for code in codes for text in code.values() for line in text.splitlines()}
    links = [ast.parse(line).body[0].value for line in lines if line.startswith("link = ")]
    assert links
    for call in links:
        named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        assert CompressedLink(*map(ast.literal_eval, call.args), **named).num_microbatches == named["num_microbatches"]


@pytest.mark.parametrize("count", [1, len(SEEDS)])
def test_dense_runs_without_a_price_do_not_take_that_of_others(runs, tmp_path, count):
    for run in runs.iterdir():
        shutil.copytree(run, tmp_path / run.name)
    for seed in SEEDS[:count]:
        actions = tmp_path / f"dense-s{seed}" / "actions.parquet"
        write_table(pq.read_table(actions).slice(0, 0), actions)
    page = compose(tmp_path, ["10mbps"])
    (lead,) = (text.text["10mbps"] for text in page.blocks(Text) if text.kind == "lead")
    assert ("no dense run has profiled actions" in lead) is (count == len(SEEDS))
    priced = analysis.settings(load(tmp_path), networks="10mbps")["priced"]
    assert set(priced) == ({0} if count == len(SEEDS) else {len(SEEDS)})


def test_warnings_of_runs_are_among_the_limits_of_the_figures(runs, tmp_path):
    for number, name in enumerate(("dense-s1", "topk-s1", "topk-s2")):
        copy_run(runs / name, tmp_path / name, warning="Node b holds the others up." if number else None)
    blocks = section(compose(tmp_path, ["100mbps"]), "summary").blocks
    (notes,) = [block.text for block in blocks if getattr(block, "kind", "") == "details"]
    assert "2 runs warned: Node b holds the others up." in notes.splitlines()


def test_each_job_has_a_section_and_no_job_is_compared_with_another(runs, tmp_path):
    for place, (name, seed, changes) in enumerate(
        [
            ("dense", 1, {}),
            ("topk", 1, {}),
            ("topk", 2, {}),
            ("q8", 1, {"batch_size": 999}),
            ("feedback", 2, {"batch_size": 999, "steps_done": 7}),
        ]
    ):
        copy_run(runs / f"{name}-s{seed}", tmp_path / f"{place}", **changes)
    page = compose(tmp_path, ["100mbps"])
    keys = [one.key for one in page.sections]
    assert keys == ["summary", "job1", "job2", "importance", "runs", "reproduce"]
    titles = {one.key: one.title for one in page.sections}
    assert "batch_size=" in titles["job1"]
    assert titles["job1"] != titles["job2"]
    for key, settings in (("job1", {"dense", "TopK(0.1) / Identity"}), ("job2", None)):
        blocks = section(page, key).blocks
        assert blocks[0] == Text("Frontier", "heading")
        assert all(block.key.startswith(f"{key}-") for block in blocks if isinstance(block, (Table, Chart)))
        shown = table(page, f"{key}-settings").on("100mbps")
        if settings is not None:
            assert set(shown["setting"]) == settings
            assert "unknown" not in set(shown["pays below"])  # whatever other jobs stand beside it
        else:
            assert set(shown["speed-up"]) == {"unknown"}
            assert set(shown["quality"]) == {"not compared with dense"}
    leads = page.decisions(["100mbps"])
    assert [lead.partition(": ")[0] for lead in leads] == [titles["job1"], titles["job2"]]
    said = " ".join(str(block.text) for block in section(page, "summary").blocks if isinstance(block, Text))
    assert "(1, 2)" in said
    assert "(steps 6, 7 and seeds 1, 2)" in said
    outline = Outline(to_html(page))
    links = [attributes["href"] for attributes in outline.all("a")]
    assert links.count("#job1") == links.count("#job2") == 1
    ids = [attributes["id"] for _, attributes in outline.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_a_front_holds_whom_no_other_beats():
    settings = [
        made("a", 1.0, accuracy=0.9),
        made("b", 0.5, accuracy=0.8),
        made("c", 0.6, accuracy=0.7),
        made("d", 2.0, accuracy=0.95),
    ]
    front = job(*settings).fronts["free"]["on"]
    assert [one.name for one in front] == ["b", "a", "d"]


def test_the_table_of_runs_has_every_run(runs, page):
    frame = table(page, "job1-runs").frame.set_index("run")
    assert set(frame.index) == {folder.name for folder in runs.iterdir()}
    simulated = frame.loc["dense-s1", "step, simulated"]
    assert simulated["100mbps"] != simulated["free"]


def test_the_recipe_and_the_commands_give_the_runs_again(runs, page, tmp_path):
    codes = [
        block.text for block in section(page, "reproduce").blocks if isinstance(block, Text) and block.kind == "code"
    ]
    (tmp_path / "job1.toml").write_text(codes[0])
    commands = str(codes[1]).splitlines()
    assert len(commands) == 4
    import shlex

    recorded = {(row["forward"], row["backward"], row["seed"]): row for row in load(runs).runs.to_dict("records")}
    for command in commands:
        words = shlex.split(command)
        assert words[:3] == ["raysim", "train", "job1.toml"]
        config = read_config(tmp_path / "job1.toml", words[3 : words.index("--engine")]).flat()
        row = recorded[config["forward"], config["backward"], config["seed"]]
        for key, value in config.items():
            if key != "cuts" and value is not None:
                assert row[key] == value, key


def test_options_of_a_model_stand_with_it_in_a_recipe():
    assert (
        recipe({"data": "digits", "data.path": 'a"b'}, ["data", "data.path"])
        == 'data = { name = "digits", path = "a\\"b" }'
    )


def test_decisions_are_drawn_over_time(runs, tmp_path):
    copy_run(runs / "dense-s1", tmp_path / "runs" / "adaptive")
    write_decisions(tmp_path / "runs" / "adaptive")
    written = compose(tmp_path / "runs", ["free"])
    points = chart(written, "decisions1").table()
    first = points[(points["series"] == "replica gradient, stage 0, layer0.weight") & points["factor sent"].notna()]
    assert first["factor sent"].tolist() == [10.0 * (1 + step) for step in range(6)]
    assert points[points["series"] == "promote"]["step"].tolist() == [3, 3, 3, 3]
    shown = table(written, "job1-decision-table").on("free").iloc[0]
    assert (shown["decisions"], shown["by branch"]) == ("6", "50% minimum, 50% candidate")


def test_decisions_without_a_gain_are_drawn_without_it(small, tmp_path):
    train(small(forward="ACGC(0.1)", steps=4), engine="inline", out=tmp_path / "runs" / "acgc")
    written = compose(tmp_path / "runs", ["free"])
    assert [panel.title for panel in chart(written, "decisions1").panels] == ["Factor sent"]
    shown = table(written, "job1-decision-table").on("free")
    assert set(shown["by branch"]) == {"50% dense, 50% bounded"}
    assert set(shown["mean gain"]) == {"none"}


@pytest.mark.slow
def test_a_study_has_importances(runs, tmp_path):
    folder = make_study(runs, tmp_path / "study", 6)
    trials = [
        {
            "param.density": 0.01 * (1 + number),
            "param.bits": float(2 + number % 3),
            "objective.accuracy_on": 0.5 + number / 100,
        }
        for number in range(12)
    ]
    write_study(tmp_path / "made", trials, objectives={"accuracy_on": "maximize"})
    for name in ("study.toml", "trials.parquet"):
        shutil.copy(tmp_path / "made" / name, folder / name)
    shutil.rmtree(tmp_path / "made")
    shares = chart(compose(folder, ["free"]), "importance").table()
    assert shares["share of importance"].sum() == pytest.approx(1)
    assert shares.iloc[0]["parameter"] == "density"


def test_each_section_says_what_its_data_lack(runs, tmp_path):
    copy_run(runs / "topk-s1", tmp_path / "runs" / "alone")
    written = compose(tmp_path / "runs", ["free"])
    for one in written.sections:
        assert one.blocks
        assert isinstance(one.blocks[0], (Table, Chart)) or str(one.blocks[0].text), one.key
    lead = next(text for text in written.blocks(Text) if text.kind == "lead")
    assert "no dense run" in lead.text["free"]
    assert to_html(written)


def command(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_a_report_opens_at_the_network_of_its_study_or_at_a_named_one(runs, tmp_path):
    copy_run(runs / "dense-s1", tmp_path / "study" / "trials" / "dense-s1")
    (tmp_path / "study" / "study.toml").write_text('[[objectives]]\nname = "step_s@20mbps"\n')
    page = compose(tmp_path)
    assert page.network == "20mbps"
    assert tuple(page.networks) == ("20mbps", *MATERIAL_NETWORKS)
    assert compose(tmp_path, ["20mbps", "free"], first="free").network == "free"


@pytest.mark.slow
def test_own_networks_stand_before_the_presets(runs, tmp_path):
    (tmp_path / "mine.toml").write_text("bandwidth_bps = 3e8\nlatency_s = 0.008\n")
    out = tmp_path / "report.html"
    result = command(runs, "--out", out, "--network", tmp_path / "mine.toml", "--network", "1gbps")
    assert result.exit_code == 0, result.output
    options = re.findall(r'<option value="([^"]+)"( selected)?>', out.read_text())
    assert [name for name, _ in options] == ["mine", "1gbps", *(one for one in MATERIAL_NETWORKS if one != "1gbps")]
    assert [name for name, selected in options if selected] == ["mine"]
    assert result.output.count("\nOn ") == 2


def test_bad_input_is_one_sentence(runs, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for arguments, said in (
        ((tmp_path / "none",), f"There is no folder {tmp_path / 'none'}."),
        ((tmp_path / "empty",), f"There is no run in {tmp_path / 'empty'}: no folder there has a run.parquet."),
        ((runs, "--format", "pdf"), "`--format` must be html or md, but got 'pdf'."),
        ((runs, "--compute", "gpu"), "`--compute` must be auto or cpu or wall, but got 'gpu'."),
        (
            (runs, "--format", "md", "--out", tmp_path / "file"),
            f"`--out` must be a folder with --format md, but {tmp_path / 'file'} is a file.",
        ),
    ):
        result = command(*arguments)
        assert result.exit_code == 2, arguments
        assert result.stderr.strip() == f"raysim: {said}"
    assert command(runs, "--out", tmp_path / "none" / "report.html").exit_code == 2
    assert command(runs, "--network", "slow").exit_code == 2
    assert command(runs, "--only").stderr.strip() == "raysim: `--only` needs at least one `--network`."
    assert not list((tmp_path / "empty").iterdir())
    with pytest.raises(AnalysisError, match="no run in"):
        compose(tmp_path / "empty")


def test_runs_that_are_not_over_are_listed_and_nothing_else_is(tmp_path):
    write_run(tmp_path / "runs" / "going", status="running")
    write_run(tmp_path / "runs" / "broken", status="failed", extra={"error": "stage 1 <died>"}.items())
    result = command(tmp_path / "runs")
    assert result.exit_code == 0, result.output
    assert "None of the 2 runs is finished" in result.output
    text = "".join(Outline((tmp_path / "runs" / "report.html").read_text()).text)
    assert "None of the 2 runs is finished" in text
    assert "stage 1 <died>" in text
    assert "nothing to recommend" in text
    assert command(tmp_path / "runs", "--format", "md", "--out", tmp_path / "md").exit_code == 0
    assert "None of the 2 runs is finished" in (tmp_path / "md" / "report.md").read_text()


def test_other_schemas_and_corrupt_files_are_said_and_the_rest_is_shown(runs, tmp_path):
    folder = tmp_path / "runs"
    for name in ("dense-s1", "topk-s1", "q8-s1"):
        shutil.copytree(runs / name, folder / name)
    change_row(
        folder / "q8-s1", schema_version=99, drop=("model", "steps_done", "dense_bytes", "final_loss_on", "host")
    )
    shutil.copytree(runs / "topk-s2", folder / "corrupt")
    (folder / "corrupt" / "run.parquet").write_bytes(b"PAR1 nothing")
    shutil.copytree(runs / "topk-s3", folder / "half")
    (folder / "half" / "steps.parquet").write_bytes(b"PAR1 nothing")
    (folder / "half" / "actions.parquet").unlink()
    written = compose(folder, ["free"])
    said = " ".join(written.problems)
    for part in ("corrupt", "half", "version 99"):
        assert part in said
    assert all(problem.endswith(".") for problem in written.problems)
    names = {name for number in (1, 2) for name in table(written, f"job{number}-runs").frame["run"]}
    assert names == {"dense-s1", "topk-s1", "q8-s1", "half"}
    assert to_html(written)


@pytest.mark.parametrize("keys", [{"frontier", "links", "gantt"}, pytest.param(None, marks=pytest.mark.slow)])
def test_markdown_has_every_picture_and_its_data(page, tmp_path, keys):
    page = page._replace(sections=[one for one in page.sections if keys is None or one.key in keys])
    write_report(page, tmp_path / "md", "md")
    text = (tmp_path / "md" / "report.md").read_text()
    from PIL import Image

    for figure in page.blocks(Chart):
        assert f"![{figure.title}](figures/{figure.key}.png)" in text
        with Image.open(tmp_path / "md" / "figures" / f"{figure.key}.png") as image:
            assert image.width >= 1000
            assert len(image.convert("L").getcolors()) > 2
        written = pd.read_csv(io.StringIO((tmp_path / "md" / "figures" / f"{figure.key}.csv").read_text()))
        assert len(written) == len(figure.table())
    for line in text.splitlines():
        if line.startswith("|"):
            assert line.endswith("|")
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("| `")} <= set(
        range(3, 20)
    )


@pytest.mark.slow
def test_two_hundred_runs_make_a_page_that_fits(report_of_study):
    page, html = report_of_study(200)
    assert len(html.encode()) < 15e6
    assert len(table(page, "job1-runs").frame) == 200
