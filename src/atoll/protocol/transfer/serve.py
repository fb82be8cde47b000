"""Server of manifests and chunks: answers requests of other peers from disk.

Invariants:
- Reads are tasks and never block training. Requests above the bounds are dropped: the requester asks again.
Not responsible for: who may read (peer/membership/readers.py).
"""

from __future__ import annotations

from msgspec import UNSET

from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import Effect, Event, Lane, Payload, Received, RunTask, Send, TaskDone, TaskFailed
from atoll.crypto.digest import BlobManifest
from atoll.protocol.transfer.download import WINDOW_MAX
from atoll.protocol.transfer.tasks import PartialManifest, ReadChunk, ReadManifest
from atoll.wire.messages.history import ChunkRequest, ChunkResponse, ManifestRequest, ManifestResponse

SERVED_AT_ONCE = 64  # chunk reads in progress for other peers; excess requests are dropped and sent again
SERVED_TO_ONE = WINDOW_MAX  # reads for one peer: a flooding peer leaves half of all reads to the others


class BlobServer:
    """Server of manifests and chunks: answers requests of other peers from disk."""

    def __init__(self) -> None:
        self.jobs: dict[str, tuple[PeerId, ManifestRequest | ChunkRequest]] = {}
        self.count = 0

    def handle(self, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Received(sender, (ManifestRequest() | ChunkRequest()) as wish):
                theirs = sum(asker == sender for asker, _ in self.jobs.values())
                if len(self.jobs) >= SERVED_AT_ONCE or theirs >= SERVED_TO_ONE:
                    return []  # the requester times out and asks another source
                self.count += 1
                job = f"serve/{self.count}"
                self.jobs[job] = (sender, wish)
                if isinstance(wish, ManifestRequest):
                    return [RunTask(job, ReadManifest(wish.blob, partly=wish.known is not UNSET))]
                return [RunTask(job, ReadChunk(wish.blob, wish.index))]
            case TaskDone(job, result) if job in self.jobs:
                sender, wish = self.jobs.pop(job)
                if isinstance(wish, ManifestRequest):
                    return [Send(sender, _manifest_response(wish, result), Lane.BULK)]
                payload = result if isinstance(result, Payload) else None
                return [Send(sender, ChunkResponse(wish.blob, wish.index), Lane.BULK, payload)]
            case TaskFailed(job, _) if job in self.jobs:
                del self.jobs[job]
                return []
            case _:
                return []


def _manifest_response(wish: ManifestRequest, found: object) -> ManifestResponse:
    match found:
        case BlobManifest():
            return ManifestResponse(wish.blob, found)
        case PartialManifest(manifest, here):
            return ManifestResponse(wish.blob, None if wish.known is True else manifest, here)
        case _:
            return ManifestResponse(wish.blob, None)
