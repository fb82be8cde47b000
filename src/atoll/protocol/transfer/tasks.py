"""Storage tasks of a transfer: reading and writing chunks outside the event loop."""

from __future__ import annotations

import msgspec

from atoll.base.ids import Digest
from atoll.base.machine import Payload
from atoll.crypto.digest import BlobManifest


class PrepareBlobStorage(msgspec.Struct, frozen=True):
    """Prepare storage for this blob -> BlobStoragePrepared with the verified chunks that are already stored."""

    blob: Digest
    manifest: BlobManifest


class BlobStoragePrepared(msgspec.Struct, frozen=True):
    """Indices of the chunks that are already stored."""

    have: frozenset[int]


class StoreChunk(msgspec.Struct, frozen=True):
    """Write one verified chunk -> None when it is on disk."""

    blob: Digest
    index: int
    payload: Payload


class CloseBlob(msgspec.Struct, frozen=True):
    """Make a complete blob durable under its name -> None."""

    blob: Digest


class DropBlob(msgspec.Struct, frozen=True):
    """Delete the stored chunks of an abandoned blob -> None."""

    blob: Digest


class ReadManifest(msgspec.Struct, frozen=True):
    """Read a manifest -> BlobManifest, or None if the blob is not held.

    `partly`: PartialManifest if some verified chunks are held.
    """

    blob: Digest
    partly: bool = False


class PartialManifest(msgspec.Struct, frozen=True):
    """Manifest of a partly held blob."""

    manifest: BlobManifest
    here: bytes  # held chunks, one bit each, lowest bit first


class ReadChunk(msgspec.Struct, frozen=True):
    """Read one chunk -> Payload, or None if the blob is not held."""

    blob: Digest
    index: int
