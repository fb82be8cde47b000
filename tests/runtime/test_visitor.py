"""Who comes for an earlier state and does not get it is told why, not left to wait."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from atoll.base.errors import RunFailedError, UsageError
from atoll.base.ids import ZERO_DIGEST, Digest
from atoll.crypto.digest import digest
from atoll.features.archive import reed_solomon
from atoll.peer.events import ArchivedStateRebuildFailed
from atoll.peer.membership.admission import DesiredRole
from atoll.peer.settings import RunSettings
from atoll.protocol.transfer.download import FetchFailed
from atoll.runtime import readonly_client
from atoll.runtime.bootstrap import identity_of
from atoll.runtime.driver import PeerStartParameters
from atoll.runtime.storage.store import PeerStore

STATE = digest(b"an earlier state")


class Machine:
    """Of a run in which too few holders are there."""

    history, eras, settings = None, None, RunSettings()

    def __init__(self, visitor: readonly_client._ReadonlyDriver, lies: bool) -> None:
        self.visitor, self.lies = visitor, lies
        self.pieces = self.downloads = self

    def is_placed(self, state: Digest) -> bool:
        return self.lies

    def fetch_state(self, state: Digest, now: float) -> list[object]:
        self.visitor._react_to_fact(FetchFailed(blob=state, why="nobody who was asked holds it"))
        self.visitor._react_to_fact(ArchivedStateRebuildFailed(of=4, state=state, why="2 of 3 pieces could be had"))
        return []


async def taken(folder: Path, timeout_s: float, lies: bool = True) -> None:
    store = PeerStore(folder)
    identity = identity_of(store)
    seat = PeerStartParameters(store, identity, ZERO_DIGEST, DesiredRole("visitor"), None, ())
    guest = readonly_client._ReadonlyDriver(seat, 4)
    guest.machine = Machine(guest, lies)  # pyright: ignore[reportAttributeAccessIssue]
    guest._agreed = lambda round: STATE
    guest.shelf.asked.set()
    await guest.listen([])
    try:
        await guest.take(time.monotonic() + timeout_s)
    finally:
        await guest.stop(farewell=False)


def test_without_the_library_it_is_said_at_once_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reed_solomon, "ready", lambda: False)
    with pytest.raises(UsageError, match=r"E-PCS-01.*\n.*\n.*pip install pyeclib"):
        asyncio.run(asyncio.wait_for(taken(tmp_path, 30.0), 10.0))


def test_whoever_waited_in_vain_is_told_what_was_lacking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(readonly_client, "AGAIN_S", 0.01)
    monkeypatch.setattr(reed_solomon, "ready", lambda: True)
    with pytest.raises(RunFailedError, match=r"E-CHK-08.*\n.*2 of 3 pieces could be had"):
        asyncio.run(taken(tmp_path, 0.2))


def test_a_state_that_lies_in_no_pieces_and_that_nobody_holds_is_refused_at_once(tmp_path: Path):
    with pytest.raises(RunFailedError, match="E-CHK-12"):
        asyncio.run(taken(tmp_path, 30.0, lies=False))
