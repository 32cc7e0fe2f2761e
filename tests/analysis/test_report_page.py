"""The report's page in a real browser: no script errors, controls that work by mouse and keys, on a phone and on paper too."""

import os
import re
import shutil

import pytest
from report_runs import SPITE

from raysim.analysis.report.page import Chart, Table

RUNS = 22


@pytest.fixture(scope="module")
def browser():
    """Return the system's Chromium, without a window."""
    found = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )
    if found is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        as_root = os.geteuid() == 0  # its sandbox does not work for root
        browser = playwright.chromium.launch(
            executable_path=found, args=["--no-sandbox"] if as_root else [], timeout=60_000
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory, report_of_study):
    """Return a report of `RUNS` runs and the file of its page."""
    page, html = report_of_study(RUNS)
    file = tmp_path_factory.mktemp("browser") / "report.html"
    file.write_text(html, encoding="utf-8")
    return page, file


@pytest.fixture
def opened(browser, report):
    """Return a function that opens the page; no script error and no request may have come of it in the end."""
    contexts, wrong = [], []

    def open_page(width=1280, height=900, **options):
        context = browser.new_context(viewport={"width": width, "height": height}, accept_downloads=True, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(120_000)  # a busy machine may take a minute to open a page
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "request",
            lambda request: None if request.url.startswith(("file:", "data:", "blob:")) else wrong.append(request.url),
        )
        page.goto(report[1].as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not wrong


@pytest.mark.slow
def test_the_quickstart_sweep_has_a_report(browser, tmp_path):
    """A real sweep and its page: no script error, the dense baseline in it, and a network control that works."""
    from typer.testing import CliRunner

    from raysim.cli import app
    from raysim.sweeps.runner import Sweep
    from raysim.sweeps.study_file import read_study

    study = read_study("quickstart", ["steps=20", "evaluate_every_steps=10"], trials=4)
    Sweep(study, out=str(tmp_path / "study")).run()
    result = CliRunner().invoke(app, ["report", str(tmp_path / "study"), "-o", str(tmp_path / "report.html")])
    assert result.exit_code == 0, result.output
    wrong = []
    page = browser.new_page()
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto((tmp_path / "report.html").as_uri())
    before = column(page, "job1-runs", 12)
    page.get_by_label("Times on the network").select_option("worldwide")
    assert len(before) == 4
    assert column(page, "job1-runs", 12) != before
    assert "dense" in page.inner_text("main")
    assert not wrong


def column(page, table, number):
    return page.locator(f"#{table} tbody tr:not([hidden]) > :nth-child({number})").all_inner_texts()


def draw_all(page):
    for figure in page.locator("figure").all():
        figure.scroll_into_view_if_needed()
        figure.locator(".main-svg").first.wait_for()


@pytest.mark.slow
def test_the_network_control_changes_the_numbers_and_the_charts(opened, report):
    page = opened()
    assert page.locator("img").count() == 0
    assert any(SPITE in text for text in column(page, "job1-runs", 1))
    assert page.locator("p.lead").first.inner_text().startswith("On 1gbps")
    page.get_by_label("Times on the network").select_option("100mbps")
    assert page.locator("p.lead").first.inner_text().startswith("On 100mbps")
    listed = next(table for table in report[0].blocks(Table) if table.key == "job1-runs").on("100mbps")
    assert len(listed) == RUNS
    assert [text.replace("\xa0", " ") for text in column(page, "job1-runs", 12)] == listed["step, simulated"].tolist()
    assert page.locator("#job1-recommended tr.current th").inner_text() == "100mbps"
    draw_all(page)
    for chart in report[0].blocks(Chart):
        drawn = page.locator(f"#{chart.key} .plot").evaluate(
            "plot => plot.data.map(trace => [trace.name, trace.meta ?? null])"
        )
        expected = [[trace["name"], trace.get("meta")] for panel in chart.panels for trace in panel.traces]
        assert drawn == [[name, network] for name, network in expected if network in (None, "100mbps")], chart.key


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_charts_and_page_follow_the_colours_of_the_system(opened, scheme):
    page = opened(color_scheme=scheme)
    draw_all(page)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (scheme == "light")
    papers = page.locator(".plot .main-svg:first-child").evaluate_all(
        "plots => plots.map(plot => plot.style.background)"
    )
    assert set(papers) == {ground}
    marks = page.locator("#job1-frontier .plot").evaluate("plot => plot.data.map(trace => trace.marker.color)")
    assert ("#1B1F24" in marks) == (scheme == "light")
    ticks = page.locator('.plot [class*="tick"] > text').all_text_contents()
    assert any(text.endswith("\xa0ms") for text in ticks)
    assert not [text for text in ticks if re.fullmatch(r"[\u2212\d.]+[nµmkMGT]?(s|B|bit/s)", text)]


@pytest.mark.slow
def test_tables_are_read_without_scripts(opened):
    page = opened(java_script_enabled=False)
    assert page.locator("p.lead").first.inner_text().startswith("On 1gbps")
    assert len(column(page, "job1-runs", 12)) == RUNS
    assert page.locator("noscript").first.is_visible()


@pytest.mark.slow
def test_the_table_of_runs_is_sorted_and_filtered(opened):
    page = opened()
    head = page.locator("#job1-runs thead").get_by_role("button", name="factor")
    head.click()
    assert page.locator("#job1-runs th[aria-sort]").get_attribute("aria-sort") == "ascending"
    factors = [float(text) for text in column(page, "job1-runs", 8)]
    assert factors == sorted(factors)
    head.click()
    assert [float(text) for text in column(page, "job1-runs", 8)] == sorted(factors, reverse=True)
    page.locator("#job1-runs-filter").fill("topk(0.05) finished")
    shown = column(page, "job1-runs", 2)
    assert 0 < len(shown) < RUNS
    assert all("TopK(0.05)" in text for text in shown)


@pytest.mark.slow
def test_times_stay_sorted_when_the_network_changes(opened):
    page = opened()
    page.locator("#job1-runs thead").get_by_role("button", name="step, simulated").click()
    units = {"µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
    for network, place in (("free", -1), ("10kbps", 0), ("free", -1)):
        page.get_by_label("Times on the network").select_option(network)
        steps = [float(text.split()[0]) * units[text.split()[1]] for text in column(page, "job1-runs", 12)]
        assert steps == sorted(steps)
        assert column(page, "job1-runs", 1)[place] == "trials/998-s1"


@pytest.mark.slow
def test_it_can_be_used_without_a_mouse(opened):
    page = opened()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.locator("#network").focus()
    page.keyboard.press("ArrowDown")
    assert page.locator("#network").input_value() == "free"
    assert page.locator("p.lead").first.inner_text().startswith("On free")
    page.locator("#job1-runs thead button").first.focus()
    page.keyboard.press("Enter")
    assert column(page, "job1-runs", 1) == sorted(
        column(page, "job1-runs", 1), key=lambda t: (int(t[7:].split("-")[0]), t)
    )


@pytest.mark.slow
def test_it_fits_a_phone(opened):
    page = opened(390, 844, is_mobile=True, has_touch=True)
    draw_all(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    widths = page.locator(".plot").evaluate_all("plots => plots.map(plot => plot.getBoundingClientRect().width)")
    assert all(300 < width <= 390 for width in widths)


@pytest.mark.slow
@pytest.mark.parametrize("width", [800, 1400])
def test_tables_with_sentences_and_code_are_not_cut_off(opened, width):
    page = opened(width, 900)
    cut = page.evaluate(
        "[...document.querySelectorAll('.scroll:not(:has([id$=-runs])), pre')].filter(one => one.scrollWidth > one.clientWidth)"
        ".map(one => one.querySelector('table')?.id || one.textContent)"
    )
    assert cut == []


@pytest.mark.slow
def test_a_row_is_read_without_scrolling_sideways_on_a_phone(opened):
    page = opened(390, 844, is_mobile=True, has_touch=True)
    cells = page.locator("#job1-recommended tbody td")
    ends = cells.evaluate_all("cells => cells.map(cell => cell.getBoundingClientRect().right)")
    assert ends
    assert max(ends) <= 390
    heads = cells.evaluate_all("cells => cells.map(cell => getComputedStyle(cell, '::before').content)")
    assert all(len(head.strip('"')) > 2 for head in heads)


@pytest.mark.slow
def test_the_network_is_kept_in_the_address(opened):
    page = opened()
    page.get_by_label("Times on the network").select_option("100mbps")
    page.goto(page.url + "#frontier")
    page.reload()
    assert page.get_by_label("Times on the network").input_value() == "100mbps"
    assert page.locator("p.lead").first.inner_text().startswith("On 100mbps")


@pytest.mark.slow
def test_ticks_of_an_axis_never_repeat(opened):
    page = opened()
    draw_all(page)
    for axis in ("xtick", "ytick"):
        texts = page.locator(".plot").evaluate_all(
            f"plots => plots.map(plot => [...plot.querySelectorAll('.{axis} text')].map(text => text.textContent))"
        )
        assert all(len(set(of_plot)) == len(of_plot) for of_plot in texts)


@pytest.mark.slow
def test_it_prints_with_all_its_figures(opened):
    page = opened()
    page.evaluate(
        "addEventListener('beforeprint', () => { globalThis.printed = [...document.querySelectorAll('.plot')].map("
        "plot => plot.querySelector('.main-svg').clientWidth); })"
    )
    paper = page.pdf(format="A4")
    assert paper.startswith(b"%PDF")
    assert set(page.evaluate("printed")) == {680}
