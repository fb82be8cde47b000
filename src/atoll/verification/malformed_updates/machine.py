"""Rows that cannot be read: one peer's side of finding out whose they are, and of telling it (specs/evidence.md).

    an owner    a committed row does not decode ─► Ask ShowRow ─► `MalformedRowShown` to all who vote, and my own
    `Accusation`
    a voter     `MalformedRowShown` ─► Ask JudgeRow ─► `Accusation`, if I cannot read it either

More than f such words are in a vertex, and its author is out by it: one of them is honest, and decoded the row.
Promises: whoever shows something else than it says is not listened to again; of one member only one thing at a time
is looked at that the same one shows, of few members at once, and nothing once I know; nothing is held against
anybody that was signed where the history may have had another branch. What shows it stays on disk as exhibits of
audits do. Never decodes, never waits: a round goes on without the row meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import Effect, Emit, Fact, RunTask, Send, TaskDone, TaskFailed, tag_of
from atoll.crypto.digest import Buffer
from atoll.peer.events import MalformedRow, MemberAccused, ProtocolFault
from atoll.peer.tasks import ExhibitRow, JudgeRow, RowJudged
from atoll.peer.verify.evidence_store import StoredEvidence
from atoll.peer.verify.interface import Verifier, VerifierContext, VerifierMachine
from atoll.policy.membership import RECENT
from atoll.verification.malformed_updates.messages import unreadable_from_bytes
from atoll.verification.task_builder import keys_of, one_branch, row_work
from atoll.wire.codec import decode_statement, statement_in
from atoll.wire.messages.audits import MalformedRowShown
from atoll.wire.messages.statements import Accusation, Commitment, SignedStatement
from atoll.wire.messages.vertex import VertexBody

TOLD_MAX = 4  # vertices after which I show again what I found, to those who have not said that they see it, too
AT_ONCE = 16  # members of whom I look at what the same one shows: up to 128 KiB of each wait for it
Due = TypeVar("Due")  # what a row has to be: `learn.unreadable.ExpectedRow`, which this floor does not see
SHOW = "unreadable/show/"
JUDGE = "unreadable/judge/"


@dataclass
class ReportedRow:
    """Somebody of whom I said that a row of its cannot be read."""

    round: int
    shown: bytes = b""  # what I have to show of it; nothing if others showed it to me
    told: int = 0


class MalformedUpdates(VerifierMachine):
    def __init__(self, context: VerifierContext) -> None:
        self.me, self.settings, self.history = context.me, context.settings, context.history
        self.pool, self.evidence = context.pool, context.evidence
        self.known: dict[PeerId, ReportedRow] = {}
        self.judging: dict[
            str, tuple[PeerId, SignedStatement]
        ] = {}  # by job: who showed it, under which commitment
        self.ignored: set[PeerId] = set()  # who showed what it is not

    def on_vertex(self, body: VertexBody, now: Seconds) -> list[Effect]:
        """The history has one vertex more: of who is out no more is said; else some may not have heard me."""
        history = self.history
        members = {m.peer: m for m in history.head_body.members}
        self.ignored &= members.keys()
        here = {p: k for p, k in self.known.items() if p in members and members[p].present}
        self.known = {p: k for p, k in here.items() if k.round > history.head - RECENT}
        effects: list[Effect] = []
        for peer, known in self.known.items():
            if known.shown and known.told < TOLD_MAX:
                said = {s.signer for s in self.pool.of_kind(tag_of(Accusation)) if _accused(s, peer)}
                known.told += 1
                effects += self._tell(peer, known.shown, said)
        return effects

    def on_malformed_row(self, sender: PeerId, shown: MalformedRowShown) -> list[Effect]:
        """PeerFault for what could be seen without decoding it."""
        votes = {m.peer for m in self.history.head_body.members if m.votes}
        if not {sender, self.me} <= votes or sender in self.ignored:
            return []
        statement = unreadable_from_bytes(shown.shown).statement
        peer, commit = statement.signer, decode_statement(statement.body, sender)
        known = {m.peer for m in self.history.head_body.members if m.standing != "expelled"} - self.known.keys()
        job = f"{JUDGE}{sender}/{peer}"
        if (
            not isinstance(commit, Commitment)
            or peer not in known
            or not self._lately(commit)
            or job in self.judging
        ):
            return []
        key = keys_of(commit.round, self.history).get(peer)
        if key is None or sum(by == sender for by, _ in self.judging.values()) >= AT_ONCE:
            return []  # I am behind, or busy; it is shown again
        self.history.notary.open(statement, Commitment, key)  # first: it is the cheaper one
        work = row_work(commit, peer, self.history, self.settings)
        if work is None:
            return []
        self.judging[job] = sender, statement
        return [RunTask(job, replace(work, shown=shown.shown))]

    def on_task_done(self, event: TaskDone | TaskFailed, now: Seconds) -> list[Effect]:
        match event:
            case TaskDone(job, RowJudged() as looked) if job.startswith(SHOW):
                statement = looked.statement
                return self._found(statement, looked, mine=True) if statement is not None else []
            case TaskDone(job, RowJudged() as looked) if job in self.judging:
                sender, statement = self.judging.pop(job)
                if looked.why:
                    return self._found(statement, looked, mine=False)
                self.ignored.add(sender)
                what = f"showed a row of {statement.signer} as if it could not be read: {looked.fault}"
                return [_fact(ProtocolFault(peer=sender, what=what), self.history.head)]
            case TaskFailed(job):
                self.judging.pop(job, None)
                return []
            case _:
                return []

    def _found(self, statement: SignedStatement, looked: RowJudged, mine: bool) -> list[Effect]:
        peer, commit = statement.signer, decode_statement(statement.body, statement.signer)
        assert isinstance(commit, Commitment)
        held_to = self._lately(commit) and one_branch(commit.round, self.history)
        if not looked.why or peer in self.known or not held_to:
            return []
        self.known[peer] = ReportedRow(commit.round, looked.shown if mine else b"")
        word = Accusation(statement, None, UNSET if looked.blob is None else looked.blob)
        kept = [StoredEvidence(commit.round, peer, looked.blob)] if looked.blob is not None else []
        return [
            *self.evidence.keep(kept),
            _fact(MalformedRow(peer=peer, of=commit.round, why=looked.why), commit.round),
            *(self._tell(peer, looked.shown) if mine and looked.shown else []),
            _fact(MemberAccused(peer=peer, statement=word), commit.round),
        ]

    def _lately(self, commit: Commitment) -> bool:
        return commit.round > self.history.head - RECENT

    def _tell(self, peer: PeerId, shown: bytes, but: Iterable[PeerId] = ()) -> list[Effect]:
        others = {m.peer for m in self.history.head_body.members if m.votes} - {self.me, peer, *but}
        return [Send(to, MalformedRowShown(shown)) for to in sorted(others)]


MALFORMED_UPDATES = Verifier(
    "unreadable",
    machine=lambda context: MalformedUpdates(context) if context.settings.round.quorum == "two-thirds" else None,
)


def row_looked(
    work: ExhibitRow | JudgeRow,
    due: Callable[[int], Due],
    judge: Callable[[bytes, Callable[[int], Due]], str],
    show: Callable[[Buffer, SignedStatement, int, tuple[Digest, ...], Due], tuple[str, bytes]],
    put: Callable[[bytes], Digest],
) -> RowJudged:
    """An island's answer. `due`: what a row of a part has to be; by that `judge` and `show` of
    verification/malformed_updates/tensors.py
    find out why one cannot be read, or raise PeerFault. `put` keeps what shows it."""
    try:
        if isinstance(work, JudgeRow):
            statement, shown, why = None, work.shown, judge(work.shown, due)
        else:
            statement = work.statement
            why, shown = show(work.payload.data, statement, work.part, work.path, due(work.part))
    except PeerFault as fault:
        return RowJudged(fault=fault.what)
    if not why:
        return RowJudged(fault="it can be read")
    return RowJudged(why, "", statement, shown, put(shown) if shown else None)


def _accused(signed: SignedStatement, peer: PeerId) -> bool:
    said = statement_in(signed)
    return isinstance(said, Accusation) and said.answer.signer == peer


def _fact(fact: Fact, round: int) -> Emit:
    return Emit(replace(fact, round=round))
