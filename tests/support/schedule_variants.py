"""The one list of schedules over which their laws run.

A family that is in `SCHEDULES` but not here fails a test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from raysim.schedules.families import Schedule, parse_schedule

ZBV_CSV = Path(__file__).parents[1] / "golden" / "zbv.csv"  # 4 stages on 2 workers, 4 microbatches
SIZES = [(p, m) for p in range(1, 7) for m in range(1, 9)]


@dataclass(frozen=True)
class Variant:
    notation: str
    serves: Callable[[int, int], bool] = lambda num_stages, num_microbatches: True

    @property
    def schedule(self) -> Schedule:
        return parse_schedule(self.notation)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """The numbers of stages and microbatches that it has rows for, among `SIZES`."""
        return [size for size in SIZES if self.serves(*size)]


def interleaved(each: int) -> Callable[[int, int], bool]:
    return lambda num_stages, num_microbatches: num_stages % each == 0 and num_microbatches % (num_stages // each) == 0


VARIANTS = [
    Variant("GPipe"),
    Variant("1F1B"),
    Variant("1F1B(extra_warmup=2)"),
    Variant("1F1B(ahead=2)"),
    Variant("1F1B(extra_warmup=1, ahead=3)"),
    Variant("Interleaved1F1B(1)", interleaved(1)),
    Variant("Interleaved1F1B(2)", interleaved(2)),
    Variant("ZBH1"),
    Variant("ZBH2"),
    Variant("ZB"),
    Variant("ZB(forward=2.0, input=1.5, weight=0.5, message=0.2, memory=1.5, kept=0.4)"),
    Variant("ZBV", lambda num_stages, num_microbatches: num_stages % 2 == 0),
    Variant("DualPipeV", lambda num_stages, num_microbatches: num_stages % 2 == 0 and num_microbatches >= num_stages),
    Variant(f"Custom({str(ZBV_CSV)!r})", lambda num_stages, num_microbatches: (num_stages, num_microbatches) == (4, 4)),
]
