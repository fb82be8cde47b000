"""Sum opening: the blocks of a part that a vertex draws, from every row and from the result.

An owner serves it as a blob that is equal for all verifiers. Each block comes with the Merkle path to a signed
digest: a row's block to the root of its author's commitment, the result's block to the digest in the OwnerResult.
So with the vertex every peer can verify it at any time, without trust in its sender.
Not responsible for: judging the content (`verification/sum_check/tensors.py`); decoding only bounds sizes.
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


class SumOpeningBlock(msgspec.Struct, frozen=True, array_like=True):
    """One block of up to 4096 values, encoded, in the result and in each row."""

    index: int
    answer: bytes
    answer_path: Path  # path to the digest that the owner signed
    rows: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=PEERS_MAX)]  # blocks in the order of contributors
    row_paths: Annotated[tuple[Path, ...], msgspec.Meta(max_length=PEERS_MAX)]  # paths to the rows' wire digests


class SumOpening(msgspec.Struct, frozen=True, array_like=True):
    """All drawn blocks of one part."""

    blocks: Annotated[tuple[SumOpeningBlock, ...], msgspec.Meta(max_length=OPENED_BLOCKS_MAX)]
    part_paths: Annotated[tuple[Path, ...], msgspec.Meta(max_length=PEERS_MAX)]
    """Path per contributor, from the digest of its row to its committed root."""
    others: Annotated[tuple[SignedStatement, ...], msgspec.Meta(max_length=PEERS_MAX)] = ()
    """Commitments received with rows of peers that committed twice: the vertex holds their other commitment."""


def opening_bytes(opening: SumOpening) -> bytes:
    return msgspec.msgpack.encode(opening)


_OPENING = msgspec.msgpack.Decoder(SumOpening)


def opening_from_bytes(data: Buffer) -> SumOpening:
    """Decode a sum opening. Raises PeerFault if the bytes are invalid."""
    try:
        return _OPENING.decode(data)
    except UNREADABLE as why:
        raise PeerFault("", f"sum opening cannot be decoded: {why}") from None


def rows_digest(commits: Iterable[Commitment]) -> Digest:
    """Digest of exactly these commitments' rows and weights, different for each of a peer's two commitments."""
    return digest(b"".join(c.root + c.weight.to_bytes(8, "big") for c in commits))


def names_commitments_iff_opened(made_of: Digest | msgspec.UnsetType, opened: bool) -> bool:
    """Whether an OwnerResult names its commitments exactly if its blocks are opened."""
    return made_of is msgspec.UNSET if not opened else made_of is not msgspec.UNSET and len(made_of) == DIGEST_BYTES
