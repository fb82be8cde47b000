"""Who is a member next: a pure function of the last body and of signed reports, the same at every peer.

The proposer uses it to write the next membership, every voter uses it to check what the proposer wrote. Reports
are judged by `admissible` (may this report stand in a vertex at all?) and carried out by `next_members`.
Removes at most a third of the voters per vertex, so that two consecutive quorums always overlap. Never looks at
a local measurement: whom I cannot reach is my signed report, not my decision.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.ids import ZERO_DIGEST, Digest, PeerId, Seconds
from atoll.base.limits import (
    ADDRESS_BYTES_MAX,
    ADDRESSES_MAX,
    CLOCK_ZONE_S,
    MISSED_MAX,
    PARTS_MAX,
    PEERS_MAX,
    TICKET_MOST_S,
    TICKETS_MAX,
    WORDS_MAX,
)
from atoll.base.machine import tag_of
from atoll.base.memoize import of_the_same
from atoll.crypto.signer import Validity
from atoll.features.archive.policy import NO_LEDGER, PlacementLedger
from atoll.policy.links import rearranged
from atoll.policy.plan import QuorumRule
from atoll.policy.signing import ED25519, SigningPolicy
from atoll.policy.vertex_capacity import member_bytes, room_taken, ticket_bytes
from atoll.verification.case import AGAINST, REFUTING, voices_needed
from atoll.verification.loss_scoring.policy import NO_SCORES, ScoreLedger
from atoll.verification.redundant_training.policy import NO_TWINS, RedundancyLedger
from atoll.verification.replay_audit.policy import NO_DOCKET, AuditLedger
from atoll.verification.state_validation.policy import NO_VALIDATIONS, ValidationLedger
from atoll.wire.codec import decode_statement
from atoll.wire.evidence import slot_of, two_updates
from atoll.wire.messages.statements import (
    Accusation,
    AnyStatement,
    AuditReport,
    ChangeSettings,
    Commitment,
    JoinRequest,
    LeaveReport,
    OwnerComplaint,
    PauseOrder,
    PiecesStored,
    ReadyReport,
    RedundancyReport,
    RollbackOrder,
    ScoreReport,
    SkipRound,
    Statement,
    SuspicionReport,
    TicketInvite,
    ValidationReport,
)
from atoll.wire.messages.vertex import Member, Standing, TicketUse, VertexBody
from atoll.wire.ticket import redeemed_ticket, redemption_holds

RECENT = 32  # rounds for which a Join or Ready that names a vertex stays good; rounds may take milliseconds
AMEND_ROUNDS = 16  # in which the word to go back stays good: who lacks the state has to fetch it first
FULL = "the run is full"
NO_TICKET = "its ticket is used up, revoked or unknown here"
TICKET_EXPIRED = "its ticket has expired"
IS_EXPELLED = "it was expelled"
CLOCKS_DIFFER = "by the time of the run"
RESTS_AHEAD = 2  # the round under way, and the one that its vertex draws for
FRESH = 2  # rounds for a complaint: several of one moment mean something, several of a day may be the network's


@dataclass(frozen=True)
class VerifiedReport:
    """A report whose signature holds, and who signed it."""

    by: PeerId
    statement: AnyStatement
    identity: Digest = ZERO_DIGEST  # of a Join: the long-lived identity that its certificate names
    validity: Validity | None = None  # of a Join: when its certificate holds


Earlier = Literal["same", "other", "unknown"]  # what a word says of an old vertex, held against that vertex


@dataclass(frozen=True)
class RecentVertices:
    """The last few vertices: id -> agreed state, which joins and readiness name, and the audits, validators,
    scorers and referees that they drew."""

    states: dict[Digest, Digest]
    may_follow: Callable[[RollbackOrder | PauseOrder | ChangeSettings], bool] = lambda word: (
        False
    )  # said lately, none took effect since
    earlier: Callable[[RollbackOrder], Earlier] = lambda amend: (
        "unknown"
    )  # asked only for such words: they are rare
    docket: AuditLedger = NO_DOCKET
    validations: ValidationLedger = NO_VALIDATIONS
    ledger: PlacementLedger = NO_LEDGER
    scores: ScoreLedger = NO_SCORES
    twins: RedundancyLedger = NO_TWINS
    rounds: Mapping[Digest, int] = field(default_factory=dict[Digest, int])  # of vertices; a lost one has none
    unfit: Callable[[ChangeSettings, VertexBody], str] = lambda word, parent: (
        "names numbers that nobody here can judge"
    )


def changes_max(voters: int) -> int:
    """How many voters may come or go per vertex: floor((n - 1) / 3), so that quorums overlap, but at least one."""
    return max(1, (voters - 1) // 3)


def suspicions_needed(voters: int, rule: QuorumRule) -> int:
    """Signed suspicions that remove a member: more than may lie; among crash-only members two, if there are two."""
    if rule == "two-thirds":
        return (voters - 1) // 3 + 1
    return 2 if voters > 3 else 1


def only_counts(statement: Statement) -> bool:
    """It takes more such voices than may lie, so each accuser says it itself and nobody passes it on."""
    return isinstance(statement, SuspicionReport | OwnerComplaint) or (
        isinstance(statement, Accusation) and statement.other is None
    )


def admissible(
    reported: VerifiedReport,
    parent: VertexBody,
    recent: RecentVertices,
    run: Digest,
    open_to_all: bool,
    wall_s: float | None,
    parts: int = PARTS_MAX,
    signing: SigningPolicy = ED25519,
    time_s: float | None = None,
) -> str | None:
    """None if the report may stand in the next vertex, else why not, in words for its sender.

    `wall_s` decides whether a ticket has expired: for a body the parent's time, which all voters read the same; for
    a report that waits run time, or None if that was looked at before. `parts` an update may have at most. `time_s`
    is the time of the body that holds the report, by which session certificates are judged; all voters read it too.
    """
    by, statement = reported.by, reported.statement
    members = _by_name(parent.members)
    mine = members.get(by)
    match statement:
        case JoinRequest():
            why = _outside_validity(reported.validity, parent.epoch, time_s)
            why = why or _may_join(statement, reported, parent, members, recent, run, open_to_all, wall_s, signing)
            if why is None and statement.after not in recent.states:
                why = "it was written too long ago; ask again"
            return why or _no_room(statement, reported, parent, parts, signing)
        case ReadyReport(vertex, state, unaudited):
            if mine is None or mine.role == "observer" or not _changes(mine, unaudited is True):
                return "only an observing trainer can become ready, or one whose device has changed"
            if unaudited is True and not recent.docket.share:
                return "no work is audited in this run"
            if mine.trains and parent.round - mine.since < RECENT:
                return f"its device changed, or it came, less than {RECENT} rounds ago"
            if mine.trains and recent.rounds.get(vertex, mine.since) < mine.since:
                return "it was said before its device changed"
            return None if recent.states.get(vertex) == state else "its state is not the one agreed on"
        case LeaveReport(round=round, why=why):
            if len(why) > WORDS_MAX:
                return "gives too long a reason"
            if mine is None or not mine.present:
                return "is not a member"
            if round < mine.since:
                return "it was said before it came back"
            return None if round >= parent.round - RECENT else "is out of date"  # it may be back, and nobody knew
        case SkipRound(round=round):
            if mine is None or not mine.trains:
                return "only members that train can rest"
            return None if parent.round < round <= parent.round + RESTS_AHEAD else "is out of date"
        case SuspicionReport(round=round, peer=peer):
            target = members.get(peer)
            if mine is None or not mine.votes or target is None or not target.present:
                return "only voting members can suspect members"
            first = max(parent.round - RECENT, target.since)  # what was said before it came back is settled
            return None if first <= round <= parent.round + 1 else "is out of date"
        case Accusation():
            return _may_accuse(statement, mine, members, parent.round)
        case OwnerComplaint(round=round, peer=peer):
            target = members.get(peer)
            if mine is None or not mine.votes or target is None or not target.votes or peer == by:
                return "only voting members can complain of others"
            return None if parent.round - FRESH < round <= parent.round + 1 else "is out of date"
        case RollbackOrder():
            if mine is None or not mine.present:
                return "only members can bring the word to go back"
            if not recent.may_follow(statement):
                return "is out of date: the run has moved on, or has gone back already"
            if why := why_not_without(statement.sent_away, parent.members):
                return why
            found = recent.earlier(statement)
            return None if found == "same" else f"names a vertex that is {found} here"
        case PauseOrder(paused=paused):
            if mine is None or not mine.present:
                return "only members can bring the word to pause or resume"
            if not recent.may_follow(statement):
                return "is out of date: the run has moved on, or was paused or resumed since"
            is_paused = parent.paused is not UNSET
            return None if paused != is_paused else f"is too late: the run {'is' if is_paused else 'is not'} paused"
        case ChangeSettings():
            if mine is None or not mine.present:
                return "only members can bring the word to change numbers"
            if not recent.may_follow(statement):
                return "is out of date: the run has moved on, or numbers were changed since"
            return recent.unfit(statement, parent) or None
        case AuditReport(peer=peer):
            target = members.get(peer)
            if mine is None or not mine.votes or target is None or target.standing == "expelled":
                return "only voting members audit members"
            return recent.docket.why_not(by, statement)
        case ValidationReport():
            if mine is None or not mine.votes:
                return "only voting members validate states"
            return recent.validations.why_not(by, statement)
        case ScoreReport(peer=peer):
            target = members.get(peer)
            if mine is None or not mine.votes or target is None or target.standing == "expelled":
                return "only voting members score members"
            return recent.scores.why_not(by, statement)
        case RedundancyReport():
            if mine is None or not mine.votes:
                return "only voting members compare twins"
            return recent.twins.why_not(by, statement)
        case PiecesStored():
            if mine is None or not mine.votes:
                return "only voting members hold pieces"
            return recent.ledger.why_not(by, statement)
        case TicketInvite():
            if mine is None or not mine.votes:
                return "only voting members can invite"
            return _may_invite(statement, parent)
        case _:
            return "is no member report"


@of_the_same  # asked with every report
def _by_name(members: tuple[Member, ...]) -> Mapping[PeerId, Member]:
    return {m.peer: m for m in members}


def why_not_without(names: Sequence[PeerId], members: tuple[Member, ...]) -> str | None:
    """None if the recovery identity's word may send these away; the next quorum must overlap with this one."""
    known, voters = _by_name(members), {m.peer for m in members if m.votes}
    if list(names) != sorted(set(names)) or not set(known).issuperset(names):
        return "sends away who is no member"
    going = len(voters.intersection(names))
    if going > changes_max(len(voters)) or going == len(voters) > 0:
        return f"sends away {going} of {len(voters)} voters; {changes_max(len(voters))} may go at once"
    return None


def _may_invite(invite: TicketInvite, parent: VertexBody) -> str | None:
    """A signed invitation stays readable in the history, so it counts once: while its ticket has a line it is old,
    and the line stays until the ticket expires."""
    if len(invite.ticket) > 64 or len(invite.key) > 64:
        return "its ticket or key is too long"
    held = next((t for t in parent.tickets if t.ticket == invite.ticket), None)
    if invite.uses == 0:
        return None if held is not None and held.uses_left else NO_TICKET
    if held is not None:
        return "its ticket is known already"
    if not parent.time_s <= invite.expires_s <= parent.time_s + TICKET_MOST_S:
        return "its ticket has expired, or is good for longer than a year"
    return None


def _may_accuse(
    caught: Accusation, mine: Member | None, members: Mapping[PeerId, Member], round: int
) -> str | None:
    """That it is an answer, or two statements, which its signer did sign is settled before
    (peer/round/vertex_body).

    Who is away may be accused: a farewell before the proof is no way back.
    """
    first, other = caught.answer, caught.other
    target, said = members.get(first.signer), decode_statement(first.body, first.signer)
    if mine is None or not mine.votes or target is None or target.standing == "expelled":
        return "only voting members can accuse members"
    slot = slot_of(said)
    if slot is None or not round - RECENT <= slot[1] <= round + 1:
        return "is for no slot, or out of date"
    if other is None:
        return None
    again = decode_statement(other.body, other.signer)
    twice = slot_of(again) == slot and again != said and other.body != first.body
    if other.signer == first.signer and (twice or two_updates(said, again)):
        return None
    return "its two statements are not by one signer for one slot"


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


def _may_join(
    join: JoinRequest,
    reported: VerifiedReport,
    parent: VertexBody,
    members: Mapping[PeerId, Member],
    recent: RecentVertices,
    run: Digest,
    open_to_all: bool,
    wall_s: float | None,
    signing: SigningPolicy,
) -> str | None:
    by = reported.by
    if join.peer != by or len(join.addresses) > ADDRESSES_MAX:
        return "a join must be signed by the one who joins and name at most a few addresses"
    if any(len(a) > ADDRESS_BYTES_MAX for a in join.addresses) or len(join.name) > 64:
        return "its name or an address is too long"
    if not signing.takes(join.vote_key):
        return f"its session key is of another kind than this run votes by ({signing.kind}); upgrade atoll"
    before = members.get(by)
    if before is not None and before.standing == "expelled":
        return f"{IS_EXPELLED}: members hold a lie that it signed"
    if before is not None and recent.rounds.get(join.after, before.since) < before.since:
        return (
            "it was written too long ago: it has come in since"  # or whoever heard it once could take its key back
        )
    if before is not None and before.identity != reported.identity:
        return "its keys are not those that this peer id joined with"
    if before is not None and before.vote_key == join.vote_key and before.standing != "away":
        return "it is a member already" if before.addresses == join.addresses else None
    if before is not None and not needs_ticket(before, join):
        return None  # a former member comes back with its identity; a ticket is needed once
    if len(members) - len(_forgettable(parent.members, {by})) >= PEERS_MAX:
        return f"{FULL} ({PEERS_MAX} members)"
    if open_to_all:
        return None
    if why := ticket_problem(join.admission, join.peer, parent.tickets, run, wall_s):
        return why
    ticket = _ticket_of(join.admission, parent.tickets)
    if ticket is not None and ticket.role == "observer" and join.role != "observer":
        return "its ticket admits observers only; ask for one with --role trainer"
    return None


def ticket_problem(
    admission: bytes, joiner: PeerId, tickets: Sequence[TicketUse], run: Digest, wall_s: Seconds | None
) -> str | None:
    """None if this redemption holds for one of these agreed tickets, else why not. `wall_s` as for `admissible`."""
    ticket = _ticket_of(admission, tickets)
    if ticket is None or ticket.uses_left < 1:
        return NO_TICKET
    if wall_s is not None and ticket.expires_s < wall_s:
        return TICKET_EXPIRED
    if not redemption_holds(admission, ticket.key, run, joiner):
        return "its proof of holding the ticket does not fit"
    return None


def _no_room(
    join: JoinRequest, reported: VerifiedReport, parent: VertexBody, parts: int, signing: SigningPolicy
) -> str | None:
    """A vertex must fit one message with everything that its members may say in it.

    Whoever has a line has its room, also while it is away: only longer words or another role take more.
    """
    more = _more(_line_of(join, reported.identity, "observer", parent.round + 1), parent.members, parts, signing)
    if more <= 0:
        return None
    free = signing.room_bytes - room_taken(parent.members, parent.tickets, parts, signing)
    if more <= free + sum(member_bytes(m, parts, signing) for m in _forgettable(parent.members, {reported.by})):
        return None
    present = sum(m.present for m in parent.members)
    return f"{FULL}: a vertex of {present} members and {parts} parts has no room for more"


def _more(line: Member, members: Sequence[Member], parts: int, signing: SigningPolicy) -> int:
    """Room that a line takes beyond what the same member took before."""
    before = next((m for m in members if m.peer == line.peer), None)
    return member_bytes(line, parts, signing) - (member_bytes(before, parts, signing) if before is not None else 0)


def _forgettable(members: Sequence[Member], but: set[PeerId]) -> list[Member]:
    """Lines that may give way to newcomers, oldest first: of those that are away and never counted.

    Strangers who come and go would else fill an open run for good. An expelled line stays.
    """
    idle = [m for m in members if m.standing == "away" and not m.step_s and m.peer not in but]
    return sorted(idle, key=lambda m: (m.since, m.peer))


def _giving_way(
    idle: Sequence[Member], room: int, places: int, parts: int, signing: SigningPolicy
) -> Sequence[Member] | None:
    """The oldest of these lines that make so many bytes of room and so many places; None if all are too few."""
    for count in range(len(idle) + 1):
        if room <= 0 and places <= count:
            return idle[:count]
        room -= member_bytes(idle[count], parts, signing) if count < len(idle) else 0
    return None


def _ticket_of(admission: bytes, tickets: Sequence[TicketUse]) -> TicketUse | None:
    return next((t for t in tickets if t.ticket == redeemed_ticket(admission)), None)


def next_members(
    parent: VertexBody,
    commits: dict[PeerId, Commitment],
    contributors: set[PeerId],
    reports: Sequence[VerifiedReport],
    rule: QuorumRule,
    training: bool,
    parts: int = PARTS_MAX,
    trainers_most: int = PEERS_MAX,
    signing: SigningPolicy = ED25519,
    awaited: Collection[PeerId] | None = None,
) -> tuple[tuple[Member, ...], tuple[TicketUse, ...]]:
    """Membership and tickets after this round. `reports` are admissible; their order does not matter.

    `training` is False for a round that only assembles members: nobody can miss it. `parts` an update may have at
    most: what there is no room for waits, and is told so when it asks again. Of trainers there are `trainers_most`:
    who is ready beyond these goes on observing until one is gone. `awaited`: who could miss the round, where not
    everybody who trains was drawn for it.
    """
    voters = [m.peer for m in parent.members if m.votes]
    budget = changes_max(len(voters))
    by_kind = sorted_reports(reports)
    leaving = {r.by for r in by_kind if isinstance(r.statement, LeaveReport)}
    accusers: dict[PeerId, set[PeerId]] = {}
    for r in by_kind:
        if isinstance(r.statement, SuspicionReport):
            accusers.setdefault(r.statement.peer, set()).add(r.by)
    need = suspicions_needed(len(voters), rule)
    lost = {p for p, who in accusers.items() if len(who) >= need and p not in contributors}
    liars, failing = convicted(by_kind, parent.members, rule)
    sent_away = {p for r in by_kind if isinstance(r.statement, RollbackOrder) for p in r.statement.sent_away}
    liars, budget = liars | sent_away, budget - len(sent_away.intersection(voters))
    ready = {r.by: r.statement.unaudited is True for r in by_kind if isinstance(r.statement, ReadyReport)}
    joins = [
        (r.identity, r.statement) for r in by_kind if isinstance(r.statement, JoinRequest) and r.by not in liars
    ]

    members: list[Member] = []
    places = trainers_most - sum(m.trains for m in parent.members)
    for m in parent.members:
        commit = commits.get(m.peer)
        counted = m.peer in contributors
        m = replace(
            m,
            step_s=commit.step_s if commit is not None and commit.step_s > 0 else m.step_s,
            offset_s=commit.offset_s if commit is not None else m.offset_s,
            links=commit.links if commit is not None and commit.links else m.links,
            missed=_missed(m, counted) if training and (awaited is None or m.peer in awaited) else m.missed,
            standing="member" if m.standing == "new" else m.standing,
        )
        if m.peer in sent_away:
            m = replace(m, standing="expelled")
        going = m.peer in leaving or m.peer in lost or m.peer in failing or m.peer in liars
        if going and m.present:
            changes_quorum = m.votes
            if not changes_quorum or (budget > 0 and _voters_left(parent, members, m.peer) > 0):
                budget -= changes_quorum
                m = replace(m, standing="expelled" if m.peer in liars else "away")
        elif m.peer in liars:
            m = replace(m, standing="expelled")
        members.append(m)
    for k, m in enumerate(members):  # behind all who go: no change of a device keeps a vote that is to end
        going = m.peer in leaving or m.peer in lost or m.peer in failing
        if m.peer in ready and not going and _changes(m, ready[m.peer]) and (places > 0 or m.trains):
            since = parent.round + 1 if m.trains else m.since  # what it said of its device before is settled
            changed = replace(m, standing="unaudited" if ready[m.peer] else "new", missed=0, since=since)
            turns = m.votes != changed.votes
            if not turns or (budget > 0 and (changed.votes or _voters_left(parent, members, m.peer) > 0)):
                budget, places = budget - turns, places - (not m.trains)
                members[k] = changed
    tickets = [t for t in parent.tickets if t.expires_s >= parent.time_s]
    invites = [r.statement for r in by_kind if isinstance(r.statement, TicketInvite)]
    room = signing.room_bytes - room_taken(members, tickets, parts, signing) if joins or invites else 0
    idle = _forgettable(members, {join.peer for _, join in joins}) if joins else []
    for identity, join in joins:
        held = _ticket_of(join.admission, parent.tickets)
        left = _ticket_of(join.admission, tickets)
        used_up = held is not None and (left is None or not left.uses_left)
        if used_up and needs_ticket(_named(members, join.peer), join):
            continue  # by another join of this vertex
        more = _more(_line_of(join, identity, "observer", parent.round + 1), members, parts, signing)
        lines = len(members) + 1 - PEERS_MAX if all(m.peer != join.peer for m in members) else 0
        gone = _giving_way(idle, more - room if more > 0 else 0, lines, parts, signing)
        if gone is None:
            continue
        if gone:
            members, idle = [m for m in members if m not in gone], idle[len(gone) :]
        members, tickets, budget = _let_in(members, tickets, join, identity, parent.round + 1, budget)
        room += sum(member_bytes(m, parts, signing) for m in gone) - more
    revoked = {i.ticket for i in invites if i.uses == 0}
    tickets = [replace(t, uses_left=0) if t.ticket in revoked else t for t in tickets]
    known = {t.ticket for t in parent.tickets}
    for i in invites:
        ticket = TicketUse(i.ticket, i.key, i.role, i.uses, i.expires_s)
        if i.uses and i.ticket not in known and len(tickets) < TICKETS_MAX and ticket_bytes(ticket) <= room:
            tickets.append(ticket)
            room -= ticket_bytes(ticket)
        known.add(i.ticket)  # of several for one ticket the first counts
    return tuple(_with_links(parent, members)), tuple(tickets)


def _with_links(parent: VertexBody, members: list[Member]) -> list[Member]:
    """What was said of links, for those who are here now: reports go by places among the present."""
    before = [m.peer for m in parent.members if m.present]
    after = [m.peer for m in members if m.present]
    if before == after:
        return members
    return [
        replace(m, links=rearranged(m.links, before, after) if m.present else b"") if m.links else m
        for m in members
    ]


def convicted(
    reports: Sequence[VerifiedReport], members: Sequence[Member], rule: QuorumRule
) -> tuple[set[PeerId], set[PeerId]]:
    """(liars, those that too many complain of) among `members`. Where these trust each other there is neither.

    Two statements for one slot prove themselves. All else takes more voices than may lie: one of them is honest.
    Auditors that were drawn speak of one round each; whom enough of them refute did not train as assigned, and whom
    enough got nothing from may only have crashed: it may come back, and is not sent away for the same round again.
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


def _missed(member: Member, counted: bool) -> int:
    return 0 if counted or not member.trains else min(member.missed + 1, MISSED_MAX)


def _let_in(
    members: list[Member], tickets: list[TicketUse], join: JoinRequest, identity: Digest, round: int, budget: int
) -> tuple[list[Member], list[TicketUse], int]:
    before = _named(members, join.peer)
    if before is not None and before.present and before.vote_key == join.vote_key:
        moved = replace(before, addresses=join.addresses, name=join.name)  # reachable elsewhere now, else the same
        return [moved if m.peer == join.peer else m for m in members], tickets, budget
    alone = before is not None and before.votes and sum(m.votes for m in members) == 1
    if before is not None and before.votes and not alone:
        if budget < 1:
            return members, tickets, budget  # it asks again for the next vertex
        budget -= 1  # a restarted voter steps back to observer: the quorum changes
    standing = "member" if alone else "observer"  # the last voter stays one, or nobody could let it in again
    fresh = _line_of(join, identity, standing, round)
    if before is not None and not needs_ticket(before, join):
        fresh = replace(fresh, role=before.role)  # an apprentice stays one
    members = [fresh if m.peer == join.peer else m for m in members] if before else [*members, fresh]
    if needs_ticket(before, join):
        tickets = [
            replace(t, uses_left=t.uses_left - 1) if t.ticket == redeemed_ticket(join.admission) else t
            for t in tickets
        ]
    return members, tickets, budget


def needs_ticket(before: Member | None, join: JoinRequest) -> bool:
    """Strangers do, and members that want another role than before."""
    return before is None or ("trainer" if before.role == "apprentice" else before.role) != join.role


def _named(members: Sequence[Member], peer: PeerId) -> Member | None:
    return next((m for m in members if m.peer == peer), None)


def _changes(member: Member, unaudited: bool) -> bool:
    """Its readiness gives this member another standing."""
    return member.standing == "observer" or (member.trains and unaudited != (member.standing == "unaudited"))


def _line_of(join: JoinRequest, identity: Digest, standing: Standing, round: int) -> Member:
    """Of the membership, for whoever joins."""
    return Member(
        join.peer, join.vote_key, join.addresses, join.role, standing, round, 0.0, join.name, identity=identity
    )


def _voters_left(parent: VertexBody, done: list[Member], going: PeerId) -> int:
    """Voters that would remain: the last one cannot be voted out, a run without voters cannot go on."""
    settled = {m.peer: m for m in done}
    return sum(settled.get(m.peer, m).votes for m in parent.members if m.peer != going)


def sorted_reports(reports: Sequence[VerifiedReport]) -> list[VerifiedReport]:
    """One order for everybody, whatever order the proposer heard them in; one report per kind, signer, target."""
    unique: dict[tuple[str, PeerId, str], VerifiedReport] = {}
    for r in reports:
        unique.setdefault((tag_of(r.statement), r.by, target_of(r.statement)), r)
    return [unique[key] for key in sorted(unique)]


def target_of(statement: AnyStatement) -> str:
    """What a report is about, where one signer may send several of a kind."""
    match statement:
        case SuspicionReport(peer=peer) | OwnerComplaint(peer=peer):
            return peer
        case Accusation(answer=answer, other=other):
            return f"{answer.signer}/{other is not None}"
        case AuditReport(round=round, peer=peer, opening=opening):
            return f"{round}/{peer}" if opening is UNSET else f"{round}/{peer}/{opening}"
        case ScoreReport(round=round, peer=peer) | RedundancyReport(round=round, peer=peer):
            return f"{round}/{peer}"
        case ValidationReport(round=round) | PiecesStored(round=round) | SkipRound(round=round):
            return str(round)
        case TicketInvite(ticket=ticket):
            return ticket.hex()
        case _:
            return ""
