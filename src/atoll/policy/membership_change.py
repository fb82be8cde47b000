"""Next membership: a pure function of the last body and of its successor's reports, the same at every peer.

The proposer writes the next membership by it, and every voter recomputes it. Reports are admissible
(`membership.py`).

Invariants:
- At most a third of the voters change per vertex, so that two consecutive quorums always overlap.
- The last voter stays: a run without voters cannot go on.
- The order of reports does not matter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from atoll.base.ids import Digest, PeerId
from atoll.base.limits import MISSED_MAX, PARTS_MAX, PEERS_MAX, TICKETS_MAX
from atoll.policy.extensions import additional_extension_bytes, extensions_bytes
from atoll.policy.links import rearranged
from atoll.policy.membership import (
    VerifiedReport,
    additional_bytes,
    changes_max,
    convicted,
    forgettable,
    is_changed_by_ready,
    joining_line,
    sorted_reports,
    suspicions_needed,
)
from atoll.policy.plan import QuorumRule
from atoll.policy.signing import ED25519, VoteSignatureScheme
from atoll.policy.ticket_check import needs_ticket, ticket_of
from atoll.policy.vertex_capacity import member_bytes, room_taken, ticket_bytes
from atoll.wire.messages.statements import (
    Commitment,
    JoinRequest,
    LeaveReport,
    ReadyReport,
    RollbackOrder,
    SuspicionReport,
    TicketInvite,
)
from atoll.wire.messages.vertex import IssuedTicketRecord, Member, MemberExtensions, VertexBody
from atoll.wire.ticket import redeemed_ticket


class NextMembership(NamedTuple):
    """Members, tickets and extensions of the next vertex."""

    members: tuple[Member, ...]
    tickets: tuple[IssuedTicketRecord, ...]
    extensions: tuple[MemberExtensions, ...] | UnsetType


def next_members(
    parent: VertexBody,
    commits: Mapping[PeerId, Commitment],
    contributors: set[PeerId],
    reports: Sequence[VerifiedReport],
    rule: QuorumRule,
    training: bool,
    *,
    parts: int = PARTS_MAX,
    trainers_most: int = PEERS_MAX,
    signing: VoteSignatureScheme = ED25519,
    awaited: Collection[PeerId] | None = None,
) -> NextMembership:
    """Membership after this round.

    `training` is False for a round that only assembles members: no member can miss it. An update has at most
    `parts` parts; a line without room waits, and its join is refused when repeated. At most `trainers_most` members
    train; a further ready one observes until one leaves. `awaited`: the members that could miss the round, if not
    all trainers were drawn for it.
    """
    change = _MembershipChange(parent, reports, parts, signing)
    missing = (
        {m.peer for m in parent.members if awaited is None or m.peer in awaited} if training else set[PeerId]()
    )
    change.record_round(commits, contributors, missing)
    change.remove_departing(contributors, rule)
    change.promote_ready(trainers_most)
    change.admit_joining()
    change.apply_invites()
    return change.result()


class _MembershipChange:
    """The next membership under construction; each pass sees the lines that the pass before it left."""

    def __init__(
        self, parent: VertexBody, reports: Sequence[VerifiedReport], parts: int, signing: VoteSignatureScheme
    ) -> None:
        self.parent, self.parts, self.signing = parent, parts, signing
        self.reports = sorted_reports(reports)
        self.members = list(parent.members)
        self.tickets = [t for t in parent.tickets if t.expires_s >= parent.time_s]
        self.voters = sum(m.votes for m in parent.members)
        self.budget = changes_max(self.voters)  # voters that may still come or go
        self.liars: set[PeerId] = set()
        self.leaving: set[PeerId] = set()  # besides liars
        self.extensions = parent.extensions_by_peer
        self.room_bytes = 0  # left in the vertex for joins and invitations

    def record_round(
        self, commits: Mapping[PeerId, Commitment], contributors: Collection[PeerId], missing: Collection[PeerId]
    ) -> None:
        """What members committed to, and how many rounds in a row they missed."""

        def recorded(m: Member) -> Member:
            commit, counted = commits.get(m.peer), m.peer in contributors
            missed = 0 if counted or not m.may_train else min(m.missed + 1, MISSED_MAX)
            return replace(
                m,
                step_s=commit.step_s if commit is not None and commit.step_s > 0 else m.step_s,
                offset_s=commit.offset_s if commit is not None else m.offset_s,
                links=commit.links if commit is not None and commit.links else m.links,
                missed=missed if m.peer in missing else m.missed,
                standing="member" if m.standing == "new" else m.standing,
            )

        self.members = [recorded(m) for m in self.members]

    def remove_departing(self, contributors: Collection[PeerId], rule: QuorumRule) -> None:
        """Expel liars; send away members that leave, are suspected by enough voters, or fail as owners."""
        sent_away = self._find_departing(contributors, rule)
        self.budget -= sum(m.votes and m.peer in sent_away for m in self.parent.members)
        done: list[Member] = []
        for m in self.members:
            if m.peer in sent_away:
                m = replace(m, standing="expelled")
            is_liar = m.peer in self.liars
            if (is_liar or m.peer in self.leaving) and m.is_present:
                if not m.votes or (self.budget > 0 and self._voters_left(done, m.peer) > 0):
                    self.budget -= m.votes
                    m = replace(m, standing="expelled" if is_liar else "away")
            elif is_liar:
                m = replace(m, standing="expelled")
            done.append(m)
        self.members = done

    def _find_departing(self, contributors: Collection[PeerId], rule: QuorumRule) -> set[PeerId]:
        """Fill `liars` and `leaving`; the members that the recovery identity sends away are returned, too."""
        accusers: dict[PeerId, set[PeerId]] = {}
        sent_away: set[PeerId] = set()
        for r in self.reports:
            match r.statement:
                case LeaveReport():
                    self.leaving.add(r.by)
                case SuspicionReport(peer=peer):
                    accusers.setdefault(peer, set()).add(r.by)
                case RollbackOrder() as order:
                    sent_away.update(order.sent_away)
                case _:
                    pass
        needed = suspicions_needed(self.voters, rule)
        self.leaving |= {p for p, by in accusers.items() if len(by) >= needed and p not in contributors}
        liars, failing = convicted(self.reports, self.parent.members, rule)
        self.leaving |= failing
        self.liars = liars | sent_away
        return sent_away

    def promote_ready(self, trainers_most: int) -> None:
        """Let ready members train, or change their device. Runs after departures: a device change keeps no vote
        that is to end."""
        ready = {r.by: r.statement.unaudited is True for r in self.reports if isinstance(r.statement, ReadyReport)}
        places = trainers_most - sum(m.may_train for m in self.parent.members)
        for k, m in enumerate(self.members):
            is_going = m.peer in self.leaving
            if m.peer not in ready or is_going or not is_changed_by_ready(m, ready[m.peer]):
                continue
            if places <= 0 and not m.may_train:
                continue
            since = (
                self.parent.round + 1 if m.may_train else m.since
            )  # earlier reports about its device are settled
            standing = "unaudited" if ready[m.peer] else "new"
            changed = replace(m, standing=standing, missed=0, since=since)
            turns = m.votes != changed.votes
            keeps_voter = changed.votes or self._voters_left(self.members, m.peer) > 0
            if not turns or (self.budget > 0 and keeps_voter):
                self.budget, places = self.budget - turns, places - (not m.may_train)
                self.members[k] = changed

    def admit_joining(self) -> None:
        """Add or replace the lines of joining peers while the vertex has room; idle lines give way."""
        joins = [
            (r.identity, r.statement)
            for r in self.reports
            if isinstance(r.statement, JoinRequest) and r.by not in self.liars
        ]
        if not joins and not self._invites():
            return
        self.room_bytes = self.signing.room_bytes - room_taken(self.members, self.tickets, self.parts, self.signing)
        self.room_bytes -= extensions_bytes(self.parent.extensions or ())
        idle: Sequence[Member] = forgettable(self.members, {join.peer for _, join in joins}) if joins else []
        for identity, join in joins:
            held, left = ticket_of(join.admission, self.parent.tickets), ticket_of(join.admission, self.tickets)
            used_up = held is not None and (left is None or not left.uses_left)
            if used_up and needs_ticket(_find_member(self.members, join.peer), join):
                continue  # by another join of this vertex
            line = joining_line(join, identity, "observer", self.parent.round + 1)
            more = additional_bytes(line, self.members, self.parts, self.signing)
            more += additional_extension_bytes(join.peer, join.extensions, self.extensions)
            lines = len(self.members) + 1 - PEERS_MAX if _find_member(self.members, join.peer) is None else 0
            lacking = more - self.room_bytes if more > 0 else 0
            gone = _giving_way(idle, lacking, lines, self.parts, self.signing)
            if gone is None:
                continue
            if gone:
                self.members, idle = [m for m in self.members if m not in gone], idle[len(gone) :]
            self._let_in(join, identity)
            self.room_bytes += sum(member_bytes(m, self.parts, self.signing) for m in gone) - more

    def _let_in(self, join: JoinRequest, identity: Digest) -> None:
        before = _find_member(self.members, join.peer)
        if before is not None and before.is_present and before.vote_key == join.vote_key:
            moved = replace(before, addresses=join.addresses, name=join.name)  # a new address, else unchanged
            self.members = [moved if m.peer == join.peer else m for m in self.members]
            self._set_extensions(join)
            return
        alone = before is not None and before.votes and sum(m.votes for m in self.members) == 1
        if before is not None and before.votes and not alone:
            if self.budget < 1:
                return  # it repeats its join for the next vertex
            self.budget -= 1  # a restarted voter steps back to observer: the quorum changes
        # the last voter stays one, else no peer could let it in again
        fresh = joining_line(join, identity, "member" if alone else "observer", self.parent.round + 1)
        if before is not None and not needs_ticket(before, join):
            fresh = replace(fresh, role=before.role)  # an apprentice stays one
        rest = self.members
        self.members = [fresh if m.peer == join.peer else m for m in rest] if before else [*rest, fresh]
        self._set_extensions(join)
        if needs_ticket(before, join):
            used = redeemed_ticket(join.admission)
            self.tickets = [replace(t, uses_left=t.uses_left - 1) if t.ticket == used else t for t in self.tickets]

    def _set_extensions(self, join: JoinRequest) -> None:
        if join.extensions is not UNSET:
            self.extensions[join.peer] = join.extensions

    def apply_invites(self) -> None:
        """Revoke and add tickets. Of several invitations for one ticket the first counts."""
        invites = self._invites()
        revoked = {invite.ticket for invite in invites if invite.uses == 0}
        self.tickets = [replace(t, uses_left=0) if t.ticket in revoked else t for t in self.tickets]
        known = {t.ticket for t in self.parent.tickets}
        for invite in invites:
            ticket = IssuedTicketRecord(invite.ticket, invite.key, invite.role, invite.uses, invite.expires_s)
            fits = len(self.tickets) < TICKETS_MAX and ticket_bytes(ticket) <= self.room_bytes
            if invite.uses and invite.ticket not in known and fits:
                self.tickets.append(ticket)
                self.room_bytes -= ticket_bytes(ticket)
            known.add(invite.ticket)

    def _invites(self) -> list[TicketInvite]:
        return [r.statement for r in self.reports if isinstance(r.statement, TicketInvite)]

    def result(self) -> NextMembership:
        """Link reports name members by their place among those present, so they follow the new places."""
        before = [m.peer for m in self.parent.members if m.is_present]
        after = [m.peer for m in self.members if m.is_present]
        if before != after:
            self.members = [
                replace(m, links=rearranged(m.links, before, after) if m.is_present else b"") if m.links else m
                for m in self.members
            ]
        held = [(m.peer, self.extensions.get(m.peer)) for m in self.members]
        extensions = tuple(MemberExtensions(peer, said) for peer, said in held if said)
        return NextMembership(tuple(self.members), tuple(self.tickets), extensions or UNSET)

    def _voters_left(self, done: Sequence[Member], going: PeerId) -> int:
        """Voters that would remain without this one; `done` holds the lines that are settled."""
        settled = {m.peer: m for m in done}
        return sum(settled.get(m.peer, m).votes for m in self.parent.members if m.peer != going)


def _giving_way(
    idle: Sequence[Member], lacking_bytes: int, lines: int, parts: int, signing: VoteSignatureScheme
) -> Sequence[Member] | None:
    """The oldest idle lines that free this many bytes and lines; None if all together are too few."""
    for count in range(len(idle) + 1):
        if lacking_bytes <= 0 and lines <= count:
            return idle[:count]
        lacking_bytes -= member_bytes(idle[count], parts, signing) if count < len(idle) else 0
    return None


def _find_member(members: Sequence[Member], peer: PeerId) -> Member | None:
    return next((m for m in members if m.peer == peer), None)
