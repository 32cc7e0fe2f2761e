"""Verdicts of the kept studies and of screened models, each with the model it is about, for `raysim advise`."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from raysim.analysis import Results, settings

KEYS = ("forward", "backward", "replica_gradient")
SAME = {"shared_indices": False, "fused_embedding": False, "tied_gradient": "Identity", "weights": "Synchronous"}
"""Settings that differ in these are left out: `raysim advise` tries none of them."""
SCOPES = Path(__file__).parents[2] / "docs" / "findings" / "evidence.toml"
ABOUT = tomllib.loads(SCOPES.read_text(encoding="utf-8"))
HOPELESS_LOSS = 0.5
"""Loss above dense before any training, as a share of dense, from which a setting is hopeless at once."""
HOPELESS_NORM = 2.0
"""Norm of the gradient, as a multiple of the dense one's, from which a setting is hopeless at once."""


def evidence(studies: Mapping[str, Results]) -> str:
    """Return, as JSON, a row for each setting of each job or screen that differs from dense in compression alone.

    Each names the model it is about. Settings of a job without dense runs were compared with nothing, and are left out.
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
            "scope": _scope(ABOUT["studies"][name] | _size(results, row["runs"][0])),
        }
        for name, results in studies.items()
        for row in _alike(settings(results)).to_dict("records")
    ]
    rows += [_screened(screen, setting) for screen in ABOUT["screens"] for setting in screen["settings"]]
    rows.sort(key=lambda row: tuple(map(str, row.values())))
    return "[\n" + ",\n".join(json.dumps(row).replace("NaN", "null") for row in rows) + "\n]\n"


def _scope(table: Mapping[str, Any]) -> dict[str, Any]:
    return {"peak": None, **table}


def _size(results: Results, run: str) -> dict[str, int]:
    """Return the parameters of a run's model, which differ within a study of sizes; empty for runs that do not record them."""
    recorded = results.runs.set_index("run").reindex(columns=["num_parameters"]).loc[run, "num_parameters"]
    return {} if pd.isna(recorded) else {"parameters": int(recorded)}


def _screened(screen: Mapping[str, Any], setting: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a setting that was tried on a trained model without training."""
    harm = setting["loss"] / screen["dense"] - 1
    hopeless = harm >= HOPELESS_LOSS or setting.get("norm", 1.0) >= HOPELESS_NORM
    return {
        "study": screen["name"],
        "job": screen["scope"]["model"],
        **{key: setting.get(key, "Identity") for key in KEYS},
        "seeds": 0,
        "harm": round(100 * harm, 3),
        "low": None,
        "high": None,
        "unit": "% of loss at once",
        "verdict": "hopeless at once" if hopeless else "worth training",
        "scope": _scope(screen["scope"]),
    }


def _alike(judged: pd.DataFrame) -> pd.DataFrame:
    return judged[(judged[list(SAME)] == list(SAME.values())).all(axis=1) & (judged["seeds"] > 1)]
