"""Groups that end: closed, forked, killed, by a defect or before they began. Nothing of them is left behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from grouped import PATIENCE_S, found

import atoll.reduce
from atoll.base.errors import NetworkError, RefusedError, RunFailedError, UsageError
from atoll.base.machine import Effect, Event, TaskDone
from atoll.runtime.allreduce.call import ReduceCall
from atoll.runtime.allreduce.driver import GroupDriver
from atoll.runtime.allreduce.flatten import CudaStreamPool, FlatTensors

pytestmark = [pytest.mark.net]


def test_a_defect_of_ours_ends_the_calls_that_wait(monkeypatch: pytest.MonkeyPatch):
    """The machine breaks over the answer to some work: the user hears it at once, and can close the group."""
    group = atoll.reduce.found(peers=1)
    group.all_reduce(torch.ones(3))
    machine = group._host.machine
    handle = machine.handle

    def breaks(event: Event, now: float) -> list[Effect]:
        assert not isinstance(event, TaskDone), "a promise to ourselves"
        return handle(event, now)

    monkeypatch.setattr(machine, "handle", breaks)
    with pytest.raises(RunFailedError, match=r"E-INT-01 .* a promise to ourselves"):
        group.all_reduce(torch.ones(3), timeout_s=PATIENCE_S)
    group.close()


def test_a_closed_group_leaves_nothing_behind():
    async def tasks() -> int:
        return len(asyncio.all_tasks())

    group = atoll.reduce.found(peers=1)
    folder = group._host.folder
    group.all_reduce(torch.ones(3))
    assert folder.exists()
    thread = group._thread
    group.close()
    assert not folder.exists() and not thread.is_alive()


def test_a_call_that_another_thread_closes_the_group_under_is_told(monkeypatch: pytest.MonkeyPatch):
    """Before its loop ends, and after: no member waits for ever for a call that no member will look at."""
    group, stop, late = atoll.reduce.found(), GroupDriver.stop, ReduceCall(torch.ones(3), 1, "fp32")
    fused = CudaStreamPool.fused

    async def and_then_it_comes(host: GroupDriver) -> None:
        await stop(host)
        host.call([late])

    def closed_meanwhile(*given: object) -> FlatTensors:
        group.close()
        return fused(*given)

    monkeypatch.setattr(GroupDriver, "stop", and_then_it_comes)
    monkeypatch.setattr(CudaStreamPool, "fused", closed_meanwhile)
    with pytest.raises(UsageError, match="E-RED-01"):
        group.all_reduce(torch.ones(3))
    with pytest.raises(RunFailedError, match="E-RED-04"):
        late.future.result(0)


def test_a_member_that_cannot_come_in_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No open door, no folder, no thread: whether the address is no good, the ticket, or no member is there."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    threads = threading.active_count()
    with pytest.raises((UsageError, NetworkError)):
        found(listen=("/ip4/192.0.2.1/tcp/1",))
    with pytest.raises((RefusedError, UsageError), match="E-TKT"):
        atoll.reduce.join("ATOLL1:nonsense")
    with atoll.reduce.found() as over:
        pass
    monkeypatch.setattr("atoll.runtime.allreduce.api.MEET_S", 0.5)
    with pytest.raises(NetworkError, match=r"E-RED-07 (.*\n)+.*no member can be reached: no peer listens at"):
        atoll.reduce.join(over.ticket)
    assert list(tmp_path.glob("atoll-group-*")) == [] and threading.active_count() <= threads


def test_what_a_killed_member_left_behind_is_cleared_away_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with atoll.reduce.found() as alive:
        left, fresh, other = (tmp_path / name for name in ("atoll-group-left", "atoll-group-fresh", "other"))
        for folder in (left, fresh, other):
            folder.mkdir()
            (folder / "lock").touch()
        for folder in (left, other, alive._host.folder):
            os.utime(folder, (0, 0))
        with atoll.reduce.found():
            assert not left.exists()
            assert fresh.exists() and other.exists() and alive._host.folder.exists()
        alive.all_reduce(torch.ones(3))


UNCLOSED = """
import atoll, os, sys, torch
one = atoll.reduce.found(peers=2)
two = atoll.reduce.join(one.ticket)
work = one.all_reduce_async(torch.ones(3))
print(len(two.all_reduce(torch.ones(3)).contributors), flush=True)
if fork := os.fork():
    sys.exit(os.waitpid(fork, 0)[1])
for asks in (work.wait, work.done, one.trouble, lambda: one.all_reduce(torch.ones(3))):
    try:
        asks()
    except atoll.UsageError as why:
        print(why.code)
one.close()
"""


def test_a_script_that_ends_without_a_farewell_says_it_at_its_end():
    """It went on while Python ended the threads it works in, with a traceback for each of thousands of rounds.

    A member that is forked from it has no part in the group and ends, too: workers of data loaders waited for ever.
    """
    ended = subprocess.run([sys.executable, "-c", UNCLOSED], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "2\n" + 4 * "E-RED-20\n", "")
