"""How a peer comes to hold the agreed state: from its own disk, if it is there, else fetched from the members.

One state at a time, with what is owed of the round that was left for it. Promises: the disk is asked before the
network, and what a round left open is told to the island once. Never begins a round: the peer does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import Ask, Effect, Event, Report, SetTimer
from atoll.node.jobs import Left, Restore
from atoll.protocol.dag.history import History
from atoll.protocol.transfer.fetch import Fetch, Fetched, FetchFailed

FETCH_AGAIN_S = 1.0  # after no source could serve it


class Regain:
    def __init__(self, run: Digest) -> None:
        self.run = run  # the name of genesis, too
        self.fetch: Fetch | None = None
        self.restoring = False
        self.lack = "the agreed state is not on this disk"  # why a state is fetched
        self.round = -1  # whose state is being fetched or restored
        self.left: Left | None = None  # what I owe of the round that I left for it

    @property
    def busy(self) -> bool:
        """A state is on its way."""
        return self.fetch is not None or self.restoring

    def is_outrun(self, history: History) -> bool:
        """A newer state was agreed on before anybody told what this one is made of: soon nobody has it."""
        return self.fetch is not None and self.fetch.manifest is None and history.head > self.round

    def begin(self, history: History, why: str | None = None) -> list[Effect]:
        """I do not hold the state of my head: is it on disk? `why` is told if it must be fetched."""
        self.lack = why or self.lack
        self.restoring, self.fetch = True, None
        self.round = history.head
        left, self.left = self.left, None  # told once: what it owes may be under way again when a state comes
        return [Ask("restore", Restore(history.head, history.head_id, history.head_body.state, left))]

    def restored(self, found: bool) -> Literal["disk", "blob"] | None:
        """The island holds it, and where it came from; None if it must be fetched."""
        self.restoring = False
        if not found:
            return None
        how = "blob" if self.fetch is not None else "disk"
        self.fetch = None
        return how

    def fetch_from(self, sources: Sequence[PeerId], history: History) -> bool:
        """The state of my head, of these, from the next event on; False if there is nobody."""
        self.round = history.head
        if not sources:
            return False
        self.fetch = Fetch(history.head_body.state, sources)
        return True

    def handle(self, event: Event, history: History | None, now: Seconds) -> list[Effect]:
        """Events of the download."""
        if self.fetch is None or history is None:
            return []
        out: list[Effect] = []
        for effect in self.fetch.handle(event, now):
            out.append(effect)
            if isinstance(effect, Report) and isinstance(effect.fact, Fetched):
                self.restoring = True
                vertex = history.ids.get(self.round, self.run)
                out.append(Ask("restore", Restore(self.round, vertex, effect.fact.blob)))
            elif isinstance(effect, Report) and isinstance(effect.fact, FetchFailed):
                self.fetch = None
                out.append(SetTimer("fetch-again", now + FETCH_AGAIN_S))
        return out
