"""Shared states as tensors: a small cache of whole states over a `StateStore`.

Invariants:
- States are views of what the store has: a cached state takes no memory of its own.
- The cache itself holds at most one state, the newest staged one, until the next commit.
- Every method runs on the tensor thread.
Not responsible for: which state is the head (`runtime/worker/head.py` holds it).
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakValueDictionary

import numpy as np
from torch import Tensor

from atoll.base.errors import PeerFault, RunFailedError
from atoll.base.ids import Digest
from atoll.training.exchange.layout import ModelLayout
from atoll.training.recipe.state import (
    SharedState,
    size_bytes_of,
    state_from_bytes,
    state_header,
    state_over,
    tensors_in,
)
from atoll.worker.state_store import MissingStateError, StateDraft, StateStore

COPIED = 2**22  # values copied at once


class AgreedStateCache:
    def __init__(self, store: StateStore) -> None:
        self.store = store
        self._alive = WeakValueDictionary[Digest, SharedState]()
        self._staged: SharedState | None = None

    def stage(self, state: SharedState, layout: ModelLayout) -> Digest:
        """Make a state that is in memory durable."""
        return self.stage_spans(state, layout, (0, 0), ())

    def stage_spans(
        self,
        state: SharedState,
        layout: ModelLayout,
        turn: tuple[int, int],
        spans: Iterable[tuple[int, SharedState]],
    ) -> Digest:
        """Make a state durable: this one, but with values `turn` of its vector from `spans`, which cover them.

        A span is the begin of its values in the vector, and a state of these values.
        """
        header, places = state_header(state, layout)
        draft = self.store.draft(size_bytes_of(state, layout))
        try:
            draft.write(0, header)
            for name, value in tensors_in(state).items():
                lo, hi = (min(edge, len(value)) for edge in (turn if name in ("anchor", "momentum") else (0, 0)))
                _write(draft, places[name].begin, value, 0, lo)
                _write(draft, places[name].begin, value, hi, len(value))
            for at, moved in spans:
                for name, value_S in (("anchor", moved.anchor_F), ("momentum", moved.momentum_P)):
                    _write(draft, places[name].begin + 4 * at, value_S, 0, len(value_S))
            name, view = draft.finish()
        except BaseException:
            draft.drop()
            raise
        self._alive[name] = self._staged = state_over(view, layout)
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
            view = self.store.view(name)
            try:
                state = state_from_bytes(view, layout)
            except PeerFault as fault:
                raise RunFailedError("E-RUN-03", f"the agreed state cannot be read: {fault.what}") from fault
            self._alive[name] = state
        return state


def _write(draft: StateDraft, begin: int, value: Tensor, lo: int, hi: int) -> None:
    """Write values lo … hi of a vector that begins at this offset."""
    size_bytes = value.element_size()
    for at in range(lo, hi, COPIED):
        draft.write(begin + size_bytes * at, value[at : min(at + COPIED, hi)].numpy().view(np.uint8).data)
