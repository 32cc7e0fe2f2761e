"""Keep the runs of a study for docs/findings: `python findings/pages/keep_findings.py FOLDER`, then `make findings`.

Copies the finished runs of the study's folder into its pack in docs/findings/data, without the name of the host, and with times,
norms and gains rounded to `DIGITS` binary digits.
"""

from __future__ import annotations

import argparse
import shutil
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raysim.analysis import load, pack
from raysim.records import FINISHED, SCHEMAS, table_files
from raysim.records.tables import read_whole

DATA = Path(__file__).parents[2] / "docs" / "findings" / "data"
DIGITS = {  # binary, that are kept of a column; times vary by more than their rounding, and 24 is float32
    **dict.fromkeys(
        ("encode_s", "decode_s", "compute_wall_s", "compute_cpu_s", "update_s", "seconds", "gradient_norm"), 8
    ),
    **dict.fromkeys(("gain", "gain_minimum", "gain_candidate", "learning_rate", "throughput"), 24),
}


def keep(study: Path) -> None:
    """Pack the finished runs of a study; other runs in the pack stay."""
    target = DATA / tomllib.loads((study / "study.toml").read_text(encoding="utf-8"))["name"]
    with TemporaryDirectory() as held:
        runs, small = Path(held) / "runs", Path(held) / "small"
        for source in (target, study) if target.exists() else (study,):
            results = load(source)
            for file in (source / "study.toml", source / "confirm" / "study.toml"):
                if file.is_file():
                    copy = runs / file.relative_to(source)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(file, copy)
            for run in results.runs["run"][results.runs["status"].isin(FINISHED)].astype(str):
                shutil.rmtree(runs / run, ignore_errors=True)
                (runs / run).mkdir(parents=True)
                for table in ("run", *SCHEMAS):
                    if files := table_files(results.path(run), table):
                        rows = pa.concat_tables([read_whole(file) for file in files])
                        pq.write_table(_shared(rows), runs / run / f"{table}.parquet")
        packed = pack(runs, small)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(small, target)
    print(f"{target}: {packed.runs} runs, {packed.size / 1e6:.2f} MB")


def _shared(table: pa.Table) -> pa.Table:
    """Return a table without the name of the host, and with the columns of `DIGITS` rounded."""
    for i, field in enumerate(table.schema):
        if field.name == "host":
            table = table.set_column(i, field, pa.array([""] * len(table), field.type))
        elif field.name in DIGITS and len(table) > 1:
            table = table.set_column(i, field.name, _short(table[field.name], DIGITS[field.name]))
    return table


def _short(values: pa.ChunkedArray, kept: int) -> pa.Array:
    """Return reals rounded to a number of binary digits."""
    digits, exponents = np.frexp(values.to_numpy())
    return pa.array(np.ldexp(np.round(digits * 2.0**kept) / 2.0**kept, exponents), from_pandas=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Keep the finished runs of a study in docs/findings/data.")
    parser.add_argument("folder", type=Path, help="of the study, with its study.toml")
    folder = parser.parse_args().folder
    if not (folder / "study.toml").is_file():
        parser.error(f"{folder} must be the folder of a study, but has no study.toml")
    keep(folder)
