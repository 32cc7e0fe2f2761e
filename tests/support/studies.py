"""Studies for the tests, small enough to train in a second or two."""

from configurations import SMALL

BASE = {**SMALL, "num_stages": 2, "evaluate_every_steps": 2, "steps": 4}
BASE.pop("name")


def write_study(folder, text="", **changes):
    """Write a study's file: the small one, with keys changed; None leaves a key out."""
    import tomli_w

    values = {
        "base": BASE,
        "trials": 4,
        "sampler": "random",
        "early_stopping": "none",
        "objectives": ["accuracy_on", "step_s@100mbps"],
        "baselines": [{"name": "dense", "params": {"forward": "Identity"}}],
        "space": {"forward": ["Identity", "TopK({density})", "ErrorFeedback(TopK({density}))"]},
        "symbols": {"density": {"low": 0.05, "high": 0.5, "log": True}},
    } | changes
    path = folder / "small.toml"
    path.write_text(tomli_w.dumps({key: value for key, value in values.items() if value is not None}) + text)
    return path
