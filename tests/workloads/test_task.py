"""Losses and metrics: textbook values, sums that may be cut anywhere, chance, and what does not fit."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loading import refusal
from sklearn import metrics as sk
from torch.nn import functional as F

from raysim.quality import MEASURES, Measure, measures_of, write_measures
from raysim.workloads.losses import CrossEntropy, check_loss, make_loss
from raysim.workloads.metrics import METRICS
from raysim.workloads.splits import Data, DataShape
from raysim.workloads.task import chance, make_task

CLASSES = DataShape((4,), "float32", 7)
TOKENS = DataShape((6,), "int64", 7, target_shape=(6,), has_ignored=True)
NUMBERS = DataShape((4,), "float32", 2, (2,), "float32", (10.0, 0.5))
ALL = {"classes": (CLASSES, ["accuracy", "top5_accuracy", "f1"]), "tokens": (TOKENS, ["accuracy", "f1"])}
ALL["numbers"] = (NUMBERS, ["r2", "mae"])


def drawn(shape, count, seed=0):
    """Return outputs and targets of `count` samples, some of which are ignored where they may be."""
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(
        (count, *shape.target_shape, *([shape.num_classes] if shape.classifies else [])), generator=generator
    )
    if not shape.classifies:
        return outputs, outputs + torch.randn(outputs.shape, generator=generator)
    targets = torch.randint(shape.num_classes, (count, *shape.target_shape), generator=generator)
    if shape.has_ignored:
        targets[torch.rand(targets.shape, generator=generator) < 0.3] = -100
    return outputs, targets


def added(task, pairs):
    return tuple(map(sum, zip(*(task.sums(*pair) for pair in pairs), strict=True)))


@given(st.sampled_from(list(ALL)), st.integers(2, 30), st.integers(0, 20), st.data())
@settings(max_examples=60)
def test_an_evaluation_may_be_cut_into_batches_anywhere(kind, count, seed, data):
    shape, names = ALL[kind]
    task = make_task(None, {}, names, shape)
    outputs, targets = drawn(shape, count, seed)
    cut = data.draw(st.integers(1, count - 1))
    whole = task.results(task.sums(outputs, targets))
    parts = task.results(added(task, [(outputs[:cut], targets[:cut]), (outputs[cut:], targets[cut:])]))
    assert parts.keys() == whole.keys()
    for name, value in whole.items():
        assert parts[name] == pytest.approx(value, rel=1e-5, nan_ok=True), name


def test_metrics_are_those_of_scikit_learn():
    task = make_task(None, {}, ALL["classes"][1], CLASSES)
    outputs, targets = drawn(CLASSES, 200)
    found = task.results(task.sums(outputs, targets))
    predicted = outputs.argmax(-1)
    assert found["loss"] == pytest.approx(sk.log_loss(targets, outputs.double().softmax(-1), labels=range(7)), rel=1e-5)
    assert found["perplexity"] == math.exp(found["loss"])
    assert found["accuracy"] == sk.accuracy_score(targets, predicted)
    assert found["top5_accuracy"] == sk.top_k_accuracy_score(targets, outputs, k=5, labels=range(7))
    assert found["f1"] == pytest.approx(sk.f1_score(targets, predicted, average="macro"))
    assert found["predictions"] == 200
    task = make_task(None, {}, ["r2", "mae"], NUMBERS)
    outputs, targets = drawn(NUMBERS, 200)
    found = task.results(task.sums(outputs, targets))
    scale = torch.tensor(NUMBERS.target_scale)
    assert found["loss"] == pytest.approx(sk.mean_squared_error(targets, outputs))
    assert found["r2"] == pytest.approx(sk.r2_score(targets, outputs))
    assert found["mae"] == pytest.approx(sk.mean_absolute_error(targets * scale, outputs * scale))


def test_f1_of_two_classes_is_that_of_the_second():
    task = make_task(None, {}, ["f1"], CLASSES._replace(num_classes=2))
    outputs, targets = drawn(CLASSES._replace(num_classes=2), 100)
    found = task.results(task.sums(outputs, targets))
    assert found["f1"] == pytest.approx(sk.f1_score(targets, outputs.argmax(-1)))


def test_ignored_positions_change_nothing():
    task = make_task(None, {}, ["accuracy", "f1"], TOKENS)
    outputs, targets = drawn(TOKENS, 50)
    counted = targets != -100
    found = task.results(task.sums(outputs, targets))
    assert found["predictions"] == int(counted.sum())
    assert found["accuracy"] == sk.accuracy_score(targets[counted], outputs.argmax(-1)[counted])
    assert found["loss"] == pytest.approx(float(F.cross_entropy(outputs[counted], targets[counted])), rel=1e-5)
    nothing = task.results(task.sums(outputs, torch.full_like(targets, -100)))
    assert nothing["predictions"] == 0
    assert math.isnan(nothing["loss"])


def test_label_smoothing_applies_to_training_only():
    outputs, targets = drawn(CLASSES, 20)
    loss = make_loss("cross_entropy", {"label_smoothing": 0.1}, CLASSES)
    assert torch.equal(loss(outputs, targets), F.cross_entropy(outputs, targets, label_smoothing=0.1))
    assert torch.equal(loss.evaluate(outputs, targets), F.cross_entropy(outputs, targets))


@given(st.integers(1, 5), st.integers(0, 20))
def test_microbatches_of_a_divisor_add_up_to_the_mean_over_what_counts(parts, seed):
    outputs, targets = drawn(TOKENS, 10, seed)
    divisor = int((targets != -100).sum()) / parts
    each = [CrossEntropy()(x, y, divisor) for x, y in zip(outputs.chunk(parts), targets.chunk(parts), strict=True)]
    whole = F.cross_entropy(outputs.flatten(0, 1), targets.flatten())
    assert float(sum(each)) / parts == pytest.approx(float(whole), rel=1e-5)


# Chance


class Fixed:
    def __init__(self, targets):
        self._targets = targets

    def __len__(self):
        return len(self._targets)

    def targets(self, ids):
        return self._targets[torch.from_numpy(ids)]


@pytest.mark.parametrize("kind", ALL)
def test_chance_is_quality_of_constant_outputs(kind):
    shape, names = ALL[kind]
    task = make_task(None, {}, names, shape)
    train, test = (drawn(shape, count, seed)[1] for count, seed in ((300, 1), (200, 2)))
    found = chance(Data(Fixed(train), Fixed(test), shape), task)  # type: ignore[arg-type]
    if shape.classifies:
        frequencies = torch.bincount(train[train != -100], minlength=shape.num_classes).double()
        constant = (frequencies / frequencies.sum()).log()
        outputs = constant.expand(*test.shape, shape.num_classes)
    else:
        outputs = train.mean(0).expand(test.shape)
    expected = task.results(task.sums(outputs, test))
    for name in found:
        assert found[name] == pytest.approx(expected[name], rel=1e-4), name
    if kind == "numbers":
        assert found["r2"] == pytest.approx(0, abs=0.05)


def test_a_built_in_loss_that_fails_on_constant_outputs_is_an_error(monkeypatch):
    def failing(self, outputs, targets):
        raise RuntimeError("no such outputs")

    shape, names = ALL["numbers"]
    train, test = (Fixed(drawn(shape, count, seed)[1]) for count, seed in ((300, 1), (200, 2)))
    task = make_task(None, {}, names, shape)
    monkeypatch.setattr(type(task.loss), "evaluate", failing)
    with pytest.raises(RuntimeError, match="no such outputs"):
        chance(Data(train, test, shape), task)  # type: ignore[arg-type]


# Measures


def test_every_metric_is_a_measure_and_is_read_back():
    assert set(METRICS) == set(MEASURES) - {"loss", "perplexity"}
    own = Measure("dice", higher=True)
    chosen = [MEASURES["f1"], MEASURES["loss"], own]
    assert measures_of({"measures": write_measures(chosen)}) == {one.name: one for one in chosen}
    assert next(iter(measures_of({"data": "topics"}))) == "loss"  # runs that do not say
    assert next(iter(measures_of({"data": "digits"}))) == "accuracy"


@pytest.mark.parametrize("measure", [*MEASURES.values(), Measure("dice", higher=True)], ids=lambda one: one.name)
def test_harm_and_skill_follow_measure_direction(measure):
    worse, better = (0.4, 0.6) if measure.higher else (0.6, 0.4)
    assert measure.harm(worse, better) > 0 > measure.harm(better, worse)
    assert measure.harm(better, better) == 0
    assert measure.skill(better, 0.5) > 0 > measure.skill(worse, 0.5)


# What does not fit


def test_a_loss_or_metric_that_does_not_fit_the_data_is_refused():
    assert refusal(lambda: make_loss("mse", {}, CLASSES)) == (
        "`loss` = 'mse' does not fit the data, whose targets are classes. Use 'cross_entropy'."
    )
    assert refusal(lambda: make_loss("cross_entropy", {}, NUMBERS)) == (
        "`loss` = 'cross_entropy' does not fit the data, whose targets are numbers. Use 'mse'."
    )
    assert refusal(lambda: make_loss("mse", {"label_smoothing": 0.1}, NUMBERS)).startswith(
        "Unknown option `loss.label_smoothing` of `mse`."
    )
    assert refusal(lambda: make_loss("cross_entropy", {"label_smoothing": 1}, CLASSES)) == (
        "`loss.label_smoothing` must be in [0, 1), but got 1."
    )
    assert refusal(lambda: make_task(None, {}, ["mae"], CLASSES)) == (
        "`metrics` cannot be 'mae' with targets that are classes. For such targets: accuracy, top5_accuracy, f1."
    )
    assert refusal(lambda: make_task(None, {}, ["perplexity"], NUMBERS)) == (
        "`metrics` can have 'perplexity' only with `loss` = 'cross_entropy'."
    )
    assert refusal(lambda: make_task(None, {}, ["f1", "f1"], CLASSES)).startswith("`metrics` must have unique names")


def test_outputs_that_do_not_fit_the_targets_are_refused():
    mse, entropy = make_loss(None, {}, NUMBERS), make_loss(None, {}, CLASSES)
    assert refusal(lambda: check_loss(mse, "head", (4, 3), NUMBERS)) == (
        "The last layer `head` must return numbers of the shape of the targets (4, 2), but returns the shape (4, 3)."
    )
    assert refusal(lambda: check_loss(entropy, "head", (4, 3), CLASSES)) == (
        "The last layer `head` must return a score for each class (7), but returns the shape (4, 3)."
    )
    assert refusal(lambda: check_loss(entropy, "head", (4, 9, 7), CLASSES)) == (
        "The last layer `head` must return scores of shape (4, 7), but returns the shape (4, 9, 7)."
    )


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Return a function that writes a module of one's own and returns the import path of a name in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def write(text, name):
        module = f"mine_{abs(hash(text))}"
        (tmp_path / f"{module}.py").write_text(text)
        return f"{module}:{name}"

    return write


def test_custom_loss_and_metric(mine):
    path = mine("def huber(outputs, targets):\n    return (outputs - targets).abs().mean()\n", "huber")
    metric = mine(
        "def worst(outputs, targets):\n    return (outputs - targets).abs().max()\nworst.higher_is_better = False\n",
        "worst",
    )
    weighted = mine(
        "def scaled(outputs, targets, factor=1.0):\n    return factor * (outputs - targets).abs().mean()\n", "scaled"
    )
    assert make_loss(weighted, {"factor": 3}, NUMBERS)(torch.ones(4, 2), torch.zeros(4, 2)) == 3
    task = make_task(path, {}, [metric, "mae"], NUMBERS)
    check_loss(task.loss, "head", (4, 2), NUMBERS)
    outputs, targets = drawn(NUMBERS, 10)
    found = task.results(task.sums(outputs, targets))
    assert found["loss"] == pytest.approx(float((outputs - targets).abs().mean()))
    assert found["worst"] == pytest.approx(float((outputs - targets).abs().max()))
    assert [measure.name for measure in task.measures] == ["worst", "loss", "mae"]


def test_invalid_custom_loss_or_metric_is_refused(mine):
    text = "def broken(o, t):\n    raise RuntimeError('no')\ndef plain(o, t):\n    return 1.0\ndef many(o, t):\n    return (o - t)\n"
    expected = {
        "broken": "failed on outputs of shape (4, 2) and targets of shape (4, 2): no.",
        "plain": "must return one number, as a tensor that depends on the outputs, but got float.",
        "many": "must return one number, as a tensor that depends on the outputs, but got a tensor of shape (4, 2).",
    }
    for name, said in expected.items():
        loss = make_loss(mine(text, name), {}, NUMBERS)
        assert refusal(lambda loss=loss: check_loss(loss, "head", (4, 2), NUMBERS)) == f"Loss `{loss.name}` {said}"  # type: ignore[attr-defined]
    metric = mine(text, "plain")
    assert refusal(lambda: make_task(None, {}, [metric], NUMBERS)) == (
        f"Metric `{metric}` must say whether more is better: set `plain.higher_is_better` to True or False."
    )
    assert "cannot be imported" in refusal(lambda: make_loss("nothing.like:this", {}, NUMBERS))
    scaled = mine("def scaled(outputs, targets, factor):\n    return factor * (outputs - targets).mean()\n", "scaled")
    assert refusal(lambda: make_loss(scaled, {"facter": 3}, NUMBERS)) == (
        f"Unknown option `loss.facter` of `{scaled}`. Known: loss.factor. Did you mean `loss.factor`?"
    )
    assert refusal(lambda: make_loss("torch:dist", {"p": 2}, NUMBERS)) == (
        "Loss `torch:dist` must be a function of outputs and targets, written in Python, to take options."
    )
