"""Both sides of `raysim bench adapter` train the same model."""

import pytest
from raysim_benchmarks.bench import adapter


@pytest.mark.slow
@pytest.mark.parametrize("name", adapter.MODELS)
def test_the_adapter_has_the_loss_of_the_model(name):
    losses = [side() for side in adapter.both_sides(*adapter.MODELS[name]).values()]
    assert losses[0] == losses[1]
