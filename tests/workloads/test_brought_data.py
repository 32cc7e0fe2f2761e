"""Data as people bring them: labels outside the classes, files of tokenizers, deep images, encodings, and changed files."""

import io
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from loading import everything, load, refusal
from runs import break_off

from raysim.config import ConfigError, make_config, read_config
from raysim.pipeline.prepare import prepare
from raysim.training.train import train
from raysim.workloads.hf_layers import chain
from raysim.workloads.hf_model import load_model
from raysim.workloads.models import build_model
from raysim.workloads.splits import digest_of


@pytest.fixture(autouse=True)
def cache_here(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYSIM_CACHE", str(tmp_path / "cache"))


# Labels


def saved(path, *, test_label, declared=True, **others):
    """Write a data set of Hugging Face whose training labels are 0 and 1, and whose test split has `test_label`."""
    datasets = pytest.importorskip("datasets")
    label = datasets.ClassLabel(names=["bad", "good"]) if declared else datasets.Value("int64")
    features = datasets.Features(sentence=datasets.Value("string"), label=label, x=datasets.Value("float32"))

    def split(labels):
        rows = {"sentence": [f"s {i}" for i in range(len(labels))], "label": labels, "x": [0.5 * i for i in labels]}
        return datasets.Dataset.from_dict(rows, features=features)

    splits = {"train": split([0, 1] * 8), **others, "test": split([0, test_label, 1])}
    for name in others:
        splits[name] = split([0, 1])
    datasets.DatasetDict(splits).save_to_disk(str(path))
    return path


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("inputs", [{"column": "sentence", "length": 4}, {"column": "x", "classes": True}])
def test_unlabelled_test_rows_suggest_validation_split(tmp_path, declared, inputs):
    path = saved(tmp_path / "set", test_label=-1, declared=declared, validation=None)
    said = refusal(lambda: load("hf", path=path, target="label", **inputs))
    assert said == (
        f"Column `label` holds -1 in row 2 of {path}, split test, which is none of the 2 classes of the training split (0, 1). Try "
        "`data.test_split=validation`."
    )
    data = load("hf", path=path, target="label", test_split="validation", **inputs)
    assert (data.shape.num_classes, everything(data.test)[1].tolist()) == (2, [0, 1])


def test_a_row_without_one_of_the_declared_classes_is_refused(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(x=datasets.Value("float32"), label=datasets.ClassLabel(names=["bad", "good"]))
    rows = datasets.Dataset.from_dict({"x": [0.5, 1.5, 2.5] * 9, "label": [0, 1, -1] * 9}, features=features)
    rows.save_to_disk(str(tmp_path / "set"))
    said = refusal(lambda: load("hf", path=tmp_path / "set", column="x", target="label", classes=True))
    assert "holds -1 in row 3 of" in said
    assert said.endswith("Leave these rows out.")


def test_declared_classes_count_even_if_none_occurs(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(num_classes=3000))
    rows = datasets.Dataset.from_dict({"text": ["a"] * 20, "label": [2, 0] * 10}, features=features)
    rows.save_to_disk(str(tmp_path / "set"))
    rows.to_parquet(str(tmp_path / "rows.parquet"))
    assert load("hf", path=tmp_path / "set", target="label").shape.num_classes == 3000
    assert load("text", path=tmp_path / "rows.parquet", label="label").shape.num_classes == 3000


@pytest.mark.parametrize("name", ["text", "table"])
@pytest.mark.parametrize(("labels", "other"), [(["no", "yes"], "maybe"), ([0, 1], 2), ([0, 1], -1), ([-1, 1], 0)])
def test_class_only_in_test_split_is_refused(tmp_path, name, labels, other):
    for split, column in (("train", labels * 4), ("test", [labels[0], other])):
        lines = [f"{i},{label}" for i, label in enumerate(column)]
        (tmp_path / f"{split}.csv").write_text(
            "\n".join(["text,label", *lines]).replace("\n", "\n" + "w" * (name == "text"))
        )
    options: dict[str, str | bool] = {"label": "label"} if name == "text" else {"target": "label"}
    if name == "table" and not isinstance(other, str):
        options["classes"] = True
    said = refusal(lambda: load(name, path=tmp_path, **options))
    assert (
        f"Column `{'label'}` holds {float(other) if name == 'table' and other != 'maybe' else other!r} in row 2 of"
        in said
    )
    assert "none of the 2 classes of the training split" in said


def test_ignored_labels_are_not_classes(tmp_path):
    for labels, rule in (
        ([62000 + i % 5 for i in range(40)], "different integers up to 62004"),
        ([-100, 0, 1] * 9, "holds -100"),
    ):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": "a", "label": y}) + "\n" for y in labels))
        assert rule in refusal(lambda: load("text", path=tmp_path / "rows.jsonl", label="label"))


def test_class_folder_only_in_test_split_is_refused(tmp_path):
    for folder in ("train/cat", "train/dog", "test/cat", "test/dog", "test/owl"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "0.png").write_bytes(grey(np.zeros((8, 8), np.uint8)))
    assert "has 'owl' and" in refusal(lambda: load("images", path=tmp_path))


@pytest.mark.parametrize("kind", ["images", "text", "table", "hf"])
def test_some_samples_of_sorted_classes_are_of_all_classes(tmp_path, kind):
    labels = sorted(i % 4 for i in range(80))
    if kind == "images":
        for split, label in ((split, label) for split in ("train", "test") for label in range(4)):
            (tmp_path / "set" / split / f"c{label}").mkdir(parents=True)
            for i in range(20):
                (tmp_path / "set" / split / f"c{label}" / f"{i}.png").write_bytes(grey(np.full((8, 8), i, np.uint8)))
    elif kind == "hf":
        datasets = pytest.importorskip("datasets")
        rows = datasets.Dataset.from_dict({"text": [f"{i:02}" for i in range(80)], "label": labels})
        datasets.DatasetDict(train=rows, test=rows).save_to_disk(str(tmp_path / "set"))
    else:
        (tmp_path / "set").mkdir()
        for split in ("train", "test"):
            lines = [f"a{i if kind == 'text' else i % 3},{label}" for i, label in enumerate(labels)]
            (tmp_path / "set" / f"{split}.csv").write_text("\n".join(["text,label", *lines]))
    options: dict[str, dict[str, Any]] = {
        "text": {"label": "label"},
        "table": {"target": "label", "classes": True},
        "hf": {"target": "label"},
    }
    data = load(kind, path=tmp_path / "set", train_samples=16, test_samples=8, **options.get(kind, {}))
    counts = [np.bincount(everything(split)[1]).tolist() for split in (data.train, data.test)]
    assert counts == [[4] * 4, [2] * 4]


def test_evaluations_of_sorted_classes_have_all_of_them(tmp_path):
    rows = [json.dumps({"text": f"text {i}", "label": i // 40}) + "\n" for i in range(80)]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(rows))
    config = {"model_type": "bert", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    keys = {
        "model": {"name": "hf", "config": config},
        "num_stages": 2,
        "batch_size": 8,
        "steps": 1,
        "evaluate_samples": 8,
    }
    with pytest.raises(
        ConfigError, match=r"takes test samples of the first 1 of 2 classes, by which they are sorted\. Take"
    ):
        prepare(make_config(keys), load("text", path=tmp_path, label="label", length=8))
    some = load("text", path=tmp_path, label="label", length=8, test_samples=8)
    assert prepare(make_config(keys), some).plan.num_test_samples == 8


def test_splits_are_not_mistaken_for_classes(tmp_path):
    for folder in ("Training/cat", "Training/dog", "Testing/cat", "Testing/dog"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "0.png").write_bytes(grey(np.zeros((8, 8), np.uint8)))
    said = refusal(lambda: load("images", path=tmp_path))
    assert said.endswith("holds Testing, Training, which look like splits. Rename them.")


def test_a_named_split_exists_and_no_row_is_in_both(tmp_path):
    path = saved(tmp_path / "set", test_label=1, declared=True, validation=None)
    said = refusal(lambda: load("hf", path=path, target="label", test_split="validatoin", length=4))
    assert said == (
        f"`data.test_split` must be a split of {str(path)!r} (train, validation, test), but got 'validatoin'."
    )
    datasets = pytest.importorskip("datasets")
    rows = {"text": [f"{i:02}" for i in range(40)], "label": [0, 1] * 20}
    datasets.DatasetDict(test=datasets.Dataset.from_dict(rows)).save_to_disk(str(tmp_path / "alone"))
    data = load("hf", path=tmp_path / "alone", target="label", train_split="test", length=2)
    texts = [{bytes(row) for row in everything(split)[0].to(torch.uint8).numpy()} for split in (data.train, data.test)]
    assert (*map(len, texts), len(texts[0] | texts[1])) == (36, 4, 40)


@pytest.mark.parametrize("label", [None, "label"])
def test_texts_of_a_folder_are_those_of_all_its_files_of_rows(tmp_path, label):
    rows = [json.dumps({"text": f"text {i}", "label": i % 2}) + "\n" for i in range(60)]
    for folder, parts in ("whole", [rows]), ("parts", [rows[:20], rows[20:30], rows[30:]]):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "test-0.jsonl").write_text("".join(rows[:9]))
        for i, part in enumerate(parts):
            (tmp_path / folder / f"train-{i}-of-{len(parts)}.jsonl").write_text("".join(part))
    whole, parted = (load("text", path=tmp_path / name, label=label, length=7) for name in ("whole", "parts"))
    for x, y in zip(everything(whole.train), everything(parted.train), strict=True):
        assert torch.equal(x, y)


# Objects of one's own

MODULE = """
class Pictures:
    '''As torchvision's: raw `targets`, and a transform of targets in `__getitem__`.'''
    target_transform = staticmethod(lambda y: y % 2)
    def __init__(self, count, classes=None):
        self.targets = [i % 10 for i in range(count)]
        if classes is not None:
            self.classes = classes
    def __len__(self):
        return len(self.targets)
    def __getitem__(self, i):
        return [float(i), 1.0], self.target_transform(self.targets[i])
def pictures(classes=None):
    return Pictures(20, classes), Pictures(10)
def outside(test=5, train=0):
    return [([1.0], i % 2 + train) for i in range(8)], [([1.0], test)]
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "brought_module.py").write_text(MODULE)


def test_targets_are_those_of_the_samples(mine):
    data = load("brought_module:pictures")
    assert data.shape.num_classes == 2
    assert everything(data.train)[1].tolist() == [i % 2 for i in range(20)]


def test_classes_may_be_a_number_and_bound_all_targets(mine):
    assert load("brought_module:pictures", classes=4).shape.num_classes == 4
    assert load("brought_module:pictures", classes=["a", "b"]).shape.num_classes == 2
    assert "must list the classes or be their number, but is 0" in refusal(
        lambda: load("brought_module:pictures", classes=0)
    )
    assert "but `classes` declares 1 classes" in refusal(lambda: load("brought_module:pictures", classes=1))
    assert "is 5, but the training split has 2 classes from 0" in refusal(lambda: load("brought_module:outside"))
    assert "different integers up to 62001" in refusal(lambda: load("brought_module:outside", train=62000))


# Tokenizers


def tokenizer_folder(path, *, stored=False, **files):
    """Write a tokenizer of words, with truncation and padding stored in its file if `stored`, and JSON `files` beside it."""
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<0>", "[UNK]", "<end>", "<fill>", "<other>", *(f"w{i}" for i in range(20))]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    if stored:
        made.enable_truncation(3)
        made.enable_padding(length=12, pad_id=4, pad_token="<other>")
    path.mkdir(exist_ok=True)
    made.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return str(path)


TEXTS = [" ".join(f"w{(i + j) % 20}" for j in range(i % 7 + 1)) for i in range(40)]


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("file", ["special_tokens_map", "tokenizer_config"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_tokens_are_those_of_transformers(tmp_path, stored, file, side):
    transformers = pytest.importorskip("transformers")
    special = {"eos_token": "<end>", "pad_token": "<fill>"}
    files = {"tokenizer_config": {"padding_side": side}} | {
        file: special | {"padding_side": side} if "config" in file else special
    }
    folder = tokenizer_folder(tmp_path / "tok", stored=stored, **files)
    rows = "".join(json.dumps({"text": text, "label": i % 2}) + "\n" for i, text in enumerate(TEXTS))
    (tmp_path / "rows.jsonl").write_text(rows)
    judge = transformers.AutoTokenizer.from_pretrained(folder)
    data = load("text", path=tmp_path / "rows.jsonl", label="label", tokenizer=folder, length=5)
    expected = [judge(text, truncation=True, padding="max_length", max_length=5)["input_ids"] for text in TEXTS]
    assert everything(data.train)[0].tolist() == [expected[row] for row in data.train.rows]
    packed = load("text", path=tmp_path / "rows.jsonl", tokenizer=folder, length=5).train
    tokens = [token for text in TEXTS for token in [*judge.encode(text, add_special_tokens=False), judge.eos_token_id]]
    assert packed.tokens.tolist() == tokens[: len(packed.tokens)]
    (tmp_path / "text.txt").write_text(" ".join(TEXTS))
    plain = load("text", path=tmp_path / "text.txt", tokenizer=folder, length=5).train
    assert plain.tokens.tolist() == judge.encode(" ".join(TEXTS), add_special_tokens=False)[: len(plain.tokens)]


def test_a_model_with_token_types_sees_pairs_as_transformers_shows_them(tmp_path):
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    names = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"], "pad_token": "<fill>"}
    folder = tokenizer_folder(tmp_path / "tok", tokenizer_config=names)
    made = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    made.post_processor = tokenizers.processors.TemplateProcessing(
        "<0> $A <end>", "<0> $A <end> $B:1 <end>:1", [("<0>", 0), ("<end>", 2)]
    )
    made.save(f"{folder}/tokenizer.json")
    pairs = list(zip(TEXTS, TEXTS[::-1], strict=True))
    rows = [json.dumps({"text": a, "other": b, "label": i % 2}) + "\n" for i, (a, b) in enumerate(pairs)]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    data = load("text", path=tmp_path / "rows.jsonl", label="label", pair="other", tokenizer=folder, length=9)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = load_model(data.shape, config={"model_type": "bert", **sizes}).eval()
    judge = transformers.AutoTokenizer.from_pretrained(folder)
    chosen = [pairs[row] for row in data.train.rows]
    expected = judge(
        *zip(*chosen, strict=True), truncation=True, padding="max_length", max_length=9, return_tensors="pt"
    )
    assert 0 < expected["token_type_ids"].sum() < expected["attention_mask"].sum()
    layers = chain(model, data.shape.padding, data.shape.separator).eval()
    assert torch.equal(layers(everything(data.train)[0]), model(**expected).logits)
    assert build_model("hf", {"config": {"model_type": "bert", **sizes}}, data.shape, seed=0)[0].separator == 2


def test_changed_tokenizer_file_rebuilds_cache(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text, "label": 0}) + "\n" for text in TEXTS))

    def tokens(end, fill):
        folder = tokenizer_folder(tmp_path / "tok", tokenizer_config={"eos_token": end, "pad_token": fill})
        packed = load("text", path=tmp_path / "rows.jsonl", tokenizer=folder, length=5)
        labelled = load("text", path=tmp_path / "rows.jsonl", label="label", tokenizer=folder, length=9)
        return packed.train.tokens[1], everything(labelled.train)[0][:, -1].unique().tolist()

    assert tokens("<end>", "<fill>") == (2, [3])
    assert tokens("<other>", "<0>") == (4, [0])


def test_a_length_below_the_special_tokens_is_refused(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    folder = tokenizer_folder(tmp_path / "tok")
    made = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    made.post_processor = tokenizers.processors.TemplateProcessing(
        "<0> $A <end>", special_tokens=[("<0>", 0), ("<end>", 2)]
    )
    made.save(f"{folder}/tokenizer.json")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text, "label": 0}) + "\n" for text in TEXTS))
    said = refusal(lambda: load("text", path=tmp_path / "rows.jsonl", label="label", tokenizer=folder, length=1))
    assert said == "`data.length` must be more than the tokenizer's 2 special tokens, but got 1."


# Images


def grey(pixels, form="PNG"):
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.fromarray(pixels).save(file, form)
    return file.getvalue()


@pytest.mark.parametrize("form", ["PNG", "TIFF", "PPM"])
def test_grey_images_of_16_bits_keep_their_256_levels(tmp_path, form):
    ramp = (np.arange(256, dtype=np.uint16) * 257).reshape(16, 16)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(3):
            (tmp_path / name / f"{i}.{'png' if form == 'PPM' else form.lower()}").write_bytes(grey(ramp, form))
    x, _ = everything(load("images", path=tmp_path, mean=[0, 0, 0], std=[1, 1, 1]).train)
    assert torch.equal((x[0] * 255).round(), torch.arange(256.0).view(16, 16).expand(3, 16, 16))


@pytest.mark.parametrize(("dtype", "kind"), [(np.float32, "floating-point numbers"), (np.int32, "32-bit integers")])
def test_images_without_a_range_are_refused(tmp_path, dtype, kind):
    rows = [{"image": {"bytes": grey(np.eye(8, dtype=dtype), "TIFF"), "path": None}, "label": i % 2} for i in range(20)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    said = refusal(lambda: load("images", path=tmp_path / "rows.parquet"))
    assert f"cannot be read: its pixels are {kind}, which have no range; save it with 8 or 16 bits." in said


# Encodings

WORDS = "naïve café, line\nby line\n" * 40


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
def test_text_encoding_follows_byte_order_mark(tmp_path, encoding):
    for name, text in (
        ("a.txt", WORDS),
        ("a.csv", "text,x\n" + "café,1\n" * 60),
        ("a.jsonl", '{"text": "café"}\n' * 60),
    ):
        found = []
        for each in ("utf-8", encoding):
            (tmp_path / name).write_text(text, encoding=each)
            found.append(load("text", path=tmp_path / name, length=8).train.tokens.tolist())
        assert found[0] == found[1]


def test_texts_that_cannot_be_read_name_file_key_and_remedy(tmp_path):
    file = tmp_path / "a.txt"
    for content, rule in (
        (WORDS.encode("utf-16-le").replace(b"\xef", b"i"), "zero in every second byte"),
        (WORDS.encode("utf-16") + b"x", "begins with the mark of utf-16, but is not"),
    ):
        file.write_bytes(content)
        said = refusal(lambda: load("text", path=file, length=8))
        assert said.startswith(f"`data.path`: {file} ")
        assert rule in said
    for head, body in (("name,y", "café,1.5"), ("naïve,y", "1,1.5"), ("x,naïve,y", "1,2,1.5")):
        (tmp_path / "a.csv").write_text("\n".join([head, *[body] * 9]), encoding="cp1252")
        said = refusal(lambda: load("table", path=tmp_path / "a.csv", target="y"))
        assert said.startswith(f"`data.path`: {tmp_path / 'a.csv'} must be UTF-8, but")
        assert said.endswith("Convert it, for example by `iconv -f WINDOWS-1252 -t UTF-8`.")


def test_encoding_of_unused_columns_is_ignored(tmp_path):
    (tmp_path / "a.csv").write_text("x,name,y\n" + "1,café,1.5\n" * 20, encoding="cp1252")
    assert load("table", path=tmp_path / "a.csv", target="y", columns=["x"]).shape.input_shape == (1,)


def test_columns_of_one_name_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("x,x,y\n" + "1,2,3.5\n" * 20)
    assert refusal(lambda: load("table", path=tmp_path / "a.csv", target="y")) == (
        f"`data.columns`: {tmp_path / 'a.csv'} has 2 columns 'x'. Rename one of them."
    )


# Changed files and keys


def test_run_is_not_resumed_with_changed_data(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text(WORDS)
    keys = ["data=text", f"data.path={file}", "data.length=8", "batch_size=8", "num_microbatches=2", "steps=4"]
    config = read_config("topics-gpt", [*keys, "model.num_blocks=2", "checkpoint_every_steps=2", "grace_s=60"])
    from raysim.training.run import Training

    break_off(Training(config, out=tmp_path / "run", engine="inline"))
    file.write_text(WORDS.replace("line", "land"))
    with pytest.raises(ConfigError, match=r"`data` must have the samples of run .*, but they have changed since\."):
        train(config, out=tmp_path / "run", engine="inline", resume=True)
    file.write_text(WORDS)
    assert train(config, out=tmp_path / "run", engine="inline", resume=True).status == "finished"


def test_data_digest_covers_every_sample(tmp_path):
    (tmp_path / "houses.csv").write_text("x,y\n" + "".join(f"{i},{i}.5\n" for i in range(40)))
    digests = {digest_of(load("table", path=tmp_path / "houses.csv", target="y"))}
    assert digests == {digest_of(load("table", path=tmp_path / "houses.csv", target="y"))}
    (tmp_path / "houses.csv").write_text("x,y\n" + "".join(f"{i + (i == 39)},{i}.5\n" for i in range(40)))
    digests.add(digest_of(load("table", path=tmp_path / "houses.csv", target="y")))
    for value in (0, 1):
        for name in ("a", "b"):
            (tmp_path / "images" / name).mkdir(parents=True, exist_ok=True)
            for i in range(5):
                (tmp_path / "images" / name / f"{i}.bmp").write_bytes(grey(np.full((8, 8), value, np.uint8), "BMP"))
        digests.add(digest_of(load("images", path=tmp_path / "images")))
    assert len(digests) == 4
