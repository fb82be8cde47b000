"""Progress of a peer's downloads, as views show it."""

from __future__ import annotations

from typing import Any

from atoll.base.limits import BLOB_CHUNK


def downloaded_bytes(machine: Any) -> tuple[int, int]:
    """(bytes that are here, bytes in all) of the blobs that this peer's machine is downloading; 0 if none is."""
    here = whole = 0
    for fetch in (machine.regain.fetch, *tuple(machine.downloads.wanted.values())):
        if fetch is not None and fetch.manifest is not None and not fetch.over:
            size = fetch.manifest.size_bytes
            here, whole = here + min(size, len(fetch.received) * BLOB_CHUNK), whole + size
    return here, whole
