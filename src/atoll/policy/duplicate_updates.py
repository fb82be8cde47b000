"""Duplicate updates: bit-for-bit equal updates of one round, found by the roots that their authors signed.

No row is known when commitments are made, so equal roots come from one operator, from two that agreed, or from
loops that learn from the same data.

Invariants:
- Derived from a vertex alone, equal at every peer.
Not responsible for: finding out which one is the copy, consequences; all of them count (specs/trust.md).
"""

from __future__ import annotations

from collections import defaultdict

from atoll.base.ids import Digest, PeerId
from atoll.wire.codec import statement_in
from atoll.wire.messages.statements import Commitment
from atoll.wire.messages.vertex import VertexBody


def alike_in(body: VertexBody) -> tuple[tuple[PeerId, ...], ...]:
    """Groups of authors that committed to the same update with at least one step, in the order of the vertex."""
    authors = defaultdict[Digest, list[PeerId]](list)
    for signed in body.commits:
        commit = statement_in(signed)
        if isinstance(commit, Commitment) and commit.parts and commit.steps:
            authors[commit.root].append(signed.signer)
    return tuple(tuple(peers) for peers in authors.values() if len(peers) > 1)
