"""A visitor: takes the history and one agreed state of a living run, checks them, and becomes no member.

It links to members like a joiner, believes vertices by their certificates, fetches the newest agreed state as a
blob and what identities signed, and goes. It never says `JoinRequest`, so that no vertex and no plan knows of it.
It
shows a ticket and takes none of its uses; only a public run needs none. What it took lies in its folder as a peer's
would: an interrupted visitor goes on where it was. Never trains, never listens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import UNSET

from atoll.base.errors import NetworkError, PeerFault, RefusedError, RunFailedError, UsageError
from atoll.base.ids import ZERO_DIGEST, Digest, PeerId, Seconds
from atoll.base.machine import Fact, Message
from atoll.crypto.digest import Buffer, digest
from atoll.features.archive.reed_solomon import demand_ready
from atoll.features.archive.worker import rebuild_blob
from atoll.peer.events import JoinRejected, StateLost, StateRebuilt
from atoll.peer.membership.admission import DesiredRole
from atoll.peer.settings import decode_settings
from atoll.peer.tasks import HoldPieces, RebuildState, RestoreState
from atoll.protocol.history.era_signatures import EraSealed
from atoll.protocol.transfer.download import BlobFetched, FetchFailed
from atoll.runtime.bootstrap import identity_of
from atoll.runtime.driver import Driver, PeerConfig
from atoll.runtime.storage.store import PeerStore, stored
from atoll.runtime.training_spec import decode_learning
from atoll.wire.codec import decode_body, decode_vertex
from atoll.wire.ticket import Ticket

ANSWER_S = 60.0  # nobody of the run answered for so long: its addresses are not reachable from here
AGAIN_S = 2.0  # after which an earlier state that nobody could give is asked for again
TOKENIZER_S = 30.0  # for some megabytes over a home's link
SIGNED_S = 5.0  # without a further era signed by its quorum: nobody at hand has more


class DownloadedState(NamedTuple):
    round: int
    state: Digest


async def take(
    folder: Path,
    run: Digest,
    bootstrap: Sequence[tuple[str, PeerId | None]],
    timeout_s: Seconds,
    round: int | None = None,
    ticket: Ticket | None = None,
) -> DownloadedState:
    """Fill this folder with the run's history and the state of this round, or the newest. Only a public run shows
    them without a ticket. Trouble is told as an AtollError."""
    store = PeerStore(folder)
    identity = identity_of(store)
    store.keep([("run", run)])
    wish = DesiredRole("visitor", admission=ticket.redeem(identity.peer) if ticket is not None else b"")
    seat = PeerConfig(store, identity, run, wish, None, tuple(bootstrap))
    host = _ReadonlyDriver(seat, round)
    try:
        await host.listen([])
        host.start()
        return await host.take(time.monotonic() + timeout_s)
    finally:
        await host.stop(farewell=False)


class _ReadonlyDriver(Driver):
    shelf: _BlobWorker

    def __init__(self, me: PeerConfig, round: int | None) -> None:
        self.shelf, self.wanted = _BlobWorker(me.store, round is None), round
        self.signed, self.ended = asyncio.Event(), asyncio.Event()
        self.state, self.refused = ZERO_DIGEST, False  # a blob that it came for beside the head's; nobody has it
        self.turned_away: RefusedError | None = None
        self.why = "its members have little to give, or went away"  # it is not here yet
        super().__init__(me, self.shelf)

    async def take(self, until: Seconds) -> DownloadedState:
        """`until` is this process's monotonic clock."""
        patience_s = max(0.0, min(ANSWER_S, until - time.monotonic()))
        try:
            async with asyncio.timeout(patience_s):
                await self.shelf.asked.wait()
        except TimeoutError:
            raise NetworkError(
                "E-NET-01",
                f"nobody of this run answered within {patience_s:.0f} s",
                cause="the run is over, or its members cannot be dialled from here",
                fix="name a member that you can reach: --via ADDRESS",
            ) from None
        if self.turned_away is not None:
            raise self.turned_away
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                taken = await (self.shelf.taken if self.wanted is None else self._earlier(self.wanted))
        except TimeoutError:
            raise RunFailedError(
                "E-CHK-08",
                "the state was not here in time",
                cause=self.why,
                fix="the same command goes on where this one was; --timeout 12h waits for longer",
            ) from None
        await self._signatures(taken.round)
        await self._tokenizer()
        return taken

    async def _tokenizer(self) -> None:
        """The run's, if it has one. Where members do not give it, the model's card says so."""
        genesis = self.store.value("genesis")
        assert genesis is not None
        try:
            blob = decode_learning(decode_settings(decode_body(decode_vertex(genesis).body).settings)).tokenizer
        except PeerFault:
            return  # of a group, or of another version: whoever exports says so
        if blob is UNSET or self.store.has_blob(blob):
            return
        self.state, self.refused = blob, False
        self.ended.clear()
        self._do(lambda: self.machine.downloads.want(blob, self.clock.now()))
        with suppress(TimeoutError):
            await asyncio.wait_for(self.ended.wait(), TOKENIZER_S)

    async def _earlier(self, round: int) -> DownloadedState:
        """The state of this round, whole or out of pieces; asked for again where a holder went away meanwhile."""
        self.state = state = await asyncio.to_thread(self._agreed, round)
        while not self.store.has_blob(state):
            self.ended.clear()
            self._do(lambda: self.machine.downloads.seek(state, self.clock.now()))
            await self.ended.wait()
            if self.refused:
                raise RunFailedError(
                    "E-CHK-12",
                    f"no member holds the state of round {round} any more",
                    cause="they keep those of the newest rounds and of some older ones ([keep] in docs/config.md)",
                    fix="atoll checkpoint list at a member says which are there; without --round it is the newest",
                )
            if not self.store.has_blob(state):
                demand_ready()  # the pieces that are the state itself need no arithmetic, but not all of them came
                await asyncio.sleep(AGAIN_S)
        return DownloadedState(round, state)

    def _lies_in_pieces(self) -> bool:
        """Then a holder that has nothing is no refusal: where one piece is enough, the first is the state."""
        return self.machine.pieces is not None and self.machine.pieces.is_placed(self.state)

    def _agreed(self, round: int) -> Digest:
        data = self.store.value("genesis" if round == -1 else f"vertex/{round}")
        if data is None:
            head = self.machine.history.head if self.machine.history is not None else -1
            raise UsageError(
                "E-CHK-01",
                f"round {round} is not in this run",
                cause=f"its newest round is {head}",
                fix="atoll checkpoint list, at a member",
            )
        return decode_body(decode_vertex(data).body).state

    async def _signatures(self, until: int) -> None:
        """Of eras up to this round, as many as members have; the run goes on meanwhile."""
        eras = self.machine.eras
        while eras is not None and min(eras.lacking, default=until + 1) <= until:
            self.signed.clear()
            try:
                async with asyncio.timeout(SIGNED_S):
                    await self.signed.wait()
            except TimeoutError:
                return

    def _react_to_fact(self, fact: Fact) -> None:
        match fact:
            case JoinRejected(code=code, what=what):
                self.turned_away = _turned_away(code, what if self.wish.admission else "this run is not public")
                self.shelf.asked.set()
            case EraSealed():
                self.signed.set()
            case BlobFetched(blob=state) | StateRebuilt(state=state) if state == self.state:
                self.ended.set()
            case StateLost(state=state, why=why) if state == self.state:
                self.why = why
                self.ended.set()
            case FetchFailed(blob=state) if state == self.state and not self._lies_in_pieces():
                self.refused = True
                self.ended.set()
            case _:
                pass


def _turned_away(code: str, what: str) -> RefusedError:
    return RefusedError(
        code,
        f"the members do not let this computer read: {what}",
        cause="a run shows its history and model to members, and to a peer with a ticket that can still be used",
        fix="ask a member for a ticket (atoll invite), then atoll checkpoint pull TICKET --to FOLDER",
    )


class _BlobWorker:
    """What stands behind a visitor: a disk, and nobody who reads what is on it."""

    def __init__(self, store: PeerStore, newest: bool) -> None:
        """`newest`: the head's state is what it came for."""
        self.store, self.newest = store, newest
        self.asked = asyncio.Event()  # for a state: somebody of the run has answered
        self.taken: asyncio.Future[DownloadedState] = asyncio.get_running_loop().create_future()
        self._disk = ThreadPoolExecutor(1, "disk")

    async def do(self, work: Any) -> Any:
        loop = asyncio.get_running_loop()
        if isinstance(work, HoldPieces):
            return ()  # nobody tidies here
        if isinstance(work, RebuildState):
            return await loop.run_in_executor(self._disk, rebuild_blob, self.store, work, lambda name: None)
        if not isinstance(work, RestoreState):
            return await loop.run_in_executor(self._disk, stored, self.store, work)
        self.asked.set()
        if self.newest and not self.store.has_blob(work.state):
            return False
        if self.newest and not self.taken.done():
            self.taken.set_result(DownloadedState(work.round, work.state))
        return await asyncio.Event().wait()  # there is nothing to go on with; `stop` ends this

    def name_of(self, message: Message, payload: Buffer) -> Digest:
        return digest(payload)

    async def close(self) -> None:
        self._disk.shutdown(wait=True, cancel_futures=True)
