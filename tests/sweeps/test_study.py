"""What a study's file may say: bad ones are refused by field and rule, before Ray starts."""

import re

import pytest
from studies import BASE, write_study
from typer.testing import CliRunner

from raysim.cli import app
from raysim.config import ConfigError
from raysim.network.profile import Profile
from raysim.quality import MEASURES
from raysim.sweeps.objectives import Constraint, Objective
from raysim.sweeps.study import Study
from raysim.sweeps.study_file import read_study, study_names

SIZES = ("sizes-links", "sizes-llama", "sizes-ranks", "sizes-replicas", "sizes-stages", "sizes-tokens")
"""Each of their sizes has a dense setting of its own, in the space."""
WORKERS = {
    "equal-bandwidth-2026": 8,
    "finetune-replicas": 8,
    "sizes-links": 2,
    "sizes-llama": 2,
    "sizes-ranks": 2,
    "sizes-replicas": 8,
    "sizes-stages": 8,
    "sizes-tokens": 2,
    "trained-replicas": 2,
    "gravac-pictures": 2,
    "gravac-text": 2,
    "gravac-vgg": 2,
    "replica-gradients": 2,
    "replica-gradients-text": 2,
}


@pytest.fixture(scope="module")
def studies():
    return {name: read_study(name) for name in study_names()}


def test_every_study_that_comes_along_is_valid_and_its_baselines_are_dense(studies):
    assert set(studies) >= {
        "quickstart",
        "rudakov-topk",
        "rudakov-quantize",
        "rudakov-feedback",
        "gravac",
        "full",
    }
    for name, study in studies.items():
        assert isinstance(study, Study)
        if name not in SIZES:
            assert study.baselines[0].name == "dense"
        assert study.most_workers == WORKERS.get(name, 4)


def test_a_study_written_and_read_again_is_the_same(studies, tmp_path):
    for study in studies.values():
        study.write(tmp_path)
        again = read_study(tmp_path / "study.toml")
        assert again.as_mapping() == study.as_mapping()
        again.resumed(tmp_path)


PYTHON = """
study = {"base": "digits-cnn", "trials": 3, "objectives": ["loss_on"]}

def space(trial):
    bits = trial.suggest_int("bits", 2, 4)
    return {"forward": f"Quantize({bits})", "backward": f"Quantize({bits + 2})"}
"""


def test_a_study_in_python_is_a_dict_and_a_function(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(PYTHON)
    study = read_study(path)
    assert (study.name, study.most_trials) == ("mine", 3)
    folder = tmp_path / "out"
    folder.mkdir()
    study.write(folder)
    assert read_study(folder / "study.toml").as_mapping() == study.as_mapping()
    study.resumed(folder)
    path.write_text(PYTHON.replace("2, 4", "2, 5"))
    with pytest.raises(ConfigError, match=r"The files of the study must be unchanged, but .*space\.py differs"):
        read_study(path).resumed(folder)


def test_a_profile_lies_beside_the_study_and_may_not_change(tmp_path):
    path, profile = write_study(tmp_path, profile="mine.json"), tmp_path / "mine.json"
    Profile.uniform(2, 0.001, 0.002, source="one").save(profile)
    study = read_study(path)
    folder = tmp_path / "out"
    folder.mkdir()
    study.write(folder)
    again = read_study(folder / "study.toml")
    assert again.as_mapping() == study.as_mapping()
    assert again.profile is not None
    assert again.profile.as_json() == profile.read_bytes()
    study.resumed(folder)
    Profile.uniform(2, 0.002, 0.002, source="one").save(profile)
    with pytest.raises(ConfigError, match=r"The files of the study must be unchanged, but .*profile\.json differs"):
        read_study(path).resumed(folder)
    Profile.uniform(3, 0.001, 0.002).save(profile)
    with pytest.raises(ConfigError, match="`profile` must have 2 stages, as in the runs that it prices, but has 3"):
        read_study(path)


def test_overrides_change_the_base(tmp_path):
    study = read_study(write_study(tmp_path), ["steps=9", "optimizer.learning_rate=0.5"])
    config = study.config({"forward": "TopK(density=0.1)"})
    assert (config.steps, config.optimizer.learning_rate, repr(config.forward)) == (9, 0.5, "TopK(0.1)")


@pytest.mark.parametrize("model", [{"name": "gpt", "num_blocks": 4}, {"num_blocks": 4, "name": "gpt"}])
def test_a_table_sets_all_of_its_keys_in_any_order(tmp_path, model):
    study = read_study(write_study(tmp_path, base="digits-cnn", set={"steps": 4, "model": model}))
    assert dict(study.config({}).model) == {"name": "gpt", "num_blocks": 4}


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["steps=9", "epochs=2"], "The override of `steps` conflicts with that of `epochs`."),
        (["forward=TopK(0.1)"], "`forward` has no effect, as `space` and all baselines set it. Leave it out."),
        (["seed=7"], "`seed` has no effect beside `seeds` of the study. Leave it out."),
    ],
)
def test_overrides_without_effect_are_refused(tmp_path, overrides, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        read_study(write_study(tmp_path, seeds=[0, 1]), overrides)


def test_the_notation_is_canonical_and_leaves_out_the_seed(tmp_path):
    study = read_study(write_study(tmp_path, set={"seed": 7}))
    texts = [
        study.notation(study.config(overrides))
        for overrides in (
            {"forward": "TopK(density=0.1)"},
            {"forward": ["TopK(0.1)"]},
            {"forward": "Plain(TopK(0.1))", "timeout_s": 9},
        )
    ]
    assert texts == ["forward=TopK(0.1)"] * 3
    other = study.config({"optimizer.learning_rate": 0.5, "schedule": "GPipe"})
    assert study.notation(other) == "dense optimizer.learning_rate=0.5 schedule=GPipe"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"space": {"forwrad": ["Identity", "TopK(0.1)"]}},
            "`space`: no drawn configuration is valid: Unknown key `forwrad`",
        ),
        (
            {"space": {"forward": ["Identity", "TopKk(0.1)"]}},
            "`space`: `forward` = 'TopKk(0.1)' is never valid: `forward`: Unknown compressor",
        ),
        (
            {"symbols": {"density": {"low": 0.5, "high": 0.5}}},
            "`symbols.density` must have `low` below `high`, but got 0.5 and 0.5.",
        ),
        (
            {"symbols": {"density": {"low": 2.0, "high": 3.0}}},
            "is never valid: `forward`: `density` must be in (0, 1], but got 2",
        ),
        (
            {"symbols": {"density": [0.1, 30]}},
            "`space`: `density` = 30 is never valid: `forward`: `density` must be in (0, 1], but got 30",
        ),
        (
            {"objectives": ["los_on"]},
            "Unknown objective `los_on`. Known: loss_on, perplexity_on, accuracy_on,",
        ),
        ({"objectives": ["step_s"]}, "Unknown objective `step_s`."),
        ({"objectives": ["step_s@100mbits"]}, "`objectives`: step_s@100mbits: A network is a preset"),
        ({"objectives": []}, "`objectives` must have at least 1 item, but got []."),
        ({"objectives": ["loss_on", "loss_on"]}, "`objectives` must be different, but loss_on occurs twice."),
        (
            {"objectives": ["time_to_target_s@100mbps"]},
            "`objectives.target` must be given for time_to_target_s@100mbps, as in 'accuracy=0.9'.",
        ),
        (
            {"objectives": [{"name": "time_to_target_s@1gbps", "target": "speed=9"}]},
            "`target` must be a measure and a number",
        ),
        (
            {"objectives": [{"name": "loss_on", "direction": "down"}]},
            "`objectives.direction` must be one of minimize, maximize, but got 'down'.",
        ),
        ({"objectives": [{"nam": "loss_on"}]}, "Unknown key `objectives.nam`. Known: name, direction, target, mode."),
        (
            {"constraints": [{"objective": "accuracy_on", "within": 0.01, "of": "none"}]},
            "`constraints.of` must name one of `baselines` (dense), but got 'none'.",
        ),
        (
            {"baselines": None, "constraints": [{"objective": "accuracy_on", "within": 0.01, "of": "dense"}]},
            "`constraints.of` must name one of `baselines` (none), but got 'dense'.",
        ),
        (
            {"constraints": [{"objective": "accuracy_on", "within": 0.01}]},
            "`constraints.within` and `constraints.of`, the name of a baseline, belong together.",
        ),
        (
            {"constraints": [{"objective": "accuracy_on"}]},
            "`constraints` of accuracy_on must have exactly one of at_most, at_least and within, but got none.",
        ),
        (
            {"constraints": [{"objective": "loss_on", "at_most": 1.0}]},
            "`constraints.objective` must be one of `objectives` (accuracy_on, step_s@100mbps), but got 'loss_on'.",
        ),
        ({"trials": 0}, "`trials` must be at least 1, but got 0."),
        ({"trials": None}, "`trials` must be given with `sampler` = 'random', which never runs out of points."),
        ({"sampler": "tpee"}, "`sampler` must be 'grid', 'random', 'tpe' or 'nsga2', but got 'tpee'."),
        ({"sampler": "grid"}, "A grid needs a `step` or a list of choices for `forward.density`, but got a range."),
        (
            {"sampler": "nsga2", "baselines": [{"name": "dense", "set": {"forward": "Identity"}}]},
            "The baseline dense must have `params` with `sampler` = 'nsga2'",
        ),
        (
            {"baselines": [{"name": "dense", "params": {"forward": "TopK(1)"}}]},
            "`params` of the baseline dense must be a point of the space:",
        ),
        (
            {"baselines": [{"name": "dense", "params": {"forward": "Identity", "bits": 3}}]},
            "`params` of the baseline dense must be a point of the space: the space does not use `bits`.",
        ),
        ({"baselines": [{"name": "dense"}]}, "The baseline dense must have exactly one of `params` and `set`."),
        ({"seeds": []}, "`seeds` must"),
        ({"seeds": [1, 1]}, "`seeds` must be different, but 1 occurs twice."),
        ({"seeds": [1, 2], "set": {"seed": 7}}, "`seed` has no effect beside `seeds` of the study. Leave it out."),
        ({"space": {"forward": "Identity", "seed": [1, 2]}}, "`seed` must be left out of `space` and `baselines`"),
        (
            {"set": {"steps": 5, "epochs": 2}},
            "The override of `steps` conflicts with that of `epochs`. Leave one of them out.",
        ),
        (
            {"space": {"forward": "Identity", "model.num_blocks": 4, "model.name": ["gpt", "cnn"]}},
            "The override of `model.num_blocks` conflicts with another one. Leave one of them out.",
        ),
        ({"seeds": [-1]}, "`seeds.0` must be at least 0, but got -1."),
        ({"base": "digits-cn"}, "Unknown recipe 'digits-cn'."),
        ({"base": {**BASE, "steps": 0}}, "`steps` must be"),
        ({"base": {**BASE, "profile_every_steps": 0}}, "`profile_every_steps` of the base must be at least 1"),
        (
            {"base": {**BASE, "evaluate_every_steps": 0}, "early_stopping": "asha"},
            "`early_stopping` = 'asha' needs `evaluate_every_steps` of at least 1",
        ),
        ({"set": {"densty": 1}}, "Unknown key `densty`."),
        ({"spacee": {}}, "Unknown key `spacee` of a study. Did you mean `space`?"),
        ({"space": None}, "`space` must be a table of keys and their possible values, but got none."),
        ({"jobs": 0}, "`jobs` must be at least 1, but got 0."),
        ({"name": "a/b"}, "`name` must match pattern"),
        ({"profile": "none.json"}, "none.json' cannot be read: No such file or directory."),
        ({"compute": "gpu"}, "`compute` must be 'auto', 'cpu' or 'wall', but got 'gpu'."),
    ],
)
def test_bad_study_gives_one_sentence_error(tmp_path, changes, sentence):
    path = write_study(tmp_path, **changes)
    with pytest.raises(ConfigError) as caught:
        read_study(path)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def raysim(tmp_path, monkeypatch):
    """Run the command line where `ray.init` would be told: nothing of this may start Ray."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("Ray was started"))
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def test_studies_are_listed(raysim):
    done = raysim("studies")
    assert done.exit_code == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == study_names()


def test_a_budget_is_changed_without_changing_the_file():
    study = read_study("quickstart", trials=3, seeds=4, jobs=2)
    assert (study.most_trials, study.seeds, study.jobs) == (3, (0, 1, 2, 3), 2)
    with pytest.raises(ConfigError, match=r"^`seeds` must be at least 1, but got 0\.$"):
        read_study("quickstart", seeds=0)


def test_every_measure_is_an_objective_with_its_own_direction():
    for name, measure in MEASURES.items():
        for mode in ("on", "off"):
            objective = Objective(f"{name}_{mode}")
            assert objective.direction == ("maximize" if measure.higher else "minimize")
            assert objective.quality == (measure if mode == "on" else None)
    mine = Objective("dice_on", direction="maximize")
    assert mine.quality.higher
    assert Objective("wire_bytes").quality is Objective("step_s@1gbps").quality is None
    with pytest.raises(ConfigError, match=r"Unknown objective `dice_on`\. Known: loss_on, .* give a `direction`"):
        Objective("dice_on")
    assert Objective("time_to_target_s@1gbps", target="r2=0.5").target == "r2=0.5"


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("mode", ["on", "off"])
@pytest.mark.parametrize("dense", [0.25, 0.5])
def test_a_constraint_within_a_margin_is_the_margin_of_verdicts(name, mode, dense):
    measure, objective = MEASURES[name], Objective(f"{name}_{mode}")
    constraint = Constraint(objective.name, within=measure.margin / 100, of="dense")
    for harm in (-1.0, 0.0, 0.9 * measure.margin, 1.1 * measure.margin):
        holds = constraint.value(objective, measure.harmed(dense, harm), dense) <= 0
        assert holds == (harm <= measure.margin)


def test_tables_by_tensor_are_drawn_by_key_or_as_a_text(tmp_path):
    path = write_study(
        tmp_path,
        space={
            "forward.skip": ["Identity", "TopK({density})"],
            "backward": ["Identity", '{skip = "Quantize({bits})"}'],
        },
        symbols={"density": [0.1], "bits": [4]},
        baselines=[{"name": "dense", "set": {"forward": "Identity", "backward": "Identity"}}],
        sampler="grid",
        trials=None,
    )
    study = read_study(path)
    assert {study.notation(study.config(overrides)) for _, overrides in study.drawn()} == {
        f'forward={{skip = "{codec}"}}{backward}'
        for codec in ("Identity", "TopK(0.1)")
        for backward in ("", ' backward={skip = "Quantize(4)"}')
    }
    assert study.dense is not None
