"""What an owner shows of a part when the vertex has drawn blocks of it: these blocks of every row, and of its sum.

A blob, fetched like any other, the same for everybody who asks. Each block comes with the Merkle path that leads
from it to what was signed: a row's block to the root of its author's commitment, the answer's to the digest in the
answer. So with the vertex at hand anybody can judge it, at any time, and nobody who showed it.
Reading believes nothing: forms and numbers are bounded here, all else is judged in
`verification/sum_check/tensors.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

from atoll.base.errors import UNREADABLE, PeerFault
from atoll.base.ids import DIGEST_BYTES, Digest
from atoll.base.limits import OPENED_BLOCKS_MAX, PATH_MAX, PEERS_MAX
from atoll.crypto.digest import Buffer, digest
from atoll.wire.messages.statements import Commitment, SignedStatement

Path = Annotated[tuple[Digest, ...], msgspec.Meta(max_length=PATH_MAX)]


class OpenedBlock(msgspec.Struct, frozen=True, array_like=True):
    """The same few thousand values in the answer and in each row, as they stand in the wires."""

    index: int
    answer: bytes
    answer_path: Path  # to the digest that the owner signed
    rows: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=PEERS_MAX)]  # in the order of its contributors
    row_paths: Annotated[tuple[Path, ...], msgspec.Meta(max_length=PEERS_MAX)]  # to the digest of the row's wire


class SumOpening(msgspec.Struct, frozen=True, array_like=True):
    blocks: Annotated[tuple[OpenedBlock, ...], msgspec.Meta(max_length=OPENED_BLOCKS_MAX)]
    part_paths: Annotated[tuple[Path, ...], msgspec.Meta(max_length=PEERS_MAX)]
    """Of each contributor, from the digest of its row to the root that it committed to."""
    others: Annotated[tuple[SignedStatement, ...], msgspec.Meta(max_length=PEERS_MAX)] = ()
    """Commitments that rows came with, where the vertex holds another one by the same peer: it promised twice."""


def opening_bytes(opening: SumOpening) -> bytes:
    return msgspec.msgpack.encode(opening)


_OPENING = msgspec.msgpack.Decoder(SumOpening)


def opening_from_bytes(data: Buffer) -> SumOpening:
    """PeerFault if these bytes are none."""
    try:
        return _OPENING.decode(data)
    except UNREADABLE as why:
        raise PeerFault("", f"what was shown cannot be read: {why}") from None


def rows_of(commits: Iterable[Commitment]) -> Digest:
    """One name for exactly these rows with these weights: whoever commits twice has two."""
    return digest(b"".join(c.root + c.weight.to_bytes(8, "big") for c in commits))


def made_of_fits(made_of: Digest | msgspec.UnsetType, opened: bool) -> bool:
    """An answer says which commitments it is made of where its blocks are opened, and nowhere else."""
    return made_of is msgspec.UNSET if not opened else made_of is not msgspec.UNSET and len(made_of) == DIGEST_BYTES
