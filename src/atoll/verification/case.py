"""What all audits have in common: one member is looked at, others say in signed reports what they found.

A finding counts when so many members have it that one of them is honest. Never asks anybody.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from msgspec import UNSET

from atoll.base.ids import Digest, PeerId
from atoll.policy.findings import AGAINST, REFUTING
from atoll.wire.messages.statements import AuditReport, Finding

CHANCES = 2**32
NOTHING: Mapping[PeerId, Finding] = {}


class VerificationCase(ABC):
    """One of them. Subclasses say whose turn it is."""

    round: int
    peer: PeerId  # who is looked at
    order: tuple[PeerId, ...]  # of those who may be asked, as drawn
    needed: int  # against it, to refute it
    said: dict[PeerId, tuple[int, Finding]]  # in the vertex of which round, what
    judged: dict[PeerId, Digest]  # which blob, by those who named one

    @abstractmethod
    def asked(self, head: int, ahead: Mapping[PeerId, Finding] = NOTHING) -> tuple[PeerId, ...]:
        """Who is to look, as of this round's vertex; `ahead`: and once the next one holds these words, too."""

    def hear(self, by: PeerId, word: AuditReport, round: int) -> None:
        """The vertex of this round holds it. The first word of an auditor counts."""
        if by in self.said:
            return
        self.said[by] = round, word.finding
        if word.exhibit is not UNSET:
            self.judged[by] = word.exhibit

    def repeats(self, by: PeerId, word: AuditReport) -> bool:
        """It is what this auditor said before, of the very same blob."""
        before = self.said.get(by)
        return before is not None and before[1] == word.finding and self.judged.get(by, UNSET) == word.exhibit

    def with_words(self, head: int, ahead: Mapping[PeerId, Finding]) -> dict[PeerId, tuple[int, Finding]]:
        """What was said, and what will be."""
        words: dict[PeerId, tuple[int, Finding]] = {peer: (head + 1, finding) for peer, finding in ahead.items()}
        return words | self.said

    @property
    def against(self) -> int:
        return sum(finding in AGAINST for _, finding in self.said.values())

    @property
    def outcome(self) -> str:
        """In one word for people: accepted, refuted, withheld, disputed, open."""
        findings = [finding for _, finding in self.said.values()]
        against = self.against
        if sum(f in REFUTING for f in findings) >= self.needed:
            return "refuted"
        if against >= self.needed:
            return "withheld"
        if findings.count("accepted") > against:
            return "accepted"
        return "disputed" if against else "open"
