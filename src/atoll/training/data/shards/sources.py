"""Sources of samples: lists, `datasets`, folders, memory maps and streams, as an endless row of shards.

Shard g is shard g mod S of epoch g div S. Data with a length are permuted anew in every epoch and cut into S equal
shards. A stream keeps its own shards and their order: `datasets` has one for each file. If the caller wants more,
each of them is cut into shards of every n-th sample, and a reader passes over the samples of the others.

Invariants:
- The same arguments give the same samples at every member, in every process.
- Reading may begin at any sample of a shard.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from atoll.base.ids import Digest
from atoll.crypto.digest import digest
from atoll.training.data import load_data
from atoll.training.data.images import ImageDataset, image_samples
from atoll.training.data.order import places
from atoll.training.data.text import windows_at

SHARD_SAMPLES = 1024  # of a shard if the caller names no number: a member reads at most eight of them in a round
SHARDS_MOST = 4096  # then: an epoch of them takes rounds enough to divide the work evenly
ONE_SHARD = (
    "a stream of one shard is not divided: members learn from the same samples, each in a pass of its own. If "
    "there are several members: run.data(stream, shards=n) at all of them, n twice their number"
)
log = logging.getLogger("atoll")  # messages for the user of a loop


class ShardSource(Protocol):
    name: Digest  # of what all members must have in common

    def read(self, shard: int, first: int) -> Iterator[tuple[Any, bool]]:
        """(sample, whether it is the last of its shard), from number `first` on."""
        ...


class RandomAccessSource:
    """Data with a length and an index, in a seeded permutation per epoch."""

    def __init__(self, items: Any, shards: int, seed: int, shuffle: bool) -> None:
        self.items, self.length, self.seed, self.shuffle = items, len(items), seed, shuffle
        if self.length < 1:
            raise ValueError("the data set is empty")
        self.shards = shards or min(SHARDS_MOST, max(1, self.length // SHARD_SAMPLES))
        if self.shards > self.length:
            raise ValueError(f"{self.shards} shards of {self.length} samples")
        self.name = _name("mapped", self.length, self.shards, seed, shuffle)

    def read(self, shard: int, first: int) -> Iterator[tuple[Any, bool]]:
        epoch, number = divmod(shard, self.shards)
        begin, end = (self.length * (number + k) // self.shards for k in (0, 1))
        indices = np.arange(begin + first, end, dtype=np.int64)
        if self.shuffle:
            indices = places(epoch * self.length + indices, self.length, self.seed)[1]
        for position, index in enumerate(indices.tolist(), begin + first):
            yield self.items[index], position + 1 == end


class StreamSource:
    """A stream; `datasets.IterableDataset` has shards and skips, any other iterable is one shard from its start."""

    def __init__(self, stream: Iterable[Any], shards: int = 0) -> None:
        self.stream: Any = stream
        known = getattr(stream, "num_shards", getattr(stream, "n_shards", 1))
        self.own = int(known) if hasattr(stream, "shard") else 1
        self.pieces = max(1, -(-shards // self.own))  # of each of its own shards
        self.shards = self.own * self.pieces
        if self.shards == 1 and not shards:
            log.warning(ONE_SHARD)
        self.name = _name("stream", self.shards, self.pieces)

    def read(self, shard: int, first: int) -> Iterator[tuple[Any, bool]]:
        stream: Any = self.stream
        piece, own = divmod(shard % self.shards, self.own)
        if self.own > 1:
            stream = stream.shard(num_shards=self.own, index=own)
        first = piece + first * self.pieces
        samples = iter(stream.skip(first)) if hasattr(stream, "skip") else islice(iter(stream), first, None)
        samples = islice(samples, 0, None, self.pieces)
        held = list(islice(samples, 1))  # one sample ahead, to know the last one
        while held:
            following = list(islice(samples, 1))
            yield held[0], not following
            held = following


class TokenWindows:
    """Windows of a row of tokens, (inputs (T,), targets (T,)); a memory map stays one."""

    def __init__(self, tokens: np.ndarray, length: int) -> None:
        self.tokens, self.length = tokens, length

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.length)

    def __getitem__(self, index: int) -> Any:
        inputs, targets = windows_at(self.tokens, np.array([index * self.length]), self.length)
        return inputs[0], targets[0]


class LabeledImages:
    """(image in 0…1, label), of an `ImageDataset`."""

    def __init__(self, data: ImageDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data.train_labels)

    def __getitem__(self, index: int) -> Any:
        images, labels = image_samples(self.data.train_images, self.data.train_labels, np.array([index]))
        return images[0], labels[0]


def source_of(data: Any, shards: int, seed: int, shuffle: bool, window: int) -> ShardSource:
    """The source behind what a user has. ValueError if it cannot be one."""
    if isinstance(data, str | Path):
        loaded = load_data(str(data))
        data = LabeledImages(loaded) if isinstance(loaded, ImageDataset) else loaded.train
    if isinstance(data, np.ndarray) and data.ndim == 1 and data.dtype.kind in "ui":
        if window < 1:
            raise ValueError("a row of tokens is read in windows: name their length, such as window=256")
        data = TokenWindows(data, window)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return RandomAccessSource(data, shards, seed, shuffle)
    if not hasattr(data, "__iter__") or iter(data) is data:
        raise ValueError(f"{type(data).__name__} has neither a length nor a beginning to return to")
    return StreamSource(data, shards)


def _name(*told: object) -> Digest:
    return digest(repr(told).encode())
