"""The schemas of a run's tables, and the types of the columns of `run.parquet`."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from raysim.config.keys import run_keys

SCHEMA_VERSION = 2
FINISHED = ("finished", "diverged")  # statuses of runs that are over, with complete records

_STEP = ("step", pa.int32())
_REPLICA = ("replica", pa.int16())

SCHEMAS: dict[str, pa.Schema] = {
    "steps": pa.schema(
        [
            _STEP,
            ("epoch", pa.int32()),
            ("loss", pa.float64()),
            ("learning_rate", pa.float64()),
            ("gradient_norm", pa.float64()),  # before clipping; null without clipping
            ("seconds", pa.float64()),
            ("update_s", pa.float64()),  # slowest worker's optimiser: CPU seconds, or elapsed seconds on a GPU
            ("wire_bytes", pa.int64()),
            ("dense_bytes", pa.int64()),
        ]
    ),
    "evals": pa.schema(
        [
            _STEP,  # steps done before the evaluation
            ("mode", pa.string()),  # mode of the links: "on", "off", or "on_direct"
            ("batchnorm", pa.string()),  # statistics: "running" from training, or "estimated" in this mode
            ("loss", pa.float64()),
            ("accuracy", pa.float64()),  # null if not measured, like further metrics
            ("perplexity", pa.float64()),
            ("predictions", pa.int64()),
            ("samples", pa.int64()),
            ("seconds", pa.float64()),
            # and one column per further metric of the run, see `schema_of`
        ]
    ),
    "links": pa.schema(
        [
            _STEP,
            _REPLICA,
            ("stage", pa.int16()),  # for replica gradients and tied parameters, else null
            ("boundary", pa.int16()),  # null for replica gradients and tied parameters
            ("direction", pa.string()),  # "forward", "backward", "replica_gradient" or "tied"
            ("tensor", pa.string()),  # name of the tensor; null if it crosses alone
            ("codec", pa.string()),
            ("rounds", pa.int16()),  # of a collective, 0 in steps without an exchange; null for links
            ("packets", pa.int32()),
            ("wire_bytes", pa.int64()),
            ("dense_bytes", pa.int64()),  # for a replica gradient: those of an uncompressed all-reduce
            ("gain", pa.float64()),  # squared norm of the decoded tensor over that of the original, if measured
            ("fidelity", pa.float64()),  # 1 - squared norm of the error over that of the original, if measured
            ("peak", pa.float64()),  # largest magnitude over root mean square of the original tensors, if measured
            ("residual_norm", pa.float64()),  # of the sender's memory, if measured
            ("encode_s", pa.float64()),
            ("decode_s", pa.float64()),
        ]
    ),
    "actions": pa.schema(
        [
            _STEP,
            _REPLICA,
            ("stage", pa.int16()),
            ("op", pa.string()),
            ("microbatch", pa.int32()),
            ("start_s", pa.float64()),  # on the driver's clock, since the stages were first up in this process
            ("end_s", pa.float64()),
            ("decode_s", pa.float64()),
            ("compute_wall_s", pa.float64()),
            ("compute_cpu_s", pa.float64()),
            ("encode_s", pa.float64()),
            ("wire_bytes", pa.int64()),
            ("dense_bytes", pa.int64()),
            # Null for forward and backward; else additional work: "twin" repeats one with the parameters of the previous step,
            # "sensitivity" measures how errors change gradients, "update" updates the weights with this microbatch.
            ("work", pa.string()),
        ]
    ),
    # One row per transfer in the exchanges at the end of profiled steps, or of all steps if replicas exchange only in some.
    "collectives": pa.schema(
        [
            _STEP,
            ("direction", pa.string()),  # "replica_gradient" or "tied"
            ("stage", pa.int16()),  # averaged stage, or the first owner of a tied parameter
            ("round", pa.int16()),
            ("source_replica", pa.int16()),
            ("source_stage", pa.int16()),
            ("target_replica", pa.int16()),
            ("target_stage", pa.int16()),
            ("wire_bytes", pa.int64()),
        ]
    ),
    "decisions": pa.schema(
        [
            _STEP,
            _REPLICA,  # null if all replicas agreed
            ("where", pa.string()),  # "forward", "backward", "replica_gradient" or "tied"
            ("stage", pa.int16()),
            ("boundary", pa.int16()),
            ("tensor", pa.string()),  # for a link; null if only one tensor crosses
            ("layer", pa.string()),  # null if the row is for all layers
            ("method", pa.string()),
            ("branch", pa.string()),
            ("factor", pa.float64()),  # dense values over sent values, or bytes over bytes
            ("minimum", pa.float64()),  # range of factors explored by the method
            ("candidate", pa.float64()),
            ("gain_minimum", pa.float64()),  # as seen by the rule
            ("gain_candidate", pa.float64()),
            ("gain", pa.float64()),  # of the sent message
            ("throughput", pa.float64()),  # samples per second on the run's clock
            ("event", pa.string()),
            ("reason", pa.string()),
        ]
    ),
}


ENCODINGS = {"sample": "DELTA_BINARY_PACKED", "loss": "BYTE_STREAM_SPLIT"}
"""Encodings for columns of `samples`, with few repeated values: 4 bytes per sample instead of 10."""


def schema_of(table: str, measures: Iterable[str] = ()) -> pa.Schema:
    """Return the schema of a table of a run with these `measures`; each has a column in `evals`."""
    schema = SCHEMAS[table]
    if table == "evals":
        for name in measures:
            if name not in schema.names:
                schema = schema.append(pa.field(name, pa.float64()))
    return schema


WARMUP_STEPS = 2  # steps that load, compile and touch memory for the first time: not priced if others are recorded
# Tables absent in runs without adaptive methods, or without replicas and tied parameters.
OCCASIONAL = {"decisions", "collectives"}

_KINDS: dict[str, pa.DataType] = {
    "bool": pa.bool_(),
    "int": pa.int64(),
    "float": pa.float64(),
    "str": pa.string(),
    "list[int]": pa.list_(pa.int64()),
    "list[float]": pa.list_(pa.float64()),
    "list[str]": pa.list_(pa.string()),
}
OWN_COLUMNS: dict[str, str] = {
    **dict.fromkeys(("schema_version", "restarts", "resumed", "exchange_period", "exchange_delay"), "int"),
    **dict.fromkeys(("first_step", "rate_steps", "model_seed", "memories_from"), "int"),
    **dict.fromkeys(
        ("wire_bytes", "dense_bytes", "steps_done", "probe_every", "diverged_step", "num_parameters"), "int"
    ),
    **dict.fromkeys(("device_forecast_bytes", "device_peak_bytes"), "int"),  # of the worker with the most GPU memory
    **dict.fromkeys(("run_id", "started_at", "host", "status", "engine", "measures", "job", "setting"), "str"),
    **dict.fromkeys(("python", "raysim", "torch", "ray", "numpy", "device_kind"), "str"),
    **dict.fromkeys(("device_name", "device_capability", "driver", "cuda"), "str"),  # of a GPU
    "parent": "str",  # the parent run of a branch
    "data_digest": "str",  # SHA-256 of the samples
    "schedule_rows": "str",  # of a custom schedule, from its file
    **dict.fromkeys(("diverged_at", "error"), "str"),
    "warning": "str",  # the run's first warning, for example a link's fidelity below zero
    **dict.fromkeys(("seconds", "start_s", "probe_overhead"), "float"),
    "probe": "bool",
}
"""Kinds, like `Key.kind`, of the columns of `run.parquet` besides the configuration; other columns may hold anything."""
_NULLABLE = {
    *("ray", "parent", "schedule_rows", "device_name", "device_capability", "driver", "cuda", "device_forecast_bytes"),
    *("device_peak_bytes", "diverged_step", "diverged_at", "warning", "error"),
}


def run_schema(row: dict[str, object]) -> pa.Schema:
    """Return the schema of a row of `run.parquet`: types by kind for configuration keys, by value for other columns."""
    kinds = {key.name: _KINDS[key.kind] for key in run_keys()}
    return pa.schema([(name, kinds.get(name) or _type_of(name, value)) for name, value in row.items()])


def _type_of(name: str, value: object) -> pa.DataType:
    if name in _NULLABLE:
        return _KINDS[OWN_COLUMNS[name]]
    if value is None or name.startswith("final_"):
        return pa.float64()
    return _KINDS.get(type(value).__name__) or pa.scalar(value).type  # options may be lists or tables
