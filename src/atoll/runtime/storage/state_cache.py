"""State cache: recent shared states in memory, older ones on disk.

Older states stay on disk for a time for laggards that still fetch them. Some stay for long (retention.py), so that
the run can go back to them.

Invariants: a state that was `put` is durable.
Not responsible for: which state is the head.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from threading import Lock

from atoll.base.errors import PeerFault, RunFailedError
from atoll.base.ids import Digest
from atoll.features.attribution.row_store import RowStore
from atoll.peer.config.sections import KeepSection
from atoll.runtime.storage.retention import StateRetention
from atoll.runtime.storage.store import PeerStore
from atoll.training.exchange.layout import ModelLayout
from atoll.training.recipe.state import SharedState, state_from_bytes, state_pieces

STATES_HELD = 4  # recent shared states in memory: the head, its parent, and proposals
STATES_KEPT_S = 60.0  # older states stay on disk this long; a laggard's download of the head has to fit
STATES_KEPT_MAX = 64  # older states on disk; rounds of one second would fill it
VERDICTS_SHARE = 4  # at most a fourth of `keep.bytes_max` goes to the evidence of verdicts
LOOKED_FOR_MAX = 4  # pinned earlier states; the oldest pin is dropped


class StateCache:
    """States by name. One thread calls `put` and `find`, another calls `tidy`; a lock keeps `put` atomic."""

    def __init__(self, store: PeerStore, keep: KeepSection = KeepSection()) -> None:  # a frozen value
        self._store, self._retention = store, StateRetention(store, keep)
        self.rows = RowStore(store)
        self._looked_for: OrderedDict[Digest, None] = OrderedDict()
        self._verdicts: Sequence[Digest] = ()  # exhibits and the states that replays need, newest first
        self._pieces: frozenset[Digest] = frozenset()  # pieces of older states, where those are coded
        self._held: OrderedDict[Digest, SharedState] = OrderedDict()
        self._kept_since: dict[Digest, float] = {}  # state on disk → time at which it was stored
        self._tidying = Lock()

    def put(self, state: SharedState, layout: ModelLayout) -> Digest:
        pieces = state_pieces(state, layout)
        with self._tidying:
            name = self._store.put_blob(*pieces)
            self._hold(name, state)
        return name

    def find(self, name: Digest, layout: ModelLayout) -> SharedState | None:
        """None if the state is not on this disk. Raises RunFailedError if it cannot be read."""
        held = self._held.get(name)
        if held is not None:
            return held
        data = self._store.read_blob(name)
        if data is None:
            return None
        try:
            state = state_from_bytes(data, layout)
        except PeerFault as fault:
            raise RunFailedError("E-RUN-03", f"the agreed state cannot be read: {fault.what}") from fault
        with self._tidying:
            self._hold(name, state)
        return state

    def look_for(self, name: Digest) -> bool:
        """Pin a state, also one that has to be fetched first. True if it is on this disk, byte for byte."""
        with self._tidying:
            self._looked_for[name] = None
            self._looked_for.move_to_end(name)
            while len(self._looked_for) > LOOKED_FOR_MAX:
                self._looked_for.popitem(last=False)
        return self._store.read_blob(name) is not None

    def found_way(self) -> None:
        """Clear all pins, once the run went back."""
        with self._tidying:
            self._looked_for.clear()

    def put_other(self, data: bytes) -> Digest:
        """Store another blob and keep it for `STATES_KEPT_S`, until its user pins it."""
        with self._tidying:
            name = self._store.put_blob(data)
            self._kept_since[name] = time.monotonic()
        return name

    def hold_a_while(self, name: Digest) -> None:
        """Keep a fetched blob for `STATES_KEPT_S`, so that the next `tidy` does not remove it."""
        with self._tidying:
            self._kept_since[name] = time.monotonic()

    def hold_pieces(self, pieces: Collection[Digest], whole: Sequence[Digest]) -> tuple[Digest, ...]:
        """Keep these pieces, and only `whole` of the older states. Returns the pieces that are missing."""
        with self._tidying:
            self._pieces = frozenset(pieces)
            self._retention.follow(whole, self._pieces)
        return tuple(name for name in pieces if not self._store.has_blob(name))

    def keep_verdicts(self, blobs: Sequence[Digest]) -> None:
        """Keep these exhibits and states, as far as there is room."""
        self._verdicts = blobs

    def tidy(self, needed: set[Digest], round: int) -> None:
        """Remove blobs that are neither needed nor recent. `round` is the head's."""
        most = self._retention.keep.bytes_max
        verdicts = self._store.within(self._verdicts, most // VERDICTS_SHARE)
        beside = verdicts | self.rows.kept(most - self._retention.size_of(verdicts))
        to_keep = self._retention.states(round, beside)
        recent = time.monotonic() - STATES_KEPT_S
        with self._tidying:
            newest = list(self._kept_since.items())[-STATES_KEPT_MAX:]
            self._kept_since = {name: since for name, since in newest if since > recent}
            kept = {*self._held, *self._kept_since, *self._looked_for, *self._pieces}
            self._store.drop_blobs({*kept, *to_keep, *beside, *needed})

    def _hold(self, name: Digest, state: SharedState) -> None:
        self._held[name] = state
        self._held.move_to_end(name)
        self._kept_since[name] = time.monotonic()
        while len(self._held) > STATES_HELD:
            self._held.popitem(last=False)
