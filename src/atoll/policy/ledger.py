"""Ledgers: what optional capabilities derive from agreed vertices, and which reports these make admissible.

A ledger is a pure fold over the history, with one step per vertex. A run has a ledger for each capability that its
genesis turns on. Every peer that holds the same vertices holds equal ledgers.

Invariants:
- A report type belongs to one ledger at most; a `CheckReport` belongs to the ledger of the check that it names.
  Without that ledger such a report is never admissible.
- The hooks of `CapabilityLedger` do nothing by default, so a new ledger overrides only those that it needs.
Not responsible for: measuring or judging anything, sending reports.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast

from atoll.base.ids import Digest, PeerId
from atoll.policy.reputation import NO_FINDINGS, WorkFindings
from atoll.wire.messages.statements import BaseStatement, CheckReport, Commitment, RollbackOrder, SealedDraw
from atoll.wire.messages.vertex import VertexBody

R = TypeVar("R", bound=BaseStatement)
L = TypeVar("L", bound="CapabilityLedger[Any]")


class RedundantTrainingDraw(Protocol):
    """A secret draw that gives some trainers of a round another member's samples."""

    def host(self, guest: PeerId, secret: bytes) -> PeerId | None:
        """The member that provides this trainer's samples; None: itself."""
        ...

    def seal(self, peer: PeerId, round: int, secret: Callable[[int], bytes]) -> SealedDraw:
        """The part of a trainer's commitment that binds its draws; `secret`: per round."""
        ...

    def flaw(self, peer: PeerId, commit: Commitment) -> str | None:
        """Flaw in that part of a commitment; None if there is none."""
        ...


class CapabilityLedger(ABC, Generic[R]):
    """The fold of one capability; `R` is the type of the reports that it judges."""

    report: ClassVar[type[BaseStatement]]
    check = ""  # of a ledger that judges `CheckReport`: the name in those reports
    duty: ClassVar[str]  # the senders' duty, as a refusal states it: "audit members"
    is_about_member = False  # the report names a `peer`, which must not be expelled

    @abstractmethod
    def follow(self, head: int, ids: Mapping[int, Digest], bodies: Mapping[int, VertexBody]) -> None:
        """Take in the vertices up to the head that are at hand and not yet taken in."""

    @abstractmethod
    def problem(self, by: PeerId, report: R) -> str | None:
        """The reason why this report may not stand in the next vertex; None if it may."""

    def problem_to_propose(self, by: PeerId, report: R) -> str | None:
        """The reason why the local peer must not propose an admissible report; None if it may."""
        del by, report
        return None

    def must_repeat(self, report: R) -> bool:
        """Whether every member repeats this carried report until enough agree."""
        del report
        return False

    def settled_outcomes(self) -> Iterable[str]:
        """The outcomes of the cases that the newest vertex settled, in one word each."""
        return ()

    def lose(self, round: int) -> None:
        """The vertex of this round is lost or damaged: what it and earlier ones drew is unknown."""

    def demanded(self, head: int) -> RollbackOrder | None:
        """The rollback that the vertex after this head must carry."""
        del head
        return None

    def findings(self, head: int) -> WorkFindings:
        """Findings about members' work that the vertex of this round settled; the next one changes reputations."""
        del head
        return NO_FINDINGS

    def sample_draw(self, head: Digest, body: VertexBody) -> RedundantTrainingDraw | None:
        """The draw of the round after this vertex."""
        del head, body
        return None


class LedgerSet:
    """The ledgers of one run, in a fixed order."""

    def __init__(self, ledgers: Iterable[CapabilityLedger[Any]] = ()) -> None:
        self._ledgers = {type(ledger): ledger for ledger in ledgers}
        self._by_report = {(ledger.report, ledger.check): ledger for ledger in self._ledgers.values()}

    def __iter__(self) -> Iterator[CapabilityLedger[Any]]:
        return iter(self._ledgers.values())

    def __len__(self) -> int:
        return len(self._ledgers)

    def find(self, kind: type[L]) -> L | None:
        """The ledger of this class, if the run has it."""
        return cast("L | None", self._ledgers.get(kind))

    def get(self, kind: type[L]) -> L:
        """The ledger of this class, which the run has."""
        return cast("L", self._ledgers[kind])

    def judge_of(self, report: BaseStatement) -> CapabilityLedger[Any] | None:
        """The ledger that judges reports of this type, and of this check."""
        return self._by_report.get((type(report), report.check if isinstance(report, CheckReport) else ""))

    def follow(self, head: int, ids: Mapping[int, Digest], bodies: Mapping[int, VertexBody]) -> None:
        for ledger in self:
            ledger.follow(head, ids, bodies)

    def lose(self, round: int) -> None:
        for ledger in self:
            ledger.lose(round)

    def demanded(self, head: int) -> RollbackOrder | None:
        """The rollback that a ledger demands of the vertex after this head."""
        return next((order for ledger in self if (order := ledger.demanded(head)) is not None), None)

    def findings(self, head: int) -> WorkFindings:
        """Findings about members' work, of all ledgers."""
        found = NO_FINDINGS
        for ledger in self:
            found |= ledger.findings(head)
        return found

    def sample_draw(self, head: Digest, body: VertexBody) -> RedundantTrainingDraw | None:
        """The draw of a round's samples, if a ledger has one."""
        return next((draw for ledger in self if (draw := ledger.sample_draw(head, body)) is not None), None)
