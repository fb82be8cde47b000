"""The body that I would propose: how my own reduce of this attempt ended, what that makes of the state, and what
members report beside it.

Promises: no commitment is counted on that I have not heard; where members may lie none is waited for long. Never
proposes, and never computes a state: the round does, when the agreement lets it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.peer.governance.orders import amend_of, amends_in, tunes_in
from atoll.peer.round.candidate import StateStep, named_in, step_of
from atoll.peer.round.commitments import CommitmentTable
from atoll.peer.round.context import RoundContext
from atoll.peer.round.state_transition import StateTransition
from atoll.peer.round.vertex_body import amend_among, write_body
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.statements import AgreedWeights, RollbackOrder, SignedStatement
from atoll.wire.messages.vertex import VertexBody

Parts = tuple[SignedStatement | None, ...]

ASKED_MOST = 3  # times, with the nudge: then an answer that counts what I have not heard is left out


class ProposalBuilder:
    def __init__(
        self,
        ground: RoundContext,
        notary: StatementSigner,
        committed: CommitmentTable,
        next_state: StateTransition,
        reports: Callable[[], Sequence[SignedStatement]],
    ) -> None:
        self.ground, self.notary = ground, notary
        self.committed, self.next_state, self.reports = committed, next_state, reports
        self.assembling = ground.topology is None
        self.attempt = 0
        self.parts: Parts | None = None  # None: my reduce is under way
        self.weighing: AgreedWeights | None = None  # what its rows weigh, where distances weigh them
        self._step: StateStep | None = None
        self._asked = 0  # times for commitments that somebody else counted on

    def attempt_begins(self, attempt: int) -> None:
        self.attempt, self._step, self._asked = attempt, None, 0
        self.parts = () if self.assembling else None

    def reduced(self, parts: Parts, weighing: AgreedWeights | None) -> None:
        """My own reduce of this attempt ended like this."""
        self.parts, self.weighing, self._step = parts, weighing, None

    @property
    def ready(self) -> bool:
        """There is nothing left to share."""
        return self.parts is not None

    @property
    def lacking(self) -> set[PeerId]:
        """Who counts in my parts, and has committed to what I have not heard."""
        return named_in(self.parts or ()) - self.committed.now.of.keys()

    @property
    def step(self) -> StateStep | None:
        """What my parts make of the state; None while a counted commitment is unknown to me."""
        if self.parts is None or self._step is not None:
            return self._step  # the first commitments count, so it is still the same
        if self.lacking:
            return None  # it comes with the nudge, or from whoever hears its author where I do not
        commits = self.committed.now.of
        counted = [commits[p][0] for p in sorted(named_in(self.parts))]
        self._step = step_of(self.parts, counted, self.ground.plan)
        return self._step

    def asked(self) -> None:
        """All commitments that I lack were asked for again, where members may lie. What a liar counts may be none:
        if I waited for it, its own body would be the only one of this round."""
        if self.parts is None or self.step is not None:
            return
        self._asked += 1
        if self._asked >= ASKED_MOST:
            known = self.committed.now.of.keys()
            self.parts = tuple(part if named_in((part,)) <= known else None for part in self.parts)

    def back(self, step: StateStep) -> tuple[SignedStatement, RollbackOrder] | None:
        """The word to go back that my body shall carry. In every other attempt only, and only if I hold the state.

        So a round in which too few others hold it ends like any other, in its second attempt, without it; and one
        that waits for members, attempt after attempt, can still go back.
        """
        if self.attempt % 2:
            return None
        found = amend_among(self.ground, self.notary, self.reports())
        return found if found is not None and not self.next_state.lacks(step, found[1]) else None

    def write(self, state: Digest, back: tuple[SignedStatement, RollbackOrder] | None, now: Seconds) -> VertexBody:
        """Once `step` is known, and the `state` that it, or the way back, leaves behind."""
        assert self.parts is not None
        reports = self.reports()
        if others := amends_in(reports):
            unwanted = {id(signed) for signed, _ in others}
            reports = [signed for signed in reports if id(signed) not in unwanted]
        if back is not None:  # and numbers are those that held there
            unwanted = {id(signed) for signed, _ in tunes_in(reports)}
            reports = [signed for signed in reports if id(signed) not in unwanted]
            reports = [back[0], *reports]
        commits = {} if self.assembling else self.committed.now.of
        weighing = self.weighing if any(part is not None for part in self.parts) else None
        return write_body(
            self.ground, self.notary, self.attempt, self.parts, commits, reports, state, now, weighing
        )

    def is_news(self, body: VertexBody) -> bool:
        """In a round that only assembles the members there may be none."""
        parent = self.ground.parent
        return (
            not self.assembling
            or body.members != parent.members
            or body.tickets != parent.tickets
            or amend_of(body) is not None
            or body.paused != parent.paused
            or body.tuned != parent.tuned
        )
