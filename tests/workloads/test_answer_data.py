"""Tasks with one right answer: answers recomputed another way, samples that differ, and sizes that do not fit."""

import numpy as np
import pytest

from raysim.workloads.data import load_data

SMALL = {"train_samples": 300, "test_samples": 60}


def texts(split):
    """Return the tokens of each sample up to the end of its answer, and how many of them are the prompt."""
    ids = np.arange(len(split))
    inputs, targets = split.inputs(ids, 0, 0, True).numpy(), split.targets(ids).numpy()
    found = []
    for row, target in zip(inputs, targets, strict=True):
        counted = np.flatnonzero(target != -100)
        assert np.array_equal(counted, np.arange(counted[0], counted[-1] + 1))
        assert np.array_equal(row[counted[1:]], target[counted[:-1]])  # the answer is read as far as it goes
        found.append(([*row[: counted[0] + 1].tolist(), *target[counted].tolist()], int(counted[0]) + 1))
    return found


def number(tokens):
    assert max(tokens) < 10
    return int("".join(map(str, tokens)))


@pytest.mark.parametrize("digits", [2, 3, 9])
@pytest.mark.parametrize("reverse", [True, False])
def test_sums_are_right(digits, reverse):
    data = load_data("addition", {"digits": digits, "reverse": reverse, **SMALL}, 0)
    for tokens, start in texts(data.train) + texts(data.test):
        first, plus, second, equals = tokens[:digits], tokens[digits], tokens[digits + 1 : start - 1], tokens[start - 1]
        answer = tokens[start:][::-1] if reverse else tokens[start:]
        assert (plus, equals, len(second), len(answer)) == (10, 11, digits, digits + 1)
        assert number(first) + number(second) == number(answer)


def test_copying_task_repeats_words():
    data = load_data("copying", {"length": 5, "symbols": 7, **SMALL}, 0)
    for tokens, start in texts(data.train) + texts(data.test):
        assert (start, tokens[5], len(tokens)) == (6, 7, 11)
        assert tokens[:5] == tokens[6:]
        assert max(tokens[:5]) < 7


@pytest.mark.parametrize("kinds", [2, 3])
def test_copying_task_brackets_are_balanced(kinds):
    data = load_data("brackets", {"length": 10, "kinds": kinds, **SMALL}, 0)
    lengths = set()
    for tokens, start in texts(data.train) + texts(data.test):
        assert (start, tokens[-1]) == (10, 2 * kinds)
        word = "".join("([{"[t] if t < kinds else ")]}"[t - kinds] for t in tokens[:-1])
        while (shorter := word.replace("()", "").replace("[]", "").replace("{}", "")) != word:
            word = shorter
        assert word == ""
        assert min(tokens[start:]) >= kinds
        lengths.add(len(tokens) - start)
    assert {1, 3, 5} <= lengths


@pytest.mark.parametrize("name", ["addition", "brackets", "copying"])
def test_copying_splits_are_fixed_and_disjoint(name):
    data, more = load_data(name, SMALL, 0), load_data(name, {**SMALL, "train_samples": 900}, 1)
    assert (len(data.train), len(data.test)) == (300, 60)
    assert texts(data.test) == texts(more.test)
    assert texts(data.train) == texts(more.train)[:300]
    prompts = [tuple(tokens[:start]) for tokens, start in texts(more.train) + texts(more.test)]
    assert len(set(prompts)) == len(prompts) == 960
    assert all(max(prompt) < data.shape.num_classes for prompt in prompts)
    assert (
        data.shape.input_shape
        == data.shape.target_shape
        == tuple(data.train.inputs(np.arange(1), 0, 0, True).shape[1:])
    )


@pytest.mark.parametrize("name", ["addition", "brackets", "copying"])
def test_whole_text_and_split_answers_agree(name):
    answers, whole = load_data(name, SMALL, 0), load_data(name, {**SMALL, "whole": True}, 0)
    ids, given = np.arange(60), whole.shape.given
    inputs, targets = whole.test.inputs(ids, 0, 0, False), whole.test.targets(ids)
    assert (targets[:, :given] == inputs[:, 1 : given + 1]).all()
    assert (targets[:, given:] == answers.test.targets(ids)[:, given:]).all()
    assert (answers.test.targets(ids)[:, :given] == -100).all()
    assert whole.shape.has_ignored == bool((targets == -100).any())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "addition",
            {"digits": 1},
            "`data.train_samples` and `data.test_samples` of `addition` may be 100 together with these options, but got 8500.",
        ),
        ("addition", {"digits": 0}, "`data.digits` must be an integer from 1 to 9, but got 0."),
        ("copying", {"symbols": 1}, "`data.symbols` must be an integer from 2 to 255, but got 1."),
        ("brackets", {"reverse": True}, "Unknown option `data.reverse` of `brackets`. Known: data.kinds, data.length"),
    ],
)
def test_wrong_options_are_refused(name, options, message):
    with pytest.raises(ValueError) as caught:
        load_data(name, options, 0)
    assert str(caught.value).startswith(message)
