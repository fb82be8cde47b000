"""State retention: which older states stay on this disk, so that a run can go back to them.

The newest ones stay, and spaced ones for long. The rule reads persisted vertices, so it needs no state of its own.
If older states are coded in pieces, the peer names those that stay whole, and its pieces come first.

Invariants: at most `keep.bytes_max` is used beside the pieces, however long the run lasts.
Not responsible for: the state of the head.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest
from atoll.peer.config.sections import KeepSection
from atoll.runtime.storage.store import PeerStore
from atoll.wire.codec import decode_body, decode_vertex

SPACED_MAX = 64  # spaced states: a week of rounds of ten minutes, with one state in two or three hours


class StateRetention:
    def __init__(self, store: PeerStore, keep: KeepSection) -> None:
        self._store, self.keep = store, keep
        self._agreed: dict[int, Digest] = {}  # states of the rounds that stay; each vertex is read once
        self._whole: Sequence[Digest] | None = None  # where older states are coded: those that are not yet
        self._pieces: frozenset[Digest] = frozenset()

    def follow(self, whole: Sequence[Digest], pieces: frozenset[Digest]) -> None:
        """Older states are coded: keep `whole`, most important first. `pieces` count and are never removed."""
        self._whole, self._pieces = whole, pieces

    def rounds(self, head: int) -> list[int]:
        """Rounds that keep their state, newest first. Genesis is round -1 and stays for long."""
        newest = range(head - 1, max(-2, head - 1 - self.keep.newest), -1)
        every = self.keep.every_rounds
        last = (head + 1) // every * every - 1
        spaced = range(last, max(-2, last - SPACED_MAX * every), -every)
        return list(dict.fromkeys(r for r in chain(newest, spaced) if -1 <= r < head))

    def states(self, head: int, rows: Collection[Digest], bytes_max: int) -> set[Digest]:
        """States to keep on this disk, within this limit beside pieces and kept rows."""
        rounds = self.rounds(head)
        self._agreed = {r: self._agreed[r] for r in rounds if r in self._agreed}
        if self._whole is None:
            states = [self._state_of(round) for round in rounds]
        else:
            newest = [round for round in rounds if round >= head - self.keep.newest]
            states = [*(self._state_of(round) for round in newest), *self._whole]
        kept: set[Digest] = set()
        size = self.size_of({*self._pieces, *rows})
        for state in states:
            if state is None or state in kept:
                continue
            size += self.size_of((state,))
            if size > bytes_max:
                break
            kept.add(state)
        return kept

    def size_of(self, blobs: Collection[Digest]) -> int:
        """Bytes of those blobs that are on this disk."""
        paths = map(self._store.blob_path, blobs)
        return sum(path.stat().st_size for path in paths if path.exists())

    def _state_of(self, round: int) -> Digest | None:
        """State agreed in this round; None if its vertex is not here, since its state is then absent, too."""
        if round not in self._agreed:
            data = self._store.value("genesis" if round == -1 else f"vertex/{round}")
            if data is None:
                return None
            try:
                self._agreed[round] = decode_body(decode_vertex(data).body).state
            except PeerFault:
                return None  # damaged: `atoll verify` reports it
        return self._agreed[round]
