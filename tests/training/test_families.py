"""Models of transformers from the command line to the report: trained from a folder, replayed, swept, and reported."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hf_variants import CAUSAL, IMAGES, PICTURES
from typer.testing import CliRunner

from raysim.cli import app
from raysim.records import Run
from raysim.workloads.hf_model import load_model
from raysim.workloads.splits import DataShape

SENTENCES = "the quick brown fox jumps over the lazy dog again and again\n"
BYTES = DataShape((12,), "int64", 256, target_shape=(12,))


def text(folder):
    (folder / "text.txt").write_text(SENTENCES * 40)
    return ["data=text", f"data.path={folder / 'text.txt'}", "data.length=12"]


def encoded(index, size, form):
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(index).integers(0, 256, (size, size, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    image.fromarray(pixels).save(buffer, format=form)
    return buffer.getvalue()


def pictures(folder):
    """Write a folder of class folders."""
    for label in range(10):
        (folder / "pictures" / f"class{label}").mkdir(parents=True)
        for place in range(4):
            path = folder / "pictures" / f"class{label}" / f"{place}.png"
            path.write_bytes(encoded(10 * label + place, 16, "PNG"))
    return ["data=images", f"data.path={folder / 'pictures'}"]


def jpegs(folder):
    """Write Parquet files as CIFAR-10's, with encoded pictures."""
    for split, count in (("train", 32), ("test", 8)):
        rows = [{"img": {"bytes": encoded(i, 32, "JPEG"), "path": "x"}, "label": i % 10} for i in range(count)]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}-00000-of-00001.parquet")
    return ["data=cifar10", f"data.path={folder}"]


FAMILIES = {
    "llama": (CAUSAL["llama"], BYTES, text),
    "qwen2": (CAUSAL["qwen2"], BYTES, text),
    "gpt2": (CAUSAL["gpt2"], BYTES, text),
    "vit": (IMAGES["vit"], PICTURES, pictures),
    "resnet": (IMAGES["resnet"], PICTURES, jpegs),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_trained_replayed_swept_and_reported(ray, family, tmp_path, monkeypatch):
    config, shape, write_data = FAMILIES[family]
    (tmp_path / "data").mkdir()
    data = write_data(tmp_path / "data")
    load_model(shape, config=config).save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        return done.stdout

    stages = 3 if family == "resnet" else 4
    settings = [
        *data,
        f"model.path={tmp_path / 'model'}",
        f"num_stages={stages}",
        "num_microbatches=2",
        "steps=4",
        "profile_every_steps=2",
    ]
    said = call("train", "hf", *settings, "forward=Quantize(8)", "--engine", "inline", "--out", "run")
    assert "Quantize(8)" in said
    run = Run(tmp_path / "run")
    assert run.status == "finished"
    assert np.isfinite(run.steps["loss"]).all()
    assert set(run.links["boundary"].dropna()) == set(range(stages - 1))
    assert "100mbps" in call("replay", "run", "--network", "100mbps")
    changes = "\n".join(f'"{key}" = {value}' for key, value in quoted(settings))
    (tmp_path / "families.toml").write_text(
        'base = "hf"\nsampler = "grid"\nengine = "inline"\nobjectives = ["loss_on", "step_s@100mbps"]\n'
        f'[space]\nforward = ["Identity", "Quantize(8)"]\n[set]\n{changes}\n'
    )
    call("sweep", "families.toml", "--out", "sweep")
    call("report", "sweep", "-o", "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Quantize(8)" in page
    assert "0 → 1" in page


def quoted(settings):
    """Return overrides as keys and values in TOML."""
    for setting in settings:
        key, value = setting.split("=", 1)
        yield key, value if value.isdecimal() else f'"{value}"'
