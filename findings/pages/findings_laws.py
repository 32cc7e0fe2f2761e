"""Published harms by size, carried to other sizes, for `raysim advise`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd

from raysim.scaling import Laws, Series, held_out, reach

TABLE = Path(__file__).parents[2] / "docs" / "measurements" / "local-steps-by-size.csv"
ROUNDING = 0.1 / math.sqrt(12)
MARGIN = 1.0
STEP = 1.5
"""Factor from one size of a curve to the next."""


def laws() -> str:
    """Return, as JSON, the harm of DiLoCo by size of the model and number of replicas, as far up as laws carry it.

    A curve is a list of sizes in parameters with the harm and its bounds, in per cent of the loss.
    """
    frame = pd.read_csv(TABLE, comment="#")
    tables = {int(replicas): own for replicas, own in frame.groupby("replicas") if replicas > 1}
    settings = [_series(own) for own in tables.values()]
    fitted, limit = Laws(settings, MARGIN), reach(list(held_out(settings, MARGIN)))
    rows = []
    for i, (replicas, own) in enumerate(tables.items()):
        smallest, largest = int(own["parameters"].min()), int(own["parameters"].max())
        first, last = math.log(smallest), math.log(largest) + limit
        sizes = np.linspace(first, last, 1 + math.ceil((last - first) / math.log(STEP)))
        rows.append(
            {
                "replica_gradient": "DiLoCo(30)",
                "replicas": replicas,
                "source": "2503.09799",
                "kind": "transformer",
                "smallest": smallest,
                "largest": largest,
                "curve": [[round(math.exp(size)), *_rounded(fitted, i, size)] for size in sizes],
            }
        )
    return "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n"


def _series(own: pd.DataFrame) -> Series:
    points = np.log(own["parameters"].to_numpy(float))[:, None]
    return Series(points, own["harm"].to_numpy(float), np.full(len(own), ROUNDING))


def _rounded(fitted: Laws, i: int, size: float) -> list[float]:
    return [round(value, 3) for value in fitted.at(i, np.array([size])).both]
