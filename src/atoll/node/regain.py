"""How a peer comes to hold the agreed state: from its own disk, if it is there, else fetched from the members.

One state at a time, with what is owed of the round that was left for it. Where members have states of their own the
agreed one only names these (specs/pairs.md): it is fetched first, if it is not here, and after it the state of one
member, or of the next one if that one fails. Promises: the disk is asked before the network, and what a round left
open is told to the island once. Never begins a round: the peer does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.limits import ROUNDS_KEPT
from atoll.base.machine import Ask, Effect, Event, Received, Report, SetTimer
from atoll.node.amend import amend_of
from atoll.node.closing import answers_in, counted_in
from atoll.node.ground import answered_bytes
from atoll.node.jobs import Counted, Left, OthersStates, Restore, Restored
from atoll.protocol.dag.history import History
from atoll.protocol.transfer.fetch import Fetch, Fetched, FetchFailed

FOLLOWED_MAX = ROUNDS_KEPT // 2  # rounds, however short: while they are followed members let go of the oldest
FETCH_AGAIN_S = 1.0  # after no source could serve it
OUTRUN_S = 2.0  # longer than a trip to the members and back, even where they are busy
STALLED_S = 10.0  # without a word of the one member whose state is fetched: it is another's turn


class Regain:
    def __init__(self, run: Digest, me: PeerId) -> None:
        self.me = me
        self.run = run  # the name of genesis, too
        self.fetch: Fetch | None = None
        self.restoring = False
        self.lack = "the agreed state is not on this disk"  # why a state is fetched
        self.round = -1  # whose state is being fetched or restored
        self.left: Left | None = None  # what I owe of the round that I left for it
        self.others = OthersStates(())  # one of which would do, where members have states of their own
        self.of_one: tuple[PeerId, Seconds] | None = None  # then: whose is fetched, and when it gave something last
        self.failed: set[PeerId] = set()  # at giving its own
        self.size_bytes = 0  # of the last state that was restored: all of a run are about as long; 0: not known
        self.exchanged = False  # this fetch was begun in the place of an older one
        self.begun_at: Seconds = 0.0  # this fetch

    @property
    def busy(self) -> bool:
        """A state is on its way."""
        return self.fetch is not None or self.restoring

    def is_shorter(self, history: History, at: int) -> bool:
        """The newest state, than the combined parts of the rounds that lead from the one at `at` to it. The round
        under way is left out: most of its parts are here."""
        if history.head - at > FOLLOWED_MAX:
            return True
        rounds = range(at + 2, history.head + 1)
        parts_bytes = sum(answered_bytes(history.bodies[r]) for r in rounds if r in history.bodies)
        return 0 < self.size_bytes < parts_bytes

    def is_outrun(self, history: History, now: Seconds) -> bool:
        """A newer state was agreed on before anybody told what this one is made of: soon nobody has it. Said once,
        and then after a trip to the members: rounds that are shorter are not caught by whoever always begins anew,
        and a newcomer's history grows in leaps, past states that nobody has any more while the dead are silent
        about them. A member's own stays with it for longer than a round."""
        untold = self.fetch is not None and self.fetch.manifest is None and self.of_one is None
        again = not self.exchanged or now - self.begun_at >= OUTRUN_S
        return untold and again and history.head > self.round

    def begin(self, history: History, why: str | None = None) -> list[Effect]:
        """I do not hold the state of my head: is it on disk? `why` is told if it must be fetched."""
        self.lack = why or self.lack
        self.restoring, self.fetch, self.of_one = True, None, None
        self.others = OthersStates(())
        self.round = history.head
        left, self.left = self.left, None  # told once: what it owes may be under way again when a state comes
        mine = self._mine(history) if left is None else ()
        return [Ask("restore", Restore(history.head, history.head_id, history.head_body.state, left, mine))]

    def _mine(self, history: History) -> tuple[Counted, ...]:
        """A life before may have ended after it kept the newest vertex, and before it kept what is its own."""
        found: list[Counted] = []
        for body in (history.bodies.get(history.head), history.bodies.get(history.head - 1)):
            if body is None or body.round < 0 or amend_of(body) is not None:
                break
            found.append(counted_in(self.me, body, answers_in(body)))
        return tuple(found)

    def restored(self, found: Restored | OthersStates | None) -> Literal["disk", "blob"] | None:
        """The island holds it, and where it came from; None if it must be fetched."""
        self.restoring = False
        if isinstance(found, OthersStates):
            self.others, found = found, None
        if found is None:
            return None
        self.size_bytes = found.size_bytes
        how = "blob" if self.fetch is not None else "disk"
        self.fetch, self.of_one = None, None
        return how

    def fetch_from(self, sources: Sequence[PeerId], history: History, now: Seconds) -> bool:
        """The state of my head, of these, from the next event on; False if there is nobody.

        Where it only names states of members: that of one of them, if these names are here.
        """
        if not sources:
            return False
        here = [(peer, state) for peer, state in self.others.held if peer in sources]
        if self.others.held and not here:
            return False
        if here and self.failed.issuperset(peer for peer, _ in here):
            self.failed.clear()
        for peer, state in here:
            if peer not in self.failed:
                self.fetch, self.of_one = Fetch(state, [peer]), (peer, now)
                return True
        self.exchanged, self.begun_at = self.fetch is not None, now
        self.round = history.head
        self.fetch, self.of_one = Fetch(history.head_body.state, sources, me=self.me), None
        return True

    def handle(self, event: Event, history: History | None, now: Seconds) -> list[Effect]:
        """Events of the download."""
        if self.fetch is None or history is None:
            return []
        out: list[Effect] = []
        if self.of_one is not None:
            peer, since = self.of_one
            match event:
                case Received(sender=sender) if sender == peer:
                    self.of_one = peer, now
                case _ if now - since > STALLED_S and not self.restoring:
                    return self._next_one(peer, now)
                case _:
                    pass
        for effect in self.fetch.handle(event, now):
            out.append(effect)
            if isinstance(effect, Report) and isinstance(effect.fact, Fetched):
                self.restoring = True
                vertex, body = history.ids.get(self.round, self.run), history.bodies.get(self.round)
                state = effect.fact.blob if body is None else body.state
                out.append(Ask("restore", Restore(self.round, vertex, state)))
            elif isinstance(effect, Report) and isinstance(effect.fact, FetchFailed):
                if self.of_one is not None:
                    return [*out, *self._next_one(self.of_one[0], now)]
                self.fetch = None
                out.append(SetTimer("fetch-again", now + FETCH_AGAIN_S))
        return out

    def _next_one(self, failed: PeerId, now: Seconds) -> list[Effect]:
        self.failed.add(failed)
        self.fetch, self.of_one = None, None
        return [SetTimer("fetch-again", now)]
