"""Tables, pictures, texts and objects of one's own: what is read, in which order, and what is refused by file and row."""

import io
import json
import pickle
import sys

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
import torch
from loading import everything, load, refusal

from raysim.workloads import splits


@pytest.fixture(autouse=True)
def cache_here(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYSIM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def alike(one, other):
    return all(torch.equal(x, y) for x, y in zip(everything(one), everything(other), strict=True))


# Tables


def houses(count=60):
    rng = np.random.default_rng(0)
    rooms = rng.integers(1, 8, count)
    columns = {
        "rooms": rooms,
        "area": 20.0 * rooms + rng.normal(0, 5, count),
        "street": rng.choice(["a", "b", "c"], count),
        "garden": rng.random(count) < 0.5,
        "price": 1e5 + 3e4 * rooms + rng.normal(0, 100, count),
    }
    return pa.table(columns)


def write(table, path):
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    else:
        options = pa_csv.WriteOptions(delimiter="\t" if path.suffix == ".tsv" else ",")
        pa_csv.write_csv(table, path, options)
    return str(path)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_a_table_is_standardised_by_its_training_rows(tmp_path, suffix):
    table = houses()
    data = load("table", path=write(table, tmp_path / f"houses{suffix}"), target="price")
    x, y = everything(data.train)
    assert len(data.train), len(data.test) == (54, 6)
    assert data.shape[:5] == ((6,), "float32", 1, (1,), "float32")
    assert x.mean(0).abs().max() < 1e-5
    assert torch.allclose(x.std(0, correction=0), torch.ones(6), atol=1e-5)
    assert torch.allclose(y.std(0, correction=0), torch.ones(1), atol=1e-5)
    rows = data.train.rows
    price = torch.tensor(table["price"].to_numpy()[rows])
    assert torch.allclose(y[:, 0] * data.shape.target_scale[0], (price - price.mean()).float(), atol=1)
    street = torch.tensor(np.asarray(table["street"].to_pylist())[rows] == "b").float()
    assert torch.allclose(x[:, 3], (street - street.mean()) / street.std(correction=0), atol=1e-5)
    assert sorted([*rows, *data.test.rows]) == list(range(60))


def test_all_formats_give_the_same_table(tmp_path):
    found = [
        load("table", path=write(houses(), tmp_path / f"h{s}"), target="price") for s in (".csv", ".parquet", ".jsonl")
    ]
    for other in found[1:]:
        for one, two in zip(found[0][:2], other[:2], strict=True):
            assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(everything(one), everything(two), strict=True))


def test_words_and_integers_are_classes_if_declared(tmp_path):
    path = write(houses(), tmp_path / "houses.csv")
    words = load("table", path=path, target="street")
    assert words.shape.num_classes == 3
    assert words.shape.classifies
    assert load("table", path=path, target="garden").shape.num_classes == 2
    assert load("table", path=path, target="rooms", classes=True).shape.num_classes == 7
    assert load("table", path=path, target="rooms", classes=False).shape.target_dtype == "float32"
    assert load("table", path=path, target=["price", "area"]).shape.target_shape == (2,)


def test_a_folder_has_its_own_test_rows(tmp_path):
    write(houses(40), tmp_path / "train.csv")
    write(houses(10), tmp_path / "test.csv")
    data = load("table", path=str(tmp_path), target="price", columns=["rooms", "area"], train_samples=20)
    assert (len(data.train), len(data.test), data.shape.input_shape) == (20, 10, (2,))


def test_a_split_of_several_files_is_read_in_their_order_and_its_rows_are_named(tmp_path):
    for place in range(3):
        write(houses(30).slice(10 * place, 10), tmp_path / f"train-{place}.csv")
    write(houses(8), tmp_path / "valid.csv")
    write(houses(30), tmp_path / "whole.csv")
    write(houses(30), tmp_path / "train.parquet")  # the same rows again
    data = load("table", path=str(tmp_path), target="price")
    assert (len(data.train), len(data.test)) == (30, 8)
    prices = everything(data.train)[1][:, 0] * data.shape.target_scale[0]
    expected = torch.tensor(houses(30)["price"].to_numpy())
    assert torch.allclose(prices - prices[0], (expected - expected[0]).float(), atol=2)
    lines = (tmp_path / "train-1.csv").read_text().splitlines()
    (tmp_path / "train-1.csv").write_text("\n".join([*lines[:4], ",".join(["", *lines[4].split(",")[1:]]), *lines[5:]]))
    assert refusal(lambda: load("table", path=str(tmp_path), target="price")) == (
        f"There is no value in column `rooms` in row 4 of {tmp_path / 'train-1.csv'}."
    )


def test_invalid_tables_are_refused(tmp_path):
    path = write(houses(), tmp_path / "houses.csv")
    assert refusal(lambda: load("table", path=path, target="prize")) == (
        f"`data.target` must be a column of {path} (rooms, area, street, garden, price), but got 'prize'. Did you mean `price`?"
    )
    assert refusal(lambda: load("table", path=path, target="rooms")) == (
        f"Column `rooms` of {path} holds whole numbers only: say whether they are classes (`data.classes = true`) or numbers "
        "(`data.classes = false`)."
    )
    assert "fractions" in refusal(lambda: load("table", path=path, target="price", classes=True))
    assert "holds no numbers" in refusal(lambda: load("table", path=path, target="street", classes=False))
    assert "must not hold the target" in refusal(lambda: load("table", path=path, target="price", columns=["price"]))
    lines = (tmp_path / "houses.csv").read_text().splitlines()
    cells = lines[17].split(",")
    bad = tmp_path / "bad.csv"
    bad.write_text("\n".join([*lines[:17], ",".join([cells[0], "", *cells[2:]]), *lines[18:]]))
    assert (
        refusal(lambda: load("table", path=str(bad), target="price"))
        == f"There is no value in column `area` in row 17 of {bad}."
    )
    bad.write_text("\n".join([*lines[:17], "1,2", *lines[18:]]))
    assert f"{bad} cannot be read: CSV parse error: Row #18" in refusal(
        lambda: load("table", path=str(bad), target="price")
    )
    assert "must end in" in refusal(
        lambda: load("table", path=write(houses(), tmp_path / "houses.txt"), target="price")
    )


# Larger than memory


def test_large_data_are_memory_mapped_unchanged(tmp_path, monkeypatch):
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": f"line {i} of it"}) + "\n" for i in range(400)))
    path, text = write(houses(), tmp_path / "houses.csv"), str(tmp_path / "corpus.jsonl")
    small = [load("table", path=path, target="price"), load("text", path=text, length=8)]
    monkeypatch.setattr(splits, "IN_MEMORY", 100)
    large = [load("table", path=path, target="price"), load("text", path=text, length=8)]
    assert isinstance(large[0].train.features, splits.Mapped)
    assert isinstance(large[1].train.tokens, splits.Mapped)
    for one, other in zip(small, large, strict=True):
        again = pickle.loads(pickle.dumps(other))
        for place in (0, 1):
            assert alike(one[place], other[place])
            assert alike(one[place], again[place])
    assert len(pickle.dumps(large[1])) < 2000


def test_changed_file_rebuilds_cache(tmp_path, cache_here):
    path = write(houses(), tmp_path / "houses.csv")
    load("table", path=path, target="price")
    made = sorted(cache_here.iterdir())
    load("table", path=path, target="price")
    assert sorted(cache_here.iterdir()) == made
    write(houses(50), tmp_path / "houses.csv")
    data = load("table", path=path, target="price")
    assert len(data.train) + len(data.test) == 50


# Pictures


def picture(value, size=(8, 8), form="PNG"):
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", size, (value, 0, 255 - value)).save(buffer, format=form)
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path):
    """Return a folder of two class folders with ten pictures each; a picture's red says its class and number."""
    for number, name in enumerate(("cats", "dogs")):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for place in range(10):
            (tmp_path / "pictures" / name / f"{place}.png").write_bytes(picture(100 * number + place))
    return tmp_path / "pictures"


def test_a_folder_of_class_folders(folder):
    data = load("images", path=str(folder), mean=[0, 0, 0], std=[1, 1, 1])
    assert data.shape[:3] == ((3, 8, 8), "float32", 2)
    assert (len(data.train), len(data.test)) == (18, 2)
    x, y = everything(data.train)
    assert ((x[:, 0, 0, 0] * 255).round() >= 100).long().tolist() == y.tolist()
    assert load("images", path=str(folder), size=[4, 6]).train.inputs(np.array([3]), 0, 0, False).shape == (1, 3, 4, 6)


def test_parquet_with_encoded_pictures_is_the_folder(folder, tmp_path):
    rows = [
        {"image": {"bytes": (folder / name / f"{place}.png").read_bytes(), "path": None}, "label": number}
        for number, name in enumerate(("cats", "dogs"))
        for place in range(10)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "all.parquet")
    one, other = load("images", path=str(folder)), load("images", path=str(tmp_path / "all.parquet"))
    assert alike(one.train, other.train)
    assert alike(one.test, pickle.loads(pickle.dumps(other.test)))


def test_a_picture_that_cannot_be_read_is_named(folder, tmp_path):
    bad = folder / "cats" / "3.png"
    bad.write_bytes(b"nothing")
    data = load("images", path=str(folder), train_samples=18)
    place = data.train.rows.tolist().index(3) if 3 in data.train.rows else None
    split, index = (data.train, place) if place is not None else (data.test, data.test.rows.tolist().index(3))
    said = refusal(lambda: split.inputs(np.array([index]), 0, 0, True))
    assert said == f"The image {bad} cannot be read: it is in no known format."
    bad.write_bytes(picture(3, (9, 8)))
    assert "is 9x8, but the first one is 8x8. Set `data.size` to resize all." in refusal(
        lambda: split.inputs(np.array([index]), 0, 0, True)
    )
    rows = [{"img": {"bytes": picture(i) if i != 5 else b"", "path": None}, "label": i % 2} for i in range(9)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "bad.parquet")
    assert refusal(lambda: load("images", path=str(tmp_path / "bad.parquet"))) == (
        f"There is no encoded image in row 6 of {tmp_path / 'bad.parquet'}."
    )
    assert "must be a column of" in refusal(lambda: load("images", path=str(tmp_path / "bad.parquet"), label="kind"))
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "must hold a folder of images for each class" in refusal(lambda: load("images", path=str(empty)))


# Texts


@pytest.fixture
def tokenizer(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[PAD]", "[UNK]", "[SEP]", *(f"w{i}" for i in range(50))]
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    (tmp_path / "tokenizer").mkdir()
    made.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    return str(tmp_path / "tokenizer")


def test_texts_of_rows_are_packed_with_a_token_between_them(tmp_path, tokenizer):
    texts = [" ".join(f"w{(i + j) % 50}" for j in range(i % 5 + 1)) for i in range(200)]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"story": text}) + "\n" for text in texts))
    data = load("text", path=str(tmp_path / "corpus.jsonl"), tokenizer=tokenizer, column="story", length=8)
    expected = [int(token[1:]) + 3 if token != "|" else 2 for text in texts for token in [*text.split(), "|"]]
    x, y = everything(data.train)
    assert x.flatten().tolist() == expected[: x.numel()]
    assert y.flatten().tolist() == expected[1 : x.numel() + 1]
    assert data.shape[:4] == ((8,), "int64", 53, (8,))
    assert "There is no text in column `story` in row 2 of" in refusal(
        lambda: load("text", path=write(pa.table({"story": ["a", None]}), tmp_path / "bad.parquet"), column="story")
    )


def test_pairs_of_texts_with_labels_are_cut_or_filled_up(tmp_path, tokenizer):
    rows = [{"one": f"w{i} w1", "two": "w2", "label": "yes" if i % 3 else "no"} for i in range(30)]
    path = write(pa.Table.from_pylist(rows), tmp_path / "pairs.tsv")
    data = load("text", path=path, tokenizer=tokenizer, column="one", pair="two", label="label", length=5)
    x, y = everything(data.train)
    kept = data.train.rows.tolist()
    assert x.tolist() == [[i + 3, 4, 5, 0, 0] for i in kept]
    assert y.tolist() == [int(i % 3 > 0) for i in kept]
    twice = load("text", path=path, tokenizer=tokenizer, column="two", pair="two", label="label", length=5)
    assert everything(twice.train)[0].tolist() == [[5, 5, 0, 0, 0]] * len(kept)
    shape = data.shape
    assert (shape.num_classes, shape.num_tokens, shape.padding, shape.target_shape) == (2, 53, 0, ())
    assert "must be a column" in refusal(lambda: load("text", path=path, column="one", label="lable"))


# Hugging Face's data sets, from this machine


def test_data_sets_of_hugging_face(tmp_path, folder, tokenizer):
    datasets = pytest.importorskip("datasets")
    frame = datasets.Dataset.from_dict({"text": [f"w{i} w2" for i in range(40)], "label": [i % 2 for i in range(40)]})
    datasets.DatasetDict(train=frame, test=frame.select(range(8))).save_to_disk(str(tmp_path / "saved"))
    labelled = load("hf", path=str(tmp_path / "saved"), tokenizer=tokenizer, target="label", length=4)
    assert (len(labelled.train), len(labelled.test), labelled.shape.num_classes) == (40, 8, 2)
    packed = load("hf", path=str(tmp_path / "saved"), tokenizer=tokenizer, length=4)
    assert packed.shape.target_shape == (4,)
    write(houses(), tmp_path / "saved.parquet")
    table = datasets.Dataset.from_parquet(str(tmp_path / "saved.parquet"), cache_dir=str(tmp_path / "hub"))
    table.save_to_disk(str(tmp_path / "table"))
    numbers = load("hf", path=str(tmp_path / "table"), column=["rooms", "area"], target="price")
    own = load("table", path=str(tmp_path / "saved.parquet"), columns=["rooms", "area"], target="price")
    assert alike(numbers.train, own.train)
    assert refusal(lambda: load("hf", path=str(tmp_path / "table"), column="rooms", target="prize")).startswith(
        "`data.target` must be a column of"
    )
    assert "cannot be loaded as a data set" in refusal(lambda: load("hf", path=str(tmp_path / "none" / "at" / "all")))


# Objects of one's own

MODULE = """
import torch
class Pairs:
    def __init__(self, count, fail=-1):
        self.count, self.fail = count, fail
    def __len__(self):
        return self.count
    def __getitem__(self, i):
        if i >= self.count:
            raise IndexError(i)
        if i == self.fail:
            raise OSError("the disk is gone")
        return torch.full((2, 3), float(i)), i % 4
def classes(count=20, fail=-1):
    return Pairs(count, fail), Pairs(8)
def numbers():
    return [(torch.ones(3) * i, float(i)) for i in range(9)], [(torch.ones(3), 2.0)]
def tokens():
    row = torch.arange(5)
    return [(row, torch.where(row > 2, row, -100))] * 6, [(row, row)] * 3
def single():
    return Pairs(3)
def ragged():
    return [([[1.0], [2.0, 3.0]], 0)] * 3, [(torch.ones(3), 0)]
def named():
    pairs = Pairs(3)
    pairs.targets = ["cat", "dog", "cat"]
    return pairs, pairs
def odd():
    return [(torch.ones(3), 0), (torch.ones(4), 1)], [(torch.ones(3), 0)]
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_pairs.py").write_text(MODULE)
    yield
    sys.modules.pop("my_pairs", None)


def test_custom_objects_are_loaded(mine):
    data = load("my_pairs:classes", count=12)
    x, y = everything(data.train)
    assert x[:, 0, 0].tolist() == list(range(12))
    assert y.tolist() == [i % 4 for i in range(12)]
    assert data.shape[:5] == ((2, 3), "float32", 4, (), "int64")
    numbers = load("my_pairs:numbers")
    assert everything(numbers.train)[1].tolist() == [[float(i)] for i in range(9)]
    assert numbers.shape[:5] == ((3,), "float32", 1, (1,), "float32")
    tokens = load("my_pairs:tokens")
    assert tokens.shape.has_ignored
    assert (tokens.shape.num_classes, tokens.shape.target_shape, tokens.shape.input_dtype) == (5, (5,), "int64")


def test_invalid_custom_objects_are_refused(mine):
    assert "must return two objects" in refusal(lambda: load("my_pairs:single"))
    assert refusal(lambda: load("my_pairs:classes", fail=5)) == (
        "Sample 5 of `my_pairs:classes`, training split cannot be read: OSError: the disk is gone."
    )
    assert refusal(lambda: load("my_pairs:ragged")) == (
        "The input of sample 0 of `my_pairs:ragged`, training split must be a tensor, an array, or numbers of one shape, but is list."
    )
    assert load("my_pairs:named").train.known.tolist() == [
        0,
        1,
        2,
    ]  # from the samples: an attribute `targets` is not read
    data = load("my_pairs:odd")
    assert refusal(lambda: data.train.inputs(np.array([1]), 0, 0, True)) == (
        "The input of sample 1 of `my_pairs:odd`, training split has the shape (4,), but sample 0 has (3,)."
    )
    assert "has no function `nothing`" in refusal(lambda: load("my_pairs:nothing"))
    assert refusal(lambda: load("my_pairs:classes", size=3)).startswith(
        "Unknown option `data.size` of `my_pairs:classes`."
    )
