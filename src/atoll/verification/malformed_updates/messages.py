"""Evidence that a committed row is malformed: one leaf of it, or the whole of a small one, with its commitment.

The commitment names the bytes. So any peer with the round's plan can judge them, at any time and from any sender.
If rows have leaves, one leaf is enough. If the number of leaves is the flaw, no leaf is shown.
Invariants:
- Reading trusts no byte: it bounds forms and lengths.
Not responsible for: judging (`verification/malformed_updates/tensors.py`).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from atoll.base.errors import UNREADABLE, PeerFault
from atoll.base.ids import Digest
from atoll.base.limits import MALFORMED_ROW_BYTES_MAX, PATH_MAX, ROW_SHOWN_MAX
from atoll.crypto.digest import Buffer, digest
from atoll.wire.messages.statements import SignedStatement

Path = Annotated[tuple[Digest, ...], msgspec.Meta(max_length=PATH_MAX)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class MalformedRowEvidence(msgspec.Struct, frozen=True, array_like=True):
    """`statement` (a Commitment) names a wire of `leaves` leaves; this is the leaf at `index`."""

    statement: SignedStatement
    part: Count
    part_path: Path  # from the name of the wire to the root in the commitment
    leaves: Count  # 1 if wires have none: the leaf is the wire
    index: Count
    name: Digest  # name of the leaf
    leaf_path: Path  # from the leaf to the name of the wire
    leaf: Annotated[bytes, msgspec.Meta(max_length=ROW_SHOWN_MAX)] | None = None
    """Bytes of the leaf; None if the number of leaves shows enough."""


def malformed_row_bytes(row: MalformedRowEvidence) -> bytes:
    return msgspec.msgpack.encode(row)


_ROW = msgspec.msgpack.Decoder(MalformedRowEvidence)


def malformed_row_from_bytes(data: Buffer) -> MalformedRowEvidence:
    """Decode evidence. PeerFault if the bytes have another form."""
    if len(data) > MALFORMED_ROW_BYTES_MAX:
        raise PeerFault("", f"what was shown of a row has {len(data)} bytes, {MALFORMED_ROW_BYTES_MAX} are allowed")
    try:
        row = _ROW.decode(data)
    except UNREADABLE as why:
        raise PeerFault("", f"what was shown of a row cannot be read: {why}") from None
    if row.leaf is not None and digest(row.leaf) != row.name:
        raise PeerFault("", "what was shown of a row is not the leaf that it names")
    return row
