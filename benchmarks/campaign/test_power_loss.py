"""A loss of power at every operation on files: a table is whole or not there, a checkpoint is whole, a pack too."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from file_calls import Process
from power_loss import Held, lay_out
from records_made import write_run

from raysim import analysis
from raysim.storage.files import write_whole
from raysim.training.checkpoint import checkpoints, newest_whole, write_checkpoint

FILES = ["first", "second", "third"]


def write_files():
    for name in FILES:
        write_whole(Path("tables") / name, name.encode() * 100)
    return {}


def check_files(home, over):
    """The files are the first of the three, each whole."""
    found = sorted(path.name for path in (home / "tables").iterdir() if not path.name.startswith("."))
    assert found == FILES[: len(found)]
    assert all((home / "tables" / name).read_bytes() == name.encode() * 100 for name in found)
    assert not over or found == FILES


def write_checkpoints():
    for step in (2, 4, 4, 6):
        write_checkpoint(Path("run/checkpoints"), step, [np.full(50, step, np.uint8)] * 2)
    return {}


def check_checkpoints(home, over):
    """There is no damaged checkpoint among those to resume from."""
    checkpoint, parts, errors = newest_whole(home / "run/checkpoints", lambda listed: None)
    assert not errors
    assert checkpoint is not None or not over
    if checkpoint is not None:
        assert all((part == checkpoint.step).all() for part in parts)
        assert checkpoint == checkpoints(home / "run/checkpoints")[-1]
        assert not over or checkpoint.step == 6


def pack():
    analysis.pack("runs", "packed")
    return {}


def check_pack(home, over):
    """The pack is there whole, or not at all."""
    if over or (home / "packed").exists():
        packed = analysis.load(home / "packed")
        assert not packed.problems
        assert len(packed) == 2


@pytest.mark.parametrize(
    ("work", "check"), [(write_files, check_files), (write_checkpoints, check_checkpoints), (pack, check_pack)]
)
def test_power_loss_leaves_complete_files(tmp_path, work, check):
    home, kept = tmp_path / "home", tmp_path / "kept"
    (home / "tables").mkdir(parents=True)
    pa.set_io_thread_count(1)
    for number in range(2):
        write_run(home / "runs" / f"run-{number}")
    answer = Process(work, home, mode="log", kept=kept).wait()
    assert "error" not in answer, answer
    folders = [Held(*one) for one in answer["held"]]
    assert len(folders) > 8
    for number, held in enumerate(folders):
        case = tmp_path / f"case-{number}"
        lay_out(held.tree, kept, case)
        try:
            check(case, held.over)
        except Exception as error:
            raise AssertionError(held.moment) from error
