"""The configuration: every field counts, every wrong value is refused in one sentence, recipes derive."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_fields import FIELD_CHANGES, KINDS
from configurations import SMALL
from pydantic import ValidationError

from raysim.codecs import CODECS
from raysim.compressors import COMPRESSORS, AtSupport, parse
from raysim.config import (
    ConfigError,
    OptimizerConfig,
    RunConfig,
    apply_override,
    as_row,
    make_config,
    read_config,
    read_source,
    recipe_names,
)
from raysim.config.boundaries import OTHERS
from raysim.pipeline.prepare import prepare
from raysim.schedules.families import SCHEDULES
from raysim.training.run import Training

KNOWN = ", ".join(sorted({**CODECS, **COMPRESSORS}))
SCHEDULE_NAMES = ", ".join(sorted(SCHEDULES))
BASE = """
model = "cnn"
data = "digits"
num_stages = 4
num_microbatches = 4
batch_size = 32
steps = 300
optimizer = {name = "sgd", learning_rate = 0.05, momentum = 0.9, decay = "cosine"}
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A run of four stages, in a file."""
    (tmp_path / "base.toml").write_text(BASE)
    return tmp_path / "base.toml"


def fields() -> list[str]:
    names = [name for name in RunConfig.model_fields if name != "optimizer"]
    return names + [f"optimizer.{name}" for name in OptimizerConfig.model_fields]


def test_every_field_states_its_effect() -> None:
    assert set(FIELD_CHANGES) == set(fields())
    assert {change.changes for change in FIELD_CHANGES.values()} <= set(KINDS)


@pytest.mark.parametrize("name", FIELD_CHANGES)
def test_changing_a_field_changes_only_that_field(name: str) -> None:
    change = FIELD_CHANGES[name]
    before = make_config({**SMALL, **change.base}).flat()
    after = make_config({**SMALL, **change.base, **change.values}).flat()
    differing = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert differing
    assert all(key == name or key.startswith(f"{name}.") for key in differing)


def test_fields_are_documented_and_written_as_they_are_read() -> None:
    for cls in (RunConfig, OptimizerConfig):
        assert all(field.description for name, field in cls.model_fields.items() if name != "optimizer")
    flat = make_config(SMALL).flat()
    assert set(flat) == {*fields(), "model.width", "data.train_samples", "data.test_samples"}
    assert flat["model"] == "cnn"
    assert flat["data.train_samples"] == 64
    assert flat["optimizer.name"] == "sgd"
    values: dict = {}
    for key, value in flat.items():  # what the records hold is what makes the run
        if value is not None:
            target = values
            *parents, last = {"model": "model.name", "data": "data.name"}.get(key, key).split(".")
            for parent in parents:
                target = target.setdefault(parent, {})
            target[last] = value
    assert make_config(values) == make_config(SMALL)


# Recipes, files, overrides.


def test_every_recipe_is_a_run() -> None:
    assert "digits-cnn" in recipe_names()
    for name in recipe_names():
        config = read_config(name)
        assert config.name == name
        assert [len(boundaries) for boundaries in config.compressors()] == [config.stages - 1] * config.num_replicas
        assert len(config.replica_methods()) == config.stages
        text = (Path(__file__).parents[2] / "raysim" / "recipes" / f"{name}.toml").read_text()
        assert text.startswith("# ")  # the line that `raysim recipes` prints


def test_overrides_are_typed_by_toml(base: Path) -> None:
    config = read_config(
        base,
        [
            "steps=7",
            "forward=TopK(0.1)",
            "backward='Quantize(8)'",
            "optimizer.learning_rate=1e-3",
            "model.width=8",
            "recompute=true",
            "optimizer.clip_norm = 2",
            "name=other",
        ],
    )
    assert (config.steps, config.forward, config.backward) == (7, parse("TopK(0.1)"), parse("Quantize(8)"))
    assert (config.optimizer.learning_rate, config.optimizer.momentum, config.optimizer.clip_norm) == (0.001, 0.9, 2.0)
    assert config.model.options == {"width": 8}
    assert config.recompute is True
    assert config.name == "other"
    assert read_config(base, ["forward=TopK(density=0.10)"]).flat()["forward"] == "TopK(0.1)"  # canonical
    assert read_config(base, ["schedule=1F1B()"]).flat()["schedule"] == "1F1B"
    assert read_config(base, ["steps=3", "steps=5"]).steps == 5  # the last word counts
    values: dict = {}
    for text in ("a.b=1", 'a.c="x y"', "d=x y", "e=[1, 2]", "f=1\ng=2", "h=", "i=# 3", "model.x=1"):
        apply_override(values, text)
    assert values == {
        "a": {"b": 1, "c": "x y"},
        "d": "x y",
        "e": [1, 2],
        "f": "1\ng=2",
        "h": "",
        "i": "# 3",
        "model": {"x": 1},
    }


def test_changed_choice_drops_old_options(base: Path) -> None:
    for key in ("model", "model.name"):
        config = read_config(base, ["model.width=8", f"{key}=cnn", "model.width=4"])
        assert config.model.options == {"width": 4}
    values = {"model": {"name": "cnn", "width": 8}, "data": {"name": "digits", "train_samples": 64}}
    apply_override(values, "model=gpt")
    apply_override(values, "data.name=topics")
    assert values == {"model": "gpt", "data": "topics"}
    assert read_config(base, ["epochs=2"]).steps is None
    assert read_config(base, ['cuts=["conv1"]']).num_stages is None
    assert read_config(base, ["num_stages=2"]).stages == 2
    config = read_config(base, ["optimizer.name=adamw"])  # momentum is the recipe's, and of sgd
    assert (config.optimizer.momentum, config.optimizer.learning_rate) == (None, 0.05)
    config = read_config(base, ["optimizer.decay_epochs=3", "optimizer.decay=linear"])
    assert config.optimizer.decay_epochs == 3
    assert read_config(base, ["optimizer.decay=constant"]).optimizer.decay_every == "step"


def test_files_derive_from_recipes_and_files(tmp_path: Path, base: Path) -> None:
    (tmp_path / "parent.toml").write_text(
        'base = "base.toml"\nepochs = 2\nforward = "TopK(0.1)"\n[optimizer]\nmomentum = 0.5\n[model]\nwidth = 8\n'
    )
    (tmp_path / "child.toml").write_text('base = "parent.toml"\nbackward = "Quantize(8)"\nseed = 3\n')
    config = read_config(tmp_path / "child.toml", ["seed=4"])
    assert (config.name, config.seed, config.epochs, config.steps) == ("child", 4, 2, None)
    assert (config.forward, config.backward) == (parse("TopK(0.1)"), parse("Quantize(8)"))
    assert (config.optimizer.momentum, config.optimizer.learning_rate) == (0.5, 0.05)
    assert config.model.name == "cnn"
    assert config.model.options == {"width": 8}
    (tmp_path / "named.toml").write_text('base = "child.toml"\nname = "given"\n[model]\nname = "gpt"\n')
    named = read_config(str(tmp_path / "named.toml"))
    assert named.name == "given"
    assert named.model.options == {}


def test_compressors_of_each_boundary() -> None:
    config = make_config({**SMALL, "forward": ["TopK(0.1)", "Quantize(4)"], "backward": "Identity"})
    assert config.flat()["forward"] == ("TopK(0.1)", "Quantize(4)")
    assert config.compressors() == [
        [{OTHERS: (parse("TopK(0.1)"), parse("Identity"))}, {OTHERS: (parse("Quantize(4)"), parse("Identity"))}]
    ]
    shared = make_config(
        {**SMALL, "forward": "TopK(0.1)", "backward": ["Identity", "Quantize(8)"], "shared_indices": True}
    )
    assert [pairs[OTHERS][1] for pairs in shared.compressors()[0]] == [
        AtSupport(parse("Identity").codec),
        AtSupport(parse("Quantize(8)").codec),
    ]
    assert make_config({**SMALL, "num_stages": 1}).compressors() == [[]]
    assert make_config({**SMALL, "num_stages": None}).stages == 4
    assert make_config({**SMALL, "num_stages": None, "cuts": ["conv1"]}).stages == 2


def test_compressors_of_each_replica(base: Path) -> None:
    four = {"num_replicas": 4, "num_microbatches": 1}
    table = {"others": "Quantize(8)", "2": ["TopK(density=0.1)", "Identity"]}
    config = make_config({**SMALL, **four, "forward": table, "backward": {"0": "Quantize(4)"}})
    assert config.flat()["forward"] == {"2": ("TopK(0.1)", "Identity"), "others": "Quantize(8)"}
    each = [[tuple(map(repr, pairs[OTHERS])) for pairs in links] for links in config.compressors()]
    assert each == [
        [("Quantize(8)", "Quantize(4)")] * 2,
        [("Quantize(8)", "Identity")] * 2,
        [("TopK(0.1)", "Identity"), ("Identity", "Identity")],
        [("Quantize(8)", "Identity")] * 2,
    ]
    written = as_row(config)["forward"]
    assert written == '{2 = ["TopK(0.1)", "Identity"], others = "Quantize(8)"}'
    assert (
        read_config(base, ["num_stages=3", "num_replicas=4", "num_microbatches=1", f"forward={written}"]).forward
        == config.forward
    )
    texts = ["num_replicas=2", "forward=Quantize(8)", "forward.1=TopK(0.1)"]
    assert read_config(base, texts).flat()["forward"] == {"1": "TopK(0.1)", "others": "Quantize(8)"}
    assert read_config(base, ["num_replicas=2", "forward={1='TopK(0.1)'}"]).flat()["forward"] == {"1": "TopK(0.1)"}


def test_compressors_of_each_tensor(base: Path) -> None:
    table = {"skip": "Quantize(8)", "hidden": "TopK(density=0.1)", "others": "Quantize(4)"}
    config = make_config({**SMALL, "forward": [table, "Identity"], "backward": {"hidden": "Quantize(2)"}})
    assert config.flat()["forward"] == (
        {"hidden": "TopK(0.1)", "skip": "Quantize(8)", "others": "Quantize(4)"},
        "Identity",
    )
    each = [{name: tuple(map(repr, pair)) for name, pair in pairs.items()} for pairs in config.compressors()[0]]
    assert each == [
        {
            "hidden": ("TopK(0.1)", "Quantize(2)"),
            "skip": ("Quantize(8)", "Identity"),
            "others": ("Quantize(4)", "Identity"),
        },
        {"hidden": ("Identity", "Quantize(2)"), "others": ("Identity", "Identity")},
    ]
    written = as_row(config)["forward"]
    assert written == '[{hidden = "TopK(0.1)", skip = "Quantize(8)", others = "Quantize(4)"}, "Identity"]'
    assert make_config({**SMALL, "forward": written}).forward == config.forward  # as a study or the records hold it
    assert read_config(base, ["num_stages=3", f"forward={written}"]).forward == config.forward
    assert read_config(base, ["forward=Quantize(8)", "forward.skip=TopK(0.1)"]).flat()["forward"] == {
        "skip": "TopK(0.1)",
        "others": "Quantize(8)",
    }
    both = read_config(base, ["num_replicas=2", "forward.1.skip=TopK(0.1)"])
    assert both.flat()["forward"] == {"1": {"skip": "TopK(0.1)"}}
    assert as_row(both)["forward"] == '{1 = {skip = "TopK(0.1)"}}'
    shared = make_config({**SMALL, "forward": {"skip": "TopK(0.1)"}, "shared_indices": True}).compressors()[0][0]
    assert isinstance(shared["skip"][1], AtSupport)  # what is sent whole goes back whole
    assert shared[OTHERS] == (parse("Identity"), parse("Identity"))


# What is wrong: override -> sentence.

RUN_KEYS = ", ".join(RunConfig.model_fields)
OPTIMIZER_KEYS = ", ".join(f"optimizer.{name}" for name in OptimizerConfig.model_fields)

REFUSED = {
    "stepz=3": "Unknown key `stepz`. Did you mean `steps`?",
    "foo.bar=1": f"Unknown key `foo`. Known: {RUN_KEYS}.",
    "optimizer.lr=1": f"Unknown key `optimizer.lr`. Known: {OPTIMIZER_KEYS}, optimizer.dampening, optimizer.nesterov.",
    "steps": "An override is written key=value, but got 'steps'.",
    "=3": "An override is written key=value, but got '=3'.",
    "steps.x=3": "`steps.x` is not a key: `steps` is 300.",
    "forward=TopKk(0.1)": "`forward`: Unknown compressor `TopKk` in 'TopKk(0.1)'. Did you mean `TopK`?",
    "backward=TopK(0)": "`backward`: `density` must be in (0, 1], but got 0 (in 'TopK(0)').",
    "forward=": "`forward`: '' is not a compressor: expected a name with arguments, such as 'TopK(0.1)'.",
    "forward=5": "`forward` must be a valid string, but got 5.",
    'forward=["TopK(0.1)"]': "`forward` must be one compressor or a list with one per boundary (3), but got 1.",
    "backward=[]": "`backward` must be one compressor or a list with one per boundary (3), but got 0.",
    "schedule=Foo": f"`schedule`: Unknown schedule `Foo` in 'Foo'. Known: {SCHEDULE_NAMES}.",
    "num_microbatches=3": "`num_microbatches` must divide `batch_size` (32), but got 3.",
    "batch_size=30": "`num_microbatches` must divide `batch_size` (30), but got 4.",
    "num_microbatches=0": "`num_microbatches` must be at least 1, but got 0.",
    "num_stages=0": "`num_stages` must be at least 1, but got 0.",
    "steps=0": "`steps` must be at least 1, but got 0.",
    "steps=abc": "`steps` must be a valid integer, but got 'abc'.",
    "steps=true": "`steps` must be a number or a text, not a boolean, but got True.",
    "steps=5000000000": "`steps` must be at most 2147483647, but got 5000000000.",
    "seed=-1": "`seed` must be at least 0, but got -1.",
    "seed=18446744073709551616": ("`seed` must be at most 9223372036854775807, but got 18446744073709551616."),
    "dtype=float8": "`dtype` must be 'float32', 'bfloat16' or 'float16', but got 'float8'.",
    "loss_scale=3": "`loss_scale` must be a power of two, so that scaling does not round, but got 3.",
    "device=tpu": "`device` must be 'auto', 'cpu' or 'cuda', but got 'tpu'.",
    "placement=here": "`placement` must be spread, pack, or a network's .toml file with sites, but got 'here'.",
    "recompute=maybe": "`recompute` must be a valid boolean, but got 'maybe'.",
    "timeout_s=0": "`timeout_s` must be greater than 0, but got 0.",
    "timeout_s=inf": "`timeout_s` must be a finite number, but got inf.",
    "cpus_per_stage=0": "`cpus_per_stage` must be greater than 0, but got 0.",
    "cuts=conv1": "`cuts` must be a list, but got 'conv1'.",
    "model=5": "`model` must be a name, but got 5.",
    "model.name=5": "`model` must be a name, but got 5.",
    "optimizer=adamw": "`optimizer` must be a table of keys, but got 'adamw'.",
    "optimizer.learning_rate=-1": "`optimizer.learning_rate` must be at least 0, but got -1.",
    "optimizer.learning_rate=nan": "`optimizer.learning_rate` must be a finite number, but got nan.",
    "optimizer.momentum=1": "`optimizer.momentum` must be less than 1, but got 1.",
    "optimizer.momentum=true": "`optimizer.momentum` must be a number or a text, not a boolean, but got True.",
    "optimizer.clip_norm=0": "`optimizer.clip_norm` must be greater than 0, but got 0.",
    "optimizer.betas=[0.9, 0.99]": "`optimizer.betas` has no effect with `optimizer.name` = 'sgd'. Leave it out.",
    "name=../x": "`name` must be the name of a folder, of at most 200 letters, digits and `_+=-.`, but got '../x'.",
    "shared_indices=true": (
        "`shared_indices` needs a forward TopK, alone or under ErrorFeedback, but got Identity at boundary 0."
    ),
    "forward={}": "`forward` as a table must name one replica or one tensor, but the table is empty.",
    "forward={a='TopK(0.1)', 1='TopK(0.2)'}": (
        "`forward` must be a table by replica, with numbers and `others` as keys, or by tensor, with names, but has the keys "
        "'a', '1'."
    ),
    "forward={a=5}": "`forward.a` must be a compressor, but got 5.",
    "forward={a='TopK(2)'}": "`forward`: `density` must be in (0, 1], but got 2 (in 'TopK(2)').",
    'forward=[{others="TopK(0.1)"}, "Identity", "Identity"]': (
        "`forward[0]` as a table must name a tensor in addition to `others`. Name one, or write the compressor alone."
    ),
    "forward={01='TopK(0.1)'}": "`forward` by replica must have numbers of replicas and `others` as keys, but got '01'.",
    "forward={0=5}": "`forward.0` must be a compressor or a list with one per boundary, but got 5.",
    "forward={0='TopK(0.1)'}": (
        "`forward` by replica has no effect with one replica. Name one compressor, or set `num_replicas`."
    ),
}

REFUSED_TOGETHER = {
    ("num_replicas=2", "backward={2='TopK(0.1)'}"): "`backward` by replica must name replicas 0 to 1, but got 2.",
    ("num_replicas=2", "forward={1=['TopK(0.1)']}"): (
        "`forward.1` must be one compressor or a list with one per boundary (3), but got 1."
    ),
    ("num_replicas=2", "forward={1='TopKk(0.1)'}"): (
        "`forward`: Unknown compressor `TopKk` in 'TopKk(0.1)'. Did you mean `TopK`?"
    ),
    ("num_replicas=2", "forward={1='ACGC(0.1)'}", "backward={1='ACGC(0.1)'}"): (
        "`backward` cannot be ACGC(0.1), which is for forward messages."
    ),
    ("steps=3", "epochs=2"): "The override of `steps` conflicts with that of `epochs`. Leave one of them out.",
    (
        "num_stages=3",
        'cuts=["conv1"]',
    ): "The override of `num_stages` conflicts with that of `cuts`. Leave one of them out.",
    (
        "model.width=3",
        "model=resnet18",
    ): "The override of `model.width` conflicts with another one. Leave one of them out.",
    ("optimizer.momentum=0.9", "optimizer.name=adamw"): (
        "The override of `optimizer.momentum` conflicts with another one. Leave one of them out."
    ),
    ("optimizer.name=adamw", "optimizer.momentum=0.9"): (
        "`optimizer.momentum` has no effect with `optimizer.name` = 'adamw'. Leave it out."
    ),
    ("optimizer.name=adamw", "optimizer.betas=[0.9, 1.0]"): (
        "`optimizer.betas` must be in [0, 1), but got (0.9, 1.0)."
    ),
    ("optimizer.decay=constant", "optimizer.decay_epochs=3"): (
        "`optimizer.decay_epochs` has no effect with `optimizer.decay` = 'constant'. Leave it out."
    ),
    ("device=cpu", "gpus_per_stage=1"): "`gpus_per_stage` must be 0 with `device` = 'cpu', but got 1.",
    ("num_stages=1", "forward=TopK(0.1)"): (
        "`forward` has no effect with one stage, which has no boundaries. Leave it out."
    ),
    ("num_stages=1", "shared_indices=true"): (
        "`shared_indices` has no effect with one stage, which has no boundaries. Leave it out."
    ),
    ("forward=TopK(0.1)", "shared_indices=true", "backward=TopK(0.1)"): (
        "With `shared_indices` the activation chooses the positions and `backward` is the bare codec of the values, "
        "such as Identity or Quantize(8), but got TopK(0.1)."
    ),
    ("forward=RandomK(0.5, unbiased=True)", "shared_indices=true"): (
        "`unbiased` must be left out with `shared_indices`, which sends gradients without its factor, "
        "but got RandomK(0.5, unbiased=True) at boundary 0."
    ),
    ("forward=AQSGD(TopK(0.1))", "shared_indices=true"): (
        "`shared_indices` needs a forward TopK, alone or under ErrorFeedback, but got AQSGD(TopK(0.1)) at boundary 0."
    ),
}

# What only the data and the model can tell, still before anything starts.
REFUSED_BY_THE_PLAN: dict[tuple[str, ...], str] = {
    ("data=cifar",): (
        "Unknown data set 'cifar'. Known: addition, brackets, cifar10, cifar100, copying, digits, hf, images, table, text, topics, "
        "wikitext2; your own is written `package.module:function`. Did you mean `cifar10`?"
    ),
    ("data.train_samples=-2147483648",): (
        "`data.train_samples` must be from -2147483647 to 2147483647, but got -2147483648."
    ),
}


@pytest.mark.parametrize("override", REFUSED)
def test_wrong_values_are_refused_in_one_sentence(override: str, base: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read_config(base, [override])
    assert str(error.value) == REFUSED[override]


@pytest.mark.parametrize("overrides", REFUSED_TOGETHER, ids=" ".join)
def test_values_that_exclude_each_other_are_refused(overrides: tuple[str, ...], base: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read_config(base, overrides)
    assert str(error.value) == REFUSED_TOGETHER[overrides]


@pytest.mark.parametrize("overrides", REFUSED_BY_THE_PLAN, ids=" ".join)
def test_conflicting_settings_are_refused_before_start(overrides: tuple[str, ...], base: Path) -> None:
    with pytest.raises(ConfigError) as error:
        prepare(read_config(base, overrides))
    assert str(error.value) == REFUSED_BY_THE_PLAN[overrides]


def test_data_are_found_beside_the_file_that_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that exists in the working folder is of that folder; one that exists nowhere is left as it is."""
    (tmp_path / "mine").mkdir()
    for name in ("both.csv", "beside.csv"):
        (tmp_path / "mine" / name).touch()
    (tmp_path / "both.csv").touch()
    monkeypatch.chdir(tmp_path)
    found = {}
    for name in ("both.csv", "beside.csv", "nowhere.csv", str(tmp_path / "both.csv")):
        text = f'base = "digits-cnn"\n[data]\nname = "table"\npath = "{name}"\ntarget = "y"'
        (tmp_path / "mine" / "run.toml").write_text(text)
        found[name] = read_source(Path("mine/run.toml"))[1]["data"]["path"]
    assert found.pop("beside.csv") == str(Path("mine") / "beside.csv")
    assert all(name == path for name, path in found.items())


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    def sentence(name: str, content: bytes | None) -> str:
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError) as error:
            read_config(path)
        return str(error.value).replace(str(path), name)

    known = ", ".join(recipe_names())
    unknown = f"Unknown recipe 'nope'. Known: {known}; or give a .toml file, or a folder with a model of transformers."
    assert sentence("nope.toml", None) == "There is no file 'nope.toml'."
    assert sentence("nope", None) == unknown
    assert sentence("broken.toml", b"steps = [1").startswith("broken.toml is not TOML: ")
    assert sentence("binary.toml", b"\xff\xfe").startswith("binary.toml cannot be read: ")
    assert sentence("other.toml", b"base = 5") == "`base` must be a recipe or a .toml file, but got 5."
    assert sentence("lost.toml", b'base = "nope"') == unknown
    assert (
        sentence("both.toml", b"steps = 3\nepochs = 2")
        == "Exactly one of `steps` and `epochs` must be given, but got 3 and 2."
    )
    assert (
        sentence("neither.toml", b"seed = 3") == "Exactly one of `steps` and `epochs` must be given, but got neither."
    )
    assert (
        sentence("derived.toml", b'base = "digits-cnn"\nsteps = 3\nepochs = 2')
        == "Only one of `steps` and `epochs` may be given, but derived.toml has both."
    )
    assert (
        sentence("cuts.toml", b'steps = 3\nnum_stages = 2\ncuts = ["conv1"]')
        == "Only one of `num_stages` and `cuts` may be given, but got both."
    )
    assert (
        sentence("self.toml", b'base = "self.toml"') == "`base` must not form a cycle, but self.toml has 'self.toml'."
    )
    (tmp_path / "one.toml").write_text('base = "two.toml"')
    assert "`base` must not form a cycle" in sentence("two.toml", b'base = "one.toml"')
    assert sentence("nameless.toml", b"steps = 3\n[model]\nwidth = 3") == "`model.name` must be given."


def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path, small) -> None:
    (tmp_path / "file").write_text("")
    training = Training(small(), out=tmp_path / "file" / "run", engine="inline")
    with pytest.raises(ConfigError) as error:
        list(training.events())
    assert str(error.value) == f"The run's folder {tmp_path / 'file' / 'run'} cannot be written: Not a directory."
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("")
    with pytest.raises(ConfigError) as error:
        Training(small(), out=tmp_path / "full", engine="inline")
    assert (
        str(error.value)
        == f"The folder {tmp_path / 'full'} is not empty. Give another `out`, or `resume` the run in it."
    )


def test_config_is_immutable() -> None:
    config = make_config(SMALL)
    with pytest.raises(ValidationError):
        config.steps = 3  # type: ignore[misc]
    with pytest.raises(ValidationError):
        RunConfig(stepz=3)  # type: ignore[call-arg]
    assert hash(config.optimizer) == hash(make_config(SMALL).optimizer)


@pytest.mark.parametrize("value", ["[]", "{a=1}", "7"])
def test_non_string_optimizer_name_is_refused_in_one_sentence(value):
    with pytest.raises(ConfigError, match=r"^`optimizer\.name` must be a valid string, but got "):
        read_config("digits-cnn", [f"optimizer.name={value}"])
