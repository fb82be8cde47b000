"""Slow work of a transfer: chunks go to disk and come from disk off the loop."""

from __future__ import annotations

import msgspec

from atoll.base.ids import Digest
from atoll.base.machine import Payload
from atoll.crypto.digest import BlobManifest


class OpenBlob(msgspec.Struct, frozen=True):
    """Make room for this blob -> BlobOpened with the chunks that are here already, verified."""

    blob: Digest
    manifest: BlobManifest


class BlobOpened(msgspec.Struct, frozen=True):
    have: frozenset[int]


class StoreChunk(msgspec.Struct, frozen=True):
    """Write one verified chunk -> None once it is on disk."""

    blob: Digest
    index: int
    payload: Payload


class CloseBlob(msgspec.Struct, frozen=True):
    """Every chunk is here: make the blob durable under its name -> None."""

    blob: Digest


class DropBlob(msgspec.Struct, frozen=True):
    """Nobody wants the rest of this blob: forget what is here of it -> None."""

    blob: Digest


class ReadManifest(msgspec.Struct, frozen=True):
    """-> Manifest, or None if the blob is not held; `partly`: Partly, if some of it is here and verified."""

    blob: Digest
    partly: bool = False


class PartialManifest(msgspec.Struct, frozen=True):
    manifest: BlobManifest
    here: bytes  # a bit for each chunk, the lowest first


class ReadChunk(msgspec.Struct, frozen=True):
    """-> Payload, or None if the blob is not held."""

    blob: Digest
    index: int
