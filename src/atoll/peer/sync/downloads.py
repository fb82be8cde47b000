"""Blob downloads except the agreed state, which `state_sync.py` fetches.

Driving contract: `fetch_blob`, `fetch_state` and `find_demanded` begin downloads; then pass each message, timer and
finished task to `handle`, and finished jobs of the archive to `made`. Call `settle` after each new vertex.

    want     any blob, such as the data set or evidence, from all reachable members
    seek     an older state: from pieces, where it is stored in pieces, else whole
    find     a rollback target: on this disk, else by `seek`, repeated while an order names it

Invariants:
- A download that no component waits for is dropped.
Not responsible for: rolling back; the peer is notified when a state is stored.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.limits import BLOB_MAX
from atoll.base.machine import Effect, Emit, Event, SetTimer, Start, TaskDone, TaskFailed
from atoll.peer.events import ArchivedStateRebuildFailed, ArchivedStateRebuilt
from atoll.peer.governance.rollback_targets import RollbackTargets
from atoll.peer.run_view import RunView
from atoll.protocol.transfer.download import BlobDownload, BlobFetched
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.statements import SignedStatement


class BlobDownloads:
    """`known`: the run view, once genesis is known. `came`: called with each earlier state that is stored here."""

    def __init__(
        self, notary: StatementSigner, known: Callable[[], RunView], came: Callable[[Digest, Seconds], list[Effect]]
    ) -> None:
        self._known, self.came, self.me = known, came, notary.signer.peer
        self.wanted: dict[Digest, BlobDownload] = {}
        self.earlier = RollbackTargets(notary)

    @property
    def known(self) -> RunView:
        return self._known()

    # ---- what is asked for -------------------------------------------------------------------------------

    def fetch_blob(self, blob: Digest, now: Seconds, bytes_max: int = BLOB_MAX) -> list[Effect]:
        """Download a blob; ends with `BlobFetched`. `bytes_max` bounds a blob that a single member named."""
        reach, linked = self.known.roster.within_reach(), self.known.linked
        fetch = self.wanted[blob] = BlobDownload(blob, reach, bytes_max, me=self.me, linked=linked)
        return fetch.handle(Start({}), now)

    def fetch_state(self, state: Digest, now: Seconds) -> list[Effect]:
        """Get an older state; ends with `BlobFetched`, `ArchivedStateRebuilt` or a failure."""
        pieces = self.known.pieces
        made = pieces.rebuild(state, now) if pieces is not None else None
        return self._from_pieces(made, now) if made is not None else self.fetch_blob(state, now)

    def find_demanded(self) -> list[Effect]:
        """Look up the target of a rollback that validators demand."""
        pool = self.known.pool
        demanded = pool.recent().ledgers.demanded(pool.history.head)
        return self.earlier.find(demanded.state) if demanded is not None else []

    def settle(self) -> None:
        """After a new vertex, drop downloads of targets without a valid order."""
        for unwanted in self.earlier.settle(self.known.pool):
            self.wanted.pop(unwanted, None)

    def give_up(self, blob: Digest) -> list[Effect] | None:
        """Cancel a download; None if there was none."""
        given_up = self.wanted.pop(blob, None) is not None
        return [SetTimer(f"fetch/{blob.hex()}/stall", None)] if given_up else None

    # ---- what comes --------------------------------------------------------------------------------------

    def handle(self, event: Event, quiet: bool, now: Seconds) -> list[Effect]:
        """Process chunks and timers. `quiet`: no round needs the connection."""
        out: list[Effect] = []
        for fetch in list(self.wanted.values()):
            got = fetch.handle(event, now)
            out += got
            if fetch.over:
                del self.wanted[fetch.blob]
                here = any(isinstance(e, Emit) and isinstance(e.fact, BlobFetched) for e in got)
                out += self._ended(fetch.blob, here, now)
        return out + self.gather(event, quiet, now)

    def gather(self, event: Event, quiet: bool, now: Seconds) -> list[Effect]:
        """Process an event of a piece download."""
        pieces = self.known.pieces
        return self._from_pieces(pieces.on_download_event(event, quiet, now), now) if pieces is not None else []

    def unlinked(self, peer: PeerId, now: Seconds) -> list[Effect]:
        return [effect for fetch in self.wanted.values() for effect in fetch.on_link_down(peer, now)]

    def linked(self, peer: PeerId, now: Seconds) -> list[Effect]:
        effects = [effect for fetch in self.wanted.values() for effect in fetch.on_link_up(peer, now)]
        pieces = self.known.pieces
        return effects + (pieces.on_peer_connected(peer, now) if pieces is not None else [])

    def made(self, event: TaskDone | TaskFailed, now: Seconds) -> list[Effect]:
        """Process a finished job of the archive."""
        pieces, reach = self.known.pieces, self.known.roster.within_reach()
        return self._from_pieces(pieces.on_task_done(event, reach, now), now) if pieces is not None else []

    def _from_pieces(self, effects: list[Effect], now: Seconds) -> list[Effect]:
        """Pass on archive effects and note rollback targets that were rebuilt or lost."""
        out: list[Effect] = []
        for effect in effects:
            out.append(effect)
            match effect:
                case Emit(ArchivedStateRebuilt(state=state)):
                    out += self._ended(state, True, now)
                case Emit(ArchivedStateRebuildFailed(state=state)) if state in self.earlier.fetching:
                    out += self._ended(state, False, now)
                case _:
                    pass
        return out

    # ---- earlier states ----------------------------------------------------------------------------------

    def looked_up(self, state: Digest, here: bool, now: Seconds) -> list[Effect]:
        """Continue with the disk's result for a rollback target."""
        if here:
            return self.came(state, now)
        return self.fetch_state(state, now) if self.earlier.fetches(state) else []

    def read(self, round: str, kept: object) -> SignedStatement | None:
        """The order that waited for this old vertex, to be processed again."""
        return self.earlier.heard(round, kept, self.known.pool)

    def again(self, state: Digest) -> list[Effect]:
        """Retry a rollback target that no member sent before."""
        return self.earlier.find(state, anew=True) if self._wants_back() else []

    def _ended(self, state: Digest, here: bool, now: Seconds) -> list[Effect]:
        """Note a finished download of a rollback target."""
        self.earlier.fetching.discard(state)
        if here:
            return self.came(state, now)
        return self.earlier.again(state, now) if self._wants_back() else []

    def _wants_back(self) -> bool:
        """True while a rollback order waits."""
        return bool(self.known.pool.wanted_back())
