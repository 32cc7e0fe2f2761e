"""The verdicts of all kept studies in one file, from which `raysim advise` says which settings are known to be safe."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pandas as pd

from raysim.analysis import Results, safe_set

KEYS = ("forward", "backward", "replica_gradient")
SAME = {"shared_indices": False, "fused_embedding": False, "weights": "Synchronous"}
"""Settings that differ in these are left out: `raysim advise` tries none of them."""


def evidence(studies: Mapping[str, Results]) -> str:
    """Return a row for each setting of each job that differs from dense in the compression of links and replicas alone.

    Settings of a job without dense runs were compared with nothing, and are left out.
    """
    rows = [
        {
            "study": name,
            "job": row["context"],
            **{key: row[key] for key in KEYS},
            "seeds": int(row["seeds"]),
            "harm": round(row["harm"], 3),
            "low": round(row["harm_low"], 3),
            "high": round(row["harm_high"], 3),
            "unit": row["unit"],
            "verdict": row["verdict"],
        }
        for name, results in studies.items()
        for row in _alike(safe_set(results)).to_dict("records")
    ]
    rows.sort(key=lambda row: tuple(map(str, row.values())))
    return "[\n" + ",\n".join(json.dumps(row).replace("NaN", "null") for row in rows) + "\n]\n"


def _alike(judged: pd.DataFrame) -> pd.DataFrame:
    return judged[(judged[list(SAME)] == list(SAME.values())).all(axis=1) & (judged["seeds"] > 0)]
