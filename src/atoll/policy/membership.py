"""Admission of member reports to the next vertex, and convictions by them.

A proposer collects reports and every voter checks them by the same rules. `membership_change.py` derives the next
membership from them.

Invariants:
- Every rule is a pure function of the last body, recent vertices and signed reports, so all peers agree.
- A rule belongs to one report type. The ledgers of optional capabilities bring the rules of their own reports.
Not responsible for: local measurements. That a member is unreachable is a signed report, never a local decision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from msgspec import UNSET

from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.base.limits import (
    ADDRESS_BYTES_MAX,
    ADDRESSES_MAX,
    CLOCK_ZONE_S,
    PARTS_MAX,
    PEERS_MAX,
    TICKET_MOST_S,
    WORDS_MAX,
)
from atoll.base.machine import tag_of
from atoll.base.memoize import memoize_by_identity
from atoll.crypto.signer import Validity
from atoll.policy.extensions import additional_extension_bytes, extensions_bytes, extensions_problem
from atoll.policy.findings import AGAINST, REFUTING, voices_needed
from atoll.policy.ledger import CapabilityLedger, LedgerSet
from atoll.policy.plan import QuorumRule
from atoll.policy.signing import ED25519, VoteSignatureScheme
from atoll.policy.ticket_check import NO_TICKET, needs_ticket, ticket_of, ticket_problem
from atoll.policy.vertex_capacity import member_bytes, room_taken
from atoll.wire.authority import Authority
from atoll.wire.codec import decode_statement
from atoll.wire.evidence import commits_to_two_updates, slot_of
from atoll.wire.messages.statements import (
    Accusation,
    AnyStatement,
    AuditReport,
    BaseStatement,
    ChangeSettings,
    CheckReport,
    HeldOutLossReport,
    JoinRequest,
    LeaveReport,
    OwnerComplaint,
    PauseOrder,
    PiecesStored,
    ReadyReport,
    RollbackOrder,
    RoundOptOutNotice,
    SuspicionReport,
    TicketInvite,
)
from atoll.wire.messages.vertex import Member, Standing, VertexBody

RECENT = 32  # rounds for which a join or readiness that names a vertex is valid; rounds may take milliseconds
AMEND_ROUNDS = 16  # rounds for which a rollback order is valid: a peer without the state has to fetch it first
FULL = "the run is full"
IS_EXPELLED = "it was expelled"
CLOCKS_DIFFER = "by the time of the run"
RESTS_AHEAD = 2  # rounds: the current one, and the next, which its vertex draws for
FRESH = 2  # rounds for which a complaint is valid: several in one day may be the network's fault


@dataclass(frozen=True)
class VerifiedReport:
    """A report with a valid signature, and its signer."""

    by: PeerId
    statement: AnyStatement
    identity: Digest = ZERO_DIGEST  # of a join: the long-lived identity that its certificate names
    validity: Validity | None = None  # of a join: the times for which its certificate is valid


Earlier = Literal["same", "other", "unknown"]  # whether an order names the old vertex that the local history holds


@dataclass(frozen=True)
class RecentVertices:
    """What reports are judged by besides the last body: recent vertices and the ledgers that follow them."""

    states: dict[Digest, Digest]  # vertex id → agreed state, which joins and readiness name
    may_follow: Callable[[RollbackOrder | PauseOrder | ChangeSettings], bool] = lambda order: False
    """Whether the order was signed recently and no other took effect since."""
    earlier: Callable[[RollbackOrder], Earlier] = lambda order: "unknown"
    ledgers: LedgerSet = field(default_factory=LedgerSet)
    rounds: Mapping[Digest, int] = field(default_factory=dict[Digest, int])  # vertex id → round; lost ones lack
    unfit: Callable[[ChangeSettings, VertexBody], str] = lambda order, parent: (
        "names numbers that this version cannot judge"
    )
    audited: bool = False  # the run audits trainers
    authority: Authority | None = None  # rule for operator orders; None: none holds


def changes_max(voters: int) -> int:
    """How many voters may come or go per vertex: floor((n - 1) / 3), so that quorums overlap, but at least one."""
    return max(1, (voters - 1) // 3)


def suspicions_needed(voters: int, rule: QuorumRule) -> int:
    """Signed suspicions that remove a member: more than may lie; among crash-only members two, if there are two."""
    if rule == "two-thirds":
        return (voters - 1) // 3 + 1
    return 2 if voters > 3 else 1


def only_counts(statement: BaseStatement) -> bool:
    """Whether a report is a voice: it takes more of them than may lie. Each accuser sends its own, unrelayed."""
    return isinstance(statement, SuspicionReport | OwnerComplaint) or (
        isinstance(statement, Accusation) and statement.other is None
    )


@dataclass(frozen=True)
class _ReportAdmission:
    """One report under judgment, with what its rule may depend on."""

    reported: VerifiedReport
    parent: VertexBody
    recent: RecentVertices
    run: Digest
    open_to_all: bool
    wall_s: float | None
    parts: int
    signing: VoteSignatureScheme
    time_s: float | None

    @property
    def by(self) -> PeerId:
        return self.reported.by

    @cached_property
    def members(self) -> Mapping[PeerId, Member]:
        return _by_name(self.parent.members)

    @cached_property
    def sender(self) -> Member | None:
        """The sender's line in the membership."""
        return self.members.get(self.reported.by)

    @property
    def is_from_voter(self) -> bool:
        return self.sender is not None and self.sender.votes

    @property
    def is_from_present(self) -> bool:
        return self.sender is not None and self.sender.is_present

    @property
    def last(self) -> int:
        """The round of the last body."""
        return self.parent.round


def admissible(
    reported: VerifiedReport,
    parent: VertexBody,
    recent: RecentVertices,
    run: Digest,
    open_to_all: bool,
    wall_s: float | None,
    *,
    parts: int = PARTS_MAX,
    signing: VoteSignatureScheme = ED25519,
    time_s: float | None = None,
) -> str | None:
    """None if the report may stand in the next vertex, else the reason, as a text for its sender.

    `wall_s` decides whether a ticket has expired. For a body it is the parent's time, which all voters read alike;
    for a waiting report it is run time, or None if that was checked before. An update has at most `parts` parts.
    `time_s` is the time of the body that holds the report; session certificates are judged by it.
    """
    case = _ReportAdmission(reported, parent, recent, run, open_to_all, wall_s, parts, signing, time_s)
    if (rule := _RULES.get(type(reported.statement))) is not None:
        return rule(case, reported.statement)
    ledger = recent.ledgers.judge_of(reported.statement)
    return "is no member report" if ledger is None else _ledger_problem(case, ledger, reported.statement)


def _ledger_problem(case: _ReportAdmission, ledger: CapabilityLedger[Any], report: AnyStatement) -> str | None:
    """Only voters were drawn for a duty. An expelled member is checked no more."""
    target = case.members.get(report.peer) if isinstance(report, AuditReport | CheckReport) else None
    expelled = ledger.is_about_member and (target is None or target.standing == "expelled")
    if not case.is_from_voter or expelled:
        return f"only voting members {ledger.duty}"
    return ledger.problem(case.by, report)


def _join_problem(case: _ReportAdmission, join: JoinRequest) -> str | None:
    why = _outside_validity(case.reported.validity, case.parent.epoch, case.time_s) or _may_join(case, join)
    if why is None and join.after not in case.recent.states:
        why = "it was written too long ago; ask again"
    return why or _no_room(case, join)


def _ready_problem(case: _ReportAdmission, report: ReadyReport) -> str | None:
    sender, recent, unaudited = case.sender, case.recent, report.unaudited is True
    if sender is None or sender.role == "observer" or not is_changed_by_ready(sender, unaudited):
        return "only an observing trainer can become ready, or one whose device has changed"
    if unaudited and not recent.audited:
        return "no work is audited in this run"
    if sender.may_train and case.last - sender.since < RECENT:
        return f"its device changed, or it came, less than {RECENT} rounds ago"
    if sender.may_train and recent.rounds.get(report.vertex, sender.since) < sender.since:
        return "it was said before its device changed"
    return None if recent.states.get(report.vertex) == report.state else "its state is not the one agreed on"


def _leave_problem(case: _ReportAdmission, report: LeaveReport) -> str | None:
    if len(report.why) > WORDS_MAX:
        return "gives too long a reason"
    if case.sender is None or not case.sender.is_present:
        return "is not a member"
    if report.round < case.sender.since:
        return "it was said before it came back"
    # the sender may have come back since, before any vertex recorded that it left
    return None if report.round >= case.last - RECENT else "is out of date"


def _skip_problem(case: _ReportAdmission, report: RoundOptOutNotice) -> str | None:
    if case.sender is None or not case.sender.may_train:
        return "only members that train can rest"
    return None if case.last < report.round <= case.last + RESTS_AHEAD else "is out of date"


def _suspicion_problem(case: _ReportAdmission, report: SuspicionReport) -> str | None:
    target = case.members.get(report.peer)
    if not case.is_from_voter or target is None or not target.is_present:
        return "only voting members can suspect members"
    first = max(case.last - RECENT, target.since)  # suspicions from before its return are settled
    return None if first <= report.round <= case.last + 1 else "is out of date"


def _complaint_problem(case: _ReportAdmission, report: OwnerComplaint) -> str | None:
    target = case.members.get(report.peer)
    if not case.is_from_voter or target is None or not target.votes or report.peer == case.by:
        return "only voting members can complain of others"
    return None if case.last - FRESH < report.round <= case.last + 1 else "is out of date"


def _rollback_problem(case: _ReportAdmission, order: RollbackOrder) -> str | None:
    if not case.is_from_present:
        return "only members can bring the word to go back"
    if not case.recent.may_follow(order):
        return "is out of date: the run has moved on, or has gone back already"
    if why := why_not_without(order.sent_away, case.parent.members):
        return why
    found = case.recent.earlier(order)
    return None if found == "same" else f"names a vertex that is {found} here"


def _pause_problem(case: _ReportAdmission, order: PauseOrder) -> str | None:
    if not case.is_from_present:
        return "only members can bring the word to pause or resume"
    if not case.recent.may_follow(order):
        return "is out of date: the run has moved on, or was paused or resumed since"
    is_paused = case.parent.paused is not UNSET
    return None if order.paused != is_paused else f"is too late: the run {'is' if is_paused else 'is not'} paused"


def _settings_problem(case: _ReportAdmission, order: ChangeSettings) -> str | None:
    if not case.is_from_present:
        return "only members can bring the word to change numbers"
    if not case.recent.may_follow(order):
        return "is out of date: the run has moved on, or numbers were changed since"
    return case.recent.unfit(order, case.parent) or None


def _invite_problem(case: _ReportAdmission, invite: TicketInvite) -> str | None:
    """A signed invitation stays readable in the history, so it counts once: while its ticket has a line it is old,
    and the line stays until the ticket expires."""
    if not case.is_from_voter:
        return "only voting members can invite"
    if len(invite.ticket) > 64 or len(invite.key) > 64:
        return "its ticket or key is too long"
    held = next((t for t in case.parent.tickets if t.ticket == invite.ticket), None)
    if invite.uses == 0:
        return None if held is not None and held.uses_left else NO_TICKET
    if held is not None:
        return "its ticket is known already"
    if not case.parent.time_s <= invite.expires_s <= case.parent.time_s + TICKET_MOST_S:
        return "its ticket has expired, or is good for longer than a year"
    return None


def _accusation_problem(case: _ReportAdmission, caught: Accusation) -> str | None:
    """Whether its signer did sign the result or statements is checked before (`peer/round/vertex_body.py`).

    A member that is away may be accused: it cannot escape a proof by leaving first.
    """
    first, other = caught.answer, caught.other
    target, said = case.members.get(first.signer), decode_statement(first.body, first.signer)
    if not case.is_from_voter or target is None or target.standing == "expelled":
        return "only voting members can accuse members"
    slot = slot_of(said)
    if slot is None or not case.last - RECENT <= slot[1] <= case.last + 1:
        return "is for no slot, or out of date"
    if other is None:
        return None
    again = decode_statement(other.body, other.signer)
    twice = slot_of(again) == slot and again != said and other.body != first.body
    if other.signer == first.signer and (twice or commits_to_two_updates(said, again)):
        return None
    return "its two statements are not by one signer for one slot"


_RULES: dict[type[BaseStatement], Callable[[_ReportAdmission, Any], str | None]] = {
    JoinRequest: _join_problem,
    ReadyReport: _ready_problem,
    LeaveReport: _leave_problem,
    RoundOptOutNotice: _skip_problem,
    SuspicionReport: _suspicion_problem,
    OwnerComplaint: _complaint_problem,
    Accusation: _accusation_problem,
    RollbackOrder: _rollback_problem,
    PauseOrder: _pause_problem,
    ChangeSettings: _settings_problem,
    TicketInvite: _invite_problem,
}


@memoize_by_identity  # called with every report
def _by_name(members: tuple[Member, ...]) -> Mapping[PeerId, Member]:
    return {m.peer: m for m in members}


def why_not_without(names: Sequence[PeerId], members: tuple[Member, ...]) -> str | None:
    """None if the recovery identity's order may send these away; the next quorum must overlap with this one."""
    known, voters = _by_name(members), {m.peer for m in members if m.votes}
    if list(names) != sorted(set(names)) or not set(known).issuperset(names):
        return "sends away who is no member"
    going = len(voters.intersection(names))
    if going > changes_max(len(voters)) or going == len(voters) > 0:
        return f"sends away {going} of {len(voters)} voters; {changes_max(len(voters))} may go at once"
    return None


def _outside_validity(validity: Validity | None, epoch: int, time_s: float | None) -> str | None:
    """What is wrong with the epoch or the times of a session certificate, with `CLOCK_ZONE_S` on either side."""
    if validity is None or time_s is None:
        return None
    if validity.epoch > epoch:
        return f"its session is certified for epoch {validity.epoch}; this run is in epoch {epoch}"
    if time_s > validity.not_after_s + CLOCK_ZONE_S:
        return f"{CLOCKS_DIFFER}: its session ended {(time_s - validity.not_after_s) / 86400:.0f} days ago"
    if time_s < validity.not_before_s - CLOCK_ZONE_S:
        return f"{CLOCKS_DIFFER}: its session begins in {(validity.not_before_s - time_s) / 86400:.0f} days"
    return None


def _may_join(case: _ReportAdmission, join: JoinRequest) -> str | None:
    by, before = case.by, case.sender
    if join.peer != by or len(join.addresses) > ADDRESSES_MAX:
        return "a join must be signed by the one who joins and name at most a few addresses"
    if any(len(a) > ADDRESS_BYTES_MAX for a in join.addresses) or len(join.name) > 64:
        return "its name or an address is too long"
    if why := extensions_problem(join.extensions):
        return why
    if not case.signing.takes(join.vote_key):
        return f"its session key is of another kind than this run votes by ({case.signing.kind}); upgrade atoll"
    if before is not None:
        if before.standing == "expelled":
            return f"{IS_EXPELLED}: members hold a lie that it signed"
        if case.recent.rounds.get(join.after, before.since) < before.since:
            # else a peer that once heard the join could give the member its old key back
            return "it was written too long ago: it has come in since"
        if before.identity != case.reported.identity:
            return "its keys are not those that this peer id joined with"
        if before.vote_key == join.vote_key and before.standing != "away":
            held = case.parent.extensions_by_peer.get(by, ())
            same = before.addresses == join.addresses and join.extensions in (UNSET, held)
            return "it is a member already" if same else None
        if not needs_ticket(before, join):
            return None  # a former member comes back with its identity; a ticket is needed once
    if len(case.members) - len(forgettable(case.parent.members, {by})) >= PEERS_MAX:
        return f"{FULL} ({PEERS_MAX} members)"
    if case.open_to_all:
        return None
    if why := ticket_problem(join.admission, join.peer, case.parent.tickets, case.run, case.wall_s):
        return why
    ticket = ticket_of(join.admission, case.parent.tickets)
    if ticket is not None and ticket.role == "observer" and join.role != "observer":
        return "its ticket admits observers only; ask for one with --role trainer"
    return None


def _no_room(case: _ReportAdmission, join: JoinRequest) -> str | None:
    """A vertex must fit one message with everything that its members may report in it.

    A line keeps its room while its member is away: only longer texts or another role take more.
    """
    parent, parts, signing = case.parent, case.parts, case.signing
    line = joining_line(join, case.reported.identity, "observer", parent.round + 1)
    more = additional_bytes(line, parent.members, parts, signing)
    more += additional_extension_bytes(join.peer, join.extensions, parent.extensions_by_peer)
    if more <= 0:
        return None
    free = signing.room_bytes - room_taken(parent.members, parent.tickets, parts, signing)
    free -= extensions_bytes(parent.extensions or ())
    if more <= free + sum(member_bytes(m, parts, signing) for m in forgettable(parent.members, {case.by})):
        return None
    present = sum(m.is_present for m in parent.members)
    return f"{FULL}: a vertex of {present} members and {parts} parts has no room for more"


def additional_bytes(line: Member, members: Sequence[Member], parts: int, signing: VoteSignatureScheme) -> int:
    """Bytes that a line takes beyond those of the same member before."""
    before = next((m for m in members if m.peer == line.peer), None)
    return member_bytes(line, parts, signing) - (member_bytes(before, parts, signing) if before is not None else 0)


def forgettable(members: Sequence[Member], but: set[PeerId]) -> list[Member]:
    """Lines that may give way to newcomers, oldest first: members that are away and never counted.

    Otherwise strangers that come and go would fill an open run for good. An expelled line stays.
    """
    idle = [m for m in members if m.standing == "away" and not m.step_s and m.peer not in but]
    return sorted(idle, key=lambda m: (m.since, m.peer))


def convicted(
    reports: Sequence[VerifiedReport], members: Sequence[Member], rule: QuorumRule
) -> tuple[set[PeerId], set[PeerId]]:
    """(liars, members with too many complaints) among `members`. If members trust each other there are none.

    Two statements for one slot prove themselves. All else takes more voices than may lie: one of them is honest.
    Each drawn auditor reports about one round. A member that enough auditors refute did not train as assigned. A
    member that withheld its exhibit from enough may only have crashed: it may come back, and is not sent away for
    the same round again.
    """
    if rule != "two-thirds":
        return set(), set()
    voters, since = sum(m.votes for m in members), {m.peer: m.since for m in members}
    liars: set[PeerId] = set()
    accusers: dict[tuple[type, PeerId], set[PeerId]] = {}
    refuting: dict[tuple[PeerId, int], set[PeerId]] = {}
    against: dict[tuple[PeerId, int], set[PeerId]] = {}
    for r in reports:
        match r.statement:
            case Accusation(answer=answer, other=other):
                if other is not None:
                    liars.add(answer.signer)
                accusers.setdefault((Accusation, answer.signer), set()).add(r.by)
            case OwnerComplaint(peer=peer):
                accusers.setdefault((OwnerComplaint, peer), set()).add(r.by)
            case AuditReport(round=round, peer=peer, finding=finding) if finding in AGAINST:
                against.setdefault((peer, round), set()).add(r.by)
                if finding in REFUTING:
                    refuting.setdefault((peer, round), set()).add(r.by)
            case _:
                pass
    enough = {key for key, who in accusers.items() if len(who) >= suspicions_needed(voters, rule)}
    audited = voices_needed(voters, rule)
    liars |= {p for kind, p in enough if kind is Accusation}
    liars |= {p for (p, _), who in refuting.items() if len(who) >= audited}
    failing = {p for kind, p in enough if kind is OwnerComplaint}
    return liars, failing | {p for (p, r), who in against.items() if len(who) >= audited and r > since.get(p, -1)}


def is_changed_by_ready(member: Member, unaudited: bool) -> bool:
    """Whether readiness gives this member another standing."""
    return member.standing == "observer" or (member.may_train and unaudited != (member.standing == "unaudited"))


def joining_line(join: JoinRequest, identity: Digest, standing: Standing, round: int) -> Member:
    """The line of a joining peer in the membership."""
    return Member(
        join.peer, join.vote_key, join.addresses, join.role, standing, round, 0.0, join.name, identity=identity
    )


def sorted_reports(reports: Sequence[VerifiedReport]) -> list[VerifiedReport]:
    """Reports in an order that does not depend on their arrival; one report per kind, signer, target."""
    unique: dict[tuple[str, PeerId, str], VerifiedReport] = {}
    for r in reports:
        unique.setdefault((tag_of(r.statement), r.by, target_of(r.statement)), r)
    return [unique[key] for key in sorted(unique)]


def target_of(statement: AnyStatement) -> str:
    """The target of a report, where one signer may send several of a kind."""
    match statement:
        case SuspicionReport(peer=peer) | OwnerComplaint(peer=peer):
            return peer
        case Accusation(answer=answer, other=other):
            return f"{answer.signer}/{other is not None}"
        case AuditReport(round=round, peer=peer, opening=opening):
            return f"{round}/{peer}" if opening is UNSET else f"{round}/{peer}/{opening}"
        case CheckReport(check=check, round=round, peer=peer):
            return f"{check}/{round}/{peer}"
        case HeldOutLossReport(round=round) | PiecesStored(round=round) | RoundOptOutNotice(round=round):
            return str(round)
        case TicketInvite(ticket=ticket):
            return ticket.hex()
        case _:
            return ""
