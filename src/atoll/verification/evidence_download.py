"""What others lay out for me to look at, on its way here: exhibits of audits and openings, updates to be scored.

Whoever is to be looked at says by which name its exhibit lies there; it is fetched from it like any blob.
Promises: a blob that somebody else named first is asked of this one, too, since the other may not have it; what a
failed download left behind is dropped, and it is tried TRIES_MAX times. Never judges, never looks at what came.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import Effect, RunTask, Start
from atoll.protocol.transfer.download import BlobDownload
from atoll.protocol.transfer.tasks import DropBlob

TRIES_MAX = 3  # downloads of one exhibit that failed: who sends wrong bytes shall not waste more of my link


class EvidenceRequest(Protocol):
    """Something that is mine to look at."""

    blob: Digest | None  # what I was pointed at; asked again while it is None
    tries: int


class EvidenceDownloads:
    def __init__(self, job: str) -> None:
        """`job`: what names of jobs begin with, without the slash."""
        self.job = job
        self.fetching: set[Digest] = set()

    def point(
        self,
        turn: EvidenceRequest,
        blob: Digest,
        sender: PeerId,
        bytes_most: int,
        under_way: Mapping[Digest, BlobDownload],
        now: Seconds,
    ) -> tuple[BlobDownload | None, list[Effect]]:
        """`sender` says that it lies there. A download that begins, or one source more of one under way."""
        if (other := under_way.get(blob)) is not None:
            return None, other.offer([sender], now)
        turn.blob = blob
        self.fetching.add(blob)
        fetch = BlobDownload(blob, [sender], bytes_most)
        return fetch, fetch.handle(Start({}), now)

    def given_up(self, wanted: Iterable[Digest | None]) -> list[Digest]:
        """Downloads that are none of `wanted` any more."""
        over = sorted(self.fetching.difference(wanted))
        self.fetching.difference_update(over)
        return over

    def ended(self, blob: Digest) -> bool:
        """Whether this download, which is over, was one of mine."""
        mine = blob in self.fetching
        self.fetching.discard(blob)
        return mine

    def drop(self, blob: Digest) -> Effect:
        """What came of a failed download is of no use to anybody."""
        return RunTask(f"{self.job}/drop/{blob.hex()}", DropBlob(blob))


def tried(turn: EvidenceRequest) -> bool:
    """Its download failed: it is asked for again, since a restart or a link may have broken it. True: no more."""
    turn.blob, turn.tries = None, turn.tries + 1
    return turn.tries >= TRIES_MAX
