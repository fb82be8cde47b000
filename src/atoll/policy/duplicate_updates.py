"""Updates of one round that are bit for bit the same, by the roots that their authors signed.

Nobody has seen a row when commitments are made, so equal roots come of one hand, of two that agreed, or of loops
that learn from the same data. Promises: out of a vertex alone, the same for everybody. Never says who copied whom,
and never what follows: all of them count (specs/trust.md says why).
"""

from __future__ import annotations

from collections import defaultdict

from atoll.base.ids import Digest, PeerId
from atoll.wire.codec import statement_in
from atoll.wire.messages.statements import Commitment
from atoll.wire.messages.vertex import VertexBody


def alike_in(body: VertexBody) -> tuple[tuple[PeerId, ...], ...]:
    """Those who committed to the same update, and took a step for it, in the order of the vertex."""
    authors = defaultdict[Digest, list[PeerId]](list)
    for signed in body.commits:
        commit = statement_in(signed)
        if isinstance(commit, Commitment) and commit.parts and commit.steps:
            authors[commit.root].append(signed.signer)
    return tuple(tuple(peers) for peers in authors.values() if len(peers) > 1)
