"""Read-only client: fetches the history and one agreed state of a live run, verifies them, and becomes no member.

It links to members like a joiner, verifies vertices by their certificates, and fetches a state and era signatures.
It never sends `JoinRequest`, so no vertex and no plan knows of it. It shows a ticket without spending a use; a
public run needs none. Its folder has the layout of a peer's, so an interrupted download goes on.

Not responsible for: training, listening.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import UNSET

from atoll.base.errors import NetworkError, PeerFault, RefusedError, RunFailedError, UsageError
from atoll.base.ids import ZERO_DIGEST, Digest, PeerId, Seconds
from atoll.base.machine import Fact, Message
from atoll.base.units import history_round_text
from atoll.crypto.digest import Buffer, digest
from atoll.features.archive.reed_solomon import demand_ready
from atoll.features.archive.worker import rebuild_blob
from atoll.peer.events import ArchivedStateRebuildFailed, ArchivedStateRebuilt, JoinRejected
from atoll.peer.membership.admission import DesiredRole
from atoll.peer.settings import decode_settings
from atoll.peer.tasks import DecodeErasurePieces, RestoreState, RetainErasurePieces
from atoll.protocol.history.era_signatures import EraQuorumSigned
from atoll.protocol.transfer.download import BlobFetched, FetchFailed
from atoll.runtime.bootstrap import identity_of
from atoll.runtime.driver import Driver, PeerStartParameters
from atoll.runtime.storage.store import PeerStore, run_store_task
from atoll.runtime.training_spec import parse_training_spec
from atoll.runtime.transfer_progress import downloaded_bytes
from atoll.wire.codec import decode_body, decode_vertex
from atoll.wire.ticket import Ticket

ANSWER_S = 60.0  # without a reply until then, the addresses are not reachable from here
AGAIN_S = 2.0  # pause before a missing earlier state is requested again
TOKENIZER_S = 30.0  # for some megabytes over a home link
SIGNED_S = 5.0  # without a further signed era until then, no reachable member has one


class DownloadedState(NamedTuple):
    round: int
    state: Digest


async def download_state(
    folder: Path,
    run: Digest,
    bootstrap: Sequence[tuple[str, PeerId | None]],
    timeout_s: Seconds,
    round: int | None = None,
    ticket: Ticket | None = None,
    show: Callable[[Callable[[], tuple[int, int]]], None] = lambda transferred: None,
) -> DownloadedState:
    """Fetch the run's history and the state of `round`, or the newest, into this folder. Raises AtollError.

    Only a public run needs no ticket. `show` receives a function that returns (bytes here, bytes in all).
    """
    store = PeerStore(folder)
    identity = identity_of(store)
    store.keep([("run", run)])
    wish = DesiredRole("visitor", admission=ticket.redeem(identity.peer) if ticket is not None else b"")
    seat = PeerStartParameters(store, identity, run, wish, None, tuple(bootstrap))
    host = _ReadonlyDriver(seat, round)
    show(lambda: downloaded_bytes(host.machine))
    try:
        await host.listen([])
        host.start()
        return await host.take(time.monotonic() + timeout_s)
    finally:
        await host.stop(farewell=False)


class _ReadonlyDriver(Driver):
    shelf: _BlobWorker

    def __init__(self, me: PeerStartParameters, round: int | None) -> None:
        self.shelf, self.wanted = _BlobWorker(me.store, round is None), round
        self.signed, self.ended = asyncio.Event(), asyncio.Event()
        self.state, self.refused = (
            ZERO_DIGEST,
            False,
        )  # wanted blob besides the head's state; True: no member has it
        self.turned_away: RefusedError | None = None
        self.why = "its members have little to give, or went away"  # reason why the state is missing
        super().__init__(me, self.shelf)

    async def take(self, until: Seconds) -> DownloadedState:
        """Wait for the state until a time of the monotonic clock. Raises AtollError."""
        patience_s = max(0.0, min(ANSWER_S, until - time.monotonic()))
        try:
            async with asyncio.timeout(patience_s):
                await self.shelf.asked.wait()
        except TimeoutError:
            raise NetworkError(
                "E-NET-01",
                f"no member of this run answered within {patience_s:.0f} s",
                cause="the run is over, or its members cannot be dialed from here",
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
                "the state did not arrive in time",
                cause=self.why,
                fix="run the same command again to go on; --timeout 12h waits longer",
            ) from None
        await self._signatures(taken.round)
        await self._tokenizer()
        return taken

    async def _tokenizer(self) -> None:
        """Fetch the run's tokenizer, if it has one. If members do not send it, the model card says so."""
        genesis = self.store.value("genesis")
        assert genesis is not None
        try:
            blob = parse_training_spec(decode_settings(decode_body(decode_vertex(genesis).body).settings)).tokenizer
        except PeerFault:
            return  # a group, or another version: the export reports it
        if blob is UNSET or self.store.has_blob(blob):
            return
        self.state, self.refused = blob, False
        self.ended.clear()
        self.run_step(lambda: self.machine.downloads.fetch_blob(blob, self.clock.now()))
        with suppress(TimeoutError):
            await asyncio.wait_for(self.ended.wait(), TOKENIZER_S)

    async def _earlier(self, round: int) -> DownloadedState:
        """Fetch the state of this round, whole or in pieces, with retries. Raises RunFailedError."""
        self.state = state = await asyncio.to_thread(self._agreed, round)
        while not self.store.has_blob(state):
            self.ended.clear()
            self.run_step(lambda: self.machine.downloads.fetch_state(state, self.clock.now()))
            await self.ended.wait()
            if self.refused:
                raise RunFailedError(
                    "E-CHK-12",
                    f"no member holds the state of {history_round_text(round, None)} any more",
                    cause="they keep those of the newest rounds and of some older ones ([keep] in run.toml)",
                    fix="atoll checkpoint list at a member says which are there; without --round it is the newest",
                )
            if not self.store.has_blob(state):
                demand_ready()  # data pieces need no decoder, but some are missing
                await asyncio.sleep(AGAIN_S)
        return DownloadedState(round, state)

    def _lies_in_pieces(self) -> bool:
        """True if the state is coded; a holder without it is then no refusal."""
        return self.machine.pieces is not None and self.machine.pieces.is_placed(self.state)

    def _agreed(self, round: int) -> Digest:
        data = self.store.value("genesis" if round == -1 else f"vertex/{round}")
        if data is None:
            head = self.machine.history.head if self.machine.history is not None else -1
            raise UsageError(
                "E-CHK-01",
                f"{history_round_text(round, None)} is not in this run",
                cause=f"its newest is {history_round_text(head, None)}",
                fix="atoll checkpoint list, at a member",
            )
        return decode_body(decode_vertex(data).body).state

    async def _signatures(self, until: int) -> None:
        """Fetch era signatures up to this round, as far as members have them."""
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
            case EraQuorumSigned():
                self.signed.set()
            case BlobFetched(blob=state) | ArchivedStateRebuilt(state=state) if state == self.state:
                self.ended.set()
            case ArchivedStateRebuildFailed(state=state, why=why) if state == self.state:
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
    """Worker of the read-only client: it stores blobs and computes nothing."""

    def __init__(self, store: PeerStore, newest: bool) -> None:
        """`newest`: the wanted state is that of the head."""
        self.store, self.newest = store, newest
        self.asked = asyncio.Event()  # set once the machine needs a state: a member has replied
        self.taken: asyncio.Future[DownloadedState] = asyncio.get_running_loop().create_future()
        self._disk = ThreadPoolExecutor(1, "disk")

    async def run(self, work: Any) -> Any:
        loop = asyncio.get_running_loop()
        if isinstance(work, RetainErasurePieces):
            return ()  # nothing is removed here
        if isinstance(work, DecodeErasurePieces):
            return await loop.run_in_executor(self._disk, rebuild_blob, self.store, work, lambda name: None)
        if not isinstance(work, RestoreState):
            return await loop.run_in_executor(self._disk, run_store_task, self.store, work)
        self.asked.set()
        if self.newest and not self.store.has_blob(work.state):
            return False
        if self.newest and not self.taken.done():
            self.taken.set_result(DownloadedState(work.round, work.state))
        return await asyncio.Event().wait()  # never done; `stop` cancels it

    def digest_of(self, message: Message, payload: Buffer) -> Digest:
        return digest(payload)

    async def close(self) -> None:
        self._disk.shutdown(wait=True, cancel_futures=True)
