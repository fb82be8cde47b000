"""Messages about what was agreed: vertices for those who missed them, and chunks of blobs."""

from __future__ import annotations

from atoll.base.ids import Digest
from atoll.base.machine import Message
from atoll.keys.digest import Manifest
from atoll.wire.messages.vertex import Vertex


class WantVertices(Message, frozen=True):
    """Send me what closed round `first` and the rounds after it. Genesis is round -1."""

    first: int


class Vertices(Message, frozen=True):
    """Consecutive vertices, oldest first; `head` is the round that the sender's newest one closed."""

    vertices: tuple[Vertex, ...]
    head: int


class WantManifest(Message, frozen=True):
    blob: Digest


class ManifestIs(Message, frozen=True):
    """`manifest` is None when the sender does not hold the blob."""

    blob: Digest
    manifest: Manifest | None


class WantChunk(Message, frozen=True):
    blob: Digest
    index: int


class Chunk(Message, frozen=True):
    """The chunk's bytes are the payload; no payload means that the sender does not hold it any more."""

    blob: Digest
    index: int
