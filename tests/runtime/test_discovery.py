"""Discovery: what a starting peer does with the addresses that a source finds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from islands import LOOPBACK, PATIENCE_S, Island, closed, story

from atoll.base.ids import Digest, PeerId
from atoll.base.machine import LinkUp
from atoll.crypto.digest import digest
from atoll.peer.membership.admission import DesiredRole
from atoll.runtime import driver as driver_module
from atoll.runtime.bootstrap import identity_of
from atoll.runtime.driver import Driver, PeerStartParameters
from atoll.runtime.network.discovery import Discovery, FoundAddress, StaticAddressDiscovery
from atoll.runtime.storage.store import PeerStore

pytestmark = pytest.mark.net

RUN = digest(b"a run")


class MemoryDiscovery:
    """Addresses by run, in memory."""

    def __init__(self) -> None:
        self.runs: dict[Digest, list[FoundAddress]] = {}
        self.announced: list[tuple[Digest, tuple[str, ...]]] = []
        self.finds = 0

    async def announce(self, run: Digest, addresses: Sequence[str]) -> None:
        self.announced.append((run, tuple(addresses)))

    async def find(self, run: Digest) -> Sequence[FoundAddress]:
        self.finds += 1
        if self.finds == 1:
            raise OSError("the source is not reachable yet")
        return self.runs.get(run, [])


class Idle:
    """A worker without work."""

    async def run(self, work: object) -> object:
        return await asyncio.Event().wait()

    def digest_of(self, message: object, payload: object) -> Digest:
        raise AssertionError

    async def close(self) -> None:
        return


def driver_in(folder: Path, bootstrap: tuple[tuple[str, PeerId | None], ...] = ()) -> Driver:
    store = PeerStore(folder)
    return Driver(
        PeerStartParameters(store, identity_of(store), RUN, DesiredRole("trainer"), None, bootstrap), Idle()
    )


async def linked(ada: Island, driver: Driver) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await ada.until(lambda: LinkUp(driver.me) in ada.events)
        while ada.name not in driver.machine.bootstrap:
            await asyncio.sleep(0.01)


def test_a_peer_announces_itself_and_dials_what_a_source_finds_later(tmp_path: Path):
    """The source fails, then knows nothing of the run, then one address without a peer id."""

    @story
    async def run() -> None:
        ada, source = await Island("ada", network=RUN).open(), MemoryDiscovery()
        driver = driver_in(tmp_path)
        driver.discovery = source
        await driver.listen([LOOPBACK])
        driver.start()
        async with asyncio.timeout(PATIENCE_S):
            while source.finds < 2:
                await asyncio.sleep(0.01)
        source.runs[RUN] = [FoundAddress(ada.address, None)]
        await linked(ada, driver)
        assert source.announced == [(RUN, driver.addresses)] and driver.addresses
        assert driver.machine.bootstrap == (ada.name,)
        await driver.stop(farewell=False)
        await closed(ada)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver_module, "DIAL_AGAIN_S", 0.02)
        run()


def test_addresses_of_a_ticket_are_a_source(tmp_path: Path):
    """A peer id that the ticket names is expected there; addresses may be added before the start."""

    @story
    async def run() -> None:
        ada = await Island("ada", network=RUN).open()
        driver = driver_in(tmp_path)
        driver.bootstrap += ((ada.address, ada.name),)
        source: Discovery = driver.discovery
        assert isinstance(source, StaticAddressDiscovery)
        assert await source.find(RUN) == [FoundAddress(ada.address, ada.name)]
        await driver.listen([LOOPBACK])
        driver.start()
        await linked(ada, driver)
        await driver.stop(farewell=False)
        await closed(ada)

    run()
