"""State sync: how a peer gets the agreed state, from its own disk or else from the members.

Driving contract: `begin` asks the disk. If `restored` returns None, call `fetch_from`.
Then pass each event to `handle`; without a download it does nothing.

Holds one state at a time, with the settlement of the round that was abandoned for it.

Invariants:
- The disk is read before the network is used.
- The worker receives the settlement of an abandoned round once.
Not responsible for: starting rounds; the peer does.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Literal

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.limits import ROUNDS_KEPT
from atoll.base.machine import Effect, Emit, Event, RunTask, SetTimer
from atoll.peer.governance.orders import amend_of
from atoll.peer.round.context import answered_bytes
from atoll.peer.round.outcome import counted_in
from atoll.peer.tasks import AbandonedRoundSettlement, LocalUpdateOutcome, RestoreState, StateRestored
from atoll.protocol.history.chain import VertexChain
from atoll.protocol.transfer.download import BlobDownload, BlobFetched, FetchFailed

# rounds followed part by part, however short: meanwhile members drop the oldest ones
FOLLOWED_MAX = ROUNDS_KEPT // 2
FETCH_AGAIN_S = 1.0  # seconds until the next try, after no source could serve the state
OUTRUN_S = 2.0  # seconds, longer than a round trip to busy members


class StateSync:
    def __init__(self, run: Digest, me: PeerId) -> None:
        self.me = me
        self.run = run  # also the digest of genesis
        self.fetch: BlobDownload | None = None
        self.restoring = False
        self.lack = "the agreed state is not on this disk"  # reason of the next download
        self.round = -1  # round of the state being fetched or restored
        self.left: AbandonedRoundSettlement | None = None  # settlement of the round abandoned for it
        self.size_bytes = 0  # size of the last restored state: all of a run are about equal; 0: unknown
        self.exchanged = False  # this download replaced an older one
        self.begun_at: Seconds = 0.0  # start of this download

    @property
    def busy(self) -> bool:
        """True while a state is downloaded or restored."""
        return self.fetch is not None or self.restoring

    def is_shorter(self, history: VertexChain, at: int) -> bool:
        """True if fetching the newest state takes fewer bytes than the parts of the rounds up to it.

        The current round does not count: most of its parts are here.
        """
        if history.head - at > FOLLOWED_MAX:
            return True
        rounds = range(at + 2, history.head + 1)
        parts_bytes = sum(answered_bytes(history.bodies[r]) for r in rounds if r in history.bodies)
        return 0 < self.size_bytes < parts_bytes

    def is_outrun(self, history: VertexChain, now: Seconds) -> bool:
        """True if a newer state was agreed on before any member sent this one's manifest: soon no member has it.

        Reported once, then again after a round trip at the earliest: a peer that always restarts never catches
        rounds shorter than that. A newcomer's history grows in leaps, past states that no member has any more.
        """
        untold = self.fetch is not None and self.fetch.manifest is None
        again = not self.exchanged or now - self.begun_at >= OUTRUN_S
        return untold and again and history.head > self.round

    def begin(self, history: VertexChain, why: str | None = None) -> list[Effect]:
        """Restore the state of the head from disk; `why` is the reason given if it must be fetched."""
        self.lack = why or self.lack
        self.restoring, self.fetch = True, None
        self.round = history.head
        left, self.left = self.left, None  # sent once: it may be in use again when a state comes
        mine = self._mine(history) if left is None else ()
        return [
            RunTask("restore", RestoreState(history.head, history.head_id, history.head_body.state, left, mine))
        ]

    def _mine(self, history: VertexChain) -> tuple[LocalUpdateOutcome, ...]:
        """How the newest two vertices count the local update: a crash may come between storing a vertex and
        private state.
        """
        found: list[LocalUpdateOutcome] = []
        for body in (history.bodies.get(history.head), history.bodies.get(history.head - 1)):
            if body is None or body.round < 0 or amend_of(body) is not None:
                break
            found.append(counted_in(self.me, body))
        return tuple(found)

    def restored(self, found: StateRestored | None) -> Literal["disk", "blob"] | None:
        """Where the restored state came from; None if it must be fetched."""
        self.restoring = False
        if found is None:
            return None
        self.size_bytes = found.size_bytes
        how = "blob" if self.fetch is not None else "disk"
        self.fetch = None
        return how

    def fetch_from(
        self, sources: Sequence[PeerId], linked: Set[PeerId], history: VertexChain, now: Seconds
    ) -> bool:
        """Start fetching the head's state from these sources with the next event; False if there are none.

        Sources that are not among the `linked` peers are asked once they connect.
        """
        if not sources:
            return False
        self.exchanged, self.begun_at = self.fetch is not None, now
        self.round = history.head
        self.fetch = BlobDownload(history.head_body.state, sources, me=self.me, linked=linked)
        return True

    def handle(self, event: Event, history: VertexChain | None, now: Seconds) -> list[Effect]:
        """Process events of the download."""
        if self.fetch is None or history is None:
            return []
        out: list[Effect] = []
        for effect in self.fetch.handle(event, now):
            out.append(effect)
            if isinstance(effect, Emit) and isinstance(effect.fact, BlobFetched):
                self.restoring = True
                vertex, body = history.ids.get(self.round, self.run), history.bodies.get(self.round)
                state = effect.fact.blob if body is None else body.state
                out.append(RunTask("restore", RestoreState(self.round, vertex, state)))
            elif isinstance(effect, Emit) and isinstance(effect.fact, FetchFailed):
                self.fetch = None
                out.append(SetTimer("fetch-again", now + FETCH_AGAIN_S))
        return out
