"""The shared states that an island has at hand.

The latest states are in memory; older ones stay on disk a while, for laggards that are still fetching them, and
some for long (`retention.py`), so that the run can go back to them.
Promises: a state that was `put` is durable; one that cannot be read is an error in plain words.
Never decides which state is the head.
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
STATES_KEPT_S = 60.0  # older ones stay on disk for laggards this long, which a download of the head has to fit
STATES_KEPT_MAX = 64  # of them; rounds of a second each would fill the disk
VERDICTS_SHARE = 4  # of `keep.bytes_max` at most a fourth goes to what verdicts rest on
LOOKED_FOR_MAX = 4  # earlier states that somebody looked for; the oldest wish gives way


class StateCache:
    """States by name. `put` and `find` belong to one thread, `tidy` to another, which must not see half a `put`."""

    def __init__(self, store: PeerStore, keep: KeepSection = KeepSection()) -> None:  # a frozen value
        self._store, self._retention = store, StateRetention(store, keep)
        self.rows = RowStore(store)
        self._looked_for: OrderedDict[Digest, None] = OrderedDict()
        self._verdicts: Sequence[Digest] = ()  # exhibits, and the states to judge them by, the newest first
        self._pieces: frozenset[Digest] = frozenset()  # of older states, where these lie in pieces
        self._held: OrderedDict[Digest, SharedState] = OrderedDict()
        self._kept_since: dict[Digest, float] = {}  # states on disk -> when they were put there
        self._tidying = Lock()

    def put(self, state: SharedState, layout: ModelLayout) -> Digest:
        pieces = state_pieces(state, layout)
        with self._tidying:
            name = self._store.put_blob(*pieces)
            self._hold(name, state)
        return name

    def find(self, name: Digest, layout: ModelLayout) -> SharedState | None:
        """None if it is not on this disk. Raises RunFailedError for one that cannot be read."""
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
        """Is it on this disk, byte for byte? It stays from now on, also if it has to be fetched first."""
        with self._tidying:
            self._looked_for[name] = None
            self._looked_for.move_to_end(name)
            while len(self._looked_for) > LOOKED_FOR_MAX:
                self._looked_for.popitem(last=False)
        return self._store.read_blob(name) is not None

    def found_way(self) -> None:
        """The run went back: nothing that was looked for is on its way any more."""
        with self._tidying:
            self._looked_for.clear()

    def put_other(self, data: bytes) -> Digest:
        """Any other blob, which nobody tidies away before whoever needs it can say so."""
        with self._tidying:
            name = self._store.put_blob(data)
            self._kept_since[name] = time.monotonic()
        return name

    def hold_a_while(self, name: Digest) -> None:
        """A blob that was fetched: whoever wanted it shall find it, although the next round tidies up."""
        with self._tidying:
            self._kept_since[name] = time.monotonic()

    def hold_pieces(self, pieces: Collection[Digest], whole: Sequence[Digest]) -> tuple[Digest, ...]:
        """From now on these stay, and of the older states these alone. Says which pieces are not here."""
        with self._tidying:
            self._pieces = frozenset(pieces)
            self._retention.follow(whole, self._pieces)
        return tuple(name for name in pieces if not self._store.has_blob(name))

    def keep_verdicts(self, blobs: Sequence[Digest]) -> None:
        """From now on these exhibits and states stay, as many as there is room for."""
        self._verdicts = blobs

    def tidy(self, needed: set[Digest], round: int) -> None:
        """Forget the blobs that neither are needed nor were put there lately. `round` is the head's."""
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
