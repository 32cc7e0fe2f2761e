"""The records of a run: Parquet with explicit schemas, units in the names, and a version.

During a run, rows are written in numbered parts, each written atomically. A finished run has one
file per table. A killed run loses at most the rows after its last flush. If a table has its file, its parts are
leftovers and are not read.
"""

from raysim.records.run import SILENT_S, STATUSES, Run, present_status, recorded_value, with_replicas
from raysim.records.schema import FINISHED, OCCASIONAL, SCHEMA_VERSION, SCHEMAS, WARMUP_STEPS, schema_of
from raysim.records.tables import (
    UNREADABLE,
    Recorder,
    RecordsError,
    read_as,
    read_table,
    read_whole,
    table_files,
    write_table,
)

__all__ = [
    "FINISHED",
    "OCCASIONAL",
    "SCHEMAS",
    "SCHEMA_VERSION",
    "SILENT_S",
    "STATUSES",
    "UNREADABLE",
    "WARMUP_STEPS",
    "Recorder",
    "RecordsError",
    "Run",
    "present_status",
    "read_as",
    "read_table",
    "read_whole",
    "recorded_value",
    "schema_of",
    "table_files",
    "with_replicas",
    "write_table",
]
