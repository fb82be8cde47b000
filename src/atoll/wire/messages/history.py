"""History messages: missed vertices, chunks of blobs, era signatures."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from atoll.base.ids import Digest, PeerId
from atoll.base.limits import IDENTITY_BYTES_MAX, SIGNATURE_BYTES_MAX
from atoll.base.machine import Message
from atoll.crypto.digest import BlobManifest
from atoll.wire.messages.vertex import Vertex


class VerticesRequest(Message, frozen=True, tag="VerticesRequest"):
    """Request for the vertices of round `first` and later. Genesis is round -1."""

    first: int


class VerticesResponse(Message, frozen=True, tag="VerticesResponse"):
    """Consecutive vertices, oldest first. `head`: round of the sender's newest vertex."""

    vertices: tuple[Vertex, ...]
    head: int


class ManifestRequest(Message, frozen=True, tag="ManifestRequest"):
    """Request for a manifest. If `known` is unset, only a whole blob counts; else a partly held one counts too.

    `known` is True if the requester has the manifest, which the response then omits.
    """

    blob: Digest
    known: bool | UnsetType = UNSET


class ManifestResponse(Message, frozen=True, tag="ManifestResponse"):
    """Manifest of a blob. `here`: chunks of a partly held blob, one bit each, lowest bit first.

    Without `here` the sender holds the whole blob, or nothing if `manifest` is None.
    """

    blob: Digest
    manifest: BlobManifest | None
    here: bytes | UnsetType = UNSET


class ChunkRequest(Message, frozen=True, tag="ChunkRequest"):
    """Request for one chunk."""

    blob: Digest
    index: int


class ChunkResponse(Message, frozen=True, tag="ChunkResponse"):
    """One chunk. Its bytes are the payload; without a payload the sender no longer holds it."""

    blob: Digest
    index: int


class EraSignature(msgspec.Struct, frozen=True, array_like=True):
    """Signature of one long-lived identity under the last vertex of an era (protocol/history/era_signatures.py)."""

    peer: PeerId
    identity: Annotated[bytes, Meta(max_length=IDENTITY_BYTES_MAX)]
    """Public keys; the agreed membership holds their digest."""
    signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES_MAX)]  # signatures by all keys of the identity


class EraSignatures(Message, frozen=True, tag="EraSignatures"):
    """Signatures under the era ending with this round: the sender's own at the era's end, or requested ones."""

    round: int
    vertex: Digest
    signatures: tuple[EraSignature, ...]


class EraSignaturesRequest(Message, frozen=True, tag="EraSignaturesRequest"):
    """Request for signatures under the era ending with this round, except those of the peers in `have`."""

    round: int
    have: tuple[PeerId, ...]
