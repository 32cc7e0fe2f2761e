"""What a GPU must be able to do and to hold, told from its facts, as no GPU need be here."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from raysim.config import ConfigError
from raysim.forecast.compute import _alone
from raysim.network.memory import StageMemory
from raysim.pipeline.device import DeviceFacts
from raysim.pipeline.link import CodedMessage
from raysim.pipeline.reports import TimedAction
from raysim.pipeline.stage_memory import check_devices
from raysim.schedules import Action

T4 = DeviceFacts("Tesla T4", "7.5", "550.54", "12.4", 16 * 10**9, False, "GPU-1")


def test_a_dtype_that_the_gpu_lacks_is_refused(small):
    with pytest.raises(ConfigError) as error:
        check_devices(small(dtype="bfloat16"), [StageMemory(0)], [0], [T4], 1.0)
    assert str(error.value) == (
        "`dtype` = 'bfloat16' needs a GPU of compute capability 8.0, but Tesla T4 has 7.5. Set `dtype` to 'float16' or 'float32'."
    )
    check_devices(small(dtype="float16"), [StageMemory(0)], [0], [T4], 1.0)


def test_stages_fit_their_gpu_and_their_share_of_it(small):
    stages = [StageMemory(stage, weights_bytes=3 * 10**9) for stage in range(4)]
    check_devices(small(), stages, [0, 1, 2, 3], [T4] * 4, 0.25)
    check_devices(small(), stages, [0, 1, 2, 3], [None] * 4, 1.0)  # a CPU's room is checked elsewhere
    with pytest.raises(
        ConfigError, match=r"^The stages of the 0.1 GPU of worker 0 must fit in 1.6 GB, but need 3 GB: stage 0: "
    ):
        check_devices(small(), stages, [0, 1, 2, 3], [T4] * 4, 0.1)
    with pytest.raises(ConfigError, match=r"^The stages of GPU GPU-1 must fit in 16 GB, but need 18 GB: stage 0: "):
        check_devices(small(), [StageMemory(s, weights_bytes=6 * 10**9) for s in range(3)], [0, 1, 2], [T4] * 3, 1.0)
    apart = [T4, T4, T4._replace(uuid="GPU-2")]
    check_devices(small(), [StageMemory(s, weights_bytes=6 * 10**9) for s in range(3)], [0, 1, 2], apart, 1.0)


def test_a_profile_counts_the_seconds_of_a_gpu_not_those_of_launching_its_kernels(small):
    """Kernels of 5 s, launched in 0.1 s."""
    begun: Any = SimpleNamespace(at=0.0)
    ended: Any = SimpleNamespace(at=5.0)
    clock: Any = SimpleNamespace(seconds=lambda moment: getattr(moment, "at", moment))
    record = TimedAction(Action(0, "F", 0), begun, begun, ended, ended, 0.1, CodedMessage(), None).record(clock)
    assert (record.compute_wall_s, _alone(record, small())["compute_wall_s"]) == (5.0, 5.0)
    assert math.isnan(record.compute_cpu_s)
