"""The bench of DistributedDataParallel over real shaped links, which needs Linux and root."""

import os
import shutil
import sys

import pytest
from raysim_benchmarks.bench.ddp import CONTENDERS, bench_ddp
from typer.testing import CliRunner

from raysim.cli import app
from raysim.config import ConfigError


@pytest.mark.parametrize("rate", ["10mbps+20ms", "free", "fast"])
def test_invalid_link_bandwidth_is_refused_in_one_sentence(rate):
    said = CliRunner().invoke(app, ["bench", "ddp", "--rate", rate])
    assert said.exit_code == 2
    assert said.stderr.startswith("raysim: ")
    assert repr(rate) in said.stderr


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"),
    reason="hosts on one machine need Linux, root and iproute2",
)
def test_every_contender_trains_and_compression_shortens_slow_step():
    try:
        rows = bench_ddp([2], ["10mbps"], steps=2)
    except ConfigError as error:
        pytest.skip(f"namespaces are not to be had here: {error}")
    seconds = {row["contender"]: row["step_s"] for row in rows}
    assert set(seconds) == set(CONTENDERS)
    assert all(row["predicted_s"] is not None for row in rows if not row["contender"].startswith("torch"))
    assert seconds["DDP"] > 4 * seconds["PowerSGD(4)"]  # 4.5 MB each way, against some 30 kB
