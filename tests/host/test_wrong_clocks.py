"""A real founder whose computer's clock is wrong, or that slept: the run goes on, or the start says why not."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from atoll.base.errors import RefusedError
from atoll.host.learning import built_in, found
from atoll.host.member import CLOCK_IS_RIGHT, Invitation, Listening, found_run, resume_run, training
from atoll.host.run import PeerHost
from atoll.learn.recipes import diloco
from atoll.node.settings import RunSettings

pytestmark = pytest.mark.net

DAY_S = 86400.0
WAIT_S = 120.0  # for rounds that take less than a second each


async def trains(host: PeerHost, rounds: int = 2) -> None:
    """Until this start has closed so many rounds."""
    host.start()
    history = host.machine.history
    assert history is not None
    goal = history.head + rounds
    async with asyncio.timeout(WAIT_S):
        while history.head < goal:
            await host.next_round(WAIT_S)
    await host.stop()


def test_a_lone_founder_trains_on_after_a_rest_and_after_a_start_with_a_wrong_clock(
    tmp_path: Path, book: str, monkeypatch: pytest.MonkeyPatch
):
    """A rest of 100 days, a start a year ahead, and starts a year behind and with the right clock again."""
    where, make = Listening(), training(1, lambda fact: None)

    def set_clock(days: float) -> None:
        monkeypatch.setattr("atoll.host.clock.wall", lambda: time.time() + days * DAY_S)

    def start() -> None:
        async def story() -> None:
            await trains(await resume_run(tmp_path, "", where, make))

        asyncio.run(story())

    async def founded() -> None:
        recipe = diloco("gpt-nano", rounds=1000, inner_steps=2, batch=2, seq_len=16)
        settings = found(built_in(recipe, book), RunSettings())
        host, _ = await found_run(tmp_path, settings, "ada", where, Invitation(), make)
        await trains(host)

    asyncio.run(founded())
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
    monkeypatch.setenv(CLOCK_IS_RIGHT, "1")
    start()
    monkeypatch.delenv(CLOCK_IS_RIGHT)
    start()
