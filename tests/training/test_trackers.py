"""Runs in TensorBoard, Weights & Biases, MLflow and Trackio: each read back from its local store."""

from collections import defaultdict

import pytest
from typer.testing import CliRunner

from raysim.cli import app
from raysim.config import ConfigError, read_config
from raysim.training import trackers
from raysim.training.run import Training
from raysim.training.train import train

STEPS = 6


def read_tensorboard(tmp_path, run):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}, None


def read_wandb(tmp_path, run):
    datastore = pytest.importorskip("wandb.sdk.internal.datastore")
    from wandb.proto.wandb_internal_pb2 import Record

    curves, config = defaultdict(list), {}
    for file in sorted(tmp_path.glob(f"wandb/offline-run-*-{run.row['run_id']}/*.wandb")):
        store = datastore.DataStore()
        store.open_for_scan(str(file))
        while (data := store.scan_data()) is not None:
            record = Record.FromString(data)
            config |= {item.key: item.value_json for item in record.run.config.update}
            values = {item.key or item.nested_key[0]: float(item.value_json) for item in record.history.item}
            for name in values.keys() - {"_step", "_runtime", "_timestamp"}:
                curves[name].append((int(values["_step"]), values[name]))
    return curves, {key: value.strip('"') for key, value in config.items()}


def read_mlflow(tmp_path, run):
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient()
    (experiment,) = [each for each in client.search_experiments() if each.name == "digits-cnn"]
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.status, found.data.tags["run_id"]) == ("FINISHED", run.row["run_id"])
    history = {name: client.get_metric_history(found.info.run_id, name) for name in found.data.metrics}
    return {name: [(each.step, each.value) for each in values] for name, values in history.items()}, found.data.params


def read_trackio(tmp_path, run):
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    (name,) = storage.get_runs("digits-cnn")
    curves = defaultdict(list)
    for row in storage.get_logs("digits-cnn", name):
        for key in row.keys() - {"step", "timestamp"}:
            curves[key].append((row["step"], row[key]))
    return curves, None


TOOLS = {"tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow, "trackio": read_trackio}


@pytest.mark.filterwarnings("ignore")  # of the tools
@pytest.mark.parametrize("tool", TOOLS)
def test_a_resumed_run_has_its_curves_under_one_id(tool, tmp_path, monkeypatch):
    pytest.importorskip(trackers.TensorBoard.package if tool == "tensorboard" else tool)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    given = [
        "digits-cnn",
        f"steps={STEPS}",
        "evaluate_every_steps=3",
        "evaluate_samples=40",
        "checkpoint_every_steps=1",
        "optimizer.clip_norm=1",
    ]
    words = [*given, "forward=TopK(0.1)", f"report_to={tool}"]
    events = Training(read_config(words[0], words[1:]), out="run", engine="inline").events()
    for event in events:
        if event.kind == "step" and event.row["step"] == 3:
            break
    events.close()  # as an interruption does
    run = train(*words, out="run", engine="inline", resume=True)
    curves, config = TOOLS[tool](tmp_path, run)
    rate = 1e-5 if tool == "tensorboard" else 1e-12  # its scalars have 32 bits
    for name in set(run.steps) - {"step"}:
        known = dict(curves[f"train/{name}"])
        assert set(known) == set(range(STEPS))
        if not name.endswith(("seconds", "_s")):  # a repeated step takes another time
            assert [known[step] for step in range(STEPS)] == pytest.approx(run.steps[name].tolist(), rel=rate)
    for row in run.evals.to_dict("records"):
        for measure in run.measures:
            assert dict(curves[f"eval/{measure}_{row['mode']}"])[row["step"]] == pytest.approx(row[measure], rel=rate)
    if config is not None:
        assert (config["forward"], config["batch_size"]) == ("TopK(0.1)", "32")


def test_a_missing_tool_is_named_with_its_installation(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    for tool in ("wandb", "mlflow", "trackio"):
        words = ["train", "digits-cnn", f"report_to={tool}", "--engine", "inline", "--out", str(tmp_path / "run")]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 2
        assert " ".join(done.stderr.split()) == (
            f"raysim: `report_to` = '{tool}' needs the package {tool}, which is not installed: `pip install 'raysim[{tool}]'`."
        )
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="report_to"):
        read_config("digits-cnn", ["report_to=comet"])


def test_a_tool_that_fails_does_not_end_the_run(tmp_path, monkeypatch):
    class Broken(trackers.WandB):
        def start(self, config, identity):
            self.logged = 0

        def log(self, step, values):
            if step == 2:
                raise ConnectionError("no route to host")

    monkeypatch.setattr(trackers, "check_trackers", lambda names: None)
    monkeypatch.setitem(trackers._TOOLS, "wandb", Broken)
    given = ["steps=4", "evaluate_samples=8", 'report_to=["wandb", "tensorboard"]']
    run = train("digits-cnn", *given, out=tmp_path / "run", engine="inline")
    assert run.status == "finished"
    assert run.row["warning"] == "`report_to`: wandb has failed and gets no more values: no route to host"
    assert len(read_tensorboard(tmp_path, run)[0]["train/loss"]) == 4
