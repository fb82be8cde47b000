"""StateStore: shared states by digest, as canonical bytes that are written span by span, committed and viewed.

Implementations: files (`runtime/storage/state_files.py`) and memory (below, for virtual workers).
Invariants:
- A staged state is durable when `finish` returns; a voter votes only afterwards.
- A viewed state costs no memory that the system could not take back (files).
- The head and the three newest states that were staged since are recoverable.
- A failed attempt needs no undo: a later commit releases its staged state.
Not responsible for: tensors (`shared_states.py`), which state is agreed (vertices decide), how long earlier states
stay (retention).
"""

from __future__ import annotations

from typing import Protocol

from atoll.base.errors import RunFailedError
from atoll.base.ids import Digest
from atoll.crypto.digest import Buffer, blob_id, manifest_of


class MissingStateError(RunFailedError):
    """The state is not on this disk, or the disk damaged it."""

    def __init__(self) -> None:
        super().__init__("E-RUN-02", "the agreed state is not on this disk")


class StateDraft(Protocol):
    """A tentative next state that is being written. Call `finish` or `drop`."""

    def write(self, at: int, data: Buffer) -> None:
        """Write bytes from offset `at` on, in any order."""
        ...

    def finish(self) -> tuple[Digest, memoryview]:
        """Make it durable: (its name, its bytes)."""
        ...

    def drop(self) -> None: ...


class StateStore(Protocol):
    """Every method that takes a digest raises MissingStateError if that state is not here."""

    def draft(self, size_bytes: int) -> StateDraft: ...

    def commit(self, name: Digest) -> None:
        """Make a staged, fetched or earlier state the head."""
        ...

    def view(self, name: Digest) -> memoryview:
        """All bytes, verified and read-only. They stay what they are, also once the store drops the state."""
        ...

    def is_recoverable(self, name: Digest) -> bool:
        """Whether every byte can be read, also after a crash."""
        ...


def stage(store: StateStore, *pieces: Buffer) -> Digest:
    """Make the concatenated pieces a staged state."""
    draft, at = store.draft(sum(map(len, pieces))), 0
    for piece in pieces:
        draft.write(at, piece)
        at += len(piece)
    return draft.finish()[0]


class MemoryStateDraft:
    def __init__(self, states: dict[Digest, bytes], size_bytes: int) -> None:
        self._states, self._data = states, bytearray(size_bytes)

    def write(self, at: int, data: Buffer) -> None:
        self._data[at : at + len(data)] = data

    def finish(self) -> tuple[Digest, memoryview]:
        data = bytes(self._data)
        name = blob_id(manifest_of(data))
        self._states.pop(name, None)  # the newest is last
        self._states[name] = data
        return name, memoryview(data)

    def drop(self) -> None:
        pass


class MemoryStateStore:
    """States in a dictionary, which stands for the disk. Its owner drops earlier states."""

    def __init__(self, states: dict[Digest, bytes]) -> None:
        self._states = states
        self.head: Digest | None = None

    def draft(self, size_bytes: int) -> MemoryStateDraft:
        return MemoryStateDraft(self._states, size_bytes)

    def commit(self, name: Digest) -> None:
        self.view(name)
        self.head = name

    def view(self, name: Digest) -> memoryview:
        if name not in self._states:
            raise MissingStateError
        return memoryview(self._states[name])

    def is_recoverable(self, name: Digest) -> bool:
        return name in self._states
