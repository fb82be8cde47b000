"""Offline verification of a stored history, from its bytes alone.

The walk goes from genesis, or from a vertex that the reader trusts, to the newest vertex. Each vertex must follow
its parent. It must carry the votes of a quorum of the committee that the parent's membership implies, or the
recovery identity's signature. Its content must follow from the statements signed in it. These are the rules by
which peers accepted it (`protocol/history/chain.py`, `peer/round/vertex_body.py`), applied a second time.

Invariants:
- Every vertex is read. One cause is reported once, at its vertex, and not again at the children.
- A vertex that cannot be judged, since its parent is lost or damaged, is named.
- Memory holds a few hundred vertices at a time.
Not responsible for: repairing, contacting peers. The walk cannot see whether a state hash follows from the combined
parts: only voters that held those parts could recompute it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec
from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import ZERO_DIGEST, Digest, PeerId, names_of, one_line, short_id
from atoll.base.limits import SCORE_OPEN, VALIDATION_ROUNDS
from atoll.crypto.signer import SignatureVerifier
from atoll.peer.governance.orders import (
    Word,
    agrees,
    amend_of,
    authority_of,
    goal_of,
    may_follow,
    pauses_in,
    tunes_in,
)
from atoll.peer.governance.settings_change import numbers_in, plan_after, why_not
from atoll.peer.round.context import context_after
from atoll.peer.round.vertex_body import check_body, write_recovery
from atoll.peer.settings import RunSettings, settings_of_run
from atoll.peer.verify.eras import EraSignatureResult, EraSignatureVerifier
from atoll.peer.verify.interface import Verifier
from atoll.peer.verify.registry import ledgers_of
from atoll.policy.ledger import LedgerSet
from atoll.policy.membership import AMEND_ROUNDS, RECENT, Earlier, RecentVertices
from atoll.policy.plan import RoundPlan
from atoll.policy.reputation import scores_of
from atoll.protocol.history.chain import VertexChain, genesis_digest, is_too_old
from atoll.wire.codec import decode_body, decode_vertex, statement_in, vertex_id
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.statements import (
    ChangeSettings,
    Commitment,
    JoinRequest,
    ReadyReport,
    RollbackOrder,
)
from atoll.wire.messages.vertex import Vertex, VertexBody

FETCH_ANEW = "atoll join TICKET --dir NEW_FOLDER fetches the whole history again"
ASK_ANOTHER = "atoll verify on another member's folder says whether it is so there too"
ASK_OR_SIGN = f"{ASK_ANOTHER}; for members who are gone for good the founder can sign: atoll recover"
DISK = "this disk or a copy of this folder lost or changed bytes"
FORGED = "this history was rewritten, or the voters of that round broke the rules together"

KINDS = {  # kind: code, likely cause, next command
    "genesis": ("E-VER-01", "the folder was put together from two runs, or " + DISK, FETCH_ANEW),
    "unreadable": ("E-VER-02", DISK, FETCH_ANEW),
    "missing": ("E-VER-03", "rows were deleted, or " + DISK, FETCH_ANEW),
    "misplaced": ("E-VER-04", "rows of the database were exchanged", FETCH_ANEW),
    "body": ("E-VER-05", f"{DISK}, or it was changed after the vote", FETCH_ANEW),
    "certificate": ("E-VER-06", f"{DISK}, or no quorum ever agreed", FETCH_ANEW),
    "link": ("E-VER-07", "the vertex, or the one before it, is of another history", ASK_ANOTHER),
    "content": ("E-VER-08", FORGED, ASK_ANOTHER),
    "recovery": ("E-VER-09", "an epoch was begun without the founder's key", ASK_ANOTHER),
    "era": ("E-VER-15", f"members left or stopped before they signed, {DISK}, or {FORGED}", ASK_OR_SIGN),
    "verdict": (
        "E-VER-16",
        "auditors signed what they did not see, or this machine computes otherwise",
        ASK_ANOTHER,
    ),
    "trusted": ("E-VER-10", "this folder is of another history, or has not come so far", ASK_ANOTHER),
}


class HistoryProblem(msgspec.Struct, frozen=True):
    """One problem: place, likely cause and next command."""

    code: str
    kind: str
    round: int
    what: str
    cause: str
    fix: str


class MembershipDiff(msgspec.Struct, frozen=True):
    """Changes of the membership by this round."""

    round: int
    voters: int
    present: int
    joined: tuple[str, ...]
    left: tuple[str, ...]


class RollbackRecord(msgspec.Struct, frozen=True):
    """This round went back to the state of an earlier one."""

    round: int
    back_to: int
    state: str
    trained: int  # training rounds in that state
    by: Literal["recovery", "validators"] = "recovery"  # the identity's signature, or enough reports in vertices


class PauseRecord(msgspec.Struct, frozen=True):
    """From this round on the run paused or trained again, by an order of the recovery identity."""

    round: int
    paused: bool


class SettingsRecord(msgspec.Struct, frozen=True):
    """From this round on the run had other numbers, by an order of the recovery identity."""

    round: int
    to: dict[str, float]  # field of `ChangeableSettings` → new number


class HistoryBranchRecord(msgspec.Struct, frozen=True):
    """A second final vertex of this round, beside the judged one."""

    round: int
    vertex: str
    epoch: int
    recovered: bool  # by the recovery identity's signature; else a quorum voted for it
    voters: int  # number of voters after it


class ContributionTotals(msgspec.Struct):
    """One peer's contribution to the run, by the valid vertices."""

    name: str = ""
    rounds: int = 0
    steps: int = 0
    samples: int = 0
    late: int = 0  # those of `steps` that count as late


@dataclass(frozen=True)
class StoredHistory:
    """A history on a disk; `read(round)` is the vertex stored under that round, None if there is none."""

    run: bytes  # name of the run, from the folder
    genesis: bytes
    rounds: Sequence[int]
    read: Callable[[int], bytes | None]
    era: Callable[[int], bytes | None] = lambda round: None  # signatures under the era that ended with it
    pieces: bytes = (
        b""  # older states stored in pieces, as this peer last knew: `features/archive/machine.placed_rounds`
    )
    branch: Callable[[int], bytes | None] = lambda round: (
        None
    )  # another vertex of the round: `features/forks/detect`
    updates: Sequence[
        int
    ] = ()  # rounds with updates, or some of them, stored here: features/attribution/row_archive
    ticket: str = ""  # ticket with which this folder's peer founded or joined the run


@dataclass
class HistoryVerificationReport:
    """Result of the walk."""

    run: Digest
    settings: RunSettings = field(default_factory=RunSettings)
    head: int = -2  # the newest readable round; -1 is genesis, -2 nothing
    head_body: VertexBody | None = None
    vertices: int = 0  # readable, genesis not counted
    trained: dict[int, int] = field(default_factory=dict[int, int])  # trained rounds after each readable round
    problems: list[HistoryProblem] = field(default_factory=list[HistoryProblem])
    missing: list[int] = field(default_factory=list[int])  # rounds without a readable vertex
    unchecked: list[int] = field(default_factory=list[int])  # rounds with a missing or damaged parent
    recoveries: list[int] = field(default_factory=list[int])  # rounds that began an epoch without a quorum
    returns: list[RollbackRecord] = field(default_factory=list[RollbackRecord])
    pauses: list[PauseRecord] = field(default_factory=list[PauseRecord])
    tunes: list[SettingsRecord] = field(default_factory=list[SettingsRecord])
    branches: list[HistoryBranchRecord] = field(
        default_factory=list[HistoryBranchRecord]
    )  # other branches of the run, beside the judged one
    trusted: int = -1  # the walk began after this round; digests bind earlier rounds to it
    eras: list[EraSignatureResult] = field(default_factory=list[EraSignatureResult])
    members: list[MembershipDiff] = field(default_factory=list[MembershipDiff])
    outcomes: dict[str, Counter[str]] = field(default_factory=dict[str, Counter[str]])
    """Settled cases of each check that is on, by outcome."""
    shares: dict[PeerId, ContributionTotals] = field(default_factory=dict[PeerId, ContributionTotals])
    scores: dict[PeerId, int] = field(default_factory=dict[PeerId, int])  # at the head, where records are kept

    @property
    def intact(self) -> bool:
        return not self.problems

    def problem(self, kind: str, round: int, what: str) -> None:
        code, cause, fix = KINDS[kind]
        self.problems.append(HistoryProblem(code, kind, round, one_line(what), cause, fix))


class VerifiedVertexVisitor(Protocol):
    """A further fold over the vertices of a history, in the order of rounds."""

    def follow(
        self,
        body: VertexBody,
        before: VertexBody | None,
        history: VertexChain,
        ledgers: LedgerSet,
        genesis: RunSettings,
    ) -> None:
        """Take in a vertex without a flaw; history and ledgers have read it."""


def verify_history(
    kept: StoredHistory,
    verifier: SignatureVerifier,
    checks: Sequence[Verifier],
    trusted: Digest | None = None,
    observers: Sequence[VerifiedVertexVisitor] = (),
) -> HistoryVerificationReport:
    """Walk the whole history.

    `checks`: those that runs may turn on. `trusted`: the id of a vertex that the reader accepts unchecked.
    """
    audit = HistoryVerificationReport(Digest(kept.run))
    genesis = _genesis(kept, audit)
    if genesis is None:
        return audit
    if trusted is not None:
        found = _find(kept, genesis, trusted)
        if found is None:
            audit.problem("trusted", -1, f"vertex {short_id(trusted)}, which you trust, is not in this history")
            return audit
        audit.trusted = found
    ledgers = ledgers_of(checks, audit.settings)
    walk = _HistoryWalk(kept, audit, genesis, reading(audit.run, verifier), ledgers, observers)
    for round in range(max(kept.rounds, default=-1) + 1):
        walk.go(round)
    for era in walk.eras.overdue(audit.head):
        what = f"{era.signed} of {era.of} long-term keys signed the era that ended here, {era.needed} are needed"
        audit.problem("era", era.last, what)
    audit.eras = walk.eras.eras
    return audit


def _genesis(kept: StoredHistory, audit: HistoryVerificationReport) -> Vertex | None:
    """The genesis, if the run's name is its digest; without it nothing can be judged."""
    try:
        genesis = decode_vertex(kept.genesis)
        body = decode_body(genesis.body)
        named = genesis_digest(genesis)
        if named != kept.run:
            what = (
                f"genesis is {short_id(named)}, the run is named after {short_id(audit.run)}; nothing can be judged"
            )
            audit.problem("genesis", -1, what)
            return None
        if body.round != -1 or body.parent != ZERO_DIGEST or not any(m.votes for m in body.members):
            raise PeerFault("", "genesis has a parent, another round or no voting member")
        audit.settings = settings_of_run(body)
    except PeerFault as fault:
        audit.problem("unreadable", -1, f"genesis: {fault.what}; nothing can be judged")
        return None
    return genesis


def _find(kept: StoredHistory, genesis: Vertex, trusted: Digest) -> int | None:
    if genesis_digest(genesis) == trusted:
        return -1
    for round in kept.rounds:
        vertex, _ = _read(kept, round)
        if vertex is not None and vertex_id(vertex[0].body) == trusted:
            return round
    return None


def _read(kept: StoredHistory, round: int) -> tuple[tuple[Vertex, VertexBody] | None, str]:
    """The vertex stored under this round, or why there is none."""
    data = kept.read(round)
    if data is None:
        return None, ""
    try:
        vertex = decode_vertex(data)
        return (vertex, decode_body(vertex.body)), ""
    except PeerFault as fault:
        return None, fault.what


def _names_another(vertex: Vertex) -> bool:
    """Whether its certificate belongs to another body: one of the two was damaged."""
    return vertex.certificate is not None and vertex.certificate.digest != vertex_id(vertex.body)


class _HistoryWalk:
    """The walk from vertex to vertex. `sound`: no sign says that the head of `history` is not the agreed one."""

    def __init__(
        self,
        kept: StoredHistory,
        audit: HistoryVerificationReport,
        genesis: Vertex,
        notary: StatementSigner,
        ledgers: LedgerSet,
        observers: Sequence[VerifiedVertexVisitor],
    ) -> None:
        self.kept, self.audit, self.notary, self.ledgers, self.observers = kept, audit, notary, ledgers, observers
        self.plan: RoundPlan | None = None
        self.history = VertexChain(genesis, notary, self._voters_of, authority_of(audit.settings, notary.verifier))
        self.genesis = genesis, self.history.head_body
        self.eras = EraSignatureVerifier(kept.era, audit.settings, notary, self._voters_of, self.history.authority)
        self.eras.start(self.history.head_id, self.history.head_body)
        self.ledgers.follow(-1, self.history.ids, self.history.bodies)
        self.sound = True
        # newest round without a certain id or state; at first older than any round that a rule reads
        self.hole = -1 - VALIDATION_ROUNDS
        self._account(self.history.head_body, None)

    def go(self, round: int) -> None:
        found = self._fetch(round)
        if found is None:
            self.audit.missing.append(round)
            self._lose(round)
            self.eras.lost()
            return
        vertex, body = found
        before = self.history.head_body
        flaw = self._judge(vertex, body) if self.sound else self._look_alone(vertex)
        if not self.sound and round != self.audit.trusted:
            self.audit.unchecked.append(round)
        if flaw is not None:
            self.audit.problem(flaw[0], round, flaw[1])
        self._hold(vertex, body, flaw)
        if flaw is not None:
            return self.eras.lost()
        if self.sound and (other := self.kept.branch(round)) is not None:
            self._look_beside(round, other)
        self._account(body, before)
        for what in self.eras.go(self.history.head_id, body, round <= self.audit.trusted):
            self.audit.problem("era", round, what)

    def _fetch(self, round: int) -> tuple[Vertex, VertexBody] | None:
        found, why = _read(self.kept, round)
        if found is None:
            what = f"its vertex cannot be read: {why}" if why else "its vertex is not here"
            self.audit.problem("unreadable" if why else "missing", round, what)
            return None
        if found[1].round == round:
            return found
        elsewhere = found[1].round
        self.audit.problem("misplaced", round, f"the vertex of round {elsewhere} is kept in its place")
        other, _ = _read(self.kept, elsewhere)  # two files may have been exchanged
        return other if other is not None and other[1].round == round else None

    def _look_beside(self, round: int, data: bytes) -> None:
        """Judge the stored first vertex of another branch by the rules of history."""
        try:
            vertex = decode_vertex(data)
            body = self.history.check_other_branch(vertex)
        except PeerFault as fault:
            self.audit.problem("unreadable", round, f"the other branch that is kept beside it: {fault.what}")
            return
        if body is not None:
            voters = sum(m.votes for m in body.members)
            name, recovered = vertex_id(vertex.body).hex(), vertex.certificate is None
            self.audit.branches.append(HistoryBranchRecord(round, name, body.epoch, recovered, voters))

    # ---- judging one vertex ------------------------------------------------------------------------------

    def _judge(self, vertex: Vertex, body: VertexBody) -> tuple[str, str] | None:
        """(kind, flaw) of a vertex with a known parent; None if it is valid."""
        history, run = self.history, self.notary.run
        if body.run != run:
            return "link", f"it is of another run, {short_id(body.run)}"
        if body.parent != history.head_id:
            return (
                "link",
                f"it follows {short_id(body.parent)}, round {history.head} is {short_id(history.head_id)}",
            )
        if body.round <= self.audit.trusted:
            return self._look_alone(vertex)
        if not any(m.votes for m in history.head_body.members):
            return "link", "it follows a vertex that leaves no voter"
        if is_too_old(history.head_body, body.time_s):
            return "content", f"it is {history.head_body.time_s - body.time_s:.1f} s older than its parent"
        try:
            content = self._content_flaw(vertex, body)
        except PeerFault as fault:
            content = fault.what
        try:
            history.check(vertex, body)
        except PeerFault as fault:
            kind, what = self._why_no_certificate(vertex, body, fault)
            return kind, f"{what} ({content})" if content is not None else what
        return ("content", content) if content is not None else None

    def _look_alone(self, vertex: Vertex) -> tuple[str, str] | None:
        """(kind, flaw) as far as it shows without the parent: the certificate must name this body."""
        return ("body", "its body is not the one that its certificate names") if _names_another(vertex) else None

    def _content_flaw(self, vertex: Vertex, body: VertexBody) -> str | None:
        history, parent = self.history, self.history.head_body
        if vertex.certificate is None:
            here = {m.peer for m in body.members if m.votes}
            key = next((m.vote_key for m in body.members if m.peer == body.proposer), b"")
            named = parent, history.head_id, self.notary.run, body.proposer
            expected = replace(write_recovery(*named, here, body.time_s, key), time_s=body.time_s)
            return None if body == expected else "a recovery may change the members' standing and nothing else"
        plan = self._plan_after(history.head_id, parent)
        recent = RecentVertices(
            self._recent_states(body),
            self._may_follow,
            self._earlier,
            self.ledgers,
            history.rounds(),
            self._unfit,
            audited=bool(self.audit.settings.audited_share),
            authority=history.authority,
        )
        ground = context_after(self.audit.settings, plan, parent, recent, self.notary.run)
        if self.audit.settings.validated is not None and self.hole > history.head - VALIDATION_ROUNDS:
            ground = dataclasses.replace(ground, demanded=self._taken_at_its_word(body))
        if any(ledger.check for ledger in self.ledgers) and self.hole >= history.head - SCORE_OPEN:
            ground = dataclasses.replace(ground, has_lost_reports=True)
        flaw = check_body(ground, self.notary, body, body.time_s)
        return flaw.removeprefix("unknown peer: ") if flaw is not None else None  # it has no sender

    def _recent_states(self, body: VertexBody) -> dict[Digest, Digest]:
        """Recent vertices that joins and readiness name; a vertex lost or damaged here is accepted as named."""
        states = self.history.recent_states(RECENT)
        for signed in body.reports if self.hole > self.history.head - RECENT else ():
            match statement_in(signed):
                case ReadyReport(vertex, state):
                    states.setdefault(vertex, state)
                case JoinRequest(after=after):
                    states.setdefault(after, ZERO_DIGEST)
                case _:
                    pass
        return states

    def _taken_at_its_word(self, body: VertexBody) -> RollbackOrder | None:
        """The rollback that validators demanded, if their reports may be lost. Its target vertex is checked."""
        back = amend_of(body)
        return back if back is not None and not back.signature else None

    def _may_follow(self, word: Word) -> bool:
        """Whether the order may follow; shortly after a lost or damaged vertex every order may."""
        return may_follow(self.history, word) or self.hole > self.history.head - AMEND_ROUNDS

    def _unfit(self, word: ChangeSettings, parent: VertexBody) -> str:
        return why_not(self.audit.settings, parent, word.to)

    def _earlier(self, amend: RollbackOrder) -> Earlier:
        """The vertex that it names, from this folder; a lost or damaged one is reported elsewhere, once."""
        kept, _ = _read(self.kept, amend.round) if amend.round >= 0 else (self.genesis, "")
        if kept is None or kept[1].round != amend.round:
            return "same"
        certificate = kept[0].certificate
        if certificate is not None and certificate.digest == amend.back_to != vertex_id(kept[0].body):
            return "same"
        return agrees(amend, goal_of(kept[1], vertex_id(kept[0].body)))

    def _why_no_certificate(self, vertex: Vertex, body: VertexBody, fault: PeerFault) -> tuple[str, str]:
        """Which of body and certificate is damaged, as far as the votes show."""
        certificate, digest = vertex.certificate, vertex_id(vertex.body)
        if certificate is None:
            return "recovery", "neither a quorum nor the founder signed it"
        if body.epoch != self.history.head_body.epoch and certificate.digest == digest:
            return "recovery", fault.what
        keys, quorum = self._voters_of(self.history.head_id, self.history.head_body)
        if certificate.digest != digest and self.notary.certificate_holds(certificate, keys, quorum):
            return "body", f"its body is not the one that a quorum agreed on, {short_id(certificate.digest)}"
        round = self.history.head + 1
        meant = replace(certificate, round=round, stage="commit", digest=digest)
        if self.notary.certificate_holds(meant, keys, quorum):
            return "certificate", "a quorum signed this body, but its certificate says something else"
        return "certificate", f"{fault.what}: {self._votes(vertex, keys, quorum)}"

    def _votes(self, vertex: Vertex, keys: dict[PeerId, bytes], quorum: int) -> str:
        certificate = vertex.certificate
        assert certificate is not None
        good = sum(
            self.notary.certificate_holds(replace(certificate, votes=(vote,)), keys, 1)
            for vote in certificate.votes[: len(keys)]
        )
        return f"{good} of {len(certificate.votes)} votes hold, {quorum} of {len(keys)} voters are needed"

    # ---- going on ----------------------------------------------------------------------------------------

    def _hold(self, vertex: Vertex, body: VertexBody, flaw: tuple[str, str] | None) -> None:
        """Continue from this vertex, valid or not, so that later damage is found too."""
        self.history.restore(vertex)
        self.ledgers.follow(body.round, self.history.ids, self.history.bodies)
        for ledger in self.ledgers:
            if ledger.check:
                self.audit.outcomes.setdefault(ledger.check, Counter()).update(ledger.settled_outcomes())
        self.sound = True
        if flaw is not None and _names_another(vertex):
            self._lose(body.round)  # its children follow another body: all would be reported for it

    def _lose(self, round: int) -> None:
        self.sound, self.hole = False, round
        self.ledgers.lose(round)

    def _voters_of(self, head: Digest, body: VertexBody) -> tuple[dict[PeerId, bytes], int]:
        plan = self._plan_after(head, body)
        return plan.vote_keys, plan.quorum

    def _plan_after(self, head: Digest, body: VertexBody) -> RoundPlan:
        """The plan after this body; the last plan is cached, since content and votes need it in turn."""
        if self.plan is None or self.plan.head != head:
            self.plan = plan_after(self.audit.settings, head, body)
        return self.plan

    def _account(self, body: VertexBody, before: VertexBody | None) -> None:
        audit = self.audit
        audit.head, audit.head_body, audit.scores = body.round, body, scores_of(body)
        audit.vertices += body.round >= 0
        audit.trained[body.round] = body.trained
        if before is not None and body.epoch > before.epoch:
            audit.recoveries.append(body.round)
        if (back := amend_of(body)) is not None:
            by = "recovery" if back.signature else "validators"
            audit.returns.append(RollbackRecord(body.round, back.round, back.state.hex(), back.trained, by))
        audit.pauses += [PauseRecord(body.round, pause.paused) for _, pause in pauses_in(body.reports)]
        audit.tunes += [SettingsRecord(body.round, numbers_in(word.to)) for _, word in tunes_in(body.reports)]
        for m in body.members:
            audit.shares.setdefault(m.peer, ContributionTotals()).name = m.name
        for signed in body.commits:
            commit = statement_in(signed)
            if isinstance(commit, Commitment):
                share = audit.shares.setdefault(signed.signer, ContributionTotals())
                share.rounds, share.steps = share.rounds + 1, share.steps + commit.steps
                share.samples += commit.samples
                share.late += commit.late.steps if commit.late is not None else 0
        for observer in self.observers:
            observer.follow(body, before, self.history, self.ledgers, audit.settings)
        self._account_members(body, before)

    def _account_members(self, body: VertexBody, before: VertexBody | None) -> None:
        old = {m.peer: m for m in before.members if m.is_present} if before is not None else {}
        new = {m.peer: m for m in body.members if m.is_present}
        voters = sum(m.votes for m in new.values())
        if old.keys() == new.keys() and voters == sum(m.votes for m in old.values()):
            return
        names = names_of((m.peer, m.name) for m in (*(before.members if before is not None else ()), *body.members))
        joined = tuple(names[p] for p in new if p not in old)
        left = tuple(names[p] for p in old if p not in new)
        self.audit.members.append(MembershipDiff(body.round, voters, len(new), joined, left))


def reading(run: Digest, verifier: SignatureVerifier) -> StatementSigner:
    """A checker of signatures of this run that signs nothing."""
    return StatementSigner(run, _NOBODY, verifier)


class _ReadonlySigner:
    """A signer that refuses to sign."""

    peer = PeerId("")
    vote_key = b""
    certificate = b""

    def sign(self, data: bytes) -> bytes:
        raise AssertionError("a reader signs nothing")

    def secret(self, purpose: bytes) -> bytes:
        raise AssertionError("a reader has no secrets")


_NOBODY = _ReadonlySigner()
