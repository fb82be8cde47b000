"""Malformed rows at one peer: evidence that a committed row cannot be decoded (specs/evidence.md).

    owner    a committed row does not decode ─► BuildMalformedRowEvidence ─► `MalformedRowShown` to all voters,
             own `Accusation`
    voter    `MalformedRowShown` ─► JudgeMalformedRow ─► `Accusation`, if it cannot decode the row either

If a vertex holds more than f accusations, it expels the author: one accuser is honest, and tried to decode the row.
Invariants:
- A peer that shows anything but a malformed row is ignored from then on.
- The local peer judges one exhibit per author and sender at a time, few authors at once, and none once it knows.
- A commitment signed where the history may have had another branch is held against no member.
- Evidence stays on disk like the exhibits of audits.
- A round goes on without the row meanwhile.
Not responsible for: decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import Broadcast, Effect, Emit, Fact, RunTask, TaskDone, TaskFailed, tag_of
from atoll.crypto.digest import Buffer
from atoll.peer.events import MalformedRowDetected, MemberAccused, ProtocolFault
from atoll.peer.tasks import BuildMalformedRowEvidence, JudgeMalformedRow, MalformedRowJudged
from atoll.peer.verify.evidence_store import StoredEvidence
from atoll.peer.verify.interface import Verifier, VerifierContext, VerifierMachine
from atoll.policy.membership import RECENT
from atoll.verification.malformed_updates.messages import malformed_row_from_bytes
from atoll.verification.task_builder import keys_of, one_branch, row_work
from atoll.wire.codec import decode_statement, statement_in
from atoll.wire.messages.audits import MalformedRowShown
from atoll.wire.messages.statements import Accusation, Commitment, SignedStatement
from atoll.wire.messages.vertex import VertexBody

TOLD_MAX = 4  # vertices after which the owner shows its evidence again to voters that have not accused yet
AT_ONCE = 16  # authors judged at once from one sender: up to 128 KiB wait for each
Due = TypeVar("Due")  # `malformed_updates.tensors.ExpectedRow`, which this layer may not import
SHOW = "malformed/show/"
JUDGE = "malformed/judge/"


@dataclass
class AccusedRowAuthor:
    """A member that the local peer accused of a malformed row."""

    round: int
    shown: bytes = b""  # evidence to send; empty if another peer sent it
    told: int = 0


class MalformedUpdates(VerifierMachine):
    def __init__(self, context: VerifierContext) -> None:
        self.me, self.settings, self.history = context.me, context.settings, context.history
        self.pool, self.evidence = context.pool, context.evidence
        self.known: dict[PeerId, AccusedRowAuthor] = {}
        self.judging: dict[
            str, tuple[PeerId, SignedStatement]
        ] = {}  # by job: the sender, and the commitment to the row
        self.ignored: set[PeerId] = set()  # senders of false evidence

    def on_vertex(self, body: VertexBody, now: Seconds) -> list[Effect]:
        """Forget members that are out by this vertex; show the evidence again to voters that may have missed it."""
        history = self.history
        members = {m.peer: m for m in history.head_body.members}
        self.ignored &= members.keys()
        here = {p: k for p, k in self.known.items() if p in members and members[p].is_present}
        self.known = {p: k for p, k in here.items() if k.round > history.head - RECENT}
        effects: list[Effect] = []
        for peer, known in self.known.items():
            if known.shown and known.told < TOLD_MAX:
                said = {s.signer for s in self.pool.of_kind(tag_of(Accusation)) if _accused(s, peer)}
                known.told += 1
                effects += self._tell(peer, known.shown, said)
        return effects

    def on_malformed_row(self, sender: PeerId, shown: MalformedRowShown) -> list[Effect]:
        """Judge another peer's evidence. PeerFault if it is visibly false without decoding."""
        votes = {m.peer for m in self.history.head_body.members if m.votes}
        if not {sender, self.me} <= votes or sender in self.ignored:
            return []
        statement = malformed_row_from_bytes(shown.shown).statement
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
            return []  # the local peer is behind, or busy; the sender shows it again
        self.history.notary.open(statement, Commitment, key)  # first: it is the cheaper one
        work = row_work(commit, peer, self.history, self.settings)
        if work is None:
            return []
        self.judging[job] = sender, statement
        return [RunTask(job, replace(work, shown=shown.shown))]

    def on_task_done(self, event: TaskDone | TaskFailed, now: Seconds) -> list[Effect]:
        match event:
            case TaskDone(job, MalformedRowJudged() as looked) if job.startswith(SHOW):
                statement = looked.statement
                return self._found(statement, looked, mine=True) if statement is not None else []
            case TaskDone(job, MalformedRowJudged() as looked) if job in self.judging:
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

    def _found(self, statement: SignedStatement, looked: MalformedRowJudged, mine: bool) -> list[Effect]:
        peer, commit = statement.signer, decode_statement(statement.body, statement.signer)
        assert isinstance(commit, Commitment)
        held_to = self._lately(commit) and one_branch(commit.round, self.history)
        if not looked.why or peer in self.known or not held_to:
            return []
        self.known[peer] = AccusedRowAuthor(commit.round, looked.shown if mine else b"")
        word = Accusation(statement, None, UNSET if looked.blob is None else looked.blob)
        kept = [StoredEvidence(commit.round, peer, looked.blob)] if looked.blob is not None else []
        return [
            *self.evidence.keep(kept),
            _fact(MalformedRowDetected(peer=peer, of=commit.round, why=looked.why), commit.round),
            *(self._tell(peer, looked.shown) if mine and looked.shown else []),
            _fact(MemberAccused(peer=peer, statement=word), commit.round),
        ]

    def _lately(self, commit: Commitment) -> bool:
        return commit.round > self.history.head - RECENT

    def _tell(self, peer: PeerId, shown: bytes, but: Iterable[PeerId] = ()) -> list[Effect]:
        others = {m.peer for m in self.history.head_body.members if m.votes} - {self.me, peer, *but}
        return [Broadcast("reports", MalformedRowShown(shown), tuple(sorted(others)))]


MALFORMED_UPDATES = Verifier(
    "malformed",
    machine=lambda context: MalformedUpdates(context) if context.settings.round.quorum == "two-thirds" else None,
)


def inspect_malformed_row(
    work: BuildMalformedRowEvidence | JudgeMalformedRow,
    due: Callable[[int], Due],
    judge: Callable[[bytes, Callable[[int], Due]], str],
    show: Callable[[Buffer, SignedStatement, int, tuple[Digest, ...], Due], tuple[str, bytes]],
    put: Callable[[bytes], Digest],
) -> MalformedRowJudged:
    """The worker's result. `due`: the form of a row of a part; `put` stores the evidence.

    By `due`, `judge` and `show` (verification/malformed_updates/tensors.py) find the flaw, or raise PeerFault.
    """
    try:
        if isinstance(work, JudgeMalformedRow):
            statement, shown, why = None, work.shown, judge(work.shown, due)
        else:
            statement = work.statement
            why, shown = show(work.payload.data, statement, work.part, work.path, due(work.part))
    except PeerFault as fault:
        return MalformedRowJudged(fault=fault.what)
    if not why:
        return MalformedRowJudged(fault="it can be read")
    return MalformedRowJudged(why, "", statement, shown, put(shown) if shown else None)


def _accused(signed: SignedStatement, peer: PeerId) -> bool:
    said = statement_in(signed)
    return isinstance(said, Accusation) and said.answer.signer == peer


def _fact(fact: Fact, round: int) -> Emit:
    return Emit(replace(fact, round=round))
