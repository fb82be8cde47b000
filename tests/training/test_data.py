import gzip
import os
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from atoll.base.errors import PeerFault
from atoll.training.data import (
    batch,
    cursor_after,
    data_blob,
    data_digest,
    data_from_blob,
    library_files,
    load_data,
    position_after,
    validation,
)
from atoll.training.data.images import ImageDataset
from atoll.training.data.order import permute, places
from atoll.training.data.text import TextDataset, load_text
from atoll.training.exchange.tensorfile import dump

T = 8


def numbered(windows: int) -> TextDataset:
    """Tokens that are their own positions, so that a window says where it was cut."""
    tokens = np.arange((windows + 1) * T + 1, dtype=np.int32)
    return TextDataset(tokens, tokens[: 4 * T])


def test_a_file_that_is_no_text_is_refused(tmp_path: Path):
    """A picture once trained as text. Text in any 8-bit encoding is text."""
    picture, words = tmp_path / "big.png", tmp_path / "words.txt"
    picture.write_bytes(np.random.default_rng(0).bytes(20_000))
    with pytest.raises(ValueError, match=r"big\.png is no text"):
        load_text(picture)
    words.write_bytes("Слово за словом\n".encode("cp1251") * 1000)
    assert len(load_text(words).train) > 10_000


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**63))
@settings(max_examples=60)
def test_the_order_is_a_permutation_that_needs_no_table(n, seed):
    keys = np.full(n, seed, dtype=np.uint64)
    assert sorted(permute(np.arange(n), n, keys).tolist()) == list(range(n))


def test_the_order_is_the_same_for_ever():
    """Frozen: a peer on another machine or next year's numpy draws the very same samples."""
    epochs, index = places(np.arange(995, 1005), 1000, seed=7)
    assert epochs.tolist() == [0] * 5 + [1] * 5
    assert index.tolist() == [491, 508, 939, 310, 5, 74, 562, 871, 702, 204]


def test_peers_see_disjoint_windows_and_together_every_window_once():
    """Three shards over one epoch of 300 windows: 300 different beginnings."""
    data = numbered(300)
    seen = []
    for shard in range(3):
        inputs, targets = batch(data, shard, 3, 0, 100, T, seed=1)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        seen += inputs[:, 0].tolist()
    assert len(set(seen)) == 300


def test_a_batch_depends_on_its_arguments_and_on_nothing_else():
    """In one piece or in two, with torch's global generator anywhere: the same samples."""
    data = numbered(50)
    whole, _ = batch(data, 0, 2, 10, 6, T, seed=3)
    torch.manual_seed(99)
    pieces = [batch(data, 0, 2, cursor, 3, T, seed=3)[0] for cursor in (10, 13)]
    assert torch.equal(whole, torch.cat(pieces))


def test_every_epoch_has_another_order_and_other_borders():
    data = numbered(64)
    first, second = (batch(data, 0, 1, cursor, 64, T, seed=1)[0][:, 0] for cursor in (0, 64))
    assert first.tolist() != second.tolist()
    assert {int(start) % T for start in first} != {int(start) % T for start in second}


def test_a_change_of_membership_repeats_nothing():
    """Two peers take 20 samples each, then three go on from position 40: all windows differ."""
    data = numbered(200)
    seen = [batch(data, shard, 2, 0, 20, T, seed=1)[0][:, 0] for shard in range(2)]
    cursor = cursor_after(40, 3)
    seen += [batch(data, shard, 3, cursor, 20, T, seed=1)[0][:, 0] for shard in range(3)]
    starts = torch.cat(seen).tolist()
    assert len(set(starts)) == len(starts) == 100


def test_however_often_the_membership_changes_nothing_is_repeated():
    """Members come and go between any two rounds, so a round seldom begins where it was asked to."""
    data, position, seen = numbered(600), 0, []
    for shards in (3, 2, 5, 4, 4, 3, 7, 1, 6):
        cursor = cursor_after(position, shards)
        seen += [batch(data, shard, shards, cursor, 7, T, seed=1)[0][:, 0] for shard in range(shards)]
        position = position_after(position, shards, 7)
    starts = torch.cat(seen).tolist()
    assert len(set(starts)) == len(starts)
    assert position - len(starts) < 9 * 7  # fewer than `shards` are skipped at each change


def test_the_standard_library_is_a_corpus_that_travels_as_a_blob():
    """Its digest is the blob's, and the blob gives the same batches back."""
    data = load_data("stdlib")
    assert len(data.train) > 5_000_000 and len(data.validation) > 200_000
    again = data_from_blob(data_blob(data))
    assert data_digest(again) == data_digest(data)
    assert torch.equal(batch(data, 1, 4, 77, 4, 64, seed=0)[0], batch(again, 1, 4, 77, 4, 64, seed=0)[0])


def test_packages_beside_the_standard_library_are_none_of_it_and_are_not_walked_through(
    tmp_path: Path, monkeypatch
):
    """Half a second of every start where many are installed."""
    for name in ("b.py", "a/c.py", "a/test/t.py", "site-packages/torch/nn.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    looked_into, look = list[str](), os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder: (looked_into.append(Path(folder).name), look(folder))[1])
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    assert library_files() == {"a/c.py": tmp_path / "a/c.py", "b.py": tmp_path / "b.py"}
    assert looked_into == [tmp_path.name, "a"]


def test_validation_is_the_same_every_time_and_never_training_text(tmp_path: Path):
    """Every line of the file is unlike the others, so a shared window would be seen."""
    path = tmp_path / "book.txt"
    path.write_text("\n".join(f"line {i * i} of the book" for i in range(20_000)))
    data = load_data(str(path))
    first = [inputs for inputs, _ in validation(data, 64, 16, 16)]
    second = [inputs for inputs, _ in validation(data, 64, 16, 16)]
    assert len(first) == 4 and all(map(torch.equal, first, second))
    assert 0.03 < len(data.validation) / (len(data.train) + len(data.validation)) < 0.08


def test_a_folder_of_texts_is_split_by_file(tmp_path: Path):
    for index in range(200):
        (tmp_path / f"{index}.txt").write_text(f"{index:04}" * 50)
    data = load_data(str(tmp_path))
    sides = [{bytes(side).decode()[i : i + 4] for i in range(0, len(side), 201)} for side in data]
    assert sides[0] and sides[1] and not sides[0] & sides[1]


def test_token_files_stay_on_disk(tmp_path: Path):
    np.save(tmp_path / "tokens.npy", np.arange(5000, dtype=np.uint16))
    np.arange(5000, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    for name in ("tokens.npy", "tokens.bin"):
        data = load_data(str(tmp_path / name))
        assert isinstance(data.train, np.memmap) and len(data.train) == 4500
        assert int(batch(data, 0, 1, 0, 4, T, seed=0)[0].max()) < 4500


def idx(array: np.ndarray) -> bytes:
    return b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def test_mnist_is_read_from_npz_and_from_idx_alike(tmp_path: Path):
    """The four arrays, once in one npz, once as idx files of which one is compressed."""
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (40, 28, 28), dtype=np.uint8)
    labels = np.arange(40, dtype=np.uint8) % 10
    arrays = {"x_train": images, "y_train": labels, "x_test": images[:9], "y_test": labels[:9]}
    np.savez(tmp_path / "mnist.npz", **arrays)
    folder = tmp_path / "idx"
    folder.mkdir()
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
    (folder / "train-labels-idx1-ubyte").write_bytes(idx(labels))
    (folder / "t10k-images-idx3-ubyte").write_bytes(idx(images[:9]))
    (folder / "t10k-labels-idx1-ubyte").write_bytes(idx(labels[:9]))
    one, other = load_data(str(tmp_path / "mnist.npz")), load_data(str(folder))
    assert isinstance(one, ImageDataset) and data_digest(one) == data_digest(other)
    pixels, found = batch(one, 0, 1, 0, 40, 0, seed=2)
    assert sorted(found.tolist()) == sorted(labels.tolist()) and 0 <= float(pixels.min()) <= 1
    index = int((torch.from_numpy(images).float() / 255 - pixels[0]).abs().sum((1, 2)).argmin())
    assert int(found[0]) == labels[index]


def pictures(folder: Path, *names: str, size: tuple[int, int] = (12, 10), mode: str = "L", shade: int = 40) -> None:
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        color = shade + number if mode == "L" else (shade + number, 0, 200)
        Image.new(mode, size, color).save(path)


def test_a_folder_per_class_is_images(tmp_path: Path):
    """Forty cats darker than forty dogs, gray and of one size: kept as they are, split by name, labels by class."""
    pictures(tmp_path, *(f"cat/{i}.png" for i in range(40)))
    pictures(tmp_path, *(f"dog/{i}.png" for i in range(40)), shade=140)
    (tmp_path / "cat" / "README.md").write_text("not a picture")
    data = load_data(str(tmp_path))
    assert isinstance(data, ImageDataset) and data.train_images.shape[1:] == (10, 12)
    assert len(data.train_labels) + len(data.validation_labels) == 80
    assert set(data.train_labels) == set(data.validation_labels) == {0, 1}
    for images, labels in (data[:2], data[2:]):
        assert ((images[:, 0, 0] >= 140) == labels).all()
    trained, held_out = (
        {(int(i[0, 0]), int(n)) for i, n in zip(*side, strict=True)} for side in (data[:2], data[2:])
    )
    assert not trained & held_out, "no picture is on both sides"
    again = data_from_blob(data_blob(data))
    assert data_digest(again) == data_digest(data)


def test_pictures_of_many_sizes_are_cut_to_one_and_colour_makes_all_colour(tmp_path: Path):
    """A wide red photograph with blue ends: the middle square is all that is left of it."""
    pictures(tmp_path, "train/a/1.png", "val/a/2.png", "train/b/1.png", "val/b/1.png", size=(50, 40))
    wide = Image.new("RGB", (90, 30), (0, 0, 255))
    wide.paste((255, 0, 0), (30, 0, 60, 30))
    wide.save(tmp_path / "train/b/wide.jpg", quality=95)
    data = load_data(str(tmp_path))
    assert data.train_images.shape == (3, 32, 32, 3) and data.validation_images.shape == (2, 32, 32, 3)
    assert data.train_labels.tolist() == [0, 1, 1] and data.validation_labels.tolist() == [0, 1]
    red = data.train_images[2].astype(int)[4:28, 4:28]
    assert red[..., 0].min() > 200 and red[..., 2].max() < 60
    pixels, labels = batch(data, 0, 1, 0, 3, 0, seed=0)
    assert pixels.shape == (3, 32, 32, 3) and sorted(labels.tolist()) == [0, 1, 1]


def test_pictures_that_cannot_be_used_are_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pictures(tmp_path, "one/a/1.png", "two/a/1.png", "two/b/1.png", "tiny/a/1.png", "tiny/b/2.png", size=(4, 4))
    (tmp_path / "two/b/2.jpg").write_bytes(b"no picture")
    for name, words in (
        ("one", "has 1 classes"),
        ("two", r"2\.jpg cannot be read"),
        ("tiny", "no image is left"),
    ):
        with pytest.raises(ValueError, match=words):
            load_data(str(tmp_path / name))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ValueError, match=r"pip install pillow"):
        load_data(str(tmp_path / "two"))


def test_a_text_folder_with_a_picture_in_it_is_still_text(tmp_path: Path):
    pictures(tmp_path, "docs/img/logo.png")
    for index in range(4):
        (tmp_path / "docs" / f"{index}.md").write_text("words " * 2000)
    assert isinstance(load_data(str(tmp_path)), TextDataset)


def test_cifar_as_npz_has_colours_and_labels_in_a_column(tmp_path: Path):
    images, labels = np.zeros((6, 32, 32, 3), np.uint8), np.arange(6).reshape(6, 1)
    np.savez(tmp_path / "c.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    data = load_data(str(tmp_path / "c.npz"))
    assert data.train_images.shape == (6, 32, 32, 3) and data.train_labels.tolist() == [0, 1, 2, 3, 4, 5]


def test_data_that_cannot_be_used_is_refused_in_words(tmp_path: Path):
    short = tmp_path / "short.txt"
    short.write_text("too short")
    for source, words in ((str(tmp_path / "none"), "no data at"), (str(short), "too few")):
        with pytest.raises(ValueError, match=words):
            load_data(source)
    for name in ("a.npy", "a.npz", "a.bin", "a.safetensors"):
        for content in (b"", b"neither tokens nor tensors.."[:27]):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(
                ValueError, match=r"a\.\w+ (does not hold token numbers|is not an npz|cannot be read)"
            ):
                load_data(str(tmp_path / name))
    with pytest.raises(ValueError, match="too few for windows"):
        batch(TextDataset(np.zeros(10, np.uint8), np.zeros(10, np.uint8)), 0, 1, 0, 1, 64, seed=0)


def test_a_blob_that_is_no_data_set_is_a_fault_of_who_sent_it():
    """Well-formed tensor files with the wrong kind, shape or numbers inside."""
    row, grid = torch.zeros(9, dtype=torch.uint8), torch.zeros(3, 3, dtype=torch.uint8)
    for tensors, kind in (
        ({"train": row, "validation": row}, "images"),
        ({"train": row, "validation": grid}, "text"),
        ({"train": row, "validation": row.float()}, "text"),
        ({name: row for name in ImageDataset._fields}, "images"),
    ):
        with pytest.raises(PeerFault, match=r"neither text nor images|unusable data"):
            data_from_blob(dump(tensors, {"format": f"atoll/{kind}/1"}))
