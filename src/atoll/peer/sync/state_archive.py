"""State archive interface: older states in pieces at several members, as the kernel uses it.

Invariants:
- No round waits for the archive.
Not responsible for: which member holds which piece (a `CapabilityLedger` decides that).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import Effect, Event, TaskDone, TaskFailed
from atoll.wire.messages.statements import BaseStatement


class DistributedStateArchive(Protocol):
    def restore(self, kept: dict[str, bytes]) -> None:
        """Restore stored data after a restart."""

    def begin(self) -> list[Effect]:
        """Tell the disk what to keep; the ledger has read all vertices in memory."""
        ...

    def on_vertex(self) -> list[Effect]:
        """The ledger has read one vertex more."""
        ...

    def on_heartbeat(self, at: int, now: Seconds) -> list[Effect]:
        """A heartbeat is due; `at` is the round of the local state."""
        ...

    def own_reports(self, now: Seconds) -> Sequence[BaseStatement]:
        """Reports of the local peer that no vertex holds yet."""
        ...

    def is_placed(self, state: Digest) -> bool:
        """True if the state can be rebuilt once enough holders are reachable."""
        ...

    def rebuild(self, state: Digest, now: Seconds) -> list[Effect] | None:
        """Rebuild this state; None if it is not placed.

        `ArchivedStateRebuilt` or `ArchivedStateRebuildFailed` follows.
        """
        ...

    def on_download_event(self, event: Event, quiet: bool, now: Seconds) -> list[Effect]:
        """Process an event of a piece download. `quiet`: no round needs the network."""
        ...

    def on_peer_connected(self, peer: PeerId, now: Seconds) -> list[Effect]:
        """A peer has connected."""
        ...

    def on_task_done(self, event: TaskDone | TaskFailed, reach: Sequence[PeerId], now: Seconds) -> list[Effect]:
        """A task of the archive has ended."""
        ...
