"""Retention of blobs on disk: what stays beside the head, for how long and within which limits.

Older states stay for a time for laggards that still fetch them. Some stay for long (retention.py), so that the run
can go back to them.

Invariants: the head and the newest states stay; what was just written or read is not removed meanwhile.
Not responsible for: reading and writing states (state_files.py).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from threading import Lock

from atoll.base.ids import Digest
from atoll.features.attribution.row_store import RowStore
from atoll.peer.config.sections import KeepSection
from atoll.runtime.storage.retention import StateRetention
from atoll.runtime.storage.store import PeerStore

STATES_NEWEST = 4  # newest states stay: the head, its parent and proposals
STATES_KEPT_S = 60.0  # older states stay on disk this long; a laggard's download of the head has to fit
STATES_KEPT_MAX = 64  # older states on disk; rounds of one second would fill it
VERDICTS_SHARE = 4  # at most a fourth of `keep.bytes_max` goes to the evidence of verdicts
PINNED_MAX = 4  # pinned earlier states; the oldest pin is dropped


class BlobRetention:
    """Several threads add blobs, another calls `tidy`. A writer holds `adding` until its blob is named here."""

    def __init__(self, store: PeerStore, keep: KeepSection = KeepSection()) -> None:  # a frozen value
        self._store, self._retention = store, StateRetention(store, keep)
        self.rows = RowStore(store)
        self.adding = Lock()
        self.head: Digest | None = None
        self._newest: OrderedDict[Digest, None] = OrderedDict()
        self._pinned: OrderedDict[Digest, None] = OrderedDict()
        self._verdicts: Sequence[Digest] = ()  # exhibits and the states that replays need, newest first
        self._pieces: frozenset[Digest] = frozenset()  # pieces of older states, where those are coded
        self._kept_since: dict[Digest, float] = {}  # blob on disk → time at which it was stored or read

    def add_state(self, name: Digest) -> None:
        """Keep a new state among the newest. The caller holds `adding`."""
        self._kept_since[name] = time.monotonic()
        self._newest[name] = None
        self._newest.move_to_end(name)
        while len(self._newest) > STATES_NEWEST:
            self._newest.popitem(last=False)

    def pin_state(self, name: Digest) -> None:
        """Keep an earlier state, also one that has to be fetched first, until `clear_pins`."""
        with self.adding:
            self._pinned[name] = None
            self._pinned.move_to_end(name)
            while len(self._pinned) > PINNED_MAX:
                self._pinned.popitem(last=False)

    def clear_pins(self) -> None:
        """Clear all pins, once the run went back."""
        with self.adding:
            self._pinned.clear()

    def put_blob(self, data: bytes) -> Digest:
        """Store another blob and keep it for `STATES_KEPT_S`, until its user pins it."""
        with self.adding:
            name = self._store.put_blob(data)
            self._kept_since[name] = time.monotonic()
        return name

    def pin_for_a_while(self, name: Digest) -> None:
        """Keep a blob for `STATES_KEPT_S`, so that the next `tidy` does not remove it."""
        with self.adding:
            self._kept_since[name] = time.monotonic()

    def retain_pieces(self, pieces: Collection[Digest], whole: Sequence[Digest]) -> tuple[Digest, ...]:
        """Keep these pieces, and only `whole` of the older states. Returns the pieces that are missing."""
        with self.adding:
            self._pieces = frozenset(pieces)
            self._retention.follow(whole, self._pieces)
        return tuple(name for name in pieces if not self._store.has_blob(name))

    def retain_verdicts(self, blobs: Sequence[Digest]) -> None:
        """Keep these exhibits and states, as far as there is room."""
        self._verdicts = blobs

    def tidy(self, needed: set[Digest], round: int) -> None:
        """Remove blobs that are neither needed nor recent. `round` is the head's."""
        most = self._retention.keep.bytes_max
        verdicts = self._store.blobs_within(self._verdicts, most // VERDICTS_SHARE)
        beside = verdicts | self.rows.kept(most - self._retention.size_of(verdicts))
        to_keep = self._retention.states(round, beside)
        recent = time.monotonic() - STATES_KEPT_S
        with self.adding:
            newest = list(self._kept_since.items())[-STATES_KEPT_MAX:]
            self._kept_since = {name: since for name, since in newest if since > recent}
            kept = {*self._newest, *self._kept_since, *self._pinned, *self._pieces}
            head = () if self.head is None else (self.head,)
            self._store.drop_blobs({*kept, *to_keep, *beside, *needed, *head})
