"""Proposal builder: the local peer's vertex body, from its all-reduce of this attempt, the next state and reports.

Invariants:
- No commitment counts that was not received here; where members may lie none is awaited long.
Not responsible for: proposing, computing a state; the round does both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.peer.governance.orders import amend_of, amends_in, tunes_in
from atoll.peer.round.candidate import StateStep, named_in, step_of
from atoll.peer.round.commitments import CommitmentTable
from atoll.peer.round.context import RoundContext
from atoll.peer.round.state_transition import NextStateTasks
from atoll.peer.round.vertex_body import amend_among, write_body
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.statements import AgreedWeights, RollbackOrder, SignedStatement
from atoll.wire.messages.vertex import VertexBody

Parts = tuple[SignedStatement | None, ...]

ASKED_MOST = 3  # requests per missing commitment, one per tick; then a result that counts it is left out


class ProposalBuilder:
    def __init__(
        self,
        ground: RoundContext,
        notary: StatementSigner,
        committed: CommitmentTable,
        next_state: NextStateTasks,
        reports: Callable[[], Sequence[SignedStatement]],
    ) -> None:
        self.ground, self.notary = ground, notary
        self.committed, self.next_state, self.reports = committed, next_state, reports
        self.assembling = ground.topology is None
        self.attempt = 0
        self.parts: Parts | None = None  # None while the all-reduce runs
        self.weighing: AgreedWeights | None = None  # row weights, where distances weight rows
        self._step: StateStep | None = None
        self._asked = 0  # requests for commitments that others counted

    def attempt_begins(self, attempt: int) -> None:
        self.attempt, self._step, self._asked = attempt, None, 0
        self.parts = () if self.assembling else None

    def reduced(self, parts: Parts, weighing: AgreedWeights | None) -> None:
        """Record how the local all-reduce of this attempt ended."""
        self.parts, self.weighing, self._step = parts, weighing, None

    @property
    def ready(self) -> bool:
        """True if nothing is left to share."""
        return self.parts is not None

    @property
    def lacking(self) -> set[PeerId]:
        """Contributors of the local parts with no commitment received here."""
        return named_in(self.parts or ()) - self.committed.now.of.keys()

    @property
    def step(self) -> StateStep | None:
        """The state step of the local parts; None while a counted commitment is unknown."""
        if self.parts is None or self._step is not None:
            return self._step  # the first commitments count, so it does not change
        if self.lacking:
            return None  # it comes with a retransmission tick, or from a peer that can reach its author
        commits = self.committed.now.of
        counted = [commits[p][0] for p in sorted(named_in(self.parts))]
        self._step = step_of(self.parts, counted, self.ground.plan)
        return self._step

    def asked(self) -> None:
        """Note a round of requests for missing commitments, where members may lie.

        After the last one drop those results.

        A liar may count a commitment that does not exist. Waiting for it would leave the liar's body as the only
        one.
        """
        if self.parts is None or self.step is not None:
            return
        self._asked += 1
        if self._asked >= ASKED_MOST:
            known = self.committed.now.of.keys()
            self.parts = tuple(part if named_in((part,)) <= known else None for part in self.parts)

    def back(self, step: StateStep) -> tuple[SignedStatement, RollbackOrder] | None:
        """The rollback order for the next body: in even attempts only, and only if the earlier state is stored
        here.

        So a round in which too few others have that state ends normally in its second attempt. A round that waits
        for members, attempt after attempt, can still roll back.
        """
        if self.attempt % 2:
            return None
        found = amend_among(self.ground, self.notary, self.reports())
        return found if found is not None and not self.next_state.lacks(step, found[1]) else None

    def write(self, state: Digest, back: tuple[SignedStatement, RollbackOrder] | None, now: Seconds) -> VertexBody:
        """Write the body, once `step` and the `state` that it or the rollback leaves behind are known."""
        assert self.parts is not None
        reports = self.reports()
        if others := amends_in(reports):
            unwanted = {id(signed) for signed, _ in others}
            reports = [signed for signed in reports if id(signed) not in unwanted]
        if back is not None:  # settings are those of the earlier state
            unwanted = {id(signed) for signed, _ in tunes_in(reports)}
            reports = [signed for signed in reports if id(signed) not in unwanted]
            reports = [back[0], *reports]
        commits = {} if self.assembling else self.committed.now.of
        weighing = self.weighing if any(part is not None for part in self.parts) else None
        return write_body(
            self.ground,
            self.notary,
            self.attempt,
            self.parts,
            commits,
            reports,
            state=state,
            now=now,
            weighing=weighing,
        )

    def is_news(self, body: VertexBody) -> bool:
        """True if the body changes anything; a round that only assembles members may have nothing to propose."""
        parent = self.ground.parent
        return (
            not self.assembling
            or body.members != parent.members
            or body.tickets != parent.tickets
            or body.extensions != parent.extensions
            or body.data != parent.data
            or amend_of(body) is not None
            or body.paused != parent.paused
            or body.tuned != parent.tuned
        )
