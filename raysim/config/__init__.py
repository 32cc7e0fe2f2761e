"""The configuration of one run: the same keys in TOML, on the command line, in `run.parquet` and as sweep parameters."""

from raysim.config.errors import ConfigError
from raysim.config.keys import Key, as_row, as_written, keys_of, run_keys
from raysim.config.optimizer import OptimizerConfig
from raysim.config.overrides import apply_override
from raysim.config.reading import make_config, read_config, read_source, recipe_names
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
    "recipe_names",
    "run_keys",
]
