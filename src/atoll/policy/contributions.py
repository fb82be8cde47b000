"""Contributions of members to one vertex body: counted updates, samples, steps and combined parts.

For status, verification and payouts. Derived only from statements signed in the body.

Invariants:
- Pure functions, equal at every peer.
- A statement that does not decode counts for no member.
Not responsible for: checking the body (peer/round/vertex_body.py), sums over rounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from atoll.base.ids import Digest, PeerId
from atoll.wire.codec import statement_in
from atoll.wire.messages.statements import Commitment, OwnerResult, SignedStatement, StepsTakenWhilePartitioned
from atoll.wire.messages.vertex import VertexBody

Results = tuple[OwnerResult | None, ...]  # one per part; None: the part has no result


@dataclass(frozen=True)
class CountedContribution:
    """What one vertex body counts for one member; empty parts where it has no counted update."""

    commit: Commitment | None  # commitment to its update; None: no update of it counts
    parts: tuple[bool, ...]  # per part of the body: the result includes its row
    owned: tuple[int, ...]  # parts with a result that it combined as owner

    @property
    def steps(self) -> int:
        """Inner steps of its counted update, late ones included."""
        return self.commit.steps if self.commit is not None else 0

    @property
    def late_steps(self) -> int:
        """Those of its steps that it took while partitioned."""
        late = self.commit.late if self.commit is not None else None
        return late.steps if late is not None else 0

    @property
    def samples(self) -> int:
        """Training samples of its counted update, late ones included."""
        return self.commit.samples if self.commit is not None else 0

    @property
    def root(self) -> Digest | None:
        """Merkle root of its counted update."""
        return self.commit.root if self.commit is not None else None

    @property
    def claim(self) -> Digest | None:
        """Claim about how its counted update was trained, where rounds are audited."""
        return self.commit.claimed if self.commit is not None else None


def contributions_of(body: VertexBody) -> dict[PeerId, CountedContribution]:
    """The contribution of every member with a counted update or a result in this body, by name."""
    results = results_of(body)
    commits = {s.signer: c for s in body.commits if isinstance(c := statement_in(s), Commitment)}
    owned: dict[PeerId, list[int]] = {}
    for part, signed in enumerate(body.parts):
        if signed is not None and results[part] is not None:
            owned.setdefault(signed.signer, []).append(part)
    rows = [frozenset(r.contributors) if r is not None else frozenset[PeerId]() for r in results]
    return {
        peer: CountedContribution(commits.get(peer), tuple(peer in row for row in rows), tuple(owned.get(peer, ())))
        for peer in sorted(commits.keys() | owned.keys() | frozenset[PeerId]().union(*rows))
    }


def contribution_of(body: VertexBody, peer: PeerId) -> CountedContribution | None:
    """The contribution of one member, without reading the commitments of the others; None if it has none."""
    statements = (statement_in(signed) for signed in body.commits if signed.signer == peer)
    commit = next((s for s in statements if isinstance(s, Commitment)), None)
    results = results_of(body)
    parts = tuple(result is not None and peer in result.contributors for result in results)
    signers = (signed.signer if signed is not None else None for signed in body.parts)
    owned = tuple(k for k, by in enumerate(signers) if by == peer and results[k] is not None)
    return CountedContribution(commit, parts, owned) if commit is not None or owned or any(parts) else None


def results_of(body: VertexBody) -> Results:
    """The owner's result of each part."""
    return tuple(map(result_in, body.parts))


def result_in(signed: SignedStatement | None) -> OwnerResult | None:
    """The owner's result in this statement; None if it holds none that decodes."""
    statement = statement_in(signed) if signed is not None else None
    return statement if isinstance(statement, OwnerResult) else None


def parts_counted(results: Iterable[OwnerResult | None]) -> Counter[PeerId]:
    """Number of these results that include each member's row; members with none are left out."""
    return Counter(chain.from_iterable(result.contributors for result in results if result is not None))


def late_of(body: VertexBody) -> dict[PeerId, StepsTakenWhilePartitioned]:
    """Late work that this vertex counted, by author."""
    said = ((signed.signer, statement_in(signed)) for signed in body.commits)
    return {peer: c.late for peer, c in said if isinstance(c, Commitment) and c.late is not None}
