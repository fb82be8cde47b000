"""A real founder whose computer's clock is wrong, or that slept: the run goes on, or the start says why not."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from members import Inside

from atoll.base.errors import RefusedError
from atoll.peer.settings import RunSettings
from atoll.runtime.bootstrap import CLOCK_IS_RIGHT, ListenOptions, TicketTerms, found_run, join_run, resume_run
from atoll.runtime.driver import PeerStartParameters
from atoll.runtime.training_peer import TrainingPeer
from atoll.runtime.training_spec import founding_blobs, start_of_built_in
from atoll.runtime.worker.training_worker import TrainingWorker
from atoll.training.recipe.recipes import diloco

pytestmark = pytest.mark.net

DAY_S = 86400.0
WAIT_S = 120.0  # for rounds that take less than a second each


def make(me: PeerStartParameters) -> TrainingPeer:
    """A member whose trainer is in this process: nobody waits for another one to import torch."""
    island = TrainingWorker(me.store, 1, trainer=Inside())
    island.tended.attached = False  # it trains on the run's own data
    return TrainingPeer(me, island, on_fact=lambda fact: None)


async def trains(host: TrainingPeer, rounds: int = 2) -> None:
    """Until this start has closed so many rounds."""
    host.start()
    await closes(host, rounds)
    await host.stop()


async def closes(host: TrainingPeer, rounds: int) -> None:
    history = host.machine.history
    assert history is not None
    goal = history.head + rounds
    async with asyncio.timeout(WAIT_S):
        while history.head < goal:
            await host.next_round(WAIT_S)
    assert history.head_body.metrics.steps > 0


async def founded(folder: Path, book: str) -> TrainingPeer:
    recipe = diloco("gpt-nano", rounds=1000, inner_steps=2, batch=2, seq_len=16)
    beginning = founding_blobs(start_of_built_in(recipe, book), RunSettings())
    host, _ = await found_run(folder, beginning, "ada", ListenOptions(), TicketTerms(), make)
    return host


def test_a_lone_founder_trains_on_after_a_rest_and_after_a_start_with_a_wrong_clock(
    tmp_path: Path, book: str, monkeypatch: pytest.MonkeyPatch
):
    """A rest of 100 days, a start a year ahead, and starts a year behind and with the right clock again."""

    folder = tmp_path / "a run"

    def set_clock(days: float) -> None:
        monkeypatch.setattr("atoll.runtime.clock.wall", lambda: time.time() + days * DAY_S)

    def start() -> None:
        async def story() -> None:
            await trains(await resume_run(folder, "", ListenOptions(), make))

        asyncio.run(story())

    async def begin() -> None:
        await trains(await founded(folder, book))

    asyncio.run(begin())
    set_clock(100)
    start()
    set_clock(-365)
    with pytest.raises(
        RefusedError, match=r"E-CLK-01 this computer's clock is 465 days before the last agreed round"
    ):
        start()
    set_clock(100)
    start()
    set_clock(465)
    start()
    set_clock(100)
    with pytest.raises(RefusedError, match=r"365 days before the last agreed round \(\d{4}-.* UTC\)"):
        start()
    monkeypatch.setenv(CLOCK_IS_RIGHT, "0")
    with pytest.raises(RefusedError, match=r"ATOLL_CLOCK_IS_RIGHT=1 atoll up --dir '\S+/a run'"):
        start()
    monkeypatch.setenv(CLOCK_IS_RIGHT, "1")
    start()
    monkeypatch.delenv(CLOCK_IS_RIGHT)
    start()


def test_four_members_that_slept_for_a_hundred_days_train_on(
    tmp_path: Path, book: str, monkeypatch: pytest.MonkeyPatch
):
    """Two left and come back by `JoinRequest`, two vote with their old keys. All certificates had ended."""
    folders = [tmp_path / name for name in ("ada", "bob", "cyd", "dan")]

    async def all_train(hosts: list[TrainingPeer]) -> None:
        for host in hosts:
            host.start()
        async with asyncio.timeout(WAIT_S):
            while not all(counted(host) for host in hosts):
                await asyncio.wait({asyncio.ensure_future(h.next_round(WAIT_S)) for h in hosts})
        for k, host in enumerate(hosts):
            await host.stop(farewell=k > 1)

    def counted(host: TrainingPeer) -> bool:
        history = host.machine.history
        return history is not None and len(history.head_body.commits) == 4 and not host.machine.regain.busy

    async def begin() -> None:
        first = await founded(folders[0], book)
        ticket = first.ticket_text() or ""
        others = [
            await join_run(folder, ticket, "trainer", folder.name, ListenOptions(), make) for folder in folders[1:]
        ]
        await all_train([first, *others])

    async def go_on() -> None:
        await all_train([await resume_run(folder, "", ListenOptions(as_before=True), make) for folder in folders])

    asyncio.run(begin())
    monkeypatch.setattr("atoll.runtime.clock.wall", lambda: time.time() + 100 * DAY_S)
    asyncio.run(go_on())


def test_a_lone_founder_whose_session_key_is_gone_recovers(tmp_path: Path, book: str):
    """Only its old key votes. Nothing goes on until its identity admits the new one, and then all does."""

    async def story() -> None:
        await trains(await founded(tmp_path, book))
        (tmp_path / "session.key").unlink()
        host = await resume_run(tmp_path, "", ListenOptions(), make)
        host.start()
        async with asyncio.timeout(WAIT_S):
            while (why := host.paused()) is None:
                host._happened.clear()
                await host._happened.wait()
        assert "ada signs with a new key" in why and "atoll recover" in why and "disk" not in why
        host.recover()
        await closes(host, 3)
        with pytest.raises(RefusedError, match=r"E-RUN-08 .*the run can go on by itself"):
            host.recover()
        await host.stop()

    asyncio.run(story())
