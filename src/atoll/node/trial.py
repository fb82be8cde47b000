"""What a round holds while it is not agreed: the commitments it heard, what it says in
its own, and the bodies it checks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.wire.messages.statements import Amend, Answered, Commit, Signed, Statement
from atoll.wire.messages.vertex import Body


class Step(Statement, frozen=True):
    """What turns one shared state into the next: combined parts, and the counters of those who count."""

    parts: tuple[Digest | None, ...]
    steps: int  # of one worker, the longest: the position of the learning-rate schedule
    samples: int  # that all contributors learned from


@dataclass
class Trial:
    """A body that I am checking, or that is final and that I am catching up with."""

    raw: bytes
    body: Body
    answers: tuple[Answered | None, ...]
    step: Step
    back: Amend | None = None  # it goes back to an earlier state, which its parts then do not move
    final: bool = False
    state: Digest | None = None


@dataclass(frozen=True)
class Measured:
    """What a peer knows about itself and its links, for its next commitment."""

    offset_s: Seconds = 0.0  # of its clock from run time
    links: bytes = b""  # a report of policy/links


@dataclass
class Commits:
    """Commitments heard in one attempt."""

    of: dict[PeerId, tuple[Commit, Signed]] = field(default_factory=dict[PeerId, tuple[Commit, Signed]])
    giving: set[PeerId] = field(default_factory=set[PeerId])  # of those, the ones who have an update

    def hear(self, peer: PeerId, commit: Commit, signed: Signed) -> None:
        self.of[peer] = (commit, signed)
        if commit.parts > 0:
            self.giving.add(peer)
