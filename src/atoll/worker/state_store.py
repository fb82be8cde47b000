"""StateStore: shared states by digest, as canonical bytes that are staged, committed and read span by span.

Implementations: files (`runtime/storage/state_files.py`) and memory (below, for virtual workers).
Invariants:
- A staged state is durable when `stage` returns; a voter votes only afterwards.
- The head and the three newest states that were staged since are recoverable.
- A failed attempt needs no undo: a later commit releases its staged state.
Not responsible for: tensors (`shared_states.py`), which state is agreed (vertices decide), how long earlier states
stay (retention).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from atoll.base.errors import RunFailedError
from atoll.base.ids import Digest
from atoll.crypto.digest import Buffer, blob_id, manifest_of

Spans = Callable[[], Iterable[Buffer]]
"""The bytes of a state in order. A store may ask twice: for the digest, then to write."""


class MissingStateError(RunFailedError):
    """The state is not on this disk, or the disk damaged it."""

    def __init__(self) -> None:
        super().__init__("E-RUN-02", "the agreed state is not on this disk")


class StateStore(Protocol):
    """Every method that takes a digest raises MissingStateError if that state is not here."""

    def stage(self, spans: Spans) -> Digest:
        """Make a tentative next state durable."""
        ...

    def commit(self, name: Digest) -> None:
        """Make a staged, fetched or earlier state the head."""
        ...

    def read(self, name: Digest, begin: int, end: int) -> Buffer:
        """Bytes `begin` to `end`, fewer at the end of the state. Memory follows the span, not the state."""
        ...

    def size_bytes(self, name: Digest) -> int: ...

    def is_recoverable(self, name: Digest) -> bool:
        """Whether every byte can be read, also after a crash."""
        ...


class MemoryStateStore:
    """States in a dictionary, which stands for the disk. Its owner drops earlier states."""

    def __init__(self, states: dict[Digest, bytes]) -> None:
        self._states = states
        self.head: Digest | None = None

    def stage(self, spans: Spans) -> Digest:
        data = b"".join(spans())
        name = blob_id(manifest_of(data))
        self._states.pop(name, None)  # the newest is last
        self._states[name] = data
        return name

    def commit(self, name: Digest) -> None:
        self.size_bytes(name)
        self.head = name

    def read(self, name: Digest, begin: int, end: int) -> bytes:
        if name not in self._states:
            raise MissingStateError
        return self._states[name][begin:end]

    def size_bytes(self, name: Digest) -> int:
        if name not in self._states:
            raise MissingStateError
        return len(self._states[name])

    def is_recoverable(self, name: Digest) -> bool:
        return name in self._states
