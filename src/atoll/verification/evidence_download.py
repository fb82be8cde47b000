"""Downloads of evidence: exhibits of audits and openings, and updates to score or compare.

The checked member names the blob of its exhibit, and the checker fetches it like any blob.

Invariants:
- If two members name one blob, both are sources: the first may not have it.
- The remains of a failed download are dropped. A download is tried TRIES_MAX times.
Not responsible for: judging, reading what arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import Effect, RunTask, Start
from atoll.protocol.transfer.download import BlobDownload
from atoll.protocol.transfer.tasks import DropBlob

TRIES_MAX = 3  # failed downloads of one exhibit: a member that sends wrong bytes must not waste more of the link


class PendingExhibitCheck(Protocol):
    """An exhibit that the local peer must check."""

    blob: Digest | None  # name of the exhibit; requested again while None
    tries: int


class EvidenceDownloads:
    def __init__(self, job: str) -> None:
        """`job`: prefix of task names, without the slash."""
        self.job = job
        self.fetching: set[Digest] = set()

    def point(
        self,
        turn: PendingExhibitCheck,
        blob: Digest,
        sender: PeerId,
        bytes_most: int,
        under_way: Mapping[Digest, BlobDownload],
        now: Seconds,
    ) -> tuple[BlobDownload | None, list[Effect]]:
        """The sender holds the blob: start a download, or add a source to one that is `under_way`."""
        if (other := under_way.get(blob)) is not None:
            return None, other.add_sources([sender], now)
        turn.blob = blob
        self.fetching.add(blob)
        fetch = BlobDownload(blob, [sender], bytes_most)
        return fetch, fetch.handle(Start({}), now)

    def given_up(self, wanted: Iterable[Digest | None]) -> list[Digest]:
        """Downloads that are no longer among `wanted`."""
        over = sorted(self.fetching.difference(wanted))
        self.fetching.difference_update(over)
        return over

    def ended(self, blob: Digest) -> bool:
        """Whether this ended download belongs here; it is forgotten."""
        mine = blob in self.fetching
        self.fetching.discard(blob)
        return mine

    def drop(self, blob: Digest) -> Effect:
        """Drop the chunks of a failed download."""
        return RunTask(f"{self.job}/drop/{blob.hex()}", DropBlob(blob))


def tried(turn: PendingExhibitCheck) -> bool:
    """Count a failed download, which a restart or a link may have broken. True if there is no further try."""
    turn.blob, turn.tries = None, turn.tries + 1
    return turn.tries >= TRIES_MAX
