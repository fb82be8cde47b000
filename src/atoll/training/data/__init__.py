"""Training data: data sets, their digest, and the assignment of samples to peers.

`batch` is a pure function of (data, shard, shards, cursor, …): the position in the data is one integer. Samples are
numbered by a seeded permutation per epoch; shard s of n takes the positions p = cursor * n + s. Every epoch has its
own permutation and, for text, its own window borders.
Invariants:
- Peers see disjoint data, and within one epoch no sample is used twice, while `shards` stays the same. A change of
  `shards` starts at `cursor_after(position, shards)`, and the position then follows `position_after`, which repeats
  nothing and skips fewer than `shards` samples.
- A round without counted updates leaves the position unchanged. Its samples are dealt out again, and count twice
  only as far as error feedback or live parameters keep the round's steps.
- torch's and Python's generators are never used, since their streams differ between versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest
from atoll.crypto.digest import blob_id, manifest_of
from atoll.training.data.images import ImageDataset, image_samples, images_problem, load_images
from atoll.training.data.order import places
from atoll.training.data.pictures import has_images, load_pictures
from atoll.training.data.records import COLUMN, has_records, load_records
from atoll.training.data.text import (
    NUMBERED,
    TextDataset,
    enough_to_split,
    held_out,
    joined,
    library_files,
    load_text,
    standard_library,
    text_files,
    text_problem,
    text_samples,
    text_windows,
    windows_at,
)
from atoll.training.data.tokens import tokenize
from atoll.training.exchange.tensorfile import dump, load

Data = TextDataset | ImageDataset
STDLIB = "stdlib"


def load_data(source: str, tokenizer: bytes = b"", column: str = COLUMN) -> Data:
    """Load a data set. ValueError if it cannot be read.

    `source`: `stdlib`, a blob of `data_blob`, a text file or folder, records with a text `column` (JSON lines,
    Parquet, saved data sets), `.npy`/`.bin` tokens, images as npz or idx, or images in a folder per class.
    `tokenizer`: bytes of a `tokenizer.json`; empty: text becomes bytes.
    """
    try:
        return _loaded(source, tokenizer, column)
    except PeerFault as why:
        raise ValueError(f"{source} cannot be read: {why.what}") from why
    except (OSError, EOFError, BadZipFile) as why:
        raise ValueError(f"{source} cannot be read: {why}") from why


def _loaded(source: str, tokenizer: bytes, column: str) -> Data:
    if source == STDLIB and not tokenizer:
        return standard_library()
    path = Path(source).expanduser()
    if source != STDLIB and not path.exists():
        raise ValueError(f"no data at {path}; name a file or folder, or {STDLIB!r} for the built-in text")
    if tokenizer:
        return tokenize(*_documents(source, path, column), tokenizer)
    if path.suffix == ".safetensors":
        return data_from_blob(path.read_bytes())
    if path.suffix == ".npz" or "idx3" in path.name or any(path.glob("*idx3*")):
        return load_images(path)
    if path.is_dir() and has_images(path):
        return load_pictures(path)
    if has_records(path):
        return TextDataset(*map(joined, load_records(path, column)))
    return load_text(path)


def _documents(source: str, path: Path, column: str) -> tuple[Iterable[str], Iterable[str] | None]:
    """The texts of both sides; None if the validation side must be split off the training side."""
    if source != STDLIB:
        arrays = path.suffix in (*NUMBERED, ".safetensors", ".npz") or "idx3" in path.name
        if arrays or (path.is_dir() and (any(path.glob("*idx3*")) or has_images(path))):
            raise ValueError(f"{path} is not text, so a tokenizer cannot read it; leave out data.tokenizer")
        if has_records(path):
            return load_records(path, column)
        if not path.is_dir():
            return [path.read_text("utf-8", "replace")], None
    files = library_files() if source == STDLIB else text_files(path)
    texts = {name: file.read_text("utf-8", "replace") for name, file in files.items()}
    if not enough_to_split(files):
        return texts.values(), None
    sides: tuple[list[str], list[str]] = [], []
    for name, text in texts.items():
        sides[held_out(name)].append(text)
    return sides


def data_blob(data: Data) -> bytes:
    """The whole data set as one blob that a joiner can download by its id."""
    match data:
        case TextDataset():
            train, validation = _as_tensor(data.train), _as_tensor(data.validation)
            return dump({"train": train, "validation": validation}, {"format": "atoll/text/1"})
        case ImageDataset():
            arrays = {name: _as_tensor(getattr(data, name)) for name in ImageDataset._fields}
            return dump(arrays, {"format": "atoll/images/1"})


def data_from_blob(blob: bytes) -> Data:
    """The data set in a blob; its arrays are views. PeerFault if the bytes are no data set."""
    tensors, metadata = load(blob)
    arrays = {name: value.numpy() for name, value in tensors.items()}
    kind = {"atoll/text/1": TextDataset, "atoll/images/1": ImageDataset}.get(metadata.get("format", ""))
    if kind is None or set(arrays) != set(kind._fields):
        raise PeerFault("", f"a blob of {sorted(arrays)} is neither text nor images")
    data = kind(**arrays)
    problem = text_problem(data) if isinstance(data, TextDataset) else images_problem(data)
    if problem:
        raise PeerFault("", f"unusable data: {problem}")
    return data


def data_digest(data: Data) -> Digest:
    """Blob id of the data set; genesis names it."""
    return blob_id(manifest_of(data_blob(data)))


def batch(
    data: Data, shard: int, shards: int, cursor: int, size: int, seq_len: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Samples cursor … cursor + size of one shard: (inputs, targets).

    Text: (B, T) and (B, T); images: (B, H, W) or (B, H, W, 3) and (B,). The next cursor is cursor + size.
    """
    assert 0 <= shard < shards and cursor >= 0
    positions_B = (cursor + np.arange(size, dtype=np.int64)) * shards + shard
    return samples_at(data, positions_B, seq_len, seed)


def samples_at(data: Data, positions_B: np.ndarray, seq_len: int, seed: int) -> tuple[Tensor, Tensor]:
    """The samples at these positions of the run's order, in the shapes of `batch`."""
    match data:
        case TextDataset():
            return text_samples(data.train, positions_B, seq_len, seed)
        case ImageDataset():
            epoch_B, index_B = places(positions_B, len(data.train_labels), seed)
            del epoch_B  # images have no borders that could move between epochs
            return image_samples(data.train_images, data.train_labels, index_B)


def cursor_after(position: int, shards: int) -> int:
    """Cursor from which `shards` peers continue after `position` samples of the run were handed out."""
    return -(-position // shards)


def position_after(position: int, shards: int, taken: int) -> int:
    """Samples of the run handed out after `shards` peers took `taken` each from `position` on.

    Counted from their cursor, which may be up to `shards` further, so that a change of `shards` repeats no sample.
    """
    return (cursor_after(position, shards) + taken) * shards if taken else position


def epoch_samples(data: Data, seq_len: int) -> int:
    """Number of samples per epoch."""
    return text_windows(data.train, seq_len) if isinstance(data, TextDataset) else len(data.train_labels)


def validation(data: Data, samples: int, size: int, seq_len: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches over the same `samples` validation samples every time, spread evenly over the held-out part."""
    match data:
        case TextDataset():
            last = len(data.validation) - seq_len - 1
            if last < 0:
                raise ValueError(f"the validation text is shorter than one window of {seq_len + 1}")
            for index in _spread(last + 1, samples, size):
                yield windows_at(data.validation, index, seq_len)
        case ImageDataset():
            for index in _spread(len(data.validation_labels), samples, size):
                yield image_samples(data.validation_images, data.validation_labels, index)


def all_held_out(data: Data) -> Data:
    """The same data, all of it for validation: canaries are not trained on."""
    match data:
        case TextDataset():
            return TextDataset(data.train[:0], np.concatenate([data.train, data.validation]))
        case ImageDataset():
            images = np.concatenate([data.train_images, data.validation_images])
            labels = np.concatenate([data.train_labels, data.validation_labels])
            return ImageDataset(data.train_images[:0], data.train_labels[:0], images, labels)


def _spread(available: int, samples: int, size: int) -> Iterator[np.ndarray]:
    samples = min(samples, available)
    index = np.arange(samples, dtype=np.int64) * available // samples
    for at in range(0, samples, size):
        yield index[at : at + size]


def _as_tensor(array: np.ndarray) -> Tensor:
    if array.dtype == np.uint16:  # the tensor file has no uint16; 32 bits hold every vocabulary
        array = array.astype(np.int32)
    return torch.from_numpy(np.ascontiguousarray(array))
