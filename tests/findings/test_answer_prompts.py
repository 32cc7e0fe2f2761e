"""Prompts of the page on trained activations: their answers are right, end each prompt, and repeat."""

import pytest
import torch
from answer_prompts import KINDS, prompts
from tokenizers import Tokenizer, models, pre_tokenizers


@pytest.fixture
def folder(tmp_path):
    """A folder with a tokenizer of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def texts(folder, kind):
    """Return the question of each test prompt, which is its last line, and its answer."""
    letters = {i: letter for letter, i in Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab().items()}
    shown = {"Ġ": " ", "Ċ": "\n"}
    for inputs, targets in prompts(path=str(folder), kind=kind, each=20, length=100)[1]:
        counted = targets != -100
        asked = "".join(shown.get(letters[int(i)], letters[int(i)]) for i in inputs[: 101 - int(counted.sum())])
        told = "".join(shown.get(letters[int(i)], letters[int(i)]) for i in targets[counted])
        assert counted[-1]
        assert torch.equal(inputs[1:][counted[:-1]], targets[:-1][counted[:-1]])
        yield asked.rpartition("\n")[2], told


def test_answers_are_right(folder):
    for question, answer in texts(folder, "add"):
        assert eval(question.partition("=")[0]) == int(answer)  # a sum
    for question, answer in texts(folder, "copy"):
        assert question == f"Say:{answer}. Answer:"
    pairs = {"(": ")", "[": "]", "{": "}"}
    for question, answer in texts(folder, "close"):
        opened = question.removesuffix(" closes with").split()
        assert answer.split() == [pairs[each] for each in reversed(opened)]
    for question, answer in texts(folder, "recall"):
        name, thing = question.split()[-2], question.split()[-4]
        assert f"{name} has a{answer} {thing}." in question


def test_prompts_repeat_and_differ_by_seed(folder):
    first, again, other = (prompts(path=str(folder), each=5, seed=seed) for seed in (0, 0, 1))
    assert len(first[1]) == 5 * len(KINDS)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first[1], again[1], strict=True))
    assert not all(torch.equal(a[0], b[0]) for a, b in zip(first[1], other[1], strict=True))
