"""Records of strangers: reading them runs no code, one bad run is named and the rest opens, and no terminal obeys them."""

import shutil

import pyarrow.parquet as pq
import pytest
from raysim_findings.verdicts import findings
from record_mutations import EVIL, SIGNS, VALUES, copy_run, mutate, train_runs
from typer.testing import CliRunner

from raysim import Run, analysis, plugins, save_pretrained, train
from raysim.analysis.report import compose, write_report
from raysim.cli import app
from raysim.compressors import parse
from raysim.config import ConfigError
from raysim.notation import MAX_DEPTH


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_runs(tmp_path_factory.mktemp("strangers") / "runs")


@pytest.fixture
def stranger(trained, tmp_path, monkeypatch):
    """Return the folder that a user stands in: two runs, a module that leaves a mark, and a copy of a run to be changed."""
    home = tmp_path / "stranger"
    for name in ("dense-s0", "topk-s0"):
        copy_run(trained / name, home / name)
    copy_run(trained / "replicas", home / "changed")
    (home / "evil.py").write_text(EVIL)
    monkeypatch.chdir(home)
    return home


def output(*words):
    """Return what a command prints, with its exit code."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


NAMED = [("weights", "evil:W"), ("schedule", "evil:S(1)"), ("schedule", "os:system")]


def test_reading_a_record_imports_nothing_that_it_names(stranger):
    for place, (column, value) in enumerate(NAMED):
        mutate(copy_run(stranger / "changed", stranger / f"naming{place}"), "run", column, value)
    shutil.rmtree(stranger / "changed")
    commands = [["report", ".", "--network", "1gbps", "--only"], ["findings", "."], ["pack", ".", "../pack"]]
    assert [output(*words)[0] for words in commands] == [0, 0, 0]
    results = analysis.load(".")
    assert sorted(analysis.replay(results, "1gbps")["run"]) == ["dense-s0", "topk-s0"]
    for place, (_, value) in enumerate(NAMED):
        code, said = output("replay", f"naming{place}", "--network", "1gbps")
        assert code == 2
        assert f"give `--trust {value.partition(':')[0]}`" in " ".join(said.split())
        (problem,) = [one for one in results.problems if f"naming{place}" in one]
        assert f"`{value.partition('(')[0]}` is named by a record, and reading a record runs no code" in problem
    assert not (stranger / "marker").exists()


def test_export_calls_no_function_named_in_records(tmp_path, monkeypatch, small):
    llama = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3}
    model = {"name": "hf", "config": llama | {"num_attention_heads": 2, "num_key_value_heads": 2}}
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be " * 400)
    config = small(model=model, data={"name": "text", "path": str(text), "length": 16}, steps=2)
    run = train(config, engine="inline", out=tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text(EVIL)
    save_pretrained(run, tmp_path / "model")
    mutate(run.folder, "run", "data.command", "touch marker")
    for data in ("os:system", "subprocess:getoutput", "evil:S"):
        mutate(run.folder, "run", "data", data)
        sentence = f"Data `{data}` is named by a record.*`--trust {data.partition(':')[0]}`"
        with pytest.raises(ConfigError, match=sentence):
            save_pretrained(Run(run.folder), tmp_path / "other")
        assert output("export", run.folder, "other")[0] == 2
    assert not (tmp_path / "marker").exists()
    assert not (tmp_path / "other").exists()


def test_export_with_custom_data_needs_trust(tmp_path, monkeypatch, small):
    (tmp_path / "own_words.py").write_text(
        "import torch\n"
        "def words(count=64):\n"
        "    x = torch.arange(count * 8).reshape(count, 8) % 50\n"
        "    return list(zip(x, x)), list(zip(x[:16], x[:16]))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    llama = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3}
    model = {"name": "hf", "config": llama | {"num_attention_heads": 2, "num_key_value_heads": 2}}
    config = small(model=model, data={"name": "own_words:words"}, steps=2)
    run = train(config, engine="inline", out="run")
    code, text = output("export", run.folder, "model")
    assert (code, "`--trust own_words`" in " ".join(text.split())) == (2, True)
    assert output("export", run.folder, "model", "--trust", "own_words")[0] == 0
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_a_trusted_module_is_imported_and_no_other(stranger):
    mutate(stranger / "changed", "run", "schedule", "own_methods:Backwards")
    with pytest.raises(analysis.ReplayError, match=r"raysim\.plugins\.trusting"):
        analysis.replay("changed", "1gbps")
    with plugins.trusting("evil"), pytest.raises(analysis.ReplayError, match="--trust own_methods"):
        analysis.replay("changed", "1gbps")
    with plugins.trusting("own_methods"):
        assert len(analysis.replay("changed", "1gbps")) == 1
    assert output("replay", "changed", "--network", "1gbps", "--trust", "own_methods")[0] == 0
    assert output("report", ".", "--trust", "own methods")[0] == 2


def test_trust_covers_package_modules_and_single_entry_points(monkeypatch):
    with plugins.from_record():
        with pytest.raises(ValueError, match="--trust tests"):
            parse("tests.support.own_methods:Half")
        with plugins.trusting("tests.support"):
            assert repr(parse("tests.support.own_methods:Half")).endswith("own_methods:Half")
        monkeypatch.setattr(plugins, "entry_points", lambda: {"Halved": "own_methods:Half"})
        parse("Halved(3)")
    parse("own_methods:Half")  # typed


def text_for_steps(run):
    for table in ("steps", "actions", "evals", "links"):
        mutate(run, table, "step", "text")


def half_of_steps(run):
    rows = pq.read_table(run / "steps.parquet")
    pq.write_table(rows.slice(0, len(rows) // 2), run / "steps.parquet")


def changed(column, change, table="run"):
    return lambda run: mutate(run, table, column, change)


BAD = [
    (text_for_steps, "steps that are no integers"),
    (half_of_steps, "the run has 0 to 7: copy it again"),
    (changed("run", "other"), "its column 'run' is added by `analysis.load`"),
    (changed("trial", "other"), "its column 'trial' is added by `analysis.load`"),
    (changed("forward", "long"), "its `forward` cannot be read: A notation is written in at most 1000 characters"),
    (changed("schedule", "deep"), "its `schedule` cannot be read"),
    (
        changed("forward", f"TopK({'(' * 100}1{')' * 100})"),
        f"at most {MAX_DEPTH} nested brackets, but got 101",
    ),
    (changed("num_stages", "text"), "its `num_stages` must be an integer, but is 'many'"),
    (changed("num_stages", "huge"), f"its `num_stages` is out of bounds: {VALUES['huge']}"),
    (changed("status", "null"), "its `status` has no value"),
    (changed("compute_wall_s", "infinite", "actions"), "its `compute_wall_s` is out of bounds: inf"),
    (changed("stage", "null in one row", "actions"), "its table of actions has rows without `stage`"),
]


def test_bad_runs_are_reported_and_others_load(stranger):
    for place, (spoil, _) in enumerate(BAD):
        spoil(copy_run(stranger / "changed", stranger / f"bad{place:02}"))
    results = analysis.load(".")
    assert {"dense-s0", "topk-s0"} <= set(analysis.replay(results, "1gbps", against="dense")["run"])
    findings(results)
    page = compose(".", ["1gbps"])
    write_report(page, stranger.parent / "report.html")
    for place, (_, reason) in enumerate(BAD):
        for problems in (results.problems, page.problems):
            assert any(f"bad{place:02}" in one and reason in one for one in problems), reason
        code, _ = output("replay", f"bad{place:02}", "--network", "1gbps")
        assert code in (0, 2)  # 0 of a run whose evaluations alone are wrong


@pytest.mark.slow
def test_terminal_escapes_in_records_are_removed(stranger):
    for column in ("forward", "backward", "engine", "model"):
        mutate(stranger / "changed", "run", column, "signs")
    mutate(stranger / "changed", "links", "codec", "signs")
    (stranger / "changed").rename(stranger / f"changed{SIGNS.replace('/', '')}")
    (folder,) = stranger.glob("changed*")
    texts = [
        output(*words)[1]
        for words in (
            ["replay", folder, "--network", "1gbps"],
            ["report", ".", "--network", "1gbps", "--only"],
            ["findings", "."],
        )
    ]
    texts += [repr(Run(folder)), *analysis.load(".").problems]
    for text in texts:
        assert not {"\x1b", "\x07", "\u202e"} & set(text)


def test_a_report_is_not_written_through_a_link_of_the_folder(stranger):
    (stranger / "report.html").symlink_to("../elsewhere")
    (stranger / "report").symlink_to("..")
    for words in (["report", "."], ["report", ".", "--format", "md"]):
        code, text = output(*words)
        assert (code, "is a link" in " ".join(text.split())) == (2, True)
    assert not (stranger.parent / "elsewhere").exists()


def test_leftover_draft_does_not_block_packing(stranger, monkeypatch):
    pack = stranger.parent / "packed"
    monkeypatch.setattr("os.getpid", lambda: 7)
    (stranger.parent / ".packed.7").mkdir()
    analysis.pack(".", pack)
    assert len(analysis.load(pack)) == 3


def test_run_is_complete_if_parts_cannot_be_removed(small, tmp_path, monkeypatch):
    removed = shutil.rmtree

    def refuses(path, *given, ignore_errors=False, **named):
        if str(path).endswith("parts") and not ignore_errors:
            raise OSError(16, "Device or resource busy", str(path))
        if not str(path).endswith("parts"):
            removed(path, *given, ignore_errors=ignore_errors, **named)  # type: ignore[misc]

    monkeypatch.setattr(shutil, "rmtree", refuses)
    run = train(small(steps=2), engine="inline", out=tmp_path / "run")
    assert (tmp_path / "run" / "parts").is_dir()
    assert run.status == "finished"
    assert len(run.steps) == 2


def test_refused_command_changes_no_process_state():
    for words in (("--trust", "no-module"), ("--trust", "mine", "--transport", "tcp")):
        assert output("report", "nowhere", *words)[0] == 2
    assert plugins.import_object("os:getpid")
