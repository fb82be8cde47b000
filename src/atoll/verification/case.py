"""A case: one member is checked, and the members that were drawn for it report their findings.

A finding counts if enough members share it that at least one of them is honest.
Not responsible for: sending requests.
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


class SpotCheck(ABC):
    """One audit or one opening; subclasses decide which auditors have their turn."""

    round: int
    peer: PeerId  # the checked member
    order: tuple[PeerId, ...]  # auditors, as drawn
    needed: int  # findings against it that refute it
    said: dict[PeerId, tuple[int, Finding]]  # auditor → round of the vertex, finding
    judged: dict[PeerId, Digest]  # auditor → blob that it judged, if it named one

    @abstractmethod
    def asked(self, head: int, ahead: Mapping[PeerId, Finding] = NOTHING) -> tuple[PeerId, ...]:
        """Auditors with a turn after this round's vertex, as if the next vertex held the findings `ahead`."""

    def hear(self, by: PeerId, word: AuditReport, round: int) -> None:
        """Take in a report from this round's vertex; the first report of an auditor counts."""
        if by in self.said:
            return
        self.said[by] = round, word.finding
        if word.exhibit is not UNSET:
            self.judged[by] = word.exhibit

    def repeats(self, by: PeerId, word: AuditReport) -> bool:
        """Whether this auditor reported the same finding of the same blob before."""
        before = self.said.get(by)
        return before is not None and before[1] == word.finding and self.judged.get(by, UNSET) == word.exhibit

    def with_words(self, head: int, ahead: Mapping[PeerId, Finding]) -> dict[PeerId, tuple[int, Finding]]:
        """Findings in vertices, and those that the next vertex would add."""
        words: dict[PeerId, tuple[int, Finding]] = {peer: (head + 1, finding) for peer, finding in ahead.items()}
        return words | self.said

    @property
    def against(self) -> int:
        return sum(finding in AGAINST for _, finding in self.said.values())

    @property
    def outcome(self) -> str:
        """Outcome for people: accepted, refuted, withheld, disputed or open."""
        findings = [finding for _, finding in self.said.values()]
        against = self.against
        if sum(f in REFUTING for f in findings) >= self.needed:
            return "refuted"
        if against >= self.needed:
            return "withheld"
        if findings.count("accepted") > against:
            return "accepted"
        return "disputed" if against else "open"
