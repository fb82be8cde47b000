"""Extensions of member records: bounds of what a join may add, and their size in a vertex.

Invariants:
- A member's extensions change only by its own signed join.
Not responsible for: the meaning of an extension. Its name belongs to the feature that reads it.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from msgspec import UNSET, UnsetType

from atoll.base.ids import PeerId
from atoll.base.limits import EXTENSION_NAME_MAX, EXTENSIONS_BYTES_MAX, EXTENSIONS_MAX
from atoll.wire.messages.statements import Extensions
from atoll.wire.messages.vertex import MemberExtensions

FIELD_BYTES = 16  # name of the field in a body, and the header of its list


def extensions_problem(extensions: Extensions | UnsetType) -> str | None:
    """Reason why a join may not carry these; None if it may."""
    if extensions is UNSET:
        return None
    names = [extension.name for extension in extensions]
    if len(names) > EXTENSIONS_MAX:
        return f"it has {len(names)} extensions; a member may have {EXTENSIONS_MAX}"
    if names != sorted(set(names)):
        return "its extensions are not sorted by name, or two have one name"
    if not all(0 < len(name) <= EXTENSION_NAME_MAX and name.isascii() and name.isprintable() for name in names):
        return f"an extension's name is not 1 to {EXTENSION_NAME_MAX} printable ASCII characters"
    size = sum(len(name) + len(data) for name, data in extensions)
    if size > EXTENSIONS_BYTES_MAX:
        return f"its extensions take {size} bytes; a member's may take {EXTENSIONS_BYTES_MAX}"
    return None


def extensions_bytes(entries: Collection[MemberExtensions]) -> int:
    """Bytes that these entries take in a vertex."""
    return FIELD_BYTES + sum(len(msgspec.msgpack.encode(entry)) for entry in entries) if entries else 0


def additional_extension_bytes(
    peer: PeerId, extensions: Extensions | UnsetType, before: dict[PeerId, Extensions]
) -> int:
    """Bytes that a vertex takes beyond those of `before` if this join is admitted."""
    if extensions is UNSET:
        return 0
    held = [MemberExtensions(peer, before[peer])] if peer in before else []
    return extensions_bytes([MemberExtensions(peer, extensions)]) - extensions_bytes(held)
