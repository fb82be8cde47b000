"""Conformance of every `StateStore`: the same tests over files and memory, against a dictionary."""

from __future__ import annotations

import shutil
import tempfile
import tracemalloc
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from torch import nn

from atoll.base.ids import Digest
from atoll.base.limits import BLOB_CHUNK, MIB
from atoll.crypto.digest import blob_id, manifest_of
from atoll.peer.config.sections import KeepSection
from atoll.runtime.storage import store as store_module
from atoll.runtime.storage.blob_retention import BlobRetention
from atoll.runtime.storage.state_files import FileStateStore
from atoll.runtime.storage.store import PeerStore
from atoll.training.exchange.layout import layout_of
from atoll.training.recipe.state import SharedState, initial_state
from atoll.worker.shared_states import AgreedStateCache
from atoll.worker.state_store import MemoryStateStore, MissingStateError, StateStore, stage

STAGED_MOST = 3  # newest staged states that stay beside the head


class StorePlace(Protocol):
    """Where the states of one peer lie, across crashes."""

    states: StateStore

    def crash(self) -> None: ...
    def tidy(self) -> None: ...
    def close(self) -> None: ...


class FilePlace:
    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or Path(tempfile.mkdtemp())
        self._open()

    def _open(self) -> None:
        self.store = PeerStore(self.folder, durable=False)
        self.retention = BlobRetention(self.store, KeepSection(newest=0, every_rounds=1000, bytes_max=0))
        self.states: StateStore = FileStateStore(self.store, self.retention)

    def crash(self) -> None:
        self.store.close()
        self._open()

    def tidy(self) -> None:
        self.retention._kept_since.clear()  # a minute has passed
        self.retention._replaced.clear()
        self.retention.tidy(set(), 0)

    def close(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)


class MemoryPlace:
    def __init__(self) -> None:
        self.disk: dict[Digest, bytes] = {}
        self.newest: OrderedDict[Digest, None] = OrderedDict()
        self._open()

    def _open(self) -> None:
        self.states: StateStore = MemoryStateStore(self.disk)

    def crash(self) -> None:
        self._open()

    def tidy(self) -> None:
        """As a virtual worker does: the head and the newest stay."""
        for name in list(self.disk)[: -STAGED_MOST - 1]:
            if name != self.states.head:
                del self.disk[name]

    def close(self) -> None:
        pass


class StateStoreMachine(RuleBasedStateMachine):
    """`known` is every state ever staged; `owed` are those that the store must still have."""

    place_of: type[FilePlace] | type[MemoryPlace]

    def __init__(self) -> None:
        super().__init__()
        self.place: StorePlace = self.place_of()
        self.known: dict[Digest, bytes] = {}
        self.views: dict[Digest, memoryview] = {}
        self.staged: OrderedDict[Digest, None] = OrderedDict()
        self.head: Digest | None = None

    def teardown(self) -> None:
        self.place.close()

    @rule(
        seed=st.integers(0, 5),
        size=st.sampled_from((0, 1, 1000, BLOB_CHUNK, BLOB_CHUNK + 7)),
        cut=st.integers(1, 3),
    )
    def stage(self, seed: int, size: int, cut: int) -> None:
        data = bytes([seed]) * size
        step = size // cut + 1
        draft = self.place.states.draft(size)
        for at in reversed(range(0, size, step)):
            draft.write(at, data[at : at + step])
        name, view = draft.finish()
        assert name == blob_id(manifest_of(data)) and view == data and view.readonly
        self.known[name] = data
        self.staged[name] = None
        self.staged.move_to_end(name)

    @rule(written=st.integers(0, 3))
    def abort(self, written: int) -> None:
        """Computing fails: nothing is there, and the rest stays."""
        draft, piece = self.place.states.draft(21000), b"aborted" * 1000
        for at in range(written):
            draft.write(at * len(piece), piece)
        draft.drop()
        assert not self.place.states.is_recoverable(blob_id(manifest_of(3 * piece)))

    @rule(pick=st.integers(0, 30))
    def commit(self, pick: int) -> None:
        name = self.pick(pick)
        if self.place.states.is_recoverable(name):
            self.place.states.commit(name)
            self.head = name
            self.staged.clear()
        else:
            with pytest.raises(MissingStateError):
                self.place.states.commit(name)

    @rule(pick=st.integers(0, 30), begin=st.integers(0, 1100), size=st.integers(0, BLOB_CHUNK + 9))
    def read(self, pick: int, begin: int, size: int) -> None:
        name = self.pick(pick)
        if self.place.states.is_recoverable(name):
            view = self.place.states.view(name)
            self.views[name] = view
            assert view[begin : begin + size] == self.known[name][begin : begin + size]
            assert len(view) == len(self.known[name]) and view.readonly
        else:
            assert name not in self.owed()
            with pytest.raises(MissingStateError):
                self.place.states.view(name)

    @rule()
    def crash(self) -> None:
        """All that was owed is there again; then a start commits the head that its vertices name."""
        self.place.crash()
        self.check_owed()
        self.staged.clear()
        if self.head is not None:
            self.place.states.commit(self.head)

    @rule()
    def tidy(self) -> None:
        self.place.tidy()

    @invariant()
    def check_views(self) -> None:
        """A view stays what it was, also if its state was dropped and its file is written over."""
        assert all(view == self.known[name] for name, view in self.views.items())

    @invariant()
    def check_owed(self) -> None:
        assert all(self.place.states.is_recoverable(name) for name in self.owed())

    def owed(self) -> set[Digest]:
        return {*list(self.staged)[-STAGED_MOST:], *({self.head} - {None})}

    def pick(self, pick: int) -> Digest:
        names = [*self.known, Digest(b"?" * 32)]
        return names[pick % len(names)]


class FileMachine(StateStoreMachine):
    place_of = FilePlace


class MemoryMachine(StateStoreMachine):
    place_of = MemoryPlace


for machine in (FileMachine, MemoryMachine):
    machine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
test_files, test_memory = FileMachine.TestCase, MemoryMachine.TestCase


@pytest.fixture(params=[FilePlace, MemoryPlace])
def place(request: pytest.FixtureRequest) -> Iterator[StorePlace]:
    made = request.param()
    yield made
    made.close()


def test_tensors_come_back_bit_for_bit_and_the_cache_holds_one_state(place: StorePlace):
    """Staged: at hand. Superseded: viewed again, the same bits. Held elsewhere: the same tensors."""
    layout = layout_of(model := nn.Linear(300, 1200))
    cache, first = AgreedStateCache(place.states), initial_state(model)
    second = SharedState(first.anchor_F + 1, first.momentum_P, first.counters_K, round=1)
    one, two = cache.stage(first, layout), cache.stage(second, layout)
    assert torch.equal(cache.commit(one, layout).anchor_F, first.anchor_F)
    bits = first.anchor_F.clone()
    del first, second
    read = cache.load(two, layout)
    assert read.round == 1 and torch.equal(read.anchor_F, bits + 1) and cache.load(two, layout) is read
    assert cache.find(Digest(b"?" * 32), layout) is None
    with pytest.raises(MissingStateError):
        cache.commit(Digest(b"?" * 32), layout)


def test_a_state_is_staged_span_by_span(tmp_path: Path):
    """64 MiB, a MiB at a time: files need room for one span."""
    place = FilePlace(tmp_path)
    tracemalloc.start()
    draft = place.states.draft(64 * MIB)
    for at in range(64):
        draft.write(at * MIB, bytes([at]) * MIB)
    name, view = draft.finish()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 4 * MIB and len(view) == 64 * MIB and view == place.states.view(name)
    place.store.close()


def test_a_state_is_viewed_in_the_memory_of_one_chunk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Also by a process that has never seen the file, and if the stored manifest is lost."""
    place = FilePlace(tmp_path)
    name = stage(place.states, *(bytes([at]) * MIB for at in range(32)))
    asked: list[int] = []
    for allocator in ("fresh", "for_once"):
        make = getattr(store_module, allocator)
        monkeypatch.setattr(store_module, allocator, lambda size, make=make: asked.append(size) or make(size))
    for _ in range(2):
        place.crash()
        tracemalloc.start()
        assert bytes(place.states.view(name)[5 * MIB - 1 : 5 * MIB + 1]) == b"\4\5"
        assert place.states.is_recoverable(name)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 4 * MIB and max(asked) <= BLOB_CHUNK
        place.store.blob_path(name).with_suffix(".manifest").unlink()
    place.store.close()


@pytest.mark.parametrize("at", [0, BLOB_CHUNK + 5, 3 * BLOB_CHUNK - 1])
def test_a_damaged_state_is_never_viewed(at: int, tmp_path: Path):
    """It counts as missing, so it is fetched."""
    place = FilePlace(tmp_path)
    name = stage(place.states, *[b"s" * BLOB_CHUNK] * 3)
    path = place.store.blob_path(name)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(MissingStateError):
        place.states.view(name)
    assert not place.states.is_recoverable(name) and not path.exists()
    place.store.close()
