"""Shared states that an island has at hand."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from atoll.base.ids import Digest
from atoll.base.limits import MIB
from atoll.crypto.digest import BlobManifest
from atoll.features.partition_training.tensors import UpdateWithoutQuorum
from atoll.peer.config.sections import KeepSection
from atoll.runtime.storage.blob_retention import BlobRetention
from atoll.runtime.storage.private_state import PrivateState, read_private, write_private
from atoll.runtime.storage.state_files import FileStateStore
from atoll.runtime.storage.store import PeerStore
from atoll.training.exchange.layout import layout_of
from atoll.training.recipe.private_parameters import PrivateModelCopy
from atoll.training.recipe.state import initial_state
from atoll.worker.shared_states import AgreedStateCache


class TidiedMeanwhile(PeerStore):
    """The other thread tidies up the moment that a blob is on the disk."""

    tidy = threading.Thread()

    def take_in(self, path: Path, name: Digest, manifest: BlobManifest) -> None:
        super().take_in(path, name, manifest)
        self.tidy.start()
        self.tidy.join(0.5)  # it gets so long; whoever has to wait for us gets nothing done


def test_a_state_is_not_tidied_away_while_it_is_put(tmp_path: Path):
    """Once its bytes were dropped between the disk and the list: agreed on, and gone after a restart."""
    store = TidiedMeanwhile(tmp_path)
    retention = BlobRetention(store)
    store.tidy = threading.Thread(target=retention.tidy, args=(set(), 0))
    model = nn.Linear(2, 2)
    states = AgreedStateCache(FileStateStore(store, retention))
    name = states.stage(initial_state(model), layout_of(model))
    store.tidy.join()
    assert store.has_blob(name)


def test_what_verdicts_rest_on_stays_within_its_share_of_the_budget(tmp_path: Path):
    """A fourth of it, the newest first; what older states may have is less by as much."""
    store = PeerStore(tmp_path, durable=False)
    retention = BlobRetention(store, KeepSection(bytes_max=4 * MIB))
    newest, state, older, unnamed = (store.put_blob(bytes([n]) * (MIB * 2 // 5)) for n in range(4))
    retention.retain_verdicts((newest, state, older))
    retention.tidy(set(), 0)
    assert [store.has_blob(blob) for blob in (newest, state, older, unnamed)] == [True, True, False, False]


def test_what_verdicts_do_not_take_of_their_share_is_there_for_rows(tmp_path: Path):
    """Of 4 MiB a verdict rests on a tenth of one, and on what never came: nine rows of 0.4 stay, not seven."""
    store = PeerStore(tmp_path, durable=False)
    retention = BlobRetention(store, KeepSection(bytes_max=4 * MIB))
    exhibit = store.put_blob(bytes(MIB // 10))
    rows = [store.put_blob(bytes([n]) * (MIB * 2 // 5)) for n in range(10)]
    retention.retain_verdicts((Digest(bytes(32)), exhibit))
    retention.rows.hold(rows)
    retention.tidy(set(), 0)
    assert [store.has_blob(blob) for blob in (exhibit, *rows)] == [True] * 10 + [False]


def agreed_state(retention: BlobRetention, store: PeerStore, number: int) -> Digest:
    name = store.put_blob(bytes([number]) * MIB)
    with retention.adding:
        retention.add_state(name)
        retention.set_head(name)
    return name


def test_the_head_before_stays_only_where_a_restart_would_read_it(tmp_path: Path):
    store = PeerStore(tmp_path, durable=False)
    retention = BlobRetention(store, KeepSection(bytes_max=0))
    first, second, third = (agreed_state(retention, store, n) for n in range(3))
    retention.tidy(set(), 2)
    assert [store.has_blob(state) for state in (first, second, third)] == [False, True, True]
    retention.tidy(set(), 2, keeps_before=False)
    assert [store.has_blob(state) for state in (second, third)] == [False, True]


def test_older_states_go_before_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Within the limit of the settings they stay as long as two states more would fit."""
    store = PeerStore(tmp_path, durable=False)
    retention = BlobRetention(store)
    older = [agreed_state(retention, store, n) for n in range(4)]
    retention.tidy(set(), 3)
    assert all(store.has_blob(state) for state in older)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=MIB))
    retention.tidy(set(), 3, keeps_before=False)
    assert sum(map(store.has_blob, older)) == 3 and store.has_blob(older[-1])


def test_a_private_file_is_good_for_its_vertex_its_model_and_whole(tmp_path: Path):
    """Everything comes back; of another model, cut off or of an older version there is nothing."""
    store, vertex, memory_F = PeerStore(tmp_path, durable=False), Digest(bytes(32)), torch.arange(10.0)
    late = UpdateWithoutQuorum(torch.ones(10), 3, 4, 8)
    kept = PrivateModelCopy(torch.full((10,), 2.0), Digest(b"s" * 32))
    write_private(store, PrivateState(vertex, memory_F, memoryview(b"inner"), b"claim", late, kept))
    (again,) = read_private(store, 10)
    assert again.vertex == vertex and torch.equal(again.memory_F, memory_F)
    assert (again.inner, again.claim) == (b"inner", b"claim")
    assert torch.equal(again.late.delta_F, late.delta_F)
    assert (again.late.since, again.late.steps, again.late.samples) == (3, 4, 8)
    assert torch.equal(again.kept.x_F, kept.x_F) and again.kept.state == kept.state
    assert read_private(store, 11) == []
    whole = bytes(store.private.read())
    for damaged in (whole[:-1], b"", b"\x84\xa6vertex"):
        store.private.write(damaged)
        assert read_private(store, 10) == []
    write_private(store, PrivateState(vertex, memory_F + 1, memoryview(b"later"), b"claim", late, kept))
    later, half = bytes(store.private.read()), len(whole) // 2
    store.private.write(later[:-half] + whole[-half:])  # written over, and half of its pages when the power went
    assert len(later) == len(whole) and read_private(store, 10) == []
    write_private(store, PrivateState(vertex))
    assert read_private(store, 10) == [PrivateState(vertex)]
    for odd_F in (torch.full((10,), torch.nan), torch.zeros(10, dtype=torch.int32)):
        for odd in (PrivateState(vertex, odd_F), PrivateState(vertex, kept=PrivateModelCopy(odd_F, vertex))):
            write_private(store, odd)
            assert read_private(store, 10) == []
    store.close()


def test_error_feedback_in_bf16_comes_back_from_a_private_file_with_an_odd_number_of_values(tmp_path: Path):
    store, memory = PeerStore(tmp_path, durable=False), torch.randn(11).bfloat16()
    kept = PrivateModelCopy(torch.full((11,), 2.0), Digest(b"s" * 32))
    write_private(store, PrivateState(Digest(bytes(32)), memory, memoryview(b"inner"), b"", None, kept))
    (again,) = read_private(store, 11)
    assert again.memory_F.dtype == torch.bfloat16 and torch.equal(again.memory_F, memory)
    assert torch.equal(again.kept.x_F, kept.x_F) and again.inner == b"inner"
    write_private(store, PrivateState(Digest(bytes(32)), torch.full((11,), torch.inf).bfloat16()))
    assert read_private(store, 11) == []
    store.close()


def test_the_file_of_a_state_that_went_is_written_over_unless_somebody_reads_it(tmp_path: Path):
    """A new file costs the kernel ten times as much. Whoever has the old one, open or linked, keeps what it has."""
    store, data = PeerStore(tmp_path), [bytes([k]) * 2 * MIB for k in range(4)]
    first = store.put_blob(data[0])
    file = store.blob_path(first).stat().st_ino
    store.drop_blobs(set())
    second = store.put_blob(data[1][:MIB], b"and less")
    assert store.blob_path(second).stat().st_ino == file and not store.has_blob(first)
    assert store.read_blob(second) == data[1][:MIB] + b"and less"
    with store.blob_path(second).open("rb") as reader:
        store.drop_blobs(set())
        third = store.put_blob(data[2])
        assert store.blob_path(third).stat().st_ino != file and store.read_blob(third) == data[2]
        assert reader.read() == data[1][:MIB] + b"and less"
    backup = tmp_path / "backup"
    backup.hardlink_to(store.blob_path(third))
    store.drop_blobs(set())
    fourth = store.put_blob(data[3])
    assert backup.read_bytes() == data[2]
    store.put_blob(data[0])
    store.drop_blobs({fourth})
    store.close()
    assert (tmp_path / "blobs" / "spare.new").exists()
    (tmp_path / "blobs" / "half.tmp").touch()  # written by a process that was killed
    again = PeerStore(tmp_path)
    assert sorted(path.suffix for path in (tmp_path / "blobs").iterdir()) == ["", ".manifest"]
    again.close()
