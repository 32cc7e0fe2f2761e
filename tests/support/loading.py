"""Loading data of one's own, and reading what is there or what is refused."""

import numpy as np
import pytest

from raysim.workloads.data import load_data


def load(name, **options):
    return load_data(name, {key: str(value) if key == "path" else value for key, value in options.items()}, seed=0)


def everything(split):
    """Return all inputs and targets of a split."""
    ids = np.arange(len(split))
    return split.inputs(ids, 0, 0, False), split.targets(ids)


def refusal(call):
    """Return the sentence in which a call is refused."""
    with pytest.raises(ValueError) as caught:
        call()
    return str(caught.value)
