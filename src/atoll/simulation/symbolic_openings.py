"""Symbolic openings of results: digests in place of values, so rows need no decoding.

The digest of a result follows from the digests of its rows, and these from commitments. A peer that is shown them
can recompute the result: the same messages and findings as with real blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from atoll.base.errors import UNREADABLE, PeerFault
from atoll.base.ids import Digest
from atoll.crypto.digest import merkle_holds
from atoll.peer.tasks import BuildSumOpening, JudgeSumOpening, JudgmentResult
from atoll.simulation.worker import whole_of
from atoll.wire.codec import decode_statement
from atoll.wire.messages.statements import Commitment, SignedStatement
from atoll.wire.opening import rows_digest


class SymbolicOpening(msgspec.Struct, frozen=True, array_like=True):
    """Rows in the order of the result's contributors, each with its path to the commitment."""

    rows: tuple[Digest, ...]
    paths: tuple[tuple[Digest, ...], ...]
    others: tuple[SignedStatement, ...]


_NAMED = msgspec.msgpack.Decoder(SymbolicOpening)


def lay_out(work: BuildSumOpening) -> bytes:
    rows = tuple(row.payload.digest for row in work.rows)
    return msgspec.msgpack.encode(SymbolicOpening(rows, work.paths, work.others))


def judged(work: JudgeSumOpening, shown: bytes) -> JudgmentResult:
    answered = work.answered
    try:
        named = _NAMED.decode(shown)
        commits = _commits(work, named.others)
    except PeerFault as fault:
        return JudgmentResult("withheld", fault.what)
    except UNREADABLE as why:
        return JudgmentResult("withheld", f"what was shown cannot be read: {why}")
    each = zip(commits, named.rows, named.paths, strict=False)
    held = [merkle_holds(c.root, row, answered.part, c.parts, path) for c, row, path in each]
    if not all(held) or not len(commits) == len(named.rows) == len(named.paths):
        return JudgmentResult("withheld", "it was made of other rows than these")
    if whole_of(named.rows, answered.round, answered.part) != answered.digest:
        return JudgmentResult("mismatch", "its rows make another name", named.others)
    return JudgmentResult("accepted", "", named.others)


def _commits(work: JudgeSumOpening, others: Sequence[SignedStatement]) -> list[Commitment]:
    known = {signed.signer: decode_statement(signed.body, signed.signer) for signed in (*work.commits, *others)}
    found = [known.get(peer) for peer in work.answered.contributors]
    commits = [commit for commit in found if isinstance(commit, Commitment)]
    if len(commits) < len(found) or rows_digest(commits) != work.answered.made_of:
        raise PeerFault("", "it was made of other commitments than are shown")
    return commits
