"""Messages about what was agreed: vertices for those who missed them, chunks of blobs, signatures under eras."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from atoll.base.ids import Digest, PeerId
from atoll.base.limits import IDENTITY_BYTES_MAX, SIGNATURE_BYTES_MAX
from atoll.base.machine import Message
from atoll.crypto.digest import BlobManifest
from atoll.wire.messages.vertex import Vertex


class VerticesRequest(Message, frozen=True, tag="WantVertices"):
    """Send me what closed round `first` and the rounds after it. Genesis is round -1."""

    first: int


class VerticesResponse(Message, frozen=True, tag="Vertices"):
    """Consecutive vertices, oldest first; `head` is the round that the sender's newest one closed."""

    vertices: tuple[Vertex, ...]
    head: int


class ManifestRequest(Message, frozen=True, tag="WantManifest"):
    """`known`: also of a blob that is here in part, without its manifest if I have that. Left out: a whole one."""

    blob: Digest
    known: bool | UnsetType = UNSET


class ManifestResponse(Message, frozen=True, tag="ManifestIs"):
    """`here`: of a blob that the sender is fetching, the chunks that it has, one bit each, the lowest first.

    Without it the sender holds the whole blob, or nothing of it when `manifest` is None, too.
    """

    blob: Digest
    manifest: BlobManifest | None
    here: bytes | UnsetType = UNSET


class ChunkRequest(Message, frozen=True, tag="WantChunk"):
    blob: Digest
    index: int


class ChunkResponse(Message, frozen=True, tag="Chunk"):
    """The chunk's bytes are the payload; no payload means that the sender does not hold it any more."""

    blob: Digest
    index: int


class EraSignature(msgspec.Struct, frozen=True, array_like=True):
    """One member's long-lived identity under the vertex that ended an era: protocol/history/era_signatures.py says
    over what."""

    peer: PeerId
    identity: Annotated[bytes, Meta(max_length=IDENTITY_BYTES_MAX)]
    """Public keys; the agreed membership holds their digest."""
    signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES_MAX)]  # by all of them


class EraSignatures(Message, frozen=True, tag="EraSigned"):
    """Signatures under the vertex that ended an era with this round: mine when it ends, or what you asked for."""

    round: int
    vertex: Digest
    signatures: tuple[EraSignature, ...]


class EraSignaturesRequest(Message, frozen=True, tag="WantEra"):
    """Which signatures do you hold under the end of this era, beside those of these peers?"""

    round: int
    have: tuple[PeerId, ...]
