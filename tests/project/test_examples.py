"""The gallery shows every script with its picture, and the notebook runs. The scripts run with the page, in `test_docs`."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py"))
GALLERY = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")


def test_gallery_lists_every_example_with_picture():
    assert sorted(re.findall(r"^python examples/(\w+)\.py", GALLERY, re.MULTILINE)) == SCRIPTS
    for script in SCRIPTS:
        assert f"](images/gallery/{script}.png)" in GALLERY
        assert (ROOT / "docs" / "images" / "gallery" / f"{script}.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(EXAMPLES / "paper_figure.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=250, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert any("image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", []))


def test_notebook_is_committed_without_outputs():
    """Outputs would make every commit of it large, and would go stale."""
    cells = json.loads((EXAMPLES / "paper_figure.ipynb").read_text(encoding="utf-8"))["cells"]
    assert not [cell for cell in cells if cell.get("outputs")]
