"""Blobs on their way here, but for the agreed state, which is `regain.py`'s.

    want     any blob, such as the data set or what inspectors look at, from everybody within reach
    seek     an older state: out of pieces, where it lies in some, else whole
    find     an earlier one that the run may go back to: on this disk, else sought, again while somebody wants it
Promises: what nobody waits for any more is dropped. Never goes back to a state: it says when one is here.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.limits import BLOB_MAX
from atoll.base.machine import Effect, Emit, Event, SetTimer, Start, TaskDone, TaskFailed
from atoll.peer.events import StateLost, StateRebuilt
from atoll.peer.governance.rollback_targets import RollbackTargets
from atoll.peer.run_view import RunView
from atoll.protocol.transfer.download import BlobDownload, BlobFetched
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.statements import SignedStatement


class BlobDownloads:
    """`known` is asked once genesis is here; `came` is told of earlier states that are."""

    def __init__(
        self, notary: StatementSigner, known: Callable[[], RunView], came: Callable[[Digest, Seconds], list[Effect]]
    ) -> None:
        self._known, self.came, self.me = known, came, notary.signer.peer
        self.wanted: dict[Digest, BlobDownload] = {}
        self.earlier = RollbackTargets(notary)

    @property
    def known(self) -> RunView:
        return self._known()

    # ---- what is asked for ---------------------------------------------------------------------------------

    def want(self, blob: Digest, now: Seconds, bytes_max: int = BLOB_MAX) -> list[Effect]:
        """`BlobFetched` says when it is here. `bytes_max`: of one that a single member named."""
        fetch = self.wanted[blob] = BlobDownload(blob, self.known.roster.within_reach(), bytes_max, me=self.me)
        return fetch.handle(Start({}), now)

    def seek(self, state: Digest, now: Seconds) -> list[Effect]:
        """`BlobFetched`, `StateRebuilt` or a failure says how that ended."""
        pieces = self.known.pieces
        made = pieces.seek(state, now) if pieces is not None else None
        return self._from_pieces(made, now) if made is not None else self.want(state, now)

    def find_demanded(self) -> list[Effect]:
        """Where validators demand to go back, the state is looked for at once."""
        pool = self.known.pool
        demanded = pool.recent().ledgers.demanded(pool.history.head)
        return self.earlier.find(demanded.state) if demanded is not None else []

    def settle(self) -> None:
        """There is one vertex more: what nobody wants to go back to any more need not come."""
        for unwanted in self.earlier.settle(self.known.pool):
            self.wanted.pop(unwanted, None)

    def give_up(self, blob: Digest) -> list[Effect] | None:
        """Nobody waits for it any more; None if it was not on its way."""
        given_up = self.wanted.pop(blob, None) is not None
        return [SetTimer(f"fetch/{blob.hex()}/stall", None)] if given_up else None

    # ---- what comes ----------------------------------------------------------------------------------------

    def handle(self, event: Event, quiet: bool, now: Seconds) -> list[Effect]:
        """Chunks and timers. `quiet`: no round needs the line."""
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
        """Of a piece."""
        pieces = self.known.pieces
        return self._from_pieces(pieces.serves(event, quiet, now), now) if pieces is not None else []

    def linked(self, peer: PeerId, now: Seconds) -> list[Effect]:
        effects = [effect for fetch in self.wanted.values() for effect in fetch.linked(peer, now)]
        pieces = self.known.pieces
        return effects + (pieces.linked(peer, now) if pieces is not None else [])

    def made(self, event: TaskDone | TaskFailed, now: Seconds) -> list[Effect]:
        """A job of pieces was answered."""
        pieces, reach = self.known.pieces, self.known.roster.within_reach()
        return self._from_pieces(pieces.done(event, reach, now), now) if pieces is not None else []

    def _from_pieces(self, effects: list[Effect], now: Seconds) -> list[Effect]:
        """A state that came, or did not, may be waited for by those who want to go back to it."""
        out: list[Effect] = []
        for effect in effects:
            out.append(effect)
            match effect:
                case Emit(StateRebuilt(state=state)):
                    out += self._ended(state, True, now)
                case Emit(StateLost(state=state)) if state in self.earlier.fetching:
                    out += self._ended(state, False, now)
                case _:
                    pass
        return out

    # ---- earlier states ------------------------------------------------------------------------------------

    def looked_up(self, state: Digest, here: bool, now: Seconds) -> list[Effect]:
        """The disk says whether it holds this one."""
        if here:
            return self.came(state, now)
        return self.seek(state, now) if self.earlier.fetches(state) else []

    def read(self, round: str, kept: object) -> SignedStatement | None:
        """The disk says which vertex this old round closed with: a word that waited for it, to be heard again."""
        return self.earlier.heard(round, kept, self.known.pool)

    def again(self, state: Digest) -> list[Effect]:
        """Nobody gave it a while ago."""
        return self.earlier.find(state, anew=True) if self._wants_back() else []

    def _ended(self, state: Digest, here: bool, now: Seconds) -> list[Effect]:
        """What the members could give of it is here, or nobody gave it."""
        self.earlier.fetching.discard(state)
        if here:
            return self.came(state, now)
        return self.earlier.again(state, now) if self._wants_back() else []

    def _wants_back(self) -> bool:
        """While a word to go back waits for its vertex."""
        return bool(self.known.pool.wanted_back())
