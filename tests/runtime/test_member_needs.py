"""What a member needs for a model is told and refused in words; vectors in files behave as those in memory."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from atoll.base.errors import RunFailedError, UsageError
from atoll.base.limits import MIB
from atoll.runtime.embed import member_needs
from atoll.runtime.embed.member_needs import check_room, needs_of
from atoll.runtime.network.buffer_pool import BufferPool
from atoll.runtime.network.file_memory import file_memory, unnamed_file
from atoll.training.exchange.layout import ModelLayout, TensorSlot

GB = 10**9


def layout(values: int) -> ModelLayout:
    return ModelLayout((TensorSlot("x", "parameter", (values,), "float32", 0),), values, values, 0)


def test_a_large_model_is_told_and_what_cannot_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One gigabyte in fp32; a small model is no matter. Files that a member has already count as room."""
    needs = needs_of(layout(GB // 4), "memory")
    assert needs.memory_bytes - needs_of(layout(GB // 4), "memory", "bf16").memory_bytes == pytest.approx(0.4 * GB)
    assert check_room(needs_of(layout(4096), "memory"), tmp_path, tmp_path) == ""
    monkeypatch.setattr(member_needs, "free_memory_bytes", lambda: 4 * GB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=9 * GB))
    assert "250 M values" in check_room(needs, tmp_path, tmp_path)
    monkeypatch.setattr(member_needs, "free_memory_bytes", lambda: 2 * GB)
    with pytest.raises(UsageError, match=r"2\.0 GB of memory free") as refused:
        check_room(needs, tmp_path, tmp_path)
    assert refused.value.code == "E-ATT-16" and 'state_memory="disk"' in refused.value.fix
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=8 * GB))
    disk = needs_of(layout(GB // 4), "disk")
    with pytest.raises(UsageError, match=r"has 8\.0 GB free"):
        check_room(disk, tmp_path, tmp_path)
    with (tmp_path / "private.bin").open("wb") as file:
        file.truncate(5 * GB)
    assert check_room(disk, tmp_path, tmp_path)


def test_vectors_in_files_are_reused_and_leave_nothing_behind(tmp_path: Path):
    pool = BufferPool(allocate=file_memory(tmp_path))
    first = pool(2 * MIB)
    first[:] = b"\1" * (2 * MIB)
    del first
    assert bytes(pool(2 * MIB)[:3]) == b"\1\1\1", "the same memory again"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_file_is_an_error_in_words(tmp_path: Path):
    with pytest.raises(RunFailedError, match=r"cannot make room for 0\.00 GB"):
        unnamed_file(tmp_path / "none", MIB)
