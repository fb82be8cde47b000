"""The shared states that an island has at hand, and what only this peer knows beside them.

The latest states are in memory; older ones stay on disk a while, for laggards that are still fetching them, and
some for long (`retention.py`), so that the run can go back to them.
Promises: a state that was `put` is durable; one that cannot be read is an error in plain words.
Never decides which state is the head.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from atoll.base.errors import PeerFault, RunFailedError
from atoll.base.ids import DIGEST_BYTES, Digest, PeerId
from atoll.host.retention import Retention
from atoll.host.rows import Rows
from atoll.host.store import Store
from atoll.keys.digest import Buffer
from atoll.learn.codec.blocks import tensor_over
from atoll.learn.kept import Kept
from atoll.learn.late import LateWork, late_bytes, late_from_bytes
from atoll.learn.layout import Layout
from atoll.learn.state import SharedState, state_from_bytes, state_pieces
from atoll.learn.tensorfile import load, pieces_of
from atoll.node.config.sections import Keep

STATES_HELD = 4  # recent shared states in memory: the head, its parent, and proposals
STATES_KEPT_S = 60.0  # older ones stay on disk for laggards this long, which a download of the head has to fit
STATES_KEPT_MAX = 64  # of them; rounds of a second each would fill the disk
LOOKED_FOR_MAX = 4  # earlier states that somebody looked for; the oldest wish gives way


class Shelf:
    """States by name. `put` and `find` belong to one thread, `tidy` to another, which must not see half a `put`."""

    def __init__(self, store: Store, keep: Keep = Keep()) -> None:  # a frozen value
        self._store, self._retention = store, Retention(store, keep)
        self.rows = Rows(store)
        self._looked_for: OrderedDict[Digest, None] = OrderedDict()
        self._pieces: frozenset[Digest] = frozenset()  # of older states, where these lie in pieces
        self._held: OrderedDict[Digest, SharedState] = OrderedDict()
        self._kept_since: dict[Digest, float] = {}  # states on disk -> when they were put there
        self._tidying = Lock()

    def put(self, state: SharedState, layout: Layout) -> Digest:
        pieces = state_pieces(state, layout)
        with self._tidying:
            name = self._store.put_blob(*pieces)
            self._hold(name, state)
        return name

    def find(self, name: Digest, layout: Layout) -> SharedState | None:
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

    def keep_mine(self, me: PeerId) -> None:
        """Members have states of their own: of the rounds that stay, mine does."""
        self._retention.me = me

    def tidy(self, needed: set[Digest], round: int) -> None:
        """Forget the blobs that neither are needed nor were put there lately. `round` is the head's."""
        rows = self.rows.kept(self._retention.keep.bytes_max)
        to_keep = self._retention.states(round, rows)
        recent = time.monotonic() - STATES_KEPT_S
        with self._tidying:
            newest = list(self._kept_since.items())[-STATES_KEPT_MAX:]
            self._kept_since = {name: since for name, since in newest if since > recent}
            kept = {*self._held, *self._kept_since, *self._looked_for, *self._pieces}
            self._store.drop_blobs({*kept, *to_keep, *rows, *needed})

    def _hold(self, name: Digest, state: SharedState) -> None:
        self._held[name] = state
        self._held.move_to_end(name)
        self._kept_since[name] = time.monotonic()
        while len(self._held) > STATES_HELD:
            self._held.popitem(last=False)


PRIVATE = "atoll/private/2"
BYTES = ("inner", "claim", "late")  # what stands in the private file as bytes, beside vectors


@dataclass(frozen=True)
class Private:
    """What only this peer knows. Good for exactly one vertex, but for `kept`, which says what it is good for."""

    vertex: Digest | None
    memory_F: Tensor | None = None  # error feedback
    inner: Buffer = b""  # moments
    claim: bytes = b""  # the last one that a vertex holds, where rounds are audited
    late: LateWork | None = None  # what it did apart and no vertex has yet
    kept: Kept | None = None  # parameters that the recipe leaves to it


NOTHING = Private(None)


def write_private(store: Store, private: Private) -> None:
    """Tensors go to disk from where they lie."""
    assert private.vertex is not None
    late = late_bytes(private.late) if private.late is not None else b""
    beside = zip(BYTES, (private.inner, private.claim, late), strict=True)
    tensors = {name: tensor_over(data, torch.uint8) for name, data in beside if data}
    told = {"format": PRIVATE, "vertex": private.vertex.hex()}
    if private.memory_F is not None:
        tensors["memory"] = private.memory_F
    if private.kept is not None:
        tensors["kept"], told["kept"] = private.kept.x_F, private.kept.state.hex()
    store.write_private(*pieces_of(tensors, told))


def read_private(store: Store, floats: int) -> Private:
    """What was written last, of a model of so many values; nothing if it is damaged, which costs what is this
    peer's own and nothing that was agreed."""
    data = store.read_private()
    if data is None:
        return NOTHING
    try:
        tensors, told = load(data)
        vectors = {name: tensors.pop(name).clone() for name in ("memory", "kept") if name in tensors}
        if told.get("format") != PRIVATE or not all(_fits(vector, floats) for vector in vectors.values()):
            return NOTHING
        inner, claim, late = (tensors.pop(name).numpy().tobytes() if name in tensors else b"" for name in BYTES)
        kept_F = vectors.get("kept")
        return Private(
            _digest(told.get("vertex", "")),
            vectors.get("memory"),
            inner,
            claim,
            late_from_bytes(late, floats) if late else None,
            Kept(kept_F, _digest(told.get("kept", ""))) if kept_F is not None else None,
        )
    except (PeerFault, ValueError):
        return NOTHING


def _fits(vector: Tensor, floats: int) -> bool:
    """Of this model. A power cut may leave it half of one round and half of another, but nothing else."""
    return vector.shape == (floats,) and vector.dtype == torch.float32 and bool(vector.isfinite().all())


def _digest(text: str) -> Digest:
    if len(data := bytes.fromhex(text)) != DIGEST_BYTES:
        raise ValueError(f"{len(data)} bytes are no digest")
    return Digest(data)
