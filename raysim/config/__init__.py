"""The configuration of a run: the same keys in TOML, on the command line, in `run.parquet` and as sweep parameters."""

from raysim.config.fields import OptimizerConfig
from raysim.config.keys import Key, as_row, as_written, keys_of, run_keys
from raysim.config.reading import (
    ConfigError,
    apply_override,
    make_config,
    read_config,
    read_source,
    read_values,
    recipe_names,
)
from raysim.config.run import RunConfig

__all__ = [
    "ConfigError",
    "Key",
    "OptimizerConfig",
    "RunConfig",
    "apply_override",
    "as_row",
    "as_written",
    "keys_of",
    "make_config",
    "read_config",
    "read_source",
    "read_values",
    "recipe_names",
    "run_keys",
]
