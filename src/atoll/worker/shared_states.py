"""Shared states as tensors: a small cache of whole states over a `StateStore`.

Invariants:
- The cache itself holds at most one whole state, the newest staged one, until the next commit.
- A state that any other part still holds is shared with it, never read into memory twice.
- Every method runs on the tensor thread.
Not responsible for: which state is the head (`runtime/worker/head.py` holds it).
"""

from __future__ import annotations

from weakref import WeakValueDictionary

from atoll.base.errors import PeerFault, RunFailedError
from atoll.base.ids import Digest
from atoll.training.exchange.layout import ModelLayout
from atoll.training.recipe.state import SharedState, read_state, state_pieces
from atoll.worker.state_store import MissingStateError, StateStore


class SharedStates:
    def __init__(self, store: StateStore) -> None:
        self.store = store
        self._alive = WeakValueDictionary[Digest, SharedState]()
        self._staged: SharedState | None = None

    def stage(self, state: SharedState, layout: ModelLayout) -> Digest:
        name = self.store.stage(lambda: state_pieces(state, layout))
        self._alive[name] = self._staged = state
        return name

    def commit(self, name: Digest, layout: ModelLayout) -> SharedState:
        """Make this state the head; the caller holds it from now on. Raises MissingStateError."""
        state = self.load(name, layout)
        self.store.commit(name)
        self._staged = None
        return state

    def find(self, name: Digest, layout: ModelLayout) -> SharedState | None:
        """`load`, or None if the state is not on this disk."""
        try:
            return self.load(name, layout)
        except MissingStateError:
            return None

    def load(self, name: Digest, layout: ModelLayout) -> SharedState:
        """Raises MissingStateError, or RunFailedError if the state is not one of this model."""
        state = self._alive.get(name)
        if state is None:
            size_bytes = self.store.size_bytes(name)
            try:
                state = read_state(lambda begin, end: self.store.read(name, begin, end), size_bytes, layout)
            except PeerFault as fault:
                raise RunFailedError("E-RUN-03", f"the agreed state cannot be read: {fault.what}") from fault
            self._alive[name] = state
        return state
