"""How a peer comes to hold the agreed state: from its own disk, if it is there, else fetched from the members.

One state at a time, with what is owed of the round that was left for it. Promises: the disk is asked before the
network, and what a round left open is told to the island once. Never begins a round: the peer does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.limits import ROUNDS_KEPT
from atoll.base.machine import Effect, Emit, Event, RunTask, SetTimer
from atoll.peer.governance.orders import amend_of
from atoll.peer.round.context import answered_bytes
from atoll.peer.round.outcome import answers_in, counted_in
from atoll.peer.tasks import RestoreState, RoundSettlement, StateRestored, UpdateSettlement
from atoll.protocol.history.chain import VertexChain
from atoll.protocol.transfer.download import BlobDownload, BlobFetched, FetchFailed

FOLLOWED_MAX = ROUNDS_KEPT // 2  # rounds, however short: while they are followed members let go of the oldest
FETCH_AGAIN_S = 1.0  # after no source could serve it
OUTRUN_S = 2.0  # longer than a trip to the members and back, even where they are busy


class StateSync:
    def __init__(self, run: Digest, me: PeerId) -> None:
        self.me = me
        self.run = run  # the name of genesis, too
        self.fetch: BlobDownload | None = None
        self.restoring = False
        self.lack = "the agreed state is not on this disk"  # why a state is fetched
        self.round = -1  # whose state is being fetched or restored
        self.left: RoundSettlement | None = None  # what I owe of the round that I left for it
        self.size_bytes = 0  # of the last state that was restored: all of a run are about as long; 0: not known
        self.exchanged = False  # this fetch was begun in the place of an older one
        self.begun_at: Seconds = 0.0  # this fetch

    @property
    def busy(self) -> bool:
        """A state is on its way."""
        return self.fetch is not None or self.restoring

    def is_shorter(self, history: VertexChain, at: int) -> bool:
        """The newest state, than the combined parts of the rounds that lead from the one at `at` to it. The round
        under way is left out: most of its parts are here."""
        if history.head - at > FOLLOWED_MAX:
            return True
        rounds = range(at + 2, history.head + 1)
        parts_bytes = sum(answered_bytes(history.bodies[r]) for r in rounds if r in history.bodies)
        return 0 < self.size_bytes < parts_bytes

    def is_outrun(self, history: VertexChain, now: Seconds) -> bool:
        """A newer state was agreed on before anybody told what this one is made of: soon nobody has it. Said once,
        and then after a trip to the members: rounds that are shorter are not caught by whoever always begins anew,
        and a newcomer's history grows in leaps, past states that nobody has any more while the dead are silent
        about them."""
        untold = self.fetch is not None and self.fetch.manifest is None
        again = not self.exchanged or now - self.begun_at >= OUTRUN_S
        return untold and again and history.head > self.round

    def begin(self, history: VertexChain, why: str | None = None) -> list[Effect]:
        """I do not hold the state of my head: is it on disk? `why` is told if it must be fetched."""
        self.lack = why or self.lack
        self.restoring, self.fetch = True, None
        self.round = history.head
        left, self.left = self.left, None  # told once: what it owes may be under way again when a state comes
        mine = self._mine(history) if left is None else ()
        return [
            RunTask("restore", RestoreState(history.head, history.head_id, history.head_body.state, left, mine))
        ]

    def _mine(self, history: VertexChain) -> tuple[UpdateSettlement, ...]:
        """A life before may have ended after it kept the newest vertex, and before it kept what is its own."""
        found: list[UpdateSettlement] = []
        for body in (history.bodies.get(history.head), history.bodies.get(history.head - 1)):
            if body is None or body.round < 0 or amend_of(body) is not None:
                break
            found.append(counted_in(self.me, body, answers_in(body)))
        return tuple(found)

    def restored(self, found: StateRestored | None) -> Literal["disk", "blob"] | None:
        """The island holds it, and where it came from; None if it must be fetched."""
        self.restoring = False
        if found is None:
            return None
        self.size_bytes = found.size_bytes
        how = "blob" if self.fetch is not None else "disk"
        self.fetch = None
        return how

    def fetch_from(self, sources: Sequence[PeerId], history: VertexChain, now: Seconds) -> bool:
        """The state of my head, of these, from the next event on; False if there is nobody."""
        if not sources:
            return False
        self.exchanged, self.begun_at = self.fetch is not None, now
        self.round = history.head
        self.fetch = BlobDownload(history.head_body.state, sources, me=self.me)
        return True

    def handle(self, event: Event, history: VertexChain | None, now: Seconds) -> list[Effect]:
        """Events of the download."""
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
