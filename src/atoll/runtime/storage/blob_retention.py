"""Retention of blobs on disk: what stays beside the head, for how long and within which limits.

Older states stay for a time for laggards that still fetch them. Some stay for long (retention.py), so that the run
can go back to them. Both together take at most `keep.bytes_max`, less on a disk that fills up, and what is being
fetched right now.

Invariants:
- The head stays, and so do the newest states staged since; the head before it while it is needed.
- What was just written, read or served is not removed meanwhile.
Not responsible for: reading and writing states (state_files.py).
"""

from __future__ import annotations

import shutil
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from threading import Lock

from atoll.base.ids import Digest
from atoll.base.limits import MIB
from atoll.features.attribution.row_store import RowStore
from atoll.peer.config.sections import KeepSection
from atoll.runtime.storage.retention import StateRetention
from atoll.runtime.storage.store import PeerStore

STAGED_NEWEST = 3  # newest states staged since the head stay: this peer may have voted for them
SERVED_KEPT_S = 30.0  # an older state stays as long as members fetch it, with pauses of at most this length
SERVED_MAX = 2  # such states; they are beyond `keep.bytes_max`
STATES_KEPT_S = 60.0  # older states stay on disk this long, for laggards that begin to fetch them
STATES_KEPT_MAX = 64  # such states; rounds of one second would fill the disk
# of such states; larger ones go at once, since writing over their files costs a tenth of new files
STATES_KEPT_BYTES = 256 * MIB
STATES_FREE = 2  # states for which the disk keeps room: the next one, and one that a rollback or a repair fetches
VERDICTS_SHARE = 4  # at most a fourth of `keep.bytes_max` goes to the evidence of verdicts
PINNED_MAX = 4  # pinned earlier states; the oldest pin is dropped


class BlobRetention:
    """Several threads add blobs, another calls `tidy`. A writer holds `adding` until its blob is named here."""

    def __init__(self, store: PeerStore, keep: KeepSection = KeepSection()) -> None:  # a frozen value
        self._store, self._retention = store, StateRetention(store, keep)
        self.rows = RowStore(store)
        self.adding = Lock()
        self.head: Digest | None = None
        self._staged: OrderedDict[Digest, None] = OrderedDict()  # since the head
        self._before: Digest | None = None  # the head before this one
        self._replaced: dict[Digest, float] = {}  # earlier state → time at which it was replaced
        self._pinned: OrderedDict[Digest, None] = OrderedDict()
        self._verdicts: Sequence[Digest] = ()  # exhibits and the states that replays need, newest first
        self._pieces: frozenset[Digest] = frozenset()  # pieces of older states, where those are coded
        self._kept_since: dict[Digest, float] = {}  # blob on disk → time at which it was stored or read

    def add_state(self, name: Digest) -> None:
        """Keep a state that was staged. The caller holds `adding`."""
        self._staged[name] = None
        self._staged.move_to_end(name)
        while len(self._staged) > STAGED_NEWEST:
            self._replaced[self._staged.popitem(last=False)[0]] = time.monotonic()

    def set_head(self, name: Digest) -> None:
        """This state is agreed, and the others are of the past. The caller holds `adding`."""
        if name == self.head:
            return
        for old in (*self._staged, self.head):  # the old head is the last to go
            if old is not None:
                self._replaced[old] = time.monotonic()
        self._staged.clear()
        self._replaced.pop(name, None)
        self._before, self.head = self.head, name

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

    def tidy(self, needed: set[Digest], round: int, keeps_before: bool = True) -> None:
        """Remove blobs that are neither needed nor recent. `round` is the head's.

        `keeps_before`: a restart would read the head before this one.
        """
        most = self._bytes_max()
        verdicts = self._store.blobs_within(self._verdicts, most // VERDICTS_SHARE)
        beside = verdicts | self.rows.kept(most - self._retention.size_of(verdicts))
        to_keep = beside | self._retention.states(round, beside, most)
        room_bytes = most - self._retention.size_of(to_keep)
        with self.adding:
            self._kept_since, self._replaced = _recent(self._kept_since), _recent(self._replaced)
            kept = {*self._staged, *self._kept_since, *self._pinned, *self._pieces, *to_keep, *needed}
            kept |= {name for name in (self.head, self._before if keeps_before else None) if name is not None}
            recent = [name for name in reversed(self._replaced) if name not in kept]
            kept |= self._store.blobs_within(recent, min(room_bytes, STATES_KEPT_BYTES))
            served = self._store.served_since(time.monotonic() - SERVED_KEPT_S)
            fetched = [name for name in served if name not in kept and self._store.has_blob(name)]
            self._store.drop_blobs(kept.union(fetched[:SERVED_MAX]))

    def _bytes_max(self) -> int:
        """Most bytes beside the head: `keep.bytes_max`, but the disk keeps room for `STATES_FREE` states more."""
        head_bytes = self._retention.size_of((self.head,)) if self.head is not None else 0
        free_bytes = shutil.disk_usage(self._store.folder).free + self._store.blob_bytes() - head_bytes
        return max(0, min(self._retention.keep.bytes_max, free_bytes - STATES_FREE * head_bytes))


def _recent(since: dict[Digest, float]) -> dict[Digest, float]:
    """The newest of these blobs, as far as their time is less than `STATES_KEPT_S` ago."""
    earliest = time.monotonic() - STATES_KEPT_S
    return {name: at for name, at in list(since.items())[-STATES_KEPT_MAX:] if at > earliest}
