"""The configuration of one run: the same keys in TOML, on the command line, in `run.parquet` and as sweep parameters."""

from raysim.config.errors import ConfigError
from raysim.config.optimizer import OptimizerConfig
from raysim.config.overrides import apply_override
from raysim.config.reading import make_config, read_config, read_source, recipe_names
from raysim.config.run import RunConfig

__all__ = [
    "ConfigError",
    "OptimizerConfig",
    "RunConfig",
    "apply_override",
    "make_config",
    "read_config",
    "read_source",
    "recipe_names",
]
