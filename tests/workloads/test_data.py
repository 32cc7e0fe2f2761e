"""Data: the order, augmentation as a function of seed, epoch and sample alone, what is read, and what is refused."""

import io
import json
import pickle
import shutil
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raysim.codecs.draws import bits64
from raysim.workloads import data as data_module
from raysim.workloads.data import DATASETS, DataShape, ImageSplit, TextSplit, batch_ids, steps_per_epoch
from raysim.workloads.picture_data import draws

load_data: Any = data_module.load_data  # its results have fields of their own


def read(split, ids, epoch=0, key=0, training=True):
    return split.inputs(np.asarray(ids), epoch, key, training)


# The order


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 3), st.integers(0, 3))
def test_an_epoch_takes_each_sample_at_most_once_and_drops_less_than_a_batch(num_samples, batch_size, seed, epoch):
    batch_size = min(batch_size, num_samples)
    steps = steps_per_epoch(num_samples, batch_size)
    batches = [batch_ids(num_samples, batch_size, seed, epoch * steps + step) for step in range(steps)]
    assert {found for found, _ in batches} == {epoch}
    ids = np.concatenate([ids for _, ids in batches])
    assert ids.dtype == np.int64
    assert len(set(ids.tolist())) == len(ids) == steps * batch_size > num_samples - batch_size
    assert set(ids.tolist()) <= set(range(num_samples))


def test_sample_order_depends_only_on_seed_and_step():
    steps = [17, 3, 40, 3, 0]
    first = [batch_ids(100, 8, 0, step)[1] for step in steps]
    assert all(
        np.array_equal(batch_ids(100, 8, 0, step)[1], ids)
        for step, ids in reversed(list(zip(steps, first, strict=True)))
    )
    assert not np.array_equal(batch_ids(100, 8, 1, 3)[1], first[1])
    epochs = [np.concatenate([batch_ids(64, 8, 0, 8 * epoch + step)[1] for step in range(8)]) for epoch in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(64))
    assert not np.array_equal(*epochs)  # type: ignore[arg-type]


def test_ids_are_not_shared_between_callers():
    _, ids = batch_ids(10, 4, 0, 0)
    kept = ids.copy()
    ids[:] = 0
    assert np.array_equal(batch_ids(10, 4, 0, 0)[1], kept)


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(
        ValueError, match=r"`batch_size` must be from 1 to the number of training samples \(10\), but got 11\."
    ):
        batch_ids(10, 11, 0, 0)


# Augmentation


def images(augment, count=40, size=8):
    rng = np.random.default_rng(0)
    pixels = rng.integers(1, 256, (count, 3, size, size), dtype=np.uint8)
    return ImageSplit(pixels, np.arange(count) % 10, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4), augment=augment)


@given(st.lists(st.integers(0, 39), min_size=1, max_size=12), st.integers(0, 3), st.integers(0, 3))
def test_augmentation_does_not_depend_on_the_batch(ids, epoch, key):
    for augment in ("random", "fixed"):
        split = images(augment)
        together = read(split, ids, epoch, key)
        alone = torch.cat([read(split, [each], epoch, key) for each in ids])
        assert torch.equal(together, alone)


def test_augmentation_depends_on_the_key_and_if_random_on_the_epoch():
    ids = range(40)
    for augment in ("random", "fixed"):
        split = images(augment)
        assert not torch.equal(read(split, ids, key=0), read(split, ids, key=1))
        assert torch.equal(read(split, ids, epoch=0), read(split, ids, epoch=1)) == (augment == "fixed")


def test_augmented_images_are_all_padded_crops_and_mirrors():
    split = images("random", count=1)
    plain = (split.images[0] / np.float32(255)).astype(np.float32)
    padded = np.pad(plain, ((0, 0), (4, 4), (4, 4)))
    crops = [padded[:, top : top + 8, left : left + 8] for top in range(9) for left in range(9)]
    mean, std = (np.array(values, np.float32)[:, None, None] for values in (split.mean, split.std))
    allowed = {np.round((each - mean) / std, 3).tobytes() for crop in crops for each in (crop, crop[..., ::-1])}
    found = [np.round(read(split, [0], epoch=epoch)[0].numpy(), 3).tobytes() for epoch in range(2000)]
    assert len(allowed) == 162
    assert set(found) == allowed


@pytest.mark.parametrize("augment", ["random", "fixed", "none"])
def test_evaluation_images_are_only_normalised(augment):
    split, ids = images(augment), [5, 3]
    x = torch.from_numpy(split.images[ids]).float() / 255
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (split.mean, split.std))
    assert torch.equal(read(split, ids, training=False), (x - mean) / std)
    assert torch.equal(read(split, ids), (x - mean) / std) == (augment == "none")
    assert torch.equal(split.targets(np.array(ids)), torch.tensor([5, 3]))


def test_random_draws_match_codec_counter_stream():
    for key in (0, 1, 2**63 - 1):
        ids = np.array([99, 0, 7])
        assert np.array_equal(draws(ids, key).view(np.int64), bits64(key, 100)[ids].numpy())


@pytest.mark.parametrize("split", [images("random"), TextSplit(np.arange(50, dtype=np.uint8), 7)])
def test_splits_pickle_and_read_from_arrays_that_cannot_be_written(split):
    buffers = []
    data = pickle.dumps(split, protocol=5, buffer_callback=buffers.append)
    again = pickle.loads(data, buffers=[bytes(buffer) for buffer in buffers])
    arrays = [value for value in vars(again).values() if isinstance(value, np.ndarray)]
    assert arrays
    assert len(data) < 1000  # the arrays travel apart
    assert not any(array.flags.writeable for array in arrays)
    for each in (split, again):
        x = read(each, [2, 4], epoch=1, key=9)
        x.zero_()  # and what is read is the reader's own
        each.targets(np.array([2, 4])).zero_()
    assert torch.equal(read(split, [2, 4], 1, 9), read(again, [2, 4], 1, 9))
    assert torch.equal(split.targets(np.array([1, 2])), again.targets(np.array([1, 2])))


# Digits and text that come with Python


def test_digits_split_is_fixed_and_complete():
    data, other = load_data("digits", {}, seed=0), load_data("digits", {}, seed=1)
    assert (len(data.train), len(data.test)) == (1437, 360)
    assert data.shape == DataShape((1, 8, 8), "float32", 10)
    assert np.array_equal(data.train.images, other.train.images)
    from sklearn.datasets import load_digits

    pixels = np.concatenate([data.train.images, data.test.images]).reshape(1797, 64)
    assert sorted(map(bytes, pixels)) == sorted(map(bytes, load_digits().data.astype(np.uint8)))
    x = read(data.train, range(1437))
    assert abs(x.mean()) < 1e-3
    assert abs(x.std() - 1) < 1e-3
    assert len(set(data.test.labels.tolist())) == 10


def test_topics_are_bytes_of_python_help():
    data = load_data("topics", {"length": 32}, seed=0)
    assert data.shape == DataShape((32,), "int64", 256, target_shape=(32,))
    train, test = (bytes(split.tokens) for split in (data.train, data.test))
    assert b"assert" in train
    assert 8.9 < len(train) / len(test) < 9.1


@given(st.integers(2, 200), st.integers(1, 20))
def test_targets_are_inputs_one_token_further_and_samples_cover_the_text(count, length):
    length = min(length, count - 1)
    split = TextSplit(np.arange(count, dtype=np.uint16), length)
    ids = np.arange(len(split))
    x, y = read(split, ids), split.targets(ids)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(x.flatten(), torch.arange(len(split) * length))
    assert torch.equal(y, x + 1)
    assert count - len(split) * length <= length


@pytest.mark.parametrize("name", ["digits", "topics"])
def test_splits_are_limited_to_their_first_samples(name):
    whole = load_data(name, {}, seed=0)
    part = load_data(name, {"train_samples": 20, "test_samples": 5}, seed=0)
    assert (len(part.train), len(part.test)) == (20, 5)
    for few, all_of_them in ((part.train, whole.train), (part.test, whole.test)):
        ids = np.arange(len(few))
        assert torch.equal(read(few, ids), read(all_of_them, ids))
        assert torch.equal(few.targets(ids), all_of_them.targets(ids))


# Text of one's own

TEXT = "".join(f" = Heading {i} = \n \n Some text, number {i}, of no great length; naïve.\n" for i in range(60))


@pytest.fixture
def folder(tmp_path):
    for name, size in (("train", 40), ("valid", 10), ("test", 10)):
        (tmp_path / f"{name}.txt").write_text("".join(TEXT.splitlines(keepends=True)[: 3 * size]), encoding="utf-8")
    return tmp_path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator([TEXT], vocab_size=300, show_progress=False)
    path = tmp_path_factory.mktemp("tokenizer")
    made.save(str(path / "tokenizer.json"))
    (path / "older").mkdir()
    made.save_model(str(path / "older"))  # vocab.json and merges.txt
    return path


def test_a_text_file_is_read_by_bytes_and_its_last_tenth_is_the_test(tmp_path):
    file = tmp_path / "input.txt"
    file.write_bytes(bytes(range(256)) * 10)  # any bytes, not text alone
    data = load_data("text", {"path": str(file), "length": 16}, seed=0)
    assert data.shape == DataShape((16,), "int64", 256, target_shape=(16,))
    assert (len(data.train), len(data.test)) == ((2304 - 1) // 16, (256 - 1) // 16)
    assert torch.equal(read(data.train, [1]), torch.arange(16, 32)[None])


def test_a_folder_of_text_files_may_name_others(folder):
    data = load_data("text", {"path": str(folder)}, seed=0)
    assert TEXT.encode().startswith(bytes(data.train.tokens))
    assert len(data.train.tokens) > 3 * len(data.test.tokens)
    small = load_data("text", {"path": str(folder), "train_file": "valid.txt"}, seed=0)
    assert np.array_equal(small.train.tokens, small.test.tokens)


def test_tokenizer_reads_both_file_formats(folder, tokenizer):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    data = load_data("text", {"path": str(folder), "tokenizer": str(tokenizer), "length": 8}, seed=0)
    assert data.shape == DataShape((8,), "int64", made.get_vocab_size(), target_shape=(8,))
    expected = made.encode((folder / "train.txt").read_text(encoding="utf-8")).ids
    assert data.train.tokens.tolist() == expected[: len(data.train) * 8 + 1]
    older = load_data("text", {"path": str(folder), "tokenizer": str(tokenizer / "older"), "length": 8}, seed=0)
    assert np.array_equal(older.train.tokens, data.train.tokens)


def test_special_tokens_that_are_no_text_are_refused_as_by_transformers(folder, tokenizer, tmp_path):
    shutil.copytree(tokenizer, tmp_path / "odd")
    (tmp_path / "odd" / "tokenizer_config.json").write_text(json.dumps({"eos_token": ["<|endoftext|>"]}))
    refuse(
        "text",
        {"path": str(folder), "tokenizer": str(tmp_path / "odd"), "length": 8},
        "cannot be loaded: Special token eos_token has to be",
    )


def test_wikitext2_lines_agree_between_files_and_hub(folder, tokenizer, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    options = {"tokenizer": str(tokenizer), "length": 16}
    data = load_data("wikitext2", {"path": str(folder), **options}, seed=0)
    made = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    lines = [
        line for line in (folder / "train.txt").read_text(encoding="utf-8").splitlines(keepends=True) if line.strip()
    ]
    expected = [token for line in lines for token in made.encode(line).ids]
    assert data.train.tokens.tolist() == expected[: len(data.train) * 16 + 1]

    def rows(name):  # as the hub has them: blank lines are empty rows
        lines = (folder / f"{name}.txt").read_text(encoding="utf-8").splitlines(keepends=True)
        return {"text": [line if line.strip() else "" for line in lines]}

    asked = []

    def load_dataset(*names):
        asked.append(names)
        return {"train": rows("train"), "test": rows("test")}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    hub = load_data("wikitext2", options, seed=0)
    assert asked == [("Salesforce/wikitext", "wikitext-2-v1")]
    assert np.array_equal(hub.train.tokens, data.train.tokens)
    assert np.array_equal(hub.test.tokens, data.test.tokens)


# CIFAR-10


def encode(pixels, style):
    image_library = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image_library.fromarray(pixels).save(file, style)
    return {"bytes": file.getvalue(), "path": "x"}


def write_images(path, count, style="PNG", column="img", size=32, first=0):
    rng = np.random.default_rng(first)
    pixels = rng.integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    rows = [encode(each, style) for each in pixels]
    table = {column: rows, "label": [(first + index) % 10 for index in range(count)]}
    pq.write_table(pa.table(table), path)
    return pixels


def test_cifar10_is_read_from_a_folder_whole_and_in_order(tmp_path):
    (tmp_path / "plain_text").mkdir()
    parts = [write_images(tmp_path / f"plain_text/train-0000{i}-of-00002.parquet", 6, first=6 * i) for i in range(2)]
    test = write_images(tmp_path / "plain_text/test-00000-of-00001.parquet", 5, first=20)
    data = load_data("cifar10", {"path": str(tmp_path)}, seed=0)
    assert data.shape == DataShape((3, 32, 32), "float32", 10)
    assert np.array_equal(data.train.images, np.concatenate(parts).transpose(0, 3, 1, 2))
    assert np.array_equal(data.test.images, test.transpose(0, 3, 1, 2))
    assert data.train.labels.tolist() == [*range(10), 0, 1]
    assert (data.train.augment, data.test.augment) == ("random", "none")
    assert data.train.mean == (0.4914, 0.4822, 0.4465)
    assert data.train.std == (0.2023, 0.1994, 0.2010)
    few = load_data(
        "cifar10", {"path": str(tmp_path), "train_samples": 7, "test_samples": 2, "augment": "fixed"}, seed=0
    )
    assert np.array_equal(few.train.images, data.train.images[:7])
    assert (len(few.test), few.train.augment) == (2, "fixed")


def test_cifar100_has_a_hundred_fine_labels(tmp_path):
    for name in ("train", "test"):
        write_images(tmp_path / f"{name}.parquet", 12)
        table = pq.read_table(tmp_path / f"{name}.parquet").drop_columns("label")
        fine = pa.array([97, 98, 99, *range(9)])
        pq.write_table(table.append_column("fine_label", fine), tmp_path / f"{name}.parquet")
    data = load_data("cifar100", {"path": str(tmp_path)}, seed=0)
    assert data.shape == DataShape((3, 32, 32), "float32", 100)
    assert data.train.labels.tolist()[:4] == [97, 98, 99, 0]
    assert data.train.mean == (0.5071, 0.4865, 0.4409)
    with pytest.raises(ValueError, match="a column `label`, but has img, fine_label"):
        load_data("cifar10", {"path": str(tmp_path)}, seed=0)


def test_cifar10_is_read_from_one_file_of_jpegs(tmp_path):
    pixels = write_images(tmp_path / "all.parquet", 20, style="JPEG", column="image")
    data = load_data("cifar10", {"path": str(tmp_path / "all.parquet")}, seed=0)
    assert (len(data.train), len(data.test)) == (18, 2)
    assert data.test.labels.tolist() == [8, 9]
    assert data.train.images.shape == (18, 3, 32, 32)
    assert abs(data.train.images.mean() - pixels.mean()) < 5


def test_cifar10_is_read_from_the_hub_without_a_path(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    for name, count in (("train", 6), ("test", 3)):
        write_images(tmp_path / f"{name}.parquet", count)
    local = load_data("cifar10", {"path": str(tmp_path)}, seed=0)

    def load_dataset(name):
        assert name == "uoft-cs/cifar10"
        image = datasets.Features({"img": datasets.Image(), "label": datasets.Value("int64")})
        tables = {split: pq.read_table(tmp_path / f"{split}.parquet") for split in ("train", "test")}
        return {split: datasets.Dataset(table).cast(image) for split, table in tables.items()}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    hub = load_data("cifar10", {}, seed=0)
    assert np.array_equal(hub.train.images, local.train.images)
    assert np.array_equal(hub.test.labels, local.test.labels)


# What is refused


def test_unreachable_hub_is_reported(monkeypatch):
    def load_dataset(*_):
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(
        ValueError, match=r"uoft-cs/cifar10 cannot be loaded from the hub \(ConnectionError\). Give local files with"
    ):
        load_data("cifar10", {}, seed=0)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"`datasets` is needed and cannot be imported: `pip install raysim\[hub\]`\."):
        load_data("cifar10", {}, seed=0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "digit",
            {},
            "Unknown data set 'digit'. Known: addition, brackets, cifar10, cifar100, copying, digits, hf, images, table, text, topics, "
            "wikitext2; your own is written `package.module:function`. Did you mean `digits`?",
        ),
        (
            "digits",
            {"augment": "none"},
            "Unknown option `data.augment` of `digits`. Known: data.test_samples, data.train_samples.",
        ),
        (
            "digits",
            {"train_samples": 1438},
            "`data.train_samples` must be at most the number of samples (1437), but got 1438.",
        ),
        ("digits", {"test_samples": 0}, "`data.test_samples` must be an integer of at least 1, but got 0."),
        ("topics", {"length": 0}, "`data.length` must be an integer of at least 1, but got 0."),
        ("topics", {"length": 10**6}, "`data.length` must be less than the number of tokens to train on ("),
        ("topics", {"length": "long"}, "`data.length` must be an integer of at least 1, but got 'long'."),
        ("text", {}, "`data.path` must be given with `data = 'text'`."),
        ("text", {"path": "/nowhere"}, "`data.path` must be a file or folder that exists, but got '/nowhere'."),
        ("text", {"path": 3}, "`data.path` must be the path of a file or folder, but got 3."),
        ("cifar10", {"path": "/nowhere"}, "`data.path` must be a file or folder that exists, but got '/nowhere'."),
        ("cifar10", {"augment": "some"}, "`data.augment` must be one of random, fixed, none, but got 'some'."),
        ("wikitext2", {"path": "/nowhere"}, "`data.path` must be a file or folder that exists, but got '/nowhere'."),
        (
            "wikitext2",
            {"tokenizer": "/nowhere"},
            "`data.tokenizer` must be a folder that exists or a hub name, but got '/nowhere'.",
        ),
    ],
)
def test_wrong_data_is_refused(name, options, message):
    with pytest.raises(ValueError) as error:
        load_data(name, options, seed=0)
    assert message in str(error.value)


def refuse(name, options, message):
    with pytest.raises(ValueError) as error:
        load_data(name, options, seed=0)
    assert message in str(error.value)


def test_unreachable_tokenizer_is_refused_with_folder_hint(folder, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_: None)
    with pytest.raises(ValueError) as error:
        load_data("text", {"path": str(folder), "tokenizer": "owner/nothing"}, seed=0)
    assert str(error.value).startswith(
        "`data.tokenizer` = 'owner/nothing' is a name on the hub, which does not answer ("
    )
    assert str(error.value).endswith("Give the path of a folder that holds tokenizer.json instead.")


def test_wrong_text_files_are_refused(folder, tokenizer, tmp_path_factory):
    file, path = str(folder / "train.txt"), str(folder)
    refuse(
        "text",
        {"path": file, "test_file": "a"},
        "`data.test_file` has no effect unless `data.path` is a folder, but",
    )
    refuse("wikitext2", {"path": file}, "is a file. Use `data = 'text'` for one file.")
    refuse(
        "wikitext2",
        {"train_file": "a", "tokenizer": str(tokenizer)},
        "`data.train_file` has no effect without `data.path`.",
    )
    (folder / "test.txt").unlink()
    refuse("text", {"path": path}, "holds train.txt, valid.txt. Name another with `data.test_file`.")
    (folder / "test.txt").write_bytes(b"\xff" * 100)
    refuse(
        "text",
        {"path": path, "tokenizer": str(tokenizer)},
        "`data.path` must hold UTF-8 text to be tokenised, but it does not",
    )
    empty = tmp_path_factory.mktemp("empty")
    refuse(
        "text",
        {"path": path, "tokenizer": str(empty)},
        "`data.tokenizer` must be a folder that holds tokenizer.json, but got",
    )
    (empty / "tokenizer.json").write_text("{")
    refuse("text", {"path": path, "tokenizer": str(empty)}, "cannot be loaded: ")
    refuse("text", {"path": str(empty)}, "`data.path` must hold train.txt, but")


def test_wrong_image_files_are_refused(tmp_path):
    path = {"path": str(tmp_path)}
    refuse(
        "cifar10",
        path,
        f"`data.path` must hold files train* that end in .parquet, but {str(tmp_path)!r} has no such file.",
    )
    write_images(tmp_path / "train.parquet", 3)
    refuse(
        "cifar10",
        path,
        f"`data.path` must hold files test* that end in .parquet, but {str(tmp_path)!r} has no such file.",
    )
    (tmp_path / "test.parquet").write_bytes(b"not Parquet")
    refuse("cifar10", path, "test.parquet cannot be read as Parquet: ")
    write_images(tmp_path / "test.parquet", 3, column="picture")
    refuse("cifar10", path, "must have a column `img` or `image` and a column `label`, but has picture, label.")
    pq.write_table(pa.table({"img": [1], "label": [1]}), tmp_path / "test.parquet")
    refuse("cifar10", path, "must hold {bytes, path}, but holds int64.")
    pq.write_table(pa.table({"img": [{"bytes": b"x", "path": "x"}], "label": [1]}), tmp_path / "test.parquet")
    refuse("cifar10", path, "The image number 0 under `data.path` cannot be read: it is in no known format.")
    pq.write_table(
        pa.table({"img": [encode(np.zeros((32, 32, 3), np.uint8), "PNG")], "label": [10]}), tmp_path / "test.parquet"
    )
    refuse("cifar10", path, "Column `label` must hold integers from 0 to 9.")
    write_images(tmp_path / "test.parquet", 3, size=16)
    refuse("cifar10", path, "Images to train and to test on must be of one size, but got (32, 32) and (16, 16).")
    refuse("cifar10", {"path": str(tmp_path / "test.parquet")}, "must hold 10 images or more to test on a tenth, but")
    write_images(tmp_path / "test.parquet", 3)
    refuse(
        "cifar10",
        {**path, "test_samples": 4},
        "`data.test_samples` must be at most the number of samples (3), but got 4.",
    )
    rows = [encode(np.zeros((side, 32, 3), np.uint8), "PNG") for side in (32, 16)]
    pq.write_table(pa.table({"img": rows, "label": [1, 2]}), tmp_path / "test.parquet")
    refuse("cifar10", path, "must be of one size, but number 1 is (16, 32) and the first (32, 32).")


def test_every_data_set_has_a_test():
    of_ones_own = {"hf", "images", "table"}  # in test_data_of_ones_own
    of_answers = {"addition", "brackets", "copying"}  # in test_answer_data
    assert set(DATASETS) == {"digits", "topics", "text", "wikitext2", "cifar10", "cifar100", *of_ones_own, *of_answers}
