"""Rows that cannot be read: one peer's side of finding out whose they are, and of telling it (specs/evidence.md).

    an owner    a committed row does not decode ─► Ask ShowRow ─► `Unreadable` to all who vote, and my own `Caught`
    a voter     `Unreadable` ─► Ask JudgeRow ─► `Caught`, if I cannot read it either

More than f such words are in a vertex, and its author is out by it: one of them is honest, and decoded the row.
Promises: whoever shows something else than it says is not listened to again; of one sender one thing at a time is
looked at, and nothing of whom I know about already; nothing is held against anybody that was signed where the
history may have had another branch. What shows it stays on disk as exhibits of audits do. Never decodes, never
waits: a round goes on without the row meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.ids import PeerId
from atoll.base.machine import Ask, Done, Effect, Fact, Failed, Report, Send
from atoll.node.facts import Accused, Fault, Unread
from atoll.node.jobs import RowLooked
from atoll.node.judging import one_branch, row_work
from atoll.node.kept_exhibits import KeptExhibit, KeptExhibits
from atoll.node.reports import ReportPool
from atoll.node.settings import RunSettings
from atoll.policy.members import RECENT
from atoll.protocol.dag.history import History
from atoll.wire.codec import statement_in
from atoll.wire.messages.audits import Unreadable
from atoll.wire.messages.statements import Caught, Commit, Signed
from atoll.wire.unreadable import unreadable_from_bytes

TOLD_MAX = 4  # vertices after which I show again what I found, to those who have not said that they see it, too
SHOW = "unreadable/show/"
JUDGE = "unreadable/judge/"


@dataclass
class Known:
    """Somebody of whom I said that a row of its cannot be read."""

    round: int
    shown: bytes = b""  # what I have to show of it; nothing if others showed it to me
    told: int = 0


class Unreadables:
    """Where members may lie. Effects go to the driver; `Accused` is to be told to the members."""

    def __init__(
        self, me: PeerId, settings: RunSettings, history: History, pool: ReportPool, kept: KeptExhibits
    ) -> None:
        self.me, self.settings, self.history, self.pool, self.kept = me, settings, history, pool, kept
        self.known: dict[PeerId, Known] = {}
        self.judging: dict[PeerId, Signed] = {}  # by who showed it: under which commitment
        self.ignored: set[PeerId] = set()  # who showed what it is not

    def grew(self) -> list[Effect]:
        """The history has one vertex more: of who is out no more is said; else some may not have heard me."""
        history = self.history
        members = {m.peer: m for m in history.head_body.members}
        self.ignored &= members.keys()
        here = {p: k for p, k in self.known.items() if p in members and members[p].present}
        self.known = {p: k for p, k in here.items() if k.round > history.head - RECENT}
        effects: list[Effect] = []
        for peer, known in self.known.items():
            if known.shown and known.told < TOLD_MAX:
                said = {s.signer for s in self.pool.of_kind(Caught.__name__) if _accused(s, peer)}
                known.told += 1
                effects += self._tell(peer, known.shown, said)
        return effects

    def hear(self, sender: PeerId, told: Unreadable) -> list[Effect]:
        """PeerFault for what could be seen without decoding it."""
        votes = {m.peer for m in self.history.head_body.members if m.votes}
        if not {sender, self.me} <= votes or sender in self.ignored or sender in self.judging:
            return []
        statement = unreadable_from_bytes(told.shown).statement
        peer = statement.signer
        if peer in self.known or peer == self.me:
            return []
        commit = self._opened(statement)
        work = row_work(commit, peer, self.history, self.settings)
        if work is None:
            return []  # I am behind, or it is out of date; it is shown again
        self.judging[sender] = statement
        return [Ask(f"{JUDGE}{sender}", replace(work, shown=told.shown))]

    def done(self, event: Done | Failed) -> list[Effect]:
        match event:
            case Done(job, RowLooked() as looked) if job.startswith(SHOW):
                statement = looked.statement
                return self._found(statement, looked, mine=True) if statement is not None else []
            case Done(job, RowLooked() as looked) if job.startswith(JUDGE):
                sender = PeerId(job.removeprefix(JUDGE))
                statement = self.judging.pop(sender, None)
                if statement is None:
                    return []
                if looked.why:
                    return self._found(statement, looked, mine=False)
                self.ignored.add(sender)
                what = f"showed a row of {statement.signer} as if it could not be read: {looked.fault}"
                return [_fact(Fault(peer=sender, what=what), self.history.head)]
            case Failed(job) if job.startswith(JUDGE):
                self.judging.pop(PeerId(job.removeprefix(JUDGE)), None)
                return []
            case _:
                return []

    def _found(self, statement: Signed, looked: RowLooked, mine: bool) -> list[Effect]:
        peer, commit = statement.signer, self._opened(statement)
        lately = commit.round > self.history.head - RECENT
        if not looked.why or peer in self.known or not lately or not one_branch(commit.round, self.history):
            return []
        self.known[peer] = Known(commit.round, looked.shown if mine else b"")
        word = Caught(statement, None, UNSET if looked.blob is None else looked.blob)
        kept = [KeptExhibit(commit.round, peer, looked.blob)] if looked.blob is not None else []
        return [
            *self.kept.keep(kept),
            _fact(Unread(peer=peer, of=commit.round, why=looked.why), commit.round),
            *(self._tell(peer, looked.shown) if mine and looked.shown else []),
            _fact(Accused(peer=peer, statement=word), commit.round),
        ]

    def _tell(self, peer: PeerId, shown: bytes, but: Iterable[PeerId] = ()) -> list[Effect]:
        others = {m.peer for m in self.history.head_body.members if m.votes} - {self.me, peer, *but}
        return [Send(to, Unreadable(shown)) for to in sorted(others)]

    def _opened(self, statement: Signed) -> Commit:
        """PeerFault unless its signer, a member, signed it."""
        keys = {m.peer: m.vote_key for m in self.history.head_body.members if m.standing != "expelled"}
        return self.history.notary.open(statement, Commit, keys.get(statement.signer))


def _accused(signed: Signed, peer: PeerId) -> bool:
    said = statement_in(signed)
    return isinstance(said, Caught) and said.answer.signer == peer


def _fact(fact: Fact, round: int) -> Report:
    return Report(replace(fact, round=round))
