"""Earned votes: which trainers vote next, where genesis requires counted rounds for a vote.

Invariants:
- The same result at every peer that holds the same vertices: integers and names only.
- A founder, and a member with a founder's ticket from before the first training round, votes at once.
- Members of one root that are young hold at most a third of the votes; one vote where a third is less.
Not responsible for: who is a member (policy/membership.py), how many votes agree (policy/plan.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.ids import PeerId
from atoll.base.limits import PEERS_MAX, TICKETS_MAX, VOTE_ROUNDS_MAX
from atoll.policy.membership import VerifiedReport, changes_max, sorted_reports
from atoll.wire.messages.statements import JoinRequest, TicketInvite
from atoll.wire.messages.vertex import EarnedVoteRecord, IssuedTicketRecord, Member, VertexBody
from atoll.wire.ticket import redeemed_ticket

FOUNDER = 0  # invitation root of founders; for a ticket: made by a founder


@dataclass(frozen=True)
class VoteEligibilityTerms:
    after_rounds: int  # counted rounds before a trainer votes
    sponsor_rounds: int  # counted rounds before a vote no longer falls under the bound of its root


def next_votes(
    parent: VertexBody,
    members: Sequence[Member],
    tickets: Sequence[IssuedTicketRecord],
    contributors: Collection[PeerId],
    reports: Sequence[VerifiedReport],
    terms: VoteEligibilityTerms,
) -> tuple[tuple[Member, ...], EarnedVoteRecord]:
    """Votes among the `members` after the parent, and the next vertex's record of their invitations.

    Every founder's invitation is a root, shared by all that come by it or through its holder. One person may
    control all of them, so the young members of a root hold at most the share of votes that agreement withstands.
    """
    before, reports = {m.peer: m for m in parent.members}, sorted_reports(reports)
    roots, counted, made = _invited(parent)
    unused = iter(sorted(set(range(1, PEERS_MAX + TICKETS_MAX + 1)) - set(roots.values()) - set(made.values())))
    joining = {
        r.by: redeemed_ticket(r.statement.admission) for r in reports if isinstance(r.statement, JoinRequest)
    }
    lines: dict[PeerId, Member] = {}
    for m in members:
        was = before.get(m.peer)
        if was is None or (m.role == "trainer" and was.role not in ("trainer", "apprentice")):
            by = made.get(joining.get(m.peer, b""), FOUNDER)
            roots[m.peer] = by or roots.get(m.peer) or next(unused)
            if m.role == "trainer" and (parent.trained or by != FOUNDER):
                m = replace(m, role="apprentice")
        moved = was is not None and was.standing == "member" and m.peer in contributors
        counted[m.peer] = min(counted.get(m.peer, 0) + moved, VOTE_ROUNDS_MAX)
        lines[m.peer] = m

    voters, voting = {m.peer for m in parent.members if m.votes}, {m.peer for m in lines.values() if m.votes}
    for m in [m for m in lines.values() if m.peer in before and m.peer in voting - voters]:  # members that return
        of_root = [p for p in voting if counted[p] < terms.sponsor_rounds and roots[p] == roots[m.peer]]
        bound = m.peer in of_root and roots[m.peer] != FOUNDER
        if bound and len(of_root) > changes_max(len(voting)):
            lines[m.peer] = replace(m, role="apprentice")  # waits with the others of its root
            voting.discard(m.peer)
    budget = changes_max(len(voters)) - len(voters ^ voting)
    waiting = [m for m in lines.values() if m.role == "apprentice" and m.standing == "member"]
    able = [m for m in waiting if counted[m.peer] >= terms.after_rounds]
    for m in sorted(able, key=lambda m: (-counted[m.peer], m.since, m.peer)):
        young = {p for p in (*voting, m.peer) if counted[p] < terms.sponsor_rounds}
        of_root = sum(roots[p] == roots[m.peer] for p in young)
        if budget > 0 and (m.peer not in young or of_root <= changes_max(len(voting) + 1)):
            lines[m.peer], budget = replace(m, role="trainer"), budget - 1
            voting.add(m.peer)

    inviting: dict[bytes, PeerId] = {}
    for r in reports:
        if isinstance(r.statement, TicketInvite):
            inviting.setdefault(r.statement.ticket, r.by)  # as in next_members
    by_ticket = tuple(
        made[t.ticket] if t.ticket in made else roots[inviting[t.ticket]] for t in tickets
    )  # a revocation leaves the root as it was
    return tuple(lines.values()), EarnedVoteRecord(
        tuple(roots[p] for p in lines), tuple(counted[p] for p in lines), by_ticket
    )


def _invited(parent: VertexBody) -> tuple[dict[PeerId, int], dict[PeerId, int], dict[bytes, int]]:
    """Roots and counted rounds of members, roots of tickets. Genesis has founders and their tickets."""
    names, ids, told = [m.peer for m in parent.members], [t.ticket for t in parent.tickets], parent.invited
    if told is UNSET or parent.round < 0:
        return dict.fromkeys(names, FOUNDER), {}, dict.fromkeys(ids, FOUNDER)
    roots, counted = zip(names, told.roots, strict=True), zip(names, told.counted, strict=True)
    return dict(roots), dict(counted), dict(zip(ids, told.tickets, strict=True))
